"""The backward kernels, in base 2 and on transposed logits: keys on sublanes, queries on lanes.

    S^T = scale log2(e) k q^T
    P^T = 2^(S^T - lse2)          lse2, delta are rows: one number a lane, spread down the sublanes for free
    dv += P^T dout
    dS^T = P^T * (v dout^T - delta)        delta = rowsum(out * dout) - dlse
    dk += scale dS^T q            the scale at the end
    dq^T += scale k^T dS^T        likewise; k^T is made once per key tile; dS^T itself is never transposed

Fused kernel: grid (kv head, kv tile, head of the group, q tile). dk and dv of a key tile stay in vector memory over the
inner two dimensions. dq of a query tile is revisited once per kv tile, far apart, so it goes through memory: a buffer
of slots, aliased in and out, kv tile j adding to slot j % slots, summed at the end.

Why three slots. A tile's read for the next step is issued at the start of the current step; a tile written in step t is
known to have arrived only when step t + 1 ends. So a slot may be read again in step t + 3 at the earliest. The inner
dimensions may be as short as one step, hence three slots; two would race.

Unfused: the same kernel without dq, and a dq kernel with grid (kv head, head of the group, q tile, kv tile).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from cudnn_dsa_tpu.block_sizes import NUM_LANES, BlockSizes, Tiles
from cudnn_dsa_tpu.contracts import Problem, SegmentIds
from cudnn_dsa_tpu.forward import over_keys
from cudnn_dsa_tpu.launch import MASKED, NN, NOTHING, NT, Interpret, cost, launch, matmul, pad_to


class Gradients(NamedTuple):
    """Something per gradient: the arrays, their dtypes, or their block specs; of q [H, S, D], k [H_kv, T, D] and v
    [H_kv, T, D_v]."""

    q: Any
    k: Any
    v: Any


class _Inputs(NamedTuple):
    """Operands, their block specs, or their references in the kernel."""

    q: Any  # (tile q, D)
    dout: Any  # (tile q, D_v)
    lse: Any  # (1, tile q), base 2
    delta: Any  # (1, tile q)
    k: Any  # (tile kv, D)
    v: Any  # (tile kv, D_v)
    q_ids: Any = None  # (1, tile q)
    kv_ids: Any = None  # (tile kv, 128): a key's segment id on every lane
    kv_len: Any = None  # (1,), scalar memory: how many keys exist, where only the device knows
    dq: Any = None  # (D, tile q): the slot so far


def _p_and_ds(refs: _Inputs, keys: slice, limit, problem: Problem, dot) -> tuple[jax.Array, jax.Array]:
    """P^T and dS^T of some keys of the tile against the tile's queries, (keys, tile q), in the dtype of the inputs.
    Keys from ``limit`` on, if that is not None, do not exist."""
    s = dot(refs.k[keys, :], refs.q[...], NT) * problem.scale_log2e
    if refs.q_ids is not None:
        kv_ids = jnp.tile(refs.kv_ids[keys, :], (1, s.shape[1] // NUM_LANES))
        s = jnp.where(kv_ids == refs.q_ids[...], s, MASKED)
    if limit is not None:
        s = jnp.where(keys.start + lax.broadcasted_iota(jnp.int32, s.shape, 0) < limit, s, MASKED)
    p = jnp.exp2(s - refs.lse[...])
    dp = dot(refs.v[keys, :], refs.dout[...], NT)
    ds = p * (dp - refs.delta[...])
    dtype = refs.q.dtype
    return p.astype(dtype), ds.astype(dtype)


def _chunks(keys: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, keys)) for start in range(0, keys, step)]


def _kv_kernel(refs: _Inputs, dq_ref, dk_ref, dv_ref, dk_acc, dv_acc, *k_transposed, tiles, problem, slots):
    """dk, dv of one key tile, and its part of dq unless ``slots`` is 0."""
    dot = matmul(problem.dtype)
    kv_tile, head, q_tile = pl.program_id(1), pl.program_id(2), pl.program_id(3)
    q_tiles = tiles.grid(problem)[0]

    @pl.when((head == 0) & (q_tile == 0))
    def _():
        dk_acc[...] = jnp.zeros_like(dk_acc)
        dv_acc[...] = jnp.zeros_like(dv_acc)
        for kt in k_transposed:
            kt[...] = refs.k[...].T

    def accumulate(keys: int, limit: jax.Array | None) -> None:
        dq_parts = []
        for chunk in _chunks(keys, tiles.kv_compute):
            p, ds = _p_and_ds(refs, chunk, limit, problem, dot)
            dv_acc[chunk, :] += dot(p, refs.dout[...], NN)
            dk_acc[chunk, :] += dot(ds, refs.q[...], NN)
            dq_parts += [dot(kt[:, chunk], ds, NN) for kt in k_transposed]
        if refs.dq is not None:
            # where, not a product: what an untouched slot holds may be NaN.
            dq_parts.append(jnp.where(kv_tile < slots, 0.0, refs.dq[...]))
        if dq_ref is not None:
            dq_ref[...] = functools.reduce(jnp.add, dq_parts) if dq_parts else jnp.zeros_like(dq_ref)

    over_keys(accumulate, kv_tile, tiles, problem, refs.kv_len)

    @pl.when((head == problem.group - 1) & (q_tile == q_tiles - 1))
    def _():
        dk_ref[...] = (dk_acc[...] * problem.scale).astype(dk_ref.dtype)
        dv_ref[...] = dv_acc[...].astype(dv_ref.dtype)


def _dq_kernel(refs: _Inputs, dq_ref, acc_ref, *, tiles: Tiles, problem: Problem):
    dot = matmul(problem.dtype)
    kv_tile, last = pl.program_id(3), tiles.grid(problem)[1] - 1

    @pl.when(kv_tile == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def accumulate(keys: int, limit: jax.Array | None) -> None:
        for chunk in _chunks(keys, tiles.kv_compute):
            _, ds = _p_and_ds(refs, chunk, limit, problem, dot)
            acc_ref[...] += dot(refs.k[chunk, :].T, ds, NN)

    over_keys(accumulate, kv_tile, tiles, problem, refs.kv_len)

    @pl.when(kv_tile == last)
    def _():
        dq_ref[...] = (acc_ref[...].T * problem.scale).astype(dq_ref.dtype)


class Operands(NamedTuple):
    """What the backward pass reads, for the valid tokens only.

    Attributes:
        q: [H, S, D].
        dout: [H, S, D_v].
        lse: [H, 1, S], fp32, base 2; +1e30 for queries without any key, which makes P zero there.
        delta: [H, 1, S], fp32.
        k, v: [H_kv, T, D], [H_kv, T, D_v].
        segment_ids: [S], [T], or None.
        kv_len: [1], int32: how many of the T keys exist; those behind are zero. None: all.
    """

    q: jax.Array
    dout: jax.Array
    lse: jax.Array
    delta: jax.Array
    k: jax.Array
    v: jax.Array
    segment_ids: SegmentIds | None = None
    kv_len: jax.Array | None = None

    def padded(self, tiles: Tiles) -> Operands:
        """The same in whole tiles. A query that does not exist has P = 2^(0 - 1e30) = 0 and adds zero everywhere."""
        ids = self.segment_ids
        return Operands(
            q=pad_to(self.q, tiles.q, axis=1),
            dout=pad_to(self.dout, tiles.q, axis=1),
            lse=pad_to(self.lse, tiles.q, axis=2, value=-NOTHING),
            delta=pad_to(self.delta, tiles.q, axis=2),
            k=pad_to(self.k, tiles.kv, axis=1),
            v=pad_to(self.v, tiles.kv, axis=1),
            segment_ids=ids and SegmentIds(pad_to(ids.q, tiles.q, axis=0), pad_to(ids.kv, tiles.kv, axis=0)),
            kv_len=self.kv_len,
        )


def _kernel_inputs(x: Operands, tiles: Tiles, query, key) -> tuple[_Inputs, _Inputs]:
    """The kernel's operands and their block specs. ``query`` and ``key`` map a grid point to (head, tile)."""
    d, dv = x.q.shape[-1], x.v.shape[-1]

    def rows(index):
        return lambda *point: (*index(*point), 0)

    row = pl.BlockSpec((None, 1, tiles.q), lambda *point: (query(*point)[0], 0, query(*point)[1]))
    inputs = _Inputs(x.q, x.dout, x.lse, x.delta, x.k, x.v)
    specs = _Inputs(
        pl.BlockSpec((None, tiles.q, d), rows(query)),
        pl.BlockSpec((None, tiles.q, dv), rows(query)),
        row,
        row,
        pl.BlockSpec((None, tiles.kv, d), rows(key)),
        pl.BlockSpec((None, tiles.kv, dv), rows(key)),
    )
    if x.segment_ids is not None:
        kv_ids = x.segment_ids.kv
        kv_ids = jnp.broadcast_to(kv_ids[:, None], (*kv_ids.shape, NUM_LANES))
        inputs = inputs._replace(q_ids=x.segment_ids.q[None, :], kv_ids=kv_ids)
        specs = specs._replace(
            q_ids=pl.BlockSpec((1, tiles.q), lambda *point: (0, query(*point)[1])),
            kv_ids=pl.BlockSpec((tiles.kv, NUM_LANES), lambda *point: (key(*point)[1], 0)),
        )
    if x.kv_len is not None:
        inputs = inputs._replace(kv_len=x.kv_len)
        specs = specs._replace(kv_len=pl.BlockSpec(memory_space=pltpu.SMEM))
    return inputs, specs


