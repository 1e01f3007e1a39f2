"""Compile the kernels of named model shapes ahead of time, for any target, without a GPU, a driver or a compiler later.

The directory is used where CUDNN_DSA_KERNELS names it, or from a wheel that carries it as cudnn_dsa/kernels.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cudnn_dsa import backends
from cudnn_dsa.cli import console
from cudnn_dsa.cli.console import CannotRun
from cudnn_dsa.cli.shapes import MODEL_SHAPES, ModelShape
from cudnn_dsa.contracts import TensorSpec
from cudnn_dsa.contracts.sparse_attention import CUDA_DTYPES, Options, Problem, check, default_head_dim_v

if TYPE_CHECKING:
    from cudnn_dsa.artifact import Artifact, Source

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a", "sm_100f")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", choices=ARCHITECTURES, nargs="+", required=True, help="targets")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to write")
    parser.add_argument(
        "--shapes", type=_shapes, default=list(MODEL_SHAPES), metavar="A,B", help=f"of {', '.join(MODEL_SHAPES)} (all)"
    )
    parser.add_argument("--dtype", choices=CUDA_DTYPES, nargs="+", default=["bfloat16"], help="bfloat16 if not given")
    parser.add_argument("--deterministic", action="store_true", help="the deterministic variants too")


def run(args: argparse.Namespace) -> int:
    from cudnn_dsa.artifact import aot, key

    start = time.perf_counter()
    shapes = [MODEL_SHAPES[name] for name in args.shapes]
    wanted = [p for shape in shapes for p in problems(shape, args.dtype, args.deterministic)]
    found = {key.identity(source): source for arch in args.arch for source in _sources(wanted, arch)}
    records = aot.write(args.out, _compile(list(found.values())))
    rows = [
        [r["name"], r["arch"], *(str(r["resources"][name]) for name in ("registers", "stack")),
         console.size(r["resources"]["static_shared"] + r["resources"]["dynamic_shared"])]
        for r in records
    ]  # fmt: skip
    print(console.table(["kernel", "target", "registers", "stack", "shared memory"], rows, right="  >>>"))
    print(f"{len(records)} kernels in {args.out} ({time.perf_counter() - start:.0f} s)")
    return 0


def problems(shape: ModelShape, dtypes: list[str], deterministic: bool) -> Iterator[Problem]:
    """The problems of a model's layer, one for each kernel key: what the plans, the wrappers and
    ``sparse_attention()`` (whose out is fp32) ask for with and without sinks and lengths."""
    flags = (False, True)
    for dtype, wide_out, sink, length in itertools.product(dtypes, flags, flags, flags):
        out_dtype = "float32" if wide_out else dtype
        yield check(_specs(shape, dtype, sink, length), Options("forward", out_dtype=out_dtype))
        specs = _specs(shape, dtype, sink, length)
        h, d_v = shape.heads, default_head_dim_v(shape.head_dim)
        specs |= {
            "out": _spec(1, h, d_v, dtype=out_dtype), "dout": _spec(1, h, d_v, dtype=dtype),
            "lse": _spec(1, h, dtype="float32"),
        }  # fmt: skip
        for repeatable in flags if deterministic else (False,):
            yield check(specs, Options("backward", deterministic=repeatable))


def _specs(shape: ModelShape, dtype: str, sink: bool, length: bool) -> dict[str, TensorSpec | None]:
    return {
        "q": _spec(1, shape.heads, shape.head_dim, dtype=dtype),
        "kv": _spec(1, shape.head_dim, dtype=dtype),
        "topk_idxs": _spec(1, shape.topk, dtype="int32"),
        "attn_sink": _spec(shape.heads, dtype="float32") if sink else None,
        "topk_length": _spec(1, dtype="int32") if length else None,
    }


def _spec(*shape: int, dtype: str) -> TensorSpec:
    return TensorSpec(shape, dtype, device="meta")


def _sources(wanted: list[Problem], arch: str) -> Iterator[Source]:
    """The kernels of those of the problems that the target's backend runs."""
    match = re.fullmatch(r"(sm_\d+)\d[af]", arch)
    assert match is not None
    name = {"sm_9": "sm90", "sm_10": "sm100"}[match[1]]
    try:
        backend: Any = backends.load(name)
    except RuntimeError as error:
        raise CannotRun(f"{arch}: {error}") from error
    sources = getattr(backend, "sources", None)
    if not callable(sources):  # in a module of their own
        sources = importlib.import_module(f"{backends.MODULES[name]}.sources").sources
    for problem in wanted:
        if backend.supports(problem) is None:
            yield from sources(problem, arch)


def _compile(sources: list[Source]) -> Iterator[Artifact]:
    from cudnn_dsa.artifact import build, library

    reason = build.unavailable()
    if reason is not None:
        raise CannotRun(f"nothing can be compiled: {reason}")
    for i, source in enumerate(sources):
        print(f"{i + 1} of {len(sources)}: {source.name} for {source.arch}", file=sys.stderr)
        yield library.compiled(source)


def _shapes(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in MODEL_SHAPES]
    if unknown:
        raise argparse.ArgumentTypeError(f"no shape {', '.join(unknown)}: there is {', '.join(MODEL_SHAPES)}")
    return names
