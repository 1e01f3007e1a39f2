"""``ring_attention``: sequences sharded over a mesh axis, keys and values rotating, gradients rotating home.

Every device holds its queries and starts with its own keys and values. In each hop it attends to the keys it holds
while the next ones are on their way; results are merged in fp32 by their logsumexp (Liu, Zaharia, Abbeel 2023,
arXiv:2310.01889). In the backward pass the logsumexp and delta are known for the whole ring, so the hops' gradients
simply add: dq stays, dk and dv travel with their keys and in the end go home the way they came.

Devices may hold different numbers of tokens. Their program is one, so shapes are those of the arrays, and a kernel
learns from a scalar how many of a hop's keys exist. Queries that do not exist are zeroed and computed: they cost time
on a device that would otherwise wait for the others.

What makes the hops overlap. XLA may start a transfer at any time after its operands exist, and left alone it starts all
of them first: the whole ring's communication before the first kernel, every hop's keys in memory at once. An
``optimization_barrier`` over (next keys, results so far) ends each hop: the next transfer cannot start before this
hop's kernel is done, and the scheduler puts the kernel between a transfer's start and its end. The backward pass has
one transfer more than hops, the sums' last way home: a device computes a part of its own keys' gradients beside its
first transfer and the other part beside this one.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from cudnn_dsa.contracts import ContractError, UnsupportedError, check_dtype, describe
from cudnn_dsa_tpu.attention import (
    RESIDUAL_NAMES,
    Plan,
    delta_rows,
    lse_rows,
    run_backward,
    run_forward,
    run_forward_kernel,
)
from cudnn_dsa_tpu.backward import Gradients, Operands
from cudnn_dsa_tpu.block_sizes import BlockSizes, resolve
from cudnn_dsa_tpu.chips import current_chip
from cudnn_dsa_tpu.contracts import DTYPES, Problem, check_attention
from cudnn_dsa_tpu.fixed_m import SAFE_DTYPES, UNSAFE_DTYPES, FixedM, fixed_m_dtype_is_safe
from cudnn_dsa_tpu.forward import FixedOperands, Launch
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

    def length_of(self, lengths: jax.Array | None, moved: int) -> jax.Array | None:
        """[1]: how many keys the device ``moved`` devices behind this one owns; None if all devices own as many."""
        return None if lengths is None else lengths[(lax.axis_index(self.axis_name) - moved) % self.size][None]


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis_name: str,
    scale: float | None = None,
    block_sizes: BlockSizes | str = "auto",
    orig_q_seq_len: int | jax.Array | None = None,
    orig_kv_seq_len: int | jax.Array | None = None,
    bidirectional: bool = False,
    ulysses_axis_name: str | None = None,
    fixed_m: FixedM | None = None,
    interpret: Interpret | None = None,
) -> jax.Array:
    """Attention over a sequence that is sharded over ``axis_name``; call it under ``jax.shard_map``.

    Args:
        q: [H, S, D], this device's queries, bfloat16 or float32.
        k, v: [H_kv, T, D], [H_kv, T, D_v], this device's keys and values.
        axis_name: mesh axis of the ring.
        scale, block_sizes, interpret: as for :func:`cudnn_dsa_tpu.splash_attention`; block sizes apply to each hop.
        orig_q_seq_len, orig_kv_seq_len: how many of this device's S and T tokens exist, the first so many; whatever
            lies behind them, NaN included, has no influence. None: all. An int: so many on every device, at least one;
            nothing is masked. An int32 array of one number (shape () or (1,)): this device's own, from 0 to S or T
            (clipped), for lengths that the ring does not divide; see :func:`local_seq_len`, or shard an
            array of all lengths over the axis.
        bidirectional: send keys both ways around the ring, half of them each.
        ulysses_axis_name: a second mesh axis that shards the sequence too (Jacobs et al. 2023, arXiv:2309.14509):
            within it, an all-to-all exchanges sequence shards for heads before the ring and back after it. Its size
            divides H and H_kv.
        fixed_m: do without a running maximum where that is exact; see :class:`FixedM` and
            :func:`cudnn_dsa_tpu.fixed_m_attention`. ``norms`` and ``k_mean`` are of the heads passed here; ``norms.q``
            of this device's queries, ``norms.k`` and ``k_mean`` of all keys. With ``ulysses_axis_name``, blocks of
            queries exist only behind the all-to-all: given norms are per head. Keys are as many on every device.

    Returns:
        out [H, S, D_v], this device's share, in the dtype of q; zero beyond ``orig_q_seq_len``, and where no device has
        any key.

    Raises:
        ContractError: a ``ValueError`` that names the argument, what was expected and what came.
    """
    shared_q, own_q = _length("orig_q_seq_len", orig_q_seq_len)
    shared_kv, own_kv = _length("orig_kv_seq_len", orig_kv_seq_len)
    dtypes = DTYPES if fixed_m is None else SAFE_DTYPES + UNSAFE_DTYPES
    problem = check_attention(q, k, v, scale=scale, orig_q_seq_len=shared_q, orig_kv_seq_len=shared_kv, dtypes=dtypes)
    ring = Ring(axis_name, axis_size("axis_name", axis_name), bidirectional)
    shards = 1 if ulysses_axis_name is None else axis_size("ulysses_axis_name", ulysses_axis_name)
    for name, heads in (("H", problem.num_heads), ("H_kv", problem.num_kv_heads)):
        if heads % shards:
            raise ContractError("ulysses_axis_name", f"an axis whose size divides {name}={heads}", f"size {shards}")

    if fixed_m is not None and own_kv is not None:
        raise UnsupportedError("orig_kv_seq_len", "an int or None, with fixed_m", "this device's own length")
    out_dtype = q.dtype
    if not fixed_m_dtype_is_safe(q.dtype):
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))

    own_kv = None if own_kv is None else jnp.clip(own_kv, 0, problem.kv_len)

    # Only valid tokens go through the all-to-all: the shards' tails would end up between the tokens.
    q, k, v = q[:, : problem.valid_q], k[:, : problem.valid_kv], v[:, : problem.valid_kv]
    q, k, v = _zero_from(own_q, q), _zero_from(own_kv, k), _zero_from(own_kv, v)
    if shards > 1:
        exchange = functools.partial(lax.all_to_all, axis_name=ulysses_axis_name, tiled=True)
        q, k, v = (exchange(x, split_axis=0, concat_axis=1) for x in (q, k, v))
        if own_kv is not None:
            lengths = lax.all_gather(own_kv, ulysses_axis_name)
            k, v, own_kv = _close_up(k, lengths), _close_up(v, lengths), lengths.sum()
    local = dataclasses.replace(
        problem,
        num_heads=q.shape[0],
        num_kv_heads=k.shape[0],
        q_len=q.shape[1],
        kv_len=k.shape[1],
        valid_q=q.shape[1],
        valid_kv=k.shape[1],
        dtype=q.dtype.name,
        fixed_m=fixed_m is not None and fixed_m_dtype_is_safe(out_dtype),
    )
    uniform = fixed_m is not None and fixed_m.uniform
    plan = Plan(local, resolve(block_sizes, local, current_chip()), resolve_interpret(interpret), uniform=uniform)
    fixed = None
    if fixed_m is not None:
        fixed = _fixed_operands(fixed_m, problem, plan, ring, ulysses_axis_name, *map(lax.stop_gradient, (q, k, v)))
    out = _ring(q, k, v, None if own_kv is None else lax.all_gather(own_kv, axis_name), fixed, plan, ring)
    if shards > 1:
        out = exchange(out, split_axis=1, concat_axis=0)
    return pad_to(_zero_from(own_q, out), problem.q_len, axis=1).astype(out_dtype)


def _fixed_operands(
    fixed_m: FixedM, problem: Problem, plan: Plan, ring: Ring, ulysses_axis_name: str | None, q, k, v
) -> FixedOperands | None:
    """The decision about the queries that this device attends with, and the mean of the keys it attends to.

    ``problem`` is the caller's, ``plan`` that behind the all-to-all, as are q, k and v. Where the all-to-all is, heads
    are fewer and queries more than the caller knows: what was given per head becomes that of this device's heads.

    The longest key is that of the whole ring. With one of its own for every hop m would differ from hop to hop, and
    their sums could not be added. And all devices take the same verdict: v_ok is the minimum over every axis.
    """
    tiles = plan.sizes.forward
    q_blocks = tiles.grid(plan.problem)[0]
    if ulysses_axis_name is not None and fixed_m.norms is not None and fixed_m.per_q_block:
        raise ContractError("per_q_block", "False, with norms and ulysses_axis_name", "True")
    fixed_m.check(problem, q_blocks)
    if not fixed_m_dtype_is_safe(problem.dtype):
        return None
    verdict = lax.pmin(_vary(jnp.asarray(fixed_m.v_ok, jnp.int32).reshape(())), _manual_axes()) > 0
    norms, k_mean = fixed_m.norms, fixed_m.k_mean
    if ulysses_axis_name is not None:

        def own_heads(x, longest: bool | None = None):
            """This device's part of [H, ...]; ``longest``: of the extreme over the sequence shards."""
            if longest is not None:
                x = lax.pmax(x, ulysses_axis_name) if longest else lax.pmin(x, ulysses_axis_name)
            size = x.shape[0] // lax.axis_size(ulysses_axis_name)
            return lax.dynamic_slice_in_dim(x, lax.axis_index(ulysses_axis_name) * size, size)

        k_mean = None if k_mean is None else own_heads(k_mean)
        if norms is not None:
            mean = None if norms.mean is None else own_heads(norms.mean, longest=False)
            norms = dataclasses.replace(norms, q=own_heads(norms.q, longest=True), k=own_heads(norms.k), mean=mean)
    fixed_m = dataclasses.replace(fixed_m, v_ok=verdict, norms=norms, k_mean=k_mean)
    metadata = fixed_m.metadata(
        q, k, v, plan.problem, block_q=tiles.q, ring_kv_len=ring.size * plan.problem.valid_kv, axes=ring.axis_name
    )
    if fixed_m.uniform:
        # One program for all: the branches hold the ring's transfers, which wait for every device.
        everywhere = lax.pmin(_vary(jnp.min(metadata[1])), _manual_axes())
        metadata = metadata.at[1].set(everywhere)
    return FixedOperands(metadata, None if k_mean is None else lax.stop_gradient(k_mean))


