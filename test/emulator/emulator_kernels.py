"""CuTe DSL kernels that use one feature each, for the emulator's tests."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

THREADS = 128


@cute.kernel
def _tma_copy_kernel(
    load: cute.CopyAtom,
    source: cute.Tensor,
    store: cute.CopyAtom,
    target: cute.Tensor,
    plain: cute.Tensor,
    layout: cute.ComposedLayout,
    box: cutlass.Constexpr,
    reduce: cutlass.Constexpr,
):
    tid, _, _ = cute.arch.thread_idx()
    bx, by, _ = cute.arch.block_idx()
    allocator = cutlass.memory.SmemAllocator()
    barrier = allocator.allocate_array(cutlass.Int64, 1)
    tile = allocator.allocate_tensor(plain.element_type, layout.outer, byte_alignment=1024, swizzle=layout.inner)
    one = cute.make_layout(1)
    tile_2d = cute.group_modes(tile, 0, 2)
    to_shared, from_global = cpasync.tma_partition(
        load, 0, one, tile_2d, cute.group_modes(cute.local_tile(source, box, (bx, by)), 0, 2)
    )
    from_shared, to_global = cpasync.tma_partition(
        store, 0, one, tile_2d, cute.group_modes(cute.local_tile(target, box, (bx, by)), 0, 2)
    )
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if tid == 0:
        cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if tid == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, cute.size_in_bytes(plain.element_type, layout))
    if warp == 0:
        cute.copy(load, from_global, to_shared, tma_bar_ptr=barrier)
    cute.arch.mbarrier_wait(barrier, 0)
    # element by element through the swizzled layout
    view = cute.local_tile(plain, box, (bx, by))
    i = tid
    while i < box[0] * box[1]:
        r, c = i // box[1], i % box[1]
        view[r, c] = tile[r, c]
        i += THREADS
    # and back as a tile, after a change by every thread
    cute.arch.sync_threads()
    i = tid
    while i < box[0] * box[1]:
        r, c = i // box[1], i % box[1]
        tile[r, c] = tile[r, c] + tile[r, c]
        i += THREADS
    cute.arch.fence_view_async_shared()
    cute.arch.sync_threads()
    if warp == 0:
        cute.copy(store, from_shared, to_global)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def tma_copy(
    source: cute.Tensor,
    target: cute.Tensor,
    plain: cute.Tensor,
    box: cutlass.Constexpr,
    swizzle: cutlass.Constexpr,
    reduce: cutlass.Constexpr,
    grid: cutlass.Constexpr,
):
    """plain = source through shared memory element by element; target (+)= 2 source through a tile store."""
    layout = cute.make_composed_layout(cute.make_swizzle(*swizzle), 0, cute.make_layout(box, stride=(box[1], 1)))
    load, source_map = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), source, layout, box)
    operation = (
        cpasync.CopyReduceBulkTensorTileS2GOp() if cutlass.const_expr(reduce) else cpasync.CopyBulkTensorTileS2GOp()
    )
    store, target_map = cpasync.make_tiled_tma_atom(operation, target, layout, box)
    _tma_copy_kernel(load, source_map, store, target_map, plain, layout, box, reduce).launch(
        grid=grid, block=(THREADS, 1, 1)
    )


@cute.kernel
def _double_kernel(a: cute.Tensor, b: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + tid
    b[i] = a[i] + a[i]


@cute.jit
def double(a: cute.Tensor, b: cute.Tensor, blocks: cutlass.Constexpr):
    """b = 2 a on the first ``blocks * THREADS`` elements, whether they exist or not."""
    _double_kernel(a, b).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1))
