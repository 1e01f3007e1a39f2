"""Time this machine's backends on the shapes of named models, beside plain PyTorch, in one run.

Every side gets the same tensors; its results are compared with the plain formulation's before it is timed. Rounds go
round-robin over the sides, so that a machine that slows down slows all of them down. Times are medians.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cudnn_dsa.cli import availability, console
from cudnn_dsa.cli.console import CannotRun
from cudnn_dsa.cli.shapes import MODEL_SHAPES
from cudnn_dsa.contracts.sparse_attention import CUDA_BACKENDS, CUDA_DTYPES, WIDE_BACKENDS, WIDE_DTYPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=MODEL_SHAPES, help="model shapes (default: all)", nargs="+")
    parser.add_argument(
        "--backend",
        choices=[*CUDA_BACKENDS, *WIDE_BACKENDS],
        help="backends (default: all that run here; reference only where nothing else does)",
        nargs="+",
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1... (default: cuda where a CUDA backend runs, else cpu)")
    parser.add_argument("--dtype", choices=WIDE_DTYPES, default="bfloat16")
    parser.add_argument("--s-q", type=_positive, help="queries (default: as many of 4096 as time and memory allow)")
    parser.add_argument("--s-kv", type=_positive, help="keys (default: 8192, fewer with fewer queries)")
    parser.add_argument("--heads", type=_positive, help="instead of the shape's own number of query heads")
    parser.add_argument("--topk", type=_positive, help="instead of the shape's own number of selected keys")
    parser.add_argument("--rounds", type=_positive, default=5, help="times each side is timed (default: 5)")
    parser.add_argument("--budget", type=float, default=45.0, help="seconds to aim at in all (default: 45)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, help="write the measurements to this file")
    parser.add_argument("--plot", type=Path, help="draw the measurements into this PNG")


def run(args: argparse.Namespace) -> int:
    from cudnn_dsa.cli.bench import measure, report

    device = availability.resolve_device(args.device)
    if device != "cpu" and args.dtype not in CUDA_DTYPES:
        raise CannotRun(f"CUDA backends take {' or '.join(CUDA_DTYPES)}, not {args.dtype}")
    backends = choose_backends(device, args.backend)
    if not backends:
        raise CannotRun(f"no backend to time on {device}; `python -m cudnn_dsa info` says why")
    plot = console.figures() if args.plot else None
    own_sizes = {key: value for key in ("heads", "topk") if (value := getattr(args, key)) is not None}
    plan = measure.Plan(
        shapes=[MODEL_SHAPES[name]._replace(**own_sizes) for name in args.shape or MODEL_SHAPES],
        backends=backends,
        device=device,
        dtype=args.dtype,
        s_q=args.s_q,
        s_kv=args.s_kv,
        rounds=args.rounds,
        budget=args.budget,
        seed=args.seed,
    )
    results = measure.measure(plan)
    print(report.as_text(plan, results))
    if args.csv:
        report.write_csv(args.csv, plan, results)
    if plot:
        report.draw(plot, args.plot, plan, results)
    return 1 if any(result.wrong for result in results) else 0


def choose_backends(device: str, asked: list[str] | None) -> list[str]:
    """The backends to time; says which of those asked for cannot run."""
    can = availability.runnable(device)
    if asked is None:
        # The reference backend is written for reading: next to a real one its time says nothing.
        return [name for name in can if name != "reference"] or can
    for name in asked:
        if name not in can:
            why = availability.state(name, device).reason or f"not for {device}"
            print(f"not timed: {name}: {why}", file=sys.stderr)
    return [name for name in asked if name in can]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
