"""The operator in float64 NumPy, dense and slow, with its gradients written out.

Nothing is shared with the package. Products with masked pairs are never summed, so that inf and NaN behind a mask
cannot reach a result. ``test_oracle.py`` compares the gradients with finite differences.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

_ROUND = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def _wide(x, shape):
    """``x`` in float64 (or its own kind for masks), broadcast to ``shape``."""
    x = np.asarray(x)
    if x.dtype.kind not in "biu":
        x = x.astype(np.float64)
    return np.broadcast_to(x, shape)


def _unbroadcast(x, shape):
    """Sum over the axes that an operand of ``shape`` was broadcast over."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    axes = tuple(a for a, size in enumerate(shape) if size == 1 and x.shape[a] != 1)
    return x.sum(axis=axes, keepdims=True)


def allowed_pairs(
    batch, heads, q_len, kv_len, *, mask=None, is_causal=False, segment_ids=None, k_start=None, k_end=None,
    q_start=None, q_end=None, q_indices=None, k_indices=None, local_window_size=None, **_,
):  # fmt: skip
    """bool [*B, H, T, t]: the AND of all masks."""
    full, per_q, per_k = (*batch, heads, q_len, kv_len), (*batch, heads, q_len), (*batch, heads, kv_len)
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)[None, :]
    allowed = np.ones(full, bool)
    if mask is not None:
        allowed &= _wide(mask, full)
    at_q = _wide(i[:, 0] if q_indices is None else q_indices, per_q)[..., :, None]
    at_k = _wide(j[0] if k_indices is None else k_indices, per_k)[..., None, :]
    if is_causal:
        allowed &= at_q >= at_k
    if local_window_size is not None:
        left, right = local_window_size
        allowed &= (at_q - at_k <= left) & (at_k - at_q <= right)
    if k_start is not None:
        allowed &= j >= _wide(k_start, per_q)[..., None]
    if k_end is not None:
        allowed &= j < _wide(k_end, per_q)[..., None]
    if q_start is not None:
        allowed &= i >= _wide(q_start, per_k)[..., None, :]
    if q_end is not None:
        allowed &= i < _wide(q_end, per_k)[..., None, :]
    if segment_ids is not None:
        a, b = (np.asarray(x) for x in segment_ids)
        allowed &= a[..., None, :, None] == b[..., None, None, :]
    return allowed


def oracle(
    q, k, v, *, dout=None, dl=None, bias=None, logits_soft_cap=None, logits_scale=None, dropout_mask=None,
    dropout_rate=0.0, attn_sink=None, logits_dtype=None, normalize_output=True, **masks,
):  # fmt: skip
    """dict of out, m, l and, where ``dout`` is given, dq, dk, dv, dbias, dsink; all float64.

    ``dl`` is the cotangent of l (0 if None); m is a stop-gradient.
    """
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    *batch, q_len, heads, dim = q.shape
    kv_len, kv_heads = k.shape[-3:-1]
    group = heads // kv_heads
    scale = dim**-0.5 if logits_scale is None else logits_scale
    full = (*batch, heads, q_len, kv_len)
    allowed = allowed_pairs(tuple(batch), heads, q_len, kv_len, **masks)
    if bias is not None and logits_soft_cap is None:
        allowed &= _wide(bias, full) != -np.inf  # it masks

    # [*B, H, length, dim]
    qh = np.swapaxes(q, -2, -3)
    kh = np.repeat(np.swapaxes(k, -2, -3), group, axis=-3)
    vh = np.repeat(np.swapaxes(v, -2, -3), group, axis=-3)
    with np.errstate(invalid="ignore", over="ignore"):
        u = scale * (qh @ np.swapaxes(kh, -1, -2))
        u = np.where(allowed, u, 0.0)
        if logits_dtype is not None:
            u = u.astype(np.float32).astype(_ROUND[logits_dtype]).astype(np.float64)
        if bias is not None:
            u = u + np.where(allowed, _wide(bias, full), 0.0)
        dcap = 1.0
        if logits_soft_cap is not None:
            t = np.tanh(u / logits_soft_cap)
            u, dcap = logits_soft_cap * t, 1.0 - t * t
        s = np.where(allowed, u, -np.inf)
        m = s.max(axis=-1)
        if attn_sink is not None:
            sink = np.asarray(attn_sink).astype(np.float64)[:, None]
            m = np.maximum(m, sink)
        shift = np.where(m == -np.inf, 0.0, m)
        e = np.exp(s - shift[..., None])
        l = e.sum(axis=-1)
        if attn_sink is not None:
            l = l + np.exp(sink - shift)
        norm = np.where(l == 0.0, 1.0, l) if normalize_output else np.ones_like(l)
        p = e / norm[..., None]
        g = 1.0
        if dropout_mask is not None:
            g = np.where(_wide(dropout_mask, full), 1.0 / (1.0 - dropout_rate), 0.0)
        weight = p * g
        live = e > 0.0
        out = np.where(live[..., None], weight[..., None] * vh[..., None, :, :], 0.0).sum(axis=-2)
    result = {"out": np.swapaxes(out, -2, -3), "m": m, "l": l}
    if dout is None:
        return result

    do = np.swapaxes(np.asarray(dout).astype(np.float64), -2, -3)
    dl = np.zeros_like(l) if dl is None else np.asarray(dl).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        dp = np.where(live, g * (do @ np.swapaxes(vh, -1, -2)), 0.0)
        if normalize_output:
            delta = (p * dp).sum(axis=-1) - dl * l
        else:
            delta = -dl
        ds = np.where(live, p * (dp - delta[..., None]) * dcap, 0.0)
        dq = scale * np.where(live[..., None], ds[..., None] * kh[..., None, :, :], 0.0).sum(axis=-2)
        dk = scale * np.where(live[..., None], ds[..., None] * qh[..., :, None, :], 0.0).sum(axis=-3)
        dv = np.where(live[..., None], weight[..., None] * do[..., :, None, :], 0.0).sum(axis=-3)

    def to_kv_heads(x):
        x = x.reshape(*batch, kv_heads, group, kv_len, x.shape[-1]).sum(axis=-3)
        return np.swapaxes(x, -2, -3)

    result |= {"dq": np.swapaxes(dq, -2, -3), "dk": to_kv_heads(dk), "dv": to_kv_heads(dv)}
    if bias is not None:
        result["dbias"] = _unbroadcast(ds, np.shape(bias))
    if attn_sink is not None:
        p_sink = np.exp(sink - shift) / norm
        result["dsink"] = _unbroadcast((-p_sink * delta).sum(axis=-1, keepdims=True), (heads, 1))[:, 0]
    return result
