"""The backward of one query and up to 64 heads a CTA, on tcgen05 (docs/sm100.md explains it with drawings).

For every tile of 64 selected keys K (V is its first D_v columns), everything transposed so that keys or columns of D,
never heads, fill the rows of an instruction:

    S^T  = K Q^T         keys x heads   (M = 64)      P  = 2 ** (S * scale2 - Z2)
    dP^T = V dO^T        keys x heads   (M = 64)      dS = P * (dP - delta) * scale
    dQ^T += K^T dS^T     D x heads      (M = 128 a chunk, one accumulator for all keys)
    dKV^T = [dO^T P, 0] + Q^T dS    D x keys   (M = 128 a chunk), added to the selected rows of dkv

A thread that reads dKV^T holds one column of D for all keys, so a warp's reduction is one full line of 128 bytes in the
natural order of dkv. Heads are the N or K extent of every product: 16 heads cost a quarter of 64.

Roles: the index warp packs the valid entries of topk_idxs into tiles of row numbers, which end with an empty tile; the
gather warps copy those rows of kv; the issue warp gives the products to the tensor core; the softmax warps make P and
dS, and store dQ; the reduce warps empty dKV^T.

fp16: P and dS are rounded to the element type, so both carry a power of two of the query, its gain (gain.py), which the
results are divided by.
"""

# mypy: ignore-errors
# (Device code: types are the DSL's.)

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cudnn_dsa.backends.sm100 import tcgen05
from cudnn_dsa.backends.sm100.config import CHUNK, KEYS
from cudnn_dsa.backends.sm100.kernel import Cta, Sm100Kernel
from cudnn_dsa.cute import ptx, selection, softmax

HELD = 32  # keys of a chunk whose values a reduce thread holds at a time


