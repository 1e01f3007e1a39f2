"""The backward kernel.

One program per (query, tile of BLOCK_H heads). It keeps Q, dO and the fp32 dQ of its heads on chip and walks the
query's selected keys BLOCK_N at a time. For a tile of gathered keys K (V is its first D_V columns), in base 2:

    S  = Q K^T            (BLOCK_H x BLOCK_N)     P  = exp2(S * scale * log2(e) - Z)
    dP = dO V^T           (BLOCK_H x BLOCK_N)     dS = P * (dP - delta) * scale
    dQ += dS K            (BLOCK_H x D)
    dKV = [dO^T P, 0] + Q^T dS   (D x BLOCK_N)    added to the selected rows of dkv

dKV is computed transposed, D x BLOCK_N, because a matrix instruction wants at least 64 rows: D has them, a tile of 32
keys does not. The sum over queries is either fp32 atomics, or (PARTIALS) a store of every tile to a slot of its own,
which ``deterministic.py`` then folds in a fixed order.

The columns are cut into parts of BLOCK_D and a rest, since tile sizes are powers of two and D = 576 is none; a part is
also what of dKV is in registers at a time.

fp16. P and dS must be rounded to fp16 for the products, and dS may lie anywhere below 2**-24 or above 2**16 (a loss
scale of 2**16, or none). So the program carries a power of two, ``gain``, that keeps its largest |dS| so far in
[2**13, 2**14): dS * gain is what is rounded, values down to 2**-27 of the largest keep all their 11 bits, and the
accumulators are divided by the gain, exactly, when they leave. The gain only ever falls, when a larger |dS| comes
along; dQ is then rescaled like the output of an online softmax. P lies in [0, 1] and is lifted by 2**10.
"""

# mypy: ignore-errors
# (The bodies are in Triton's language; only its spelling is Python's.)

import triton
import triton.language as tl

from cudnn_dsa.backends.triton.device import (
    LOG2_E,
    load_indices,
    normaliser,
    part_columns,
    row_length,
    sum_scores,
    valid_range,
)

P_GAIN = tl.constexpr(1024.0)
GAIN_START = tl.constexpr(100)  # exponent of the gain before any dS was seen
GAIN_TARGET = tl.constexpr(13)  # exponent of the largest |dS| after the gain


