"""Which keys of a query count: validity, lengths, and tiles of valid rows only.

An entry of topk_idxs counts if it lies in [0, S_kv) and before topk_length. ``feed_rows`` packs the entries that count
into tiles, in their order, so that every tile but the last is full, and tiles without a valid key do not exist.
"""

# mypy: ignore-errors
# (Device code: the DSL stages it, and most of its types are the DSL's.)

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cudnn_dsa.cute.ring import Ring

WARP = 32
NO_ROW = -1


@cute.jit
def row_length(topk_length, query: Int32, topk: Int32) -> Int32:
    """Leading entries of the query's index row that count: topk_length clamped to [0, K], or K without it (None)."""
    length = topk
    if cutlass.const_expr(topk_length is not None):
        length = cutlass.max(cutlass.min((topk_length + query).load(), topk), 0)
    return length


@cute.jit
def load_row(index_row: cute.Pointer, slot: Int32, length: Int32, s_kv: Int32) -> Int32:
    """The row of kv that entry ``slot`` selects, or NO_ROW."""
    row = Int32(NO_ROW)
    if slot < length:
        row = (index_row + slot).load()
        if row >= s_kv or row < 0:
            row = Int32(NO_ROW)
    return row


def index_row(topk_idxs: cute.Pointer, query: Int32, topk: Int32) -> cute.Pointer:
    return topk_idxs + Int64(query) * topk


@cute.jit
def any_valid(entries: cute.Pointer, length: Int32, s_kv: Int32) -> Boolean:
    """Whether a row selects anything; by a whole warp, which stops at the first 32 entries that do."""
    found = Boolean(False)
    start = Int32(0)
    while start < length and not found:
        row = load_row(entries, start + cute.arch.lane_idx(), length, s_kv)
        found = cute.arch.vote_any_sync(row >= 0)
        start += WARP
    return found


@cute.jit
def feed_rows(
    entries: cute.Pointer,
    length: Int32,
    s_kv: Int32,
    rows: cute.Tensor,
    counts: cute.Tensor,
    ring: Ring,
    n: Int32,
    block_keys: cutlass.Constexpr[int],
) -> Int32:
    """By one warp: hand the valid rows of a query to ``ring``, ``block_keys`` a stage, then a stage with count 0.

    Args:
        entries: the query's index row in global memory.
        rows: (stages, block_keys) int32 in shared memory; NO_ROW behind the last valid row.
        counts: (stages,) int32 in shared memory: valid rows of the stage, 0 for the end of the query.
        n: uses of the ring so far.

    Returns: uses of the ring afterwards.
    """
    lane = cute.arch.lane_idx()
    filled = Int32(0)
    start = Int32(0)
    row = load_row(entries, lane, length, s_kv)
    ring.wait_empty(n)
    while start < length:
        upcoming = load_row(entries, start + WARP + lane, length, s_kv)  # under way while this one is packed
        votes = cute.arch.vote_ballot_sync(row >= 0)
        place = filled + cute.arch.popc(votes & (cute.arch.lanemask_lt()))
        filled += cute.arch.popc(votes)
        if row >= 0 and place < block_keys:
            rows[ring.stage(n), place] = row
        if filled >= block_keys:
            if lane == 0:
                counts[ring.stage(n)] = Int32(block_keys)
            ring.arrive_full(n)
            n += 1
            filled -= block_keys
            ring.wait_empty(n)
            if row >= 0 and place >= block_keys:
                rows[ring.stage(n), place - block_keys] = row
        row = upcoming
        start += WARP
    if filled > 0:
        for i in cutlass.range_constexpr(block_keys // WARP):
            if lane + i * WARP >= filled:
                rows[ring.stage(n), lane + i * WARP] = Int32(NO_ROW)
        if lane == 0:
            counts[ring.stage(n)] = filled
        ring.arrive_full(n)
        n += 1
        ring.wait_empty(n)
    if lane == 0:
        counts[ring.stage(n)] = Int32(0)
    ring.arrive_full(n)
    return n + 1
