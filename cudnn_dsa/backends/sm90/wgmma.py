"""Warpgroup matrix products: operand views of swizzled shared memory, and products issued by one warpgroup."""

# mypy: ignore-errors
# (Device code: the DSL stages it, and most of its types are the DSL's.)

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode as Major
from cutlass.cute.nvgpu import warpgroup

ROWS = 64  # of a wgmma
CHUNK = 64  # columns of a 128-byte row of the swizzled layout


def tiled(dtype: type[cutlass.Numeric], columns: int, a_major: Major, b_major: Major) -> cute.TiledMma:
    """A 64 x ``columns`` product of one warpgroup, both operands in shared memory, fp32 accumulators."""
    op = warpgroup.MmaF16BF16Op(dtype, Float32, (ROWS, columns, 16), warpgroup.OperandSource.SMEM, a_major, b_major)
    return cute.make_tiled_mma(op)


def swizzled(dtype: type[cutlass.Numeric], rows: int, columns: int) -> cute.ComposedLayout:
    """Chunks of 64 columns one after the other, each ``rows`` x 128 bytes with the 128-byte swizzle."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, (rows, columns), order=(0, 1))


def blocks_of(tensor: cute.Tensor, first: int, columns: int, count: int, step: int) -> cute.Tensor:
    """``count`` blocks of a swizzled tensor, ``step`` columns apart, as (rows, columns, count); whole chunks."""
    rows = cute.size(tensor, mode=[0])
    block = swizzled(tensor.element_type, rows, columns).outer
    layout = cute.make_layout((*block.shape, count), stride=(*block.stride, rows * step))
    return cute.make_tensor(tensor.iterator + first * rows, layout)


def chunks_of(tensor: cute.Tensor) -> cute.Tensor:
    """A swizzled tensor as (rows, 64, chunks)."""
    return blocks_of(tensor, 0, CHUNK, cute.size(tensor, mode=[1]) // CHUNK, CHUNK)


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
    mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, span: cutlass.Constexpr[tuple],
    b_first, fresh: cutlass.Constexpr[bool],
):  # fmt: skip
    """``issue`` over chunks [first, end) = ``span`` of 64 columns of operands (.., .., .., chunks), in a loop.

    Those of B are counted from ``b_first`` on. Unrolled over 576 columns, the descriptors of Q and K were kept in
    registers and spilled.
    """
    atom = cute.make_mma_atom(mma.op)
    for chunk in cutlass.range(span[0], span[1], unroll=1):
        for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
            if cutlass.const_expr(fresh and k == 0):
                atom.set(warpgroup.Field.ACCUMULATE, chunk > span[0])
            else:
                atom.set(warpgroup.Field.ACCUMULATE, True)
            cute.gemm(atom, acc, a[None, None, k, chunk], b[None, None, k, b_first + chunk], acc)


# An accumulator that ordinary instructions have touched must be fenced before the next product that uses it.
fence = warpgroup.fence
commit = warpgroup.commit_group
wait = warpgroup.wait_group
