"""The forward kernel: one program per block of queries, online softmax over blocks of keys.

    u = cap(cast(scale * q k^T) + bias)      s = u where allowed, else -inf
    m = max(sink, max_j s)      l = exp(sink - m) + sum_j exp(s - m)      out = sum_j keep * exp(s - m) v / l

A row without an allowed key has m = -inf (without a sink), l = 0 and an output of 0.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from cudnn_dsa_pallas_triton.config import KernelConfig
from cudnn_dsa_pallas_triton.contracts import Problem
from cudnn_dsa_pallas_triton.lowering import call, dot, ds, exp2, load, loop, program_id, store
from cudnn_dsa_pallas_triton.operands import lead_index
from cudnn_dsa_pallas_triton.tile import LOG2E, NEG_INF, Tile, clean, is_finite
from cudnn_dsa_pallas_triton.visibility import Ranges, query_major


def forward(
    problem: Problem,
    config: KernelConfig,
    operands: dict[str, jax.Array],
    finite: jax.Array | None,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(out [N, T, H, d], m [N, H, T] fp32, l [N, H, T] fp32); ``finite`` is ``all_finite`` of q, k and v."""
    tile = make_tile(problem, config, operands)
    ranges = query_major(problem, operands, tile.block_q, tile.block_k, finite)
    n, t, h = problem.batch_size, problem.q_len, problem.q_heads
    residual = jax.ShapeDtypeStruct((n, h, t), jnp.float32)
    out = call(
        lambda refs, outs: _kernel(tile, ranges, refs, outs),
        name="attention_forward",
        grid=(tile.q_blocks, h, n),
        inputs={**operands, **ranges.inputs()},
        outputs={
            "out": jax.ShapeDtypeStruct((n, t, h, problem.v_head_dim), jnp.dtype(problem.dtype)),
            "m": residual,
            "l": residual,
        },
        padded_last=tile.padded_last(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
    return out["out"], out["m"], out["l"]


def make_tile(
    problem: Problem, config: KernelConfig, operands: dict[str, jax.Array], *, transposed: bool = False
) -> Tile:
    """The tile description of a kernel with these operands."""
    key_mask = "mask" in operands and operands["mask"].shape[-2] == 1
    return Tile(problem, config.block_q, config.block_k, config.head_chunk, transposed, key_mask)


def visit(tile: Tile, ranges: Ranges, refs: dict[str, Any], n: Any, h: Any, own: Any, body: Any, carry: Any) -> Any:
    """``body(masked, cleans)(block, carry)`` over the blocks that block ``own`` visits, in ascending order."""
    index = (*lead_index(refs["bounds"], 2, n, h, tile.problem), own)
    for run in ranges.runs:
        step = body(run.masked, run.cleans)

        def at_place(place: Any, carry: Any, step: Any = step) -> Any:
            return step(load(refs["order"], (*index, place)), carry)

        first, last = (load(refs["bounds"], (*index, bound)) for bound in (run.first, run.last))
        carry = loop(first, last, step if ranges.order is None else at_place, carry)
    return carry


def _kernel(tile: Tile, ranges: Ranges, refs: dict[str, Any], outs: dict[str, Any]) -> None:
    problem = tile.problem
    # The last block has the most keys under causality: start it first, so that no long program is left at the end.
    i = tile.q_blocks - 1 - program_id(0)
    h, n = program_id(1), program_id(2)
    qs = tile.q_side(refs, n, h, i * tile.block_q)
    q = [tile.q_rows(refs["q"], n, h, qs, c) for c in tile.qk_chunks]

    # The running maximum is in the units of ``logits``.
    factor = tile.unit * LOG2E

    def body(masked: bool, cleans: bool) -> Any:
        def step(j: Any, carry: Any) -> Any:
            m, l, acc = carry
            ks = tile.k_side(refs, n, h, j * tile.block_k, masked=masked)
            pairs = tile.pairs(refs, n, h, qs, ks)
            raw = tile.dot_tile(q, [tile.k_rows(refs["k"], n, h, ks, c) for c in tile.qk_chunks])
            v = [tile.k_rows(refs["v"], n, h, ks, c) for c in tile.v_chunks]
            if cleans:
                # A row that does attend a key with a non-finite value is NaN as a whole, through its logit.
                for part in v:
                    poison = jnp.sum(jnp.where(is_finite(part), jnp.float32(0), jnp.float32(jnp.nan)), axis=1)
                    raw = raw + poison[None, :]
                v = [clean(part) for part in v]
            s, _ = tile.logits(raw, pairs)
            allowed = tile.allowed(pairs, qs, ks, cleans) if masked else None
            if allowed is not None:
                s = jnp.where(allowed, s, jnp.float32(NEG_INF))
            m_new = jnp.maximum(m, jnp.max(s, axis=1))
            # Nothing seen yet: subtract 0, so that exp(-inf - 0) is 0 instead of exp(-inf + inf).
            shift = jnp.where(m_new == NEG_INF, 0.0, m_new)
            if tile.is_wide:
                alpha, p = exp2((m - shift) * factor), exp2((s - shift[:, None]) * factor)
            else:
                alpha, p = exp2((m - shift) * factor), exp2(s * factor - (shift * factor)[:, None])
            l = l * alpha + jnp.sum(p, axis=1)
            keep = tile.keep(pairs)
            p = (p if keep is None else p * keep).astype(v[0].dtype)
            acc = [a * alpha[:, None] + dot(p, part, problem.precision) for a, part in zip(acc, v, strict=True)]
            return m_new, l, acc

        return step

    if "attn_sink" in refs:
        sink = load(refs["attn_sink"], (h,)).astype(jnp.float32)
        m = jnp.full((tile.block_q,), 1.0 / tile.unit, jnp.float32) * sink
        l = jnp.where(m > NEG_INF, jnp.float32(1.0), jnp.float32(0.0))
    else:
        m = jnp.full((tile.block_q,), NEG_INF, jnp.float32)
        l = jnp.zeros((tile.block_q,), jnp.float32)
    acc = [jnp.zeros((tile.block_q, c.size), jnp.float32) for c in tile.v_chunks]
    m, l, acc = visit(tile, ranges, refs, n, h, i, body, (m, l, acc))

    exists = qs["exists"]
    store(outs["m"], (n, h, ds(qs["start"], tile.block_q)), m * tile.unit, exists)
    store(outs["l"], (n, h, ds(qs["start"], tile.block_q)), l, exists)
    scale = 1.0 / jnp.where(l == 0.0, 1.0, l) if problem.normalize else None
    for a, chunk in zip(acc, tile.v_chunks, strict=True):
        store_rows(outs["out"], n, h, qs["start"], a if scale is None else a * scale[:, None], chunk, exists)


def store_rows(ref: Any, n: Any, h: Any, start: Any, x: jax.Array, chunk: Any, exists: Any) -> None:
    """Write one chunk of rows of [N, length, heads, dim]; rows that do not exist and padding are left alone."""
    mask = None if exists is None else exists[:, None]
    if chunk.is_partial:
        inside = (chunk.start + jnp.arange(chunk.size, dtype=jnp.int32) < chunk.dim)[None, :]
        mask = inside if mask is None else mask & inside
    store(ref, (n, ds(start, x.shape[0]), h, ds(chunk.start, chunk.size)), x, mask)
