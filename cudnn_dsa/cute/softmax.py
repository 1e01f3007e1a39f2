"""The softmax of a backward pass, recomputed element by element in base 2.

With scale2 = softmax_scale * log2(e), s = q.k and Z2 = log2(e) * logaddexp(lse, sink):

    p  = 2 ** (s * scale2 - Z2)          ds = p * (dp - delta) * softmax_scale

Z2 = +inf stands for "nothing of this row counts": p and ds are then exact zeros.
"""

# mypy: ignore-errors
# (Device code: the DSL stages it, and most of its types are the DSL's.)

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from cudnn_dsa.cute import ptx

LOG2_E = math.log2(math.e)


def normaliser(lse2: Float32, sink2: Float32) -> Float32:
    """Z2 of a base-2 lse and a base-2 sink (-inf without one); +inf where Z2 is not finite.

    A sink whose product with log2(e) overflows arrives as an infinity. Infinities never meet in a difference.
    """
    high = cute.arch.fmax(lse2, sink2)
    gap = cute.arch.fmin(lse2, sink2) - high
    z2 = high + ptx.log2_approx(1.0 + ptx.exp2_approx(gap))
    return ptx.choose(ptx.is_finite(high), z2, Float32.inf)


def sink_share(sink2: Float32, z2: Float32) -> Float32:
    """What the sink takes of a row: 2 ** (sink2 - Z2), at most 1; 0 where nothing counts."""
    share = ptx.exp2_approx(ptx.min_nan(sink2 - z2, 0.0))
    return ptx.choose(z2 == Float32.inf, 0.0, share)


def probability(score: Float32, scale2: Float32, z2: Float32, valid: Boolean, ceiling=0.0) -> Float32:
    """p, exactly 0 where not ``valid``; times 2 ** ceiling, if that was taken off ``z2``.

    The exponent is cut off at ``ceiling``: Z2 bounds it up to rounding, but an lse that belongs to other tensors would
    not.
    """
    p = ptx.exp2_approx(ptx.min_nan(score * scale2 - z2, ceiling))
    return ptx.choose(valid, p, 0.0)


def score_gradient(p: Float32, dp: Float32, delta: Float32, scale: Float32, valid: Boolean) -> Float32:
    """ds, exactly 0 where not ``valid``."""
    return ptx.choose(valid, p * (dp - delta) * scale, 0.0)


def accumulator_coordinates(thr_mma: cute.ThrMma, shape: tuple[int, int]) -> cute.Tensor:
    """(row, column) of each accumulator element of a thread, shaped (rows, columns) of the thread."""
    return accumulator_rows(thr_mma.partition_C(cute.make_identity_tensor(shape)))


def accumulator_rows(acc: cute.Tensor) -> cute.Tensor:
    """A wgmma accumulator ((2, 2, N/8), M, N) as (its 2 M rows, its N/4 columns)."""
    (pair, rows, tiles), m, n = acc.layout.shape
    (pair_stride, row_stride, tile_stride), m_stride, n_stride = acc.layout.stride
    layout = cute.make_layout(
        ((rows, m), (pair, tiles, n)), stride=((row_stride, m_stride), (pair_stride, tile_stride, n_stride))
    )
    return cute.make_tensor(acc.iterator, layout)


def rounded(acc: cute.Tensor, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """A copy of fp32 values in the input type, rounded once."""
    result = cute.make_rmem_tensor(acc.layout, dtype)
    words = cute.recast_tensor(result, cutlass.Int32)
    for i in range(cute.size(words)):
        words[i] = ptx.pack_halves(acc[2 * i], acc[2 * i + 1], dtype)
    return result
