"""The optional arrays in the one form that the kernels index: [lead, H or 1, ...].

Nothing is broadcast in memory except the last axis of per-row vectors. ``lead`` is [N] where the operand has every
batch dimension, [1] where it has none, and the batch dimensions themselves where it has some of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from cudnn_dsa_pallas_triton.contracts import OPERANDS, Problem

_SIZES = {"H": "q_heads", "T": "q_len", "t": "kv_len"}


def merge_batch(x: jax.Array, problem: Problem, tail: int) -> jax.Array:
    """Reshape the batch dimensions in front of ``tail`` dimensions to the lead form. Never copies."""
    lead = x.shape[: x.ndim - tail]
    lead = (1,) * (len(problem.batch) - len(lead)) + lead
    rest = x.shape[x.ndim - tail :]
    if lead == problem.batch:
        return x.reshape(problem.batch_size, *rest)
    if math.prod(lead) == 1:
        return x.reshape(1, *rest)
    return x.reshape(*lead, *rest)


def canonical(name: str, x: jax.Array, problem: Problem) -> jax.Array:
    """An optional operand of :data:`contracts.OPERANDS` in lead form."""
    tail = OPERANDS[name][1]
    x = x.reshape((1,) * (len(tail) - x.ndim) + x.shape) if x.ndim < len(tail) else x
    if len(tail) == 2:  # one value per query or per key
        x = jnp.broadcast_to(x, (*x.shape[:-1], getattr(problem, _SIZES[tail[-1]])))
    return merge_batch(x, problem, len(tail))


def canonical_masks(arrays: Mapping[str, Any], problem: Problem) -> dict[str, jax.Array]:
    """Every integer and boolean operand in lead form; segment ids get a head dimension of 1."""
    masks = {name: canonical(name, arrays[name], problem) for name in OPERANDS if name in problem.operands - {"bias"}}
    if "q_segment_ids" in problem.operands:
        for name, ids in zip(("q_segment_ids", "k_segment_ids"), arrays["segment_ids"], strict=True):
            masks[name] = merge_batch(ids[..., None, :], problem, 2)
    return masks


def lead_index(ref: Any, tail: int, n: Any, h: Any, problem: Problem) -> tuple[Any, ...]:
    """The scalar indices of batch ``n`` and query head ``h`` into an operand in lead form with ``tail`` more axes."""
    lead, heads = ref.shape[: -1 - tail], ref.shape[-1 - tail]
    head = (0 if heads == 1 else h,)
    if len(lead) == 1:
        return (0 if lead[0] == 1 else n, *head)
    indices = []
    stride = problem.batch_size
    for size, full in zip(lead, problem.batch, strict=True):
        stride //= full
        indices.append(0 if size == 1 else (n // stride) % full)
    return (*indices, *head)
