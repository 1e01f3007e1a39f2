"""Single-line breaks of kernels that are known to be right: each must end in a hazard, an error or wrong gradients.

The sites are those of the pinned frontend and compiler. Sites that are left out are harmless: waits whose barrier has
completed by construction (a producer's first use of an empty slot, a wait that a later commit of the same in-order
tensor pipe implies) and barriers around staging buffers that are used once; docs/emulator.md has the arguments.
"""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

import pytest
from emulator_cudnn import PLANS, Problem, backward, errors, problem

from cute_emulator import ExecutionError, HazardError

BOUND = 4e-3
SEEDS = 20


class Break(NamedTuple):
    """Replaces the ``site``-th match of ``pattern`` in the main kernel."""

    what: str
    pattern: str
    replacement: str
    site: int


def sites(what: str, pattern: str, replacement: str, numbers: tuple[int, ...]) -> list[Break]:
    return [Break(what, pattern, replacement, n) for n in numbers]


LINE = r"(?m)^\s*{}[^;]*;"
BREAKS = [
    *sites("wait for an mbarrier", r"@P1 bra\.uni DONE;", "bra.uni DONE;", (3, 5, 8, 10, 13, 14, 16, 18, 19, 20, 22)),
    *sites("barrier", LINE.format(r"(?:barrier\.sync|bar\.sync)"), "", (0, 1, 2, 3, 4, 5, 9, 12, 15, 18)),
    *sites("arrival", LINE.format(r"mbarrier\.arrive\.shared"), "", (0, 1, 2, 3, 7, 8, 9, 10)),
    *sites("commit", LINE.format(r"tcgen05\.commit"), "", (0, 1, 2, 3, 4, 5, 6, 7)),
    *sites("proxy fence", LINE.format(r"fence\.proxy\.async"), "", (0, 1, 2, 3, 4, 5, 6, 7)),
    *sites("asynchronous arrival", LINE.format(r"cp\.async\.mbarrier\.arrive"), "", (0, 1)),
    *sites("wait for cp.async", LINE.format(r"cp\.async\.wait_group"), "", (0, 1)),
    *sites("last wait for bulk stores", LINE.format(r"cp\.async\.bulk\.wait_group"), "", (4,)),
    *sites("tensor memory freed", LINE.format(r"tcgen05\.dealloc"), "", (0,)),
    *sites("byte count", r"(mbarrier\.arrive\.expect_tx\.shared\.b64 %rd\d+, \[[^\]]*\], )%r\d+;", r"\g<1>8192;", (0,)),
    *sites("row of stmatrix", r"(stmatrix[^\[]*\[%r\d+)\]", r"\g<1>+16]", (0, 2)),
    *sites("swizzle", r"(shr\.u32\s+%r\d+, %r\d+), 3;(\s+and\.b32\s+%r\d+, %r\d+), 112;", r"\g<1>, 3;\g<2>, 48;", (0,)),
    *sites("accumulation", r"(tcgen05\.mma[^;]*), %p\d+;", r"\g<1>, 0;", (3,)),
    *sites("phase", r"(mbarrier\.try_wait\.parity\.shared\.b64 P1, \[%r\d+\], )0, ", r"\g<1>1, ", (0,)),
    *sites(
        "early free of tensor memory",
        r"(tcgen05\.ld\.sync\.aligned\.16x256b\.x8[^;]*;)",
        r"tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r37, 512; \g<1>",
        (2,),
    ),
]


def broken(ptx: str, b: Break) -> str:
    entries = [m.start() for m in re.finditer(r"\.visible \.entry", ptx)] + [len(ptx)]
    begin, end = max(itertools.pairwise(entries), key=lambda e: e[1] - e[0])
    matches = [m for m in re.finditer(b.pattern, ptx) if begin <= m.start() < end]
    m = matches[b.site]
    return ptx[: m.start()] + m.expand(b.replacement) + ptx[m.end() :]


@pytest.fixture(scope="module")
def right() -> Problem:
    p = problem(PLANS["H64 D512"], queries=2, keys=256, tokens=300)
    gpu, grads = backward(p, seed=0)
    assert not gpu.report.hazards
    assert max(errors(p, grads).values()) < BOUND
    return p


def caught(p: Problem, b: Break, seed: int) -> str:
    """How the break shows with this seed, or an empty string."""
    try:
        _, grads = backward(p, seed=seed, transform=lambda ptx: broken(ptx, b), instruction_limit=20_000_000)
    except (ExecutionError, HazardError) as e:
        return str(e)
    worst = max(errors(p, grads).values())
    return f"relative error {worst}" if not worst < BOUND else ""


@pytest.mark.parametrize("b", BREAKS, ids=lambda b: f"{b.what}-{b.site}")
def test_a_broken_line_is_caught(right: Problem, b: Break) -> None:
    for seed in range(SEEDS):
        if caught(right, b, seed):
            return
    pytest.fail(f"the broken {b.what} was not noticed on {SEEDS} seeds")
