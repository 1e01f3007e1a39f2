"""Attention and its gradients in float64 NumPy, written from the definition; and what the tests share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# Largest relative L2 error against float64, by dtype of the inputs.
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-3}


class Expected(NamedTuple):
    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dsink: np.ndarray | None
    dsink_scale: float | None  # root of the sum of the squared terms of dsink, which may cancel in the sum


def attention(q, k, v, dout, *, scale=None, ids=None, sink=None, dlse=None, fp32=False) -> Expected:
    """Everything about one attention call, in float64. Shapes as in ``splash_attention``; a row without keys is zero.

    The gradients are those of sum(out * dout) + sum(lse * dlse). ``fp32``: what a flash backward in fp32 rounds
    by construction is rounded, for a measure of it: the logits of both passes, whose products are summed in two
    different orders; dP; out and rowsum(out * dout). All the rest stays exact.
    """
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    heads, kv_heads = len(q), len(k)
    group = heads // kv_heads
    keys, values = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = again = scale * (_fp32_product(q, keys) if fp32 else np.einsum("hsd,htd->hst", q, keys))
    if fp32:
        logits, again = (
            logits.astype(np.float32),
            (scale * _fp32_product(q[..., ::-1], keys[..., ::-1])).astype(np.float32),
        )
        logits, again = logits.astype(np.float64), again.astype(np.float64)
    if ids is not None:
        logits = np.where(np.asarray(ids[0])[:, None] == np.asarray(ids[1])[None, :], logits, -np.inf)
    columns = logits
    if sink is not None:
        sink = np.asarray(sink, np.float64)
        columns = np.concatenate([logits, np.broadcast_to(sink[:, None, None], (*logits.shape[:2], 1))], axis=-1)
    top = columns.max(axis=-1, keepdims=True)
    top = np.where(np.isneginf(top), 0.0, top)
    weights = np.exp(columns - top)
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    p_all = weights / np.where(total == 0, 1.0, total)
    p = p_all[..., : logits.shape[-1]]
    out = p @ values

    dp = _fp32_product(dout, values) if fp32 else np.einsum("hsd,htd->hst", dout, values)
    inner = (p * dp).sum(axis=-1, keepdims=True)  # the sink column has dP = 0
    if fp32:
        inner = np.cumsum((out * dout).astype(np.float32), axis=-1, dtype=np.float32)[..., -1:].astype(np.float64)
        p = np.exp(again - lse[..., None])
    slope = 0.0 if dlse is None else np.asarray(dlse, np.float64)[..., None]
    ds = p * (dp - inner + slope)
    dq = scale * ds @ keys
    dk = scale * np.einsum("hst,hsd->htd", ds, q)
    dv = np.einsum("hst,hsd->htd", p, dout)
    sink_terms = None if sink is None else p_all[..., -1:] * (slope - inner)

    def sum_group(x):
        return x.reshape(kv_heads, group, *x.shape[1:]).sum(axis=1)

    grads = (dq, sum_group(dk), sum_group(dv))
    if sink_terms is None:
        return Expected(out, lse, *grads, None, None)
    return Expected(out, lse, *grads, sink_terms.sum(axis=(1, 2)), float(np.linalg.norm(sink_terms)))


def _fp32_product(a, b) -> np.ndarray:
    """a b^T of [H, S, D] and [H, T, D] in fp32, terms added one after the other; as float64."""
    total = np.zeros((*a.shape[:2], b.shape[1]), np.float32)
    for d in range(a.shape[-1]):
        total += a[:, :, None, d].astype(np.float32) * b[:, None, :, d].astype(np.float32)
    return total.astype(np.float64)


def relative_error(actual, expected, floor: float = 0.0) -> float:
    """L2 norm of the difference over that of ``expected`` (or ``floor``, if larger); NaN and inf give inf."""
    actual = np.asarray(actual, np.float64)
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    if not np.isfinite(actual).all():
        return np.inf
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), floor, 1e-300))


def assert_close(actual: dict, expected: dict, dtype: str, *, floor: float = 0.0, factor: float = 1.0) -> None:
    """Every named array of ``actual`` is within the dtype's tolerance (times ``factor``) of its namesake.

    ``floor``: a norm to divide by where the expected value cancels to something smaller.
    """
    floors = {"dsink": expected.get("dsink_scale") or 0.0}
    errors = {name: relative_error(x, expected[name], max(floor, floors.get(name, 0.0))) for name, x in actual.items()}
    tolerance = TOLERANCE[dtype] * factor
    bad = {name: f"{error:.1e}" for name, error in errors.items() if not error <= tolerance}
    assert not bad, f"relative L2 errors above {tolerance:.0e}: {bad}"