def _kv_gradients(x: Operands, *, problem: Problem, tiles: Tiles, slots: int, kv_dtype: Any, interpret: Interpret):
    """dk and dv, and with ``slots`` > 0 the slots of dq^T [slots, H, D, S'], fp32 (else None)."""
    group = problem.group
    q_tiles, kv_tiles = tiles.grid(problem)
    heads, q_len, d = x.q.shape
    dv = x.v.shape[-1]

    def query(h, j, g, i):
        return h * group + g, i

    def key(h, j, g, i):
        return h, j

    inputs, specs = _kernel_inputs(x, tiles, query, key)
    dq_shape: Any = None
    dq_spec = None
    aliases = {}
    scratch = [pltpu.VMEM((tiles.kv, d), jnp.float32), pltpu.VMEM((tiles.kv, dv), jnp.float32)]
    if slots:
        dq_shape = jax.ShapeDtypeStruct((slots, heads, d, q_len), jnp.float32)
        dq_spec = pl.BlockSpec((None, None, d, tiles.q), lambda h, j, g, i: (lax.rem(j, slots), h * group + g, 0, i))
        scratch.append(pltpu.VMEM((d, tiles.kv), x.k.dtype))
    if slots and slots < kv_tiles:  # with a slot for every kv tile nothing is read back
        specs = specs._replace(dq=dq_spec)
        inputs = inputs._replace(dq=lax.empty(dq_shape.shape, dq_shape.dtype))
        aliases = {len(jax.tree.leaves(inputs)) - 1: 0}

    return launch(
        functools.partial(_kv_kernel, tiles=tiles, problem=problem, slots=slots),
        (inputs,),
        name="splash_backward" if slots else "splash_backward_dkv",
        grid=(problem.num_kv_heads, kv_tiles, group, q_tiles),
        # Key/value heads share nothing. The kv dimension is sequential: slots are reused along it.
        semantics=("parallel", "arbitrary", "arbitrary", "arbitrary"),
        in_specs=(specs,),
        out_specs=Gradients(
            dq_spec,
            pl.BlockSpec((None, tiles.kv, d), lambda h, j, g, i: (h, j, 0)),
            pl.BlockSpec((None, tiles.kv, dv), lambda h, j, g, i: (h, j, 0)),
        ),
        out_shape=Gradients(
            dq_shape,
            jax.ShapeDtypeStruct(x.k.shape, kv_dtype),
            jax.ShapeDtypeStruct(x.v.shape, kv_dtype),
        ),
        scratch_shapes=scratch,
        input_output_aliases=aliases,
        cost_estimate=cost(problem, tiles, 3 if slots else 2),
        interpret=interpret,
    )


