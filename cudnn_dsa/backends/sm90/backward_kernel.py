"""The Hopper backward kernel (docs/sm90.md explains it with drawings).

For a query, 64 of its heads and its selected keys, 64 at a time (V is the first D_v columns of K), in base 2:

    S  = Q K^T     (64 heads x 64 keys)      P  = 2 ** (S * scale2 - Z2)
    dP = dO V^T    (64 heads x 64 keys)      dS = P * (dP - delta) * scale
    dQ += dS K     (64 heads x D)            dKV = P^T dO + dS^T Q   (64 keys x D), added to the selected rows of dkv

Z2 and delta come from cute/prepare.py; the fp32 sums of dkv go to cute/finish.py.

Roles, four warpgroups of a persistent CTA:

    producer   warp 0: row numbers of valid keys, packed into tiles of 64; Q and dO by tensor copies
               warps 1-3: gather the rows of K
    score      S, dP, P, dS; writes P and dS to shared memory; dQ of the first group of columns
    dkv 0, 1   dKV in chunks of 64 columns, every second chunk each; dQ of the second and third group

A tile of K is handed over in groups of 192 columns: the group of the next tile is gathered as soon as the dQ of its
columns is done, while dKV, which needs no K, is still being computed. Two warpgroups take turns at the matrix unit and
at the reductions, which bound this kernel, so that reductions are always under way.

Shared memory, D = 576: Q 72 KB, dO 64 KB, K 72 KB, P 8 KB, dS 8 KB; row numbers and barriers 1.2 KB.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from cudnn_dsa.backends.sm90 import wgmma
from cudnn_dsa.backends.sm90.config import WARPGROUP, BackwardConfig
from cudnn_dsa.backends.sm90.wgmma import Major
from cudnn_dsa.cute import ptx, scatter, selection, softmax
from cudnn_dsa.cute.gather import gather_columns
from cudnn_dsa.cute.ring import Ring

CHUNK = 64  # columns of dkv computed and reduced at a time
WARPS = 4  # of a warpgroup
READ_ONCE = 0x12F0000000000000  # cache policy of tensor copies: evict_first


class BackwardSm90:
    """Compile-time parameters of the kernel; ``__call__`` is the host function.

    Args:
        dtype: bf16 or fp16, of q, kv, dout and dq.
        heads, head_dim, head_dim_v: H, D and D_v.
        has_topk_length: whether topk_length is given; pass a null pointer if not.
    """

    def __init__(
        self, dtype: type[cutlass.Numeric], heads: int, head_dim: int, head_dim_v: int, has_topk_length: bool,
        config: BackwardConfig,
    ):  # fmt: skip
        self.dtype = dtype
        self.heads, self.head_dim, self.head_dim_v = heads, head_dim, head_dim_v
        self.has_topk_length = has_topk_length
        self.config = config
        self.head_tiles = config.head_tiles(heads)
        self.groups = config.groups(head_dim)
        self.groups_v = config.groups(head_dim_v)
        self.chunks, self.chunks_v = head_dim // CHUNK, head_dim_v // CHUNK

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
        q_map, q_tensor = self._tensor_map(q, self.head_dim, s_q)
        dout_map, dout_tensor = self._tensor_map(dout, self.head_dim_v, s_q)
        grid = cutlass.min(s_q * self.head_tiles, multiprocessors)
        self.kernel(
            q_map, q_tensor, dout_map, dout_tensor, kv, z2, delta, topk_idxs, topk_length, dq, dkv,
            s_q, s_kv, topk, softmax_scale,
        ).launch(
            grid=(grid, 1, 1), block=(self.config.threads, 1, 1),
            smem=self.config.shared_bytes(self.head_dim, self.head_dim_v), min_blocks_per_mp=1,
        )  # fmt: skip

    def _tensor_map(self, base: cute.Pointer, columns: int, s_q: Int32):
        """A tensor copy of 64 heads x 64 columns of one query; heads past H arrive as zeros."""
        layout = cute.make_layout(
            (self.heads, columns, s_q), stride=(columns, 1, self.heads * columns)
        )
        box = wgmma.swizzled(self.dtype, self.config.block_heads, CHUNK)
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), cute.make_tensor(base, layout), box, (self.config.block_heads, CHUNK)
        )

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

        memory = cutlass.memory.SmemAllocator()
        s_q_tile = self._tile(memory, config.block_heads, self.head_dim)
        s_dout = self._tile(memory, config.block_heads, self.head_dim_v)
        s_kv_tile = self._tile(memory, config.block_keys, self.head_dim)
        s_p = self._tile(memory, config.block_heads, config.block_keys)
        s_ds = self._tile(memory, config.block_heads, config.block_keys)
        rows_layout = cute.make_layout((config.row_stages, config.block_keys), stride=(config.block_keys, 1))
        s_rows = memory.allocate_tensor(Int32, rows_layout, byte_alignment=128)
        s_counts = memory.allocate_tensor(Int32, cute.make_layout(config.row_stages))
        stages = [config.row_stages, *[1] * len(self.groups), 1, 1]
        barriers = memory.allocate_array(Int64, sum(map(Ring.barriers_of, stages)))
        rings = []
        for count in stages:
            rings.append(Ring(barriers, count))
            barriers = barriers + Ring.barriers_of(count)
        row_ring, *kv_rings, query_ring, p_ring = rings

        if warp == 0 and cute.arch.lane_idx() == 0:
            row_ring.init(1, config.gather_warps + 3 * WARPS)
            for ring in kv_rings:
                ring.init(config.gather_warps * 32, WARPS)
            query_ring.init(1, 3 * WARPS)
            p_ring.init(WARPS, 2 * WARPS)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp < WARPS:
            cute.arch.setmaxregister_decrease(config.registers[0])
            if warp == 0:
                self.feed(
                    q_map, q_tensor, dout_map, dout_tensor, s_q_tile, s_dout, topk_idxs, topk_length, s_q, s_kv, topk,
                    s_rows, s_counts, row_ring, query_ring,
                )  # fmt: skip
            else:
                self.gather(kv, s_kv_tile, s_q, s_rows, s_counts, thread - 32, row_ring, kv_rings)
        elif warp < 2 * WARPS:
            cute.arch.setmaxregister_increase(config.registers[1])
            self.score(
                s_q_tile, s_dout, s_kv_tile, s_p, s_ds, z2, delta, dq, s_q, softmax_scale, s_counts, thread,
                row_ring, kv_rings, query_ring, p_ring,
            )  # fmt: skip
        elif warp < 3 * WARPS:
            cute.arch.setmaxregister_increase(config.registers[2])
            self.key_gradient(
                0, s_q_tile, s_dout, s_kv_tile, s_p, s_ds, dq, dkv, s_q, s_rows, s_counts, thread,
                row_ring, kv_rings, query_ring, p_ring,
            )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(config.registers[3])
            self.key_gradient(
                1, s_q_tile, s_dout, s_kv_tile, s_p, s_ds, dq, dkv, s_q, s_rows, s_counts, thread,
                row_ring, kv_rings, query_ring, p_ring,
            )  # fmt: skip

    def _tile(self, memory, rows: int, columns: int) -> cute.Tensor:
        layout = wgmma.swizzled(self.dtype, rows, columns)
        return memory.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)

    # Producer, warp 0.

    @cute.jit
    def feed(
        self, q_map, q_tensor, dout_map, dout_tensor, s_q_tile, s_dout, topk_idxs, topk_length, s_q, s_kv, topk,
        s_rows, s_counts, row_ring, query_ring,
    ):  # fmt: skip
        """Q, dO and the row numbers of each query."""
        tiles = Int32(0)
        queries = Int32(0)
        work = cute.arch.block_idx()[0]
        while work < s_q * self.head_tiles:
            query, head_tile = work // self.head_tiles, work % self.head_tiles
            query_ring.wait_empty(queries)
            if cute.arch.lane_idx() == 0:
                size = self.config.block_heads * (self.head_dim + self.head_dim_v) * self.dtype.width // 8
                cute.arch.mbarrier_arrive_and_expect_tx(query_ring.full(queries), size)
            self._load(q_map, q_tensor, s_q_tile, query, head_tile, query_ring.full(queries))
            self._load(dout_map, dout_tensor, s_dout, query, head_tile, query_ring.full(queries))
            lengths = topk_length if cutlass.const_expr(self.has_topk_length) else None
            length = selection.row_length(lengths, query, topk)
            tiles = selection.feed_rows(
                selection.index_row(topk_idxs, query, topk), length, s_kv, s_rows, s_counts, row_ring, tiles,
                self.config.block_keys,
            )  # fmt: skip
            queries += 1
            work += cute.arch.grid_dim()[0]

    def _load(self, copy: cute.CopyAtom, source: cute.Tensor, tile: cute.Tensor, query, head_tile, barrier) -> None:
        source = cute.local_tile(source[None, None, query], (self.config.block_heads, CHUNK), (head_tile, None))
        shared, outside = cpasync.tma_partition(
            copy, 0, cute.make_layout(1), cute.group_modes(wgmma.chunks_of(tile), 0, 2), cute.group_modes(source, 0, 2)
        )
        for chunk in range(cute.size(shared, mode=[1])):
            cute.copy(
                copy, outside[None, chunk], shared[None, chunk], tma_bar_ptr=barrier, cache_policy=Int64(READ_ONCE)
            )

    # Producer, the other warps.

    @cute.jit
    def gather(self, kv, s_kv_tile, s_q, s_rows, s_counts, thread, row_ring, kv_rings):
        """The keys of each tile, group by group."""
        slots = Int32(0)
        tiles = Int32(0)
        work = cute.arch.block_idx()[0]
        while work < s_q * self.head_tiles:
            row_ring.wait_full(slots)
            count = s_counts[row_ring.stage(slots)]
            while count > 0:
                for group in cutlass.range_constexpr(len(self.groups)):
                    first, columns = self.groups[group]
                    kv_rings[group].wait_empty(tiles)
                    gather_columns(
                        kv, s_rows[row_ring.stage(slots), None], s_kv_tile.iterator + first * self.config.block_keys,
                        thread, self.config.gather_warps * 32, self.head_dim, first, columns,
                    )  # fmt: skip
                    cute.arch.cp_async_mbarrier_arrive_noinc(kv_rings[group].full(tiles))
                row_ring.arrive_empty(slots)
                slots += 1
                tiles += 1
                row_ring.wait_full(slots)
                count = s_counts[row_ring.stage(slots)]
            row_ring.arrive_empty(slots)
            slots += 1
            work += cute.arch.grid_dim()[0]

    # Score warpgroup.

    @cute.jit
    def score(
        self, s_q_tile, s_dout, s_kv_tile, s_p, s_ds, z2, delta, dq, s_q, softmax_scale, s_counts, thread,
        row_ring, kv_rings, query_ring, p_ring,
    ):  # fmt: skip
        """S, dP, P, dS of each tile, and the first group of dQ."""
        block_keys = self.config.block_keys
        mma = wgmma.tiled(self.dtype, block_keys, Major.K, Major.K)
        s_parts = [self._score_operands(mma, thread, s_q_tile, s_kv_tile, group) for group in self.groups]
        dp_parts = [self._score_operands(mma, thread, s_dout, s_kv_tile, group) for group in self.groups_v]
        acc_s, acc_dp = wgmma.accumulator(mma, block_keys), wgmma.accumulator(mma, block_keys)
        scores, gradients = softmax.accumulator_rows(acc_s), softmax.accumulator_rows(acc_dp)
        place = softmax.accumulator_coordinates(mma.get_slice(thread), (self.config.block_heads, block_keys))
        store = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        store = cute.make_tiled_copy_C(store, mma).get_slice(thread)
        to_p, to_ds = store.partition_D(s_p), store.partition_D(s_ds)
        dq_mma, acc_dq, dq_a, dq_b = self._query_gradient(0, s_ds, s_kv_tile, thread)
        scale2 = softmax_scale * softmax.LOG2_E

        slots = Int32(0)
        tiles = Int32(0)
        queries = Int32(0)
        work = cute.arch.block_idx()[0]
        while work < s_q * self.head_tiles:
            query, head_tile = work // self.head_tiles, work % self.head_tiles
            row_z2 = cute.make_rmem_tensor(2, Float32)
            row_delta = cute.make_rmem_tensor(2, Float32)
            for r in cutlass.range_constexpr(2):
                head = head_tile * self.config.block_heads + place[r, 0][0]
                row_z2[r], row_delta[r] = Float32.inf, 0.0  # heads past H: P and dS are zeros
                if head < self.heads:
                    row_z2[r] = (z2 + (Int64(query) * self.heads + head)).load()
                    row_delta[r] = (delta + (Int64(query) * self.heads + head)).load()
            acc_dq.fill(0.0)
            query_ring.wait_full(queries)
            row_ring.wait_full(slots)
            count = s_counts[row_ring.stage(slots)]
            while count > 0:
                row_ring.arrive_empty(slots)
                slots += 1
                wgmma.fence()
                for group in cutlass.range_constexpr(len(self.groups)):
                    kv_rings[group].wait_full(tiles)
                    # The rows were written by cp.async, in the generic proxy; wgmma reads in the async proxy.
                    cute.arch.fence_view_async_shared()
                    wgmma.issue(mma, acc_s, *s_parts[group], fresh=group == 0)
                wgmma.commit()
                for group in cutlass.range_constexpr(len(self.groups_v)):
                    wgmma.issue(mma, acc_dp, *dp_parts[group], fresh=group == 0)
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
                p_ring.wait_empty(tiles)
                cute.copy(store, store.retile(softmax.rounded(acc_s, self.dtype)), to_p)
                cute.copy(store, store.retile(softmax.rounded(acc_dp, self.dtype)), to_ds)
                cute.arch.fence_view_async_shared()  # stores, then read by wgmma
                p_ring.arrive_full(tiles)
                p_ring.wait_full(tiles)  # the other warps' part of dS
                wgmma.fence()
                wgmma.issue(dq_mma, acc_dq, dq_a, dq_b, fresh=False)
                wgmma.commit()
                wgmma.wait(0)
                kv_rings[0].arrive_empty(tiles)
                tiles += 1
                row_ring.wait_full(slots)
                count = s_counts[row_ring.stage(slots)]
            row_ring.arrive_empty(slots)
            slots += 1
            query_ring.arrive_empty(queries)
            queries += 1
            self._store_query_gradient(0, acc_dq, dq_mma, dq, query, head_tile, thread)
            work += cute.arch.grid_dim()[0]

    def _score_operands(self, mma, thread, left, keys, group):
        """Descriptors of a group of columns of Q or dO, and of the keys."""
        return wgmma.operands(mma, thread, wgmma.columns_of(left, *group), wgmma.columns_of(keys, *group))

    # dkv warpgroups.

    @cute.jit
    def key_gradient(
        self, index: cutlass.Constexpr[int], s_q_tile, s_dout, s_kv_tile, s_p, s_ds, dq, dkv, s_q, s_rows, s_counts,
        thread, row_ring, kv_rings, query_ring, p_ring,
    ):  # fmt: skip
        """Every second chunk of dKV of each tile, reduced into dkv, and group ``index + 1`` of dQ."""
        mma = wgmma.tiled(self.dtype, CHUNK, Major.MN, Major.MN)
        p_a, dout_b = wgmma.operands(mma, thread, wgmma.transposed(s_p), wgmma.transposed(wgmma.chunks_of(s_dout)))
        ds_a, q_b = wgmma.operands(mma, thread, wgmma.transposed(s_ds), wgmma.transposed(wgmma.chunks_of(s_q_tile)))
        acc = wgmma.accumulator(mma, CHUNK)
        dq_mma, acc_dq, dq_a, dq_b = self._query_gradient(index + 1, s_ds, s_kv_tile, thread)
        mine = list(range(index, self.chunks_v, 2))

        slots = Int32(0)
        tiles = Int32(0)
        queries = Int32(0)
        work = cute.arch.block_idx()[0]
        while work < s_q * self.head_tiles:
            query, head_tile = work // self.head_tiles, work % self.head_tiles
            acc_dq.fill(0.0)
            query_ring.wait_full(queries)
            row_ring.wait_full(slots)
            count = s_counts[row_ring.stage(slots)]
            while count > 0:
                target = scatter.Targets.create(dkv, s_rows[row_ring.stage(slots), None], thread, self.head_dim)
                row_ring.arrive_empty(slots)
                slots += 1
                # The last chunk of 576 columns, which has no part of dO, is each warpgroup's every other tile.
                extra = self.chunks > self.chunks_v and tiles % 2 == index
                p_ring.wait_full(tiles)
                for i in cutlass.range_constexpr(len(mine)):
                    chunk = mine[i]
                    wgmma.fence()
                    wgmma.issue(mma, acc, p_a, dout_b[None, None, None, chunk], fresh=True)
                    wgmma.issue(mma, acc, ds_a, q_b[None, None, None, chunk], fresh=False)
                    wgmma.commit()
                    if cutlass.const_expr(i == 0):
                        # dQ runs while the first chunk is reduced.
                        wgmma.issue(dq_mma, acc_dq, dq_a, dq_b, fresh=False)
                        wgmma.commit()
                        wgmma.wait(1)
                    else:
                        wgmma.wait(0)
                    if cutlass.const_expr(i == len(mine) - 1):
                        if not extra:
                            p_ring.arrive_empty(tiles)
                    scatter.add(target, acc, chunk * CHUNK)
                    if cutlass.const_expr(i == 0):
                        wgmma.wait(0)
                        kv_rings[index + 1].arrive_empty(tiles)
                if extra:
                    wgmma.fence()
                    wgmma.issue(mma, acc, ds_a, q_b[None, None, None, self.chunks_v], fresh=True)
                    wgmma.commit()
                    wgmma.wait(0)
                    p_ring.arrive_empty(tiles)
                    scatter.add(target, acc, self.chunks_v * CHUNK)
                tiles += 1
                row_ring.wait_full(slots)
                count = s_counts[row_ring.stage(slots)]
            row_ring.arrive_empty(slots)
            slots += 1
            query_ring.arrive_empty(queries)
            queries += 1
            self._store_query_gradient(index + 1, acc_dq, dq_mma, dq, query, head_tile, thread)
            work += cute.arch.grid_dim()[0]

    # dQ, whose columns the three consumer warpgroups share.

    def _query_gradient(self, group: int, s_ds, s_kv_tile, thread):
        """The product dS K over a group of columns: (tiled product, accumulator, A, B)."""
        first, columns = self.groups[group]
        mma = wgmma.tiled(self.dtype, columns, Major.K, Major.MN)
        keys = wgmma.transposed(wgmma.columns_of(s_kv_tile, first, columns))
        return mma, wgmma.accumulator(mma, columns), *wgmma.operands(mma, thread, s_ds, keys)

    @cute.jit
    def _store_query_gradient(self, group: cutlass.Constexpr[int], acc, mma, dq, query, head_tile, thread):
        """A group of columns of dq, of the heads that exist."""
        first, columns = self.groups[group]
        values = softmax.accumulator_rows(acc)
        place = softmax.accumulator_coordinates(mma.get_slice(thread), (self.config.block_heads, columns))
        for r in cutlass.range_constexpr(2):
            head = head_tile * self.config.block_heads + place[r, 0][0]
            if head < self.heads:
                row = dq + ((Int64(query) * self.heads + head) * self.head_dim + first + place[r, 0][1])
                words = cute.recast_ptr(row, dtype=Int32)
                for c in cutlass.range_constexpr(columns // 8):
                    (words + c * 4).store(ptx.pack_halves(values[r, 2 * c], values[r, 2 * c + 1], self.dtype))
