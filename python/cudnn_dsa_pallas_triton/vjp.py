"""The differentiable core: residuals, and which kernels a backward pass runs."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from cudnn_dsa_pallas_triton.backward import key_value_gradient, query_gradient, row_terms
from cudnn_dsa_pallas_triton.bias_gradient import bias_gradient
from cudnn_dsa_pallas_triton.config import Config, fit
from cudnn_dsa_pallas_triton.contracts import Problem
from cudnn_dsa_pallas_triton.forward import forward
from cudnn_dsa_pallas_triton.tile import LOG2E, all_finite

Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about a call."""

    problem: Problem
    config: Config
    interpret: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention_core(plan: Plan, floats: Arrays, masks: Arrays) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(out, m, l) of ``forward.forward``.

    Args:
        floats: q, k, v and, where given, bias and attn_sink: what has a gradient. All in kernel form.
        masks: integer and boolean operands.
    """
    return _forward(plan, floats, masks)[0]


def _forward(plan: Plan, floats: Arrays, masks: Arrays):
    config = fit(plan.config.forward, plan.problem)
    operands = {**floats, **masks}
    finite = all_finite(plan.problem, operands, "qkv")
    out, m, l = forward(plan.problem, config, operands, finite, plan.interpret)
    # Un-normalised output is linear in what the backward recomputes: nothing of it is kept.
    kept = out if plan.problem.normalize else None
    return (out, m, l), (floats, masks, finite, kept, m, l)


def _backward(plan: Plan, residuals, cotangents):
    problem, config = plan.problem, plan.config
    floats, masks, finite, out, m, l = residuals
    dout, _, dl = cotangents  # m is a stop-gradient
    terms = row_terms(problem, out, m, l, dout, dl)
    operands = {**floats, **masks, "dout": dout, **terms}
    if finite is not None:
        finite = finite & jnp.isfinite(dout).all()
    grads: Arrays = {}
    sink = operands.pop("attn_sink", None)
    if sink is not None:
        exponent = (sink.astype(jnp.float32)[:, None] - terms["shift"]) * LOG2E - terms["log2l"]
        grads["attn_sink"] = -jnp.sum(jnp.exp2(exponent) * terms["delta"], axis=(0, 2)).astype(sink.dtype)
    grads["q"] = query_gradient(problem, fit(config.dq, problem), operands, finite, plan.interpret)
    grads["k"], grads["v"] = key_value_gradient(problem, fit(config.dkv, problem), operands, finite, plan.interpret)
    if "bias" in floats:
        grads["bias"] = bias_gradient(problem, fit(config.dbias, problem), operands, plan.interpret)
    return grads, None


attention_core.defvjp(_forward, _backward)
