"""What the commands print: aligned tables, sizes, progress bars."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> str:
    """Columns padded to their widest cell.

    Args:
        header: one cell a column.
        rows: of as many cells.
        right: one character a column, ``>`` to align it right; columns beyond it align left.
    """
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    rule = ["-" * width for width in widths]
    aligns = right.ljust(len(widths))
    lines = []
    for row in (header, rule, *rows):
        cells = [
            cell.rjust(width) if align == ">" else cell.ljust(width)
            for cell, width, align in zip(row, widths, aligns, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def size(number: float) -> str:
    """Bytes in binary units: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError("unreachable")


class CannotRun(Exception):
    """A command cannot do what was asked for here; the message is for whoever asked, and the exit code is 2."""


def require(module: str, extra: str) -> Any:
    """An optional package, or an error that names the extra of this distribution that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        message = f"this needs {module.partition('.')[0]}: pip install 'cudnn-dsa[{extra}]'"
        raise CannotRun(message) from error


def progress(total: int, description: str) -> Any:
    """A tqdm bar on stderr, which stays on the screen when it ends."""
    return require("tqdm", "demo").tqdm(total=total, desc=description, file=sys.stderr, dynamic_ncols=True)


def figures() -> Any:
    """matplotlib's pyplot, drawing to files (no display is needed)."""
    require("matplotlib", "demo").use("Agg")
    return importlib.import_module("matplotlib.pyplot")
