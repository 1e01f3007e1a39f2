"""PTX ISA, Instruction Set: Integer Arithmetic, Floating-Point, Half-Precision, Mixed-Precision, Logic and Shift,
Comparison and Selection; ``mov``."""

from __future__ import annotations

from ..lowering import NONE, Instruction, Lowering, bits_of, unit
from ..ptx import split_operands

_ROUNDING = {"rn": 0, "rz": 1, "rm": 2, "rp": 3}
_HALF = {"f16": 0, "bf16": 1, "f16x2": 0, "bf16x2": 1}
_HALF_OPERATIONS = {"add": 0, "sub": 1, "mul": 2, "fma": 3, "neg": 4, "abs": 5, "min": 6, "max": 7, "ex2": 8, "tanh": 9}
_SIGN_MATTERS = {"min", "max", "div", "rem", "shr", "mul.hi", "mad.hi", "mul.wide", "mad.wide", "abs"}


def _flags(ins: Instruction) -> str:
    return (".ftz" if ins.has("ftz") else "") + (".sat" if ins.has("sat") else "")


def _integer_type(ins: Instruction, operation: str) -> str:
    t = ins.type
    bits = bits_of(t)
    return f"s{bits}" if t[0] == "s" and operation in _SIGN_MATTERS else f"u{bits}"


def _plain(low: Lowering, ins: Instruction, handler: str, types: list[str], immediates: tuple[int, ...] = ()) -> None:
    """d, then one source for each of ``types[1:]``; ``types[0]`` is the type of d."""
    sources = [low.source(ins, o, t) for o, t in zip(ins.operands[1:], types[1:], strict=True)]
    d = low.destination(ins, ins.operands[0], 64 if bits_of(types[0]) == 64 else 32)
    low.emit(handler, (d, *sources), immediates)


@unit(
    "add",
    "sub",
    "mul",
    "mad",
    "fma",
    "div",
    "rem",
    "neg",
    "abs",
    "min",
    "max",
    "sad",
    "mul24",
    "ex2",
    "lg2",
    "rcp",
    "rsqrt",
    "sqrt",
    "sin",
    "cos",
    "tanh",
)
def arithmetic(low: Lowering, ins: Instruction) -> None:
    o, t = ins.parts[0], ins.type
    n = len(ins.operands)
    if ins.has("cc"):
        with_carry(low, ins)
        return
    if any(p in ins.parts for p in ("noftz", "oob")):
        raise ins.unsupported("modifier")
    if t in _HALF:
        if ins.parts[-2] == "f32":
            _mixed(low, ins, o, t, n)
            return
        flags = ins.has("relu") + 2 * ins.has("sat") + 4 * ins.has("NaN")
        if o not in _HALF_OPERATIONS or (o in ("add", "sub", "mul", "fma") and {"rz", "rm", "rp"} & set(ins.parts)):
            raise ins.unsupported()
        _plain(low, ins, f"half.{t}", ["b32"] * n if t.endswith("x2") else ["b16"] * n, (_HALF_OPERATIONS[o], flags))
        return
    if t == "f32x2":
        if o not in ("add", "sub", "mul", "fma") or {"rz", "rm", "rp"} & set(ins.parts):
            raise ins.unsupported()
        _plain(low, ins, f"{o}{'.ftz' if ins.has('ftz') else ''}.f32x2", ["b64"] * n)
        return
    if t in ("f32", "f64"):
        _floating(low, ins, o, t, n)
        return
    if o in ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh", "fma"):
        raise ins.unsupported()
    relu = ins.has("relu") and o in ("min", "max") and t == "s32"
    if ins.has("sat") or (ins.has("relu") and not relu):
        raise ins.unsupported("modifier")
    operation = o
    if o in ("mul", "mad", "mul24"):
        mode = next((p for p in ("lo", "hi", "wide") if ins.has(p)), "lo")
        operation = f"{o}.{mode}"
    it = _integer_type(ins, operation)
    if operation.endswith(".wide"):
        wide = f"b{2 * bits_of(t)}"
        _plain(low, ins, f"{operation}.{it}", [wide, t, t, wide][:n])
        return
    if operation == "abs":
        it = f"s{bits_of(t)}"
    _plain(low, ins, f"{operation}.{it}", [t] * n)
    if relu:
        d = low.destination(ins, ins.operands[0], 32)
        low.emit("max.s32", (d, low.source(ins, ins.operands[0], t), low.constant(0, 32)))


def _mixed(low: Lowering, ins: Instruction, o: str, t: str, n: int) -> None:
    if {"rz", "rm", "rp", "sat"} & set(ins.parts):
        raise ins.unsupported()
    if o == "fma":
        _plain(low, ins, "fma.mixed", ["f32", "b16", "b16", "f32"], (_HALF[t],))
    elif o in ("add", "sub"):
        _plain(low, ins, "add.mixed", ["f32", "b16", "f32"], (_HALF[t], int(o == "sub")))
    else:
        raise ins.unsupported()


