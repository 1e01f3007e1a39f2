"""The demo's last word: one attention call's results against a dense float64 formulation of it.

It shares no code with the package: nothing is gathered, every key takes part in a full (S_q, S_kv) softmax with the
number of times it was selected as its weight, and autograd differentiates that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import cudnn_dsa

# Largest relative L2 error, end to end from q, kv and the sink (docs/contract.md).
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-3}


@dataclass(frozen=True)
class Call:
    """One attention call: the operator's arguments, and a gradient to send back."""

    q: torch.Tensor
    kv: torch.Tensor
    topk_idxs: torch.Tensor
    topk_length: torch.Tensor
    attn_sink: torch.Tensor
    dout: torch.Tensor
    scale: float
    backend: str | None

    def to(self, dtype: torch.dtype) -> Call:
        """The same call with q, kv and dout rounded to another dtype."""
        return Call(
            self.q.to(dtype), self.kv.to(dtype), self.topk_idxs, self.topk_length, self.attn_sink,
            self.dout.to(dtype), self.scale, self.backend,
        )  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """The relative L2 error of one tensor, and the bound it must keep. A NaN does not keep it."""

    dtype: str
    tensor: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


def check(call: Call) -> list[Verdict]:
    """Compare out, dq, dkv and d_sink of one call with the dense formulation of its tensors as given."""
    found = _differentiate(call.q, call.kv, call.attn_sink, call.dout, lambda *leaves: _operator(call, *leaves))
    counts = multiplicity(call.topk_idxs, call.topk_length, call.kv.shape[0])
    q, kv, sink, dout = (x.double() for x in (call.q, call.kv, call.attn_sink, call.dout))
    expected = _differentiate(q, kv, sink, dout, lambda *leaves: _dense(call, counts, *leaves))
    name, bound = str(call.q.dtype).removeprefix("torch."), BOUNDS[call.q.dtype]
    return [Verdict(name, key, _relative_l2(found[key], expected[key]), bound) for key in expected]


def multiplicity(topk_idxs: torch.Tensor, topk_length: torch.Tensor, s_kv: int) -> torch.Tensor:
    """(S_q, S_kv), float64: how often a query selects a key."""
    entries = torch.arange(topk_idxs.shape[1], device=topk_idxs.device)
    counted = (topk_idxs >= 0) & (topk_idxs < s_kv) & (entries < topk_length[:, None])
    columns = torch.where(counted, topk_idxs, s_kv).long()  # what does not count goes to a column that is cut off
    counts = torch.zeros(topk_idxs.shape[0], s_kv + 1, dtype=torch.float64, device=topk_idxs.device)
    return counts.scatter_add_(1, columns, torch.ones_like(columns, dtype=torch.float64))[:, :s_kv]


def _operator(call: Call, q: torch.Tensor, kv: torch.Tensor, attn_sink: torch.Tensor) -> torch.Tensor:
    return cudnn_dsa.sparse_attention(
        q, kv, call.topk_idxs, attn_sink=attn_sink, topk_length=call.topk_length, softmax_scale=call.scale,
        head_dim_v=call.dout.shape[-1], backend=call.backend,
    )  # fmt: skip


def _dense(
    call: Call, counts: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, attn_sink: torch.Tensor
) -> torch.Tensor:
    logits = torch.einsum("ihd,jd->ihj", q, kv) * call.scale + counts.log()[:, None]
    column = attn_sink[None, :, None].expand(*logits.shape[:2], 1)
    return torch.cat([logits, column], dim=-1).softmax(-1)[..., :-1] @ kv[:, : call.dout.shape[-1]]


def _differentiate(q, kv, attn_sink, dout, attention) -> dict[str, torch.Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, kv, attn_sink)]
    out = attention(*leaves)
    gradients = torch.autograd.grad(out, leaves, dout)
    return dict(zip(("out", "dq", "dkv", "d_sink"), (out.detach(), *gradients), strict=True))


def _relative_l2(found: torch.Tensor, expected: torch.Tensor) -> float:
    return (torch.linalg.vector_norm(found.double() - expected) / torch.linalg.vector_norm(expected)).item()
