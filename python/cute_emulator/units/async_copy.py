"""PTX ISA, Data Movement and Conversion, asynchronous: cp.async, cp.async.bulk, cp.reduce.async.bulk and their tensor
forms, groups and waits; Tensors; clusterlaunchcontrol."""

from __future__ import annotations

import re

from ..lowering import NONE, Instruction, Lowering, unit
from ..ptx import split_operands

REDUCTIONS = {"add": 0, "min": 1, "max": 2, "and": 3, "or": 4, "xor": 5, "inc": 6, "dec": 7}
REDUCTION_TYPES = {
    "u8": 0,
    "b8": 0,
    "u16": 1,
    "b16": 1,
    "u32": 2,
    "b32": 2,
    "s32": 3,
    "u64": 4,
    "b64": 4,
    "s64": 5,
    "f16": 6,
    "bf16": 7,
    "f32": 8,
    "f64": 9,
}


def _shared(low: Lowering, ins: Instruction, text: str) -> tuple[int, int]:
    return low.address(ins, text, 32)


@unit("cp")
def cp(low: Lowering, ins: Instruction) -> None:
    op = ins.opcode
    if ins.has("bulk"):
        _bulk(low, ins)
    elif op.startswith("cp.async.commit_group"):
        low.emit("cp.async.commit", ())
    elif op.startswith("cp.async.wait_group"):
        low.emit("cp.async.wait", (), (int(ins.operands[0], 0),))
    elif op.startswith("cp.async.wait_all"):
        low.emit("cp.async.wait_all", ())
    elif op.startswith("cp.async.mbarrier.arrive"):
        a, offset = _shared(low, ins, ins.operands[0])
        low.emit("cp.async.arrive", (a,), (offset, int(ins.has("noinc"))))
    elif op.startswith(("cp.async.ca.shared", "cp.async.cg.shared")):
        _non_bulk(low, ins)
    else:
        raise ins.unsupported()


def _non_bulk(low: Lowering, ins: Instruction) -> None:
    o = list(ins.operands)
    if ins.has("L2::cache_hint"):
        o.pop()
    to, to_offset = _shared(low, ins, o[0])
    source, source_offset = low.address(ins, o[1], 64)
    n = int(o[2], 0)
    if n not in (4, 8, 16) or (n != 16 and ins.has("cg")):
        raise ins.unsupported("size")
    take = ignore = NONE
    if len(o) > 3:
        r = low.register(o[3].lstrip("!"), ins.scope)
        if r is not None and r.bits == 1:
            ignore = low.predicate(ins, o[3])
        else:
            take = low.source(ins, o[3], "b32")
    low.emit("cp.async", (to, source, take, ignore), (n, to_offset, source_offset))


def _bulk(low: Lowering, ins: Instruction) -> None:
    if ins.has("commit_group"):
        low.emit("bulk.commit", ())
        return
    if ins.has("wait_group"):
        low.emit("bulk.wait", (), (int(ins.operands[0], 0),))
        return
    if ins.has("prefetch"):
        low.emit("nop", ())
        return
    if ins.has("tensor"):
        _tensor(low, ins)
        return
    reduction, type_ = -1, 0
    if ins.has("reduce"):
        reduction = next(REDUCTIONS[p] for p in ins.parts if p in REDUCTIONS)
        type_ = REDUCTION_TYPES[ins.type]
    spaces = [p.split("::")[0] for p in ins.parts if p.split("::")[0] in ("global", "shared")]
    if len(spaces) != 2 or any(p.startswith("cp_mask") for p in ins.parts):
        raise ins.unsupported()
    o = list(ins.operands)
    if ins.has("L2::cache_hint"):
        o.pop()
    places = [0 if s == "global" else 1 for s in spaces]
    to, to_offset = low.address(ins, o[0], 32 if places[0] else 64)
    source, source_offset = low.address(ins, o[1], 32 if places[1] else 64)
    n = low.source(ins, o[2], "b32")
    barrier, barrier_offset, mask = NONE, 0, NONE
    if any(p.startswith("mbarrier") for p in ins.parts):
        barrier, barrier_offset = _shared(low, ins, o[3])
        if ins.has("multicast::cluster"):
            mask = low.source(ins, o[4], "b16")
    low.emit(
        "bulk.copy",
        (to, source, n, barrier, mask),
        (*places, to_offset, source_offset, barrier_offset, reduction, type_),
    )


