"""Reading the TPU compiler's final schedules: how many VLIW bundles a kernel takes per grid step.

A bundle is one issue slot of the TensorCore, so a static count. It ranks variants of a kernel on one chip; it is no
time: stalls on memory and the matrix units' latency beyond what the compiler scheduled do not show.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+((?:[A-Z]{2}\s*)*):\s*(?:>\s*)*\{", re.MULTILINE)
_REGION = re.compile(r"(Start/End empty|Start|End) region (\d+)")
_BRANCH = re.compile(r"sbr\.rel \(!?%p\d+[^)]*\) target = \$region(\d+)")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The schedule of one kernel.

    Attributes:
        name: of the kernel.
        total: bundles in all.
        step: bundles of one grid step with every conditional part taken.
        conditional: sizes of the parts of a step that a branch may skip (first or last tile, ragged tail), in order.
    """

    name: str
    total: int
    step: int
    conditional: tuple[int, ...]

    def __str__(self) -> str:
        parts = ", ".join(map(str, self.conditional)) or "none"
        return f"{self.name}: {self.step} bundles a grid step, of which conditional {parts}"


def parse(name: str, text: str) -> Schedule:
    """The schedule in the text of a ``*-final_bundles.txt`` dump."""
    starts = list(_BUNDLE.finditer(text))
    if not starts:
        raise ValueError(f"{name}: no bundle found; has the dump's format changed?")
    ends = [m.start() for m in starts[1:]] + [len(text)]
    region_at: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    loop_head = 0
    for index, (match, end) in enumerate(zip(starts, ends, strict=True)):
        bundle = text[match.end() : end]
        if "LB" in match.group(2):
            loop_head = index
        for kind, region in _REGION.findall(bundle):
            if kind != "End":
                region_at.setdefault(region, index)
        branches += [(index, region) for region in _BRANCH.findall(bundle)]
    back = [index for index, region in branches if region_at.get(region, index + 1) <= index]
    last = max(back, default=len(starts) - 1)
    skips = [(i, region_at[r]) for i, r in branches if r in region_at and loop_head <= i < region_at[r] <= last]
    # The body is skipped in the iterations that only fill or drain the pipeline: look inside of that branch. What lies
    # outside (starting and awaiting copies) counts as always taken.
    body = max(skips, key=lambda s: s[1] - s[0], default=(loop_head, last))
    inner = [s for s in skips if body[0] < s[0] and s[1] <= body[1]]
    if body[1] - body[0] > 0.9 * (last - loop_head) and inner:
        skips = inner
    skips.sort(key=lambda s: (s[0], -s[1]))
    conditional, reach = [], loop_head
    for start, stop in skips:
        if start >= reach:  # outermost only
            conditional.append(stop - start)
            reach = stop
    return Schedule(name, len(starts), last - loop_head, tuple(conditional))


def read_dump(directory: str | pathlib.Path, kernel: str) -> list[Schedule]:
    """The schedules in a dump of the low-level optimiser of the kernels whose name contains ``kernel``, from there on
    (the compiler prefixes the transformations a kernel came through)."""
    found = []
    for path in sorted(pathlib.Path(directory).glob("*-final_bundles.txt")):
        name = re.fullmatch(rf"\d+-.*?({re.escape(kernel)}.*?)_*\.\d+-\d+-final_bundles\.txt", path.name)
        if name:
            found.append(parse(name.group(1), path.read_text(errors="replace")))
    return found
