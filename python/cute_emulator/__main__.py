"""``python -m cute_emulator kernel.ptx``: runs a kernel of a PTX file on made-up or stored arrays, prints the report.

Each argument of the kernel is one of
  NAME.npy                an array from a file (``NAME.npy:out.npy`` writes it to out.npy after the run)
  dtype[n, m]=zeros|ones|nan|random|arange
                          a new array, for instance ``float32[1024]=random``
  123, 1.5                a number
Example: python -m cute_emulator add.ptx --grid 4 --block 256 'float32[1000]=random' 'float32[1000]=random' out.npy 1000
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from .errors import EmulatorError
from .launch import load
from .run import run_ptx
from .timeline import draw

_NEW = re.compile(r"(\w+)\[([\d, ]*)\]=(zeros|ones|nan|random|arange)")


def _argument(text: str, rng: np.random.Generator) -> tuple[Any, str | None]:
    m = _NEW.fullmatch(text)
    if m:
        dtype, shape = np.dtype(m.group(1)), tuple(int(x) for x in m.group(2).split(",") if x.strip())
        fill = {
            "zeros": lambda: np.zeros(shape, dtype),
            "ones": lambda: np.ones(shape, dtype),
            "nan": lambda: np.full(shape, np.nan, dtype),
            "random": lambda: rng.standard_normal(shape).astype(dtype),
            "arange": lambda: np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape),
        }
        return fill[m.group(3)](), None
    source, _, target = text.partition(":")
    if source.endswith(".npy"):
        return np.load(source), target or None
    return (int(text, 0) if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text) else float(text)), None


def _extents(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in re.split(r"[x,]", text))


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m cute_emulator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("ptx", type=Path)
    p.add_argument("args", nargs="*", help="the kernel's arguments")
    p.add_argument("--kernel", help="the entry's name, if there are several")
    p.add_argument("--list", action="store_true", help="list the kernels and their parameters, and stop")
    p.add_argument("--grid", type=_extents, default=(1,), help="extents, as in 4x2")
    p.add_argument("--block", type=_extents, default=(32,))
    p.add_argument("--cluster", type=_extents, default=(1,))
    p.add_argument("--shared", type=int, default=0, help="bytes of dynamic shared memory")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--schedule", choices=("adversarial", "eager"), default="adversarial")
    p.add_argument("--no-check", action="store_true", help="without the happens-before checker")
    p.add_argument("--timeline", metavar="FILE.png", help="draw the warps' instructions over time")
    o = p.parse_intermixed_args(argv)
    try:
        text = o.ptx.read_text()
        if o.list:
            for name, entry in load(text).module.entries.items():
                print(name, "(" + ", ".join(f".{x.type} {x.name} ({x.size} bytes)" for x in entry.parameters) + ")")
            return 0
        rng = np.random.default_rng(o.seed)
        arguments = [_argument(a, rng) for a in o.args]
        report = run_ptx(
            text,
            o.grid,
            o.block,
            [a for a, _ in arguments],
            kernel=o.kernel,
            cluster=o.cluster,
            shared=o.shared,
            seed=o.seed,
            schedule=o.schedule,
            check=not o.no_check,
            profile=True,
            raise_on_hazard=False,
        )
    except (EmulatorError, OSError, ValueError) as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 2
    print(report)
    print(report.timeline())
    for array, target in arguments:
        if target:
            np.save(target, array)
    if o.timeline:
        draw(report, o.timeline)
    return 1 if report.hazards else 0


if __name__ == "__main__":
    sys.exit(main())
