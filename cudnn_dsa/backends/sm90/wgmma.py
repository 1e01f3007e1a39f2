"""Warpgroup matrix products: operand views of swizzled shared memory, and products issued by one warpgroup."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warpgroup import OperandMajorMode as Major

ROWS = 64  # of a wgmma


def tiled(dtype: type[cutlass.Numeric], columns: int, a_major: Major, b_major: Major) -> cute.TiledMma:
    """A 64 x ``columns`` product of one warpgroup, both operands in shared memory, fp32 accumulators."""
    op = warpgroup.MmaF16BF16Op(
        dtype, Float32, (ROWS, columns, 16), warpgroup.OperandSource.SMEM, a_major, b_major
    )
    return cute.make_tiled_mma(op)


def swizzled(dtype: type[cutlass.Numeric], rows: int, columns: int) -> cute.ComposedLayout:
    """Chunks of 64 columns one after the other, each ``rows`` x 128 bytes with the 128-byte swizzle."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, (rows, columns), order=(0, 1))


def columns_of(tensor: cute.Tensor, first: int, columns: int) -> cute.Tensor:
    """Columns [first, first + columns) of a swizzled tensor; whole chunks."""
    rows = cute.size(tensor, mode=[0])
    return cute.make_tensor(
        tensor.iterator + first * rows, swizzled(tensor.element_type, rows, columns).outer
    )


def chunks_of(tensor: cute.Tensor) -> cute.Tensor:
    """A swizzled tensor as (rows, 64, chunks)."""
    rows, columns = cute.size(tensor, mode=[0]), cute.size(tensor, mode=[1])
    chunk = swizzled(tensor.element_type, rows, 64).outer
    layout = cute.make_layout(
        (*chunk.shape, columns // 64), stride=(*chunk.stride, rows * 64)
    )
    return cute.make_tensor(tensor.iterator, layout)


def transposed(tensor: cute.Tensor) -> cute.Tensor:
    """The first two modes swapped: the same memory read along the other dimension."""
    order = (1, 0, *range(2, cute.rank(tensor)))
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, list(order)))


def operands(mma: cute.TiledMma, thread, a: cute.Tensor, b: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    """Descriptors of A (64, K) and B (columns, K) in shared memory; further modes are kept."""
    thr = mma.get_slice(thread)
    return thr.make_fragment_A(thr.partition_A(a)), thr.make_fragment_B(thr.partition_B(b))


def accumulator(mma: cute.TiledMma, columns: int) -> cute.Tensor:
    return cute.make_rmem_tensor(mma.partition_shape_C((ROWS, columns)), Float32)


def issue(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, fresh: bool) -> None:
    """acc = A B^T (``fresh``), or acc += A B^T; asynchronous, the caller commits and waits."""
    atom = cute.make_mma_atom(mma.op)
    for k in range(cute.size(a, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, not (fresh and k == 0))
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)


@cute.jit
def issue_chunks(
    mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, chunks: cutlass.Constexpr[tuple],
    fresh: cutlass.Constexpr[bool],
):  # fmt: skip
    """``issue`` over chunks [first, end) of 64 columns of K-major operands (.., .., .., chunks), in a loop.

    Unrolled over 576 columns, the descriptors of Q and K were kept in registers and spilled.
    """
    atom = cute.make_mma_atom(mma.op)
    for chunk in cutlass.range(chunks[0], chunks[1], unroll=1):
        for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
            if cutlass.const_expr(fresh and k == 0):
                atom.set(warpgroup.Field.ACCUMULATE, chunk > chunks[0])
            else:
                atom.set(warpgroup.Field.ACCUMULATE, True)
            cute.gemm(atom, acc, a[None, None, k, chunk], b[None, None, k, chunk], acc)


# An accumulator that ordinary instructions have touched must be fenced before the next product that uses it.
fence = warpgroup.fence
commit = warpgroup.commit_group
wait = warpgroup.wait_group
