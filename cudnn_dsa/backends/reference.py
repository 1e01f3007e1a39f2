"""The operator's formulas in plain PyTorch, written for reading; any device, dtype and size.

Notation of docs/contract.md: s = scale * q.k over the selected keys, Z = logaddexp(lse, sink), p = exp(s - Z),
out = p @ v. Backward: delta = sum(out * dout), dp = dout.v, ds = p * (dp - delta) * scale, dq = ds @ k,
dkv = ds^T @ q + [p^T @ dout in the first D_v columns], d_sink = -sum(exp(sink - Z) * delta).

Arithmetic is float64 for float32 and float64 inputs and float32 for the 16-bit ones. Queries go in chunks, so that the
gathered keys of one chunk are all that is ever materialised.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from cudnn_dsa.backends import BackwardTensors, ForwardTensors
from cudnn_dsa.contracts.sparse_attention import Problem

CHUNK_ELEMENTS = 1 << 22  # elements of the gathered keys and scores of one chunk
LOG2_E = 1.4426950408889634


def unavailable(device: str) -> str | None:
    return None


def supports(problem: Problem) -> str | None:
    return None if problem.q_cluster_mode == "off" else "queries are not clustered here"


def workspace_bytes(problem: Problem) -> int:
    return 0


def prepare(problem: Problem) -> None:
    pass


def fingerprint(problem: Problem) -> str | None:
    return None


def forward(problem: Problem, tensors: ForwardTensors, workspace: Any, stream: Any) -> None:
    """Write ``out`` and ``lse`` (natural log, without the sink; -inf for a row without a valid key)."""
    t = tensors
    sink = effective_sink(t.attn_sink)
    for rows in _chunks(problem):
        selected = gather(t, rows, _work_dtype(t.q.dtype))
        lse = torch.logsumexp(selected.scores, dim=-1)
        p = probabilities(selected, log_normaliser(lse, sink))
        t.out[rows] = torch.einsum("ihk,ikd->ihd", p, selected.k[..., : problem.head_dim_v]).to(t.out.dtype)
        t.lse[rows] = lse.to(t.lse.dtype)


def backward(problem: Problem, tensors: BackwardTensors, workspace: Any, stream: Any) -> None:
    """Write ``dq``, ``dkv`` (or add into it) and ``d_sink``."""
    t, d_v = tensors, problem.head_dim_v
    work = _work_dtype(t.q.dtype)
    sink = effective_sink(t.attn_sink)
    dkv = torch.zeros(t.kv.shape, dtype=work, device=t.kv.device)
    d_sink = torch.zeros(t.q.shape[1], dtype=torch.float64, device=t.q.device)
    for rows in _chunks(problem):
        selected = gather(t, rows, work)
        k, valid = selected.k, selected.valid
        q, dout = t.q[rows].to(work), t.dout[rows].to(work)
        has_key = valid.any(dim=-1)[:, None]  # (rows, 1), beside heads
        z = log_normaliser(t.lse[rows].to(work), sink)
        delta = (t.out[rows].to(work) * dout).sum(-1) if t.delta is None else t.delta[rows].to(work)

        p = probabilities(selected, z)
        dp = torch.einsum("ihd,ikd->ihk", dout, k[..., :d_v])
        # Where p is 0 nothing may pass: dout or delta of an empty row can be anything, and dp can overflow.
        ds = torch.where(p != 0, p * (dp - delta[..., None]) * t.softmax_scale, 0)
        t.dq[rows] = torch.einsum("ihk,ikd->ihd", ds, k).to(t.dq.dtype)

        q, dout = torch.where(has_key[..., None], q, 0), torch.where(has_key[..., None], dout, 0)
        dk = torch.einsum("ihk,ihd->ikd", ds, q)
        dk[..., :d_v] += torch.einsum("ihk,ihd->ikd", p, dout)
        _add_rows(dkv, t.topk_idxs[rows], valid, dk)

        if sink is not None:
            share = torch.exp(torch.where(torch.isfinite(z) & has_key, sink.to(work) - z, -torch.inf))
            d_sink -= torch.where(share > 0, share * delta, 0).sum(0)
    if problem.accumulate:
        t.dkv.add_(dkv.to(t.dkv.dtype))
    else:
        t.dkv.copy_(dkv)
    if t.d_sink is not None:
        t.d_sink.copy_(d_sink)


def effective_sink(attn_sink: torch.Tensor | None) -> torch.Tensor | None:
    """The sink as the kernels see it: infinite where its product with log2(e) overflows its dtype."""
    if attn_sink is None:
        return None
    base2 = attn_sink * LOG2_E
    return torch.where(torch.isinf(base2), base2, attn_sink)


def log_normaliser(lse: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """Z = logaddexp(lse, sink), (..., H). -inf where neither contributes; never NaN for infinite arguments."""
    if sink is None:
        return lse
    sink = sink.to(lse.dtype).expand_as(lse)
    high, low = torch.maximum(lse, sink), torch.minimum(lse, sink)
    # inf - inf would be NaN: where the larger is infinite it is the answer.
    gap = torch.where(torch.isinf(high), -torch.inf, low - high)
    return high + torch.log1p(torch.exp(gap))


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def _chunks(problem: Problem) -> Iterator[slice]:
    per_query = problem.topk * (problem.head_dim + 3 * problem.heads)
    step = max(1, CHUNK_ELEMENTS // per_query)
    for start in range(0, problem.s_q, step):
        yield slice(start, min(start + step, problem.s_q))


class Selected(NamedTuple):
    """What some queries select: keys (rows, K, D), zero where an entry does not count; which entries count (rows, K);
    scores (rows, H, K), -inf where one does not."""

    k: torch.Tensor
    valid: torch.Tensor
    scores: torch.Tensor


def gather(t: ForwardTensors | BackwardTensors, rows: slice | torch.Tensor, dtype: torch.dtype) -> Selected:
    """The selection of the queries ``rows``, computed in ``dtype``."""
    idxs = t.topk_idxs[rows]
    valid = (idxs >= 0) & (idxs < t.kv.shape[0])
    if t.topk_length is not None:
        valid &= torch.arange(idxs.shape[1], device=idxs.device) < t.topk_length[rows, None]
    k = t.kv[torch.where(valid, idxs, 0).long()].to(dtype)
    # Row 0 stands in for what does not count and may hold NaN or inf; 0 * inf would be NaN.
    k = torch.where(valid[..., None], k, 0)
    scores = torch.einsum("ihd,ikd->ihk", t.q[rows].to(dtype), k) * t.softmax_scale
    return Selected(k, valid, torch.where(valid[:, None], scores, -torch.inf))


def probabilities(selected: Selected, z: torch.Tensor) -> torch.Tensor:
    """exp(s - Z), (rows, H, K)."""
    # Z is infinite for a row without a key and under a sink of +inf: p is 0 there, not exp(-inf + inf).
    usable = selected.valid[:, None] & ~torch.isinf(z)[..., None]
    return torch.exp(torch.where(usable, selected.scores - z[..., None], -torch.inf))


def _add_rows(dkv: torch.Tensor, idxs: torch.Tensor, valid: torch.Tensor, dk: torch.Tensor) -> None:
    """Add each entry's row to dkv, in an order that does not vary from run to run."""
    target = torch.where(valid, idxs, 0).long().flatten()
    rows = torch.where(valid[..., None], dk, 0).flatten(0, 1)
    if dkv.is_cuda:  # sorts by target first; index_add_ would use atomics
        dkv.index_put_((target,), rows, accumulate=True)
    else:  # walks the rows in order; index_put_ would use atomics
        dkv.index_add_(0, target, rows)
