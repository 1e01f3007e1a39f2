"""The Hopper backward kernel (docs/sm90.md explains it with drawings).

For a query, 64 of its heads and its selected keys, 64 at a time (V is the first D_v columns of K), in base 2:

    S  = Q K^T     (64 heads x 64 keys)      P  = 2 ** (S * scale2 - Z2)
    dP = dO V^T    (64 heads x 64 keys)      dS = P * (dP - delta) * scale
    dQ += dS K     (64 heads x D)            dKV = P^T dO + dS^T Q   (64 keys x D), added to the selected rows of dkv

Z2 and delta come from cute/prepare.py; the fp32 sums of dkv go to cute/finish.py.

fp16. P and dS are rounded for the products, and dS may lie anywhere below 2**-24 or above 2**16. So both are
multiplied by a power of two, 2**gain: gain starts at 15, which keeps P below 2**16 and all 11 bits of a dS above
2**-28, and falls when a larger |dS| comes along; dQ is then rescaled like the output of an online softmax. dQ and dKV
are divided again, exactly, as they leave. For its scores see scores.py.

Roles, three warpgroups of a persistent CTA:

    producer   warp 0: row numbers of valid keys, packed into tiles of 64; Q and dO by tensor copies
               warps 1-3: gather the rows of K
    score      S, dP, P, dS; writes P and dS to shared memory; dQ of the first 256 columns
    dkv        dKV in chunks of 64 columns, reduced into dkv; dQ of the other columns

A tile of K is handed over in groups of 256 columns: a group of the next tile is gathered as soon as the dQ of its
columns is done, while dKV, which needs no K, is still being computed. So the score warpgroup is a tile ahead, and the
dkv warpgroup, whose reductions bound this kernel, always has work: one chunk is reduced while the next is multiplied.

Shared memory, D = 576: Q 72 KB, dO 64 KB, K 72 KB, P 8 KB, dS 8 KB; row numbers and barriers 1.2 KB.
"""

# mypy: ignore-errors
# (Device code: the DSL stages it, and most of its types are the DSL's.)

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cudnn_dsa.backends.sm90 import wgmma
from cudnn_dsa.backends.sm90.config import WARPGROUP, WARPS, Config, backward_shared
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
from cudnn_dsa.backends.sm90.wgmma import CHUNK, Major
from cudnn_dsa.cute import ptx, scatter, softmax
from cudnn_dsa.cute.ring import Ring

GAIN = 15  # the exponent that fp16's P and dS start with: P is at most 1
SCORE_BARRIER = 1  # named barrier of the score warpgroup


class QueryGradient(NamedTuple):
    """A product dS K over ``columns`` columns from ``first`` on: accumulator and operands."""

    first: int
    columns: int
    mma: cute.TiledMma
    acc: cute.Tensor
    a: cute.Tensor
    b: cute.Tensor


class Shared(NamedTuple):
    """Shared memory, and the rings that hand it over."""

    q: cute.Tensor  # (heads, D)
    dout: cute.Tensor  # (heads, D_v)
    kv: cute.Tensor  # (keys, D)
    p: cute.Tensor  # (heads, keys)
    ds: cute.Tensor  # (heads, keys)
    rows: Rows
    peaks: cute.Tensor  # the largest |dS| of each score warp
    gain: cute.Tensor  # of P and dS
    kv_rings: list[Ring]  # a group of columns of kv each
    query_ring: Ring  # q and dout
    p_ring: Ring  # p, ds and gain


