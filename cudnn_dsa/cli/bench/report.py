"""The benchmark's table, CSV and plot."""

from __future__ import annotations

import csv
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cudnn_dsa._version import __version__
from cudnn_dsa.cli import console
from cudnn_dsa.cli.bench.measure import DIRECTIONS, ERROR_BOUNDS, PLAIN, Plan, Result


def machine(plan: Plan) -> str:
    """One line: the device, its threads or memory."""
    if plan.device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(plan.device)
        return f"{properties.name}, {console.size(properties.total_memory)}"
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


def by_case(results: list[Result]) -> Iterator[tuple[Result, list[Result]]]:
    """(the plain formulation's result, all results) of each case, in the order they were measured."""
    cases = dict.fromkeys(result.case for result in results)
    for case in cases:
        group = [result for result in results if result.case == case]
        yield next(result for result in group if result.side == PLAIN), group


def as_text(plan: Plan, results: list[Result]) -> str:
    header = [
        "shape",
        "side",
        *(f"{d} {unit}" for d in DIRECTIONS for unit in ("ms", "GFLOP/s", "ratio")),
        "peak",
        "error",
    ]
    rows, notes = [], []
    for plain, group in by_case(results):
        case = plain.case
        for result in group:
            cells = [case.shape.name if result is plain else "", result.side]
            for direction in DIRECTIONS:
                ratio = plain.milliseconds(direction) / result.milliseconds(direction)
                cells += [f"{result.milliseconds(direction):.2f}", f"{result.gflops(direction):.1f}", f"{ratio:.2f}x"]
            cells.append("n/a" if result.peak is None else console.size(result.peak))
            cells.append(f"{result.error:.1e}" + (" WRONG" if result.wrong else ""))
            rows.append(cells)
        shape = case.shape
        sizes = f"S_q {case.s_q}, S_kv {case.s_kv}, H {shape.heads}, D {shape.head_dim}, K {shape.topk}"
        notes.append(f"{shape.name}: {sizes}" + (f"\n    scaled down: {case.scaled}" if case.scaled else ""))
    return "\n".join(
        [
            f"cudnn_dsa {__version__}, torch {torch.__version__}, {plan.dtype} on {machine(plan)}",
            *notes,
            "",
            console.table(header, rows, "  " + ">" * 8),
            "",
            f"ms: median of {plan.rounds} rounds, round-robin. ratio: times faster than plain PyTorch (gather, einsum,",
            "softmax, autograd) in this run. peak: memory of one forward and backward beyond the inputs.",
            "error: largest relative L2 error of out, dq, dkv, d_sink on a few queries against float64; a backend's",
            f"bound is {ERROR_BOUNDS[plan.dtype]:.0e}.",
        ]
    )


COLUMNS = (
    "shape", "s_q", "s_kv", "heads", "head_dim", "head_dim_v", "topk", "dtype", "device", "machine", "side",
    "direction", "rounds", "ms_median", "ms_min", "ms_max", "gflops", "ratio_to_plain", "peak_bytes",
    "relative_l2_error", "cudnn_dsa", "torch",
)  # fmt: skip


def write_csv(path: Path, plan: Plan, results: list[Result]) -> None:
    """One row a side and direction; ``peak_bytes`` is of forward and backward together, empty where not measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for plain, group in by_case(results):
            case, shape = plain.case, plain.case.shape
            for result in group:
                for direction in DIRECTIONS:
                    times = result.times[direction]
                    ms = result.milliseconds(direction)
                    writer.writerow([
                        shape.name, case.s_q, case.s_kv, shape.heads, shape.head_dim, case.head_dim_v, shape.topk,
                        plan.dtype, plan.device, machine(plan), result.side, direction, len(times), f"{ms:.4f}",
                        f"{min(times):.4f}", f"{max(times):.4f}", f"{result.gflops(direction):.2f}",
                        f"{plain.milliseconds(direction) / ms:.4f}", result.peak, f"{result.error:.3e}", __version__,
                        torch.__version__,
                    ])  # fmt: skip


def draw(plt: Any, path: Path, plan: Plan, results: list[Result]) -> None:
    """Bars of GFLOP/s by shape and side, forward beside backward, labelled with the ratio to plain PyTorch."""
    groups = list(by_case(results))
    sides = list(dict.fromkeys(result.side for result in results))
    width = 0.8 / len(sides)
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    for panel, direction in zip(panels, DIRECTIONS, strict=True):
        for number, side in enumerate(sides):
            for position, (plain, group) in enumerate(groups):
                result = next(r for r in group if r.side == side)
                x, height = position + (number - (len(sides) - 1) / 2) * width, result.gflops(direction)
                label = side if position == 0 else None
                color = "0.7" if side == PLAIN else f"C{number - 1}"
                panel.bar(x, height, 0.92 * width, color=color, label=label)
                ratio = plain.milliseconds(direction) / result.milliseconds(direction)
                panel.annotate(f"{ratio:.2g}x", (x, height), ha="center", va="bottom", fontsize=9)
        panel.set_title(direction)
        panel.set_xticks(range(len(groups)), [_tick(plain) for plain, _ in groups], fontsize=8)
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
        panel.margins(y=0.12)
    panels[0].set_ylabel("GFLOP/s (higher is better)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(sides))
    title = f"DeepSeek sparse attention, {plan.dtype}, {machine(plan)}"
    method = f"median of {plan.rounds} rounds; on the bars: times faster than plain PyTorch"
    figure.suptitle(f"{title}\n{method}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _tick(plain: Result) -> str:
    case, shape = plain.case, plain.case.shape
    return f"{shape.name}\nH {shape.heads}, D {shape.head_dim}, K {shape.topk}\nS_q {case.s_q}, S_kv {case.s_kv}"