class BackwardSm100(Sm100Kernel):
    """Compile-time parameters of the kernel, all in ``config``; ``__call__`` is the host function."""

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        kv: cute.Pointer,
        dout: cute.Pointer,
        z2: cute.Pointer,
        delta: cute.Pointer,
        gain: cute.Pointer,
        topk_idxs: cute.Pointer,
        topk_length: cute.Pointer,
        dq: cute.Pointer,
        sums: cute.Pointer,
        first_query: Int32,
        queries: Int32,
        s_kv: Int32,
        topk: Int32,
        softmax_scale: Float32,
    ):
        """dq (S_q, H, D), and sums (S_kv, D) fp32 of dkv, to which is added, of ``queries`` queries.

        From q (S_q, H, D), kv (S_kv, D), dout (S_q, H, D_v), z2 and delta (S_q, H) fp32, gain (S_q,) int32 (fp16 only),
        topk_idxs (S_q, K), topk_length (S_q,). With ``config.partials`` sums is (queries * head tiles, K, D): every row
        that a query contributes, in the order of its valid entries.
        """
        c = self.config
        self.kernel(
            q, kv, dout, z2, delta, gain, topk_idxs, topk_length, dq, sums, first_query, s_kv, topk,
            softmax_scale,
        ).launch(
            grid=(queries * c.head_tiles, 1, 1), block=(c.threads, 1, 1), smem=c.shared_bytes, min_blocks_per_mp=1
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q: cute.Pointer,
        kv: cute.Pointer,
        dout: cute.Pointer,
        z2: cute.Pointer,
        delta: cute.Pointer,
        gain: cute.Pointer,
        topk_idxs: cute.Pointer,
        topk_length: cute.Pointer,
        dq: cute.Pointer,
        sums: cute.Pointer,
        first_query: Int32,
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

        if warp == c.issue_warp:
            tcgen05.alloc(holder, c.tmem_allocated)
        if thread == 0:
            for name, (_, producers, consumers) in c.rings.items():
                rings[name].init(producers, consumers)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cta = Cta(
            query=Int64(first_query + block // c.head_tiles),
            head=block % c.head_tiles * c.heads_tile,
            shared=memory.toint(),
            rows=self.int32s(memory + c.offset_rows, (c.ring, KEYS)),
            counts=self.int32s(memory + c.offset_counts, (c.ring,)),
            rings=rings,
            tmem=holder.load(),
        )
        exponent = Int32(0)
        if cutlass.const_expr(self.dtype is cutlass.Float16):
            exponent = (gain + cta.query).load()

        if warp < 4:
            cute.arch.setmaxregister_decrease(c.registers.gather)
            self.gather(cta, kv, [(q, c.q, 0), (dout, c.dout, c.offset_dout)], thread)
        elif warp < 8:
            cute.arch.setmaxregister_increase(c.registers.softmax)
            tiles = self.softmax(cta, z2, delta, softmax_scale, exponent, warp - 4)
            self.store_dq(cta, dq, tiles, exponent, warp - 4)
        elif warp < 16:
            cute.arch.setmaxregister_increase(c.registers.reduce)
            self.reduce(cta, self.target(sums, block, topk), exponent, warp - 8)
        else:
            cute.arch.setmaxregister_decrease(c.registers.issue)
            if warp == c.issue_warp:
                if cute.arch.lane_idx() == 0:
                    self.issue(cta)
            elif warp == c.index_warp:
                lengths = topk_length if cutlass.const_expr(c.has_topk_length) else None
                selection.feed_rows(
                    selection.index_row(topk_idxs, cta.query, topk), selection.row_length(lengths, cta.query, topk),
                    s_kv, cta.rows, cta.counts, rings["rows"], Int32(0), KEYS,
                )  # fmt: skip
        # Every role has read what it wanted of tensor memory.
        cute.arch.sync_threads()
        if warp == c.issue_warp:
            tcgen05.dealloc(cta.tmem, c.tmem_allocated)

    def target(self, sums: cute.Pointer, block: Int32, topk: Int32) -> cute.Pointer:
        """Row 0 of dkv, or the CTA's first slot."""
        return sums + Int64(block) * topk * self.config.head_dim if self.config.partials else sums

    # Issue warp (one thread)

    @cute.jit
    def issue(self, cta: Cta):
        c = self.config
        n = Int32(0)
        count = cta.tile(n)
        if count > 0:
            self.issue_scores(cta, n)
        while count > 0:
            following = cta.tile(n + 1)
            # Adds 0, which no compiler knows: else the descriptors of 120 products leave the loop, and spill.
            here = replace(cta, shared=cta.shared + (following >> 31))
            cta.rings["p"].wait_full(n)
            tcgen05.fence("after")
            self.issue_dq(here, n)
            tcgen05.commit(cta.rings["kv"].empty(n))
            for chunk in cutlass.range_constexpr(c.chunks):
                if cutlass.const_expr(chunk == c.lookahead_chunk):  # noqa: SIM102 (decided when compiling)
                    if following > 0:
                        self.issue_scores(here, n + 1)
                use = n * c.chunks + chunk
                cta.rings["dkv"].wait_empty(use)
                tcgen05.fence("after")
                self.issue_dkv(here, use, chunk)
                tcgen05.commit(cta.rings["dkv"].full(use))
            tcgen05.commit(cta.rings["p"].empty(n))
            n += 1
            count = following
        tcgen05.commit(cta.rings["dq"].full(Int32(0)))

    @cute.jit
    def issue_scores(self, cta: Cta, n: Int32):
        """S and dP of a tile. Their columns are free: P of the tile before was waited for, which was made from them."""
        c = self.config
        cta.rings["kv"].wait_full(n)
        tcgen05.fence("after")
        kv = self.kv_address(cta, n)
        fresh = Int32(0)
        self.multiply(cta.tmem, c.kv, kv, c.q, cta.shared, (KEYS, c.heads_tile, c.head_dim), False, False, fresh)
        self.multiply(
            cta.tmem + c.tmem_dp, c.kv, kv, c.dout, cta.shared + c.offset_dout,
            (KEYS, c.heads_tile, c.head_dim_v), False, False, fresh,
        )  # fmt: skip
        tcgen05.commit(cta.rings["scores"].full(n))

    @cute.jit
    def issue_dq(self, cta: Cta, n: Int32):
        c = self.config
        again = Int32(n > 0)
        for chunk in cutlass.range_constexpr(c.chunks):
            self.multiply(
                cta.tmem + (c.tmem_dq + chunk * c.heads_tile),
                c.kv, self.kv_address(cta, n) + c.kv.column(chunk * CHUNK), c.p, cta.shared + c.offset_ds,
                (c.chunk_rows(chunk), c.heads_tile, KEYS), True, True, again,
            )  # fmt: skip

    @cute.jit
    def issue_dkv(self, cta: Cta, use: Int32, chunk: cutlass.Constexpr):
        """A rest of 64 columns is computed for 32 keys at a time, side by side in the lanes that M = 64 leaves free."""
        c = self.config
        target = cta.tmem + c.tmem_dkv + cta.rings["dkv"].stage(use) * KEYS
        m = c.chunk_rows(chunk)
        keys = KEYS * m // CHUNK
        for part in cutlass.range_constexpr(KEYS // keys):
            lanes = target + part * 16 * tcgen05.LANE
            rows = c.p.row(part * keys)
            again = Int32(0)
            if cutlass.const_expr(chunk * CHUNK < c.head_dim_v):
                self.multiply(
                    lanes, c.dout, cta.shared + (c.offset_dout + c.dout.column(chunk * CHUNK)),
                    c.p, cta.shared + (c.offset_p + rows), (m, keys, c.heads_tile), True, False, again,
                )  # fmt: skip
                again = Int32(1)
            self.multiply(
                lanes, c.q, cta.shared + c.q.column(chunk * CHUNK),
                c.p, cta.shared + (c.offset_ds + rows), (m, keys, c.heads_tile), True, False, again,
            )  # fmt: skip

    # Softmax warps

    @cute.jit
    def softmax(self, cta: Cta, z2, delta, softmax_scale, exponent: Int32, warp: Int32) -> Int32:
        """P and dS of every tile; returns how many there were.

        A thread has two keys, eight apart, and every fourth pair of heads.
        """
        c = self.config
        lane = cute.arch.lane_idx()
        groups = c.heads_tile // 8
        lanes = cta.tmem + warp * (32 * tcgen05.LANE)
        ceiling = Float32(exponent)
        head_z2 = cute.make_rmem_tensor(2 * groups, Float32)
        head_delta = cute.make_rmem_tensor(2 * groups, Float32)
        for i in cutlass.range_constexpr(2 * groups):
            h = cta.head + (i // 2 * 8 + i % 2) + lane % 4 * 2
            head_z2[i], head_delta[i] = Float32.inf, Float32(0)  # heads past H: P and dS are zeros
            if h < c.heads:
                head_z2[i] = (z2 + (cta.query * c.heads + h)).load() - ceiling
                head_delta[i] = (delta + (cta.query * c.heads + h)).load()
        scale2 = softmax_scale * softmax.LOG2_E
        key = warp * 16 + lane // 4
        swizzle = ((key >> c.p.swizzle_shift) & c.p.swizzle_mask) << 4
        line = cta.shared + key * c.p.width + lane % 4 * 4
        n = Int32(0)
        while cta.tile(n) > 0:
            valid = [cta.rows_of(n)[key] >= 0, cta.rows_of(n)[key + 8] >= 0]
            cta.rings["scores"].wait_full(n)
            tcgen05.fence("after")
            s = tcgen05.load(lanes, "16x256b", groups)
            dp = tcgen05.load(lanes + c.tmem_dp, "16x256b", groups)
            cta.rings["p"].wait_empty(n)
            for pair in cutlass.range_constexpr(2 * groups):
                p, ds = [], []
                for e in cutlass.range_constexpr(2):
                    j, i = 2 * pair + e, pair // 2 * 2 + e
                    counts = valid[pair % 2]
                    p.append(softmax.probability(s[j], scale2, head_z2[i], counts, ceiling))
                    ds.append(softmax.score_gradient(p[e], dp[j], head_delta[i], softmax_scale, counts))
                place = line + (((pair // 2) << 4) ^ swizzle) + pair % 2 * 8 * c.p.width
                self.shared_pointer(Int32, place + c.offset_p, 4).store(ptx.pack_halves(*p, self.dtype))
                self.shared_pointer(Int32, place + c.offset_ds, 4).store(ptx.pack_halves(*ds, self.dtype))
            # Written by the generic proxy, read by the tensor core through the async proxy.
            cute.arch.fence_view_async_shared()
            tcgen05.fence("before")
            cta.rings["p"].arrive_full(n)
            n += 1
        return n

    @cute.jit
    def store_dq(self, cta: Cta, dq: cute.Pointer, tiles: Int32, exponent: Int32, warp: Int32):
        """dQ^T: lane = column of D, register = head; rounded once. A query without a key gets zeros."""
        c = self.config
        lane = cute.arch.lane_idx()
        back = ptx.power_of_two(-exponent)
        lanes = cta.tmem + c.tmem_dq + warp * (32 * tcgen05.LANE)
        cta.rings["dq"].wait_full(Int32(0))
        tcgen05.fence("after")
        first = dq + (cta.query * c.heads + cta.head) * c.head_dim
        for chunk in cutlass.range_constexpr(c.chunks):
            full = chunk < c.full_chunks
            count = c.heads_tile if full else c.heads_tile // 2
            values = cute.make_rmem_tensor(count, Float32)
            values.fill(0.0)
            if tiles > 0:
                loaded = self.load_dq(lanes + chunk * c.heads_tile, full)
                for j in cutlass.range_constexpr(count):
                    values[j] = loaded[j]
            for j in cutlass.range_constexpr(count):
                # A rest of M = 64 lies in 16 lanes a warp and is read like the scores.
                h = j if full else j // 4 * 8 + lane % 4 * 2 + j % 2
                d = chunk * CHUNK + (warp * 32 + lane if full else warp * 16 + lane // 4 + j // 2 % 2 * 8)
                if cta.head + h < c.heads:
                    (first + (h * c.head_dim + d)).store(self.scaled(values[j], back).to(self.dtype))

    def load_dq(self, lanes: Int32, full: bool) -> tuple:
        heads = self.config.heads_tile
        return tcgen05.load(lanes, "32x32b", heads) if full else tcgen05.load(lanes, "16x256b", heads // 8)

    def scaled(self, value: Float32, back: Float32) -> Float32:
        return value * back if self.dtype is cutlass.Float16 else value

    # Reduce warps

    @cute.jit
    def reduce(self, cta: Cta, sums: cute.Pointer, exponent: Int32, warp: Int32):
        """dKV^T: lane = column of D, register = key. The two warpgroups take turns, chunk by chunk."""
        c = self.config
        lane = cute.arch.lane_idx()
        group, quarter = warp // 4, warp % 4
        back = ptx.power_of_two(-exponent)
        lanes = cta.tmem + c.tmem_dkv + quarter * (32 * tcgen05.LANE)
        n = Int32(0)
        while cta.tile(n) > 0:
            rows = cta.rows_of(n)
            for chunk in cutlass.range(c.full_chunks, unroll=1):
                use = n * c.chunks + chunk
                if use % 2 == group:
                    column = sums + (chunk * CHUNK + quarter * 32 + lane)
                    self.add_chunk(cta, use, lanes, KEYS, column, rows, Int32(0), n, back)
            if cutlass.const_expr(c.rest > 0):
                use = n * c.chunks + c.full_chunks
                if use % 2 == group:
                    column = sums + (c.full_chunks * CHUNK + quarter * 16 + lane % 16)
                    self.add_chunk(cta, use, lanes, KEYS // 2, column, rows, lane // 16 * (KEYS // 2), n, back)
            cta.rings["rows"].arrive_empty(n)
            n += 1

    @cute.jit
    def add_chunk(
        self, cta: Cta, use: Int32, lanes: Int32, keys: cutlass.Constexpr, column, rows, first: Int32, n, back
    ):  # fmt: skip
        """A column's values of ``keys`` rows of dkv, from ``rows[first]`` on; half a chunk a time is in registers."""
        ring = cta.rings["dkv"]
        ring.wait_full(use)
        tcgen05.fence("after")
        accumulator = lanes + ring.stage(use) * KEYS
        for half in cutlass.range_constexpr(keys // HELD):
            values = tcgen05.load(accumulator + half * HELD, "32x32b", HELD)
            if cutlass.const_expr(half == keys // HELD - 1):
                tcgen05.fence("before")
                ring.arrive_empty(use)
            self.add_rows(column, rows, first + half * HELD, n * KEYS, values, back)

    @cute.jit
    def add_rows(self, column: cute.Pointer, rows: cute.Tensor, first: Int32, slot: Int32, values, back):
        """To the selected rows of dkv; or stored to the query's slots, which are its valid entries in order."""
        numbers = cute.make_rmem_tensor(4, Int32)
        for i in cutlass.range_constexpr(HELD):
            if cutlass.const_expr(i % 4 == 0):
                pointer = self.shared_pointer(Int32, (rows.iterator + (first + i)).toint(), 16)
                cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), numbers)
            row = numbers[i % 4]
            if row >= 0:
                value = self.scaled(values[i], back)
                if cutlass.const_expr(self.config.partials):
                    (column + Int64(slot + first + i) * self.config.head_dim).store(value)
                else:
                    ptx.red_add(column + Int64(row) * self.config.head_dim, value)
