"""What the benchmarks of the operator share: inputs, round-robin timing, accuracy, table, CSV and plot."""

from __future__ import annotations

import argparse
import csv
import platform
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import peers
import torch
from selections import Selection

from cudnn_dsa import interface
from cudnn_dsa.cli import console
from cudnn_dsa.cli.bench.measure import milliseconds, relative_l2
from cudnn_dsa.cli.bench.memory import peak_bytes
from cudnn_dsa.cli.shapes import MODEL_SHAPES, backward_flops, forward_flops

FLOPS = {"forward": forward_flops, "backward": backward_flops}
CHECKED_QUERIES = 16
MATMUL = {"cuda": 8192, "cpu": 512}  # rows, columns and terms of the matrix product whose rate is the ceiling


@dataclass
class Measured:
    """One side: milliseconds of every round, bytes beyond the inputs (None where nobody counts them), largest relative
    error, why it is absent."""

    name: str
    times: list[float] = field(default_factory=list)
    peak: int | None = None
    error: float = 0.0
    note: str = ""
    absent: str = ""

    @property
    def ms(self) -> float:
        return median(self.times)


def main(direction: str, description: str | None) -> int:
    args = _arguments(direction, description)
    device = args.device
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    inputs = make_inputs(args)
    flops = FLOPS[direction](*inputs.q.shape[:2], args.topk, args.head_dim, inputs.dout.shape[-1])
    sides, results = {}, {}
    for name, make in peers.SIDES[direction].items():
        if args.sides and name not in args.sides:
            continue
        results[name] = Measured(name)
        try:
            results[name].error = check(make, inputs.first(CHECKED_QUERIES), direction)
            results[name].peak = peak_bytes(device, lambda make=make: make(inputs).run())
            sides[name] = make(inputs)
            results[name].note = sides[name].note
        except peers.Unavailable as error:
            results[name].absent = str(error)
    ceiling: list[float] = []
    n = MATMUL[inputs.q.device.type]
    a, b = (torch.randn(n, n, device=device, dtype=inputs.q.dtype) for _ in range(2))
    for _ in range(args.rounds):
        ceiling.append(milliseconds(device, lambda: torch.matmul(a, b)))
        for name, side in sides.items():
            results[name].times.append(milliseconds(device, side.run))
    matmul_rate = 2 * n**3 / median(ceiling) / 1e9
    print(as_text(args, direction, list(results.values()), flops, matmul_rate))
    if args.csv:
        write_csv(args, direction, list(results.values()), flops, matmul_rate)
    if args.plot:
        draw(args, direction, list(results.values()), flops)
    return 0


