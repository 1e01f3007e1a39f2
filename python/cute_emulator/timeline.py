"""Warps over time: a text picture, and a PNG on request.

Time is the number of warp instructions that the first cluster has executed, in the order of the emulated schedule. It
shows who waits for whom, not how long anything takes on hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .report import LaunchReport

WHY = ("preempted", "waits for an mbarrier", "waits at a barrier", "waits at the cluster barrier", "finished")
_MARK = (" ", "m", "b", "c", " ")


class Segment(NamedTuple):
    """An uninterrupted run of a warp (numbered through the cluster); ``line`` is the PTX line where it stopped."""

    begin: int
    end: int
    warp: int
    line: int
    why: int


def text(report: LaunchReport, width: int = 96) -> str:
    """One row a warp, one column a stretch of time: # and + for much and some execution, m b c for waits."""
    segments = report.segments
    if not segments:
        return ""
    total = max(s.end for s in segments)
    warps = max(s.warp for s in segments) + 1
    a_cta = len(report.warp_instructions)
    step = max(1, -(-total // width))
    columns = -(-total // step)
    busy = [[0] * columns for _ in range(warps)]
    mark = [[" "] * columns for _ in range(warps)]
    waits: list[tuple[int, str]] = [(0, " ")] * warps
    for s in segments:
        begin, symbol = waits[s.warp]
        if symbol != " ":
            for c in range(begin // step, s.begin // step + 1):
                mark[s.warp][min(c, columns - 1)] = symbol
        for c in range(s.begin // step, (s.end - 1) // step + 1):
            busy[s.warp][c] += min(s.end, (c + 1) * step) - max(s.begin, c * step)
        waits[s.warp] = (s.end, _MARK[s.why])
    rows = [
        f"warps over time: {total} warp instructions, {step} a column; # much, + some; waits: m mbarrier, b barrier, "
        "c cluster barrier"
    ]
    names = [report.role_of(w) for w in range(a_cta)]
    wide = max(map(len, names), default=0)
    for w in range(warps):
        share = [b / step for b in busy[w]]
        row = "".join("#" if x > 0.25 else "+" if x > 0 else m for x, m in zip(share, mark[w], strict=True))
        rows.append(f"  CTA {w // a_cta} warp {w % a_cta:2d} {names[w % a_cta]:{wide}} |{row}|")
    return "\n".join(rows)


def draw(report: LaunchReport, path: str) -> None:
    """Writes the picture as a PNG. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:blue")
    warps = max((s.warp for s in report.segments), default=0) + 1
    figure, axes = pyplot.subplots(figsize=(12, 1 + 0.22 * warps))
    last: dict[int, Segment] = {}
    for s in report.segments:
        before = last.get(s.warp)
        if before is not None and before.why in (1, 2, 3):
            axes.broken_barh([(before.end, s.begin - before.end)], (s.warp - 0.15, 0.3), color=colours[before.why])
        axes.broken_barh([(s.begin, s.end - s.begin)], (s.warp - 0.4, 0.8), color=colours[0])
        last[s.warp] = s
    a_cta = max(1, len(report.warp_instructions))
    axes.set_yticks(
        range(warps),
        [f"CTA {w // a_cta} warp {w % a_cta}: {report.role_of(w % a_cta)}" for w in range(warps)],
        fontsize=7,
    )
    axes.invert_yaxis()
    axes.set_xlabel("warp instructions executed by the cluster (emulated order, not hardware time)")
    axes.legend(
        handles=[pyplot.Rectangle((0, 0), 1, 1, color=colours[i]) for i in range(4)],
        labels=["runs", *WHY[1:4]],
        fontsize=7,
        loc="upper right",
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
