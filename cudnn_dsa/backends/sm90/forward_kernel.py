"""The Hopper forward kernel (docs/sm90.md explains it with drawings).

For a query, 64 of its heads and its selected keys, 64 at a time (V is the first D_v columns of K), in base 2:

    S = Q K^T * scale2     (64 heads x 64 keys)
    m = max(m, S),  P = 2 ** (S - m),  l = l * alpha + sum of P,  O = O * alpha + P V,  alpha = 2 ** (m_before - m)

and in the end lse2 = m + log2(l), Z2 = logaddexp2(lse2, sink2), out = O * 2 ** (m - Z2).

m follows the maximum only when that rises by more than 2**3 = 8 (in base 2), so that O is rescaled in few tiles: P is
then at most 2**8, and everything is relative to the same m in the end.

Roles, four warpgroups of a persistent CTA:

    producer   as in the backward: row numbers and Q by warp 0, keys by warps 1-3
    score      S, m, l; writes P and alpha to shared memory; lse
    output     two of them, 256 columns of O each

Two tiles of keys fit beside Q, so S of the next tile is computed while P V of this one is.

Shared memory, D = 576: Q 72 KB, two tiles of K 144 KB, P 8 KB; row numbers, factors and barriers 1.8 KB.
"""

# mypy: ignore-errors
# (Device code: the DSL stages it, and most of its types are the DSL's.)

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cudnn_dsa.backends.sm90 import wgmma
from cudnn_dsa.backends.sm90.config import WARPGROUP, WARPS, Config, forward_shared
from cudnn_dsa.backends.sm90.epilogue import store_heads
from cudnn_dsa.backends.sm90.producer import (
    Dense,
    Rows,
    Selection,
    Work,
    exists,
    feed,
    gather,
    row_tiles,
    split,
    swizzled_tile,
    tensor_map,
)
from cudnn_dsa.backends.sm90.scores import issue_scores
from cudnn_dsa.backends.sm90.wgmma import Major
from cudnn_dsa.cute import ptx, softmax
from cudnn_dsa.cute.ring import Ring

LN_2 = 1.0 / softmax.LOG2_E
SLACK = 8.0  # by how much (in base 2) scores may exceed m
OUTPUTS = 2  # output warpgroups
# Columns of a product of theirs: with four warpgroups ptxas compiles for 128 registers, whatever setmaxnreg says, and
# refuses a wgmma whose accumulators alone take them all.
WIDTH = 128


class Shared(NamedTuple):
    """Shared memory, and the rings that hand it over."""

    q: cute.Tensor  # (heads, D)
    kv: cute.Tensor  # (keys, stages * D)
    p: cute.Tensor  # (heads, keys)
    rows: Rows
    alpha: cute.Tensor  # (heads,): what O is multiplied by before P V is added
    factor: cute.Tensor  # (heads,): what O is multiplied by in the end
    kv_rings: list[Ring]  # a group of columns of kv each: the output warpgroups', and the rest
    query_ring: Ring  # q
    p_ring: Ring  # p and alpha
    end_ring: Ring  # factor