def _floating(low: Lowering, ins: Instruction, o: str, t: str, n: int) -> None:
    rounding = next((_ROUNDING[p] for p in ins.parts if p in _ROUNDING), 0)
    flags = ins.has("ftz") + 2 * ins.has("sat")
    if o == "mad":
        o = "fma"
    types = [t] * n
    if o in ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh"):
        if o == "sqrt" and rounding and t == "f32":
            _plain(low, ins, "sqrt.directed.f32", types, (rounding, flags))
            return
        if t == "f64" and o not in ("sqrt", "rcp"):
            raise ins.unsupported()
        _plain(low, ins, f"{o}{'.ftz' if ins.has('ftz') and t == 'f32' else ''}.{t}", types)
        return
    if o in ("neg", "abs"):
        _plain(low, ins, f"{o}{'.ftz' if ins.has('ftz') else ''}.{t}", types)
        return
    if o in ("min", "max"):
        name = (
            o
            + (".ftz" if ins.has("ftz") else "")
            + (".nan" if ins.has("NaN") else "")
            + (".xorsign" if ins.has("xorsign") else "")
        )
        if n == 4:  # of three values: one after the other
            t1, a, b, c = low.temporary(32), *(low.source(ins, x, t) for x in ins.operands[1:])
            low.raw(f"{name}.{t}", (t1, a, b))
            low.emit(f"{name}.{t}", (low.destination(ins, ins.operands[0], 32), t1, c))
            return
        _plain(low, ins, f"{name}.{t}", types)
        return
    if o not in ("add", "sub", "mul", "fma", "div"):
        raise ins.unsupported()
    if rounding:
        _plain(low, ins, f"{o}.directed.{t}", types, (rounding, flags))
        return
    _plain(low, ins, f"{o}{_flags(ins) if t == 'f32' else ''}.{t}", types)


@unit("addc", "subc", "madc")
def with_carry(low: Lowering, ins: Instruction) -> None:
    """Extended-precision arithmetic: the condition code is a predicate of the warp."""
    o, t = ins.parts[0], f"u{bits_of(ins.type)}"
    a, b = (low.source(ins, x, ins.type) for x in ins.operands[1:3])
    wide = bits_of(ins.type)
    if o[:3] == "mad":
        product = low.temporary(wide)
        low.raw(f"mul.{'hi' if ins.has('hi') else 'lo'}.{ins.type if ins.has('hi') else t}", (product, a, b))
        a, b = product, low.source(ins, ins.operands[3], ins.type)
    carry_in = low.condition_code() if o.endswith("c") else NONE
    carry_out = low.condition_code() if ins.has("cc") else NONE
    d = low.destination(ins, ins.operands[0], wide)
    low.emit(f"add_carry.{t}", (d, a, b, carry_in, carry_out), (int(o[:3] == "sub"),))


@unit("dp4a", "dp2a")
def dot(low: Lowering, ins: Instruction) -> None:
    signed = [int(p[0] == "s") for p in ins.parts[-2:]]
    wide = ins.parts[0] == "dp2a"
    _plain(low, ins, "dot", ["b32"] * 4, (*signed, 2 if wide else 4, 2 * ins.has("hi")))


@unit("and", "or", "xor", "not")
def logic(low: Lowering, ins: Instruction) -> None:
    if ins.type == "pred":
        sources = [low.predicate(ins, x) for x in ins.operands[1:]]
        low.emit(f"{ins.parts[0]}.pred", (low.destination(ins, ins.operands[0], 1), *sources))
        return
    _plain(low, ins, f"{ins.parts[0]}.u{bits_of(ins.type)}", [ins.type] * len(ins.operands))


@unit("shl", "shr")
def shift(low: Lowering, ins: Instruction) -> None:
    t = _integer_type(ins, ins.parts[0])
    _plain(low, ins, f"{ins.parts[0]}.{t}", [ins.type, ins.type, "b32"])


@unit("popc", "clz")
def count_bits(low: Lowering, ins: Instruction) -> None:
    _plain(low, ins, f"{ins.parts[0]}.b{bits_of(ins.type)}", ["b32", ins.type])


@unit("brev")
def reverse(low: Lowering, ins: Instruction) -> None:
    if ins.type != "b32":
        raise ins.unsupported()
    _plain(low, ins, "brev.b32", ["b32", "b32"])


@unit("bfind")
def find(low: Lowering, ins: Instruction) -> None:
    _plain(low, ins, f"bfind.{ins.type}", ["b32", ins.type], (int(ins.has("shiftamt")),))


@unit("bfe")
def extract(low: Lowering, ins: Instruction) -> None:
    _plain(low, ins, f"bfe.{ins.type}", [ins.type, ins.type, "b32", "b32"])


@unit("bfi")
def insert(low: Lowering, ins: Instruction) -> None:
    _plain(low, ins, f"bfi.{ins.type}", [ins.type, ins.type, ins.type, "b32", "b32"])


