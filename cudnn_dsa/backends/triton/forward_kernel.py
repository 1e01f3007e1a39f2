"""The forward kernel.

One program per (query, tile of BLOCK_H heads). It keeps Q and the fp32 output of its heads on chip and walks the
query's selected keys BLOCK_N at a time with an online softmax. For a tile of gathered keys K (V is its first D_V
columns), in base 2, with the running maximum m and the running sum l of a head:

    S = Q K^T * scale * log2(e)     m' = max(m, rowmax S)      P = exp2(S - m')
    l = l * exp2(m - m') + rowsum P      O = O * exp2(m - m') + P V

lse = (m + log2 l) ln 2 is over the keys alone; the sink enters once, at the end: out = O * exp2(m - Z) with
Z = logaddexp(lse, sink).

D is cut into parts of BLOCK_D columns and a rest, because tile sizes are powers of two: 576 = 512 + 64.
"""

# mypy: ignore-errors
# (The bodies are in Triton's language; only its spelling is Python's.)

import triton
import triton.language as tl

from cudnn_dsa.backends.triton.device import (
    LN_2,
    LOG2_E,
    load_indices,
    normaliser,
    part_columns,
    row_length,
    sum_scores,
    valid_range,
)


@triton.jit(do_not_specialize=("s_kv", "topk"))
def forward_kernel(
    q,
    kv,
    sink,
    topk_idxs,
    topk_length,
    out,
    lse,
    softmax_scale,
    s_kv,
    topk,
    H: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    HEAD_TILES: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    PARTS_V: tl.constexpr = D_V // BLOCK_D
    PARTS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D

    program = tl.program_id(0)
    query = (program // HEAD_TILES).to(tl.int64)
    heads = (program % HEAD_TILES) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_mask = heads < H
    head_rows = query * H + heads

    q_parts = ()
    acc_parts = ()
    for i in tl.static_range(PARTS):
        cols = part_columns(i, BLOCK_D, D)
        q_parts = q_parts + (tl.load(q + head_rows[:, None] * D + cols[None, :], mask=head_mask[:, None], other=0.0),)
        if i < PARTS_V:
            acc_parts = acc_parts + (tl.zeros((BLOCK_H, BLOCK_D), tl.float32),)
    m = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_H,), tl.float32)
    scale2 = softmax_scale * LOG2_E

    index_row = topk_idxs + query * topk
    first, end = valid_range(index_row, row_length(topk_length, query, topk), s_kv)
    for start in tl.range(first, end, BLOCK_N, disable_licm=True):
        rows, valid = load_indices(index_row, start + tl.arange(0, BLOCK_N), end, s_kv)
        if tl.max(valid.to(tl.int32)) > 0:
            # Masked rows are zero, whatever stands in row 0: 0 * inf would be NaN.
            k_parts = ()
            for i in tl.static_range(PARTS):
                cols = part_columns(i, BLOCK_D, D)
                k = tl.load(kv + rows[:, None] * D + cols[None, :], mask=valid[:, None], other=0.0)
                k_parts = k_parts + (k,)
            s = tl.dot(q_parts[0], k_parts[0].T)
            s, factor = sum_scores(s, q_parts, k_parts, scale2, PARTS)
            s = tl.where(valid[None, :], s * factor, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            m_used = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf would be NaN
            alpha = tl.exp2(m - m_used)
            p = tl.exp2(s - m_used[:, None])
            l = l * alpha + tl.sum(p, 1)
            m = m_new
            p = p.to(q.dtype.element_ty)
            new_parts = ()
            for i in tl.static_range(PARTS_V):
                new_parts = new_parts + (tl.dot(p, k_parts[i], acc_parts[i] * alpha[:, None]),)
            acc_parts = new_parts

    lse2 = tl.where(l > 0, m + tl.log2(l), float("-inf"))
    z, _ = normaliser(lse2, sink, heads, head_mask)
    # Z >= m, so this is at most 1; a row without a key has m = -inf, and 0 under any sink.
    share = tl.where(lse2 == float("-inf"), 0.0, tl.exp2(m - z))
    tl.store(lse + head_rows, lse2 * LN_2, mask=head_mask)
    for i in tl.static_range(PARTS_V):
        pointers = out + head_rows[:, None] * D_V + part_columns(i, BLOCK_D, D)[None, :]
        tl.store(pointers, (acc_parts[i] * share[:, None]).to(out.dtype.element_ty), mask=head_mask[:, None])