@triton.jit(do_not_specialize=("s_kv", "topk", "first_query"))
def backward_kernel(
    q,
    kv,
    out,
    dout,
    lse,
    sink,
    topk_idxs,
    topk_length,
    delta,
    dq,
    dkv,
    sink_terms,
    softmax_scale,
    s_kv,
    topk,
    first_query,
    H: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    HEAD_TILES: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    PARTS_V: tl.constexpr = D_V // BLOCK_D
    PARTS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    FP16: tl.constexpr = q.dtype.element_ty == tl.float16
    element = q.dtype.element_ty

    program = tl.program_id(0)
    query = (first_query + program // HEAD_TILES).to(tl.int64)
    heads = (program % HEAD_TILES) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_mask = heads < H
    head_rows = query * H + heads

    # Q, dO: resident. Heads past H are zero rows and have Z = +inf, so their P and dS are zero.
    q_parts = ()
    do_parts = ()
    dq_parts = ()
    row_delta = tl.zeros((BLOCK_H,), tl.float32)
    for i in tl.static_range(PARTS):
        cols = part_columns(i, BLOCK_D, D)
        q_parts = q_parts + (tl.load(q + head_rows[:, None] * D + cols[None, :], mask=head_mask[:, None], other=0.0),)
        dq_parts = dq_parts + (tl.zeros((BLOCK_H, cols.shape[0]), tl.float32),)
        if i < PARTS_V:
            offsets = head_rows[:, None] * D_V + cols[None, :]
            do = tl.load(dout + offsets, mask=head_mask[:, None], other=0.0)
            do_parts = do_parts + (do,)
            if delta is None:
                o = tl.load(out + offsets, mask=head_mask[:, None], other=0.0)
                row_delta += tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if delta is not None:
        row_delta = tl.load(delta + head_rows, mask=head_mask, other=0.0)
    lse2 = tl.load(lse + head_rows, mask=head_mask, other=float("inf")) * LOG2_E
    z, sink2 = normaliser(lse2, sink, heads, head_mask)
    finite = (z < float("inf")) & (z > float("-inf"))

    index_row = topk_idxs + query * topk
    first, end = valid_range(index_row, row_length(topk_length, query, topk), s_kv)

    if sink_terms is not None:
        share = tl.where(finite & (end > 0), tl.exp2(sink2 - z), 0.0)
        term = tl.where(share > 0, -share * row_delta, 0.0)
        tl.store(sink_terms + head_rows, term, mask=head_mask)

    scale2 = softmax_scale * LOG2_E
    gain = tl.full((), GAIN_START, tl.int32)

    # disable_licm: hoisted out of the loop, the descriptors of some 180 matrix instructions would live in registers
    # and spill; with it the kernel runs 2.7 times as fast on an H200.
    for start in tl.range(first, end, BLOCK_N, disable_licm=True):
        slots = start + tl.arange(0, BLOCK_N)
        rows, valid = load_indices(index_row, slots, end, s_kv)
        if tl.max(valid.to(tl.int32)) > 0:
            # Masked rows are zero, whatever stands in row 0: 0 * inf would be NaN.
            k_parts = ()
            for i in tl.static_range(PARTS):
                cols = part_columns(i, BLOCK_D, D)
                k = tl.load(kv + rows[:, None] * D + cols[None, :], mask=valid[:, None], other=0.0)
                k_parts = k_parts + (k,)
            s = tl.dot(q_parts[0], k_parts[0].T)
            dp = tl.dot(do_parts[0], k_parts[0].T)
            s, factor = sum_scores(s, q_parts, k_parts, scale2, PARTS)
            for i in tl.static_range(1, PARTS_V):
                dp = tl.dot(do_parts[i], k_parts[i].T, dp)
            p = tl.where(valid[None, :] & finite[:, None], tl.exp2(s * factor - z[:, None]), 0.0)
            ds = tl.where(valid[None, :], p * (dp - row_delta[:, None]) * softmax_scale, 0.0)

            fall = 1.0
            if FP16:
                exponent = (tl.max(tl.abs(ds)).to(tl.int32, bitcast=True) >> 23) - 127
                new_gain = tl.minimum(gain, GAIN_TARGET - exponent)
                fall = power_of_two(new_gain - gain)
                gain = new_gain
                ds *= power_of_two(gain)
                p *= P_GAIN
            ds = ds.to(element)
            p = p.to(element)

            # dQ first: it is the last use of the keys, whose shared memory dkv then passes through.
            new_parts = ()
            for i in tl.static_range(PARTS):
                dq_part = dq_parts[i]
                if FP16:
                    dq_part *= fall
                new_parts = new_parts + (tl.dot(ds, k_parts[i], dq_part),)
            dq_parts = new_parts

            if PARTIALS:
                target = dkv + (program.to(tl.int64) * topk + slots) * D
            else:
                target = dkv + rows * D
            for i in tl.static_range(PARTS):
                if i < PARTS_V:
                    dkv_part = tl.dot(tl.trans(do_parts[i]), p)
                    if FP16:
                        dkv_part *= power_of_two(gain) / P_GAIN
                    dkv_part = tl.dot(tl.trans(q_parts[i]), ds, dkv_part)
                else:
                    dkv_part = tl.dot(tl.trans(q_parts[i]), ds)
                if FP16:
                    dkv_part *= power_of_two(-gain)
                pointers = target[None, :] + part_columns(i, BLOCK_D, D)[:, None]
                if PARTIALS:
                    tl.store(pointers, dkv_part, mask=valid[None, :])
                else:
                    tl.atomic_add(pointers, dkv_part, mask=valid[None, :], sem="relaxed")

    for i in tl.static_range(PARTS):
        dq_part = dq_parts[i]
        if FP16:
            dq_part *= power_of_two(-gain)
        pointers = dq + head_rows[:, None] * D + part_columns(i, BLOCK_D, D)[None, :]
        tl.store(pointers, dq_part.to(element), mask=head_mask[:, None])


@triton.jit
def power_of_two(exponent):
    """2.0**exponent, exact, for an int32 exponent; below the normal range 0, above it inf."""
    biased = tl.minimum(tl.maximum(exponent + 127, 0), 255)
    return (biased << 23).to(tl.float32, bitcast=True)