@unit("lop3")
def lop3(low: Lowering, ins: Instruction) -> None:
    if ins.type != "b32" or len(ins.operands) != 5:
        raise ins.unsupported()
    sources = [low.source(ins, x, "b32") for x in ins.operands[1:4]]
    low.emit("lop3.b32", (low.destination(ins, ins.operands[0], 32), *sources), (int(ins.operands[4], 0),))


@unit("shf")
def funnel(low: Lowering, ins: Instruction) -> None:
    _plain(low, ins, "shf.b32", ["b32"] * 4, (int(ins.has("r")), int(ins.has("clamp"))))


@unit("prmt")
def permute(low: Lowering, ins: Instruction) -> None:
    mode = next((i for i, m in enumerate(("f4e", "b4e", "rc8", "ecl", "ecr", "rc16"), 1) if ins.has(m)), 0)
    _plain(low, ins, "prmt.b32", ["b32"] * 4, (mode,))


@unit("copysign")
def copysign(low: Lowering, ins: Instruction) -> None:
    if ins.type != "f32":
        raise ins.unsupported()
    _plain(low, ins, "copysign.f32", ["f32"] * 3)


@unit("testp")
def testp(low: Lowering, ins: Instruction) -> None:
    kinds = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    if ins.type != "f32":
        raise ins.unsupported()
    a = low.source(ins, ins.operands[1], "f32")
    low.emit("testp.f32", (low.destination(ins, ins.operands[0], 1), a), (kinds.index(ins.parts[1]),))


@unit("selp")
def select(low: Lowering, ins: Instruction) -> None:
    a, b = (low.source(ins, x, ins.type) for x in ins.operands[1:3])
    p = low.predicate(ins, ins.operands[3])
    bits = 64 if bits_of(ins.type) == 64 else 32
    low.emit("selp.u64" if bits == 64 else "selp.u32", (low.destination(ins, ins.operands[0], bits), a, b, p))


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
_BOOLEAN = {"and": 1, "or": 2, "xor": 3}


@unit("setp")
def setp(low: Lowering, ins: Instruction) -> None:
    t, comparison = ins.type, ins.parts[1]
    boolean = next((_BOOLEAN[p] for p in ins.parts[2:-1] if p in _BOOLEAN), 0)
    a, b = (low.source(ins, x, t if t not in _HALF else "b16") for x in ins.operands[1:3])
    c = low.predicate(ins, ins.operands[3]) if boolean else NONE
    names = [x.strip() for x in ins.operands[0].split("|")]
    p = low.optional(ins, names[0], 1)
    q = low.optional(ins, names[1], 1) if len(names) > 1 else NONE
    if t in ("f16x2", "bf16x2") or (t in ("f32",) and ins.has("ftz") and False):
        raise ins.unsupported()
    if t in _HALF:
        low.emit("setp.half", (p, q, a, b, c), (boolean, _COMPARISONS.index(comparison), _HALF[t]))
        return
    if t[0] == "f":
        name = f"setp.{comparison}.{t}"
    else:
        comparison = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(comparison, comparison)
        signed = t[0] == "s" and comparison not in ("eq", "ne")
        name = f"setp.{comparison}.{'s' if signed else 'u'}{bits_of(t)}"
    low.emit(name, (p, q, a, b, c), (boolean,))


@unit("mov")
def mov(low: Lowering, ins: Instruction) -> None:
    d, s = ins.operands
    t = ins.type
    if t == "pred":
        low.emit("mov.pred", (low.destination(ins, d, 1), low.predicate(ins, s)))
        return
    bits = bits_of(t)
    if bits == 128:
        _mov128(low, ins, d, s)
        return
    if d.startswith("{"):  # unpack
        names = split_operands(d[1:-1])
        width = bits // len(names)
        source = low.source(ins, s, t)
        if bits == 64 or width < 32:
            # a destination may also be the source's own register only if it is written last; go through scratch
            results = []
            for i, name in enumerate(names):
                if name == "_":
                    continue
                x = low.temporary(32)
                low.raw("part64" if bits == 64 else "part32", (x, source), (i * width, (1 << width) - 1))
                results.append((name, x))
            for name, x in results:
                low.emit("mov.u32", (low.destination(ins, name, 32), x))
            return
        raise ins.unsupported()
    if s.startswith("{"):  # pack
        names = split_operands(s[1:-1])
        width = bits // len(names)
        parts = [low.source(ins, x, f"b{width}") for x in names]
        low.emit(f"pack{len(names)}x{width}", (low.destination(ins, d, 64 if bits == 64 else 32), *parts))
        return
    source = low.source(ins, s, t)
    low.emit(f"mov.u{64 if bits == 64 else 32}", (low.destination(ins, d, 64 if bits == 64 else 32), source))


def _mov128(low: Lowering, ins: Instruction, d: str, s: str) -> None:
    sources = [low.source(ins, x, "b64") for x in split_operands(s[1:-1])] if s[0] == "{" else low.halves(ins, s)
    if d[0] == "{":
        targets = [low.destination(ins, x, 64) for x in split_operands(d[1:-1])]
    else:
        targets = list(low.halves(ins, d))
    for target, source in zip(targets, sources, strict=True):
        low.emit("mov.u64", (target, source))