def machine(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{platform.machine()} CPU"


def make_inputs(args: argparse.Namespace) -> peers.Inputs:
    dtype, device = getattr(torch, args.dtype), args.device
    g = torch.Generator(device).manual_seed(args.seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=g, device=device)

    selection = Selection(args.window, args.overlap, args.causal, args.invalid)
    q, kv = normal(args.s_q, args.heads, args.head_dim).to(dtype), normal(args.s_kv, args.head_dim).to(dtype)
    idxs = selection.topk_idxs(args.s_q, args.s_kv, args.topk, device, args.seed)
    sink, dout = normal(args.heads), normal(args.s_q, args.heads, 512).to(dtype)
    inputs = peers.Inputs(q, kv, idxs, sink, dout)
    # Whoever makes out and lse, all sides get the same; the reference backend works in fp32.
    inputs.out, inputs.lse = interface.sparse_attention_forward(q, kv, idxs, sink, backend=args.forward_by)
    return inputs


def check(make, inputs: peers.Inputs, direction: str) -> float:
    """Largest relative L2 error of a side on a few queries against the reference backend in fp32."""
    side = make(inputs)
    side.run()
    i = inputs
    if direction == "forward":
        want = interface.sparse_attention_forward(i.q, i.kv, i.topk_idxs, i.attn_sink, backend="reference")
    else:
        dkv = torch.empty(i.kv.shape, dtype=torch.float32, device=i.kv.device)
        want = interface.sparse_attention_backward(
            i.q, i.kv, i.out, i.dout, i.lse, i.attn_sink, i.topk_idxs, dkv=dkv, backend="reference"
        )
    return max((relative_l2(found, want[name]) for name, found in side.results().items()), default=float("nan"))


def as_text(args, direction: str, results: list[Measured], flops: int, matmul_rate: float) -> str:
    present = [r for r in results if r.times]
    header = ["side", "ms", "TFLOP/s", "of matmul", *(f"x {r.name}" for r in present), "peak", "error", "note"]
    rows = []
    for r in present:
        rate = flops / r.ms / 1e9
        ratios = [f"{other.ms / r.ms:.2f}" for other in present]
        peak = "n/a" if r.peak is None else console.size(r.peak)
        cells = [r.name, f"{r.ms:.2f}", f"{rate:.3g}", f"{rate / matmul_rate:.0%}", *ratios]
        rows.append([*cells, peak, f"{r.error:.1e}", r.note])
    absent = [f"  not timed: {r.name}: {r.absent}" for r in results if r.absent]
    selection = Selection(args.window, args.overlap, args.causal, args.invalid)
    return "\n".join(
        [
            f"{direction}: S_q {args.s_q}, S_kv {args.s_kv}, H {args.heads}, D {args.head_dim}, K {args.topk}, "
            f"{args.dtype}; keys {selection}",
            f"{machine(args.device)}, torch {torch.__version__}; {args.dtype} matmul "
            f"{matmul_rate:.3g} TFLOP/s in this run",
            "",
            console.table(header, rows, " " + ">" * (len(header) - 2)),
            *absent,
            "",
            f"ms: median of {args.rounds} rounds, round-robin, x NAME: times faster than NAME. peak: what a side",
            "allocates (outputs, workspace). error: largest relative L2 error of a result on "
            f"{CHECKED_QUERIES} queries against fp32.",
        ]
    )


COLUMNS = (
    "direction", "s_q", "s_kv", "heads", "head_dim", "topk", "dtype", "selection", "device", "torch", "matmul_tflops",
    "side", "rounds", "ms_median", "ms_min", "ms_max", "tflops", "peak_bytes", "relative_l2_error", "note",
)  # fmt: skip


def write_csv(args, direction: str, results: list[Measured], flops: int, matmul_rate: float) -> None:
    """Appends one row a side, with a header where the file is new."""
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    new = not args.csv.exists()
    with args.csv.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(COLUMNS)
        for r in results:
            if r.times:
                selection = Selection(args.window, args.overlap, args.causal, args.invalid)
                writer.writerow([
                    direction, args.s_q, args.s_kv, args.heads, args.head_dim, args.topk, args.dtype, selection,
                    machine(args.device), torch.__version__, f"{matmul_rate:.1f}", r.name,
                    len(r.times), f"{r.ms:.4f}", f"{min(r.times):.4f}", f"{max(r.times):.4f}",
                    f"{flops / r.ms / 1e9:.4g}", r.peak, f"{r.error:.3e}", r.note,
                ])  # fmt: skip


def draw(args, direction: str, results: list[Measured], flops: int) -> None:
    """Bars of TFLOP/s, whiskers from the slowest to the fastest round."""
    plt = console.figures()
    present = [r for r in results if r.times]
    figure, axes = plt.subplots(figsize=(1.6 * len(present) + 2, 4), layout="constrained")
    for x, r in enumerate(present):
        rate = flops / r.ms / 1e9
        spread = [[rate - flops / max(r.times) / 1e9], [flops / min(r.times) / 1e9 - rate]]
        axes.bar(x, rate, yerr=spread, capsize=4, color="0.7" if r.name == peers.PLAIN else f"C{x}")
        axes.annotate(f"{rate:.0f}", (x, rate), ha="center", va="bottom")
    axes.set_xticks(range(len(present)), [r.name.replace(" ", "\n") for r in present])
    axes.set_ylabel("TFLOP/s (higher is better)")
    axes.set_title(f"{direction}, S_q {args.s_q}, S_kv {args.s_kv}, H {args.heads}, D {args.head_dim}, K {args.topk}")
    args.plot.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.plot, dpi=130)


def _arguments(direction: str, description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape = MODEL_SHAPES["glm-5"]
    parser.add_argument("--s-q", type=int, default=4096)
    parser.add_argument("--s-kv", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=shape.heads)
    parser.add_argument("--head-dim", type=int, default=shape.head_dim, choices=(512, 576))
    parser.add_argument("--topk", type=int, default=shape.topk)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--window", type=int, help="locality: keys within this many rows (default: anywhere)")
    parser.add_argument("--overlap", type=float, default=0.0, help="share of keys taken over from the query before")
    parser.add_argument("--causal", action="store_true", help="no key behind the query's own position")
    parser.add_argument("--invalid", type=float, default=0.0, help="share of entries that are -1")
    parser.add_argument("--sides", nargs="+", choices=tuple(peers.SIDES[direction]), help="default: all that run here")
    parser.add_argument("--forward-by", default="auto", help="backend that makes out and lse")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, help="append the measurements to this file")
    parser.add_argument("--plot", type=Path, help="draw them into this PNG")
    return parser.parse_args()
