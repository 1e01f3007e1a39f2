"""PTX ISA, Data Movement and Conversion: ld, st, atom, red, cvta, isspacep, mapa, getctarank, prefetch, discard."""

from __future__ import annotations

import re

from ..lowering import NONE, Instruction, Lowering, bits_of, unit
from ..ptx import split_operands
from .async_copy import REDUCTION_TYPES, REDUCTIONS

_SPACES = {"global": 0, "shared": 1, "local": 2, "generic": 3, "const": 0}
_GENERIC_SHARED = -(2 << 48)  # 0xfffe << 48 as a signed 64-bit number
_GENERIC_LOCAL = -(3 << 48)
_ATOMIC = {"add": 0, "min": 1, "max": 2, "and": 3, "or": 4, "xor": 5, "exch": 6, "cas": 7, "inc": 8, "dec": 9}
_KNOWN = {
    "weak",
    "relaxed",
    "acquire",
    "release",
    "volatile",
    "mmio",
    "cta",
    "cluster",
    "gpu",
    "sys",
    "nc",
    "noftz",
    "L1::no_allocate",
    "L1::evict_last",
    "L1::evict_first",
    "L1::evict_unchanged",
    "L1::evict_normal",
    "L2::cache_hint",
    "L2::64B",
    "L2::128B",
    "L2::256B",
    "L2::evict_last",
    "L2::evict_first",
    "L2::evict_normal",
    "ca",
    "cg",
    "cs",
    "cv",
    "lu",
    "wb",
    "wt",
    "acq_rel",
    "entry",
}


def space_of(ins: Instruction) -> str:
    for p in ins.parts[1:]:
        head = p.split("::")[0]
        if head in ("global", "shared", "local", "param", "const"):
            return head
    return "generic"


