"""PTX ISA, Control Flow and Miscellaneous: bra, ret, exit, trap, brkpt, nanosleep, pmevent, setmaxnreg,
griddepcontrol."""

from __future__ import annotations

from ..lowering import Instruction, Lowering, unit


@unit("bra")
def bra(low: Lowering, ins: Instruction) -> None:
    low.branch(ins, ins.operands[0])


@unit("ret", "exit")
def leave(low: Lowering, ins: Instruction) -> None:
    low.emit("ret", ())


@unit("trap", "brkpt")
def trap(low: Lowering, ins: Instruction) -> None:
    low.emit("trap", ())


@unit("nanosleep")
def nanosleep(low: Lowering, ins: Instruction) -> None:
    low.emit("pause", ())


@unit("setmaxnreg")
def setmaxnreg(low: Lowering, ins: Instruction) -> None:
    n = int(ins.operands[0], 0)
    if n % 8 or not 24 <= n <= 256:
        raise ins.unsupported("a register count is a multiple of 8 from 24 to 256")
    low.emit("all_lanes", ())


@unit("griddepcontrol", "pmevent")
def nothing(low: Lowering, ins: Instruction) -> None:
    low.emit("nop", ())  # launches run one after the other