class ForwardSm90:
    """Compile-time parameters of the kernel; ``__call__`` is the host function.

    Args:
        dtype: bf16 or fp16, of q and kv; out has it or is fp32.
        heads, head_dim, head_dim_v: H, D and D_v.
        has_sink, has_topk_length: whether attn_sink and topk_length are given; pass null pointers if not.
    """

    def __init__(
        self, dtype: type[cutlass.Numeric], heads: int, head_dim: int, head_dim_v: int, has_sink: bool,
        has_topk_length: bool, config: Config,
    ):  # fmt: skip
        self.dtype = dtype
        self.heads, self.head_dim, self.head_dim_v = heads, head_dim, head_dim_v
        self.has_sink, self.has_topk_length = has_sink, has_topk_length
        self.config = config
        self.head_tiles = config.head_tiles(heads)
        self.groups = config.groups(head_dim)
        self.columns = head_dim_v // OUTPUTS  # of an output warpgroup
        assert self.groups[:OUTPUTS] == [(i * self.columns, self.columns) for i in range(OUTPUTS)]

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        kv: cute.Pointer,
        topk_idxs: cute.Pointer,
        attn_sink: cute.Pointer,
        topk_length: cute.Pointer,
        out: cute.Pointer,
        lse: cute.Pointer,
        s_q: Int32,
        s_kv: Int32,
        topk: Int32,
        softmax_scale: Float32,
        multiprocessors: Int32,
    ):
        """out (S_q, H, D_v) and lse (S_q, H) from q (S_q, H, D), kv (S_kv, D), topk_idxs (S_q, K), attn_sink (H,),
        topk_length (S_q,)."""
        q_map, q_tensor = tensor_map(q, self.heads, self.head_dim, s_q, self.config.block_heads)
        grid = cutlass.min(s_q * self.head_tiles, multiprocessors)
        self.kernel(
            q_map, q_tensor, kv, topk_idxs, attn_sink, topk_length, out, lse, s_q, s_kv, topk, softmax_scale
        ).launch(
            grid=(grid, 1, 1), block=(self.config.threads, 1, 1), smem=forward_shared(self.config, self.head_dim),
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q_map: cute.CopyAtom,
        q_tensor: cute.Tensor,
        kv: cute.Pointer,
        topk_idxs: cute.Pointer,
        attn_sink: cute.Pointer,
        topk_length: cute.Pointer,
        out: cute.Pointer,
        lse: cute.Pointer,
        s_q: Int32,
        s_kv: Int32,
        topk: Int32,
        softmax_scale: Float32,
    ):
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        shared = self._shared()
        if warp == 0 and cute.arch.lane_idx() == 0:
            self._init_rings(shared)
        cute.arch.sync_threads()
        work = Work(s_q, self.head_tiles)

        if warp < WARPS:
            cute.arch.setmaxregister_decrease(config.registers[0])
            if warp == 0:
                lengths = topk_length if cutlass.const_expr(self.has_topk_length) else None
                operands = (Dense(q_map, q_tensor, shared.q),)
                feed(work, shared.rows, Selection(topk_idxs, lengths, topk, s_kv), operands, shared.query_ring)
            else:
                gather(
                    work, shared.rows, kv, shared.kv, self.head_dim, self.groups, shared.kv_rings, thread - 32,
                    config.gather_warps * 32, config.gather_batch,
                )  # fmt: skip
        elif warp < 2 * WARPS:
            cute.arch.setmaxregister_increase(config.registers[1])
            self.score(shared, work, attn_sink, lse, softmax_scale * softmax.LOG2_E, thread)
        elif warp < 3 * WARPS:
            cute.arch.setmaxregister_increase(config.registers[2])
            self.output(0, shared, work, out, thread)
        else:
            cute.arch.setmaxregister_increase(config.registers[3])
            self.output(1, shared, work, out, thread)

    def _shared(self) -> Shared:
        config = self.config
        memory = cutlass.memory.SmemAllocator()
        q = swizzled_tile(memory, self.dtype, config.block_heads, self.head_dim)
        kv = swizzled_tile(memory, self.dtype, config.block_keys, config.kv_stages * self.head_dim)
        p = swizzled_tile(memory, self.dtype, config.block_heads, config.block_keys)
        numbers, counts = row_tiles(memory, config.row_stages, config.block_keys)
        alpha, factor = (memory.allocate_tensor(Float32, cute.make_layout(config.block_heads)) for _ in range(2))
        row_ring, *kv_rings, query_ring, p_ring, end_ring = Ring.create(
            memory, [config.row_stages, *[config.kv_stages] * len(self.groups), 1, 1, 1]
        )
        rows = Rows(numbers, counts, row_ring)
        return Shared(q, kv, p, rows, alpha, factor, kv_rings, query_ring, p_ring, end_ring)

    def _init_rings(self, shared: Shared) -> None:
        """How many arrivals complete each barrier: warps, but for the threads whose copies arrive."""
        shared.rows.ring.init(1, self.config.gather_warps + (1 + OUTPUTS) * WARPS)
        for ring in shared.kv_rings:
            ring.init(self.config.gather_warps * 32, WARPS)
        shared.query_ring.init(1, WARPS)
        shared.p_ring.init(WARPS, OUTPUTS * WARPS)
        shared.end_ring.init(WARPS, OUTPUTS * WARPS)
        cute.arch.mbarrier_init_fence()

    # Score warpgroup.

    @cute.jit
    def score(
        self, shared: cutlass.Constexpr[Shared], work: cutlass.Constexpr[Work], attn_sink, lse, scale2: Float32, thread
    ):
        """P and alpha of each tile; in the end lse and the factors."""
        config = self.config
        mma = wgmma.tiled(self.dtype, config.block_keys, Major.K, Major.K)
        q_a, k_b = wgmma.operands(mma, thread, wgmma.chunks_of(shared.q), wgmma.chunks_of(shared.kv))
        acc = wgmma.accumulator(mma, config.block_keys)
        part = wgmma.accumulator(mma, config.block_keys) if self.dtype is cutlass.Float16 else None
        scores = softmax.accumulator_rows(acc)
        place = softmax.accumulator_coordinates(mma.get_slice(thread), (config.block_heads, config.block_keys))
        store = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        store = cute.make_tiled_copy_C(store, mma).get_slice(thread)
        to_p = store.partition_D(shared.p)
        row_max, row_sum = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)

        _, counts, row_ring = shared.rows
        kv_rings, query_ring, p_ring, end_ring = shared.kv_rings, shared.query_ring, shared.p_ring, shared.end_ring
        slots = Int32(0)
        tiles = Int32(0)
        queries = Int32(0)
        item = cute.arch.block_idx()[0]
        while exists(work, item):
            query, head_tile = split(work, item)
            row_max.fill(-Float32.inf)
            row_sum.fill(0.0)
            query_ring.wait_full(queries)
            row_ring.wait_full(slots)
            count = counts[row_ring.stage(slots)]
            while count > 0:
                row_ring.arrive_empty(slots)
                slots += 1
                issue_scores(mma, acc, part, q_a, k_b, self.groups, kv_rings, tiles, self.head_dim // wgmma.CHUNK)
                wgmma.wait(0)
                for group in cutlass.range_constexpr(OUTPUTS, len(self.groups)):
                    kv_rings[group].arrive_empty(tiles)  # columns that are no values
                alpha = cute.make_rmem_tensor(2, Float32)
                for r in cutlass.range_constexpr(2):
                    highest = -Float32.inf
                    for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                        scores[r, c] = ptx.choose(place[r, c][1] < count, scores[r, c] * scale2, -Float32.inf)
                        highest = cute.arch.fmax(highest, scores[r, c])
                    highest = self._over_row(highest, cute.arch.fmax)
                    before = row_max[r]
                    row_max[r] = ptx.choose(highest > before + SLACK, highest, before)
                    alpha[r] = ptx.exp2_approx(before - row_max[r])
                    total = Float32(0.0)
                    for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                        scores[r, c] = ptx.exp2_approx(scores[r, c] - row_max[r])
                        total += scores[r, c]
                    row_sum[r] = row_sum[r] * alpha[r] + total
                p_ring.wait_empty(tiles)
                for r in cutlass.range_constexpr(2):
                    if thread % 4 == 0:
                        shared.alpha[place[r, 0][0]] = alpha[r]
                cute.copy(store, store.retile(softmax.rounded(acc, self.dtype)), to_p)
                cute.arch.fence_view_async_shared()  # stores, then read by wgmma
                p_ring.arrive_full(tiles)
                tiles += 1
                row_ring.wait_full(slots)
                count = counts[row_ring.stage(slots)]
            row_ring.arrive_empty(slots)
            slots += 1
            query_ring.arrive_empty(queries)
            end_ring.wait_empty(queries)
            for r in cutlass.range_constexpr(2):
                head = head_tile * config.block_heads + place[r, 0][0]
                # 0 for a row without a key: log2 of it is -inf, as its lse shall be.
                lse2 = row_max[r] + ptx.log2_approx(self._over_row(row_sum[r], lambda a, b: a + b))
                sink2 = -Float32.inf
                if cutlass.const_expr(self.has_sink):  # noqa: SIM102 (known when it is compiled)
                    if head < self.heads:
                        sink2 = (attn_sink + head).load() * softmax.LOG2_E
                if thread % 4 == 0:
                    # Z2 >= m up to rounding, and +inf where nothing is left of the row.
                    shared.factor[place[r, 0][0]] = ptx.exp2_approx(row_max[r] - softmax.normaliser(lse2, sink2))
                    if head < self.heads:
                        (lse + (Int64(query) * self.heads + head)).store(lse2 * LN_2)
            end_ring.arrive_full(queries)
            queries += 1
            item += cute.arch.grid_dim()[0]

    def _over_row(self, value: Float32, op) -> Float32:
        """Combine what the four lanes of a row hold."""
        for offset in (1, 2):
            value = op(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
        return value

    # Output warpgroups.

    @cute.jit
    def output(
        self, index: cutlass.Constexpr[int], shared: cutlass.Constexpr[Shared], work: cutlass.Constexpr[Work], out,
        thread,
    ):  # fmt: skip
        """Columns [256 index, 256 index + 256) of O."""
        config = self.config
        mma = wgmma.tiled(self.dtype, WIDTH, Major.K, Major.MN)
        parts = self._parts(mma, index, shared, thread)
        place = softmax.accumulator_coordinates(mma.get_slice(thread), (config.block_heads, WIDTH))

        _, counts, row_ring = shared.rows
        kv_ring, p_ring, end_ring = shared.kv_rings[index], shared.p_ring, shared.end_ring
        slots = Int32(0)
        tiles = Int32(0)
        queries = Int32(0)
        item = cute.arch.block_idx()[0]
        while exists(work, item):
            query, head_tile = split(work, item)
            for _, acc, _, _ in parts:
                acc.fill(0.0)
            row_ring.wait_full(slots)
            count = counts[row_ring.stage(slots)]
            while count > 0:
                row_ring.arrive_empty(slots)
                slots += 1
                p_ring.wait_full(tiles)
                upper, lower = shared.alpha[place[0, 0][0]], shared.alpha[place[1, 0][0]]
                if cute.arch.vote_any_sync((upper != 1.0) | (lower != 1.0)):
                    self._scale(parts, upper, lower)
                wgmma.fence()
                for _, acc, p_a, v_b in parts:
                    wgmma.issue(mma, acc, p_a, v_b[None, None, None, kv_ring.stage(tiles)], fresh=False)
                wgmma.commit()
                wgmma.wait(0)
                p_ring.arrive_empty(tiles)
                kv_ring.arrive_empty(tiles)
                tiles += 1
                row_ring.wait_full(slots)
                count = counts[row_ring.stage(slots)]
            row_ring.arrive_empty(slots)
            slots += 1
            end_ring.wait_full(queries)
            self._scale(parts, shared.factor[place[0, 0][0]], shared.factor[place[1, 0][0]])
            end_ring.arrive_empty(queries)
            queries += 1
            for first, acc, _, _ in parts:
                store_heads(
                    acc, mma, WIDTH, thread, out, query, head_tile * config.block_heads, self.heads, self.head_dim_v,
                    first,
                )  # fmt: skip
            item += cute.arch.grid_dim()[0]

    def _parts(self, mma, index: int, shared: Shared, thread) -> list:
        """The products P V of a warpgroup: (first column, accumulator, A, B)."""
        parts = []
        for first in range(index * self.columns, (index + 1) * self.columns, WIDTH):
            values = wgmma.blocks_of(shared.kv, first, WIDTH, self.config.kv_stages, self.head_dim)
            operands = wgmma.operands(mma, thread, shared.p, wgmma.transposed(values))
            parts.append((first, wgmma.accumulator(mma, WIDTH), *operands))
        return parts

    def _scale(self, parts: list, upper: Float32, lower: Float32) -> None:
        for _, acc, _, _ in parts:
            rows = softmax.accumulator_rows(acc)
            for c in range(cute.size(rows, mode=[1])):
                rows[0, c] *= upper
                rows[1, c] *= lower
