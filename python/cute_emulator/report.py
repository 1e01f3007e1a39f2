"""What happened in a run: hazards, counters, instructions per warp, the modelled bound."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby

from .bound import DEVICES, Bound, bound
from .ptx import Entry
from .timeline import Segment, text


@dataclass(frozen=True)
class Location:
    """A line of the PTX, and the source line it came from if the kernel was compiled with line information."""

    line: int
    text: str
    source: str = ""

    def __str__(self) -> str:
        return f"PTX line {self.line}: {self.text}" + (f"  ({self.source})" if self.source else "")


def locate(entry: Entry, ptx_text: list[str], line: int) -> Location:
    text = ptx_text[line - 1].strip() if 0 < line <= len(ptx_text) else "?"
    i = bisect_right(entry.source_lines, (line, "\uffff", 0)) - 1
    source = f"{entry.source_lines[i][1]}:{entry.source_lines[i][2]}" if i >= 0 else ""
    return Location(line, text, source)


@dataclass(frozen=True)
class Hazard:
    """Two accesses that nothing orders (or another violation of the asynchronous rules).

    ``kind`` says which; ``earlier`` and ``later`` are the two places, ``by_earlier`` and ``by_later`` who made them.
    """

    kind: str
    memory: str
    by_earlier: str
    by_later: str
    earlier: Location
    later: Location
    cta: int
    address: int
    count: int

    def __str__(self) -> str:
        if not self.by_earlier:
            return f"{self.kind}: {self.memory} CTA rank {self.cta}, {self.by_later}\n    at {self.later}"
        return (
            f"{self.kind}: {self.memory} 0x{self.address:x}, CTA rank {self.cta} ({self.count} times)\n"
            f"    {self.by_later}\n      at {self.later}\n    against {self.by_earlier}\n      at {self.earlier}"
        )


# What a warp that does this kind of work is called; a warp may be several things. The first column: core.WORK.
_ROLES = {
    "tcgen05.mma": "MMA issuer",
    "wgmma": "wgmma",
    "mma.sync": "mma.sync",
    "TMA loads": "TMA producer",
    "cp.async": "cp.async producer",
    "exponentials": "exponentials",
    "tcgen05.ld": "TMEM reader",
    "tcgen05.st": "TMEM writer",
    "TMA stores": "TMA store",
    "atomics": "reduction",
}


def role_name(work: dict[str, int]) -> str:
    """``role_name({"TMA loads": 8, "barrier waits": 9}) == "TMA producer"``: a warp's role, from what it has done."""
    names = [name for kind, name in _ROLES.items() if work.get(kind)]
    return " + ".join(names) or ("epilogue" if work.get("global stores") else "other")


@dataclass(frozen=True)
class Role:
    """Adjacent warps of a CTA that do the same kinds of work. ``share``: of the launch's instructions."""

    name: str
    warps: str
    instructions: int
    share: float
    work: dict[str, int]

    def __str__(self) -> str:
        work = ", ".join(f"{k} {n}" for k, n in self.work.items())
        return f"warps {self.warps}: {self.name}; {self.instructions} instructions ({self.share:.0%}); {work}"


@dataclass
class LaunchReport:
    """One launch. ``counters`` holds bytes and counts by name, ``mma`` (count, FLOPs) by kind and shape,
    ``useful_flops`` those that are no padding (no factor in a row or column of zeros), ``warp_instructions`` the
    executed warp instructions by warp of the CTA, ``warp_work`` those of each kind of :data:`cute_emulator.core.WORK`;
    both are summed over the CTAs."""

    kernel: str
    grid: tuple[int, ...]  # (x, y, z)
    block: tuple[int, ...]  # (x, y, z)
    cluster: tuple[int, ...]  # (x, y, z)
    shared_bytes: int
    hazards: list[Hazard]
    notes: list[Hazard]  # what the PTX ISA does not promise, and today's hardware does
    counters: dict[str, int]
    mma: dict[str, tuple[int, int]]
    useful_flops: int
    warp_instructions: list[int]
    warp_work: list[dict[str, int]]
    opcodes: dict[str, int]
    seconds: float
    segments: list[Segment] = field(default_factory=list)  # only with ``profile``

    def timeline(self, width: int = 96) -> str:
        """The first cluster's warps over time, as text; empty unless the launch was profiled."""
        return text(self, width)

    @property
    def flops(self) -> int:
        return sum(f for _, f in self.mma.values())

    def role_of(self, warp: int) -> str:
        """What warp ``warp`` of a CTA does."""
        return role_name(self.warp_work[warp])

    def roles(self) -> list[Role]:
        """Adjacent warps that do the same kinds of work."""
        out: list[Role] = []
        total = sum(self.warp_instructions) or 1
        for name, group in groupby(range(len(self.warp_work)), self.role_of):
            warps = list(group)
            n = sum(self.warp_instructions[w] for w in warps)
            work: Counter[str] = Counter()
            for w in warps:
                work.update(self.warp_work[w])
            label = f"{warps[0]}-{warps[-1]}" if len(warps) > 1 else str(warps[0])
            out.append(Role(name, label, n, n / total, dict(work)))
        return out

    def bound(self, device: str = "B200") -> Bound:
        return bound(self, device)

    def __str__(self) -> str:
        c = self.counters
        lines = [
            f"{self.kernel}",
            f"  grid {self.grid}, block {self.block}, cluster {self.cluster}, {self.shared_bytes} bytes shared; "
            f"emulated in {self.seconds:.3f} s",
            f"  {c['instructions']} warp instructions",
            *(f"    {role}" for role in self.roles()),
        ]
        for shape, (count, flops) in sorted(self.mma.items()):
            lines.append(f"  {shape}: {count} times, {flops:.3e} FLOP")
        if self.flops:
            lines.append(
                f"  useful: {self.useful_flops / self.flops:.1%} of {self.flops:.3e} FLOP (the rest is padding)"
            )
        moved = [
            f"{k.replace('_', ' ')} {v}"
            for k, v in c.items()
            if v and k not in ("instructions", "clusters", "shared_passes", "shared_accesses")
        ]
        if moved:
            lines.append("  bytes and counts: " + ", ".join(moved))
        if c["shared_accesses"]:
            lines.append(f"  shared memory passes per access: {c['shared_passes'] / c['shared_accesses']:.2f}")
        lines += [f"  {self.bound(device)}" for device in DEVICES]
        if self.hazards:
            lines.append(f"  {len(self.hazards)} hazards:")
            lines += ["    " + line for h in self.hazards for line in str(h).splitlines()]
        else:
            lines.append("  no hazards")
        if self.notes:
            first = str(self.notes[0]).splitlines()
            lines += [f"  {len(self.notes)} notes, the first:", *("    " + line for line in first)]
        return "\n".join(lines)


@dataclass
class Report:
    """All launches of a run."""

    launches: list[LaunchReport] = field(default_factory=list)

    @property
    def hazards(self) -> list[Hazard]:
        return [h for launch in self.launches for h in launch.hazards]

    def __str__(self) -> str:
        return "\n".join(str(launch) for launch in self.launches)
