"""``ring_attention``: sequences sharded over a mesh axis, keys and values rotating, gradients rotating home.

Every device holds its queries and starts with its own keys and values. In each hop it attends to the keys it holds
while the next ones are on their way; results are merged in fp32 by their logsumexp (Liu, Zaharia, Abbeel 2023,
arXiv:2310.01889). In the backward pass the logsumexp and delta are known for the whole ring, so the hops' gradients
simply add: dq stays, dk and dv travel with their keys and in the end go home the way they came.

What makes the hops overlap. XLA may start a transfer at any time after its operands exist, and left alone it starts all
of them first: the whole ring's communication before the first kernel, every hop's keys in memory at once. An
``optimization_barrier`` over (next keys, results so far) ends each hop: the next transfer cannot start before this
hop's kernel is done, and the scheduler puts the kernel between a transfer's start and its end.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from cudnn_dsa.contracts import ContractError
from cudnn_dsa_tpu.attention import (
    RESIDUAL_NAMES,
    Plan,
    delta_rows,
    lse_to_base2,
    run_backward,
    run_forward,
)
from cudnn_dsa_tpu.backward import Gradients, Operands
from cudnn_dsa_tpu.block_sizes import BlockSizes, resolve
from cudnn_dsa_tpu.chips import current_chip
from cudnn_dsa_tpu.contracts import check_attention
from cudnn_dsa_tpu.launch import Interpret, pad_to, resolve_interpret


class Chain(NamedTuple):
    """A direction around the ring: ``step`` (+1 or -1) and how many hops keys travel that way."""

    step: int
    hops: int


@dataclasses.dataclass(frozen=True)
class Ring:
    """A named axis and the ways keys travel along it.

    One way: R - 1 hops. Both ways: ceil((R - 1) / 2) and floor((R - 1) / 2), half the latency on a torus whose links
    carry both directions at once.
    """

    axis_name: str
    size: int
    bidirectional: bool

    @property
    def chains(self) -> tuple[Chain, ...]:
        hops = self.size - 1
        both = (Chain(+1, (hops + 1) // 2), Chain(-1, hops // 2)) if self.bidirectional else (Chain(+1, hops),)
        return tuple(chain for chain in both if chain.hops)

    def chains_at(self, hop: int) -> tuple[Chain, ...]:
        """The chains that still move in ``hop`` (counted from 1)."""
        return tuple(chain for chain in self.chains if hop <= chain.hops)

    @property
    def hops(self) -> int:
        return max((chain.hops for chain in self.chains), default=0)

    def shift(self, x: Any, by: int) -> Any:
        """Every device's ``x`` moved ``by`` devices ahead."""
        permutation = [(i, (i + by) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda leaf: lax.ppermute(leaf, self.axis_name, permutation), x)


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis_name: str,
    scale: float | None = None,
    block_sizes: BlockSizes | str = "auto",
    orig_q_seq_len: int | None = None,
    orig_kv_seq_len: int | None = None,
    bidirectional: bool = False,
    ulysses_axis_name: str | None = None,
    interpret: Interpret | None = None,
) -> jax.Array:
    """Attention over a sequence that is sharded over ``axis_name``; call it under ``jax.shard_map``.

    Args:
        q: [H, S, D], this device's queries, bfloat16 or float32.
        k, v: [H_kv, T, D], [H_kv, T, D_v], this device's keys and values.
        axis_name: mesh axis of the ring.
        scale, block_sizes, interpret: as for :func:`cudnn_dsa_tpu.splash_attention`; block sizes apply to each hop.
        orig_q_seq_len, orig_kv_seq_len: how many of this device's S and T tokens exist, the same on every device.
        bidirectional: send keys both ways around the ring, half of them each.
        ulysses_axis_name: a second mesh axis that shards the sequence too (Jacobs et al. 2023, arXiv:2309.14509):
            within it, an all-to-all exchanges sequence shards for heads before the ring and back after it. Its size
            divides H and H_kv.

    Returns:
        out [H, S, D_v], this device's share, in the dtype of q; zero beyond ``orig_q_seq_len``.

    Raises:
        ContractError: a ``ValueError`` that names the argument, what was expected and what came.
    """
    problem = check_attention(
        q, k, v, scale=scale, orig_q_seq_len=orig_q_seq_len, orig_kv_seq_len=orig_kv_seq_len
    )  # fmt: skip
    ring = Ring(axis_name, _axis_size("axis_name", axis_name), bidirectional)
    shards = 1 if ulysses_axis_name is None else _axis_size("ulysses_axis_name", ulysses_axis_name)
    for name, heads in (("H", problem.num_heads), ("H_kv", problem.num_kv_heads)):
        if heads % shards:
            raise ContractError("ulysses_axis_name", f"an axis whose size divides {name}={heads}", f"size {shards}")

    # Only valid tokens go through the all-to-all: the shards' tails would end up between the tokens.
    q, k, v = q[:, : problem.valid_q], k[:, : problem.valid_kv], v[:, : problem.valid_kv]
    if shards > 1:
        exchange = functools.partial(lax.all_to_all, axis_name=ulysses_axis_name, tiled=True)
        q, k, v = (exchange(x, split_axis=0, concat_axis=1) for x in (q, k, v))
    local = dataclasses.replace(
        problem,
        num_heads=q.shape[0],
        num_kv_heads=k.shape[0],
        q_len=q.shape[1],
        kv_len=k.shape[1],
        valid_q=q.shape[1],
        valid_kv=k.shape[1],
    )
    plan = Plan(local, resolve(block_sizes, local, current_chip()), resolve_interpret(interpret))
    out = _ring(q, k, v, plan, ring)
    if shards > 1:
        out = exchange(out, split_axis=1, concat_axis=0)
    return pad_to(out, problem.q_len, axis=1)


