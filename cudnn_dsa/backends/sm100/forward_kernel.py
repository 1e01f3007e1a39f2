"""The forward of one query and 64 heads a CTA, on tcgen05, with the softmax's statistics kept online.

For every tile of 64 selected keys K (V is its first D_v columns), in base 2:

    S    = Q K^T           64 heads x 64 keys   (M = 64)     P = 2 ** (S * scale2 - M + lift)
    O^T += V^T P^T         D_v x 64 heads       (M = 128 a chunk)

M is a running maximum of the row that may lag behind by SLACK: only when a row passes that, all of O is multiplied. The
S of a tile is issued before the tile before it has become P: they lie in the two halves of the lanes that M = 64 uses.
At the end out = O / (sum of P + 2 ** (sink2 - M + lift)), lse = (M - lift + log2(sum of P)) * ln(2).
"""

# mypy: ignore-errors
# (Device code: types are the DSL's.)

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cudnn_dsa.backends.sm100 import tcgen05
from cudnn_dsa.backends.sm100.config import CHUNK, KEYS
from cudnn_dsa.backends.sm100.kernel import WARPGROUP, Cta, Sm100Kernel
from cudnn_dsa.cute import ptx, selection, softmax

SLACK = 8.0  # P is at most 2 ** (SLACK + lift)
LIFT = {"bf16": 0.0, "f16": 7.0}  # fp16 ends at 2 ** 16, and its small values lose bits
LN_2 = math.log(2)
BARRIER = 1  # of the softmax warps
GROUPS = KEYS // 8


