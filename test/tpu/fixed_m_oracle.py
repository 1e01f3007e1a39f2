"""A model of fp32 with flush-to-zero in float64, and inputs that stress it."""

from __future__ import annotations

import numpy as np

TINY = 2.0**-126
LOG2E = np.log2(np.e)
D = 64


def flush(x):
    """fp32's range: below the smallest normal number zero, above the largest infinite."""
    x = np.where(np.abs(x) < TINY, 0.0, x)
    return np.where(np.abs(x) >= 2.0**128, np.copysign(np.inf, x), x)


def fixed_m_softmax(logits, values, m):
    """(out, kept): sum_j P_j v_j / sum_j P_j of logits [S, N] in base 2 and values [N, D_v] in that arithmetic with
    exact rounding, P_j = 2^(s_j - m); kept: the share of the softmax's mass whose P_j is not flushed, [S]."""
    p = flush(2.0 ** (logits - np.asarray(m, np.float64)))
    top = logits.max(axis=-1, keepdims=True)
    exact = 2.0 ** (logits - top)
    kept = np.where(p > 0, exact, 0.0).sum(axis=-1) / exact.sum(axis=-1)
    products = flush(p[:, :, None] * values[None])
    with np.errstate(invalid="ignore", divide="ignore"):
        return flush(products.sum(axis=1)) / flush(p.sum(axis=-1))[:, None], kept


def softmax(logits, values):
    p = 2.0 ** (logits - logits.max(axis=-1, keepdims=True))
    return p @ values / p.sum(axis=-1, keepdims=True)


def random(rng, q_len, kv_len):
    """q and k of random directions whose bound lies anywhere between 0.1 and 400, around the gate most often."""
    bound = rng.choice([rng.uniform(0.1, 20), rng.uniform(20, 117), rng.uniform(100, 125), rng.uniform(125, 400)])
    q, k = rng.standard_normal((q_len, D)), rng.standard_normal((kv_len, D))
    return _with_bound(q, k, bound)


def along_one_direction(rng, q_len, kv_len):
    """Every logit is U, or every one is -U, or of both signs."""
    direction = rng.standard_normal(D)
    signs = {"+": np.ones(kv_len), "-": -np.ones(kv_len), "+-": rng.choice([-1.0, 1.0], kv_len)}
    k = signs[rng.choice(list(signs))][:, None] * direction
    return _with_bound(np.tile(direction, (q_len, 1)), k, rng.uniform(60, 118))


def offset(rng, q_len, kv_len):
    """Keys that share an offset, queries against it or along it."""
    shared = rng.standard_normal(D)
    k = rng.standard_normal((kv_len, D)) * 0.2 + shared
    q = rng.standard_normal((q_len, D)) * 0.2 + rng.choice([-1, 1]) * shared
    return _with_bound(q, k, rng.uniform(60, 120))


def sink(rng, q_len, kv_len):
    """One key that takes all the weight, with a bound far above every gate (1134.58 was seen in a video model)."""
    q, k = rng.standard_normal((q_len, D)), rng.standard_normal((kv_len, D)) * 0.05
    k[rng.integers(kv_len)] = q[0] * 3
    return _with_bound(q, k, rng.uniform(300, 1200))


def nothing(rng, q_len, kv_len):
    """Zero queries, or zero keys."""
    q, k = rng.standard_normal((q_len, D)), rng.standard_normal((kv_len, D))
    return (q * 0, k) if rng.integers(2) else (q, k * 0)


KINDS = (random, along_one_direction, offset, sink, nothing)


def _with_bound(q, k, bound):
    """q scaled so that the base-2 bound with scale 1/8 is ``bound``."""
    longest = np.linalg.norm(q, axis=-1).max() * np.linalg.norm(k, axis=-1).max()
    return q * (bound * 8 / LOG2E / longest), k


def values(rng, kv_len):
    """Standard normal, small, with an outlier at the limit of 256, constant."""
    v = rng.standard_normal((kv_len, D))
    kind = rng.integers(4)
    if kind == 1:
        v *= 1e-3
    elif kind == 2:
        v[rng.integers(kv_len), 0] = 256.0
    elif kind == 3:
        v = np.full_like(v, 0.4)
    return np.clip(v, -256, 256)


def batch(seed, heads, q_len, kv_len):
    """(q, k, v), [heads, ...]: as many inputs as heads, of all kinds."""
    rng = np.random.default_rng(seed)
    cases = [(*KINDS[h % len(KINDS)](rng, q_len, kv_len), values(rng, kv_len)) for h in range(heads)]
    return tuple(np.stack(x) for x in zip(*cases, strict=True))
