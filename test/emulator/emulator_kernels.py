"""CuTe DSL kernels that use one feature each, for the emulator's tests."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.experimental import primitives

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


@cute.kernel
def _gather_kernel(source: cute.Tensor, indices: cute.Tensor, target: cute.Tensor, rows: cutlass.Constexpr):
    tid, _, _ = cute.arch.thread_idx()
    width = cutlass.const_expr(source.shape[1])
    chunk = cutlass.const_expr(16 // (source.element_type.width // 8))
    allocator = cutlass.memory.SmemAllocator()
    tile = allocator.allocate_tensor(source.element_type, cute.make_layout((rows, width), stride=(width, 1)), 128)
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), source.element_type, num_bits_per_copy=128)
    i = tid
    while i < rows * (width // chunk):
        r, c = i // (width // chunk), i % (width // chunk)
        row = indices[r]
        if row >= 0:
            from_global = cute.local_tile(source, (1, chunk), (row, c))
            cute.copy(atom, from_global[0, None], cute.local_tile(tile, (1, chunk), (r, c))[0, None])
        else:
            for j in cutlass.range_constexpr(chunk):
                tile[r, c * chunk + j] = source.element_type(0.0)
        i += THREADS
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    i = tid
    while i < rows * width:  # read by other threads than those that copied
        c, r = i // rows, i % rows
        target[r, c] = tile[r, c]
        i += THREADS


@cute.jit
def gather(source: cute.Tensor, indices: cute.Tensor, target: cute.Tensor, rows: cutlass.Constexpr):
    """target[r] = source[indices[r]], or zeros where the index is negative, through cp.async."""
    _gather_kernel(source, indices, target, rows).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))


@cute.kernel
def _bulk_reduce_kernel(source: cute.Tensor, target: cute.Tensor, n: cutlass.Constexpr):
    tid, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    buffer = cutlass.Array(source.element_type, n, space=cutlass.AddressSpace.smem, alignment=128)
    i = tid
    while i < n:
        buffer[i] = source[block, i]
        i += THREADS
    cute.arch.fence_view_async_shared()
    cute.arch.sync_threads()
    if tid == 0:
        primitives.cp_reduce_async_bulk_global_shared_cta(
            target.iterator.raw_ptr(),
            buffer.data_ptr(),
            n * source.element_type.width // 8,
            op=primitives.CpReduceOp.ADD,
            type=primitives.CpReduceType.F32,
        )
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def bulk_reduce(source: cute.Tensor, target: cute.Tensor, n: cutlass.Constexpr, blocks: cutlass.Constexpr):
    """target += the sum of source's rows, a row a CTA, by cp.reduce.async.bulk."""
    _bulk_reduce_kernel(source, target, n).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1))


@cute.kernel
def _exchange_kernel(source: cute.Tensor, target: cute.Tensor, ctas: cutlass.Constexpr):
    tid, _, _ = cute.arch.thread_idx()
    rank = cute.arch.block_idx_in_cluster()
    mine = cutlass.Array(cutlass.Float32, THREADS, space=cutlass.AddressSpace.smem, alignment=128)
    mine[tid] = source[rank, tid]
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    total = cutlass.Float32(0.0)
    for peer in cutlass.range_constexpr(ctas):
        total += (primitives.mapa(mine.data_ptr(), peer) + (THREADS - 1 - tid)).load()
    target[rank, tid] = total
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def exchange(source: cute.Tensor, target: cute.Tensor, ctas: cutlass.Constexpr):
    """Every row of target = the reversed sum of source's rows, a row a CTA of one cluster, through shared memory."""
    _exchange_kernel(source, target, ctas).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), cluster=(ctas, 1, 1))


@cute.kernel
def _warp_mma_kernel(
    mma: cute.TiledMma,
    a: cute.Tensor,
    b: cute.Tensor,
    d: cute.Tensor,
    transposed: cutlass.Constexpr,
    m: cutlass.Constexpr,
    n: cutlass.Constexpr,
    k: cutlass.Constexpr,
):
    tid, _, _ = cute.arch.thread_idx()
    allocator = cutlass.memory.SmemAllocator()
    major_a = cute.make_layout((m, k), stride=(1, m) if transposed else (k, 1))
    major_b = cute.make_layout((n, k), stride=(1, n) if transposed else (k, 1))
    shared_a = allocator.allocate_tensor(a.element_type, major_a, 128)
    shared_b = allocator.allocate_tensor(b.element_type, major_b, 128)
    shared_d = allocator.allocate_tensor(d.element_type, cute.make_layout((m, n), stride=(n, 1)), 128)
    for source, shared in ((a, shared_a), (b, shared_b)):
        i = tid
        while i < cute.size(source):
            shared[i] = source[i]
            i += 32
    cute.arch.sync_threads()
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transposed, 4), a.element_type)
    copy_a, copy_b = cute.make_tiled_copy_A(atom, mma), cute.make_tiled_copy_B(atom, mma)
    part = mma.get_slice(tid)
    fragment_a = mma.make_fragment_A(part.partition_A(shared_a))
    fragment_b = mma.make_fragment_B(part.partition_B(shared_b))
    accumulator = cute.make_rmem_tensor(part.partition_C(d).shape, cutlass.Float32)
    accumulator.fill(0.0)
    cute.copy(copy_a, copy_a.get_slice(tid).partition_S(shared_a), copy_a.get_slice(tid).retile(fragment_a))
    cute.copy(copy_b, copy_b.get_slice(tid).partition_S(shared_b), copy_b.get_slice(tid).retile(fragment_b))
    for i in cutlass.range_constexpr(k // 16):
        cute.gemm(mma, accumulator, fragment_a[None, None, i], fragment_b[None, None, i], accumulator)
    rounded = cute.make_rmem_tensor(accumulator.shape, d.element_type)
    rounded.store(accumulator.load().to(d.element_type))
    store = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), d.element_type), mma)
    writer = store.get_slice(tid)
    cute.copy(store, writer.retile(rounded), writer.partition_D(shared_d))
    cute.arch.sync_threads()
    i = tid
    while i < m * n:
        d[i] = shared_d[i]
        i += 32


@cute.jit
def warp_mma(a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, transposed: cutlass.Constexpr):
    """d = a b^T by one warp: ldmatrix (of transposed tiles if asked for), mma.sync, stmatrix."""
    operation = warp.MmaF16BF16Op(a.element_type, cutlass.Float32, (16, 8, 16))
    mma = cute.make_tiled_mma(operation, cute.make_layout((1, 1, 1)), permutation_mnk=(16, 16, 16))
    m, k, n = a.shape[0], a.shape[1], b.shape[0]
    _warp_mma_kernel(mma, a, b, d, transposed, m, n, k).launch(grid=(1, 1, 1), block=(32, 1, 1))
