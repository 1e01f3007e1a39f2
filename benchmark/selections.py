"""Selections (topk_idxs) with dials: locality, overlap between neighbours, causality, share of invalid entries.

Real indexers select keys near the query, and neighbouring queries select much the same ones; uniformly random rows do
neither. Kernels differ in what they make of that, so a benchmark says which selection it used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Selection:
    """How the K keys of every query are drawn. Query i stands at row ``position(i)`` of kv.

    Attributes:
        window: keys come from this many rows around the query (or ending at it, if causal); None: from anywhere.
        overlap: share of its keys that a query takes over from the query before it, 0 to 1; keys that have left the
            window are not taken over.
        causal: no key lies behind the query's position. Where fewer than K keys qualify, the row ends in -1.
        invalid: share of entries, anywhere in the row, that are overwritten with -1.
    """

    window: int | None = None
    overlap: float = 0.0
    causal: bool = False
    invalid: float = 0.0

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window: expected at least 1 row, got {self.window}")
        for name in ("overlap", "invalid"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected a share from 0 to 1, got {getattr(self, name)}")

    def __str__(self) -> str:
        where = "anywhere" if self.window is None else f"within {self.window} rows"
        parts = [where, f"overlap {self.overlap:g}", "causal" if self.causal else "", f"invalid {self.invalid:g}"]
        return ", ".join(part for part in parts if part)

    def topk_idxs(self, s_q: int, s_kv: int, topk: int, device: str = "cpu", seed: int = 0) -> torch.Tensor:
        """(S_q, K), int32: the keys of a row are distinct, in no order; -1 where an entry is invalid."""
        g = torch.Generator(device).manual_seed(seed)
        rows = torch.full((s_q, topk), -1, dtype=torch.int32, device=device)
        before = rows.new_empty(0)
        for i in range(s_q):
            low, high = self.range(i, s_q, s_kv)
            keys = self._draw(before, low, high, topk, g)
            rows[i, : len(keys)] = keys
            before = keys
        if self.invalid:
            rows[torch.rand(rows.shape, generator=g, device=device) < self.invalid] = -1
        return rows

    def range(self, i: int, s_q: int, s_kv: int) -> tuple[int, int]:
        """The rows [low, high) that query i may select."""
        at = position(i, s_q, s_kv)
        low, high = 0, at + 1 if self.causal else s_kv
        if self.window is not None:
            start = at + 1 - self.window if self.causal else at - self.window // 2
            start = max(0, min(start, high - self.window))
            low, high = start, min(high, start + self.window)
        return low, high

    def _draw(self, before: torch.Tensor, low: int, high: int, topk: int, g: torch.Generator) -> torch.Tensor:
        """Keys of one row: some of those before it, the rest fresh, shuffled."""
        kept = before[(before >= low) & (before < high)]
        kept = kept[torch.randperm(len(kept), generator=g, device=g.device)[: round(self.overlap * topk)]]
        score = torch.rand(high - low, generator=g, device=g.device)
        score[(kept - low).long()] = -1  # not twice
        fresh = score.topk(min(topk - len(kept), high - low - len(kept))).indices + low
        keys = torch.cat([kept, fresh.int()])
        return keys[torch.randperm(len(keys), generator=g, device=g.device)]


def position(i: int, s_q: int, s_kv: int) -> int:
    """The row of kv at which query i stands: the last query at the last row, evenly spaced."""
    return (i + 1) * s_kv // s_q - 1 if s_q <= s_kv else i * s_kv // s_q
