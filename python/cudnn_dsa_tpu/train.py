"""A training example: one block of a video diffusion transformer whose sequence is sharded over a ring of devices.

The block is that of Wan (arXiv:2503.20314), scaled down: tokens of a video on a (frame, row, column) grid, rotary
embeddings over the three axes, RMS-normalised queries and keys, the diffusion time modulating shift, scale and gate of
each branch, cross-attention to a text context, a GELU feed-forward. It learns by flow matching: given
x_t = (1 - t) x + t noise, predict noise - x. Everything but self-attention is local to a device's tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cudnn_dsa_tpu.ring import ring_attention

Params = dict[str, jax.Array]
Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes: the video's token grid, channels of a token, width and heads of the block, text tokens."""

    grid: tuple[int, int, int] = (4, 8, 8)
    channels: int = 16
    width: int = 128
    heads: int = 2
    text_len: int = 8
    text_width: int = 32

    @property
    def tokens(self) -> int:
        return int(np.prod(self.grid))

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


def init(config: Config, seed: int = 0) -> Params:
    """fp32 parameters; the output projection and the modulation start at zero, so the block starts as the identity."""
    c, w, t = config.channels, config.width, config.text_width
    shapes = {
        "embed": (c, w), "time_1": (w, w), "modulation": (w, 6 * w), "qkv": (w, 3 * w), "attn_out": (w, w),
        "cross_q": (w, w), "cross_kv": (t, 2 * w), "cross_out": (w, w), "up": (w, 4 * w), "down": (4 * w, w),
        "out": (w, c),
    }  # fmt: skip
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    zero = ("out", "modulation")
    return {
        name: jnp.zeros(shape) if name in zero else jax.random.normal(key, shape) * shape[0] ** -0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def rms_norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def rope_angles(config: Config) -> jax.Array:
    """[tokens, head_dim / 2]: a third of the frequencies (rounded) for frame, row and column each."""
    half = config.head_dim // 2
    parts = np.array_split(np.arange(half), 3)
    positions = np.stack(np.meshgrid(*(np.arange(n) for n in config.grid), indexing="ij"), -1).reshape(-1, 3)
    frequencies = [100.0 ** -(np.arange(len(part)) / len(part)) for part in parts]
    return jnp.asarray(np.concatenate([np.outer(positions[:, a], f) for a, f in enumerate(frequencies)], axis=1))


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotary embedding of x [S, H, D] by angles [S, D / 2]."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """softmax(q k^T / sqrt(D)) v of [H, S, D], with the whole score matrix."""
    scores = jnp.einsum("hsd,htd->hst", q, k, precision="highest") * q.shape[-1] ** -0.5
    return jnp.einsum("hst,htd->hsd", jax.nn.softmax(scores, axis=-1), v, precision="highest")


def time_embedding(t: jax.Array, width: int) -> jax.Array:
    angles = t * 1000 * jnp.exp(-np.log(10_000) * jnp.arange(width // 2) / (width // 2))
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)])


def velocity(params: Params, x: jax.Array, text: jax.Array, t: jax.Array, attention: Attention, config: Config):
    """The block's prediction for tokens x [S, channels], text [text_len, text_width] and time t in [0, 1]."""
    heads = (config.heads, config.head_dim)
    h = x @ params["embed"]
    time = jax.nn.silu(time_embedding(t, config.width) @ params["time_1"]) @ params["modulation"]
    shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = jnp.split(time, 6)

    y = rms_norm(h) * (1 + scale_1) + shift_1
    q, k, v = (part.reshape(-1, *heads) for part in jnp.split(y @ params["qkv"], 3, axis=-1))
    angles = rope_angles(config)
    q, k = rotate(rms_norm(q), angles), rotate(rms_norm(k), angles)
    y = attention(*(part.swapaxes(0, 1) for part in (q, k, v))).swapaxes(0, 1)
    h = h + (1 + gate_1) * (y.reshape(h.shape) @ params["attn_out"])

    q = (rms_norm(h) @ params["cross_q"]).reshape(-1, *heads)
    k, v = (part.reshape(-1, *heads) for part in jnp.split(text @ params["cross_kv"], 2, axis=-1))
    y = plain_attention(*(part.swapaxes(0, 1) for part in (rms_norm(q), rms_norm(k), v))).swapaxes(0, 1)
    h = h + y.reshape(h.shape) @ params["cross_out"]

    y = rms_norm(h) * (1 + scale_2) + shift_2
    h = h + (1 + gate_2) * (jax.nn.gelu(y @ params["up"]) @ params["down"])
    return rms_norm(h) @ params["out"]


def batches(config: Config, seed: int = 0) -> Iterator[tuple[jax.Array, ...]]:
    """Videos that a moving wave makes, whose speed the text tells; noise; a time."""
    rng = np.random.default_rng(seed)
    frame, row, column = np.meshgrid(*(np.arange(n) for n in config.grid), indexing="ij")
    directions = rng.standard_normal((config.channels, 2))
    read = rng.standard_normal((config.text_len, config.text_width))
    while True:
        speed = rng.uniform(-1, 1)
        phase = np.stack([a * row + b * column - 2 * speed * frame for a, b in directions], axis=-1)
        x = np.sin(phase).reshape(config.tokens, config.channels)
        noise = rng.standard_normal(x.shape)
        yield tuple(jnp.asarray(part, jnp.float32) for part in (x, read * speed, noise, rng.uniform(0.05, 0.95)))


def flow_matching_loss(params: Params, batch: tuple[jax.Array, ...], attention: Attention, config: Config):
    x, text, noise, t = batch
    predicted = velocity(params, (1 - t) * x + t * noise, text, t, attention, config)
    return jnp.mean((predicted - (noise - x)) ** 2)


def adam(params: Params, grads: Params, moments: Any, step: jax.Array, rate: float = 2e-3) -> tuple[Params, Any]:
    """One step of Adam (Kingma, Ba 2014, arXiv:1412.6980)."""
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
    second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, moments[1], grads)

    def update(p, m, s):
        return p - rate * (m / (1 - 0.9**step)) / (jnp.sqrt(s / (1 - 0.99**step)) + 1e-8)

    return jax.tree.map(update, params, first, second), (first, second)