class BackwardSm90:
    """Compile-time parameters of the kernel; ``__call__`` is the host function.

    Args:
        dtype: bf16 or fp16, of q, kv, dout and dq.
        heads, head_dim, head_dim_v: H, D and D_v.
        has_topk_length: whether topk_length is given; pass a null pointer if not.
    """

    def __init__(
        self, dtype: type[cutlass.Numeric], heads: int, head_dim: int, head_dim_v: int, has_topk_length: bool,
        config: Config,
    ):  # fmt: skip
        self.dtype = dtype
        self.heads, self.head_dim, self.head_dim_v = heads, head_dim, head_dim_v
        self.has_topk_length = has_topk_length
        self.config = config
        self.head_tiles = config.head_tiles(heads)
        self.groups = config.groups(head_dim)
        self.chunks, self.chunks_v = head_dim // CHUNK, head_dim_v // CHUNK
        self.scaled = dtype is cutlass.Float16  # P and dS carry a gain

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        kv: cute.Pointer,
        dout: cute.Pointer,
        z2: cute.Pointer,
        delta: cute.Pointer,
        topk_idxs: cute.Pointer,
        topk_length: cute.Pointer,
        dq: cute.Pointer,
        dkv: cute.Pointer,
        s_q: Int32,
        s_kv: Int32,
        topk: Int32,
        softmax_scale: Float32,
        multiprocessors: Int32,
    ):
        """dq (S_q, H, D), and dkv (S_kv, D) fp32 interleaved, to which is added; from q (S_q, H, D), kv (S_kv, D),
        dout (S_q, H, D_v), z2 and delta (S_q, H) fp32, topk_idxs (S_q, K), topk_length (S_q,)."""
        q_map, q_tensor = tensor_map(q, self.heads, self.head_dim, s_q, self.config.block_heads)
        dout_map, dout_tensor = tensor_map(dout, self.heads, self.head_dim_v, s_q, self.config.block_heads)
        grid = cutlass.min(s_q * self.head_tiles, multiprocessors)
        self.kernel(
            q_map, q_tensor, dout_map, dout_tensor, kv, z2, delta, topk_idxs, topk_length, dq, dkv,
            s_q, s_kv, topk, softmax_scale,
        ).launch(
            grid=(grid, 1, 1), block=(self.config.threads, 1, 1),
            smem=backward_shared(self.config, self.head_dim, self.head_dim_v), min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q_map: cute.CopyAtom,
        q_tensor: cute.Tensor,
        dout_map: cute.CopyAtom,
        dout_tensor: cute.Tensor,
        kv: cute.Pointer,
        z2: cute.Pointer,
        delta: cute.Pointer,
        topk_idxs: cute.Pointer,
        topk_length: cute.Pointer,
        dq: cute.Pointer,
        dkv: cute.Pointer,
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
                operands = (Dense(q_map, q_tensor, shared.q), Dense(dout_map, dout_tensor, shared.dout))
                feed(work, shared.rows, Selection(topk_idxs, lengths, topk, s_kv), operands, shared.query_ring)
            else:
                gather(
                    work, shared.rows, kv, shared.kv, self.head_dim, self.groups, shared.kv_rings, thread - 32,
                    config.gather_warps * 32, config.gather_batch,
                )  # fmt: skip
        elif warp < 2 * WARPS:
            cute.arch.setmaxregister_increase(config.registers[1])
            self.score(shared, work, z2, delta, dq, softmax_scale, thread)
        else:
            cute.arch.setmaxregister_increase(config.registers[2])
            self.key_gradient(shared, work, dq, dkv, thread)

    def _shared(self) -> Shared:
        config = self.config
        memory = cutlass.memory.SmemAllocator()
        tiles = [
            swizzled_tile(memory, self.dtype, *shape)
            for shape in (
                (config.block_heads, self.head_dim), (config.block_heads, self.head_dim_v),
                (config.block_keys, self.head_dim), (config.block_heads, config.block_keys),
                (config.block_heads, config.block_keys),
            )
        ]  # fmt: skip
        numbers, counts = row_tiles(memory, config.row_stages, config.block_keys)
        s_peaks = memory.allocate_tensor(Int32, cute.make_layout(WARPS))
        s_gain = memory.allocate_tensor(Int32, cute.make_layout(1))
        row_ring, *kv_rings, query_ring, p_ring = Ring.create(
            memory, [config.row_stages, *[1] * len(self.groups), 1, 1]
        )
        return Shared(*tiles, Rows(numbers, counts, row_ring), s_peaks, s_gain, kv_rings, query_ring, p_ring)

    def _init_rings(self, shared: Shared) -> None:
        """How many arrivals complete each barrier: warps, but for the threads whose copies arrive."""
        shared.rows.ring.init(1, self.config.gather_warps + 2 * WARPS)
        for ring in shared.kv_rings:
            ring.init(self.config.gather_warps * 32, WARPS)
        shared.query_ring.init(1, 2 * WARPS)
        shared.p_ring.init(WARPS, WARPS)
        cute.arch.mbarrier_init_fence()

    # Score warpgroup.

    @cute.jit
    def score(
        self, shared: cutlass.Constexpr[Shared], work: cutlass.Constexpr[Work], z2, delta, dq, softmax_scale, thread
    ):
        """S, dP, P, dS of each tile, and the first group of dQ."""
        block_keys = self.config.block_keys
        mma = wgmma.tiled(self.dtype, block_keys, Major.K, Major.K)
        q_a, k_b = wgmma.operands(mma, thread, wgmma.chunks_of(shared.q), wgmma.chunks_of(shared.kv))
        dout_a, _ = wgmma.operands(mma, thread, wgmma.chunks_of(shared.dout), wgmma.chunks_of(shared.kv))
        acc_s, acc_dp = wgmma.accumulator(mma, block_keys), wgmma.accumulator(mma, block_keys)
        scores, gradients = softmax.accumulator_rows(acc_s), softmax.accumulator_rows(acc_dp)
        place = softmax.accumulator_coordinates(mma.get_slice(thread), (self.config.block_heads, block_keys))
        store = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        store = cute.make_tiled_copy_C(store, mma).get_slice(thread)
        to_p, to_ds = store.partition_D(shared.p), store.partition_D(shared.ds)
        dq_parts = self._query_gradient(self.groups[:1], shared, thread)
        scale2 = softmax_scale * softmax.LOG2_E

        _, counts, row_ring = shared.rows
        kv_rings, query_ring, p_ring = shared.kv_rings, shared.query_ring, shared.p_ring
        slots = Int32(0)
        tiles = Int32(0)
        queries = Int32(0)
        item = cute.arch.block_idx()[0]
        while exists(work, item):
            query, head_tile = split(work, item)
            row_z2 = cute.make_rmem_tensor(2, Float32)
            row_delta = cute.make_rmem_tensor(2, Float32)
            for r in cutlass.range_constexpr(2):
                head = head_tile * self.config.block_heads + place[r, 0][0]
                row_z2[r], row_delta[r] = Float32.inf, 0.0  # heads past H: P and dS are zeros
                if head < self.heads:
                    row_z2[r] = (z2 + (Int64(query) * self.heads + head)).load()
                    row_delta[r] = (delta + (Int64(query) * self.heads + head)).load()
            gain = Int32(GAIN)
            self._clear(dq_parts)
            query_ring.wait_full(queries)
            row_ring.wait_full(slots)
            count = counts[row_ring.stage(slots)]
            while count > 0:
                row_ring.arrive_empty(slots)
                slots += 1
                issue_scores(
                    mma, acc_s, acc_dp if self.scaled else None, q_a, k_b, self.groups, kv_rings, tiles, self.chunks
                )
                wgmma.fence()
                wgmma.issue_chunks(mma, acc_dp, dout_a, k_b, (0, self.chunks_v), 0, True)
                wgmma.commit()
                wgmma.wait(1)
                for r in cutlass.range_constexpr(2):
                    for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                        valid = place[r, c][1] < count
                        scores[r, c] = softmax.probability(scores[r, c], scale2, row_z2[r], valid)
                wgmma.wait(0)
                for r in cutlass.range_constexpr(2):
                    for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                        valid = place[r, c][1] < count
                        gradients[r, c] = softmax.score_gradient(
                            scores[r, c], gradients[r, c], row_delta[r], softmax_scale, valid
                        )
                if cutlass.const_expr(self.scaled):
                    lower = cutlass.min(gain, self._largest_gain(acc_dp, shared.peaks, thread))
                    self._rescale(dq_parts, lower - gain)
                    gain = lower
                    factor = ptx.power_of_two(gain)
                    for i in cutlass.range_constexpr(cute.size(acc_s)):
                        acc_s[i] *= factor
                        acc_dp[i] *= factor
                p_ring.wait_empty(tiles)
                if cutlass.const_expr(self.scaled):  # noqa: SIM102 (known when it is compiled)
                    if thread == 0:
                        shared.gain[0] = gain
                cute.copy(store, store.retile(softmax.rounded(acc_s, self.dtype)), to_p)
                cute.copy(store, store.retile(softmax.rounded(acc_dp, self.dtype)), to_ds)
                cute.arch.fence_view_async_shared()  # stores, then read by wgmma
                p_ring.arrive_full(tiles)
                p_ring.wait_full(tiles)  # the other warps' part of dS
                wgmma.fence()
                for part in dq_parts:
                    wgmma.issue(part.mma, part.acc, part.a, part.b, fresh=False)
                wgmma.commit()
                wgmma.wait(0)
                kv_rings[0].arrive_empty(tiles)
                tiles += 1
                row_ring.wait_full(slots)
                count = counts[row_ring.stage(slots)]
            row_ring.arrive_empty(slots)
            slots += 1
            query_ring.arrive_empty(queries)
            queries += 1
            self._store_query_gradient(dq_parts, dq, query, head_tile, gain, thread)
            item += cute.arch.grid_dim()[0]

    @cute.jit
    def _largest_gain(self, acc_ds, peaks, thread) -> Int32:
        """The exponent that lifts the tile's largest |dS| just below 2**15."""
        peak = Int32(0)
        for i in cutlass.range_constexpr(cute.size(acc_ds)):
            peak = cutlass.max(peak, ptx.magnitude(acc_ds[i]))
        peak = cute.arch.warp_redux_sync(peak, "max")
        # Between the reads of one tile and the writes of the next lies the p_ring, which all warps wait for.
        if thread % 32 == 0:
            peaks[thread // 32] = peak
        cute.arch.barrier(barrier_id=SCORE_BARRIER, number_of_threads=WARPGROUP)
        for warp in cutlass.range_constexpr(WARPS):
            peak = cutlass.max(peak, peaks[warp])
        return 14 - ((peak >> 23) - 127)

    @cute.jit
    def _rescale(self, parts, exponent: Int32):
        """Multiply dQ by a power of two, which is 1 nearly always."""
        if exponent != 0:
            for part in parts:
                part.acc.store(part.acc.load() * ptx.power_of_two(exponent))

    def _clear(self, parts) -> None:
        for part in parts:
            part.acc.fill(0.0)

    # dkv warpgroup.

    @cute.jit
    def key_gradient(self, shared: cutlass.Constexpr[Shared], work: cutlass.Constexpr[Work], dq, dkv, thread):
        """dKV of each tile, reduced into dkv, and the other groups of dQ."""
        mma = wgmma.tiled(self.dtype, CHUNK, Major.MN, Major.MN)
        p_a, dout_b = wgmma.operands(
            mma, thread, wgmma.transposed(shared.p), wgmma.transposed(wgmma.chunks_of(shared.dout))
        )
        ds_a, q_b = wgmma.operands(
            mma, thread, wgmma.transposed(shared.ds), wgmma.transposed(wgmma.chunks_of(shared.q))
        )
        accs = wgmma.accumulator(mma, CHUNK), wgmma.accumulator(mma, CHUNK)
        dq_parts = self._query_gradient(self.groups[1:], shared, thread)

        numbers, counts, row_ring = shared.rows
        kv_rings, query_ring, p_ring = shared.kv_rings, shared.query_ring, shared.p_ring
        slots = Int32(0)
        tiles = Int32(0)
        queries = Int32(0)
        item = cute.arch.block_idx()[0]
        while exists(work, item):
            query, head_tile = split(work, item)
            gain = Int32(GAIN)
            self._clear(dq_parts)
            query_ring.wait_full(queries)
            row_ring.wait_full(slots)
            count = counts[row_ring.stage(slots)]
            empty = count == 0
            while count > 0:
                targets = scatter.Targets.create(numbers[row_ring.stage(slots), None], thread, self.head_dim)
                row_ring.arrive_empty(slots)
                slots += 1
                p_ring.wait_full(tiles)
                factor = None
                if cutlass.const_expr(self.scaled):
                    self._rescale(dq_parts, shared.gain[0] - gain)
                    gain = shared.gain[0]
                    factor = ptx.power_of_two(-gain)
                wgmma.fence()
                self._issue_chunk(mma, accs, p_a, dout_b, ds_a, q_b, 0)
                for part in dq_parts:
                    wgmma.issue(part.mma, part.acc, part.a, part.b, fresh=False)
                wgmma.commit()
                for chunk in cutlass.range_constexpr(self.chunks):
                    # The next chunk, whose accumulator was reduced two chunks ago, is multiplied meanwhile.
                    if cutlass.const_expr(chunk + 1 < self.chunks):
                        wgmma.fence()
                        self._issue_chunk(mma, accs, p_a, dout_b, ds_a, q_b, chunk + 1)
                    # Groups are waited for in the order of their commits: chunk 0, dQ, chunk 1, chunk 2, ...
                    wgmma.wait({0: 2, self.chunks - 1: 0}.get(chunk, 1))
                    if cutlass.const_expr(chunk == 1):
                        for ring in kv_rings[1:]:
                            ring.arrive_empty(tiles)
                    if cutlass.const_expr(chunk == self.chunks - 1):
                        p_ring.arrive_empty(tiles)
                        # After the last tile Q and dO of the next query are copied while this chunk is reduced.
                        row_ring.wait_full(slots)
                        count = counts[row_ring.stage(slots)]
                        if count == 0:
                            query_ring.arrive_empty(queries)
                    scatter.add(dkv, targets, accs[chunk % 2], chunk * CHUNK, factor)
                tiles += 1
            if empty:
                query_ring.arrive_empty(queries)
            row_ring.arrive_empty(slots)
            slots += 1
            queries += 1
            self._store_query_gradient(dq_parts, dq, query, head_tile, gain, thread)
            item += cute.arch.grid_dim()[0]

    def _issue_chunk(self, mma, accs, p_a, dout_b, ds_a, q_b, chunk: int) -> None:
        """P^T dO + dS^T Q of 64 columns; columns past D_v have no part of dO."""
        acc = accs[chunk % 2]
        if chunk < self.chunks_v:
            wgmma.issue(mma, acc, p_a, dout_b[None, None, None, chunk], fresh=True)
        wgmma.issue(mma, acc, ds_a, q_b[None, None, None, chunk], fresh=chunk >= self.chunks_v)
        wgmma.commit()

    # dQ, whose columns the consumer warpgroups share.

    def _query_gradient(self, groups, shared: Shared, thread) -> list[QueryGradient]:
        """The products dS K over groups of columns."""
        parts = []
        for first, columns in groups:
            mma = wgmma.tiled(self.dtype, columns, Major.K, Major.MN)
            keys = wgmma.transposed(wgmma.blocks_of(shared.kv, first, columns, 1, 0))[None, None, 0]
            a, b = wgmma.operands(mma, thread, shared.ds, keys)
            parts.append(QueryGradient(first, columns, mma, wgmma.accumulator(mma, columns), a, b))
        return parts

    @cute.jit
    def _store_query_gradient(self, parts, dq, query, head_tile, gain, thread):
        """Columns of dq, of the heads that exist."""
        if cutlass.const_expr(self.scaled):
            self._rescale(parts, -gain)
        for part in parts:
            store_heads(
                part.acc, part.mma, part.columns, thread, dq, query, head_tile * self.config.block_heads, self.heads,
                self.head_dim, part.first,
            )  # fmt: skip
