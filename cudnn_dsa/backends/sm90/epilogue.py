"""Accumulators of 64 heads to rows of (S_q, H, columns)."""

# mypy: ignore-errors
# (Device code: the DSL stages it, and most of its types are the DSL's.)

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cudnn_dsa.cute import ptx, softmax


@cute.jit
def store_heads(
    acc: cute.Tensor, mma: cute.TiledMma, columns: cutlass.Constexpr[int], thread: Int32, target: cute.Pointer,
    query: Int32, head: Int32, heads: cutlass.Constexpr[int], row: cutlass.Constexpr[int],
    first: cutlass.Constexpr[int],
):  # fmt: skip
    """Store a (64, ``columns``) accumulator at columns [first, ...) of heads [head, head + 64) that exist.

    Args:
        target: (S_q, heads, row) of fp32, bf16 or fp16.
    """
    values = softmax.accumulator_rows(acc)
    place = softmax.accumulator_coordinates(mma.get_slice(thread), (64, columns))
    for r in cutlass.range_constexpr(2):
        mine = head + place[r, 0][0]
        if mine < heads:
            start = target + ((Int64(query) * heads + mine) * row + first + place[r, 0][1])
            for c in cutlass.range_constexpr(columns // 8):
                low, high = values[r, 2 * c], values[r, 2 * c + 1]
                if cutlass.const_expr(target.dtype is Float32):
                    (start + c * 8).store(low)
                    (start + c * 8 + 1).store(high)
                else:
                    words = cute.recast_ptr(start, dtype=Int32)
                    (words + c * 4).store(ptx.pack_halves(low, high, target.dtype))
