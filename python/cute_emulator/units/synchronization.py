"""PTX ISA, Parallel Synchronization and Communication: bar, barrier, barrier.cluster, membar, fence, mbarrier."""

from __future__ import annotations

from ..lowering import NONE, Instruction, Lowering, unit


@unit("bar", "barrier")
def bar(low: Lowering, ins: Instruction) -> None:
    parts = [p for p in ins.parts[1:] if p not in ("aligned", "cta")]
    if parts[0] == "warp":
        low.emit("converge", (low.source(ins, ins.operands[0], "b32"),))
        return
    if parts[0] == "cluster":
        if parts[1] == "arrive":
            low.emit("cluster.arrive", (), (int("relaxed" in parts),))
        else:
            low.emit("cluster.wait", ())
        return
    if parts[0] not in ("sync", "arrive", "red"):
        raise ins.unsupported()
    reduces = parts[0] == "red"
    o = ins.operands[1:] if reduces else ins.operands
    vote = low.predicate(ins, o[-1]) if reduces else NONE
    rest = o[:-1] if reduces else o
    number = low.source(ins, rest[0], "b32")
    threads = low.source(ins, rest[1], "b32") if len(rest) > 1 else NONE
    low.emit("bar", (number, threads, vote), (int(parts[0] != "arrive"),))
    if reduces:
        mode = ("popc", "and", "or").index(parts[1])
        low.emit("bar.result", (low.destination(ins, ins.operands[0], 32 if mode == 0 else 1),), (mode,))


@unit("membar", "fence")
def fence(low: Lowering, ins: Instruction) -> None:
    if ins.has("proxy") and any(p.startswith("async") for p in ins.parts):
        low.emit("fence.async", ())
    elif ins.has("proxy"):
        low.emit("nop", ())  # tensor maps and aliases: nothing is cached
    else:
        low.emit("fence.release", ())


def _shared_address(low: Lowering, ins: Instruction, text: str) -> tuple[int, int]:
    return low.address(ins, text, 32)


@unit("mbarrier")
def mbarrier(low: Lowering, ins: Instruction) -> None:
    what = ins.parts[1]
    o = ins.operands
    if what == "init":
        a, offset = _shared_address(low, ins, o[0])
        low.emit("mbarrier.init", (a, low.source(ins, o[1], "b32")), (offset,))
    elif what == "inval":
        a, offset = _shared_address(low, ins, o[0])
        low.emit("mbarrier.inval", (a,), (offset,))
    elif what in ("expect_tx", "complete_tx"):
        a, offset = _shared_address(low, ins, o[0])
        n = low.source(ins, o[1], "b32")
        if what == "expect_tx":
            low.emit("mbarrier.arrive", (NONE, a, NONE, n), (offset, 0, 1))
        else:
            low.emit("mbarrier.complete_tx", (a, n), (offset,))
    elif what in ("arrive", "arrive_drop"):
        if o[0].startswith("["):
            o = ["_", *o]
        a, offset = _shared_address(low, ins, o[1])
        count = bytes_ = NONE
        if ins.has("expect_tx"):
            bytes_ = low.source(ins, o[2], "b32")
        elif len(o) > 2:
            count = low.source(ins, o[2], "b32")
        low.emit(
            "mbarrier.arrive", (low.optional(ins, o[0], 64), a, count, bytes_), (offset, int(what == "arrive_drop"), 0)
        )
    elif what in ("try_wait", "test_wait"):
        parity = ins.has("parity")
        a, offset = _shared_address(low, ins, o[1])
        state = low.source(ins, o[2], "b32" if parity else "b64")
        low.emit(
            "mbarrier.wait", (low.destination(ins, o[0], 1), a, state), (offset, int(parity), int(what == "try_wait"))
        )
    else:
        raise ins.unsupported()
