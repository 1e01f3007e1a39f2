"""``CUDNN_DSA_CHECK=1``: before a backward, recompute a few rows of the forward and compare with what was given.

The mistake it exists for is an lse of another convention, which gives plausible but wrong gradients: one in base 2, or
one with the sink inside. It reads data, so it synchronises; a CUDA graph that is being captured is left alone.
"""

from __future__ import annotations

import math
import os

import torch

from cudnn_dsa.backends import BackwardTensors, reference
from cudnn_dsa.contracts.errors import ContractError

ROWS = 4
TOLERANCE = 2e-2  # absolute in lse, relative to the row's norm in out; bf16 forwards stay well below


def enabled() -> bool:
    return os.environ.get("CUDNN_DSA_CHECK", "") not in ("", "0")


def check_forward(tensors: BackwardTensors) -> None:
    """Compare ``out`` and ``lse`` with q, kv on ``ROWS`` evenly spread rows. Raises ``ContractError``."""
    q, out = tensors.q, tensors.out
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    rows = torch.linspace(0, q.shape[0] - 1, min(ROWS, q.shape[0]), device=q.device).round().long()
    selected = reference.gather(tensors, rows, torch.float64)
    want_lse = torch.logsumexp(selected.scores, -1)
    sink = reference.effective_sink(tensors.attn_sink)
    z = reference.log_normaliser(want_lse, sink)

    counts = selected.valid.any(-1)[:, None].expand_as(want_lse)  # without a key, any lse is fine
    got_lse = tensors.lse[rows].double()
    if not _close(got_lse, want_lse, counts):
        raise ContractError("lse", "the natural log over the selected keys, without the sink", *_diagnose(
            got_lse, want_lse, z if sink is not None else None, counts
        ))  # fmt: skip
    if tensors.delta is not None:  # then out is not used: it may be anything
        return
    p = reference.probabilities(selected, z)
    want = torch.einsum("ihk,ikd->ihd", p, selected.k[..., : out.shape[-1]])
    error = (out[rows].double() - want).norm(dim=-1)
    if not bool((error <= TOLERANCE * want.norm(dim=-1) + 1e-6).all()):
        worst = float((error / (want.norm(dim=-1) + 1e-6)).max())
        raise ContractError("out", "the forward's result for these q, kv and topk_idxs", f"relative error {worst:.2g}")


def _close(got: torch.Tensor, want: torch.Tensor, counts: torch.Tensor) -> bool:
    error = torch.where(counts, (got - want).abs(), 0)
    return bool((error <= TOLERANCE + 1e-3 * torch.where(counts, want, 0).abs()).all())


def _diagnose(
    got: torch.Tensor, want: torch.Tensor, with_sink: torch.Tensor | None, counts: torch.Tensor
) -> tuple[str, str]:
    """(what came, what to do): the convention that explains the lse, if one does."""
    if _close(got * math.log(2), want, counts):
        return "an lse in base 2", "convert it with cudnn_dsa.lse_from_base2"
    if with_sink is not None and _close(got, with_sink, counts):
        return "an lse with the sink inside", "convert it with cudnn_dsa.lse_without_sink"
    if with_sink is not None and _close(got * math.log(2), with_sink, counts):
        return "an lse in base 2 with the sink inside", "convert with lse_from_base2, then lse_without_sink"
    worst = float(torch.where(counts, (got - want).abs(), 0).max())
    return f"values up to {worst:.3g} away", "of another forward, another scale, or not written yet"
