"""Device functions that the kernels share: which keys of a row count, and the softmax normaliser.

All exponents are in base 2: scores carry a factor log2(e), so that the hardware's exp2 needs no multiplication.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
SCAN = tl.constexpr(1024)  # entries of an index row looked at in one step of ``valid_range``


@triton.jit
def row_length(topk_length, query, topk):
    """How many leading entries of the query's index row count: topk_length clamped to [0, K], or K without it."""
    length = topk
    if topk_length is not None:
        length = tl.minimum(tl.maximum(tl.load(topk_length + query), 0), topk)
    return length


@triton.jit
def valid_range(index_row, length, s_kv):
    """The slots [first, end) between the first and the last entry that counts; (0, 0) if none does.

    Padding stands in front of or behind the real entries in practice, and costs nothing outside this range.
    """
    first, end = length, length * 0
    for start in range(0, length, SCAN):
        slots = start + tl.arange(0, SCAN)
        index = tl.load(index_row + slots, mask=slots < length, other=-1)
        valid = (index >= 0) & (index < s_kv)
        first = tl.minimum(first, tl.min(tl.where(valid, slots, length)))
        end = tl.maximum(end, tl.max(tl.where(valid, slots + 1, 0)))
    return tl.minimum(first, end), end


@triton.jit
def load_indices(index_row, slots, end, s_kv):
    """Rows of kv (int64, 0 where the entry does not count) and which entries count."""
    index = tl.load(index_row + slots, mask=slots < end, other=-1)
    valid = (index >= 0) & (index < s_kv)
    return tl.where(valid, index, 0).to(tl.int64), valid


@triton.jit
def normaliser(lse2, sink, heads, head_mask):
    """Z = logaddexp(lse, sink) in base 2, for a base-2 lse; and the sink in base 2 (-inf without one).

    A sink whose product with log2(e) overflows is infinite. Infinite arguments never meet in a difference: where the
    larger is infinite it is the answer.
    """
    sink2 = tl.full(lse2.shape, float("-inf"), tl.float32)
    if sink is not None:
        sink2 = tl.load(sink + heads, mask=head_mask, other=float("-inf")) * LOG2_E
    high = tl.maximum(lse2, sink2)
    gap = tl.minimum(lse2, sink2) - high
    gap = tl.where((high == float("inf")) | (high == float("-inf")), float("-inf"), gap)
    return high + tl.log2(1.0 + tl.exp2(gap)), sink2


@triton.jit
def part_columns(i: tl.constexpr, BLOCK_D: tl.constexpr, D: tl.constexpr):
    """Columns of part i of a row: BLOCK_D of them, or what is left of D."""
    return i * BLOCK_D + tl.arange(0, min(BLOCK_D, D - i * BLOCK_D))


@triton.jit
def sum_scores(s, q_parts, k_parts, scale2, PARTS: tl.constexpr):
    """(S, factor): Q K^T * scale2 = S * factor, fp32, from the product ``s`` of the first parts and the other parts.

    Matrix units cut the sum off after every 16 terms, instead of rounding it: over 576 terms and at |s| = 200 that
    makes 2e-4 of P, next to nothing for bf16 but as much as fp16 rounds by. For fp16 each part is summed from zero and
    the parts are added by ordinary instructions; they are scaled first, or the compiler would join the sums again.
    """
    factor = scale2
    if q_parts[0].dtype == tl.float16:
        s *= scale2
        factor = 1.0
        for i in tl.static_range(1, PARTS):
            s += tl.dot(q_parts[i], k_parts[i].T) * scale2
    else:
        for i in tl.static_range(1, PARTS):
            s = tl.dot(q_parts[i], k_parts[i].T, s)
    return s, factor
