"""dbias: the gradient of the pre-cap logits, summed in fp32 over every axis that the bias is broadcast over.

One program owns one tile of the bias and walks, in a fixed order, all (batch, head, block of queries, block of keys)
that share it, recomputing ds for each. Nothing of shape [B, H, T, t] exists unless the bias itself has that shape, and
there are no atomics.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp

from cudnn_dsa_pallas_triton.backward import gradient_tile, kernel_terms, with_row_terms
from cudnn_dsa_pallas_triton.config import KernelConfig, dbias_splits
from cudnn_dsa_pallas_triton.contracts import Problem
from cudnn_dsa_pallas_triton.forward import make_tile
from cudnn_dsa_pallas_triton.lowering import call, cdiv, ds, load, loop, program_id, store
from cudnn_dsa_pallas_triton.operands import lead_index
from cudnn_dsa_pallas_triton.tile import Tile
from cudnn_dsa_pallas_triton.visibility import DYNAMIC, is_dynamic, visible_blocks


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes (batch dimensions, heads, blocks of queries, blocks of keys) and which of them the bias keeps."""

    sizes: tuple[int, ...]
    kept: tuple[bool, ...]

    @property
    def tiles(self) -> int:
        """Tiles of the bias."""
        return math.prod(s for s, k in zip(self.sizes, self.kept, strict=True) if k)

    @property
    def steps(self) -> int:
        """Score tiles that are summed into one tile of the bias."""
        return math.prod(s for s, k in zip(self.sizes, self.kept, strict=True) if not k)

    def unravel(self, of_tile: Any, of_step: Any) -> list[Any]:
        """The coordinate on every axis, from a tile number and a step number; the last axis varies fastest."""
        coordinates: list[Any] = []
        for size, kept in zip(reversed(self.sizes), reversed(self.kept), strict=True):
            number = of_tile if kept else of_step
            coordinates.append(number % size if size > 1 else 0)
            number = number // size if size > 1 else number
            of_tile, of_step = (number, of_step) if kept else (of_tile, number)
        return coordinates[::-1]


def bias_gradient(problem: Problem, config: KernelConfig, operands: dict[str, jax.Array], interpret: bool) -> jax.Array:
    """dbias with the shape and dtype of ``operands["bias"]`` (in lead form)."""
    bias = operands["bias"]
    tile = make_tile(problem, config, operands)
    lead = bias.shape[:-3]
    batch = (problem.batch_size,) if len(lead) == 1 else problem.batch
    sizes = (*batch, problem.q_heads, tile.q_blocks, tile.k_blocks)
    # An axis of size 1 counts as kept: there is nothing to sum.
    full = (*batch, problem.q_heads, problem.q_len, problem.kv_len)
    axes = Axes(sizes, tuple(have == size for have, size in zip(bias.shape, full, strict=True)))
    splits = dbias_splits(axes.tiles, axes.steps)
    splits = cdiv(axes.steps, cdiv(axes.steps, splits))
    dtype = bias.dtype if splits == 1 else jnp.dtype(jnp.float32)
    # The name in the kernel differs from the operand's: an output of the same rank plus the axis of the splits.
    partial = call(
        lambda refs, outs: _kernel(tile, axes, cdiv(axes.steps, splits), refs, outs),
        name="attention_dbias",
        grid=(axes.tiles, splits),
        inputs={
            **kernel_terms(tile, operands),
            "visible": visible_blocks(problem, operands, tile.block_q, tile.block_k),
        },
        outputs={"dbias": jax.ShapeDtypeStruct((splits, *bias.shape), dtype)},
        padded_last=tile.padded_last(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )["dbias"]
    # Added one by one: the order does not depend on how a reduction is compiled.
    return functools.reduce(operator.add, [partial[s] for s in range(splits)]).astype(bias.dtype)


def _kernel(tile: Tile, axes: Axes, steps: int, refs: dict[str, Any], outs: dict[str, Any]) -> None:
    problem = tile.problem
    number, split = program_id(0), program_id(1)
    skipping = _skipping(tile, axes)

    def visited(n: Any, h: Any, i: Any, j: Any) -> Any:
        return load(refs["visible"], (*lead_index(refs["visible"], 2, n, h, problem), i, j))

    def score_tile(step: Any, acc: Any) -> Any:
        *batch, h, i, j = axes.unravel(number, step)
        n = batch[0]
        for size, b in zip(axes.sizes[1:-3], batch[1:], strict=True):
            n = n * size + b

        def add(_: Any, acc: Any) -> Any:
            qs = with_row_terms(tile, refs, n, h, tile.q_side(refs, n, h, i * tile.block_q))
            ks = tile.k_side(refs, n, h, j * tile.block_k)
            pairs = tile.pairs(refs, n, h, qs, ks)
            raw = tile.dot_tile(
                [tile.q_rows(refs["q"], n, h, qs, c) for c in tile.qk_chunks],
                [tile.k_rows(refs["k"], n, h, ks, c) for c in tile.qk_chunks],
            )
            dp = tile.dot_tile(
                [tile.q_rows(refs["dout"], n, h, qs, c) for c in tile.v_chunks],
                [tile.k_rows(refs["v"], n, h, ks, c) for c in tile.v_chunks],
            )
            return acc + gradient_tile(tile, raw, dp, pairs, qs, ks, True, True)[1]

        return loop(0, visited(n, h, i, j), add, acc) if skipping == "each" else add(0, acc)

    *batch, h, i, j = axes.unravel(number, 0)
    first, last = split * steps, jnp.minimum((split + 1) * steps, axes.steps)
    if skipping == "once":
        last = jnp.where(visited(0, 0, i, j) != 0, last, first)
    acc = loop(first, last, score_tile, jnp.zeros((tile.block_q, tile.block_k), jnp.float32))

    out = outs["dbias"]
    by_q, by_k = out.shape[-2] != 1, out.shape[-1] != 1
    index: list[Any] = [split, *batch, h]
    masks = []
    for axis, (wide, block, start, length) in enumerate(
        ((by_q, tile.block_q, i * tile.block_q, problem.q_len), (by_k, tile.block_k, j * tile.block_k, problem.kv_len))
    ):
        index.append(ds(start, block) if wide else 0)
        if wide and length % block:
            inside = start + jnp.arange(block, dtype=jnp.int32) < length
            masks.append(jnp.expand_dims(inside, 1 - axis) if by_q and by_k else inside)
    if not by_k:
        acc = jnp.sum(acc, axis=1)
    if not by_q:
        acc = jnp.sum(acc, axis=0)
    store(out, tuple(index), acc, functools.reduce(operator.and_, masks) if masks else None)


def _skipping(tile: Tile, axes: Axes) -> str:
    """When to ask whether a score tile is masked as a whole: "each" step, "once" for a tile of the bias, or "never".

    Under a band all steps of a tile give the same answer, if the tile is one block of queries and keys. A mask over
    whole keys leaves few blocks empty, and to ask at each step keeps the loop from being pipelined.
    """
    problem = tile.problem
    has_band = problem.band != (None, None)
    if not is_dynamic(problem):
        return ("once" if all(axes.kept[-2:]) else "each") if has_band else "never"
    only_key_mask = tile.key_mask and not has_band and problem.operands & DYNAMIC == {"mask"}
    return "never" if only_key_mask else "each"
