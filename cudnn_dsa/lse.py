"""Converters for the lse of other conventions. Here lse is a natural log over the selected keys, without the sink."""

from __future__ import annotations

import math

import torch


def lse_from_base2(lse: torch.Tensor) -> torch.Tensor:
    """The natural-log lse from one in base 2 (log2(sum(exp(s)))); same shape and dtype."""
    return lse * math.log(2)


def lse_without_sink(lse: torch.Tensor, attn_sink: torch.Tensor) -> torch.Tensor:
    """Take the sink out of an lse that has it inside: log(exp(lse) - exp(attn_sink)).

    Args:
        lse: (S_q, H), natural log, of the selected keys and the sink.
        attn_sink: (H,).

    Returns:
        (S_q, H), computed in fp64, in the dtype of lse; -inf where the sink holds all of the mass. Where the keys hold
        a small share f of it, the absolute error is about that of the given lse divided by f: prefer a forward that
        returns the lse of the keys.
    """
    with_sink, sink = lse.double(), attn_sink.double()
    share = torch.exp(torch.where(torch.isneginf(sink), sink, sink - with_sink).clamp(max=0))
    rest = with_sink + torch.log1p(-share)
    return torch.where(torch.isfinite(with_sink), rest, -torch.inf).to(lse.dtype)
