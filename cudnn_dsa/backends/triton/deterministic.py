"""The sum over queries in a fixed order, and the sum of d_sink.

Floating-point atomics add in whatever order the programs run in. Instead, ``backward_kernel`` stores every row of dkv
that a query contributes to a slot of its own (``partials``), for as many queries at a time as the workspace holds, and
``fold_kernel`` adds them up key by key in the order of the queries. To find the contributions of a key without sorting
there are two tables, (S_kv, queries of the chunk), int32, zero where the query does not select the key:

- ``count``: how often the query lists the key;
- ``rank``: K minus the first slot that holds it.

``index_kernel`` fills them with integer atomics (add and max), whose result does not depend on their order. All slots
of one key in one row hold the same contribution, so it is taken from the first one, ``count`` times.
"""

import triton
import triton.language as tl

from cudnn_dsa.backends.triton.device import row_length


@triton.jit(do_not_specialize=("s_kv", "topk", "first_query", "queries"))
def index_kernel(
    topk_idxs,
    topk_length,
    count,
    rank,
    s_kv,
    topk,
    first_query,
    queries,
    BLOCK: tl.constexpr,
):
    """One program per query of the chunk."""
    i = tl.program_id(0)
    query = (first_query + i).to(tl.int64)
    length = row_length(topk_length, query, topk)
    for start in range(0, length, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        index = tl.load(topk_idxs + query * topk + slots, mask=slots < length, other=-1)
        valid = (index >= 0) & (index < s_kv)
        cell = tl.where(valid, index, 0).to(tl.int64) * queries + i
        tl.atomic_add(count + cell, 1, mask=valid, sem="relaxed")
        tl.atomic_max(rank + cell, topk - slots, mask=valid, sem="relaxed")


@triton.jit(do_not_specialize=("topk", "queries"))
def fold_kernel(
    partials,
    count,
    rank,
    dkv,
    topk,
    queries,
    D: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per key: dkv[key] += its contributions, queries in order, head tiles in order."""
    key = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    row = tl.load(dkv + key * D + cols, mask=mask, other=0.0)
    plane_size = topk.to(tl.int64) * D
    plane = partials + cols
    for i in range(queries):
        times = tl.load(count + key * queries + i)
        if times > 0:
            slot = (topk - tl.load(rank + key * queries + i)).to(tl.int64)
            for tile in tl.static_range(HEAD_TILES):
                row += times * tl.load(plane + tile * plane_size + slot * D, mask=mask, other=0.0)
        plane += HEAD_TILES * plane_size
    tl.store(dkv + key * D + cols, row, mask=mask)


@triton.jit(do_not_specialize=("s_q",))
def sink_kernel(terms, d_sink, s_q, H: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr):
    """d_sink[h] = sum_i terms[i, h], in an order that depends on S_q alone. One program per BLOCK_H heads."""
    heads = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros((BLOCK_Q, BLOCK_H), tl.float32)
    for start in range(0, s_q, BLOCK_Q):
        queries = start + tl.arange(0, BLOCK_Q)
        mask = (queries < s_q)[:, None] & (heads < H)[None, :]
        total += tl.load(terms + queries.to(tl.int64)[:, None] * H + heads[None, :], mask=mask, other=0.0)
    tl.store(d_sink + heads, tl.sum(total, 0), mask=heads < H)
