"""Which blocks a kernel visits: for every block of its own axis, ranges of blocks of the other axis.

The ranges are the smallest that contain every block with an allowed pair; where a mask may leave holes in them (a dense
mask, positions given as data), they are ranges of a list of the blocks that do. Where all masks are static (a band, or
none), the blocks in which every pair is allowed form a range of their own, which the kernels run without masking.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cudnn_dsa_pallas_triton.contracts import Problem

# Operands that make the set of allowed pairs depend on data.
DYNAMIC = frozenset(
    {"mask", "k_start", "k_end", "q_start", "q_end", "q_indices", "k_indices", "q_segment_ids", "k_segment_ids"}
)


class Run(NamedTuple):
    """Blocks that are visited with one body: from bound number ``first`` up to bound number ``last``.

    ``masked``: some pairs may not be allowed. ``cleans``: inf and NaN are removed from what a masked pair multiplies.
    """

    first: int
    last: int
    masked: bool
    cleans: bool


@dataclasses.dataclass(frozen=True)
class Ranges:
    """Block ranges of one kernel.

    Attributes:
        bounds: int32 [lead, H or 1, own blocks, number of bounds], ascending along the last axis.
        runs: in ascending order; what is before the first bound or behind the last is not visited.
        order: int32 [lead, H or 1, own blocks, other blocks]: the block at each place of a range; None where the
            place is the block.
    """

    bounds: jax.Array | np.ndarray
    runs: tuple[Run, ...]
    order: jax.Array | None = None

    def inputs(self) -> dict[str, jax.Array]:
        """What a kernel reads of it, by operand name."""
        return {"bounds": jnp.asarray(self.bounds)} | ({} if self.order is None else {"order": self.order})


def is_dynamic(problem: Problem) -> bool:
    """Whether the allowed pairs depend on data."""
    return bool(problem.operands & DYNAMIC)


def query_major(
    problem: Problem, masks: Mapping[str, jax.Array], block_q: int, block_k: int, finite: jax.Array | None = None
) -> Ranges:
    """For every block of queries, the blocks of keys to visit.

    ``finite`` is a boolean of the run: where it is False, all blocks are visited with the body that cleans. Cleaning
    costs up to twice the time, so that data without inf and NaN must not pay for it. None where no pair is masked by
    data.
    """
    if is_dynamic(problem):
        return _span(_visible(problem, masks, block_q, block_k), finite, _leaves_holes(masks))
    return _band_ranges(problem.band, problem.q_len, problem.kv_len, block_q, block_k, finite)


def key_major(
    problem: Problem, masks: Mapping[str, jax.Array], block_q: int, block_k: int, finite: jax.Array | None = None
) -> Ranges:
    """For every block of keys, the blocks of queries to visit; ``finite`` as in ``query_major``."""
    if is_dynamic(problem):
        visible = jnp.swapaxes(_visible(problem, masks, block_q, block_k), -1, -2)
        return _span(visible, finite, _leaves_holes(masks))
    before, after = problem.band
    return _band_ranges((after, before), problem.kv_len, problem.q_len, block_k, block_q, finite)


def visible_blocks(problem: Problem, masks: Mapping[str, jax.Array], block_q: int, block_k: int) -> jax.Array:
    """int32 [lead, H or 1, blocks of queries, blocks of keys]: 0 where no pair of the two blocks is allowed."""
    if is_dynamic(problem):
        return _visible(problem, masks, block_q, block_k).astype(jnp.int32)
    bounds = _band_ranges(problem.band, problem.q_len, problem.kv_len, block_q, block_k, None).bounds
    j = np.arange(-(-problem.kv_len // block_k))
    return jnp.asarray((bounds[..., :1] <= j) & (j < bounds[..., -1:]), jnp.int32)


def _band_ranges(
    band: tuple[int | None, int | None], own: int, other: int, block: int, other_block: int, finite: jax.Array | None
) -> Ranges:
    """Ranges of a band: position i of the own axis meets i - before to i + after of the other."""
    has_band = band != (None, None)
    before, after = (own + other if side is None else side for side in band)
    blocks = -(-other // other_block)
    first = np.arange(-(-own // block)) * block
    last = np.minimum(first + block, own) - 1
    lo = np.clip(first - before, 0, other) // other_block
    hi = -(-np.clip(last + after + 1, 0, other) // other_block)
    hi = np.where(first - before < other, np.maximum(lo, hi), lo)
    # A block that sticks out past the end of the sequence is never an inner one.
    inner_lo = np.clip(-(-np.clip(last - before, 0, other) // other_block), lo, hi)
    inner_end = np.clip(first + after + 1, 0, other)
    inner_hi = np.clip(inner_end // other_block, inner_lo, hi)
    bounds = np.stack([lo, inner_lo, inner_hi, hi], axis=-1).astype(np.int32)[None, None]
    assert blocks >= hi.max(initial=0)
    # Few blocks lie on the edges of a band: they are always cleaned.
    candidates = (Run(0, 1, True, has_band), Run(1, 2, False, False), Run(2, 3, True, has_band))
    runs = tuple(r for r in candidates if (bounds[..., r.first] < bounds[..., r.last]).any())
    if finite is None:
        return Ranges(bounds, runs)
    everything = np.stack([lo, hi, hi, hi], axis=-1).astype(np.int32)[None, None]
    return Ranges(jnp.where(finite, bounds, everything), (Run(0, 1, True, True), *(r for r in runs if r.first > 0)))


def _leaves_holes(masks: Mapping[str, jax.Array]) -> bool:
    """Whether blocks without an allowed pair may lie between blocks with one, often enough to matter."""
    dense = "mask" in masks and masks["mask"].shape[-2] != 1 and masks["mask"].shape[-1] != 1
    return dense or "q_indices" in masks or "k_indices" in masks


def _span(visible: jax.Array, finite: jax.Array | None, holes: bool) -> Ranges:
    """The range from the first to the last visible block; with ``holes`` the list of the visible blocks."""
    n = visible.shape[-1]
    order = None
    if holes:
        order = jnp.argsort(~visible, axis=-1, stable=True).astype(jnp.int32)
        hi = visible.sum(axis=-1)
        lo = jnp.zeros_like(hi)
    else:
        some = visible.any(axis=-1)
        lo = jnp.where(some, jnp.argmax(visible, axis=-1), 0)
        hi = jnp.where(some, n - jnp.argmax(visible[..., ::-1], axis=-1), 0)
    if finite is None:
        return Ranges(jnp.stack([lo, hi], axis=-1).astype(jnp.int32), (Run(0, 1, True, False),), order)
    bounds = jnp.stack([lo, jnp.where(finite, lo, hi), hi], axis=-1).astype(jnp.int32)
    return Ranges(bounds, (Run(0, 1, True, True), Run(1, 2, True, False)), order)


def _per_block(x: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """(minimum, maximum) of every block of the last axis; a short last block counts what it has."""
    pad = -x.shape[-1] % block
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)], mode="edge")
    x = x.reshape(*x.shape[:-1], -1, block)
    return x.min(axis=-1), x.max(axis=-1)


def _visible(problem: Problem, masks: Mapping[str, jax.Array], block_q: int, block_k: int) -> jax.Array:
    """[lead, H or 1, blocks of queries, blocks of keys]: False only where no pair of the two blocks is allowed."""
    rows = masks.get("q_indices", jnp.arange(problem.q_len, dtype=jnp.int32)[None, None])
    cols = masks.get("k_indices", jnp.arange(problem.kv_len, dtype=jnp.int32)[None, None])
    q_min, q_max = (x[..., :, None] for x in _per_block(rows, block_q))
    k_min, k_max = (x[..., None, :] for x in _per_block(cols, block_k))
    tests = [jnp.ones((1, 1, q_min.shape[-2], k_min.shape[-1]), bool)]
    before, after = problem.band
    if before is not None:
        tests.append(k_max >= q_min - before)
    if after is not None:
        tests.append(k_min <= q_max + after)
    if "q_segment_ids" in masks:
        a_min, a_max = (x[..., :, None] for x in _per_block(masks["q_segment_ids"], block_q))
        b_min, b_max = (x[..., None, :] for x in _per_block(masks["k_segment_ids"], block_k))
        tests.append(jnp.maximum(a_min, b_min) <= jnp.minimum(a_max, b_max))

    first_q = (jnp.arange(q_min.shape[-2]) * block_q)[:, None]
    first_k = (jnp.arange(k_min.shape[-1]) * block_k)[None, :]
    # A start is compared with the last position of a block, an end with its first.
    limits = {
        "k_start": lambda lo, hi: lo[..., :, None] < first_k + block_k,
        "k_end": lambda lo, hi: hi[..., :, None] > first_k,
        "q_start": lambda lo, hi: lo[..., None, :] < first_q + block_q,
        "q_end": lambda lo, hi: hi[..., None, :] > first_q,
    }
    for name, limit in limits.items():
        if name in masks:
            tests.append(limit(*_per_block(masks[name], block_q if name[0] == "k" else block_k)))
    if "mask" in masks:
        tests.append(_any_in_block(masks["mask"], block_q, block_k))
    # Lead forms differ (some operands keep their batch dimensions apart): bring all to the longest one first.
    visible = tests[0]
    for test in tests[1:]:
        visible = _and(visible, test, problem)
    return visible


def _and(a: jax.Array, b: jax.Array, problem: Problem) -> jax.Array:
    """``a & b`` for two arrays in lead form."""
    if a.ndim != b.ndim:
        a, b = (
            x.reshape(*((1,) * len(problem.batch) if x.shape[0] == 1 else problem.batch), *x.shape[1:])
            if x.ndim == 4
            else x
            for x in (a, b)
        )
    return a & b


def _any_in_block(mask: jax.Array, block_q: int, block_k: int) -> jax.Array:
    """Whether any element of every block is True; an axis of size 1 stays one."""
    for axis, block in ((-2, block_q), (-1, block_k)):
        size = mask.shape[axis]
        if size == 1:
            continue
        pad = [(0, 0)] * mask.ndim
        pad[axis] = (0, -size % block)
        padded = jnp.moveaxis(jnp.pad(mask, pad), axis, -1)
        mask = jnp.moveaxis(padded.reshape(*padded.shape[:-1], -1, block).any(axis=-1), -1, axis)
    return mask
