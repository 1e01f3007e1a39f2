"""Every feature alone, every pair of features, and random combinations, against float64."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pallas_triton_cases import FEATURES, Sizes, check


def _covering_rows(seed=1):
    """Sets of features, about half of them on, such that every pair is on together in at least one set."""
    rng = np.random.default_rng(seed)
    names = list(FEATURES)
    missing = set(itertools.combinations(names, 2))
    rows = []
    while missing:
        candidates = [[n for n in names if rng.random() < 0.55] for _ in range(50)]
        best = max(candidates, key=lambda row: len(missing & set(itertools.combinations(row, 2))))
        missing -= set(itertools.combinations(best, 2))
        rows.append(best)
    return rows


PAIRS = _covering_rows()


@pytest.mark.parametrize("name", [None, *FEATURES])
def test_alone(name):
    check(np.random.default_rng(2), [name] if name else [])


@pytest.mark.parametrize("row", range(len(PAIRS)))
def test_every_pair_in_some_combination(row):
    # The masks of many features together leave little; keep the sequences short and every row of interest non-trivial.
    check(np.random.default_rng(row), PAIRS[row], Sizes(q_heads=4, kv_heads=2, q_len=33, kv_len=33))


@pytest.mark.slow
@pytest.mark.parametrize("pair", list(itertools.combinations(FEATURES, 2)), ids="-".join)
def test_pair(pair):
    check(np.random.default_rng(3), pair)


def _random_case(names, seed, batch, lengths, heads, dims):
    rng = np.random.default_rng(seed)
    check(rng, sorted(names), Sizes(batch, *lengths, *heads, *dims))


_CASE = {
    "names": st.sets(st.sampled_from(list(FEATURES)), max_size=6),
    "seed": st.integers(0, 2**32 - 1),
    "batch": st.sampled_from([(), (1,), (2,), (2, 1), (1, 2)]),
    "lengths": st.tuples(st.integers(1, 70), st.integers(1, 70)),
    "heads": st.sampled_from([(1, 1), (2, 2), (3, 1), (4, 2)]),
    "dims": st.tuples(st.integers(8, 70), st.integers(8, 70)),
}
_SETTINGS = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True, "database": None}


@settings(max_examples=4, **_SETTINGS)
@given(**_CASE)
def test_random_combination(names, seed, batch, lengths, heads, dims):
    _random_case(names, seed, batch, lengths, heads, dims)


@pytest.mark.slow
@settings(max_examples=60, **_SETTINGS)
@given(**_CASE)
def test_many_random_combinations(names, seed, batch, lengths, heads, dims):
    _random_case(names, seed, batch, lengths, heads, dims)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit(dtype):
    check(np.random.default_rng(4), ["bias", "is_causal", "attn_sink", "dropout"], dtype=dtype)


@pytest.mark.parametrize("dims", [(8, 8), (80, 72), (8, 120)])
def test_head_dims_that_are_no_power_of_two(dims):
    check(np.random.default_rng(5), ["is_causal"], Sizes((1,), 20, 20, 1, 1, *dims))


@pytest.mark.parametrize("batch", [(), (2, 2)])
def test_batch_dimensions(batch):
    check(np.random.default_rng(6), ["bias", "mask", "k_end", "segment_ids"], Sizes(batch, q_len=20, kv_len=20))