def _tensor(low: Lowering, ins: Instruction) -> None:
    dims = int(next(p for p in ins.parts if re.fullmatch(r"[1-5]d", p))[0])
    gather = ins.has("tile::gather4") or ins.has("tile::scatter4")
    if any(p.startswith("im2col") for p in ins.parts):
        raise ins.unsupported("im2col")
    load = any(p.startswith("mbarrier") for p in ins.parts)
    o = list(ins.operands)
    if ins.has("L2::cache_hint"):
        o.pop()
    tensor, shared = (o[1], o[0]) if load else (o[0], o[1])
    m = re.fullmatch(r"\[\s*([%\w$]+)\s*,\s*\{(.*)\}\s*\]", tensor)
    if not m:
        raise ins.unsupported(f"tensor operand {tensor!r}")
    coordinates = [low.source(ins, x, "b32") for x in split_operands(m.group(2))]
    if len(coordinates) != (5 if gather else dims):
        raise ins.unsupported("number of coordinates")
    tensor_map = low.source(ins, m.group(1), "b64")
    to, offset = _shared(low, ins, shared)
    barrier, barrier_offset, mask = NONE, 0, NONE
    if load:
        barrier, barrier_offset = _shared(low, ins, o[2])
        if ins.has("multicast::cluster"):
            mask = low.source(ins, o[3], "b16")
    reduction = next((REDUCTIONS[p] for p in ins.parts if p in REDUCTIONS), -1) if ins.has("reduce") else -1
    low.emit(
        "tensor.copy",
        (to, tensor_map, barrier, mask, *coordinates),
        (dims, int(load), offset, barrier_offset, reduction, int(gather), int(ins.has("cta_group::2"))),
    )


# field: (word, shift, bits, second word, what is added); a dimension's fields lie one word or byte further each
_MAP_FIELDS = {
    "global_address": (0, 0, 64, 1, 0),
    "rank": (2, 4, 3, -1, 0),
    "elemtype": (2, 7, 4, -1, 0),
    "swizzle_mode": (2, 13, 2, -1, 0),
}


@unit("tensormap")
def tensormap(low: Lowering, ins: Instruction) -> None:
    o = ins.operands
    if ins.has("cp_fenceproxy"):
        (to, to_offset), (source, offset) = low.address(ins, o[0], 64), _shared(low, ins, o[1])
        low.emit("tensormap.publish", (to, source), (to_offset, offset))
        return
    what = ins.parts[3]
    ordinal = int(o[1], 0) if len(o) > 2 else 0
    fields = _MAP_FIELDS | {
        "box_dim": (13, 24, 8, -1, -1) if ordinal == 0 else (14, 8 * (ordinal - 1), 8, -1, -1),
        "global_dim": (8 + ordinal, 0, 32, -1, -1),
        "global_stride": (3 + ordinal, 0, 36, 4 * ordinal, 0),
    }
    if what not in fields:
        raise ins.unsupported(f"field {what}")
    word, shift, bits, second, plus = fields[what]
    shared = any(p.startswith("shared") for p in ins.parts)
    a, offset = low.address(ins, o[0], 32 if shared else 64)
    value = low.source(ins, o[-1], "b64" if ins.type == "b64" else "b32")
    if ins.type != "b64":
        wide = low.temporary(64)
        low.raw("widen", (wide, value))
        value = wide
    low.emit("tensormap.replace", (a, value), (offset, int(shared), word, shift, bits, second, plus))


@unit("clusterlaunchcontrol")
def clusterlaunchcontrol(low: Lowering, ins: Instruction) -> None:
    if ins.has("try_cancel"):
        (a, offset), (b, b_offset) = _shared(low, ins, ins.operands[0]), _shared(low, ins, ins.operands[1])
        low.emit("clc.try_cancel", (a, b), (offset, b_offset, int(ins.has("multicast::cluster::all"))))
        return
    lo, hi = low.halves(ins, ins.operands[1])
    if ins.has("is_canceled"):
        taken = low.temporary(32)
        low.raw("part64", (taken, lo), (0, 1))
        low.emit(
            "setp.ne.u32", (low.destination(ins, ins.operands[0], 1), NONE, taken, low.constant(0, 32), NONE), (0,)
        )
        return
    first = ((lo, 32), (hi, 0), (hi, 32))
    which = {f"get_first_ctaid::{c}": i for i, c in enumerate("xyz")}
    one = next((which[p] for p in ins.parts if p in which), None)
    names = [ins.operands[0]] if one is not None else split_operands(ins.operands[0][1:-1])[:3]
    for name, (half, shift) in zip(names, first[one : one + 1] if one is not None else first, strict=True):
        if name != "_":
            low.emit("part64", (low.destination(ins, name, 32), half), (shift, 0xFFFFFFFF))