def local_seq_len(seq_len: int, shard_len: int, axis_name: str | tuple[str, ...]) -> jax.Array:
    """How many of this device's ``shard_len`` tokens exist, int32, where a sequence of ``seq_len`` tokens was padded
    behind and cut into shards along ``axis_name`` (or several axes, the outermost first); under ``jax.shard_map``."""
    return jnp.clip(seq_len - lax.axis_index(axis_name) * shard_len, 0, shard_len).astype(jnp.int32)


def axis_size(argument: str, name: Any) -> int:
    """The size of a mesh axis of the enclosing ``shard_map``."""
    try:
        return lax.axis_size(name)
    except (NameError, TypeError, KeyError):
        raise ContractError(argument, "the name of a mesh axis of an enclosing shard_map", repr(name)) from None


def _manual_axes() -> tuple[str, ...]:
    """All axes of the enclosing ``shard_map``."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def _vary(x: jax.Array) -> jax.Array:
    """``x`` as a value that may differ between any two devices."""
    missing = set(_manual_axes()) - jax.typeof(x).manual_axis_type.varying
    return lax.pcast(x, tuple(missing), to="varying") if missing else x


def _length(argument: str, value: Any) -> tuple[int | None, jax.Array | None]:
    """A length that all devices share, or this device's own, a scalar."""
    if not isinstance(value, jax.Array):
        return value, None
    if value.size != 1:
        expected = "an int, or an int32 array of one number: this device's own"
        raise ContractError(argument, expected, f"shape {value.shape}")
    check_dtype(argument, describe(value), ("int32",))
    return None, value.reshape(())


