"""Float64 oracles of the operator, dense over (query, key): independent of every gathering implementation.

A selection becomes a matrix of multiplicities C (S_q, S_kv): how often key j counts in row i. Then everything is dense
linear algebra, with C weighting the softmax. Two oracles follow from docs/contract.md:

- ``kernel_backward``: explicit formulas from the tensors as given (out, lse, delta included);
- ``end_to_end``: autograd through the dense formulation, from q, kv and sink alone.
"""

from __future__ import annotations

import math

import torch

F64 = torch.float64


def multiplicity(topk_idxs: torch.Tensor, topk_length: torch.Tensor | None, s_kv: int) -> torch.Tensor:
    """(S_q, S_kv), float64: counted in plain Python."""
    counts = torch.zeros(topk_idxs.shape[0], s_kv, dtype=F64)
    lengths = [topk_idxs.shape[1]] * topk_idxs.shape[0] if topk_length is None else topk_length.tolist()
    for i, row in enumerate(topk_idxs.tolist()):
        for j in row[: max(0, lengths[i])]:
            if 0 <= j < s_kv:
                counts[i, j] += 1
    return counts


def sink_as_used(sink: torch.Tensor) -> torch.Tensor:
    """Float64, infinite where sink * log2(e) overflows the sink's dtype."""
    limit = torch.finfo(sink.dtype).max / math.log2(math.e)
    sink = sink.to(F64)
    sign = torch.sign(sink)
    return torch.where(sink.abs() > limit, sign * torch.inf, sink)


