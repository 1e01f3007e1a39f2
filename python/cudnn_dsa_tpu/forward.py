"""The forward kernel: softmax(q k^T) v in base 2, with a running maximum or with a fixed one.

    S = scale log2(e) q k^T
    m = max(m, rowmax S)          P = 2^(S - m)
    l = 2^(m_old - m) l + P 1     acc = 2^(m_old - m) acc + P v
    out = acc / l                 lse2 = m + log2 l

Grid (kv head, head of the group, q tile, kv tile), the last sequential. Queries lie on sublanes, keys on lanes. The row
sum l is kept as 128 partial sums, one a lane, and added up across lanes once per query tile: a reduction across lanes
in every step is what makes this kernel slow otherwise.

With a fixed m (``fixed_m.py`` says when that is exact) nothing is rescaled, and the body works on the transpose: keys
on sublanes, queries on lanes. Results leave the matrix unit one register a bundle, and that bounds the body once the
vector units have less to do. The unit multiplies by 256 columns at a time: P v has D_v = 128 of them and wastes the
other half, v^T P^T fills them, so results are three quarters as many. (The running maximum does not gain by this:
transposed, its body needs a quarter more bundles.)
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from cudnn_dsa_tpu.block_sizes import NUM_LANES, NUM_SUBLANES, Tiles
from cudnn_dsa_tpu.contracts import Problem, SegmentIds, check_metadata
from cudnn_dsa_tpu.launch import MASKED, NN, NOTHING, NT, TN, Interpret, cost, launch, matmul


class _Inputs(NamedTuple):
    """Operands, their block specs, or their references in the kernel."""

    q: Any  # (tile q, D)
    k: Any  # (tile kv, D)
    v: Any  # (tile kv, D_v)
    q_ids: Any = None  # (tile q, 128): a query's segment id on every lane
    kv_ids: Any = None  # (1, tile kv)
    sink: Any = None  # (1, 128): the head's sink in base 2, on every lane
    kv_len: Any = None  # (1,), scalar memory: how many keys exist, where only the device knows
    metadata: Any = None  # (2, H, q tiles), scalar memory: m, then whether it may be used
    k_mean: Any = None  # (8, D): the head's mean key on every sublane, fp32


class FixedOperands(NamedTuple):
    """What a launch with a fixed m reads besides q, k and v.

    Attributes:
        metadata: [2, H, q tiles], fp32: m of a head's query tile, then 1 if it may be used there, else 0.
        k_mean: [H_kv, D], fp32: the logits are those of keys minus this; None for the keys as they are.
    """

    metadata: jax.Array
    k_mean: jax.Array | None


class Launch(enum.Enum):
    """Which bodies a launch holds."""

    ONLINE = "online"  # the running maximum
    HYBRID = "hybrid"  # a fixed m where the metadata allows it, the running maximum elsewhere
    UNIFORM = "uniform"  # a fixed m everywhere, on the caller's word that the metadata allows it everywhere
    UNIFORM_SUMS = "uniform sums"  # likewise; returns acc, m and l instead of out and lse: sums of calls can be added

    @property
    def online(self) -> bool:
        return self in (Launch.ONLINE, Launch.HYBRID)

    @property
    def fixed(self) -> bool:
        return self is not Launch.ONLINE


class _Online(NamedTuple):
    """Scratch of the running maximum."""

    m: Any  # (tile q, 128), the same on every lane
    l: Any  # (tile q, 128), partial sums
    acc: Any  # (tile q, D_v)


class _Fixed(NamedTuple):
    """Scratch of the fixed m, transposed."""

    m: Any  # (1, tile q): m, and with centering the mean logit of the query
    l: Any  # (8, tile q), partial sums
    acc: Any  # (D_v, tile q)


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


def _sublane_sums(p: jax.Array) -> jax.Array:
    """(8, width): numbers whose column sums are those of ``p``."""
    whole = p.shape[0] // NUM_SUBLANES * NUM_SUBLANES
    parts = [p[:whole].reshape(-1, NUM_SUBLANES, p.shape[1]).sum(axis=0)] if whole else []
    if whole < p.shape[0]:
        parts.append(jnp.pad(p[whole:], ((0, NUM_SUBLANES - p.shape[0] + whole), (0, 0))))
    return functools.reduce(jnp.add, parts)


def _kernel(refs: _Inputs, out_ref, lse_ref, online: _Online, fixed: _Fixed, *, tiles: Tiles, problem, which: Launch):
    dot = matmul(problem.dtype)
    head, q_tile = pl.program_id(0) * problem.group + pl.program_id(1), pl.program_id(2)
    kv_tile, last = pl.program_id(3), tiles.grid(problem)[1] - 1

    def metadata(row: int) -> jax.Array:
        return refs.metadata[row, head, q_tile]

    @pl.when(kv_tile == 0)
    def _():
        if which.online:
            _start_online(online, refs.sink)
        if which.fixed:
            _start_fixed(fixed, refs, metadata(0), problem)

    def attend(keys: int, limit: jax.Array | None) -> None:
        """Attend to the first ``keys`` keys of the tile, of which ``limit`` exist."""
        m, l, acc = online.m[...], online.l[...], online.acc[...]
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
        online.m[...], online.l[...], online.acc[...] = m, l, acc

    def attend_fixed(keys: int, _: None) -> None:
        """The same with a fixed m. The tail is sliced: a key of zeros would not weigh nothing, it would weigh 2^-m. All
        of the tile at once, for there is no state that one part of it hands on to the next."""
        s = dot(refs.k[:keys, :], refs.q[...], NT) * problem.scale_log2e
        p = jnp.exp2(s - fixed.m[...])
        fixed.l[...] += _sublane_sums(p)
        v = refs.v[:keys, :]
        fixed.acc[...] += dot(v, p.astype(v.dtype), TN)

    if which is not Launch.HYBRID:
        over_keys(attend if which.online else attend_fixed, kv_tile, tiles, problem, refs.kv_len)
    elif last == 0:
        over_keys(attend, kv_tile, tiles, problem, refs.kv_len)
    else:
        # Two bodies, but never in the last block. With a fixed and an online body in it, next to the ragged tail and
        # the final division, Mosaic's code for the whole grid ran about three times slower on hardware, not only in
        # that block. So the last block of a hybrid launch knows the running maximum only, and what a fixed m has summed
        # up until then becomes a state of it, whose maximum need not be attained. (A uniform launch keeps its one body
        # to the end.)
        eligible = metadata(1) > 0
        pl.when(eligible & (kv_tile < last))(lambda: attend_fixed(tiles.kv, None))
        pl.when(eligible & (kv_tile == last))(lambda: _hand_over(fixed, online))
        pl.when(jnp.logical_not(eligible) | (kv_tile == last))(
            lambda: over_keys(attend, kv_tile, tiles, problem, refs.kv_len)
        )

    @pl.when(kv_tile == last)
    def _():
        if which.online:
            total = online.l[...].sum(axis=1, keepdims=True)
            empty = total == 0  # no key with the query's segment id
            out_ref[...] = (online.acc[...] * jnp.where(empty, 0.0, 1 / total)).astype(out_ref.dtype)
            lse = jnp.where(empty, -jnp.inf, online.m[...] + jnp.log2(total))
            lse_ref[...] = lse.T[:1]
            return
        total = fixed.l[...].sum(axis=0, keepdims=True)
        if which is Launch.UNIFORM:
            out_ref[...] = (fixed.acc[...] / total).T.astype(out_ref.dtype)
            lse_ref[...] = fixed.m[...] + jnp.log2(total)
        else:
            out_ref[...] = fixed.acc[...].T
            lse_ref[...] = jnp.concatenate([fixed.m[...], total])


def _start_online(state: _Online, sink) -> None:
    if sink is None:
        state.m[...] = jnp.full_like(state.m, NOTHING)
        state.l[...] = jnp.zeros_like(state.l)
    else:  # a key with logit `sink` and value zero
        state.m[...] = jnp.broadcast_to(sink[...], state.m.shape)
        state.l[...] = jnp.full_like(state.l, 1 / NUM_LANES)
    state.acc[...] = jnp.zeros_like(state.acc)


def _start_fixed(state: _Fixed, refs: _Inputs, m: jax.Array, problem: Problem) -> None:
    """With ``k_mean`` the keys are centered (k-smoothing: Zhang et al. 2024, SageAttention, arXiv:2410.02367, section
    4.2). A query's logits all move by q k_mean, so no weight changes; but keys with an offset in common become shorter,
    and with them the bound that decides whether a fixed m may be used. Virtually: the keys stay as they are and m moves
    by the mean logit, in fp32. Centered keys would have to be written, and rounded."""
    if refs.k_mean is None:
        state.m[...] = jnp.full_like(state.m, m)
    else:
        mean = matmul("float32")(refs.k_mean[...], refs.q[...].astype(jnp.float32), NT)
        state.m[...] = m + mean[:1] * problem.scale_log2e
    state.l[...] = jnp.zeros_like(state.l)
    state.acc[...] = jnp.zeros_like(state.acc)


def _hand_over(fixed: _Fixed, online: _Online) -> None:
    """What was summed up with a fixed m, as a state of the running maximum."""
    online.m[...] = jnp.broadcast_to(fixed.m[...], (NUM_LANES, fixed.m.shape[1])).T
    rest = jnp.zeros((NUM_LANES - NUM_SUBLANES, fixed.l.shape[1]), jnp.float32)
    online.l[...] = jnp.concatenate([fixed.l[...], rest]).T
    online.acc[...] = fixed.acc[...].T


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
    fixed: FixedOperands | None = None,
    *,
    problem: Problem,
    tiles: Tiles,
    which: Launch = Launch.ONLINE,
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
        fixed: for a launch with a fixed m, which takes no segment ids, sink and kv_len.
        which: the bodies of the launch.
        out_dtype: of the first result.

    Returns:
        out [H, S', D_v] and the base-2 logarithm of the softmax denominator [H, 1, S'], fp32; a query without any key
        gets zeros and -inf. UNIFORM_SUMS: acc [H, S', D_v] and [H, 2, S'], fp32: m and l.
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

    online_scratch = fixed_scratch = None
    if which.online:
        column = pltpu.VMEM((tiles.q, NUM_LANES), jnp.float32)
        online_scratch = _Online(column, column, pltpu.VMEM((tiles.q, dv), jnp.float32))
    if fixed is not None:
        check_metadata(fixed.metadata, heads, q_tiles)
        inputs = inputs._replace(metadata=fixed.metadata)
        specs = specs._replace(metadata=pl.BlockSpec(memory_space=pltpu.SMEM))
        if fixed.k_mean is not None:
            k_mean = jnp.broadcast_to(fixed.k_mean[:, None, :], (problem.num_kv_heads, NUM_SUBLANES, d))
            inputs = inputs._replace(k_mean=k_mean)
            specs = specs._replace(k_mean=pl.BlockSpec((None, NUM_SUBLANES, d), lambda h, g, i, j: (h, 0, 0)))
        fixed_scratch = _Fixed(*(pltpu.VMEM((rows, tiles.q), jnp.float32) for rows in (1, NUM_SUBLANES, dv)))
    rows = 2 if which is Launch.UNIFORM_SUMS else 1

    return launch(
        functools.partial(_kernel, tiles=tiles, problem=problem, which=which),
        (inputs,),
        name="splash_forward",
        grid=(problem.num_kv_heads, group, q_tiles, kv_tiles),
        semantics=("parallel", "parallel", "parallel", "arbitrary"),
        in_specs=(specs,),
        out_specs=(
            pl.BlockSpec((None, tiles.q, dv), query),
            pl.BlockSpec((None, rows, tiles.q), lambda h, g, i, j: (h * group + g, 0, i)),
        ),
        out_shape=(
            jax.ShapeDtypeStruct((heads, q_len, dv), out_dtype),
            jax.ShapeDtypeStruct((heads, rows, q_len), jnp.float32),
        ),
        scratch_shapes=(online_scratch, fixed_scratch),
        cost_estimate=cost(problem, tiles, 1),
        interpret=interpret,
    )