def _query_gradients(x: Operands, *, problem: Problem, tiles: Tiles, q_dtype: Any, interpret: Interpret) -> jax.Array:
    """dq of the unfused backward."""
    group = problem.group
    q_tiles, kv_tiles = tiles.grid(problem)
    d = x.q.shape[-1]

    def query(h, g, i, j):
        return h * group + g, i

    def key(h, g, i, j):
        return h, j

    inputs, specs = _kernel_inputs(x, tiles, query, key)
    return launch(
        functools.partial(_dq_kernel, tiles=tiles, problem=problem),
        (inputs,),
        name="splash_backward_dq",
        grid=(problem.num_kv_heads, group, q_tiles, kv_tiles),
        semantics=("parallel", "parallel", "parallel", "arbitrary"),
        in_specs=(specs,),
        out_specs=specs.q,
        out_shape=jax.ShapeDtypeStruct(x.q.shape, q_dtype),
        scratch_shapes=[pltpu.VMEM((d, tiles.q), jnp.float32)],
        cost_estimate=cost(problem, tiles, 2),
        interpret=interpret,
    )


def backward(
    x: Operands,
    *,
    problem: Problem,
    sizes: BlockSizes,
    fused: bool,
    dq_reduction_steps: int | None,
    dtypes: Gradients,
    interpret: Interpret,
) -> Gradients:
    """Gradients of the valid tokens.

    Args:
        fused: one kernel for all three, or one for dk, dv and one for dq.
        dq_reduction_steps: slots of the fused kernel's dq buffer; None for one per key tile.
        dtypes: of the three results.
    """
    tiles = sizes.dkv
    kv_tiles = tiles.grid(problem)[1]
    slots = min(dq_reduction_steps or kv_tiles, kv_tiles) if fused else 0
    options: dict[str, Any] = {"problem": problem, "interpret": interpret}
    grads = _kv_gradients(x.padded(tiles), tiles=tiles, slots=slots, kv_dtype=dtypes.k, **options)
    if fused:
        dq = (grads.q.sum(axis=0) * problem.scale).swapaxes(1, 2).astype(dtypes.q)
    else:
        dq = _query_gradients(x.padded(sizes.dq), tiles=sizes.dq, q_dtype=dtypes.q, **options)
    return Gradients(dq[:, : problem.valid_q], grads.k[:, : problem.valid_kv], grads.v[:, : problem.valid_kv])
