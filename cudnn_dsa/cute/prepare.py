"""The kernel before a backward: delta and the softmax normaliser of every (query, head).

    delta = sum over D_v of out * dout       (skipped where the caller gives delta)
    Z2    = log2(e) * logaddexp(lse, sink)   (+inf where nothing of the row counts: see softmax.py)

One CTA a query. A row without a valid key has Z2 = +inf whatever its lse holds. The sums have a fixed order.
"""

# mypy: ignore-errors
# (Device code: the DSL stages it, and most of its types are the DSL's.)

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cudnn_dsa.cute import selection, softmax

THREADS = 256
WARPS = THREADS // 32


class Prepare:
    """Compile-time parameters of the kernel; ``__call__`` is the host function.

    Args:
        heads, head_dim_v: H and D_v; D_v is a multiple of 256.
        has_sink, has_topk_length, has_delta: which optional tensors are given; pass None for the others.
    """

    def __init__(self, heads: int, head_dim_v: int, has_sink: bool, has_topk_length: bool, has_delta: bool):
        self.heads = heads
        self.head_dim_v = head_dim_v
        self.has_sink = has_sink
        self.has_topk_length = has_topk_length
        self.has_delta = has_delta

    @cute.jit
    def __call__(
        self,
        out: cute.Pointer,
        dout: cute.Pointer,
        lse: cute.Pointer,
        attn_sink: cute.Pointer,
        topk_idxs: cute.Pointer,
        topk_length: cute.Pointer,
        z2: cute.Pointer,
        delta: cute.Pointer,
        s_q: Int32,
        s_kv: Int32,
        topk: Int32,
    ):
        """z2 and delta, (S_q, H) fp32, from out (S_q, H, D_v; 16-bit or fp32), dout, lse (S_q, H), attn_sink (H,),
        topk_idxs (S_q, K) and topk_length (S_q,)."""
        self.kernel(out, dout, lse, attn_sink, topk_idxs, topk_length, z2, delta, s_kv, topk).launch(
            grid=(s_q, 1, 1), block=(THREADS, 1, 1), smem=0
        )

    @cute.kernel
    def kernel(
        self,
        out: cute.Pointer,
        dout: cute.Pointer,
        lse: cute.Pointer,
        attn_sink: cute.Pointer,
        topk_idxs: cute.Pointer,
        topk_length: cute.Pointer,
        z2: cute.Pointer,
        delta: cute.Pointer,
        s_kv: Int32,
        topk: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        query, _, _ = cute.arch.block_idx()
        first = Int64(query) * self.heads

        if cutlass.const_expr(not self.has_delta):
            head = thread // 32
            while head < self.heads:
                row = (first + head) * self.head_dim_v
                total = self._dot(out + row, dout + row)
                total = cute.arch.warp_reduction_sum(total)
                if thread % 32 == 0:
                    (delta + (first + head)).store(total)
                head += WARPS

        lengths = topk_length if cutlass.const_expr(self.has_topk_length) else None
        length = selection.row_length(lengths, query, topk)
        counts = selection.any_valid(selection.index_row(topk_idxs, query, topk), length, s_kv)
        head = thread
        while head < self.heads:
            sink2 = -Float32.inf
            if cutlass.const_expr(self.has_sink):
                sink2 = (attn_sink + head).load() * softmax.LOG2_E
            value = softmax.normaliser((lse + (first + head)).load() * softmax.LOG2_E, sink2)
            if not counts:
                value = Float32.inf
            (z2 + (first + head)).store(value)
            head += THREADS

    @cute.jit
    def _dot(self, out: cute.Pointer, dout: cute.Pointer) -> Float32:
        """A lane's part of the sum over a row: eight neighbouring columns of every 256."""
        total = Float32(0.0)
        for i in cutlass.range_constexpr(self.head_dim_v // 256):
            column = i * 256 + cute.arch.lane_idx() * 8
            a, b = self._eight(out + column), self._eight(dout + column)
            for k in cutlass.range_constexpr(8):
                total += a[k].to(Float32) * b[k].to(Float32)
        return total

    def _eight(self, source: cute.Pointer) -> cute.Tensor:
        """Eight values in registers, by 16-byte loads."""
        source = cute.make_ptr(source.dtype, source.toint(), cute.AddressSpace.gmem, assumed_align=16)
        values = cute.make_rmem_tensor(8, source.dtype)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(8)), values)
        return values


class SinkGradient:
    """d_sink[h] = -sum over queries of 2 ** (sink2[h] - Z2[i, h]) * delta[i, h], bitwise repeatable.

    A CTA sums for a few neighbouring heads; its threads take every ROWS-th query, and a tree adds them up.
    """

    HEADS = 8
    ROWS = 128

    def __init__(self, heads: int):
        self.heads = heads

    @cute.jit
    def __call__(
        self, z2: cute.Pointer, delta: cute.Pointer, attn_sink: cute.Pointer, d_sink: cute.Pointer, s_q: Int32
    ):
        """d_sink (H,) from z2 and delta (S_q, H) and attn_sink (H,), all fp32."""
        self.kernel(z2, delta, attn_sink, d_sink, s_q).launch(
            grid=(cute.ceil_div(self.heads, self.HEADS), 1, 1),
            block=(self.HEADS * self.ROWS, 1, 1),
            smem=4 * self.HEADS * self.ROWS,
        )

    @cute.kernel
    def kernel(self, z2: cute.Pointer, delta: cute.Pointer, attn_sink: cute.Pointer, d_sink: cute.Pointer, s_q: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        allocator = cutlass.memory.SmemAllocator()
        sums = allocator.allocate_tensor(Float32, cute.make_layout((self.ROWS, self.HEADS), stride=(self.HEADS, 1)))
        row, column = thread // self.HEADS, thread % self.HEADS
        head = block * self.HEADS + column
        total = Float32(0.0)
        if head < self.heads:
            sink2 = (attn_sink + head).load() * softmax.LOG2_E
            # Unrolled, so that several loads are under way: the sum waits for nothing else.
            for i in cutlass.range((s_q - row + self.ROWS - 1) // self.ROWS, unroll=4):
                query = row + i * self.ROWS
                place = Int64(query) * self.heads + head
                share = softmax.sink_share(sink2, (z2 + place).load())
                # Selected, not multiplied: delta of a row without a key may be anything.
                if share > 0.0:
                    total -= share * (delta + place).load()
        sums[row, column] = total
        cute.arch.sync_threads()
        step = self.ROWS // 2
        while step > 0:
            if row < step:
                sums[row, column] = sums[row, column] + sums[row + step, column]
            cute.arch.sync_threads()
            step //= 2
        if row == 0 and head < self.heads:
            (d_sink + head).store(sums[0, column])
