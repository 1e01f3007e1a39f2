"""The backward kernels of q, k and v.

With p = exp(s - m) / l (un-normalised: exp(s - m)), dp = dout v^T and g the dropout factor (0 or 1 / (1 - rate)):

    ds = p * (g * dp - delta) * cap'         cap' = 1 - tanh(u / c)^2, taken before masking
    delta = sum_d dout * out - dl * l        un-normalised: delta = -dl
    dq = scale * ds k        dk = scale * ds^T q        dv = (g * p)^T dout
    dsink = -sum delta * exp(sink - m) / l

Each kernel recomputes p as exp2((s - m) * log2(e) - log2(l)) (un-normalised: without log2(l)). Every sum has a fixed
order and there are no atomics, so a second run gives the same bits.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from cudnn_dsa_pallas_triton.config import KernelConfig
from cudnn_dsa_pallas_triton.contracts import Problem
from cudnn_dsa_pallas_triton.forward import make_tile, store_rows, visit
from cudnn_dsa_pallas_triton.lowering import call, dot, ds, exp2, load, loop, program_id
from cudnn_dsa_pallas_triton.tile import LOG2E, NEG_INF, Tile, clean
from cudnn_dsa_pallas_triton.visibility import Ranges, key_major, query_major


def row_terms(
    problem: Problem, out: jax.Array | None, m: jax.Array, l: jax.Array, dout: jax.Array, dl: jax.Array
) -> dict[str, jax.Array]:
    """What the kernels read per row, each [N, H, T] fp32: shift (m), log2l, delta; lse2 = log2(e) * shift + log2l.

    ``out`` is not needed for un-normalised output. Rows without an allowed key get log2l = +inf, so that every p of
    theirs is 0, and shift = delta = 0. A row of ``dout`` with inf or NaN gets log2l = NaN, so that it shows in the
    gradients of exactly the keys that the row attends.
    """
    empty = l == 0.0
    if problem.normalize:
        assert out is not None
        products = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1).swapaxes(1, 2)
        delta = products - dl * l
        log2l = jnp.log2(jnp.where(empty, 1.0, l))
    else:
        products = jnp.sum(dout.astype(jnp.float32), axis=-1).swapaxes(1, 2)
        delta = -dl
        log2l = jnp.zeros_like(l)
    log2l = jnp.where(jnp.isfinite(products), log2l, jnp.nan)
    shift, log2l = jnp.where(empty, 0.0, m), jnp.where(empty, jnp.inf, log2l)
    return {"shift": shift, "log2l": log2l, "lse2": shift * LOG2E + log2l, "delta": jnp.where(empty, 0.0, delta)}


def kernel_terms(tile: Tile, operands: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """``operands`` without the row terms that ``gradient_tile`` does without."""
    unused = ("lse2",) if tile.is_wide else ("shift", "log2l")
    return {name: x for name, x in operands.items() if name not in unused}


def gradient_tile(
    tile: Tile, raw: jax.Array, dp: jax.Array, pairs: dict[str, Any], qs: Any, ks: Any, masked: bool, cleans: bool
) -> tuple[jax.Array, jax.Array]:
    """(g * p, ds) of one tile, fp32; ds is the gradient of the logits before the cap, after bias and scale."""
    s, t = tile.logits(raw, pairs)
    if tile.is_wide:
        exponent = (s - tile.along_q(qs["shift"])) * LOG2E - tile.along_q(qs["log2l"])
    else:
        exponent = s * (tile.unit * LOG2E) - tile.along_q(qs["lse2"])
    allowed = tile.allowed(pairs, qs, ks, cleans) if masked else None
    if allowed is not None:
        # Before the exponential: a masked logit may exceed the row maximum by any amount.
        exponent = jnp.where(allowed, exponent, jnp.float32(NEG_INF))
    p = exp2(exponent)
    keep = tile.keep(pairs)
    if keep is not None:
        dp = dp * keep
    grad = p * (dp - tile.along_q(qs["delta"]))
    if t is not None:
        grad = grad * (1.0 - t * t)
    if allowed is not None:
        grad = jnp.where(allowed, grad, jnp.float32(0.0))
    return (p if keep is None else p * keep), grad


def with_row_terms(tile: Tile, refs: dict[str, Any], n: Any, h: Any, qs: dict[str, Any]) -> dict[str, Any]:
    """``qs`` with the terms of ``row_terms``. Rows past the end get a normaliser of +inf: probabilities of 0."""
    index = (n, h, ds(qs["start"], tile.block_q))
    for name, other in (("shift", 0.0), ("log2l", float("inf")), ("lse2", float("inf")), ("delta", 0.0)):
        if name in refs:
            qs[name] = load(refs[name], index, qs["exists"], other)
    return qs


def query_gradient(
    problem: Problem,
    config: KernelConfig,
    operands: dict[str, jax.Array],
    finite: jax.Array | None,
    interpret: bool,
) -> jax.Array:
    """dq [N, T, H, D]: one program per block of queries, over blocks of keys.

    ``finite`` is ``all_finite`` of q, k, v and dout.
    """
    tile = make_tile(problem, config, operands)
    ranges = query_major(problem, operands, tile.block_q, tile.block_k, finite)
    shape = (problem.batch_size, problem.q_len, problem.q_heads, problem.head_dim)
    return call(
        lambda refs, outs: _dq_kernel(tile, ranges, refs, outs),
        name="attention_dq",
        grid=(tile.q_blocks, problem.q_heads, problem.batch_size),
        inputs={**kernel_terms(tile, operands), **ranges.inputs()},
        outputs={"dq": jax.ShapeDtypeStruct(shape, jnp.dtype(problem.dtype))},
        padded_last=tile.padded_last(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )["dq"]


def _dq_kernel(tile: Tile, ranges: Ranges, refs: dict[str, Any], outs: dict[str, Any]) -> None:
    problem = tile.problem
    i = tile.q_blocks - 1 - program_id(0)
    h, n = program_id(1), program_id(2)
    qs = with_row_terms(tile, refs, n, h, tile.q_side(refs, n, h, i * tile.block_q))
    q = [tile.q_rows(refs["q"], n, h, qs, c) for c in tile.qk_chunks]
    dout = [tile.q_rows(refs["dout"], n, h, qs, c) for c in tile.v_chunks]

    def body(masked: bool, cleans: bool) -> Any:
        def step(j: Any, acc: Any) -> Any:
            ks = tile.k_side(refs, n, h, j * tile.block_k, masked=masked)
            pairs = tile.pairs(refs, n, h, qs, ks)
            k = [tile.k_rows(refs["k"], n, h, ks, c) for c in tile.qk_chunks]
            v = [tile.k_rows(refs["v"], n, h, ks, c) for c in tile.v_chunks]
            raw, dp = tile.dot_tile(q, k), tile.dot_tile(dout, v)
            _, grad = gradient_tile(tile, raw, dp, pairs, qs, ks, masked, cleans)
            grad = grad.astype(k[0].dtype)
            if cleans:
                k = [clean(part) for part in k]
            return [a + dot(grad, part, problem.precision) for a, part in zip(acc, k, strict=True)]

        return step

    acc = [jnp.zeros((tile.block_q, c.size), jnp.float32) for c in tile.qk_chunks]
    acc = visit(tile, ranges, refs, n, h, i, body, acc)
    for a, chunk in zip(acc, tile.qk_chunks, strict=True):
        store_rows(outs["dq"], n, h, qs["start"], a * problem.scale, chunk, qs["exists"])


def key_value_gradient(
    problem: Problem,
    config: KernelConfig,
    operands: dict[str, jax.Array],
    finite: jax.Array | None,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """(dk [N, t, h, D], dv [N, t, h, d]): one program per block of keys, over its query heads and blocks of queries.

    ``finite`` is ``all_finite`` of q, k, v and dout.
    """
    tile = make_tile(problem, config, operands, transposed=True)
    ranges = key_major(problem, operands, tile.block_q, tile.block_k, finite)
    shape = (problem.batch_size, problem.kv_len, problem.kv_heads)
    dtype = jnp.dtype(problem.dtype)
    out = call(
        lambda refs, outs: _dkv_kernel(tile, ranges, refs, outs),
        name="attention_dkv",
        grid=(tile.k_blocks, problem.kv_heads, problem.batch_size),
        inputs={**kernel_terms(tile, operands), **ranges.inputs()},
        outputs={
            "dk": jax.ShapeDtypeStruct((*shape, problem.head_dim), dtype),
            "dv": jax.ShapeDtypeStruct((*shape, problem.v_head_dim), dtype),
        },
        padded_last=tile.padded_last(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
    return out["dk"], out["dv"]


def _dkv_kernel(tile: Tile, ranges: Ranges, refs: dict[str, Any], outs: dict[str, Any]) -> None:
    problem = tile.problem
    j, kv_head, n = program_id(0), program_id(1), program_id(2)
    first_head = kv_head * problem.group
    start = j * tile.block_k

    def one_head(g: Any, carry: Any) -> Any:
        h = first_head + g
        # Masks may differ by query head, so the side of the keys is read for each; k and v are in cache.
        ks = tile.k_side(refs, n, h, start)
        k = [tile.k_rows(refs["k"], n, h, ks, c) for c in tile.qk_chunks]
        v = [tile.k_rows(refs["v"], n, h, ks, c) for c in tile.v_chunks]

        def body(masked: bool, cleans: bool) -> Any:
            def step(i: Any, carry: Any) -> Any:
                dk, dv = carry
                qs = tile.q_side(refs, n, h, i * tile.block_q, masked=masked)
                qs = with_row_terms(tile, refs, n, h, qs)
                pairs = tile.pairs(refs, n, h, qs, ks)
                q = [tile.q_rows(refs["q"], n, h, qs, c) for c in tile.qk_chunks]
                dout = [tile.q_rows(refs["dout"], n, h, qs, c) for c in tile.v_chunks]
                raw, dp = tile.dot_tile(q, k), tile.dot_tile(dout, v)
                p, grad = gradient_tile(tile, raw, dp, pairs, qs, ks, masked, cleans)
                p, grad = p.astype(q[0].dtype), grad.astype(q[0].dtype)
                if cleans:
                    q, dout = [clean(part) for part in q], [clean(part) for part in dout]
                dv = [a + dot(p, part, problem.precision) for a, part in zip(dv, dout, strict=True)]
                dk = [a + dot(grad, part, problem.precision) for a, part in zip(dk, q, strict=True)]
                return dk, dv

            return step

        return visit(tile, ranges, refs, n, h, j, body, carry)

    dk = [jnp.zeros((tile.block_k, c.size), jnp.float32) for c in tile.qk_chunks]
    dv = [jnp.zeros((tile.block_k, c.size), jnp.float32) for c in tile.v_chunks]
    if problem.group == 1:
        dk, dv = one_head(0, (dk, dv))
    else:
        dk, dv = loop(0, problem.group, one_head, (dk, dv))

    exists = tile.k_side(refs, n, first_head, start)["exists"]
    for a, chunk in zip(dk, tile.qk_chunks, strict=True):
        store_rows(outs["dk"], n, kv_head, start, a * problem.scale, chunk, exists)
    for a, chunk in zip(dv, tile.v_chunks, strict=True):
        store_rows(outs["dv"], n, kv_head, start, a, chunk, exists)
