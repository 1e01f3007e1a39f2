"""Single PTX instructions that the DSL has no call for, or whose call says less than the instruction."""

# mypy: ignore-errors
# (Device code: the DSL stages it, and most of its types are the DSL's.)

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import arith, llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def _asm(result, operands, text, constraints, side_effects):
    return llvm.inline_asm(
        result,
        operands,
        text,
        constraints,
        has_side_effects=side_effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


@dsl_user_op
def cp_async_16(target: cute.Pointer, source: cute.Pointer, size: "Int32 | None" = None, *, loc=None, ip=None) -> None:
    """16 bytes of shared memory from global memory, past L1; bytes from ``size`` on are zeros.

    With ``size`` 0 nothing is read, but the address must be one of the tensor's.
    """
    operands = [pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip) for pointer in (target, source)]
    if size is None:
        _asm(None, operands, "cp.async.cg.shared.global [$0], [$1], 16;", "r,l", True)
    else:
        operands.append(Int32(size).ir_value(loc=loc, ip=ip))
        _asm(None, operands, "cp.async.cg.shared.global [$0], [$1], 16, $2;", "r,l,r", True)


@dsl_user_op
def red_add_v4(target: cute.Pointer, values, enabled: cutlass.Boolean, *, loc=None, ip=None) -> None:
    """Add four consecutive fp32 to global memory, 16-byte aligned, without a result and without an order.

    The accumulator is asked to stay in L2 (evict_last) while keys, queries and gradients stream through it.
    """
    operands = [
        target.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
        *(Float32(v).ir_value(loc=loc, ip=ip) for v in values),
        cutlass.Boolean(enabled).ir_value(loc=loc, ip=ip),
    ]
    text = (
        "{ .reg .b64 policy; createpolicy.fractional.L2::evict_last.b64 policy, 1.0;"
        " @$5 red.relaxed.gpu.global.add.L2::cache_hint.v4.f32 [$0], {$1, $2, $3, $4}, policy; }"
    )
    _asm(None, operands, text, "l,f,f,f,f,b", True)


@dsl_user_op
def red_add(target: cute.Pointer, value: Float32, *, loc=None, ip=None) -> None:
    """Add one fp32 to global memory, without a result and without an order; kept in L2 like ``red_add_v4``."""
    operands = [target.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip), Float32(value).ir_value(loc=loc, ip=ip)]
    text = (
        "{ .reg .b64 policy; createpolicy.fractional.L2::evict_last.b64 policy, 1.0;"
        " red.relaxed.gpu.global.add.L2::cache_hint.f32 [$0], $1, policy; }"
    )
    _asm(None, operands, text, "l,f", True)


@dsl_user_op
def store_v4(target: cute.Pointer, words, *, loc=None, ip=None) -> None:
    """Four 32-bit registers to 16 aligned bytes of global memory."""
    operands = [target.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)]
    operands += [Int32(word).ir_value(loc=loc, ip=ip) for word in words]
    _asm(None, operands, "st.global.v4.b32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r", True)


@dsl_user_op
def min_nan(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """The smaller, or NaN if either is: a NaN of the inputs must reach the gradient, not vanish in a clamp."""
    operands = [Float32(a).ir_value(loc=loc, ip=ip), Float32(b).ir_value(loc=loc, ip=ip)]
    return Float32(_asm(T.f32(), operands, "min.NaN.f32 $0, $1, $2;", "=f,f,f", False))


@dsl_user_op
def log2_approx(a: Float32, *, loc=None, ip=None) -> Float32:
    return Float32(_asm(T.f32(), [Float32(a).ir_value(loc=loc, ip=ip)], "lg2.approx.ftz.f32 $0, $1;", "=f,f", False))


@dsl_user_op
def exp2_approx(a: Float32, *, loc=None, ip=None) -> Float32:
    """2**a to 2 ulp; 0 for -inf and below -126."""
    return Float32(_asm(T.f32(), [Float32(a).ir_value(loc=loc, ip=ip)], "ex2.approx.ftz.f32 $0, $1;", "=f,f", False))


@dsl_user_op
def power_of_two(exponent: Int32, *, loc=None, ip=None) -> Float32:
    """2.0**exponent, exact, for exponents of normal numbers; 0 below them, inf above."""
    biased = cutlass.min(cutlass.max(Int32(exponent) + 127, 0), 255)
    return Float32(arith.bitcast(T.f32(), Int32(biased << 23).ir_value(loc=loc, ip=ip)))


@dsl_user_op
def magnitude(a: Float32, *, loc=None, ip=None) -> Int32:
    """The bits of |a|, whose order as integers is that of the numbers; infinities and NaN come last."""
    return Int32(arith.bitcast(T.i32(), Float32(a).ir_value(loc=loc, ip=ip))) & 0x7FFFFFFF


@dsl_user_op
def exponent(a: Float32, *, loc=None, ip=None) -> Int32:
    """floor(log2(a)) of a normal, positive number; 128 of an infinity or a NaN, -127 below the normal range."""
    bits = Int32(arith.bitcast(T.i32(), Float32(a).ir_value(loc=loc, ip=ip)))
    return (bits >> 23) - 127


@dsl_user_op
def pack_halves(low: Float32, high: Float32, dtype: type, *, loc=None, ip=None) -> Int32:
    """Two fp32 rounded to nearest even as bf16 or fp16, in one register; ``low`` has the lower address."""
    kind = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    operands = [Float32(low).ir_value(loc=loc, ip=ip), Float32(high).ir_value(loc=loc, ip=ip)]
    return Int32(_asm(T.i32(), operands, f"cvt.rn.{kind}.f32 $0, $2, $1;", "=r,f,f", False))


@dsl_user_op
def choose(condition: cutlass.Boolean, first: Float32, second: Float32, *, loc=None, ip=None) -> Float32:
    """``first`` where the condition holds, else ``second``; without a branch."""
    return Float32(
        arith.select(
            cutlass.Boolean(condition).ir_value(loc=loc, ip=ip),
            Float32(first).ir_value(loc=loc, ip=ip),
            Float32(second).ir_value(loc=loc, ip=ip),
        )
    )


@dsl_user_op
def choose_word(condition: cutlass.Boolean, first: Int32, second: Int32, *, loc=None, ip=None) -> Int32:
    """``choose`` of 32-bit registers."""
    return Int32(
        arith.select(
            cutlass.Boolean(condition).ir_value(loc=loc, ip=ip),
            Int32(first).ir_value(loc=loc, ip=ip),
            Int32(second).ir_value(loc=loc, ip=ip),
        )
    )


@dsl_user_op
def is_finite(a: Float32, *, loc=None, ip=None) -> cutlass.Boolean:
    """Neither infinite nor NaN."""
    text = "{ .reg .pred p; testp.finite.f32 p, $1; selp.b32 $0, 1, 0, p; }"
    return Int32(_asm(T.i32(), [Float32(a).ir_value(loc=loc, ip=ip)], text, "=r,f", False)) == 1