def _zero_from(length: jax.Array | None, x: jax.Array) -> jax.Array:
    """``x`` [H, S, D] with zeros from token ``length`` on, as are the gradients there; None: ``x`` itself."""
    if length is None:
        return x
    return jnp.where(lax.broadcasted_iota(jnp.int32, (x.shape[1], 1), 0) < length, x, 0)


def _close_up(x: jax.Array, lengths: jax.Array) -> jax.Array:
    """Shards that follow each other along axis 1, of which so many tokens exist and the others are zero: all that exist
    first. Each shard is written over the zeros of the one before."""
    shard_len = x.shape[1] // len(lengths)
    starts = jnp.cumsum(lengths) - lengths
    closed = jnp.zeros_like(x)
    for shard in range(len(lengths)):
        part = x[:, shard * shard_len : (shard + 1) * shard_len]
        closed = lax.dynamic_update_slice_in_dim(closed, part, starts[shard], axis=1)
    return closed


class _Partial(NamedTuple):
    """Attention to some of the keys: out [H, S, D_v] and the base-2 lse [H, S], both fp32; zeros and -inf for no
    keys."""

    out: jax.Array
    lse: jax.Array

    def merge(self, other: _Partial) -> _Partial:
        """Attention to the keys of both. The exponents are differences to the larger logsumexp, at most zero."""
        top = jnp.maximum(self.lse, other.lse)
        top = jnp.where(jnp.isneginf(top), 0.0, top)  # no keys on either side: weights 2^(-inf - 0) = 0
        a, b = jnp.exp2(self.lse - top), jnp.exp2(other.lse - top)
        # Divided by their own sum, not by 2^lse: an lse of hundreds is rounded by more than a weight may be off.
        total = a + b
        out = (self.out * a[..., None] + other.out * b[..., None]) / jnp.where(total == 0.0, 1.0, total)[..., None]
        return _Partial(out, top + jnp.log2(total))


