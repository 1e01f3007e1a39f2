"""Static checks of a lowered kernel: registers that an asynchronous load has not filled yet.

``tcgen05.ld`` fills its registers some time before the next ``tcgen05.wait::ld`` of the warp (PTX ISA, tcgen05.wait). A
forward data-flow analysis over the operations follows the registers in flight; copying one (compilers move the packing
of pairs above the wait) passes the state on, any other use is a hazard.
"""

from __future__ import annotations

from dataclasses import dataclass

from .lowering import NO_GUARD, NONE, Operation

_COPIES = ("mov.u", "pack", "part32", "part64", "widen")
_ALL_SOURCES = (
    "st.",
    "tmem.st",
    "stmatrix",
    "bra",
    "bar",
    "mbarrier.init",
    "mbarrier.inval",
    "cp.async",
    "bulk.",
    "tensor.copy",
    "tcgen05.",
    "tmem.alloc",
    "tmem.dealloc",
    "converge",
)


def _split(o: Operation) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(destinations, sources) of an operation."""
    h, x = o.handler, o.operands
    if h.startswith(("ld.", "tmem.ld", "ldmatrix")):
        return x[1:], x[:1]
    if h.startswith("ldparam"):
        return x, ()
    if h.startswith(_ALL_SOURCES):
        return (), x
    if h.startswith("atom."):
        n = o.immediates[1]
        return x[1 : 1 + n], (x[0], *x[1 + n :])
    if h.startswith(("setp", "elect", "shfl", "match")):
        return x[:2], x[2:]
    if h == "mma.sync":
        n = 4 if o.immediates[2] else 2
        return x[:n], x[n:]
    if h == "wgmma.mma":
        n = o.immediates[0] // (2 if o.immediates[7] else 4)
        return x[:n], x
    return x[:1], x[1:]


@dataclass(frozen=True)
class EarlyUse:
    """Operation ``use`` reads a register that operation ``load`` has not surely filled."""

    load: int
    use: int


def early_uses(operations: list[Operation]) -> list[EarlyUse]:
    """Uses of registers of ``tcgen05.ld`` that some path reaches without a ``tcgen05.wait::ld``."""
    if not any(o.handler == "tmem.ld" for o in operations):
        return []
    starts = {0}
    for i, o in enumerate(operations):
        if o.handler == "bra":
            starts.update((o.immediates[0], i + 1))
        elif o.handler == "ret":
            starts.add(i + 1)
    ordered = sorted(s for s in starts if s < len(operations))
    end_of = dict(zip(ordered, [*ordered[1:], len(operations)], strict=True))
    found: dict[int, EarlyUse] = {}
    state_at: dict[int, dict[int, int]] = {0: {}}  # block -> register -> the load it waits for
    todo = [0]
    while todo:
        block = todo.pop()
        state = dict(state_at[block])
        end = end_of[block]
        for i in range(block, end):
            o = operations[i]
            if o.handler == "tmem.wait_ld":
                state.clear()
                continue
            if not state and o.handler != "tmem.ld":
                continue
            destinations, sources = _split(o)
            if o.handler == "tmem.ld":
                for d in destinations:
                    state[d] = i
                continue
            pending = next((state[s] for s in sources if s in state), None)
            copy = o.handler.startswith(_COPIES)
            if pending is not None and not copy:
                found.setdefault(i, EarlyUse(pending, i))
            for d in destinations:
                if pending is not None and copy:
                    state[d] = pending
                elif o.guard == NO_GUARD and d != NONE:
                    state.pop(d, None)
        last = operations[end - 1]
        next_blocks = []
        if last.handler == "bra":
            next_blocks.append(last.immediates[0])
        if not (last.handler in ("bra", "ret") and last.guard == NO_GUARD) and end < len(operations):
            next_blocks.append(end)
        for n in next_blocks:
            known = state_at.get(n)
            if known is None:
                state_at[n] = dict(state)
                todo.append(n)
            elif not state.keys() <= known.keys():
                known.update({k: v for k, v in state.items() if k not in known})
                todo.append(n)
    return list(found.values())
