"""``splash_attention``: mask-free flash attention on one device, with its backward pass."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from cudnn_dsa_tpu.backward import Gradients, Operands, backward
from cudnn_dsa_tpu.block_sizes import BlockSizes, resolve
from cudnn_dsa_tpu.chips import current_chip
from cudnn_dsa_tpu.contracts import Problem, SegmentIds, check_attention
from cudnn_dsa_tpu.forward import FixedOperands, Launch, forward
from cudnn_dsa_tpu.launch import NOTHING, Interpret, pad_to, resolve_interpret

LOG2E = math.log2(math.e)
LN2 = math.log(2)

# Names of the saved output (fp32) and base-2 logsumexp for jax.checkpoint policies: saving both spares a rerun of the
# forward kernel.
RESIDUAL_NAMES = ("cudnn_dsa_tpu_out", "cudnn_dsa_tpu_lse")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about a call; ``uniform``: see :func:`run_softmax`."""

    problem: Problem
    sizes: BlockSizes
    interpret: Interpret
    fused: bool = True
    dq_reduction_steps: int | None = 3
    uniform: bool = False


def splash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float | None = None,
    block_sizes: BlockSizes | str = "auto",
    orig_q_seq_len: int | None = None,
    orig_kv_seq_len: int | None = None,
    segment_ids: SegmentIds | None = None,
    attn_sink: jax.Array | None = None,
    use_fused_bwd_kernel: bool = True,
    dq_reduction_steps: int | None = 3,
    save_residuals: bool = False,
    interpret: Interpret | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """softmax(scale * q k^T) v, differentiable in q, k, v and attn_sink. Batches by ``jax.vmap``.

    Args:
        q: [H, S, D], bfloat16 or float32; D from 64 to 256, a multiple of 8.
        k: [H_kv, T, D] of the same dtype; H is a multiple of H_kv (grouped or multi-query attention).
        v: [H_kv, T, D_v]; D_v may differ from D.
        scale: of the logits, static; None is D**-0.5.
        block_sizes: tiles of the kernels, or "auto". Any length works with any tile.
        orig_q_seq_len: how many of the S queries exist; None is all. What lies beyond, NaN included, is not read.
        orig_kv_seq_len: how many of the T keys exist.
        segment_ids: int32 ids of queries and keys; a query attends to keys with its own id. A query whose id no key
            has gets zeros, an lse of -inf and no gradient.
        attn_sink: [H], a logit per head that takes part in the softmax and carries no value.
        use_fused_bwd_kernel: dq, dk and dv in one kernel; otherwise one for dk, dv and one for dq.
        dq_reduction_steps: 3 accumulates dq of the fused kernel in three fp32 buffers; None keeps one per key tile
            (more memory, the same result up to rounding).
        save_residuals: also return the logsumexp, itself differentiable.
        interpret: run in the Pallas interpreter; None does so unless the default backend is a TPU. An
            ``InterpretParams`` sets its options.

    Returns:
        out [H, S, D_v] in the dtype of q, zero beyond ``orig_q_seq_len``; with ``save_residuals`` also the natural
        logarithm of the softmax denominator, lse [H, S], fp32, -inf beyond. Gradients have the shapes and dtypes of
        the inputs and are zero beyond the valid lengths.

    Raises:
        ContractError: a ``ValueError`` that names the argument, what was expected and what came.

    The backward pass is that of FlashAttention-2 (Dao 2023, arXiv:2307.08691, section 3.1.2) in base 2.
    """
    problem = check_attention(
        q,
        k,
        v,
        scale=scale,
        orig_q_seq_len=orig_q_seq_len,
        orig_kv_seq_len=orig_kv_seq_len,
        segment_ids=segment_ids,
        attn_sink=attn_sink,
        dq_reduction_steps=dq_reduction_steps,
    )
    plan = Plan(
        problem=problem,
        sizes=resolve(block_sizes, problem, current_chip()),
        interpret=resolve_interpret(interpret),
        fused=use_fused_bwd_kernel,
        dq_reduction_steps=dq_reduction_steps,
    )
    # Slicing and padding stay outside of the custom derivative: their own transposes zero the tails of the gradients.
    q, k, v = q[:, : problem.valid_q], k[:, : problem.valid_kv], v[:, : problem.valid_kv]
    if segment_ids is not None:
        segment_ids = SegmentIds(segment_ids[0][: problem.valid_q], segment_ids[1][: problem.valid_kv])
    out, lse = attention(q, k, v, segment_ids, attn_sink, None, plan)
    out = pad_to(out, problem.q_len, axis=1)
    if not save_residuals:
        return out
    return out, pad_to(lse, problem.q_len, axis=1, value=-jnp.inf)


def lse_rows(lse2: jax.Array) -> jax.Array:
    """The base-2 logsumexp [H, S] as the backward kernels read it, [H, 1, S]: +1e30 for a query without keys, so that
    2^(s - lse2) is zero."""
    return jnp.where(jnp.isneginf(lse2), -NOTHING, lse2)[:, None, :]


def delta_rows(out: jax.Array, dout: jax.Array, dlse: jax.Array | None = None) -> jax.Array:
    """rowsum(out * dout) - dlse, [H, S], fp32. With P = softmax(s): ds = P (dP - rowsum(P dP)) + P dlse."""
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    return delta if dlse is None else delta - dlse


