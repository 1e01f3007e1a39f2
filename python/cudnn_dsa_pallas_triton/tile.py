"""One tile of the score matrix: from the raw dot to the masked logit, the same code for every kernel.

A tile is [block_q, block_k], or transposed where the kernel accumulates over queries (``transposed``), so that the
probabilities are already the left operand of the dot that follows. Everything that belongs to a query or to a key is a
vector; ``along_q`` and ``along_k`` expand it.

The order is that of the operator: dot, times scale, cast to logits_dtype, plus bias, soft cap, mask. A tile of logits
is kept as a value times a positive constant, ``unit``: what the dot or the tanh gives, before scale or cap, so that
scale, log2(e) and the subtraction of the maximum are one fused multiply-add in front of the base-2 exponential.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cudnn_dsa_pallas_triton.config import Chunk, head_chunks, padded_dim
from cudnn_dsa_pallas_triton.contracts import Problem
from cudnn_dsa_pallas_triton.lowering import cdiv, dot, ds, exp2, load, reciprocal
from cudnn_dsa_pallas_triton.operands import lead_index
from cudnn_dsa_pallas_triton.visibility import is_dynamic

LOG2E = 1.4426950408889634
NEG_INF = float("-inf")

_Q_VECTORS = ("k_start", "k_end", "q_indices", "q_segment_ids")
_K_VECTORS = ("q_start", "q_end", "k_indices", "k_segment_ids")


@dataclasses.dataclass(frozen=True)
class Tile:
    """Static description of the tiles of one kernel."""

    problem: Problem
    block_q: int
    block_k: int
    head_chunk: int
    transposed: bool = False
    # The mask has the same row for every query: it then acts on whole keys, as the end of the sequence does.
    key_mask: bool = False

    @property
    def q_blocks(self) -> int:
        return cdiv(self.problem.q_len, self.block_q)

    @property
    def k_blocks(self) -> int:
        return cdiv(self.problem.kv_len, self.block_k)

    @property
    def qk_chunks(self) -> tuple[Chunk, ...]:
        """Chunks of D, the head dimension of q and k."""
        return head_chunks(self.problem.head_dim, self.head_chunk)

    @property
    def v_chunks(self) -> tuple[Chunk, ...]:
        """Chunks of d, the head dimension of v and of the output."""
        return head_chunks(self.problem.v_head_dim, self.head_chunk)

    def padded_last(self) -> dict[str, int]:
        """By operand, the size its last dimension is rounded up to."""
        qk, v = padded_dim(self.qk_chunks), padded_dim(self.v_chunks)
        return {"q": qk, "k": qk, "dq": qk, "dk": qk, "v": v, "out": v, "dout": v, "dv": v}

    @property
    def unit(self) -> float:
        """logit = ``unit`` * the value that ``logits`` gives; positive."""
        if self.problem.soft_cap is not None:
            return self.problem.soft_cap
        plain = "bias" not in self.problem.operands and self.problem.logits_dtype is None
        return self.problem.scale if plain and self.problem.scale > 0.0 else 1.0

    @property
    def is_wide(self) -> bool:
        """Whether logits may be as large as fp32 allows, as under a bias of the most negative finite number.

        log2(e) times such a logit overflows, so the maximum is then subtracted first.
        """
        return "bias" in self.problem.operands and self.problem.soft_cap is None

    # Vectors and operand tiles

    def along_q(self, x: Any) -> Any:
        return x if jnp.ndim(x) == 0 else (x[None, :] if self.transposed else x[:, None])

    def along_k(self, x: Any) -> Any:
        return x if jnp.ndim(x) == 0 else (x[:, None] if self.transposed else x[None, :])

    def reduce_k(self, reduce: Any, x: jax.Array) -> jax.Array:
        return reduce(x, axis=0 if self.transposed else 1)

    def q_side(self, refs: dict[str, Any], n: Any, h: Any, start: Any, *, masked: bool = True) -> dict[str, Any]:
        """The vectors that belong to the queries ``start`` to ``start + block_q``.

        ``masked`` False promises that all of them exist.
        """
        side = {"position": start + jnp.arange(self.block_q, dtype=jnp.int32), "start": start}
        ragged = masked and self.problem.q_len % self.block_q != 0
        side["exists"] = side["position"] < self.problem.q_len if ragged else None
        for name in _Q_VECTORS:
            if name in refs:
                index = (*lead_index(refs[name], 1, n, h, self.problem), ds(start, self.block_q))
                side[name] = load(refs[name], index, side["exists"])
        return side

    def k_side(self, refs: dict[str, Any], n: Any, h: Any, start: Any, *, masked: bool = True) -> dict[str, Any]:
        """The vectors that belong to the keys ``start`` to ``start + block_k``; ``masked`` as in ``q_side``."""
        side = {"position": start + jnp.arange(self.block_k, dtype=jnp.int32), "start": start}
        ragged = masked and self.problem.kv_len % self.block_k != 0
        side["exists"] = side["position"] < self.problem.kv_len if ragged else None
        for name in _K_VECTORS:
            if name in refs:
                index = (*lead_index(refs[name], 1, n, h, self.problem), ds(start, self.block_k))
                side[name] = load(refs[name], index, side["exists"])
        # Which keys are read at all. Those that are not read are zeros, whatever memory holds.
        side["read"] = side["exists"]
        if self.key_mask:
            ref = refs["mask"]
            lead = lead_index(ref, 2, n, h, self.problem)
            if ref.shape[-1] == 1:
                side["read"] = jnp.broadcast_to(load(ref, (*lead, 0, 0)), (self.block_k,))
                if side["exists"] is not None:
                    side["read"] = side["read"] & side["exists"]
            else:
                side["read"] = load(ref, (*lead, 0, ds(start, self.block_k)), side["exists"], False)
        return side

    def rows(self, ref: Any, n: Any, h: Any, start: Any, size: int, chunk: Chunk, read: Any) -> jax.Array:
        """Rows ``start`` to ``start + size`` of [N, length, heads, dim], one chunk of the last dimension.

        Rows that are not ``read`` (None: all are) and elements past the head dimension are 0.
        """
        mask = None if read is None else read[:, None]
        if chunk.is_partial:
            inside = (chunk.start + jnp.arange(chunk.size, dtype=jnp.int32) < chunk.dim)[None, :]
            mask = inside if mask is None else mask & inside
        return load(ref, (n, ds(start, size), h, ds(chunk.start, chunk.size)), mask, 0.0)

    def q_rows(self, ref: Any, n: Any, h: Any, side: dict[str, Any], chunk: Chunk) -> jax.Array:
        return self.rows(ref, n, h, side["start"], self.block_q, chunk, side["exists"])

    def k_rows(self, ref: Any, n: Any, h: Any, side: dict[str, Any], chunk: Chunk) -> jax.Array:
        return self.rows(ref, n, h // self.problem.group, side["start"], self.block_k, chunk, side["read"])

    def dot_tile(self, q_parts: list[jax.Array], k_parts: list[jax.Array]) -> jax.Array:
        """q k^T (transposed: k q^T) over the chunks of the head dimension, fp32."""
        left, right = (k_parts, q_parts) if self.transposed else (q_parts, k_parts)
        total = dot(left[0], right[0], self.problem.precision, transpose_b=True)
        for a, b in zip(left[1:], right[1:], strict=True):
            total = total + dot(a, b, self.problem.precision, transpose_b=True)
        return total

    # Elementwise operands of the tile

    def pair(self, ref: Any, n: Any, h: Any, qs: dict[str, Any], ks: dict[str, Any], other: Any) -> Any:
        """The tile of an operand that broadcasts to [*B, H, T, t]; axes of size 1 stay unexpanded."""
        lead = lead_index(ref, 2, n, h, self.problem)
        by_q, by_k = ref.shape[-2] != 1, ref.shape[-1] != 1
        index = (*lead, ds(qs["start"], self.block_q) if by_q else 0, ds(ks["start"], self.block_k) if by_k else 0)
        q_in = qs["exists"] if by_q else None
        k_in = ks["exists"] if by_k else None
        if by_q and by_k:
            masks = [m for m in (None if q_in is None else q_in[:, None], None if k_in is None else k_in[None, :])
                     if m is not None]  # fmt: skip
            mask = None if not masks else masks[0] if len(masks) == 1 else masks[0] & masks[1]
            x = load(ref, index, mask, other)
            return x.T if self.transposed else x
        if by_q:
            return self.along_q(load(ref, index, q_in, other))
        if by_k:
            return self.along_k(load(ref, index, k_in, other))
        return load(ref, index)

    def pairs(self, refs: dict[str, Any], n: Any, h: Any, qs: dict[str, Any], ks: dict[str, Any]) -> dict[str, Any]:
        """The tiles of bias, mask and dropout mask. To be loaded before the dots: no load crosses a dot by itself."""
        names = {"bias": 0.0, "dropout_mask": False} | ({} if self.key_mask else {"mask": False})
        return {name: self.pair(refs[name], n, h, qs, ks, x) for name, x in names.items() if name in refs}

    def keep(self, pairs: dict[str, Any]) -> Any:
        """What dropout multiplies probabilities with: 0 or 1 / (1 - rate); None without dropout."""
        if "dropout_mask" not in pairs:
            return None
        factor = jnp.float32(1.0 / (1.0 - self.problem.dropout_rate))
        return jnp.where(pairs["dropout_mask"], factor, jnp.float32(0.0))

    def allowed(self, pairs: dict[str, Any], qs: dict[str, Any], ks: dict[str, Any], cleans: bool) -> Any:
        """The AND of all masks on this tile, or None where nothing is masked.

        A bias of -inf gives a probability of 0 by itself; it is a mask only where products with 0 may be NaN.
        """
        tests = []
        if qs["exists"] is not None:
            # Zeros stand for the rows past the end: times a key that holds NaN they are NaN, and dk, dv and dbias sum
            # over rows.
            tests.append(self.along_q(qs["exists"]))
        if cleans and self.is_wide:
            tests.append(pairs["bias"] > NEG_INF)
        if ks["read"] is not None:
            tests.append(self.along_k(ks["read"]))
        before, after = self.problem.band
        q_at = self.along_q(qs.get("q_indices", qs["position"]))
        k_at = self.along_k(ks.get("k_indices", ks["position"]))
        if before is not None:
            tests.append(k_at >= q_at - before)
        if after is not None:
            tests.append(k_at <= q_at + after)
        q_at, k_at = self.along_q(qs["position"]), self.along_k(ks["position"])
        if "k_start" in qs:
            tests.append(k_at >= self.along_q(qs["k_start"]))
        if "k_end" in qs:
            tests.append(k_at < self.along_q(qs["k_end"]))
        if "q_start" in ks:
            tests.append(q_at >= self.along_k(ks["q_start"]))
        if "q_end" in ks:
            tests.append(q_at < self.along_k(ks["q_end"]))
        if "q_segment_ids" in qs:
            tests.append(self.along_q(qs["q_segment_ids"]) == self.along_k(ks["k_segment_ids"]))
        if "mask" in pairs:
            tests.append(pairs["mask"])
        if not tests:
            return None
        total = tests[0]
        for test in tests[1:]:
            total = total & test
        return total

    def logits(self, raw: jax.Array, pairs: dict[str, Any]) -> tuple[jax.Array, jax.Array | None]:
        """(logit / ``unit`` before masking, tanh of the soft cap or None) of a tile of raw dots."""
        problem = self.problem
        if problem.soft_cap is None and self.unit != 1.0:
            return raw, None
        # With nothing between them, scale and cap are one factor.
        direct = problem.soft_cap is not None and problem.logits_dtype is None and "bias" not in pairs
        u = raw if direct else raw * jnp.float32(problem.scale)
        if problem.logits_dtype is not None:
            u = u.astype(problem.logits_dtype).astype(jnp.float32)
        if "bias" in pairs:
            u = u + pairs["bias"].astype(jnp.float32)
        if problem.soft_cap is None:
            return u, None
        factor = (problem.scale if direct else 1.0) / problem.soft_cap
        # fp32 inputs get the library's tanh; for 16-bit ones 3e-7 is far below the rounding of their dots.
        t = jnp.tanh(u * jnp.float32(factor)) if problem.dtype == "float32" else tanh_by_exp2(u, factor)
        return t, t


def tanh_by_exp2(x: jax.Array, factor: float = 1.0) -> jax.Array:
    """tanh(factor * x) within 3e-7 absolute: 1 - 2 / (exp(2 y) + 1), two special-function instructions on a GPU.

    The exponent is clamped where tanh is 1 to the last bit, so that the exponential does not overflow.
    """
    return 1.0 - 2.0 * reciprocal(exp2(jnp.minimum(x * jnp.float32(2.0 * LOG2E * factor), 64.0)) + 1.0)


def shields(problem: Problem, operands: Mapping[str, Any]) -> bool:
    """Whether data decide which pairs are masked, so that inf and NaN behind a mask can be anywhere.

    A probability of exactly 0 times inf or NaN is NaN in a dot. A key that is masked for every query is not read at
    all; where masking depends on the pair, what a masked pair multiplies has to be finite.
    """
    per_pair = {"k_start", "k_end", "q_start", "q_end", "q_segment_ids"} & problem.operands
    dense_mask = "mask" in problem.operands and operands["mask"].shape[-2] != 1
    wide_bias = "bias" in problem.operands and problem.soft_cap is None
    return bool(per_pair) or dense_mask or wide_bias or (is_dynamic(problem) and problem.band != (None, None))


def all_finite(problem: Problem, operands: Mapping[str, jax.Array], names: str | Sequence[str]) -> jax.Array | None:
    """Whether the named operands hold neither inf nor NaN; None where nobody needs to know."""
    if not shields(problem, operands):
        return None
    return jnp.stack([jnp.isfinite(operands[name]).all() for name in names]).all()


def is_finite(x: jax.Array) -> jax.Array:
    return jnp.abs(x) < jnp.inf


def clean(x: jax.Array) -> jax.Array:
    """``x`` with 0 for inf and NaN."""
    return jnp.where(is_finite(x), x, jnp.zeros((), x.dtype))
