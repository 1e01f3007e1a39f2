"""The generator of selections that the benchmarks use: each dial does what it says, and they combine."""

import itertools

import pytest
import torch

from benchmark.selections import Selection, position

S_Q, S_KV, K = 40, 400, 32


def rows(selection, s_q=S_Q, s_kv=S_KV, topk=K, **options):
    idxs = selection.topk_idxs(s_q, s_kv, topk, **options)
    assert idxs.shape == (s_q, topk)
    assert idxs.dtype == torch.int32
    return idxs.tolist()


@pytest.mark.parametrize(
    "selection",
    [
        Selection(), Selection(window=64), Selection(overlap=0.75), Selection(causal=True), Selection(invalid=0.3),
        Selection(window=50, overlap=0.5, causal=True, invalid=0.1), Selection(overlap=1.0), Selection(window=5),
    ],
    ids=str,
)  # fmt: skip
def test_rows_are_distinct_rows_of_kv(selection):
    for row in rows(selection):
        keys = [key for key in row if key != -1]
        assert len(set(keys)) == len(keys)
        assert all(0 <= key < S_KV for key in keys)
        assert len(keys) == K or selection.causal or selection.invalid or selection.window == 5


def test_the_default_covers_everything():
    drawn = {key for row in rows(Selection(), s_q=200) for key in row}
    assert len(drawn) == S_KV


@pytest.mark.parametrize("causal", [False, True])
def test_window(causal):
    for i, row in enumerate(rows(Selection(window=64, causal=causal))):
        keys = [key for key in row if key != -1]
        assert max(keys) - min(keys) < 64
        at = position(i, S_Q, S_KV)
        assert (at - 64 < min(keys) and max(keys) <= at) if causal else abs(sum(keys) / len(keys) - at) < 64


def test_causal_rows_end_in_padding_where_keys_run_out():
    for i, row in enumerate(rows(Selection(causal=True))):
        available = position(i, S_Q, S_KV) + 1
        assert max(row) < available
        assert row.count(-1) == max(0, K - available)
        assert row[: K - row.count(-1)].count(-1) == 0


@pytest.mark.parametrize("overlap", [0.25, 0.75, 1.0])
def test_overlap_is_at_least_what_was_asked(overlap):
    drawn = rows(Selection(overlap=overlap))
    shares = [len(set(a) & set(b)) / K for a, b in itertools.pairwise(drawn)]
    assert min(shares) >= overlap
    if overlap < 1:
        assert sum(shares) / len(shares) < overlap + 0.2, "the rest is fresh"


def test_invalid_share():
    drawn = torch.tensor(rows(Selection(invalid=0.3), s_q=200))
    assert abs((drawn == -1).float().mean() - 0.3) < 0.03
    assert (drawn[:, 0] == -1).any(), "anywhere in the row"
    assert (drawn[:, 0] != -1).any()


def test_seeds():
    selection = Selection(overlap=0.5)
    assert rows(selection, seed=1) == rows(selection, seed=1) != rows(selection, seed=2)


def test_positions_are_spread_over_all_keys():
    for s_q, s_kv in ((40, 400), (7, 7), (400, 40), (3, 100)):
        at = [position(i, s_q, s_kv) for i in range(s_q)]
        assert at == sorted(at)
        assert at[-1] == s_kv - 1
        assert at[0] >= 0


@pytest.mark.parametrize("wrong", [{"window": 0}, {"overlap": 1.5}, {"overlap": -0.1}, {"invalid": 2}])
def test_wrong_dials_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Selection(**wrong)
