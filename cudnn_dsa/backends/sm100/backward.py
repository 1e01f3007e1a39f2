"""The backward of one query and up to 64 heads a CTA, on tcgen05.

For every tile of 64 selected keys K (V is its first D_v columns), everything transposed so that keys or columns of D,
never heads, fill the rows of an instruction:

    S^T  = K Q^T         keys x heads   (M = 64)      P  = exp2(S * scale * log2(e) - Z)
    dP^T = V dO^T        keys x heads   (M = 64)      dS = P * (dP - delta) * scale
    dQ^T += K^T dS^T     D x heads      (M = 128 a chunk, one accumulator for all keys)
    dKV^T = [dO^T P, 0] + Q^T dS    D x keys   (M = 128 a chunk), added to the selected rows of dkv

A thread that reads dKV^T holds one column of D for all keys, so a warp's reduction is one full line of 128 bytes in the
natural order of dkv. Heads are the N or K extent of every product: 16 heads cost a quarter of 64.

Roles (docs/sm100.md has the drawing): the index warp compacts the valid entries of ``topk_idxs`` into tiles of row
numbers, a ring in shared memory that ends with an empty tile; the gather warps copy those rows of kv; the issue warp
gives the products to the tensor core; the softmax warps make P and dS; the reduce warps empty dKV^T.

fp16: P and dS are rounded to the element type, so both carry the query's power of two, ``gain`` (its exponent is part of
Z already), which the results are divided by, exactly.
"""

# mypy: ignore-errors
# (Device code: types are the DSL's.)

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cudnn_dsa.backends.sm100 import ptx
from cudnn_dsa.backends.sm100.config import CHUNK, KEYS, Config
from cudnn_dsa.backends.sm100.layout import ELEMENT_BYTES, K_STEP, instruction

INFINITY = float("inf")




