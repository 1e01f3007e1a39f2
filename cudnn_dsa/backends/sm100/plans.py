"""The launches of a call, and their scratch memory.

A backward launches ``prepare`` (delta and the normaliser), in fp16 ``key_norms`` and ``gain``, ``backward``,
``sink_gradient`` where there is a sink, and ``finish`` where dkv is 16-bit. An fp32 dkv takes the sums itself. A
deterministic one goes over the queries in chunks and launches ``backward``, ``tables`` and ``fold`` for each of them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from cudnn_dsa import artifact
from cudnn_dsa.backends import BackwardTensors, ForwardTensors
from cudnn_dsa.backends.sm100.sources import config, sources
from cudnn_dsa.contracts.sparse_attention import WORKSPACE_ALIGNMENT, Problem

PARTIALS = 1 << 30  # bytes of rows of dkv that a deterministic call keeps at a time, if one query's fit
CHUNKED = ("backward", "tables", "fold")


@dataclass(frozen=True)
class Workspace:
    """The scratch memory of a call: (offset, shape, dtype) of each piece, all of four bytes an element."""

    pieces: dict[str, tuple[int, tuple[int, ...], torch.dtype]]
    total: int

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {}
        for name, (offset, shape, dtype) in self.pieces.items():
            found[name] = memory[offset : offset + 4 * math.prod(shape)].view(dtype).view(shape)
        return found


def chunk_of(problem: Problem) -> int:
    """Queries that a deterministic call handles at a time: a function of the sizes alone, as its sums depend on it."""
    p = problem
    if not p.deterministic:
        return p.s_q
    return max(1, min(p.s_q, PARTIALS // (4 * config(p).head_tiles * p.topk * p.head_dim)))


@functools.lru_cache(maxsize=256)
def workspace(problem: Problem) -> Workspace:
    p = problem
    if p.direction == "forward":
        return Workspace({}, 0)
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"z2": ((p.s_q, p.heads), torch.float32)}
    if not p.has_delta:
        wanted["delta"] = ((p.s_q, p.heads), torch.float32)
    if p.dtype == "float16":
        wanted["norms"] = ((p.s_kv,), torch.float32)
        wanted["gain"] = ((p.s_q,), torch.int32)
    if p.deterministic:
        chunk = chunk_of(p)
        wanted["partials"] = ((chunk * config(p).head_tiles, p.topk, p.head_dim), torch.float32)
        wanted["counts"] = wanted["ranks"] = ((p.s_kv, chunk), torch.int32)
    if p.dkv_dtype != "float32":
        wanted["sums"] = ((p.s_kv, p.head_dim), torch.float32)
    pieces, total = {}, 0
    for name, (shape, dtype) in wanted.items():
        pieces[name] = (total, shape, dtype)
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
    work = workspace(p).views(memory)
    sums = work.setdefault("sums", t.dkv)
    if sums is not t.dkv or not p.accumulate:
        sums.zero_()
    values: dict[str, Any] = {
        "q": t.q, "kv": t.kv, "out": t.out, "dout": t.dout, "lse": t.lse, "attn_sink": t.attn_sink,
        "topk_idxs": t.topk_idxs, "topk_length": t.topk_length, "delta": t.delta, "gain": None, "dq": t.dq,
        "dkv": t.dkv, "d_sink": t.d_sink, **work,
        "s_q": p.s_q, "s_kv": p.s_kv, "topk": p.topk, "softmax_scale": t.softmax_scale,
    }  # fmt: skip
    names = list(kernels)
    before, after = names[: names.index("backward")], [n for n in names[names.index("backward") :] if n not in CHUNKED]
    for name in before:
        kernels[name].launch(stream, values)
    step = chunk_of(p)
    for first in range(0, p.s_q, step):
        for name in ("counts", "ranks"):
            if name in work:
                work[name].zero_()
        for name in CHUNKED:
            if name in kernels:
                kernels[name].launch(stream, {**values, "first_query": first, "queries": min(step, p.s_q - first)})
    for name in after:
        kernels[name].launch(stream, values)


def forward(problem: Problem, t: ForwardTensors, stream: Any) -> None:
    p = problem
    values = {
        "q": t.q, "kv": t.kv, "attn_sink": t.attn_sink, "topk_idxs": t.topk_idxs, "topk_length": t.topk_length,
        "out": t.out, "lse": t.lse, "s_q": p.s_q, "s_kv": p.s_kv, "topk": p.topk, "softmax_scale": t.softmax_scale,
    }  # fmt: skip
    artifact.load(sources, p)["forward"].launch(stream, values)