def run_forward(q, k, v, segment_ids, sink, plan: Plan, out_dtype, **options) -> tuple[jax.Array, jax.Array]:
    """out [H, S, D_v] and the base-2 lse [H, S] of valid tokens; ``options`` as of the kernel."""
    out, lse2 = run_forward_kernel(q, k, v, segment_ids, sink, plan, out_dtype, **options)
    return out, lse2[:, 0]


def run_forward_kernel(q, k, v, segment_ids, sink, plan: Plan, out_dtype, **options) -> tuple[jax.Array, jax.Array]:
    """What the kernel returns, of valid tokens."""
    tiles, problem = plan.sizes.forward, plan.problem
    ids = segment_ids
    out, rows = forward(
        pad_to(q, tiles.q, axis=1),
        pad_to(k, tiles.kv, axis=1),
        pad_to(v, tiles.kv, axis=1),
        ids and SegmentIds(pad_to(ids.q, tiles.q, axis=0), pad_to(ids.kv, tiles.kv, axis=0)),
        None if sink is None else sink.astype(jnp.float32) * LOG2E,
        problem=problem,
        tiles=tiles,
        out_dtype=out_dtype,
        interpret=plan.interpret,
        **options,
    )
    return out[:, : problem.valid_q], rows[..., : problem.valid_q]


def run_softmax(q, k, v, segment_ids, sink, fixed: FixedOperands | None, plan: Plan, out_dtype):
    """:func:`run_forward`, with a fixed m where ``fixed`` allows it; ``plan.uniform``: everywhere or nowhere."""

    def run(which: Launch):
        operands = fixed if which.fixed else None
        return run_forward(q, k, v, segment_ids, sink, plan, out_dtype, fixed=operands, which=which)

    if fixed is None:
        return run(Launch.ONLINE)
    if not plan.uniform:
        return run(Launch.HYBRID)
    everywhere = jnp.all(fixed.metadata[1] > 0)
    if plan.interpret:  # the interpreter's callbacks cannot be in a branch under vmap
        return jax.tree.map(functools.partial(jnp.where, everywhere), run(Launch.UNIFORM), run(Launch.ONLINE))
    return lax.cond(everywhere, lambda: run(Launch.UNIFORM), lambda: run(Launch.ONLINE))


def run_backward(operands: Operands, plan: Plan, dtypes: Gradients) -> Gradients:
    return backward(
        operands,
        problem=plan.problem,
        sizes=plan.sizes,
        fused=plan.fused,
        dq_reduction_steps=plan.dq_reduction_steps,
        dtypes=dtypes,
        interpret=plan.interpret,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def attention(q, k, v, segment_ids, sink, fixed: FixedOperands | None, plan: Plan):
    """out and the natural lse of valid tokens. A fixed m changes neither beyond rounding and has no gradient."""
    out, lse2 = run_softmax(q, k, v, segment_ids, sink, fixed, plan, q.dtype)
    return out, lse2 * LN2


def _attention_fwd(q, k, v, segment_ids, sink, fixed, plan: Plan):
    # The backward pass keeps out in fp32: delta = rowsum(out * dout) is subtracted from dP, and for logits of some tens
    # the two nearly cancel, so that the rounding of a bf16 out would outweigh every other error in dq and dk.
    # And it keeps the logsumexp in base 2, as the kernels have it: to the natural one and back is two roundings, each
    # of which moves every weight of a query by up to 2^-24 of its lse.
    out, lse2 = run_softmax(q, k, v, segment_ids, sink, fixed, plan, jnp.float32)
    out, lse2 = (checkpoint_name(x, name) for x, name in zip((out, lse2), RESIDUAL_NAMES, strict=True))
    return (out.astype(q.dtype), lse2 * LN2), (q, k, v, segment_ids, sink, out, lse2)


def _attention_bwd(plan: Plan, residuals: Any, cotangents: Any):
    q, k, v, segment_ids, sink, out, lse2 = residuals
    dout, dlse = cotangents
    empty = jnp.isneginf(lse2)
    delta = delta_rows(out, dout, dlse)
    # A query without keys has constant outputs; whatever cotangent arrives (0/0 in a loss) must not spread.
    delta = jnp.where(empty, 0.0, delta)
    dout = jnp.where(empty[..., None], 0, dout) if segment_ids is not None else dout
    operands = Operands(
        q=q,
        dout=dout.astype(q.dtype),
        lse=lse_rows(lse2),
        delta=delta[:, None, :],
        k=k,
        v=v,
        segment_ids=segment_ids,
    )
    grads = run_backward(operands, plan, Gradients(q.dtype, k.dtype, v.dtype))
    dsink = None
    if sink is not None:  # the sink's weight is 2^(sink - lse) <= 1 in base 2, its dP is zero
        weight = jnp.exp2(sink.astype(jnp.float32)[:, None] * LOG2E - lse2)
        dsink = -jnp.sum(weight * delta, axis=1).astype(sink.dtype)
    return (*grads, None, dsink, None)


attention.defvjp(_attention_fwd, _attention_bwd)
