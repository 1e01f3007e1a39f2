"""Block ranges against the dense mask: nothing allowed is skipped, nothing more than needed is visited."""

import jax.numpy as jnp
import numpy as np
import pytest
from pallas_triton_cases import FEATURES, Sizes, draw, inputs
from pallas_triton_oracle import allowed_pairs

from cudnn_dsa_pallas_triton.contracts import Options, check
from cudnn_dsa_pallas_triton.operands import canonical_masks
from cudnn_dsa_pallas_triton.visibility import key_major, query_major, visible_blocks

BAND = [{"is_causal": True}, {"local_window_size": (9, 4)}, {"is_causal": True, "local_window_size": (20, 3)}, {}]
# Drawn per row, their blocks' minima and maxima bound the range from outside only.
EXACT = ["mask", "packed segments"]
DYNAMIC = [n for n in FEATURES if n not in ("bias", "dropout", "attn_sink", "is_causal") and "logits" not in n]
DYNAMIC = [n for n in DYNAMIC if n not in ("normalize_output", "local_window_size")]


def _problem(rng, sizes, kwargs):
    arrays = {n: x for n, x in inputs(rng, sizes).items() if n in ("q", "k", "v")}
    options = {n: kwargs[n] for n in ("is_causal", "local_window_size") if n in kwargs}
    arrays |= {n: x for n, x in kwargs.items() if n not in options}
    return check(arrays, Options(**options)), arrays


def _ranges(sizes, kwargs, block_q, block_k):
    """For both directions: (ranges, dense block visibility [*B, H, own blocks, other blocks], all-allowed likewise)."""
    problem, arrays = _problem(np.random.default_rng(0), sizes, kwargs)
    jarrays = {n: x if isinstance(x, tuple) else jnp.asarray(x) for n, x in arrays.items()}
    masks = canonical_masks(jarrays, problem)
    allowed = allowed_pairs(sizes.batch, sizes.q_heads, sizes.q_len, sizes.kv_len, **kwargs)
    yield query_major(problem, masks, block_q, block_k), *_tiles(allowed, block_q, block_k)
    yield key_major(problem, masks, block_q, block_k), *_tiles(allowed.swapaxes(-1, -2), block_k, block_q)


def _tiles(allowed, block, other_block):
    """Whether some and whether all pairs of every tile are allowed; what sticks out of the own axis does not count."""
    own, other = allowed.shape[-2:]
    lead = [(0, 0)] * (allowed.ndim - 2)
    across = np.pad(allowed, [*lead, (0, 0), (0, -other % other_block)])

    def tiles(fill):
        x = np.pad(across, [*lead, (0, -own % block), (0, 0)], constant_values=fill)
        return x.reshape(*x.shape[:-2], -1, block, x.shape[-1] // other_block, other_block)

    return tiles(False).any(axis=(-3, -1)), tiles(True).all(axis=(-3, -1))


def _visited(ranges, shape, column):
    bounds = np.asarray(ranges.bounds)
    batch = shape[:-3]
    if bounds.ndim == 4:
        bounds = bounds.reshape(*((1,) * len(batch) if bounds.shape[0] == 1 else batch), *bounds.shape[1:])
    bounds = np.broadcast_to(bounds, (*shape[:-1], bounds.shape[-1]))
    j = np.arange(shape[-1])
    places = (bounds[..., column[0], None] <= j) & (j < bounds[..., column[1], None])
    if ranges.order is None:
        return places
    order = np.asarray(ranges.order)
    if order.ndim == 4:
        order = order.reshape(*((1,) * len(batch) if order.shape[0] == 1 else batch), *order.shape[1:])
    order = np.broadcast_to(order, shape)
    visited = np.zeros(shape, bool)
    np.put_along_axis(visited, order, places, axis=-1)
    for row, used in zip(order.reshape(-1, shape[-1]), places.reshape(-1, shape[-1]), strict=True):
        assert (np.diff(row[used]) > 0).all()  # ascending, as without a list: sums have the same order
    return visited


@pytest.mark.parametrize("kwargs", BAND, ids=str)
@pytest.mark.parametrize("lengths", [(70, 70), (41, 90), (90, 41), (1, 5), (5, 1)])
@pytest.mark.parametrize("blocks", [(16, 16), (16, 64), (64, 16)])
def test_band(kwargs, lengths, blocks):
    sizes = Sizes((1,), *lengths, 1, 1, 8, 8)
    for ranges, some, every in _ranges(sizes, kwargs, *blocks):
        visited = np.zeros_like(some)
        for first, last, masked, _ in ranges.runs:
            run = _visited(ranges, some.shape, (first, last))
            assert not (visited & run).any()
            visited |= run
            if not masked:
                np.testing.assert_array_equal(run, every)
        np.testing.assert_array_equal(visited, some)


@pytest.mark.parametrize("name", DYNAMIC)
@pytest.mark.parametrize("seed", range(4))
def test_dynamic_masks_skip_nothing_allowed(name, seed):
    rng = np.random.default_rng(seed)
    sizes = Sizes((2, 2), 70, 90, 2, 1, 8, 8)
    for ranges, some, _ in _ranges(sizes, draw(rng, [name], sizes), 16, 32):
        assert (_visited(ranges, some.shape, (0, 1)) >= some).all()


@pytest.mark.parametrize("shape", [(2, 1, 70, 90), (1, 2, 70, 90), (70, 90)])
def test_blocks_in_the_middle_that_a_dense_mask_empties_are_skipped(shape):
    rng = np.random.default_rng(0)
    sizes = Sizes((2,), 70, 90, 2, 1, 8, 8)
    mask = np.ones(shape, bool)
    for i, j in zip(rng.integers(0, 70, 60), rng.integers(0, 90, 60), strict=True):
        mask[..., i // 16 * 16 : i // 16 * 16 + 16, j // 32 * 32 : j // 32 * 32 + 32] &= rng.random() < 0.3
    for ranges, some, _ in _ranges(sizes, {"mask": mask}, 16, 32):
        np.testing.assert_array_equal(_visited(ranges, some.shape, (0, 1)), some)
    problem, arrays = _problem(rng, sizes, {"mask": mask})
    masks = canonical_masks({n: jnp.asarray(x) for n, x in arrays.items()}, problem)
    _, some, _ = next(iter(_ranges(sizes, {"mask": mask}, 16, 32)))
    np.testing.assert_array_equal(np.broadcast_to(visible_blocks(problem, masks, 16, 32) != 0, some.shape), some)


def test_packed_segments_and_ranges_visit_only_their_blocks():
    sizes = Sizes((1,), 128, 128, 1, 1, 8, 8)
    ids = (np.arange(128, dtype=np.int32) // 32)[None]
    for kwargs in (
        {"segment_ids": (ids, ids)},
        {"k_start": ids[0] * 32, "k_end": ids[0] * 32 + 32},
        {"mask": ids[0][:, None] == ids[0][None, :]},
    ):
        for ranges, some, _ in _ranges(sizes, kwargs, 16, 16):
            if "k_start" in kwargs or "mask" in kwargs or "segment_ids" in kwargs:
                np.testing.assert_array_equal(_visited(ranges, some.shape, (0, 1)), some)
