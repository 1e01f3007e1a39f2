"""``attention``: the public function."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from cudnn_dsa_pallas_triton.config import Config, default_config
from cudnn_dsa_pallas_triton.contracts import Options, Problem, check
from cudnn_dsa_pallas_triton.lowering import vary_alike
from cudnn_dsa_pallas_triton.operands import canonical, canonical_masks
from cudnn_dsa_pallas_triton.tuner import cached_config, remember, tune
from cudnn_dsa_pallas_triton.vjp import Plan, attention_core


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    logits_soft_cap: float | None = None,
    logits_scale: float | None = None,
    dropout_mask: jax.Array | None = None,
    dropout_rate: float = 0.0,
    segment_ids: tuple[jax.Array, jax.Array] | None = None,
    k_start: jax.Array | None = None,
    k_end: jax.Array | None = None,
    q_start: jax.Array | None = None,
    q_end: jax.Array | None = None,
    q_indices: jax.Array | None = None,
    k_indices: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    attn_sink: jax.Array | None = None,
    logits_dtype: Any = None,
    precision: Any = None,
    normalize_output: bool = True,
    return_residuals: bool = False,
    config: Config | None = None,
    interpret: bool | None = None,
) -> Any:
    """Flash attention on the Triton backend of Pallas, differentiable in q, k, v, bias and attn_sink.

    The logit of a query and a key is ``logits_scale * dot(q, k)`` in fp32, cast to ``logits_dtype``, plus ``bias``,
    then ``c * tanh(u / c)`` for a soft cap c, then masked; softmax over keys, dropout on the probabilities (not on
    their normaliser), times v. All masks are ANDed.

    A masked logit contributes exactly nothing, whatever q, k and v hold there (inf and NaN included); a row without an
    allowed key gives 0 and zero gradients. A row that attends a key whose v is not finite is NaN. A bias of -inf masks
    unless there is a soft cap, under which it becomes -c.

    Args:
        q: [*B, T, H, D], float32, bfloat16 or float16; 8 <= D <= 512. Any number of batch dimensions, none included.
        k: [*B, t, h, D], dtype of q; h divides H, and query head i uses key head ``i // (H // h)``.
        v: [*B, t, h, d], dtype of q; 8 <= d <= 512, d and D may differ.
        bias: floating, broadcasts to [*B, H, T, t] from a lower rank or from sizes of 1. Its gradient is accumulated in
            fp32 over the broadcast axes.
        mask: bool, broadcasts like ``bias``; True attends.
        is_causal: a key attends if its position is at most that of the query, both counted from 0 (top-left aligned).
        logits_soft_cap: c > 0, or None.
        logits_scale: None is ``D ** -0.5``.
        dropout_mask: bool, broadcasts like ``bias``; True keeps a probability and divides it by ``1 - dropout_rate``.
        dropout_rate: in [0, 1).
        segment_ids: (q [*B, T], kv [*B, t]) int32; equal ids attend.
        k_start, k_end: int32, broadcast to [*B, H, T]: each query attends keys ``k_start <= j < k_end``.
        q_start, q_end: int32, broadcast to [*B, H, t]: each key is attended by queries ``q_start <= i < q_end``.
        q_indices, k_indices: int32, broadcast to [*B, H, T] and [*B, H, t]: replace the positions that causality and
            the local window compare.
        local_window_size: (left, right), or one integer for both: a key attends if ``i - left <= j <= i + right``.
        attn_sink: [H], floating: a logit that joins the normaliser of every row and has no value.
        logits_dtype: float32 (None), bfloat16 or float16.
        precision: of the dots of float32 inputs: None or "highest" is IEEE; "high" and "default" are TF32.
        normalize_output: False returns ``sum_j exp(s - m) v`` and keeps the division by ``l`` for the caller.
        return_residuals: also return (m, l).
        config: tile sizes; None takes the shipped defaults.
        interpret: run in Pallas's interpret mode; None does so unless the default backend is a GPU.

    Returns:
        [*B, T, H, d] in the dtype of q; with ``return_residuals`` a pair of it and (m, l), both [*B, H, T] fp32: the
        row maximum (sink included, -inf for a row without an allowed key; no gradient flows through it) and the
        normaliser.

    Raises:
        ContractError: naming the argument.
    """
    arrays = {
        "q": q, "k": k, "v": v, "bias": bias, "mask": mask, "dropout_mask": dropout_mask, "segment_ids": segment_ids,
        "k_start": k_start, "k_end": k_end, "q_start": q_start, "q_end": q_end, "q_indices": q_indices,
        "k_indices": k_indices, "attn_sink": attn_sink,
    }  # fmt: skip
    options = Options(
        is_causal,
        logits_soft_cap,
        logits_scale,
        dropout_rate,
        local_window_size,
        logits_dtype,
        precision,
        normalize_output,
    )
    problem = check(arrays, options)
    if interpret is None:
        interpret = jax.default_backend() != "gpu"
    config = config or cached_config(problem) or default_config(problem)
    out, m, l = _run(Plan(problem, config, interpret), _given(arrays))
    return (out, (m, l)) if return_residuals else out


def autotune(q: jax.Array, k: jax.Array, v: jax.Array, *, interpret: bool | None = None, **kwargs: Any) -> Config:
    """The fastest configuration for a call of :func:`attention` with these arguments on this device.

    Measured once per device kind and kind of call, then read from the cache (see ``tuner.py``). Must be called with
    arrays, not under ``jit``.

    Args:
        kwargs: array and other arguments of :func:`attention`, apart from ``config`` and ``return_residuals``.
    """
    options = Options(**{f.name: kwargs.pop(f.name) for f in dataclasses.fields(Options) if f.name in kwargs})
    arrays = {"q": q, "k": k, "v": v, **kwargs}
    problem = check(arrays, options)
    config = cached_config(problem)
    if config is None:
        if interpret is None:
            interpret = jax.default_backend() != "gpu"
        config = tune(problem, *_kernel_form(problem, _given(arrays)), interpret=interpret)
        remember(problem, config)
    return config


def _given(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in arrays.items() if x is not None}


def _kernel_form(problem: Problem, arrays: dict[str, Any]) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """(differentiable operands, masks) as the kernels take them."""
    floats = {name: arrays[name].reshape(problem.batch_size, *arrays[name].shape[-3:]) for name in "qkv"}
    if "bias" in arrays:
        floats["bias"] = canonical("bias", arrays["bias"], problem)
    if "attn_sink" in arrays:
        floats["attn_sink"] = arrays["attn_sink"]
    return floats, canonical_masks(arrays, problem)


@functools.partial(jax.jit, static_argnums=0)
def _run(plan: Plan, arrays: dict[str, Any]) -> tuple[jax.Array, jax.Array, jax.Array]:
    problem = plan.problem
    floats, masks = _kernel_form(problem, arrays)
    operands = vary_alike({**floats, **masks})
    out, m, l = attention_core(plan, {n: operands[n] for n in floats}, {n: operands[n] for n in masks})
    m = jax.lax.stop_gradient(m)
    out, m, l = (x.reshape(*problem.batch, *x.shape[1:]) for x in (out, m, l))
    return out, m, l
