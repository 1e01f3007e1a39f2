"""Train a small language model on real text; its attention is this operator behind a top-k indexer.

The indexer learns from the main attention while the model learns from the text. At the end one attention call's
gradients are compared with a dense float64 formulation; the exit code is 1 if they are further apart than the contract
allows.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from cudnn_dsa.cli import availability
from cudnn_dsa.cli.console import CannotRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=400, help="training steps (default: 400)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for demo.png (default: out)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="cpu, cuda, cuda:1... (default: cuda where a CUDA backend runs, else cpu)")
    parser.add_argument("--text", type=Path, help="a UTF-8 text file to learn (default: Python's language reference)")


def run(args: argparse.Namespace) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would print that it starts and stops
    from cudnn_dsa.cli.demo import session

    if args.steps < 1:
        raise CannotRun("--steps must be at least 1")
    return session.run(args.steps, args.out, args.seed, availability.resolve_device(args.device), args.text)
