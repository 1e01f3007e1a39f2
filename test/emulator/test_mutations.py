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
from emulator_cudnn import PLANS, Plan, Problem, backward, errors, problem

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


COUNT = r"(mbarrier\.arrive\.expect_tx[^;]*, )%r\d+;"
# The H128 D512 kernel of two CTAs: what `make test` breaks, and all sites whose break is not harmless.
FEW_OF_PAIR = [
    *sites("wait for an mbarrier", r"@P1 bra\.uni DONE;", "bra.uni DONE;", (1, 5, 8, 10, 21, 26, 34, 41, 46, 53)),
    *sites("barrier", LINE.format(r"(?:barrier\.sync|bar\.sync)"), "", (0, 3)),
    *sites("cluster arrival", LINE.format(r"barrier\.cluster\.arrive"), "", (0,)),
    *sites("cluster wait", LINE.format(r"barrier\.cluster\.wait"), "", (0,)),
    *sites("arrival", LINE.format(r"mbarrier\.arrive\.(?!expect)"), "", (0, 10, 28)),
    *sites("expected bytes", LINE.format(r"mbarrier\.arrive\.expect_tx"), "", (0, 17)),
    *sites("byte count", COUNT, r"\g<1>4096;", (0, 9)),
    *sites("commit", LINE.format(r"tcgen05\.commit"), "", (0, 8, 16)),
    *sites("proxy fence", LINE.format(r"fence\.proxy\.async"), "", (2, 6)),
    *sites("wait for cp.async", LINE.format(r"cp\.async\.wait_group"), "", (0,)),
    *sites("wait for a load", LINE.format(r"tcgen05\.wait::ld"), "", (7,)),
    *sites("tensor memory freed", LINE.format(r"tcgen05\.dealloc"), "", (0,)),
    *sites("accumulation", r"(tcgen05\.mma[^;]*), %p\d+;", r"\g<1>, 0;", (0, 40)),
]
_WAITS = (2, 3, 7, 9, 11, 22, 25, 27, 28, 35, 36, 37, 38, 39, 40, 42, 43, 47, 48, 49, 50, 51, 52)
REST_OF_PAIR = [
    *sites("wait for an mbarrier", r"@P1 bra\.uni DONE;", "bra.uni DONE;", _WAITS),
    *sites("barrier", LINE.format(r"(?:barrier\.sync|bar\.sync)"), "", (1, 5, 6)),
    *sites("arrival", LINE.format(r"mbarrier\.arrive\.(?!expect)"), "", (*range(1, 10), *range(11, 28))),
    *sites("expected bytes", LINE.format(r"mbarrier\.arrive\.expect_tx"), "", tuple(range(1, 17))),
    *sites("commit", LINE.format(r"tcgen05\.commit"), "", (*range(1, 8), *range(9, 16))),
    *sites("proxy fence", LINE.format(r"fence\.proxy\.async"), "", (3, 4, 5)),
    *sites("wait for cp.async", LINE.format(r"cp\.async\.wait_group"), "", (1, 2, 3)),
    *sites("wait for a load", LINE.format(r"tcgen05\.wait::ld"), "", (8,)),
]


def broken(ptx: str, b: Break) -> str:
    entries = [m.start() for m in re.finditer(r"\.visible \.entry", ptx)] + [len(ptx)]
    begin, end = max(itertools.pairwise(entries), key=lambda e: e[1] - e[0])
    matches = [m for m in re.finditer(b.pattern, ptx) if begin <= m.start() < end]
    m = matches[b.site]
    return ptx[: m.start()] + m.expand(b.replacement) + ptx[m.end() :]


def right(plan: Plan, queries: int, keys: int, tokens: int) -> Problem:
    p = problem(plan, queries=queries, keys=keys, tokens=tokens)
    gpu, grads = backward(p, seed=0)
    assert not gpu.report.hazards
    assert max(errors(p, grads).values()) < BOUND
    return p


@pytest.fixture(scope="module")
def single() -> Problem:
    return right(PLANS["H64 D512"], queries=2, keys=256, tokens=300)


@pytest.fixture(scope="module")
def pair() -> Problem:
    return right(PLANS["H128 D512 2-CTA"], queries=1, keys=512, tokens=600)


def caught(p: Problem, b: Break, seed: int) -> str:
    """How the break shows with this seed, or an empty string."""
    try:
        _, grads = backward(p, seed=seed, transform=lambda ptx: broken(ptx, b), instruction_limit=20_000_000)
    except (ExecutionError, HazardError) as e:
        return str(e)
    worst = max(errors(p, grads).values())
    return f"relative error {worst}" if not worst < BOUND else ""


def check(p: Problem, b: Break) -> None:
    for seed in range(SEEDS):
        if caught(p, b, seed):
            return
    pytest.fail(f"the broken {b.what} was not noticed on {SEEDS} seeds")


@pytest.mark.parametrize("b", BREAKS, ids=lambda b: f"{b.what}-{b.site}")
def test_a_broken_line_is_caught(single: Problem, b: Break) -> None:
    check(single, b)


@pytest.mark.parametrize("b", FEW_OF_PAIR, ids=lambda b: f"{b.what}-{b.site}")
def test_a_broken_line_of_a_cta_pair_is_caught(pair: Problem, b: Break) -> None:
    check(pair, b)


@pytest.mark.slow
@pytest.mark.parametrize("b", REST_OF_PAIR, ids=lambda b: f"{b.what}-{b.site}")
def test_every_broken_line_of_a_cta_pair_is_caught(pair: Problem, b: Break) -> None:
    check(pair, b)