def _axis_size(argument: str, name: Any) -> int:
    try:
        return lax.axis_size(name)
    except (NameError, TypeError, KeyError):
        raise ContractError(argument, "the name of a mesh axis of an enclosing shard_map", repr(name)) from None


class _Partial(NamedTuple):
    """Attention to some of the keys: out [H, S, D_v] and lse [H, S], both fp32."""

    out: jax.Array
    lse: jax.Array

    def merge(self, other: _Partial) -> _Partial:
        """Attention to the keys of both. The exponents are differences to the larger logsumexp, at most zero."""
        lse = jnp.logaddexp(self.lse, other.lse)
        a, b = jnp.exp(self.lse - lse), jnp.exp(other.lse - lse)
        return _Partial(self.out * a[..., None] + other.out * b[..., None], lse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _ring(q, k, v, plan: Plan, ring: Ring):
    return _ring_forward(q, k, v, plan, ring).out.astype(q.dtype)


def _ring_forward(q, k, v, plan: Plan, ring: Ring) -> _Partial:
    def attend(keys) -> _Partial:
        return _Partial(*run_forward(q, keys[0], keys[1], None, None, plan, jnp.float32))

    ahead = {chain: ring.shift((k, v), chain.step) for chain in ring.chains_at(1)}
    state = attend((k, v))
    for hop in range(1, ring.hops + 1):
        held, state = lax.optimization_barrier((ahead, state))
        ahead = {chain: ring.shift(held[chain], chain.step) for chain in ring.chains_at(hop + 1)}
        for chain in ring.chains_at(hop):
            state = state.merge(attend(held[chain]))
    return state


def _ring_fwd(q, k, v, plan: Plan, ring: Ring):
    out, lse = (
        checkpoint_name(x, name) for x, name in zip(_ring_forward(q, k, v, plan, ring), RESIDUAL_NAMES, strict=True)
    )
    # out is kept in fp32, for delta: see splash attention.
    return out.astype(q.dtype), (q, k, v, out, lse)


def _ring_bwd(plan: Plan, ring: Ring, residuals, dout):
    q, k, v, out, lse = residuals
    fixed = {
        "q": q,
        "dout": dout,
        "lse": lse_to_base2(lse),
        "delta": delta_rows(out, dout)[:, None, :],
    }
    dtypes = Gradients(jnp.float32, jnp.float32, jnp.float32)

    def gradients(keys) -> Gradients:
        return run_backward(Operands(**fixed, k=keys[0], v=keys[1], segment_ids=None), plan, dtypes)

    ahead = {chain: ring.shift((k, v), chain.step) for chain in ring.chains_at(1)}
    own = gradients((k, v))
    dq, home = own.q, (own.k, own.v)
    travelling: dict[Chain, Any] = {}
    for hop in range(1, ring.hops + 1):
        held, travelling, dq, home = lax.optimization_barrier((ahead, travelling, dq, home))
        ahead = {chain: ring.shift(held[chain], chain.step) for chain in ring.chains_at(hop + 1)}
        # The sums of the hops before move on while this hop's are computed.
        moved = {chain: ring.shift(travelling[chain], chain.step) for chain in ring.chains_at(hop) if hop > 1}
        for chain in ring.chains_at(hop):
            grads = gradients(held[chain])
            dq = dq + grads.q
            travelling[chain] = (grads.k, grads.v)
            if hop > 1:
                travelling[chain] = jax.tree.map(jnp.add, moved[chain], travelling[chain])
    for chain in ring.chains:
        home = jax.tree.map(jnp.add, home, ring.shift(travelling[chain], -chain.step * chain.hops))
    return dq.astype(q.dtype), home[0].astype(k.dtype), home[1].astype(v.dtype)


_ring.defvjp(_ring_fwd, _ring_bwd)