class _Sums(NamedTuple):
    """The same before it is divided: acc [H, S, D_v] and rows [H, 2, S] (m and l, base 2). As m is one and the same for
    all keys of the ring, hops are merged by addition."""

    acc: jax.Array
    rows: jax.Array

    def merge(self, other: _Sums) -> _Sums:
        return _Sums(self.acc + other.acc, self.rows.at[:, 1].add(other.rows[:, 1]))

    def divided(self) -> _Partial:
        m, l = self.rows[:, 0], self.rows[:, 1]
        return _Partial(self.acc / l[..., None], m + jnp.log2(l))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _ring(q, k, v, lengths, fixed, plan: Plan, ring: Ring):
    """``lengths``: [R], int32, how many keys each device of the ring owns; None: all of them."""
    return _ring_forward(q, k, v, lengths, fixed, plan, ring).out.astype(q.dtype)


def _ring_forward(q, k, v, lengths, fixed: FixedOperands | None, plan: Plan, ring: Ring) -> _Partial:
    def partial(keys, moved: int, which: Launch) -> _Partial:
        operands = fixed if which.fixed else None
        kv_len = ring.length_of(lengths, moved)
        options: dict[str, Any] = {"kv_len": kv_len, "fixed": operands, "which": which}
        return _Partial(*run_forward(q, keys[0], keys[1], None, None, plan, jnp.float32, **options))

    def sums(keys, moved: int) -> _Sums:
        options: dict[str, Any] = {"fixed": fixed, "which": Launch.UNIFORM_SUMS}
        return _Sums(*run_forward_kernel(q, keys[0], keys[1], None, None, plan, jnp.float32, **options))

    online = functools.partial(partial, which=Launch.ONLINE)
    if fixed is None:
        return _around(online, k, v, ring)
    if not plan.uniform:
        return _around(functools.partial(partial, which=Launch.HYBRID), k, v, ring)
    return lax.cond(
        jnp.all(fixed.metadata[1] > 0),
        lambda: _around(sums, k, v, ring).divided(),
        lambda: _around(online, k, v, ring),
    )


def _around(attend: Callable[[Any, int], Any], k, v, ring: Ring) -> Any:
    """What ``attend((k, v), moved)`` says of every device's keys, merged."""
    ahead = {chain: ring.shift((k, v), chain.step) for chain in ring.chains_at(1)}
    state = attend((k, v), 0)
    for hop in range(1, ring.hops + 1):
        held, state = lax.optimization_barrier((ahead, state))
        ahead = {chain: ring.shift(held[chain], chain.step) for chain in ring.chains_at(hop + 1)}
        for chain in ring.chains_at(hop):
            state = state.merge(attend(held[chain], chain.step * hop))
    return state