@dataclasses.dataclass(frozen=True)
class Result:
    """Losses of the steps, and the largest relative L2 difference of a parameter's gradient to plain attention's."""

    losses: list[float]
    gradient_error: float


def train(
    devices: int = 4, steps: int = 20, config: Config | None = None, say: Callable[[str], None] = print
) -> Result:
    """Train the block with ring attention over ``devices`` devices and check the last step's gradient."""
    config = config or Config()
    mesh = Mesh(np.array(jax.devices()[:devices]), ("ring",))
    spec = P(None, "ring")
    ring = jax.shard_map(
        functools.partial(ring_attention, axis_name="ring"), mesh=mesh, in_specs=(spec,) * 3, out_specs=spec
    )
    sharded, replicated = NamedSharding(mesh, P("ring")), NamedSharding(mesh, P())
    params = jax.device_put(init(config), replicated)
    moments = (jax.tree.map(jnp.zeros_like, params),) * 2
    gradient = {
        name: jax.jit(jax.value_and_grad(functools.partial(flow_matching_loss, attention=attention, config=config)))
        for name, attention in (("ring", ring), ("plain", plain_attention))
    }
    update = jax.jit(adam)
    losses: list[float] = []
    for step, (x, text, noise, t) in zip(range(1, steps + 1), batches(config), strict=False):
        batch = (jax.device_put(x, sharded), text, jax.device_put(noise, sharded), t)
        loss, grads = gradient["ring"](params, batch)
        losses.append(float(loss))
        say(f"step {step:3d}  loss {losses[-1]:.4f}  {'#' * round(20 * losses[-1])}")
        if step == steps:
            _, expected = gradient["plain"](params, batch)
            errors = {
                name: float(jnp.linalg.norm(grads[name] - expected[name]) / (jnp.linalg.norm(expected[name]) + 1e-12))
                for name in params
            }
            worst = max(errors, key=lambda name: errors[name])
            say(f"largest relative gradient difference to plain attention: {errors[worst]:.1e} ({worst})")
            return Result(losses, errors[worst])
        params, moments = update(params, grads, moments, step)
    raise ValueError(f"steps: expected at least 1, got {steps}")
