"""The demo's text: English prose that every Python brings, as a sequence of symbols."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

HELD_OUT = 0.1  # of the text, at its end


@dataclass(frozen=True)
class Text:
    """A text over a small alphabet.

    Attributes:
        name: where it comes from.
        symbols: the alphabet; a symbol's position is its id.
        train, held_out: ids, int64.
    """

    name: str
    symbols: str
    train: torch.Tensor
    held_out: torch.Tensor

    def decode(self, ids: list[int]) -> str:
        return "".join(self.symbols[i] for i in ids)

    def unigram_entropy(self) -> float:
        """Nats a symbol of the text where nothing before it is known: what a model without context can reach."""
        return _entropy(self._ids())

    def bigram_entropy(self) -> float:
        """Nats a symbol where the one before it is known: what a model without attention can reach."""
        ids = self._ids()
        return _entropy(list(pairwise(ids))) - _entropy(ids[:-1])

    def batch(self, part: torch.Tensor, rows: int, context: int, generator: torch.Generator) -> torch.Tensor:
        """(rows, context + 1) ids from random places of ``train`` or ``held_out``."""
        starts = torch.randint(len(part) - context, (rows, 1), generator=generator)
        return part[starts + torch.arange(context + 1)]

    def _ids(self) -> list[int]:
        return torch.cat([self.train, self.held_out]).tolist()


def load(path: Path | None = None) -> Text:
    """The help texts of Python's own language reference (``pydoc_data.topics``), or a file of the user's."""
    if path is None:
        from pydoc_data.topics import topics

        name, content = "pydoc_data.topics (Python's language reference)", "\n".join(topics[k] for k in sorted(topics))
    else:
        name, content = str(path), path.read_text(encoding="utf-8")
    symbols = "".join(sorted(set(content)))
    position = {symbol: i for i, symbol in enumerate(symbols)}
    ids = torch.tensor([position[symbol] for symbol in content])
    cut = int(len(ids) * (1 - HELD_OUT))
    return Text(name, symbols, ids[:cut], ids[cut:])


def _entropy(items: list) -> float:
    total = len(items)
    return -sum(n / total * math.log(n / total) for n in Counter(items).values())
