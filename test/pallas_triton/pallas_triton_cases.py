"""Cases for the tests: features by name, how to draw their operands, how to run the package and compare it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from pallas_triton_oracle import oracle

from cudnn_dsa_pallas_triton import Config, KernelConfig, attention

# Small, unequal tiles that do not divide the default lengths below.
SMALL = Config(
    forward=KernelConfig(16, 32), dq=KernelConfig(32, 16), dkv=KernelConfig(16, 16), dbias=KernelConfig(16, 32)
)
DIFFERENTIABLE = ("q", "k", "v", "bias", "attn_sink")
# Absolute tolerance relative to the largest value of the expected array.
TOLERANCE = {"float32": 4e-6, "bfloat16": 2e-2, "float16": 3e-3}


@dataclasses.dataclass(frozen=True)
class Sizes:
    batch: tuple[int, ...] = (2,)
    q_len: int = 41
    kv_len: int = 50
    q_heads: int = 2
    kv_heads: int = 1
    head_dim: int = 24
    v_head_dim: int = 16

    @property
    def full(self):
        return (*self.batch, self.q_heads, self.q_len, self.kv_len)


def normal(rng, *shape, scale=1.0, dtype="float32"):
    return np.array(jnp.asarray(rng.standard_normal(shape) * scale, dtype))  # a copy, for tests that write to it


def inputs(rng, sizes, dtype="float32", scale=1.0):
    """q, k, v and the cotangents dout and dl."""
    s = sizes
    return {
        "q": normal(rng, *s.batch, s.q_len, s.q_heads, s.head_dim, dtype=dtype, scale=scale),
        "k": normal(rng, *s.batch, s.kv_len, s.kv_heads, s.head_dim, dtype=dtype, scale=scale),
        "v": normal(rng, *s.batch, s.kv_len, s.kv_heads, s.v_head_dim, dtype=dtype),
        "dout": normal(rng, *s.batch, s.q_len, s.q_heads, s.v_head_dim, dtype=dtype),
        "dl": normal(rng, *s.batch, s.q_heads, s.q_len),
    }


def _broadcast_shape(rng, full):
    """A shape that broadcasts to ``full``: some axes of size 1, sometimes a lower rank."""
    shape = [n if rng.random() < 0.6 else 1 for n in full]
    return tuple(shape[rng.integers(0, len(full) - 1) if rng.random() < 0.4 else 0 :])


def _ints(rng, low, high, shape):
    return rng.integers(low, high, shape).astype(np.int32)


def _segments(rng, s):
    packed = rng.random() < 0.5
    ids = [_ints(rng, 0, 3, (*s.batch, n)) for n in (s.q_len, s.kv_len)]
    return tuple(np.sort(x) if packed else x for x in ids)


def _per_row(rng, s, length, low, high):
    shape = _broadcast_shape(rng, (*s.batch, s.q_heads, length))
    return _ints(rng, low, high, shape)


# name -> draw(rng, sizes): the keyword arguments of the feature.
FEATURES = {
    "bias": lambda r, s: {"bias": normal(r, *_broadcast_shape(r, s.full))},
    "mask": lambda r, s: {"mask": r.random(_broadcast_shape(r, s.full)) < 0.7},
    "is_causal": lambda r, s: {"is_causal": True},
    "logits_soft_cap": lambda r, s: {"logits_soft_cap": float(r.choice([1.0, 3.0, 10.0]))},
    "logits_scale": lambda r, s: {"logits_scale": float(r.choice([-0.4, 0.0, 0.7]))},
    "dropout": lambda r, s: {"dropout_mask": r.random(_broadcast_shape(r, s.full)) < 0.6, "dropout_rate": 0.4},
    "segment_ids": lambda r, s: {"segment_ids": _segments(r, s)},
    "k_start": lambda r, s: {"k_start": _per_row(r, s, s.q_len, -3, s.kv_len)},
    "k_end": lambda r, s: {"k_end": _per_row(r, s, s.q_len, 0, s.kv_len + 9)},
    "q_start": lambda r, s: {"q_start": _per_row(r, s, s.kv_len, -3, s.q_len)},
    "q_end": lambda r, s: {"q_end": _per_row(r, s, s.kv_len, 0, s.q_len + 9)},
    "q_indices": lambda r, s: {"q_indices": _per_row(r, s, s.q_len, 0, s.kv_len), "is_causal": True},
    "k_indices": lambda r, s: {"k_indices": _per_row(r, s, s.kv_len, 0, s.q_len), "is_causal": True},
    "local_window_size": lambda r, s: {"local_window_size": (int(r.integers(0, 20)), int(r.integers(0, 20)))},
    "attn_sink": lambda r, s: {"attn_sink": normal(r, s.q_heads)},
    "logits_dtype": lambda r, s: {"logits_dtype": "bfloat16"},
    "normalize_output": lambda r, s: {"normalize_output": False},
}


def draw(rng, names, sizes):
    """The keyword arguments of several features together."""
    kwargs = {}
    for name in names:
        kwargs |= FEATURES[name](rng, sizes)
    return kwargs


def run(arrays, kwargs, config=SMALL, **more):
    """out, m, l and the gradients by name, from one forward and one backward of the package."""
    floats = {n: jnp.asarray(x) for n, x in (arrays | kwargs).items() if n in DIFFERENTIABLE}
    # Arrays are arguments, so that tests with equal shapes share what was compiled; the rest is static.
    others = {n: x for n, x in kwargs.items() if n not in DIFFERENTIABLE and not np.isscalar(x)}
    window = others.pop("local_window_size", None)
    static = {n: x for n, x in kwargs.items() if np.isscalar(x)} | more
    if window is not None:
        static["local_window_size"] = window

    @jax.jit
    def both(floats, others, dout, dl):
        def f(floats):
            out, (m, l) = attention(**floats, **others, **static, config=config, return_residuals=True)
            return (out, l), (out, m, l)

        _, vjp, (out, m, l) = jax.vjp(f, floats, has_aux=True)
        return {"out": out, "m": m, "l": l}, vjp((dout, dl))[0]

    got, grads = both(floats, others, jnp.asarray(arrays["dout"]), jnp.asarray(arrays["dl"]))
    names = {n: "d" + n.replace("attn_", "") for n in floats}
    return {n: np.asarray(x) for n, x in got.items()} | {names[n]: np.asarray(x) for n, x in grads.items()}


def expect(arrays, kwargs):
    given = {n: x for n, x in arrays.items() if n in ("q", "k", "v", "dout", "dl")}
    return oracle(**given, **kwargs)


def assert_close(got, want, tolerance, names=None):
    """Every array within ``tolerance`` times its largest finite magnitude (at least 1); infinities must match."""
    for name in names or got:
        g, w = got[name].astype(np.float64), want[name]
        assert g.shape == w.shape, name
        infinite = np.isinf(w)
        np.testing.assert_array_equal(g[infinite], w[infinite], err_msg=name)
        if infinite.all():
            continue
        size = max(1.0, np.abs(w[~infinite]).max())
        error = np.abs(g[~infinite] - w[~infinite]).max()
        assert error <= tolerance * size, f"{name}: error {error:.3g}, largest value {size:.3g}"  # NaN fails


def check(rng, names, sizes=None, dtype="float32", config=SMALL, scale=1.0, tolerance=None, **more):
    """Draw, run, compare with the oracle."""
    sizes = sizes or Sizes()
    arrays, kwargs = inputs(rng, sizes, dtype, scale), draw(rng, names, sizes) | more
    got = run(arrays, kwargs, config)
    assert_close(got, expect(arrays, kwargs), tolerance or TOLERANCE[dtype])
    return got
