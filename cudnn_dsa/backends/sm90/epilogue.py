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
    # Of eight columns a lane of four holds two. Four lanes turn four times eight columns between them, so that each
    # has eight in a row and stores 16 bytes of 16-bit values.
    values = softmax.accumulator_rows(acc)
    lane = cute.arch.lane_idx() % 4
    place = softmax.accumulator_coordinates(mma.get_slice(thread), (64, columns))
    for r in cutlass.range_constexpr(2):
        mine = head + place[r, 0][0]
        if mine < heads:
            start = target + ((Int64(query) * heads + mine) * row + first)
            if cutlass.const_expr(target.dtype is Float32):
                for c in cutlass.range_constexpr(columns // 8):
                    (start + c * 8 + lane * 2).store(values[r, 2 * c])
                    (start + c * 8 + lane * 2 + 1).store(values[r, 2 * c + 1])
        if cutlass.const_expr(target.dtype is not Float32):
            for c in cutlass.range_constexpr(0, columns // 8, 4):
                words = [
                    ptx.pack_halves(values[r, 2 * (c + i)], values[r, 2 * (c + i) + 1], target.dtype) for i in range(4)
                ]
                words = _transposed(words, lane)
                if mine < heads:
                    line = target + ((Int64(query) * heads + mine) * row + first + (c + lane) * 8)
                    ptx.store_v4(line, words)


def _transposed(words: "list[Int32]", lane: Int32) -> "list[Int32]":
    """Of a matrix of which lane i of four holds row i: column i."""
    for bit in (1, 2):
        high = (lane & bit) != 0
        swapped = list(words)
        for j in range(4):
            if not j & bit:
                low, up = words[j], words[j | bit]
                got = cute.arch.shuffle_sync_bfly(ptx.choose_word(high, low, up), offset=bit)
                swapped[j] = ptx.choose_word(high, got, low)
                swapped[j | bit] = ptx.choose_word(high, up, got)
        words = swapped
    return words
