"""What happened in a run: hazards, counters, instructions per warp, the modelled bound."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from .bound import Bound, bound
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


@dataclass
class LaunchReport:
    """One launch. ``counters`` holds bytes and counts by name, ``mma`` (count, FLOPs) by kind and shape,
    ``warp_instructions`` the executed warp instructions by warp of the CTA, summed over the CTAs."""

    kernel: str
    grid: tuple[int, ...]  # (x, y, z)
    block: tuple[int, ...]  # (x, y, z)
    cluster: tuple[int, ...]  # (x, y, z)
    shared_bytes: int
    hazards: list[Hazard]
    notes: list[Hazard]  # what the PTX ISA does not promise, and today's hardware does
    counters: dict[str, int]
    mma: dict[str, tuple[int, int]]
    warp_instructions: list[int]
    opcodes: dict[str, int]
    seconds: float
    segments: list[Segment] = field(default_factory=list)  # only with ``profile``

    def timeline(self, width: int = 96) -> str:
        """The first cluster's warps over time, as text; empty unless the launch was profiled."""
        return text(self, width)

    @property
    def flops(self) -> int:
        return sum(f for _, f in self.mma.values())

    def roles(self) -> list[tuple[str, int, int]]:
        """Adjacent warps with like instruction counts: (warps, instructions, share in percent)."""
        out: list[tuple[str, int, int]] = []
        total = sum(self.warp_instructions) or 1
        first = 0
        for i in range(1, len(self.warp_instructions) + 1):
            end = i == len(self.warp_instructions)
            a = self.warp_instructions[first]
            b = 0 if end else self.warp_instructions[i]
            if end or abs(a - b) > 0.2 * max(a, b, 1):
                n = sum(self.warp_instructions[first:i])
                out.append((f"{first}" if i == first + 1 else f"{first}-{i - 1}", n, round(100 * n / total)))
                first = i
        return out

    def bound(self, device: str = "B200") -> Bound:
        return bound(self, device)

    def __str__(self) -> str:
        c = self.counters
        lines = [
            f"{self.kernel}",
            f"  grid {self.grid}, block {self.block}, cluster {self.cluster}, {self.shared_bytes} bytes shared; "
            f"emulated in {self.seconds:.3f} s",
            f"  {c['instructions']} warp instructions; by warp: "
            + ", ".join(f"{w}: {n} ({p} %)" for w, n, p in self.roles()),
        ]
        for shape, (count, flops) in sorted(self.mma.items()):
            lines.append(f"  {shape}: {count} times, {flops:.3e} FLOP")
        moved = [
            f"{k.replace('_', ' ')} {v}"
            for k, v in c.items()
            if v and k not in ("instructions", "clusters", "shared_passes", "shared_accesses")
        ]
        if moved:
            lines.append("  bytes and counts: " + ", ".join(moved))
        if c["shared_accesses"]:
            lines.append(f"  shared memory passes per access: {c['shared_passes'] / c['shared_accesses']:.2f}")
        lines.append("  " + str(self.bound()))
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