def _ring_fwd(q, k, v, lengths, fixed, plan: Plan, ring: Ring):
    out, lse = (
        checkpoint_name(x, name)
        for x, name in zip(_ring_forward(q, k, v, lengths, fixed, plan, ring), RESIDUAL_NAMES, strict=True)
    )
    # out is kept in fp32, for delta: see splash attention.
    return out.astype(q.dtype), (q, k, v, lengths, out, lse)


def _head_parts(problem: Problem, ring: Ring) -> list[tuple[slice, slice]]:
    """Two parts of the heads that share nothing but, with a single key head, that head: their queries' and their keys'
    heads. One part where there is one head, or nothing to overlap with."""
    count = problem.num_kv_heads if problem.num_kv_heads > 1 else problem.num_heads
    if ring.hops == 0 or count == 1:
        return [(slice(None), slice(None))]
    bounds = [slice(0, count // 2), slice(count // 2, count)]
    if problem.num_kv_heads == 1:
        return [(heads, slice(None)) for heads in bounds]
    return [(slice(b.start * problem.group, b.stop * problem.group), b) for b in bounds]


def _ring_bwd(plan: Plan, ring: Ring, residuals, dout):
    # Or XLA would take the forward pass's first transfer for this one's and keep those keys until now.
    (q, k, v, lengths, out, lse), dout = lax.optimization_barrier((residuals, dout))
    rows, delta = lse_rows(lse), delta_rows(out, dout)[:, None, :]
    dtypes = Gradients(jnp.float32, jnp.float32, jnp.float32)

    everything = (slice(None), slice(None))

    def gradients(keys, moved: int, part: tuple[slice, slice] = everything) -> Gradients:
        x = Operands(
            q=q[part[0]],
            dout=dout[part[0]],
            lse=rows[part[0]],
            delta=delta[part[0]],
            k=keys[0][part[1]],
            v=keys[1][part[1]],
            kv_len=ring.length_of(lengths, moved),
        )
        problem = dataclasses.replace(plan.problem, num_heads=len(x.q), num_kv_heads=len(x.k))
        return run_backward(x, dataclasses.replace(plan, problem=problem), dtypes)

    parts = _head_parts(plan.problem, ring)
    ahead = {chain: ring.shift((k, v), chain.step) for chain in ring.chains_at(1)}
    own = [gradients((k, v), 0, parts[0])]
    dq: Any = 0.0
    travelling: dict[Chain, Any] = {}
    home: list[Any] = []
    for hop in range(1, ring.hops + 2):
        # The sums of the hop before move on, or home, while this hop's are computed; last come the rest of its own.
        held, travelling, home, own, dq = lax.optimization_barrier((ahead, travelling, home, own, dq))
        ahead = {chain: ring.shift(held[chain], chain.step) for chain in ring.chains_at(hop + 1)}
        moved = {
            chain: ring.shift(sums, chain.step if hop <= chain.hops else -chain.step * chain.hops)
            for chain, sums in travelling.items()
        }
        home += [sums for chain, sums in moved.items() if hop > chain.hops]
        travelling = {}
        for chain in ring.chains_at(hop):
            grads = gradients(held[chain], chain.step * hop)
            dq = dq + grads.q
            travelling[chain] = (grads.k, grads.v)
            if chain in moved:
                travelling[chain] = jax.tree.map(operator.add, moved[chain], travelling[chain])
    own += [gradients((k, v), 0, part) for part in parts[1:]]

    def whole(*grads: jax.Array, shared: bool = False) -> jax.Array:
        """A gradient of all heads from those of the parts."""
        return functools.reduce(operator.add, grads) if shared else jnp.concatenate(grads)

    dq = dq + whole(*(grads.q for grads in own))
    keys = ((grads.k, grads.v) for grads in own)
    dkv = jax.tree.map(functools.partial(whole, shared=plan.problem.num_kv_heads == 1), *keys)
    for sums in home:
        dkv = jax.tree.map(operator.add, dkv, sums)
    return dq.astype(q.dtype), dkv[0].astype(k.dtype), dkv[1].astype(v.dtype), None, None


_ring.defvjp(_ring_fwd, _ring_bwd)