class BackwardSm100:
    """The main kernel. ``config`` fixes everything but sizes, pointers and the scale."""

    def __init__(self, config: Config):
        self.config = config

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        kv: cute.Pointer,
        dout: cute.Pointer,
        z: cute.Pointer,
        delta: cute.Pointer,
        gain: cute.Pointer,
        topk_idxs: cute.Pointer,
        topk_length: cute.Pointer,
        dq: cute.Pointer,
        dkv: cute.Pointer,
        s_q: Int32,
        s_kv: Int32,
        topk: Int32,
        softmax_scale: Float32,
    ):
        c = self.config
        head_tiles = (c.heads + c.heads_tile - 1) // c.heads_tile
        self.kernel(
            q, kv, dout, z, delta, gain, topk_idxs, topk_length, dq, dkv, s_kv, topk, softmax_scale
        ).launch(grid=(s_q * head_tiles, 1, 1), block=(c.threads, 1, 1), smem=c.shared_bytes, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        q: cute.Pointer,
        kv: cute.Pointer,
        dout: cute.Pointer,
        z: cute.Pointer,
        delta: cute.Pointer,
        gain: cute.Pointer,
        topk_idxs: cute.Pointer,
        topk_length: cute.Pointer,
        dq: cute.Pointer,
        dkv: cute.Pointer,
        s_kv: Int32,
        topk: Int32,
        softmax_scale: Float32,
    ):
        c = self.config
        head_tiles = (c.heads + c.heads_tile - 1) // c.heads_tile
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread % 32
        query = Int64(block // head_tiles)
        head = block % head_tiles * c.heads_tile
        shared = cutlass.memory.SmemAllocator().allocate(c.shared_bytes, 1024).toint()

        if warp == c.issue_warp:
            ptx.tcgen05_alloc(shared + c.offset_tmem, self.tmem_allocated)
        if thread == 0:
            for first, count, arrivals in c.barriers.values():
                for i in cutlass.range_constexpr(count):
                    ptx.mbarrier_init(shared + (c.offset_barriers + 8 * (first + i)), arrivals)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        tmem = ptx.load_shared_int(shared + c.offset_tmem)

        if warp < 4:
            cute.arch.setmaxregister_decrease(c.registers.gather)
            self.gather(q.toint(), kv.toint(), dout.toint(), query, head, thread, shared)
        elif warp < 8:
            cute.arch.setmaxregister_increase(c.registers.softmax)
            row = query * c.heads
            self.softmax(
                z.toint() + row * 4, delta.toint() + row * 4, dq.toint(), query, head, warp - 4, lane,
                softmax_scale, gain.toint(), shared, tmem,
            )  # fmt: skip
        elif warp < 16:
            cute.arch.setmaxregister_increase(c.registers.reduce)
            self.reduce(dkv.toint(), query, gain.toint(), warp - 8, lane, shared, tmem)
        else:
            cute.arch.setmaxregister_decrease(c.registers.issue)
            if warp == c.issue_warp:
                if lane == 0:
                    self.issue(shared, tmem)
            elif warp == c.index_warp:
                self.compact_indices(topk_idxs.toint(), topk_length.toint(), query, s_kv, topk, lane, shared)
        # Every role has read what it wanted of tensor memory.
        cute.arch.sync_threads()
        if warp == c.issue_warp:
            ptx.tcgen05_dealloc(tmem, self.tmem_allocated)

    @property
    def tmem_allocated(self) -> int:
        return max(32, 1 << (self.config.tmem_end - 1).bit_length())

    # Barriers: ``use`` counts the uses of a barrier array in order; entry and parity follow.

    def barrier(self, shared, name, use):
        first, count, _ = self.config.barriers[name]
        offset = shared + (self.config.offset_barriers + 8 * first)
        return offset if count == 1 else offset + use % count * 8

    @cute.jit
    def wait_full(self, shared, name: cutlass.Constexpr, use):
        """Until the producer has finished its ``use``-th round."""
        count = self.config.barriers[name][1]
        barrier = self.barrier(shared, name, use)
        parity = use // count % 2
        while ptx.mbarrier_try_wait(barrier, parity) == 0:
            pass

    @cute.jit
    def wait_empty(self, shared, name: cutlass.Constexpr, use):
        """Until the consumer has finished the round before; the first round waits for nothing."""
        count = self.config.barriers[name][1]
        barrier = self.barrier(shared, name, use)
        parity = (use // count + 1) % 2
        while ptx.mbarrier_try_wait(barrier, parity) == 0:
            pass

    @cute.jit
    def arrive(self, shared, name: cutlass.Constexpr, use):
        ptx.mbarrier_arrive(self.barrier(shared, name, use))

    @cute.jit
    def commit(self, shared, name: cutlass.Constexpr, use):
        ptx.tcgen05_commit(self.barrier(shared, name, use))

    @cute.jit
    def tile_count(self, shared, tile) -> Int32:
        """Valid keys of a tile once its row numbers are there; 0 behind the last one."""
        self.wait_full(shared, "rows_full", tile)
        return ptx.load_shared_int(shared + self.config.offset_counts + tile % self.config.ring * 4)

    # Index warp

    @cute.jit
    def compact_indices(self, topk_idxs, topk_length, query, s_kv, topk, lane, shared):
        """Row numbers of the valid entries, in order, 64 a tile; the last tile is filled up with -1."""
        c = self.config
        length = topk
        if cutlass.const_expr(c.has_topk_length):
            length = cutlass.max(cutlass.min(ptx.load_global_int(topk_length + query * 4), topk), 0)
        source = topk_idxs + query * topk * 4
        rows = shared + c.offset_rows
        tile = Int32(0)
        filled = Int32(0)
        position = Int32(lane)
        first = Int32(0)
        while first < length:
            row = Int32(-1)
            if position < length:
                row = ptx.load_global_int(source + Int64(position) * 4)
            valid = row >= 0 and row < s_kv
            ballot = cute.arch.vote_ballot_sync(valid)
            slot = filled + cute.arch.popc(ballot & ((Int32(1) << lane) - 1))
            if valid and slot < KEYS:
                ptx.store_shared(rows + tile % c.ring * (4 * KEYS) + slot * 4, row)
            filled += cute.arch.popc(ballot)
            if filled >= KEYS:
                self.publish(shared, tile, Int32(KEYS), lane)
                tile += 1
                filled -= KEYS
                if valid and slot >= KEYS:
                    ptx.store_shared(rows + tile % c.ring * (4 * KEYS) + (slot - KEYS) * 4, row)
            first += 32
            position += 32
        if filled > 0:
            for i in cutlass.range_constexpr(KEYS // 32):
                if lane + 32 * i >= filled:
                    ptx.store_shared(rows + tile % c.ring * (4 * KEYS) + (lane + 32 * i) * 4, Int32(-1))
            self.publish(shared, tile, filled, lane)
            tile += 1
        self.publish(shared, tile, Int32(0), lane)

    @cute.jit
    def publish(self, shared, tile, count, lane):
        """Hands a tile over and waits until the next slot of the ring is free."""
        c = self.config
        if lane == 0:
            ptx.store_shared(shared + c.offset_counts + tile % c.ring * 4, count)
        self.arrive(shared, "rows_full", tile)
        if count > 0:
            self.wait_empty(shared, "rows_empty", tile + 1)

    # Gather warps

    @cute.jit
    def gather(self, q, kv, dout, query, head, thread, shared):
        c = self.config
        # Q and dO are waited for together with the first tile of keys.
        self.load_heads(c.q, q, query, head, thread, shared)
        self.load_heads(c.dout, dout, query, head, thread, shared + c.offset_dout)
        tile = Int32(0)
        count = self.tile_count(shared, tile)
        while count > 0:
            rows = shared + c.offset_rows + tile % c.ring * (4 * KEYS)
            self.wait_empty(shared, "kv_empty", tile)
            target = shared + c.offset_kv
            if cutlass.const_expr(c.kv_stages > 1):
                target += tile % c.kv_stages * c.kv.bytes
            for group in cutlass.range_constexpr(KEYS // 16):
                r = group * 16 + thread // 8
                row = ptx.load_shared_int(rows + r * 4)
                size = Int32(0)
                source = kv
                if row >= 0:
                    size = Int32(16)
                    source = kv + Int64(row) * (c.head_dim * ELEMENT_BYTES)
                self.copy_row(c.kv, source, size, r, thread, target)
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            # Copied by the generic proxy, read by the tensor core through the async proxy.
            cute.arch.fence_proxy("async.shared", space="cta")
            self.arrive(shared, "kv_full", tile)
            tile += 1
            count = self.tile_count(shared, tile)
        # A query without a key has copies under way that nobody waits for.
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def load_heads(self, tile: cutlass.Constexpr, source, query, head, thread, target):
        """The CTA's heads of a (S_q, H, columns) tensor; zero past the last head."""
        heads = self.config.heads
        for group in cutlass.range_constexpr(tile.rows // 16):
            r = group * 16 + thread // 8
            size = Int32(0)
            row = source
            if head + r < heads:
                size = Int32(16)
                row = source + (query * heads + head + r) * (tile.columns * ELEMENT_BYTES)
            self.copy_row(tile, row, size, r, thread, target)

    @cute.jit
    def copy_row(self, tile: cutlass.Constexpr, source, size, row, thread, target):
        """Eight threads copy one row, 128 bytes at a time, into the swizzled tile."""
        piece = thread % 8
        destination = target + row * tile.width + ((piece ^ (row & tile.swizzle_mask)) * 16)
        for block in cutlass.range_constexpr(tile.columns // tile.span):
            offset = Int64(block * tile.width) if size > 0 else Int64(0)
            ptx.copy_16_bytes(destination + block * tile.block_bytes, source + offset + piece * 16, size)

    # Issue warp (one thread)

    @cute.jit
    def multiply(
        self, tmem, a: cutlass.Constexpr, a_address, b: cutlass.Constexpr, b_address, m: cutlass.Constexpr,
        n: cutlass.Constexpr, contraction: cutlass.Constexpr, a_rows: cutlass.Constexpr, b_rows: cutlass.Constexpr,
        accumulate,
    ):  # fmt: skip
        """``tmem`` (m x n) (+)= A B^T over ``contraction``; ``a_rows``: A is contracted along its rows."""
        desc = instruction(m, n, self.config.element, a_rows, b_rows)
        a_desc = Int64(a.descriptor(a_rows)) + Int64(a_address >> 4)
        b_desc = Int64(b.descriptor(b_rows)) + Int64(b_address >> 4)
        for k in cutlass.range_constexpr(contraction // K_STEP):
            again = accumulate if cutlass.const_expr(k == 0) else Int32(1)
            ptx.tcgen05_mma(
                tmem, a_desc + (a.step(k, a_rows) >> 4), b_desc + (b.step(k, b_rows) >> 4), desc, again
            )

    @cute.jit
    def issue_scores(self, shared, tmem, tile):
        c = self.config
        self.wait_full(shared, "kv_full", tile)
        ptx.tcgen05_fence("after")
        kv = self.kv_address(shared, tile)
        no = Int32(0)
        self.multiply(tmem, c.kv, kv, c.q, shared, KEYS, c.heads_tile, c.head_dim, False, False, no)
        self.multiply(
            tmem + (16 << 16), c.kv, kv, c.dout, shared + c.offset_dout, KEYS, c.heads_tile, c.head_dim_v, False, False, no
        )
        self.commit(shared, "scores_full", tile)

    def kv_address(self, shared, tile):
        c = self.config
        return shared + c.offset_kv + (0 if c.kv_stages == 1 else tile % c.kv_stages * c.kv.bytes)

    @cute.jit
    def issue(self, shared, tmem):
        c = self.config
        tile = Int32(0)
        count = self.tile_count(shared, tile)
        if count > 0:
            self.issue_scores(shared, tmem, tile)
        while count > 0:
            following = self.tile_count(shared, tile + 1)
            self.wait_full(shared, "p_full", tile)
            ptx.tcgen05_fence("after")
            self.issue_dq(shared, tmem, tile)
            self.commit(shared, "kv_empty", tile)
            for chunk in cutlass.range_constexpr(c.chunks):
                if cutlass.const_expr(chunk == c.lookahead_chunk):
                    if following > 0:
                        self.issue_scores(shared, tmem, tile + 1)
                use = tile * c.chunks + chunk
                self.wait_empty(shared, "dkv_empty", use)
                ptx.tcgen05_fence("after")
                self.issue_dkv(shared, tmem + c.tmem_dkv + use % c.dkv_buffers * KEYS, chunk)
                self.commit(shared, "dkv_full", use)
            self.commit(shared, "p_empty", tile)
            tile += 1
            count = following
        self.commit(shared, "dq_full", Int32(0))

    @cute.jit
    def issue_dq(self, shared, tmem, tile):
        c = self.config
        kv = self.kv_address(shared, tile)
        again = Int32(tile > 0)
        for chunk in cutlass.range_constexpr(c.chunks):
            m = CHUNK if chunk < c.full_chunks else c.rest
            self.multiply(
                tmem + (c.tmem_dq + chunk * c.heads_tile), c.kv, kv + c.kv.column(chunk * CHUNK),
                c.p, shared + c.offset_ds, m, c.heads_tile, KEYS, True, True, again,
            )  # fmt: skip

    @cute.jit
    def issue_dkv(self, shared, tmem, chunk: cutlass.Constexpr):
        """A rest of 64 columns is computed for 32 keys at a time, side by side in the lanes that M = 64 leaves free."""
        c = self.config
        m, n = (CHUNK, KEYS) if chunk < c.full_chunks else (c.rest, KEYS // 2)
        for part in cutlass.range_constexpr(KEYS // n):
            target = tmem + (16 * part << 16)
            keys = c.p.row(part * n)
            again = Int32(0)
            if cutlass.const_expr(chunk * CHUNK < c.head_dim_v):
                dout = shared + (c.offset_dout + c.dout.column(chunk * CHUNK))
                self.multiply(
                    target, c.dout, dout, c.p, shared + (c.offset_p + keys), m, n, c.heads_tile, True, False, again
                )
                again = Int32(1)
            self.multiply(
                target, c.q, shared + c.q.column(chunk * CHUNK), c.p, shared + (c.offset_ds + keys),
                m, n, c.heads_tile, True, False, again,
            )  # fmt: skip

    # Softmax warps

    @cute.jit
    def softmax(self, z, delta, dq, query, head, warp, lane, softmax_scale, gain, shared, tmem):
        """P and dS of every tile, then dQ.

        tcgen05.ld 16x256b: register 4a + 2b + e of a lane is key lane/4 + 8b, head 8a + 2(lane%4) + e.
        """
        c = self.config
        groups = c.heads_tile // 8
        lanes = tmem + (warp << 21)
        head_z = []
        head_delta = []
        for a in cutlass.range_constexpr(groups):
            for e in cutlass.range_constexpr(2):
                h = head + (8 * a + e) + lane % 4 * 2
                # A head past the last one has Z = +inf: its P and dS are 0.
                z_h = Float32(INFINITY)
                delta_h = Float32(0)
                if h < c.heads:
                    z_h = ptx.load_global_float(z + Int64(h) * 4)
                    delta_h = ptx.load_global_float(delta + Int64(h) * 4)
                head_z.append(z_h)
                head_delta.append(delta_h)
        scale2 = softmax_scale * 1.4426950408889634
        key = warp * 16 + lane // 4
        swizzle = ((key >> c.p.swizzle_shift) & c.p.swizzle_mask) << 4
        line = key * c.p.width + lane % 4 * 4
        tile = Int32(0)
        count = self.tile_count(shared, tile)
        while count > 0:
            rows = shared + c.offset_rows + tile % c.ring * (4 * KEYS) + key * 4
            valid = [ptx.load_shared_int(rows) >= 0, ptx.load_shared_int(rows + 32) >= 0]
            self.wait_full(shared, "scores_full", tile)
            ptx.tcgen05_fence("after")
            s = ptx.tcgen05_load(lanes, "16x256b", groups)
            dp = ptx.tcgen05_load(lanes + (16 << 16), "16x256b", groups)
            p, ds = [], []
            for j in cutlass.range_constexpr(4 * groups):
                h = j // 4 * 2 + j % 2
                # Rows of zeros stand for invalid keys: their scores are masked after the exponential of S - Z, which
                # is then exp(-Z) and may overflow, and before it is multiplied with anything.
                weight = ptx.exp2(s[j] * scale2 - head_z[h])
                weight = weight if valid[j // 2 % 2] else Float32(0)
                slope = weight * ((dp[j] - head_delta[h]) * softmax_scale)
                slope = slope if valid[j // 2 % 2] else Float32(0)
                p.append(weight)
                ds.append(slope)
            self.wait_empty(shared, "p_empty", tile)
            for a in cutlass.range_constexpr(groups):
                for b in cutlass.range_constexpr(2):
                    address = shared + (line + ((a << 4) ^ swizzle) + 8 * b * c.p.width)
                    j = 4 * a + 2 * b
                    ptx.store_shared(address + c.offset_p, ptx.pack_pair(p[j], p[j + 1], c.element))
                    ptx.store_shared(address + c.offset_ds, ptx.pack_pair(ds[j], ds[j + 1], c.element))
            # Written by the generic proxy, read by the tensor core through the async proxy.
            cute.arch.fence_proxy("async.shared", space="cta")
            ptx.tcgen05_fence("before")
            self.arrive(shared, "p_full", tile)
            tile += 1
            count = self.tile_count(shared, tile)
        self.store_dq(dq, query, head, warp, lane, gain, tile, shared, lanes)

    @cute.jit
    def store_dq(self, dq, query, head, warp, lane, gain, tiles, shared, lanes):
        """dQ^T: lane = column of D, register = head; rounded once. A query without a key gets zeros."""
        c = self.config
        back = self.inverse_gain(gain, query)
        self.wait_full(shared, "dq_full", Int32(0))
        ptx.tcgen05_fence("after")
        stride = c.head_dim * ELEMENT_BYTES
        base = dq + (query * c.heads + head) * stride
        for chunk in cutlass.range_constexpr(c.full_chunks):
            values = [Float32(0)] * c.heads_tile
            if tiles > 0:
                values = list(ptx.tcgen05_load(lanes + (c.tmem_dq + chunk * c.heads_tile), "32x32b", c.heads_tile))
            column = base + Int64(chunk * CHUNK + warp * 32 + lane) * ELEMENT_BYTES
            for h in cutlass.range_constexpr(c.heads_tile):
                if head + h < c.heads:
                    ptx.store_element(column + h * stride, self.scaled(values[h], back), c.element)
        if cutlass.const_expr(c.rest > 0):
            # M = 64: 16 lanes a warp, read as 16x256b like the scores.
            groups = c.heads_tile // 8
            values = [Float32(0)] * (4 * groups)
            if tiles > 0:
                values = list(
                    ptx.tcgen05_load(lanes + (c.tmem_dq + c.full_chunks * c.heads_tile), "16x256b", groups)
                )
            for j in cutlass.range_constexpr(4 * groups):
                h = j // 4 * 8 + lane % 4 * 2 + j % 2
                d = c.full_chunks * CHUNK + warp * 16 + lane // 4 + j // 2 % 2 * 8
                if head + h < c.heads:
                    address = base + Int64(h) * stride + Int64(d) * ELEMENT_BYTES
                    ptx.store_element(address, self.scaled(values[j], back), c.element)

    @cute.jit
    def inverse_gain(self, gain, query):
        back = Float32(1)
        if cutlass.const_expr(self.config.element == "f16"):
            back = ptx.load_global_float(gain + query * 4)
        return back

    def scaled(self, value, back):
        return value * back if self.config.element == "f16" else value

    # Reduce warps

    @cute.jit
    def reduce(self, dkv, query, gain, warp, lane, shared, tmem):
        """dKV^T: lane = column of D, register = key. The two warpgroups take turns, chunk by chunk."""
        c = self.config
        group = warp // 4
        quarter = warp % 4
        back = self.inverse_gain(gain, query)
        lanes = tmem + c.tmem_dkv + (quarter << 21)
        stride = c.head_dim * 4
        tile = Int32(0)
        count = self.tile_count(shared, tile)
        while count > 0:
            rows = shared + c.offset_rows + tile % c.ring * (4 * KEYS)
            for chunk in cutlass.range(c.full_chunks, unroll=1):
                use = tile * c.chunks + chunk
                if use % 2 == group:
                    values = self.take_chunk(shared, lanes, use, KEYS)
                    column = dkv + Int64(chunk * CHUNK + quarter * 32 + lane) * 4
                    self.add_rows(column, rows, values, KEYS, back)
            if cutlass.const_expr(c.rest > 0):
                use = tile * c.chunks + c.full_chunks
                if use % 2 == group:
                    values = self.take_chunk(shared, lanes, use, KEYS // 2)
                    column = dkv + Int64(c.full_chunks * CHUNK + quarter * 16 + lane % 16) * 4
                    self.add_rows(column, rows + lane // 16 * (2 * KEYS), values, KEYS // 2, back)
            self.arrive(shared, "rows_empty", tile)
            tile += 1
            count = self.tile_count(shared, tile)

    @cute.jit
    def take_chunk(self, shared, lanes, use, columns: cutlass.Constexpr):
        """The chunk in registers; its accumulator is free again before a single value is added."""
        c = self.config
        self.wait_full(shared, "dkv_full", use)
        ptx.tcgen05_fence("after")
        values = ptx.tcgen05_load(lanes + use % c.dkv_buffers * KEYS, "32x32b", columns)
        ptx.tcgen05_fence("before")
        self.arrive(shared, "dkv_empty", use)
        return values

    @cute.jit
    def add_rows(self, column, rows, values: cutlass.Constexpr, keys: cutlass.Constexpr, back):
        for four in cutlass.range_constexpr(keys // 4):
            numbers = ptx.load_shared_int4(rows + 16 * four)
            for i in cutlass.range_constexpr(4):
                if numbers[i] >= 0:
                    address = column + Int64(numbers[i]) * (self.config.head_dim * 4)
                    ptx.reduce_add(address, self.scaled(values[4 * four + i], back))
