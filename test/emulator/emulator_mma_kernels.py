"""CuTe DSL kernels of one tensor-core tile each, for the emulator's tests: tcgen05.mma and wgmma.

Operands are copied element by element through the layouts that the DSL's helpers choose, so that a wrong reading of a
swizzle, a descriptor or a fragment cannot cancel out.
"""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05, warpgroup

THREADS = 128
COLUMNS = 512


@cute.jit
def _fill(shared: cute.Tensor, source: cute.Tensor, tid: cutlass.Int32):
    """shared = source, coordinate by coordinate; both have the same shape."""
    i = tid
    while i < cute.size(source):
        shared[i] = source[i]
        i += THREADS


@cute.kernel
def _umma_kernel(
    mma: cute.TiledMma,
    a: cute.Tensor,
    b: cute.Tensor,
    d: cute.Tensor,
    layout_a: cute.ComposedLayout,
    layout_b: cute.ComposedLayout,
    tile: cutlass.Constexpr,
    load: cutlass.Constexpr,
    store: cutlass.Constexpr,
):
    tid, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    pair = cutlass.const_expr(cute.size(mma.thr_id.shape) == 2)
    in_tmem = cutlass.const_expr(store is not None)
    allocator = cutlass.memory.SmemAllocator()
    done = allocator.allocate_array(cutlass.Int64, 1)
    holding = allocator.allocate_array(cutlass.Int32, 1)
    shared_a = allocator.allocate_tensor(a.element_type, layout_a.outer, byte_alignment=1024, swizzle=layout_a.inner)
    shared_b = allocator.allocate_tensor(b.element_type, layout_b.outer, byte_alignment=1024, swizzle=layout_b.inner)
    part = mma.get_slice(rank)
    part_a = part.partition_A(cute.local_tile(a, (tile[0], tile[2]), (0, 0)))
    part_b = part.partition_B(cute.local_tile(b, (tile[1], tile[2]), (0, 0)))
    part_d = part.partition_C(cute.local_tile(d, (tile[0], tile[1]), (0, 0)))
    if cutlass.const_expr(not in_tmem):
        _fill(shared_a[None, None, None, 0], part_a, tid)
    _fill(shared_b[None, None, None, 0], part_b, tid)
    if tid == 0:
        cute.arch.mbarrier_init(done, 1)
        cute.arch.mbarrier_init_fence()
    if warp == 0:
        cute.arch.alloc_tmem(COLUMNS, holding, is_two_cta=pair)
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=pair)
    cute.arch.fence_view_async_shared()
    cute.arch.sync_threads()
    tmem = cute.arch.retrieve_tmem_ptr(cutlass.Float32, alignment=16, ptr_to_buffer_holding_addr=holding)
    accumulator = mma.make_fragment_C(mma.partition_shape_C(tile[:2]))
    accumulator = cute.make_tensor(tmem, accumulator.layout)
    if cutlass.const_expr(in_tmem):  # A as pairs of 16-bit values, a row a lane, behind the accumulator
        rows = cute.make_layout(128, stride=1 << 16)
        if cutlass.const_expr(tile[0] == 64):
            rows = cute.make_layout((16, 4), stride=(1 << 16, 32 << 16))
        pairs = cute.make_tensor(tmem + 256, cute.append(rows, cute.make_layout(tile[2] // 2, stride=1)))
        pairs = cute.make_tensor(tmem + 256, cute.make_layout((rows.shape, tile[2] // 2), stride=(rows.stride, 1)))
        writer = tcgen05.make_tmem_copy(cute.make_copy_atom(store, cutlass.Float32), pairs).get_slice(tid)
        to = writer.partition_D(pairs)
        a_pairs = cute.recast_tensor(cute.local_tile(a, (tile[0], tile[2]), (0, 0)), cutlass.Float32)
        a_pairs = cute.make_tensor(
            a_pairs.iterator, cute.make_layout((rows.shape, tile[2] // 2), stride=_split(rows.shape, tile[2] // 2))
        )
        source = writer.partition_S(a_pairs)
        values = cute.make_rmem_tensor(source.shape, cutlass.Float32)
        cute.autovec_copy(source, values)
        cute.copy(writer, values, to)
        cute.arch.fence_view_async_tmem_store()
        cute.arch.sync_threads()
        fragment_a = mma.make_fragment_A(cute.make_tensor(tmem, layout_a.outer))
        fragment_a = cute.make_tensor(cute.recast_ptr(tmem + 256, dtype=a.element_type), fragment_a.layout)
    else:
        fragment_a = mma.make_fragment_A(shared_a)
    fragment_b = mma.make_fragment_B(shared_b)
    if cutlass.const_expr(pair):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    if rank == 0 and warp == 0:
        for k in cutlass.range_constexpr(cute.size(fragment_b, mode=[2])):
            mma.set(tcgen05.Field.ACCUMULATE, k != 0)
            cute.gemm(mma, accumulator, fragment_a[None, None, k, 0], fragment_b[None, None, k, 0], accumulator)
        with cute.arch.elect_one():
            if cutlass.const_expr(pair):
                tcgen05.commit(done, 3, tcgen05.CtaGroup.TWO)
            else:
                tcgen05.commit(done)
    cute.arch.mbarrier_wait(done, 0)
    reader = tcgen05.make_tmem_copy(cute.make_copy_atom(load, cutlass.Float32), accumulator[(None, None), 0, 0])
    reader = reader.get_slice(tid)
    source = reader.partition_S(accumulator[(None, None), 0, 0])
    to = reader.partition_D(part_d[(None, None), 0, 0])
    values = cute.make_rmem_tensor(to.shape, cutlass.Float32)
    cute.copy(reader, source, values)
    cute.arch.fence_view_async_tmem_load()
    cute.autovec_copy(values, to)
    cute.arch.sync_threads()
    if cutlass.const_expr(pair):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    if warp == 0:
        cute.arch.dealloc_tmem(tmem, COLUMNS, is_two_cta=pair)


def _split(rows, width):
    """Strides of a row-major matrix whose rows are split like ``rows``."""
    return ((width, 16 * width), 1) if isinstance(rows, tuple) else (width, 1)


def _major(name: str):
    return OperandMajorMode.K if name == "k" else OperandMajorMode.MN


@cute.jit
def umma(
    a: cute.Tensor,
    b: cute.Tensor,
    d: cute.Tensor,
    tile: cutlass.Constexpr,
    majors: cutlass.Constexpr,
    ctas: cutlass.Constexpr,
    load: cutlass.Constexpr,
    store: cutlass.Constexpr,
):
    """d = a b^T for one tile of (M, N, K), by tcgen05.mma; A from tensor memory if ``store`` is an operation."""
    mma = sm100.make_trivial_tiled_mma(
        a.element_type,
        b.element_type,
        _major(majors[0]),
        _major(majors[1]),
        cutlass.Float32,
        tcgen05.CtaGroup.TWO if cutlass.const_expr(ctas == 2) else tcgen05.CtaGroup.ONE,
        tile[:2],
        tcgen05.OperandSource.SMEM if cutlass.const_expr(store is None) else tcgen05.OperandSource.TMEM,
    )
    layout_a = sm100.make_smem_layout_a(mma, tile, a.element_type, 1)
    layout_b = sm100.make_smem_layout_b(mma, tile, b.element_type, 1)
    _umma_kernel(mma, a, b, d, layout_a, layout_b, tile, load, store).launch(
        grid=(ctas, 1, 1), block=(THREADS, 1, 1), cluster=(ctas, 1, 1)
    )


@cute.kernel
def _wgmma_kernel(
    mma: cute.TiledMma,
    a: cute.Tensor,
    b: cute.Tensor,
    d: cute.Tensor,
    layout_a: cute.ComposedLayout,
    layout_b: cute.ComposedLayout,
    tile: cutlass.Constexpr,
    in_registers: cutlass.Constexpr,
):
    tid, _, _ = cute.arch.thread_idx()
    allocator = cutlass.memory.SmemAllocator()
    shared_a = allocator.allocate_tensor(a.element_type, layout_a.outer, byte_alignment=1024, swizzle=layout_a.inner)
    shared_b = allocator.allocate_tensor(b.element_type, layout_b.outer, byte_alignment=1024, swizzle=layout_b.inner)
    part = mma.get_slice(tid)
    _fill(shared_a[None, None, 0], a, tid)
    _fill(shared_b[None, None, 0], b, tid)
    cute.arch.fence_view_async_shared()
    cute.arch.sync_threads()
    part_d = part.partition_C(d)
    accumulator = cute.make_rmem_tensor(part_d.shape, cutlass.Float32)
    fragment_b = mma.make_fragment_B(mma.get_slice(0).partition_B(shared_b))[None, None, None, 0]
    if cutlass.const_expr(in_registers):
        source = part.partition_A(a)
        fragment_a = cute.make_rmem_tensor(source.shape, a.element_type)
        for i in cutlass.range_constexpr(cute.size(source)):
            fragment_a[i] = source[i]
    else:
        fragment_a = mma.make_fragment_A(mma.get_slice(0).partition_A(shared_a))[None, None, None, 0]
    warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(fragment_b, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, k != 0)
        cute.gemm(mma, accumulator, fragment_a[None, None, k], fragment_b[None, None, k], accumulator)
    warpgroup.commit_group()
    warpgroup.wait_group(0)
    for i in cutlass.range_constexpr(cute.size(accumulator)):
        part_d[i] = accumulator[i]


@cute.jit
def wgmma(
    a: cute.Tensor,
    b: cute.Tensor,
    d: cute.Tensor,
    tile: cutlass.Constexpr,
    majors: cutlass.Constexpr,
    in_registers: cutlass.Constexpr,
):
    """d = a b^T for one tile of (64, N, K), by wgmma; A from registers or from shared memory."""
    mma = sm90.make_trivial_tiled_mma(
        a.element_type,
        b.element_type,
        _major(majors[0]),
        _major(majors[1]),
        cutlass.Float32,
        (1, 1, 1),
        (64, tile[1]),
        warpgroup.OperandSource.RMEM if cutlass.const_expr(in_registers) else warpgroup.OperandSource.SMEM,
    )
    row, column = cutlass.tensor_utils.LayoutEnum.ROW_MAJOR, cutlass.tensor_utils.LayoutEnum.COL_MAJOR
    layout_a = sm90.make_smem_layout_a(row if majors[0] == "k" else column, tile, a.element_type, 1)
    layout_b = sm90.make_smem_layout_b(row if majors[1] == "k" else column, tile, b.element_type, 1)
    _wgmma_kernel(mma, a, b, d, layout_a, layout_b, tile, in_registers).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))
