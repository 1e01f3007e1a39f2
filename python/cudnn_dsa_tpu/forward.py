"""The forward kernel: softmax(q k^T) v with a running maximum, in base 2.

    S = scale log2(e) q k^T
    m = max(m, rowmax S)          P = 2^(S - m)
    l = 2^(m_old - m) l + P 1     acc = 2^(m_old - m) acc + P v
    out = acc / l                 lse2 = m + log2 l

Grid (kv head, head of the group, q tile, kv tile), the last sequential. Queries lie on sublanes, keys on lanes. The row
sum l is kept as 128 partial sums, one a lane, and added up across lanes once per query tile: a reduction across lanes
in every step is what makes this kernel slow otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from cudnn_dsa_tpu.block_sizes import NUM_LANES, Tiles
from cudnn_dsa_tpu.contracts import Problem, SegmentIds
from cudnn_dsa_tpu.launch import MASKED, NN, NOTHING, NT, Interpret, cost, launch, matmul


class _Inputs(NamedTuple):
    """Operands, their block specs, or their references in the kernel."""

    q: Any  # (tile q, D)
    k: Any  # (tile kv, D)
    v: Any  # (tile kv, D_v)
    q_ids: Any = None  # (tile q, 128): a query's segment id on every lane
    kv_ids: Any = None  # (1, tile kv)
    sink: Any = None  # (1, 128): the head's sink in base 2, on every lane
    kv_len: Any = None  # (1,), scalar memory: how many keys exist, where only the device knows


def lanes(x: jax.Array, width: int) -> jax.Array:
    """A value that is the same on all 128 lanes, widened or narrowed to ``width`` lanes."""
    return jnp.tile(x, (1, pl.cdiv(width, NUM_LANES)))[:, :width]


def _lane_sums(p: jax.Array) -> jax.Array:
    """128 numbers a row whose sum is the row sum of ``p``; columns beyond the last whole 128 are spread evenly (a
    division by 128 is exact)."""
    whole = p.shape[1] // NUM_LANES * NUM_LANES
    parts = [p[:, c : c + NUM_LANES] for c in range(0, whole, NUM_LANES)]
    if whole < p.shape[1]:
        rest = p[:, whole:].sum(axis=1, keepdims=True) * (1 / NUM_LANES)
        parts.append(jnp.broadcast_to(rest, (p.shape[0], NUM_LANES)))
    return functools.reduce(jnp.add, parts)


def _kernel(refs: _Inputs, out_ref, lse_ref, m_ref, l_ref, acc_ref, *, tiles: Tiles, problem: Problem):
    dot = matmul(problem.dtype)
    kv_tile = pl.program_id(3)

    @pl.when(kv_tile == 0)
    def _():
        if refs.sink is None:
            m_ref[...] = jnp.full_like(m_ref, NOTHING)
            l_ref[...] = jnp.zeros_like(l_ref)
        else:  # a key with logit `sink` and value zero
            m_ref[...] = jnp.broadcast_to(refs.sink[...], m_ref.shape)
            l_ref[...] = jnp.full_like(l_ref, 1 / NUM_LANES)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def attend(keys: int, limit: jax.Array | None) -> None:
        """Attend to the first ``keys`` keys of the tile, of which ``limit`` exist."""
        m, l, acc = m_ref[...], l_ref[...], acc_ref[...]
        for start in range(0, keys, tiles.kv_compute):
            chunk = slice(start, min(start + tiles.kv_compute, keys))
            width = chunk.stop - chunk.start
            s = dot(refs.q[...], refs.k[chunk, :], NT) * problem.scale_log2e
            if refs.q_ids is not None:
                s = jnp.where(lanes(refs.q_ids[...], width) == refs.kv_ids[:, chunk], s, MASKED)
            if limit is not None:
                s = jnp.where(start + lax.broadcasted_iota(jnp.int32, s.shape, 1) < limit, s, MASKED)
            m_new = jnp.maximum(m, s.max(axis=1, keepdims=True))
            alpha = jnp.exp2(m - m_new)
            p = jnp.exp2(s - lanes(m_new, width))
            l = alpha * l + _lane_sums(p)
            v = refs.v[chunk, :]
            acc = lanes(alpha, acc.shape[1]) * acc + dot(p.astype(v.dtype), v, NN)
            m = m_new
        m_ref[...], l_ref[...], acc_ref[...] = m, l, acc

    over_keys(attend, kv_tile, tiles, problem, refs.kv_len)

    @pl.when(kv_tile == tiles.grid(problem)[1] - 1)
    def _():
        total = l_ref[...].sum(axis=1, keepdims=True)
        empty = total == 0  # no key with the query's segment id
        out_ref[...] = (acc_ref[...] * jnp.where(empty, 0.0, 1 / total)).astype(out_ref.dtype)
        lse = jnp.where(empty, -jnp.inf, m_ref[...] + jnp.log2(total))
        lse_ref[...] = lse.T[:1]


def over_keys(body: Callable[..., None], kv_tile, tiles: Tiles, problem: Problem, kv_len) -> None:
    """Run ``body(keys, limit)`` on a key tile: its first ``keys`` keys, of which ``limit`` exist (None: all).

    Without ``kv_len`` the last tile is sliced to its length, statically: what lies behind is never read, nothing is
    masked, and one branch does where one is enough. With it, only the tile that the length falls into is masked; a tile
    behind it runs the body with no keys, which still passes on what the tile's step has to write.
    """
    if kv_len is not None:
        exist = kv_len[0] - kv_tile * tiles.kv
        pl.when(exist >= tiles.kv)(lambda: body(tiles.kv, None))
        pl.when((exist > 0) & (exist < tiles.kv))(lambda: body(tiles.kv, exist))
        pl.when(exist <= 0)(lambda: body(0, None))
        return
    tail, last = tiles.kv_tail(problem), tiles.grid(problem)[1] - 1
    if tail == tiles.kv or last == 0:
        body(tail, None)
        return
    pl.when(kv_tile < last)(lambda: body(tiles.kv, None))
    pl.when(kv_tile == last)(lambda: body(tail, None))


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: SegmentIds | None,
    sink: jax.Array | None,
    kv_len: jax.Array | None = None,
    *,
    problem: Problem,
    tiles: Tiles,
    out_dtype: Any,
    interpret: Interpret,
) -> tuple[jax.Array, jax.Array]:
    """Attention of padded operands.

    Args:
        q: [H, S', D]; S' a multiple of ``tiles.q`` that covers ``problem.valid_q``.
        k, v: [H_kv, T', D], [H_kv, T', D_v]; T' likewise for ``tiles.kv``.
        segment_ids: int32, [S'] and [T'].
        sink: [H], fp32, times log2(e).
        kv_len: [1], int32: how many of ``problem.valid_kv`` keys exist; those behind are zero. None: all.
        out_dtype: of the first result.

    Returns:
        out [H, S', D_v] and the base-2 logarithm of the softmax denominator [H, 1, S'], fp32; a query without any key
        gets zeros and -inf.
    """
    heads, q_len, d = q.shape
    dv = v.shape[-1]
    group = problem.group
    q_tiles, kv_tiles = tiles.grid(problem)

    def query(h, g, i, j):
        return h * group + g, i, 0

    def key(h, g, i, j):
        return h, j, 0

    inputs = _Inputs(q, k, v)
    specs = _Inputs(
        pl.BlockSpec((None, tiles.q, d), query),
        pl.BlockSpec((None, tiles.kv, d), key),
        pl.BlockSpec((None, tiles.kv, dv), key),
    )
    if segment_ids is not None:
        q_ids = jnp.broadcast_to(segment_ids.q[:, None], (q_len, NUM_LANES))
        inputs = inputs._replace(q_ids=q_ids, kv_ids=segment_ids.kv[None, :])
        specs = specs._replace(
            q_ids=pl.BlockSpec((tiles.q, NUM_LANES), lambda h, g, i, j: (i, 0)),
            kv_ids=pl.BlockSpec((1, tiles.kv), lambda h, g, i, j: (0, j)),
        )
    if sink is not None:
        inputs = inputs._replace(sink=jnp.broadcast_to(sink[:, None, None], (heads, 1, NUM_LANES)))
        specs = specs._replace(sink=pl.BlockSpec((None, 1, NUM_LANES), lambda h, g, i, j: (h * group + g, 0, 0)))

    if kv_len is not None:
        inputs = inputs._replace(kv_len=kv_len)
        specs = specs._replace(kv_len=pl.BlockSpec(memory_space=pltpu.SMEM))

    return launch(
        functools.partial(_kernel, tiles=tiles, problem=problem),
        (inputs,),
        name="splash_forward",
        grid=(problem.num_kv_heads, group, q_tiles, kv_tiles),
        semantics=("parallel", "parallel", "parallel", "arbitrary"),
        in_specs=(specs,),
        out_specs=(
            pl.BlockSpec((None, tiles.q, dv), query),
            pl.BlockSpec((None, 1, tiles.q), lambda h, g, i, j: (h * group + g, 0, i)),
        ),
        out_shape=(
            jax.ShapeDtypeStruct((heads, q_len, dv), out_dtype),
            jax.ShapeDtypeStruct((heads, 1, q_len), jnp.float32),
        ),
        scratch_shapes=(
            pltpu.VMEM((tiles.q, NUM_LANES), jnp.float32),
            pltpu.VMEM((tiles.q, NUM_LANES), jnp.float32),
            pltpu.VMEM((tiles.q, dv), jnp.float32),
        ),
        cost_estimate=cost(problem, tiles, 1),
        interpret=interpret,
    )
