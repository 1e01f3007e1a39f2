"""PTX ISA, Instruction Set: ``cvt``."""

from __future__ import annotations

from ..lowering import Instruction, Lowering, bits_of, unit

_INTEGERS = {f"{s}{b}" for s in "us" for b in (8, 16, 32, 64)}
_INTEGRAL = {"rni": 0, "rzi": 1, "rmi": 2, "rpi": 3}
_ROUNDING = {"rn": 0, "rz": 1, "rm": 2, "rp": 3, "rna": 4}


@unit("cvt")
def cvt(low: Lowering, ins: Instruction) -> None:
    if ins.has("pack"):
        _pack(low, ins)
        return
    d, s = ins.parts[-2], ins.parts[-1]
    mods = ins.parts[1:-2]
    for m in mods:
        if m not in (*_INTEGRAL, *_ROUNDING, "sat", "ftz", "relu", "satfinite"):
            raise ins.unsupported(f"modifier .{m}")
    integral = next((_INTEGRAL[m] for m in mods if m in _INTEGRAL), -1)
    rounding = next((_ROUNDING[m] for m in mods if m in _ROUNDING), 0)
    relu, sat, ftz, finite = (int(m in mods) for m in ("relu", "sat", "ftz", "satfinite"))
    out, inputs = ins.operands[0], ins.operands[1:]

    def emit(handler: str, source_types: list[str], bits: int, *immediates: int) -> None:
        sources = [low.source(ins, x, t) for x, t in zip(inputs, source_types, strict=True)]
        low.emit(handler, (low.destination(ins, out, bits), *sources), immediates)

    if d in ("bf16x2", "f16x2") and s == "f32":
        emit(f"cvt.{d}.f32", ["f32", "f32"], 32, rounding, relu + 2 * finite)
    elif d in ("e4m3x2", "e5m2x2") and s == "f32":
        emit("cvt.fp8x2.f32", ["f32", "f32"], 32, int(d == "e5m2x2"), relu)
    elif d in ("e4m3x2", "e5m2x2") and s in ("f16x2", "bf16x2"):
        emit("cvt.fp8x2.half2", ["b32"], 32, int(d == "e5m2x2"), relu, int(s == "bf16x2"))
    elif d == "f16x2" and s in ("e4m3x2", "e5m2x2"):
        emit("cvt.f16x2.fp8x2", ["b16"], 32, int(s == "e5m2x2"))
    elif d in ("bf16", "f16") and s == "f32":
        emit(f"cvt.{d}.f32", ["f32"], 32, rounding, relu + 2 * finite + 4 * ftz)
    elif d == "f32" and s in ("bf16", "f16"):
        emit(f"cvt.f32.{s}", ["b16"], 32)
    elif (d, s) in (("f16", "bf16"), ("bf16", "f16")):
        emit(f"cvt.{d}.{s}", ["b16"], 32)
    elif d == "tf32" and s == "f32":
        emit("cvt.tf32.f32", ["f32"], 32, rounding, relu)
    elif d == "f32" and s == "f32":
        emit("cvt.f32.f32", ["f32"], 32, integral, ftz + 2 * sat)
    elif d == "f64" and s == "f32":
        emit("cvt.f64.f32", ["f32"], 64)
    elif d == "f64" and s in ("f16", "bf16"):
        exact = low.temporary(32)
        low.raw(f"cvt.f32.{s}", (exact, low.source(ins, inputs[0], "b16")))
        low.emit("cvt.f64.f32", (low.destination(ins, out, 64), exact))
    elif d == "f32" and s == "f64":
        emit("cvt.f32.f64", ["f64"], 32, rounding)
    elif d in _INTEGERS and s in _INTEGERS:
        _integer(low, ins, d, s, sat)
    elif d in _INTEGERS and s in ("f32", "f64"):
        emit(f"cvt.{d}.{s}", [s], 64 if bits_of(d) == 64 else 32, max(integral, 0), ftz)
    elif d in _INTEGERS and s in ("f16", "bf16"):
        emit(f"cvt.{d}.f16", ["b16"], 64 if bits_of(d) == 64 else 32, max(integral, 0), int(s == "bf16"))
    elif d in ("f32", "f64") and s in _INTEGERS:
        emit(f"cvt.{d}.{s}", [f"b{max(bits_of(s), 16)}"], 64 if d == "f64" else 32, rounding)
    elif d in ("f16", "bf16") and s in _INTEGERS and rounding == 0:
        emit(f"cvt.f16.{s}", [f"b{max(bits_of(s), 16)}"], 32, rounding, int(d == "bf16"))
    else:
        raise ins.unsupported()


def _pack(low: Lowering, ins: Instruction) -> None:
    """``cvt.pack.sat.u8.s32.b32 d, a, b, c``; without c for 16-bit results."""
    t = next(p for p in ins.parts[2:] if p in ("u8", "s8", "u16", "s16"))
    if "s32" not in ins.parts:
        raise ins.unsupported()
    a, b = (low.source(ins, x, "b32") for x in ins.operands[1:3])
    c = low.source(ins, ins.operands[3], "b32") if len(ins.operands) > 3 else low.constant(0, 32)
    low.emit("pack_saturated", (low.destination(ins, ins.operands[0], 32), a, b, c), (bits_of(t), int(t[0] == "s")))


def _integer(low: Lowering, ins: Instruction, d: str, s: str, sat: int) -> None:
    """A destination register wider than the destination type is sign- or zero-extended to the register's width."""
    out = ins.operands[0]
    source = low.source(ins, ins.operands[1], "b64" if bits_of(s) == 64 else "b32")
    width = low.register_bits(ins, out)
    if bits_of(d) < 64 and width == 64:
        if sat:
            raise ins.unsupported("saturating conversion into a wider register")
        t = low.temporary(32)
        low.raw(f"cvt.{d}.{s}", (t, source), (0,))
        wide = f"{d[0]}64"
        low.emit(f"cvt.{wide}.{d}", (low.destination(ins, out, 64), t), (0,))
        return
    x = low.destination(ins, out, 64 if bits_of(d) == 64 else 32)
    low.emit(f"cvt.{d}.{s}", (x, source), (sat,))
    if d in ("s8", "s16"):
        low.emit(f"extend.{d}", (x, x))
