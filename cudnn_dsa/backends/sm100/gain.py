"""The power of two that P and dS of a query carry when they are rounded to fp16.

dS may lie anywhere below 2**-24 or above 2**16 (a loss scale of 2**16, or none). Both P and dS of a query are therefore
multiplied by one 2**gain before they are rounded, and what is made of them is divided by it, exactly. The gain must be
known before the first tile, because dQ sums over all of them; so it comes from a bound. With 0 <= P <= 1,

    |dS| <= P * B,   B = |scale| * (max over heads |dO|_2 * max over selected keys |V|_2 + max over heads |delta|)

and gain = 15 - max(0, ceil(log2(B))) keeps both within 2**15 (Cauchy-Schwarz; fp16 ends at 65504). For random data the
bound is about sqrt(D_v) above what occurs, which leaves values down to 2**-24 of the largest possible dS normal.
"""

# mypy: ignore-errors
# (Device code: types are the DSL's.)

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cudnn_dsa.cute import ptx, selection

WARPS = 8
LARGEST = 15
SMALLEST = -64
MARGIN = 1.001  # the norms are rounded


@cute.jit
def squares(row: cute.Pointer, columns: cutlass.Constexpr[int]) -> Float32:
    """By a warp: the sum of squares of a row of ``columns`` (a multiple of 256) 16-bit values."""
    total = Float32(0.0)
    for i in cutlass.range_constexpr(columns // 256):
        address = (row + (i * 256 + cute.arch.lane_idx() * 8)).toint()
        source = cute.make_ptr(row.dtype, address, cute.AddressSpace.gmem, assumed_align=16)
        values = cute.make_rmem_tensor(8, row.dtype)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(8)), values)
        for k in cutlass.range_constexpr(8):
            total += values[k].to(Float32) * values[k].to(Float32)
    return cute.arch.warp_reduction_sum(total)


class KeyNorms:
    """norms[j] = |kv[j, :D_v]|_2, fp32; a warp a key."""

    def __init__(self, head_dim: int, head_dim_v: int):
        self.head_dim, self.head_dim_v = head_dim, head_dim_v

    @cute.jit
    def __call__(self, kv: cute.Pointer, norms: cute.Pointer, s_kv: Int32):
        """norms (S_kv,) from kv (S_kv, D)."""
        self.kernel(kv, norms, s_kv).launch(grid=(cute.ceil_div(s_kv, WARPS), 1, 1), block=(32 * WARPS, 1, 1), smem=0)

    @cute.kernel
    def kernel(self, kv: cute.Pointer, norms: cute.Pointer, s_kv: Int32):
        key = cute.arch.block_idx()[0] * WARPS + cute.arch.warp_idx()
        if key < s_kv:
            total = squares(kv + Int64(key) * self.head_dim, self.head_dim_v)
            if cute.arch.lane_idx() == 0:
                (norms + key).store(cute.math.sqrt(total))


class Gain:
    """The exponent of each query's gain; a warp a query."""

    def __init__(self, heads: int, head_dim_v: int, has_topk_length: bool):
        self.heads, self.head_dim_v = heads, head_dim_v
        self.has_topk_length = has_topk_length

    @cute.jit
    def __call__(
        self,
        dout: cute.Pointer,
        delta: cute.Pointer,
        norms: cute.Pointer,
        topk_idxs: cute.Pointer,
        topk_length: cute.Pointer,
        gain: cute.Pointer,
        s_q: Int32,
        s_kv: Int32,
        topk: Int32,
        softmax_scale: Float32,
    ):
        """gain (S_q,) int32, from dout (S_q, H, D_v), delta (S_q, H), norms (S_kv,), topk_idxs and topk_length."""
        self.kernel(dout, delta, norms, topk_idxs, topk_length, gain, s_q, s_kv, topk, softmax_scale).launch(
            grid=(cute.ceil_div(s_q, WARPS), 1, 1), block=(32 * WARPS, 1, 1), smem=0
        )

    @cute.kernel
    def kernel(
        self,
        dout: cute.Pointer,
        delta: cute.Pointer,
        norms: cute.Pointer,
        topk_idxs: cute.Pointer,
        topk_length: cute.Pointer,
        gain: cute.Pointer,
        s_q: Int32,
        s_kv: Int32,
        topk: Int32,
        softmax_scale: Float32,
    ):
        lane = cute.arch.lane_idx()
        query = cute.arch.block_idx()[0] * WARPS + cute.arch.warp_idx()
        if query < s_q:
            first = Int64(query) * self.heads
            largest_dout = Float32(0.0)
            largest_delta = Float32(0.0)
            for head in cutlass.range(self.heads, unroll=1):
                row = dout + (first + head) * self.head_dim_v
                largest_dout = cute.arch.fmax(largest_dout, squares(row, self.head_dim_v))
                value = (delta + (first + head)).load()
                largest_delta = cute.arch.fmax(largest_delta, cute.arch.fmax(value, -value))
            lengths = topk_length if cutlass.const_expr(self.has_topk_length) else None
            length = selection.row_length(lengths, query, topk)
            entries = selection.index_row(topk_idxs, query, topk)
            largest_key = Float32(0.0)
            slot = lane
            while slot < length:
                row = selection.load_row(entries, slot, length, s_kv)
                if row >= 0:
                    largest_key = cute.arch.fmax(largest_key, (norms + row).load())
                slot += 32
            largest_key = cute.arch.warp_reduction_max(largest_key)
            bound = cute.math.sqrt(largest_dout) * largest_key + largest_delta
            bound = bound * cute.arch.fmax(softmax_scale, -softmax_scale) * MARGIN
            exponent = cutlass.max(ptx.exponent(bound) + 1, 0)  # 2 ** exponent > bound
            if lane == 0:
                (gain + query).store(cutlass.max(LARGEST - exponent, SMALLEST))