class ForwardSm100(Sm100Kernel):
    """Compile-time parameters of the kernel, all in ``config``; ``__call__`` is the host function."""

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        kv: cute.Pointer,
        attn_sink: cute.Pointer,
        topk_idxs: cute.Pointer,
        topk_length: cute.Pointer,
        out: cute.Pointer,
        lse: cute.Pointer,
        s_q: Int32,
        s_kv: Int32,
        topk: Int32,
        softmax_scale: Float32,
    ):
        """out (S_q, H, D_v; 16-bit or fp32) and lse (S_q, H) fp32, from q (S_q, H, D), kv (S_kv, D), attn_sink (H,),
        topk_idxs (S_q, K), topk_length (S_q,)."""
        c = self.config
        self.kernel(q, kv, attn_sink, topk_idxs, topk_length, out, lse, s_kv, topk, softmax_scale).launch(
            grid=(s_q * c.head_tiles, 1, 1), block=(c.threads, 1, 1), smem=c.shared_bytes, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Pointer,
        kv: cute.Pointer,
        attn_sink: cute.Pointer,
        topk_idxs: cute.Pointer,
        topk_length: cute.Pointer,
        out: cute.Pointer,
        lse: cute.Pointer,
        s_kv: Int32,
        topk: Int32,
        softmax_scale: Float32,
    ):
        c = self.config
        thread = cute.arch.thread_idx()[0]
        block = cute.arch.block_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = cutlass.memory.SmemAllocator().allocate(c.shared_bytes, 1024)
        holder = cute.recast_ptr(memory + c.offset_tmem, dtype=Int32)
        rings = self.place_rings(cute.recast_ptr(memory + c.offset_barriers, dtype=Int64))
        # By parity of the tile and head: what O is multiplied by. Behind them, by warp: whether it is not 1 everywhere.
        factors = cute.make_tensor(
            cute.recast_ptr(memory + c.offset_factors, dtype=Float32), cute.make_layout((2 + 1, KEYS), stride=(KEYS, 1))
        )
        if warp == c.issue_warp:
            tcgen05.alloc(holder, c.tmem_allocated)
        if thread == 0:
            for name, (_, producers, consumers) in c.rings.items():
                rings[name].init(producers, consumers)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cta = Cta(
            query=Int64(block // c.head_tiles),
            head=block % c.head_tiles * c.heads_tile,
            shared=memory.toint(),
            rows=self.int32s(memory + c.offset_rows, (c.ring, KEYS)),
            counts=self.int32s(memory + c.offset_counts, (c.ring,)),
            rings=rings,
            tmem=holder.load(),
        )
        if warp < 4:
            cute.arch.setmaxregister_decrease(c.registers[0])
            self.gather(cta, kv, [(q, c.q, 0)], thread)
        elif warp < 8:
            cute.arch.setmaxregister_increase(c.registers[1])
            self.softmax(cta, attn_sink, out, lse, softmax_scale, factors, warp - 4)
        else:
            cute.arch.setmaxregister_decrease(c.registers[2])
            if warp == c.issue_warp:
                if cute.arch.lane_idx() == 0:
                    self.issue(cta)
            elif warp == c.index_warp:
                lengths = topk_length if cutlass.const_expr(c.has_topk_length) else None
                selection.feed_rows(
                    selection.index_row(topk_idxs, cta.query, topk), selection.row_length(lengths, cta.query, topk),
                    s_kv, cta.rows, cta.counts, rings["rows"], Int32(0), KEYS,
                )  # fmt: skip
        cute.arch.sync_threads()
        if warp == c.issue_warp:
            tcgen05.dealloc(cta.tmem, c.tmem_allocated)

    # Issue warp (one thread)

    def scores(self, cta: Cta, n: Int32) -> Int32:
        """Where S of tile ``n`` lies."""
        return cta.tmem + n % 2 * (16 * tcgen05.LANE)

    @cute.jit
    def issue(self, cta: Cta):
        c = self.config
        n = Int32(0)
        count = cta.tile(n)
        if count > 0:
            self.issue_scores(cta, n)
        while count > 0:
            following = cta.tile(n + 1)
            if following > 0:
                # Its half of the lanes held S of tile n - 1, whose P was waited for.
                self.issue_scores(cta, n + 1)
            cta.rings["p"].wait_full(n)
            tcgen05.fence("after")
            for chunk in cutlass.range_constexpr(c.head_dim_v // CHUNK):
                self.multiply(
                    cta.tmem + (c.tmem_out + chunk * c.heads_tile),
                    c.kv, self.kv_address(cta, n) + c.kv.column(chunk * CHUNK), c.p, cta.shared + c.offset_p,
                    (CHUNK, c.heads_tile, KEYS), True, False, Int32(n > 0),
                )  # fmt: skip
            tcgen05.commit(cta.rings["kv"].empty(n))
            tcgen05.commit(cta.rings["p"].empty(n))
            n += 1
            count = following

    @cute.jit
    def issue_scores(self, cta: Cta, n: Int32):
        c = self.config
        cta.rings["kv"].wait_full(n)
        tcgen05.fence("after")
        self.multiply(
            self.scores(cta, n), c.q, cta.shared, c.kv, self.kv_address(cta, n), (c.heads_tile, KEYS, c.head_dim),
            False, False, Int32(0),
        )  # fmt: skip
        tcgen05.commit(cta.rings["scores"].full(n))

    # Softmax warps

    @cute.jit
    def softmax(self, cta: Cta, attn_sink, out, lse, softmax_scale, factors: cute.Tensor, warp: Int32):
        """A thread has two heads, eight apart, and every fourth pair of keys; four lanes share a head."""
        c = self.config
        lane = cute.arch.lane_idx()
        quarter = warp * (32 * tcgen05.LANE)
        lift = Float32(LIFT[c.element])
        scale2 = softmax_scale * softmax.LOG2_E
        row = warp * 16 + lane // 4
        line = cta.shared + c.offset_p + row * c.p.width + lane % 4 * 4
        swizzle = (row & c.p.swizzle_mask) << 4
        maxima = cute.make_rmem_tensor(2, Float32)
        sums = cute.make_rmem_tensor(2, Float32)
        maxima.fill(0.0)
        sums.fill(0.0)
        n = Int32(0)
        count = cta.tile(n)
        while count > 0:
            cta.rings["scores"].wait_full(n)
            tcgen05.fence("after")
            s = tcgen05.load(self.scores(cta, n) + quarter, "16x256b", GROUPS)
            scores = cute.make_rmem_tensor(4 * GROUPS, Float32)
            highest = cute.make_rmem_tensor(2, Float32)
            highest.fill(-Float32.inf)
            for j in cutlass.range_constexpr(4 * GROUPS):
                b = j // 2 % 2
                counts = (j // 4 * 8 + j % 2) + lane % 4 * 2 < count
                scores[j] = ptx.choose(counts, s[j] * scale2, -Float32.inf)
                highest[b] = cute.arch.fmax(highest[b], scores[j])
            lags = Boolean(False)
            for b in cutlass.range_constexpr(2):
                for step in (1, 2):
                    highest[b] = cute.arch.fmax(highest[b], cute.arch.shuffle_sync_bfly(highest[b], offset=step))
                passes = n == 0 or highest[b] > maxima[b] + SLACK
                factor = ptx.choose(passes, ptx.exp2_approx(maxima[b] - highest[b]), Float32(1.0))
                maxima[b] = ptx.choose(passes, highest[b], maxima[b])
                sums[b] = ptx.choose(n == 0, Float32(0.0), sums[b] * factor)
                lags = lags or (passes and n > 0)
                if lane % 4 == 0:
                    factors[n % 2, row + 8 * b] = factor
            some = cute.arch.vote_any_sync(lags)
            if lane == 0:
                factors[2, n % 2 * 4 + warp] = Float32(1.0) if some else Float32(0.0)
            for j in cutlass.range_constexpr(4 * GROUPS):
                b = j // 2 % 2
                scores[j] = ptx.exp2_approx(scores[j] - (maxima[b] - lift))
                sums[b] = sums[b] + scores[j]
            cta.rings["p"].wait_empty(n)
            for pair in cutlass.range_constexpr(2 * GROUPS):
                place = line + (((pair // 2) << 4) ^ swizzle) + pair % 2 * 8 * c.p.width
                value = ptx.pack_halves(scores[2 * pair], scores[2 * pair + 1], self.dtype)
                self.shared_pointer(Int32, place, 4).store(value)
            cute.arch.barrier(barrier_id=BARRIER, number_of_threads=WARPGROUP)
            changed = Float32(0.0)
            for w in cutlass.range_constexpr(4):
                changed += factors[2, n % 2 * 4 + w]
            if changed > 0.0:
                # O of the tiles before is complete: their P was waited to be free again.
                tcgen05.fence("after")
                for half in cutlass.range(2 * c.head_dim_v // CHUNK, unroll=1):
                    place = cta.tmem + c.tmem_out + half * 32 + quarter
                    values = tcgen05.load(place, "32x32b", 32)
                    scaled = []
                    for j in cutlass.range_constexpr(32):
                        scaled.append(values[j] * factors[n % 2, half % 2 * 32 + j])
                    tcgen05.store(place, scaled)
            # Written by the generic proxy, read by the tensor core through the async proxy.
            cute.arch.fence_view_async_shared()
            tcgen05.fence("before")
            cta.rings["p"].arrive_full(n)
            cta.rings["rows"].arrive_empty(n)
            n += 1
            count = cta.tile(n)
        self.finish(cta, attn_sink, out, lse, factors, maxima, sums, n, lift, row, warp)

    @cute.jit
    def finish(self, cta: Cta, attn_sink, out, lse, factors, maxima, sums, n: Int32, lift, row: Int32, warp: Int32):
        """lse and out; 0 and -inf of a query without a key."""
        c = self.config
        lane = cute.arch.lane_idx()
        for b in cutlass.range_constexpr(2):
            total = sums[b]
            for step in (1, 2):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=step)
            head = cta.head + row + 8 * b
            weight = Float32(0.0)
            if lane % 4 == 0 and head < c.heads:
                base = maxima[b] - lift
                with_sink = total
                if cutlass.const_expr(c.has_sink):
                    with_sink = total + ptx.exp2_approx((attn_sink + head).load() * softmax.LOG2_E - base)
                value = -Float32.inf
                if n > 0:
                    value = (base + ptx.log2_approx(total)) * LN_2
                    weight = 1.0 / with_sink
                (lse + (cta.query * c.heads + head)).store(value)
            if lane % 4 == 0:
                factors[n % 2, row + 8 * b] = weight
        cute.arch.barrier(barrier_id=BARRIER, number_of_threads=WARPGROUP)
        cta.rings["p"].wait_empty(n)  # the last product is complete
        tcgen05.fence("after")
        first = out + (cta.query * c.heads + cta.head) * c.head_dim_v
        for half in cutlass.range(2 * c.head_dim_v // CHUNK, unroll=1):
            values = cute.make_rmem_tensor(32, Float32)
            values.fill(0.0)
            if n > 0:
                loaded = tcgen05.load(cta.tmem + c.tmem_out + half * 32 + warp * (32 * tcgen05.LANE), "32x32b", 32)
                for j in cutlass.range_constexpr(32):
                    values[j] = loaded[j]
            d = half // 2 * CHUNK + warp * 32 + lane
            for j in cutlass.range_constexpr(32):
                h = half % 2 * 32 + j
                if cta.head + h < c.heads:
                    value = values[j] * factors[n % 2, h]
                    (first + (h * c.head_dim_v + d)).store(value.to(out.dtype))
