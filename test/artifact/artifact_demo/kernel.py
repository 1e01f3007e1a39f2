"""A small kernel with one argument of each kind: scaled rows, by a TMA load and pointers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from artifact_demo.backend import COLUMNS, ROWS, SHARED, THREADS


class ScaleRows:
    """out (rows, 64) = scale * factor[:, None] * x + offset; out and factor are fp32; a block has a tile of 32 rows."""

    def __init__(self, dtype: type[cutlass.Numeric], cluster: int = 1) -> None:
        self.dtype = dtype
        self.cluster = cluster

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        factor: cute.Pointer,
        out: cute.Pointer,
        rows: cutlass.Int32,
        offset: cutlass.Int64,
        scale: cutlass.Float32,
    ):
        source = cute.make_tensor(x, cute.make_layout((rows, COLUMNS), stride=(COLUMNS, 1)))
        tile = cute.make_composed_layout(
            cute.make_swizzle(3, 4, 3), 0, cute.make_layout((ROWS, COLUMNS), stride=(COLUMNS, 1))
        )
        load, coordinates = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), source, tile, (ROWS, COLUMNS)
        )
        self.kernel(load, coordinates, factor, out, rows, offset, scale, tile).launch(
            grid=(cute.ceil_div(rows, ROWS * self.cluster) * self.cluster, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(self.cluster, 1, 1),
            smem=SHARED,
        )

    @cute.kernel
    def kernel(
        self,
        load: cute.CopyAtom,
        coordinates: cute.Tensor,
        factor: cute.Pointer,
        out: cute.Pointer,
        rows: cutlass.Int32,
        offset: cutlass.Int64,
        scale: cutlass.Float32,
        layout: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        allocator = cutlass.memory.SmemAllocator()
        tile = allocator.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
        barrier = allocator.allocate_array(cutlass.Int64, 1)
        shared, device = cpasync.tma_partition(
            load,
            0,
            cute.make_layout(1),
            cute.group_modes(tile, 0, 2),
            cute.group_modes(cute.local_tile(coordinates, (ROWS, COLUMNS), (block, 0)), 0, 2),
        )
        if tid == 0:
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if tid == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, cute.size_in_bytes(self.dtype, layout))
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            cute.copy(load, device, shared, tma_bar_ptr=barrier)
        cute.arch.mbarrier_wait(barrier, 0)
        result = cute.make_tensor(out, cute.make_layout((rows, COLUMNS), stride=(COLUMNS, 1)))
        factors = cute.make_tensor(factor, cute.make_layout(rows))
        i = tid
        while i < ROWS * COLUMNS:
            row, column = block * ROWS + i // COLUMNS, i % COLUMNS
            if row < rows:
                value = tile[i // COLUMNS, column].to(cutlass.Float32)
                result[row, column] = value * (factors[row] * scale) + offset.to(cutlass.Float32)
            i += THREADS


def host(dtype: str, cluster: int) -> ScaleRows:
    return ScaleRows({"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[dtype], cluster)
