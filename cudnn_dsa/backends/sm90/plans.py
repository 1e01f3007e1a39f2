"""The launches of a call, and their scratch memory.

A forward is one launch. A backward zeroes the fp32 sums of dkv, then launches ``prepare``, ``backward``,
``sink_gradient`` where there is a sink, and ``finish``, which casts the sums or adds them to an fp32 dkv.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from cudnn_dsa import artifact
from cudnn_dsa.backends import BackwardTensors, ForwardTensors
from cudnn_dsa.backends.sm90.sources import sources
from cudnn_dsa.contracts.sparse_attention import WORKSPACE_ALIGNMENT, Problem


@dataclass(frozen=True)
class Workspace:
    """The scratch memory of a backward: (offset, shape) of each fp32 piece, and the bytes of all."""

    pieces: dict[str, tuple[int, tuple[int, ...]]]
    total: int

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {}
        for name, (offset, shape) in self.pieces.items():
            found[name] = memory[offset : offset + 4 * math.prod(shape)].view(torch.float32).view(shape)
        return found


@functools.lru_cache(maxsize=256)
def backward_workspace(problem: Problem) -> Workspace:
    """z2, and delta where it is not given, (S_q, H); the sums of dkv, (S_kv, D), whatever the dtype of dkv."""
    p = problem
    wanted = {"z2": (p.s_q, p.heads), "sums": (p.s_kv, p.head_dim)}
    if not p.has_delta:
        wanted["delta"] = (p.s_q, p.heads)
    pieces: dict[str, tuple[int, tuple[int, ...]]] = {}
    total = 0
    for name, shape in wanted.items():
        pieces[name] = (total, shape)
        total += -(-4 * math.prod(shape) // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    return Workspace(pieces, total)


def prepare(problem: Problem) -> None:
    """Compile or find the kernels, and load them."""
    artifact.load(sources, problem)


def fingerprint(problem: Problem) -> str:
    return artifact.fingerprint(sources, problem)


def backward(problem: Problem, t: BackwardTensors, memory: torch.Tensor, stream: Any) -> None:
    p = problem
    kernels = artifact.load(sources, p)
    work = backward_workspace(p).views(memory)
    work["sums"].zero_()
    values = {
        "q": t.q, "kv": t.kv, "out": t.out, "dout": t.dout, "lse": t.lse, "attn_sink": t.attn_sink,
        "topk_idxs": t.topk_idxs, "topk_length": t.topk_length, "delta": t.delta, "dq": t.dq, "dkv": t.dkv,
        "d_sink": t.d_sink, **work, "s_q": p.s_q, "s_kv": p.s_kv, "topk": p.topk, "softmax_scale": t.softmax_scale,
    }  # fmt: skip
    for kernel in kernels.values():
        kernel.launch(stream, values)


def forward(problem: Problem, t: ForwardTensors, stream: Any) -> None:
    p = problem
    kernels = artifact.load(sources, p)
    values = {
        "q": t.q, "kv": t.kv, "topk_idxs": t.topk_idxs, "attn_sink": t.attn_sink, "topk_length": t.topk_length,
        "out": t.out, "lse": t.lse, "s_q": p.s_q, "s_kv": p.s_kv, "topk": p.topk, "softmax_scale": t.softmax_scale,
    }  # fmt: skip
    kernels["forward"].launch(stream, values)