def _check(ins: Instruction, extra: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    for p in ins.parts[1:-1]:
        if (
            p in _KNOWN
            or p in extra
            or p.split("::")[0] in ("global", "shared", "local", "param", "const")
            or re.fullmatch(r"v[248]", p)
        ):
            continue
        raise ins.unsupported(f"modifier .{p}")


def _vector(ins: Instruction) -> int:
    return next((int(p[1]) for p in ins.parts if re.fullmatch(r"v[248]", p)), 1)


def _list(text: str) -> list[str]:
    return split_operands(text[1:-1]) if text.startswith("{") else [text]


def address(low: Lowering, ins: Instruction, text: str, space: str) -> tuple[int, int]:
    """An address operand: 32 bits wide in shared memory, 64 bits elsewhere."""
    return low.address(ins, text, 32 if space == "shared" else 64)


def _element(t: str) -> tuple[str, int]:
    bits = bits_of(t)
    return f"{'s' if t[0] == 's' and bits < 64 else 'u'}{bits}", bits


@unit("ld", "ldu")
def ld(low: Lowering, ins: Instruction) -> None:
    _check(ins)
    space, n = space_of(ins), _vector(ins)
    element, _ = _element(ins.type)
    names = _list(ins.operands[0])
    if len(names) != n:
        raise ins.unsupported("vector length")
    widths = {64 if bits_of(ins.type) == 64 else low.register_bits(ins, x) for x in names if x != "_"}
    if len(widths) > 1:
        raise ins.unsupported("registers of different widths in a vector")
    wide = int(64 in widths)
    if space == "param":
        result = low.call_parameter(ins, ins.operands[1])
        if result and n == 1:
            bits = 64 if wide else 32
            target = low.destination(ins, names[0], bits)
            low.emit(f"mov.u{bits}", (target, low.source(ins, result, f"b{bits}")))
            return
        m = re.fullmatch(r"\[\s*([\w$]+)\s*(?:\+\s*(-?\d+))?\s*\]", ins.operands[1])
        if m and m.group(1) in low.parameters:
            d = [low.optional(ins, x, 64 if wide else 32) for x in names]
            low.emit(f"ldparam.{element}", d, (low.parameters[m.group(1)].offset + int(m.group(2) or 0), n, wide))
            return
        space = "generic"
    a, offset = address(low, ins, ins.operands[1], space)
    d = [low.optional(ins, x, 64 if wide else 32) for x in names]
    low.emit(f"ld.{element}", (a, *d), (offset, n, wide, _SPACES[space]))


@unit("st")
def st(low: Lowering, ins: Instruction) -> None:
    if ins.parts[1] == "async":
        _asynchronous(low, ins, -1)
        return
    if ins.parts[1] == "bulk":
        if space_of(ins) != "shared" or ins.operands[2] != "0":
            raise ins.unsupported()
        a, offset = address(low, ins, ins.operands[0], "shared")
        low.emit("st.bulk", (a, low.source(ins, ins.operands[1], "b64")), (offset,))
        return
    _check(ins)
    space, n = space_of(ins), _vector(ins)
    bits = bits_of(ins.type)
    names = _list(ins.operands[1])
    if space == "param":
        parameter = low.call_parameter(ins, ins.operands[0])
        if parameter is None or n != 1 or bits not in (32, 64):
            raise ins.unsupported()
        value = low.source(ins, names[0], ins.type)
        low.emit(f"mov.u{bits}", (low.destination(ins, parameter, bits), value))
        return
    if len(names) != n:
        raise ins.unsupported()
    a, offset = address(low, ins, ins.operands[0], space)
    wide = bits == 64
    read = f"b{64 if wide else 32}" if ins.type[0] != "f" else ins.type
    s = [low.source(ins, x, read) for x in names]
    low.emit(f"st.u{bits}", (a, *s), (offset, n, int(wide), _SPACES[space]))


@unit("atom", "red")
def atomic(low: Lowering, ins: Instruction) -> None:
    if ins.parts[1] == "async":
        _asynchronous(low, ins, next(REDUCTIONS[p] for p in ins.parts if p in REDUCTIONS))
        return
    operation = next((p for p in ins.parts[1:] if p in _ATOMIC), None)
    if operation is None:
        raise ins.unsupported()
    _check(ins, {operation})
    space, n, t = space_of(ins), _vector(ins), ins.type
    returns = ins.parts[0] == "atom"
    rest = ins.operands[1:] if returns else ins.operands
    if t == "b128":
        raise ins.unsupported()
    bits = bits_of(t)
    handler_type = t if t[0] == "f" or t.startswith("bf") or t[0] == "s" else f"u{bits}"
    slot = 64 if bits == 64 else 32
    a, offset = address(low, ins, rest[0], space)
    read = t if t in ("f32", "f64") else f"b{slot}"
    values = [low.source(ins, x, read) for operand in rest[1 : 3 if operation == "cas" else 2] for x in _list(operand)]
    names = _list(ins.operands[0]) if returns else ["_"] * n
    d = [low.optional(ins, x, slot) for x in names]
    low.emit(f"atom.{handler_type}", (a, *d, *values), (offset, n, _ATOMIC[operation], _SPACES[space]))


def _asynchronous(low: Lowering, ins: Instruction, reduction: int) -> None:
    """st.async and red.async that an mbarrier counts."""
    n, bits = _vector(ins), bits_of(ins.type)
    if not ins.has("mbarrier::complete_tx::bytes") or space_of(ins) != "shared" or bits < 32:
        raise ins.unsupported()
    (a, offset), (b, b_offset) = (address(low, ins, ins.operands[i], "shared") for i in (0, 2))
    values = [low.source(ins, x, ins.type) for x in _list(ins.operands[1])]
    if len(values) != n:
        raise ins.unsupported("vector length")
    low.emit("st.async", (a, b, *values), (offset, b_offset, n, int(bits == 64), reduction, REDUCTION_TYPES[ins.type]))


@unit("call")
def call(low: Lowering, ins: Instruction) -> None:
    """``call (result), vprintf, (format, arguments)``: the only function there is."""
    o = ins.operands
    if "vprintf" not in o:
        raise ins.unsupported("functions are not modelled")
    at = o.index("vprintf")
    f, arguments = (low.source(ins, x, "b64") for x in split_operands(o[at + 1].strip("() ")))
    result = low.destination(ins, o[0].strip("() "), 32) if at else NONE
    low.emit("vprintf", (result, f, arguments))


@unit("cvta")
def cvta(low: Lowering, ins: Instruction) -> None:
    space = space_of(ins)
    t = ins.type
    if bits_of(t) != 64:
        raise ins.unsupported("32-bit generic addresses")
    source = low.source(ins, ins.operands[1], "b64")
    d = low.destination(ins, ins.operands[0], 64)
    if space in ("global", "const", "param"):
        low.emit("mov.u64", (d, source))
    elif ins.has("to"):
        low.emit("from_window", (d, source))
    else:
        low.emit("to_window", (d, source), (_GENERIC_SHARED if space == "shared" else _GENERIC_LOCAL,))


@unit("isspacep")
def isspacep(low: Lowering, ins: Instruction) -> None:
    a = low.source(ins, ins.operands[1], "b64")
    low.emit("isspacep", (low.destination(ins, ins.operands[0], 1), a), (_SPACES[space_of(ins)],))


@unit("mapa")
def mapa(low: Lowering, ins: Instruction) -> None:
    bits = bits_of(ins.type)
    a, rank = low.source(ins, ins.operands[1], f"b{bits}"), low.source(ins, ins.operands[2], "b32")
    low.emit(f"mapa.u{bits}", (low.destination(ins, ins.operands[0], bits), a, rank))


@unit("getctarank")
def getctarank(low: Lowering, ins: Instruction) -> None:
    a = low.source(ins, ins.operands[1], "b32")
    low.emit("getctarank", (low.destination(ins, ins.operands[0], 32), a))


@unit("prefetch", "prefetchu", "discard", "applypriority")
def hint(low: Lowering, ins: Instruction) -> None:
    low.emit("nop", ())


@unit("createpolicy")
def createpolicy(low: Lowering, ins: Instruction) -> None:
    low.emit("mov.u64", (low.destination(ins, ins.operands[0], 64), low.constant(0, 64)))
