"""PTX ISA, Asynchronous Warpgroup Level Matrix Instructions: wgmma.fence, mma_async, commit_group, wait_group."""

from __future__ import annotations

import re

from ..lowering import Instruction, Lowering, unit
from .matrix import registers

_TYPES = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 3, "e5m2": 4}


@unit("wgmma")
def wgmma(low: Lowering, ins: Instruction) -> None:
    what = ins.parts[1]
    if what == "fence":
        low.emit("nop", ())
    elif what == "commit_group":
        low.emit("wgmma.commit", ())
    elif what == "wait_group":
        low.emit("wgmma.wait", (), (int(ins.operands[0], 0),))
    elif what == "mma_async":
        _mma(low, ins)
    else:
        raise ins.unsupported()


def _mma(low: Lowering, ins: Instruction) -> None:
    m = re.fullmatch(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.(f32|f16)\.(\w+)\.(\w+)", ins.opcode)
    if not m or m.group(4) != m.group(5) or m.group(4) not in _TYPES:
        raise ins.unsupported()
    n, t, fp32 = int(m.group(1)), _TYPES[m.group(4)], m.group(3) == "f32"
    o = ins.operands
    d = [low.destination(ins, x, 32) for x in registers(o[0])]
    if len(d) != n // (2 if fp32 else 4):
        raise ins.unsupported(f"{len(d)} accumulator registers")
    in_registers = o[1].startswith("{")
    a = [low.source(ins, x, "b32") for x in registers(o[1])] if in_registers else [low.source(ins, o[1], "b64")]
    b = low.source(ins, o[2], "b64")
    accumulate = low.predicate(ins, o[3])
    scale_a, scale_b = (int(x, 0) for x in o[4:6])
    transposes = [int(x, 0) for x in o[6:]]
    ta, tb = (0, transposes[0] if transposes else 0) if in_registers else tuple(transposes or (0, 0))
    low.emit(
        "wgmma.mma",
        (*d, *a, b, accumulate),
        (n, t, int(in_registers), int(scale_a < 0), int(scale_b < 0), ta, tb, int(fp32)),
    )
