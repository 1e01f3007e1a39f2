"""PTX ISA, Warp Level Matrix Instructions: ldmatrix, stmatrix, movmatrix, mma.sync."""

from __future__ import annotations

import re

from ..lowering import Instruction, Lowering, unit
from ..ptx import split_operands


def registers(text: str) -> list[str]:
    return split_operands(text[1:-1]) if text.startswith("{") else [text]


@unit("ldmatrix", "stmatrix")
def matrices(low: Lowering, ins: Instruction) -> None:
    if not ins.has("m8n8") or ins.type != "b16":
        raise ins.unsupported()
    store = ins.parts[0] == "stmatrix"
    n = int(next(p for p in ins.parts if re.fullmatch(r"x[124]", p))[1])
    where, vector = (ins.operands[0], ins.operands[1]) if store else (ins.operands[1], ins.operands[0])
    a, offset = low.address(ins, where, 32)
    names = registers(vector)
    if len(names) != n:
        raise ins.unsupported("number of registers")
    r = [low.source(ins, x, "b32") if store else low.optional(ins, x, 32) for x in names]
    low.emit(ins.parts[0], (a, *r), (offset, n, int(ins.has("trans"))))


@unit("movmatrix")
def transpose(low: Lowering, ins: Instruction) -> None:
    source = low.source(ins, ins.operands[1], "b32")
    low.emit("movmatrix", (low.destination(ins, ins.operands[0], 32), source))


@unit("mma")
def mma(low: Lowering, ins: Instruction) -> None:
    m = re.fullmatch(
        r"mma\.sync\.aligned\.m16n8k(8|16)\.row\.col\.(f32|f16)\.(bf16|f16)\.(bf16|f16)\.(f32|f16)", ins.opcode
    )
    if not m or m.group(2) != m.group(5) or m.group(3) != m.group(4):
        raise ins.unsupported()
    sources = [low.source(ins, x, "b32") for o in ins.operands[1:] for x in registers(o)]
    d = [low.destination(ins, x, 32) for x in registers(ins.operands[0])]
    low.emit("mma.sync", (*d, *sources), (int(m.group(1)), int(m.group(3) == "bf16"), int(m.group(2) == "f32")))
