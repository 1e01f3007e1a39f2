"""PTX ISA, Parallel Synchronization and Communication, within a warp: vote, match, activemask, elect, redux, shfl,
bar.warp.sync."""

from __future__ import annotations

from ..lowering import NONE, Instruction, Lowering, bits_of, unit


@unit("vote")
def vote(low: Lowering, ins: Instruction) -> None:
    mode = ("all", "any", "uni", "ballot").index(next(p for p in ins.parts if p in ("all", "any", "uni", "ballot")))
    p = low.predicate(ins, ins.operands[1])
    members = low.source(ins, ins.operands[2], "b32") if len(ins.operands) > 2 else low.constant(0xFFFFFFFF, 32)
    d = low.destination(ins, ins.operands[0], 32 if mode == 3 else 1)
    low.emit("vote", (d, p, members), (mode, 0))


@unit("activemask")
def activemask(low: Lowering, ins: Instruction) -> None:
    low.emit("activemask", (low.destination(ins, ins.operands[0], 32),))


@unit("elect")
def elect(low: Lowering, ins: Instruction) -> None:
    names = [x.strip() for x in ins.operands[0].split("|")]
    members = low.source(ins, ins.operands[1], "b32")
    low.emit("elect", (low.optional(ins, names[0], 32), low.optional(ins, names[1], 1), members))


@unit("shfl")
def shfl(low: Lowering, ins: Instruction) -> None:
    mode = ("up", "down", "bfly", "idx").index(ins.parts[2])
    names = [x.strip() for x in ins.operands[0].split("|")]
    a, b, c = (low.source(ins, x, "b32") for x in ins.operands[1:4])
    members = low.source(ins, ins.operands[4], "b32")
    d = low.optional(ins, names[0], 32)
    p = low.optional(ins, names[1], 1) if len(names) > 1 else NONE
    low.emit("shfl", (d, p, a, b, c, members), (mode,))


@unit("redux")
def redux(low: Lowering, ins: Instruction) -> None:
    operation, t = ins.parts[2], ins.type
    if t == "f32":
        code = {"min": 8, "max": 9}[operation]
    else:
        signed = t == "s32"
        code = {"add": 0, "min": 3 if signed else 1, "max": 4 if signed else 2, "and": 5, "or": 6, "xor": 7}[operation]
    a, members = low.source(ins, ins.operands[1], "b32"), low.source(ins, ins.operands[2], "b32")
    low.emit(
        "redux",
        (low.destination(ins, ins.operands[0], 32), a, members),
        (code, int(ins.has("abs")), int(ins.has("NaN"))),
    )


@unit("match")
def match(low: Lowering, ins: Instruction) -> None:
    bits = bits_of(ins.type)
    names = [x.strip() for x in ins.operands[0].split("|")]
    a, members = low.source(ins, ins.operands[1], f"b{bits}"), low.source(ins, ins.operands[2], "b32")
    d = low.destination(ins, names[0], 32)
    p = low.optional(ins, names[1], 1) if len(names) > 1 else NONE
    low.emit(f"match.b{bits}", (d, p, a, members), (int(ins.has("all")),))
