"""The kernel after a backward: the fp32 sums of dkv into the tensor that the caller wants.

It casts to bf16 or fp16, copies to fp32, or adds into fp32 (``accumulate``), and puts columns back in their order where
the reduction interleaved them (see scatter.py). Memory-bound; a thread turns 16 columns.
"""

# mypy: ignore-errors
# (Device code: the DSL stages it, and most of its types are the DSL's.)

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from cudnn_dsa.cute import scatter

THREADS = 256


class Finish:
    """Compile-time parameters of the kernel; ``__call__`` is the host function.

    Args:
        head_dim: D, a multiple of 16.
        dtype: of dkv.
        accumulate: add to what dkv holds; fp32 only.
        interleaved: columns lie as scatter.py stores them; else in their order.
    """

    def __init__(self, head_dim: int, dtype: type[cutlass.Numeric], accumulate: bool, interleaved: bool):
        self.head_dim = head_dim
        self.dtype = dtype
        self.accumulate = accumulate
        self.interleaved = interleaved

    @cute.jit
    def __call__(self, sums: cute.Pointer, dkv: cute.Pointer, s_kv: cutlass.Int32):
        """dkv (S_kv, D) from the fp32 sums of the same shape."""
        groups = Int64(s_kv) * (self.head_dim // scatter.GROUP)
        self.kernel(sums, dkv, s_kv).launch(
            grid=(cutlass.Int32(cute.ceil_div(groups, THREADS)), 1, 1), block=(THREADS, 1, 1), smem=0
        )

    @cute.kernel
    def kernel(self, sums: cute.Pointer, dkv: cute.Pointer, s_kv: cutlass.Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        group = Int64(block) * THREADS + thread
        if group < Int64(s_kv) * (self.head_dim // scatter.GROUP):
            source = self._sixteen(sums, group)
            target = self._sixteen(dkv, group)
            stored = cute.make_rmem_tensor(scatter.GROUP, Float32)
            cute.autovec_copy(source, stored)
            result = cute.make_rmem_tensor(scatter.GROUP, self.dtype)
            if cutlass.const_expr(self.accumulate):
                cute.autovec_copy(target, result)
            for place in cutlass.range_constexpr(scatter.GROUP):
                column = scatter.real_column(place) if cutlass.const_expr(self.interleaved) else place
                value = stored[place]
                if cutlass.const_expr(self.accumulate):
                    value += result[column]
                result[column] = value.to(self.dtype)
            cute.autovec_copy(result, target)

    def _sixteen(self, base: cute.Pointer, group: Int64) -> cute.Tensor:
        address = (base + group * scatter.GROUP).toint()
        pointer = cute.make_ptr(base.dtype, address, cute.AddressSpace.gmem, assumed_align=16)
        return cute.make_tensor(pointer, cute.make_layout(scatter.GROUP))
