"""PTX ISA, TensorCore 5th Generation Family Instructions: tcgen05.alloc, dealloc, relinquish_alloc_permit, ld, st,
wait, mma, cp, commit, fence."""

from __future__ import annotations

import re

from ..lowering import NONE, Instruction, Lowering, unit
from .matrix import registers

_SHAPES = {"32x32b": 0, "16x64b": 1, "16x128b": 2, "16x256b": 3, "16x32bx2": 4}
_REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
_COPIES = {
    "128x256b": 0,
    "4x256b": 1,
    "128x128b": 2,
    "64x128b.warpx2::02_13": 3,
    "64x128b.warpx2::01_23": 4,
    "32x128b.warpx4": 5,
}
_KINDS = {"kind::f16": 0, "kind::tf32": 1, "kind::f8f6f4": 2}


@unit("tcgen05")
def tcgen05(low: Lowering, ins: Instruction) -> None:
    what = ins.parts[1]
    o = ins.operands
    if what == "alloc":
        a, offset = low.address(ins, o[0], 32)
        low.emit("tmem.alloc", (a, low.source(ins, o[1], "b32")), (offset,))
    elif what == "dealloc":
        low.emit("tmem.dealloc", (low.source(ins, o[0], "b32"), low.source(ins, o[1], "b32")))
    elif what == "relinquish_alloc_permit":
        low.emit("tmem.relinquish", ())
    elif what in ("fence::before_thread_sync", "fence::after_thread_sync"):
        low.emit("nop", ())  # code motion only; what must have completed is a wait's or a commit's matter
    elif what == "cp":
        _copy(low, ins)
    elif what == "wait::ld":
        low.emit("tmem.wait_ld", ())
    elif what == "wait::st":
        low.emit("tmem.wait_st", ())
    elif what in ("ld", "st"):
        _move(low, ins, what)
    elif what == "mma":
        _mma(low, ins)
    elif what == "commit":
        a, offset = low.address(ins, o[0], 32)
        mask = low.source(ins, o[1], "b16") if ins.has("multicast::cluster") else NONE
        low.emit("tcgen05.commit", (a, mask), (offset,))
    else:
        raise ins.unsupported()


def _move(low: Lowering, ins: Instruction, what: str) -> None:
    shape = next(p for p in ins.parts if p in _SHAPES)
    repeat = int(next(p for p in ins.parts if re.fullmatch(r"x\d+", p))[1:])
    if ins.has("red") or ins.has("stat"):
        raise ins.unsupported()
    packed = ins.has("pack::16b") or ins.has("unpack::16b")
    n = _REGISTERS[shape] * repeat
    where, vector = (ins.operands[1], ins.operands[0]) if what == "ld" else (ins.operands[0], ins.operands[-1])
    names = registers(vector)
    if len(names) != n:
        raise ins.unsupported(f"{len(names)} registers, {n} expected")
    split = int(ins.operands[2 if what == "ld" else 1], 0) if shape == "16x32bx2" else 0
    a, offset = low.address(ins, where, 32)
    r = [low.destination(ins, x, 32) if what == "ld" else low.source(ins, x, "b32") for x in names]
    low.emit(f"tmem.{what}", (a, *r), (_SHAPES[shape], n, int(packed), offset, split))


def _copy(low: Lowering, ins: Instruction) -> None:
    shape = ".".join(ins.parts[3:])  # a decompression would follow
    if shape not in _COPIES:
        raise ins.unsupported()
    a, offset = low.address(ins, ins.operands[0], 32)
    descriptor = low.source(ins, ins.operands[1], "b64")
    low.emit("tcgen05.cp", (a, descriptor), (offset, _COPIES[shape], 2 if ins.has("cta_group::2") else 1))


def _mma(low: Lowering, ins: Instruction) -> None:
    kind = next((p for p in ins.parts if p.startswith("kind::")), "")
    if kind not in _KINDS or any(p in ins.parts for p in ("sp", "block_scale", "ashift")):
        raise ins.unsupported()
    stationary = ins.has("ws")
    o = list(ins.operands)
    d, d_offset = low.address(ins, o[0], 32)
    in_tmem = o[1].startswith("[")
    a, a_offset = low.address(ins, o[1], 32) if in_tmem else (low.source(ins, o[1], "b64"), 0)
    b, idesc = low.source(ins, o[2], "b64"), low.source(ins, o[3], "b32")
    rest = o[4:]
    disabled: list[int] = []
    if rest and rest[0].startswith("{"):
        disabled = [low.source(ins, x, "b32") for x in registers(rest.pop(0))]
    enable = low.predicate(ins, rest[0]) if rest else low.constant(0xFFFFFFFF, 1)
    if stationary and len(rest) > 1:
        raise ins.unsupported("a mask of zero columns")
    scale = int(rest[1], 0) if len(rest) > 1 else 0
    group = 2 if ins.has("cta_group::2") else 1
    if disabled and len(disabled) != 4 * group:
        raise ins.unsupported(f"{len(disabled)} registers of disabled lanes")
    low.emit(
        "tcgen05.mma",
        (d, a, b, idesc, enable, *disabled),
        (_KINDS[kind], group, int(in_tmem), d_offset, a_offset, len(disabled), scale, int(stationary)),
    )
