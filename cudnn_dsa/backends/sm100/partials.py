"""The sum over queries in a fixed order.

Atomics add in whatever order the CTAs run in. Instead, the main kernel stores every row of dkv that a query contributes
to a slot of its own (``partials``), for as many queries at a time as the workspace holds, and ``Fold`` adds them up key
by key in the order of the queries. Two tables (S_kv, queries of the chunk), int32, zero where a query does not select
the key, find a key's slots without sorting:

- ``counts``: how often the query lists the key;
- ``ranks``: K minus the first of its slots.

``Tables`` fills them with integer atomics, whose result has no order. All slots of one key in one row hold the same
contribution, so it is taken from the first one, as often as the key is listed.
"""

# mypy: ignore-errors
# (Device code: types are the DSL's.)

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cudnn_dsa.cute import selection

TABLE_WARPS = 8


class Tables:
    """counts and ranks of a chunk of queries; a warp a query, which packs valid entries as the main kernel does."""

    def __init__(self, has_topk_length: bool):
        self.has_topk_length = has_topk_length

    @cute.jit
    def __call__(
        self,
        topk_idxs: cute.Pointer,
        topk_length: cute.Pointer,
        counts: cute.Pointer,
        ranks: cute.Pointer,
        first_query: Int32,
        queries: Int32,
        s_kv: Int32,
        topk: Int32,
    ):
        """counts, ranks (S_kv, queries) int32, which start as zeros."""
        self.kernel(topk_idxs, topk_length, counts, ranks, first_query, queries, s_kv, topk).launch(
            grid=(cute.ceil_div(queries, TABLE_WARPS), 1, 1), block=(32 * TABLE_WARPS, 1, 1), smem=0
        )

    @cute.kernel
    def kernel(
        self,
        topk_idxs: cute.Pointer,
        topk_length: cute.Pointer,
        counts: cute.Pointer,
        ranks: cute.Pointer,
        first_query: Int32,
        queries: Int32,
        s_kv: Int32,
        topk: Int32,
    ):
        local = cute.arch.block_idx()[0] * TABLE_WARPS + cute.arch.warp_idx()
        if local < queries:
            query = first_query + local
            lengths = topk_length if cutlass.const_expr(self.has_topk_length) else None
            length = selection.row_length(lengths, query, topk)
            entries = selection.index_row(topk_idxs, query, topk)
            filled = Int32(0)
            start = Int32(0)
            while start < length:
                row = selection.load_row(entries, start + cute.arch.lane_idx(), length, s_kv)
                votes = cute.arch.vote_ballot_sync(row >= 0)
                slot = filled + cute.arch.popc(votes & cute.arch.lanemask_lt())
                filled += cute.arch.popc(votes)
                if row >= 0:
                    cell = Int64(row) * queries + local
                    cute.arch.atomic_add(counts + cell, Int32(1))
                    cute.arch.atomic_max(ranks + cell, topk - slot)
                start += 32


class Fold:
    """sums[key] += its partials, queries in order, tiles of heads in order; a CTA a key, four columns a thread."""

    def __init__(self, head_dim: int, head_tiles: int):
        self.head_dim, self.head_tiles = head_dim, head_tiles

    @cute.jit
    def __call__(
        self,
        partials: cute.Pointer,
        counts: cute.Pointer,
        ranks: cute.Pointer,
        sums: cute.Pointer,
        queries: Int32,
        s_kv: Int32,
        topk: Int32,
    ):
        """sums (S_kv, D) from partials (queries * head tiles, K, D), fp32, and the tables."""
        self.kernel(partials, counts, ranks, sums, queries, topk).launch(
            grid=(s_kv, 1, 1), block=(self.head_dim // 4, 1, 1), smem=0
        )

    @cute.kernel
    def kernel(
        self,
        partials: cute.Pointer,
        counts: cute.Pointer,
        ranks: cute.Pointer,
        sums: cute.Pointer,
        queries: Int32,
        topk: Int32,
    ):
        key = Int64(cute.arch.block_idx()[0])
        column = cute.arch.thread_idx()[0] * 4
        total = cute.make_rmem_tensor(4, Float32)
        part = cute.make_rmem_tensor(4, Float32)
        target = self.four(sums + (key * self.head_dim + column))
        cute.autovec_copy(target, total)
        for i in cutlass.range(queries, unroll=1):
            times = (counts + (key * queries + i)).load()
            if times > 0:
                slot = topk - (ranks + (key * queries + i)).load()
                for tile in cutlass.range_constexpr(self.head_tiles):
                    row = (Int64(i) * self.head_tiles + tile) * topk + slot
                    cute.autovec_copy(self.four(partials + (row * self.head_dim + column)), part)
                    for k in cutlass.range_constexpr(4):
                        total[k] = total[k] + Float32(times) * part[k]
        cute.autovec_copy(total, target)

    def four(self, pointer: cute.Pointer) -> cute.Tensor:
        pointer = cute.make_ptr(Float32, pointer.toint(), cute.AddressSpace.gmem, assumed_align=16)
        return cute.make_tensor(pointer, cute.make_layout(4))
