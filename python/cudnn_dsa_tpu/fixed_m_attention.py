"""``fixed_m_attention``: attention on one device with a fixed m where that is exact."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from cudnn_dsa_tpu.attention import Plan, attention
from cudnn_dsa_tpu.block_sizes import BlockSizes, resolve
from cudnn_dsa_tpu.chips import current_chip
from cudnn_dsa_tpu.contracts import check_attention
from cudnn_dsa_tpu.fixed_m import (
    SAFE_DTYPES,
    UNSAFE_DTYPES,
    V_MAX,
    FixedM,
    FixedMNorms,
    fixed_m_dtype_is_safe,
    largest_value,
)
from cudnn_dsa_tpu.forward import FixedOperands
from cudnn_dsa_tpu.launch import Interpret, resolve_interpret


def fixed_m_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float | None = None,
    per_q_block: bool = True,
    k_mean: jax.Array | None = None,
    norms: FixedMNorms | None = None,
    fixed_m_norms_squared: bool = True,
    gate: str = "strict",
    uniform: bool = False,
    block_sizes: BlockSizes | str = "auto",
    interpret: Interpret | None = None,
) -> jax.Array:
    """softmax(scale * q k^T) v, differentiable in q, k and v, without a running maximum where the logits are provably
    small enough (``fixed_m.py`` has the proofs). Heads and query blocks for which they are not take the running
    maximum, as does every call with max|v| > 256 or of a dtype that cannot hold the weights. Batches by ``jax.vmap``.

    Args:
        q: [H, S, D]; bfloat16 or float32, or float16 and float8 (computed in float32, always with the running maximum).
        k, v: [H_kv, T, D], [H_kv, T, D_v], of the same dtype; H is a multiple of H_kv.
        scale: of the logits, static; None is D**-0.5.
        per_q_block: decide per head and block of ``block_q`` queries; False: per head.
        k_mean: [H_kv, D], fp32 (:func:`fixed_m_k_mean`): center the keys. The result is the same; the bound is smaller
            where keys share an offset. Needs ``norms`` of centered keys: with those of the keys as they are, a centered
            logit could be twice the bound.
        norms: of q and k (:func:`fixed_m_norms`); None: computed here.
        fixed_m_norms_squared: ``norms`` holds squared norms. Never guessed from their size.
        gate: "strict": exact. "wide": larger logits too, at the price of up to 2^-8 max|v| in out; needs ``k_mean``.
        uniform: one kernel body for the call: the fixed m if every head and block is eligible, the running maximum if
            not. (Under ``vmap`` both run and one is taken.) False: one launch with both bodies.
        block_sizes, interpret: as for :func:`cudnn_dsa_tpu.splash_attention`.

    Returns:
        out [H, S, D_v] in the dtype of q.

    Raises:
        ContractError: a ``ValueError`` that names the argument, what was expected and what came.
    """
    problem = check_attention(
        q, k, v, scale=scale, orig_q_seq_len=None, orig_kv_seq_len=None, dtypes=SAFE_DTYPES + UNSAFE_DTYPES
    )
    fixed_m = FixedM(
        v_ok=False, per_q_block=per_q_block, k_mean=k_mean, norms=norms, fixed_m_norms_squared=fixed_m_norms_squared,
        gate=gate, uniform=uniform,
    )  # fmt: skip
    if not fixed_m_dtype_is_safe(problem.dtype):
        q32, k32, v32 = (x.astype(jnp.float32) for x in (q, k, v))
        problem = dataclasses.replace(problem, dtype="float32")
        plan = Plan(problem, resolve(block_sizes, problem, current_chip()), resolve_interpret(interpret))
        return attention(q32, k32, v32, None, None, None, plan)[0].astype(q.dtype)
    problem = dataclasses.replace(problem, fixed_m=True)
    plan = Plan(problem, resolve(block_sizes, problem, current_chip()), resolve_interpret(interpret), uniform=uniform)
    tiles = plan.sizes.forward
    fixed_m.check(problem, tiles.grid(problem)[0])
    q0, k0, v0 = (lax.stop_gradient(x) for x in (q, k, v))
    fixed_m = dataclasses.replace(fixed_m, v_ok=jnp.all(largest_value(v0) <= V_MAX))
    metadata = fixed_m.metadata(q0, k0, v0, problem, block_q=tiles.q, ring_kv_len=problem.valid_kv)
    mean = None if k_mean is None else lax.stop_gradient(k_mean)
    return attention(q, k, v, None, None, FixedOperands(metadata, mean), plan)[0]