def log_normaliser(lse: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    if sink is None:
        return lse
    sink = sink_as_used(sink).expand_as(lse)
    both_absent = torch.isneginf(sink) & torch.isneginf(lse)
    return torch.where(both_absent, -torch.inf, torch.logaddexp(lse, torch.where(both_absent, 0, sink)))


def _weights(s: torch.Tensor, z: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """C * exp(s - Z) as (S_q, H, S_kv); exactly 0 for keys that do not count and under an infinite Z."""
    usable = (counts > 0)[:, None] & torch.isfinite(z)[..., None]
    return counts[:, None] * torch.exp(torch.where(usable, s - z[..., None], -torch.inf))


def _finite_keys(kv: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Rows that no query selects may hold anything; they take no part."""
    return torch.where((counts > 0).any(0)[:, None], kv.to(F64), 0)


def forward(q, kv, topk_idxs, attn_sink, topk_length, scale, d_v):
    """(out, lse) in float64."""
    counts = multiplicity(topk_idxs, topk_length, kv.shape[0])
    kv = _finite_keys(kv, counts)
    s = scale * torch.einsum("ihd,jd->ihj", q.to(F64), kv)
    lse = torch.logsumexp(torch.where((counts > 0)[:, None], s + counts.log()[:, None], -torch.inf), -1)
    return _weights(s, log_normaliser(lse, attn_sink), counts) @ kv[:, :d_v], lse


def kernel_backward(q, kv, out, dout, lse, attn_sink, topk_idxs, topk_length, delta, scale, operand_dtype=F64):
    """(dq, dkv, d_sink or None) in float64, from the tensors as given.

    A last entry holds, by name, the same gradients with every product and sum of absolute values: what an error that
    is relative to the terms, not to their cancelled sum, is compared with.

    ``operand_dtype`` is a format that p and ds are rounded to before they are multiplied, as matrix instructions want.
    """
    d_v = out.shape[-1]
    counts = multiplicity(topk_idxs, topk_length, kv.shape[0])
    row_counts = (counts.sum(1) > 0)[:, None]
    q, kv, out, dout, lse = q.to(F64), _finite_keys(kv, counts), out.to(F64), dout.to(F64), lse.to(F64)
    # Nothing of a row without a key counts, whatever its lse, dout and delta hold.
    lse = torch.where(row_counts, lse, -torch.inf)
    dout, q = torch.where(row_counts[..., None], dout, 0), torch.where(row_counts[..., None], q, 0)
    delta = (out * dout).sum(-1) if delta is None else delta.to(F64)
    delta = torch.where(row_counts, delta, 0)
    s = scale * torch.einsum("ihd,jd->ihj", q, kv)
    z = log_normaliser(lse, attn_sink)
    p = _weights(s, z, counts)
    dp = torch.einsum("ihd,jd->ihj", dout, kv[:, :d_v])
    ds = p * (dp - delta[..., None]) * scale
    p_operand, ds_operand = (_rounded(x, counts[:, None], operand_dtype) for x in (p, ds))
    dkv = torch.einsum("ihj,ihd->jd", ds_operand, q)
    dkv[:, :d_v] += torch.einsum("ihj,ihd->jd", p_operand, dout)
    d_sink = None
    if attn_sink is not None:
        share = torch.exp(torch.where(torch.isfinite(z), sink_as_used(attn_sink) - z, -torch.inf))
        d_sink = -(share * delta).sum(0)

    dp_abs = torch.einsum("ihd,jd->ihj", dout.abs(), kv[:, :d_v].abs())
    ds_abs = p * (dp_abs + (out * dout).abs().sum(-1)[..., None]) * abs(scale)
    dkv_abs = torch.einsum("ihj,ihd->jd", ds_abs, q.abs())
    dkv_abs[:, :d_v] += torch.einsum("ihj,ihd->jd", p, dout.abs())
    terms = {"dq": ds_abs @ kv.abs(), "dkv": dkv_abs}
    return ds_operand @ kv, dkv, d_sink, terms


def _rounded(x: torch.Tensor, counts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x rounded once to ``dtype``, each of its ``counts`` equal parts by itself, well inside of the format's range."""
    if dtype == F64 or not x.any():
        return x
    part = x / counts.clamp(min=1)
    gain = 2.0 ** (13 - math.floor(math.log2(part.abs().max())))
    return (part * gain).to(dtype).to(F64) / gain * counts


def end_to_end(q, kv, topk_idxs, attn_sink, topk_length, scale, d_v, dout, dlse=None):
    """Gradients (dq, dkv, d_sink or None) by autograd of a dense masked softmax in float64."""
    counts = multiplicity(topk_idxs, topk_length, kv.shape[0])
    leaves = [q.to(F64), _finite_keys(kv, counts)] + ([] if attn_sink is None else [sink_as_used(attn_sink)])
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    q, kv = leaves[:2]
    logits = scale * torch.einsum("ihd,jd->ihj", q, kv) + counts.log()[:, None]
    has_key = (counts.sum(1) > 0)[:, None].expand(q.shape[:2])
    # Rows without a key get one dummy logit, so that autograd never sees an empty softmax; their out is dropped below.
    logits = torch.where((counts > 0)[:, None], logits, -torch.inf)
    logits = torch.where(has_key[..., None], logits, 0)
    if attn_sink is None:
        p = torch.softmax(logits, -1)
    else:
        # A sink of +inf takes all of the mass, as 1e300 does, but softmax would give NaN.
        column = leaves[2].clamp(max=1e300)[None, :, None].expand(q.shape[0], -1, 1)
        p = torch.softmax(torch.cat([logits, column], -1), -1)[..., :-1]
    out = torch.where(has_key[..., None], p @ kv[:, :d_v], 0)
    loss = (out * dout.to(F64)).sum()
    if dlse is not None:
        loss = loss + (torch.where(has_key, torch.logsumexp(logits, -1), 0) * dlse.to(F64)).sum()
    grads = torch.autograd.grad(loss, leaves)
    return (*grads, None)[:3]  # d_sink of an infinite sink is 0


def relative_error(got: torch.Tensor, want: torch.Tensor, terms: torch.Tensor | None = None) -> float:
    """L2 error relative to ``want``, or to ``terms`` where the sum cancels. A reference of 0 asks for exactly 0.

    Half of the smallest subnormal of the result's format is no error: it cannot hold less (6e-8 in fp16).
    """
    step = torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps
    got, want = got.detach().to("cpu", F64), want.detach().to("cpu", F64)
    assert got.shape == want.shape, (got.shape, want.shape)
    if not torch.isfinite(got).all():
        return math.inf
    error = ((got - want).abs() - step / 2).clamp(min=0).norm().item()
    norm = (want if terms is None else terms).norm().item()
    if norm == 0:
        return 0.0 if torch.equal(got, want) else math.inf
    return error / norm
