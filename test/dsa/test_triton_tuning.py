"""The choice of tiles: what may be chosen, what is remembered, and that nothing in the cache is trusted."""

import importlib.util
from dataclasses import asdict, replace

import pytest
import torch
from dsa_cases import Sizes, make

from cudnn_dsa import interface
from cudnn_dsa.artifact import cache
from cudnn_dsa.contracts.sparse_attention import Options

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from cudnn_dsa.backends.triton import tuning


@pytest.fixture
def problem(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDNN_DSA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "_memory", {})
    monkeypatch.setattr(tuning, "device_kind", lambda device: "NVIDIA H200 sm_90")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return _problem(64)


def _problem(heads, deterministic=False):
    case = make("sink", torch.bfloat16, Sizes(heads=heads, head_dim=576))
    names = ("q", "kv", "out", "dout", "lse", "attn_sink", "topk_idxs")
    tensors = {name: getattr(case, name) for name in names}
    return interface.gate(tensors, Options(backend="reference", deterministic=deterministic))


def everything(config):
    return True


def widest(problem):
    """What is measured where everything fits: one compilation each, so no more than help."""
    legal = tuning.legal(problem)
    return [config for config in legal if config.block_h == legal[0].block_h]


def forget(monkeypatch):
    """As in another process."""
    monkeypatch.setattr(tuning, "_memory", {})


def tune(problem, monkeypatch, times, fits=everything):
    """Tune with given times by configuration; returns the configurations that were run."""
    ran = []
    monkeypatch.setattr(tuning, "_measure", lambda run: run() or times(ran[-1]))
    tuning.tune(problem, fits, ran.append)
    return ran


def test_the_fastest_is_kept_across_processes(problem, monkeypatch):
    slowest_first = widest(problem)
    ran = tune(problem, monkeypatch, lambda config: 10 - slowest_first.index(config))
    assert ran == slowest_first
    forget(monkeypatch)
    assert tuning.choose(problem, everything) == slowest_first[-1]
    assert tune(problem, monkeypatch, lambda config: 1) == [], "tuned twice"
    assert tuning.choose(replace(problem, s_q=777, s_kv=99), everything) == slowest_first[-1], "lengths are in the key"
    assert tuning.choose(replace(problem, head_dim=512), everything) == slowest_first[0]


def test_deterministic_is_pinned_to_what_is_shipped(problem, monkeypatch):
    last = widest(problem)[-1]
    tune(problem, monkeypatch, lambda config: 0 if config == last else 1)
    pinned = _problem(64, deterministic=True)
    assert tuning.choose(pinned, everything) == tuning.legal(pinned)[0]
    assert tune(pinned, monkeypatch, lambda config: 1) == []


def test_nothing_is_tuned_under_graph_capture(problem, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tune(problem, monkeypatch, lambda config: 1) == []
    assert cache.CACHE.entries() == []


def test_what_does_not_fit_is_neither_run_nor_chosen(problem, monkeypatch):
    first, second, *_ = tuning.legal(problem)
    assert tuning.choose(problem, lambda config: config != first) == second
    ran = tune(problem, monkeypatch, lambda config: 1, lambda config: config not in (first, second))
    assert ran
    assert not {first, second} & set(ran)
    narrower = [config for config in tuning.legal(problem) if config.block_h < first.block_h]
    forget(monkeypatch)
    for entry in cache.CACHE.entries():
        entry.unlink()
    ran = tune(problem, monkeypatch, lambda config: 1, lambda config: config in narrower)
    assert ran == [config for config in narrower if config.block_h == narrower[0].block_h]
    tuning.tune(replace(problem, heads=1), lambda config: False, lambda config: None)
    with pytest.raises(RuntimeError, match="no tile configuration fits"):
        tuning.choose(problem, lambda config: False)


@pytest.mark.parametrize("content", [7, [1], {}, {"block_h": 64}, {"block_h": 4096, "block_n": 64}])
def test_a_foreign_entry_is_as_good_as_none(problem, content):
    cache.CACHE.put_value(tuning._digest(tuning.key(problem, problem.device)), content)
    assert tuning.choose(problem, everything) == tuning.legal(problem)[0]


def test_a_choice_that_is_not_legal_is_ignored(problem):
    illegal = replace(tuning.legal(problem)[0], num_warps=2)
    cache.CACHE.put_value(tuning._digest(tuning.key(problem, problem.device)), asdict(illegal))
    assert tuning.choose(problem, everything) == tuning.legal(problem)[0]


def test_what_is_remembered_is_bounded(problem, monkeypatch):
    monkeypatch.setattr(tuning, "MAX_REMEMBERED", 3)
    for i in range(5):
        tuning._write(f"key {i}", {"choice": i})
    assert len(tuning._memory) <= 3
    assert [tuning._read(f"key {i}") for i in range(5)] == [{"choice": i} for i in range(5)]


def test_a_directory_that_cannot_be_written_to_costs_only_the_memory(problem, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUDNN_DSA_CACHE_DIR", str(tmp_path / "file"))
    best = tuning.legal(problem)[1]
    tune(problem, monkeypatch, lambda config: config != best)
    assert tuning.choose(problem, everything) == best


@pytest.mark.parametrize(("heads", "widest"), [(1, 16), (8, 16), (16, 16), (24, 32), (64, 64), (65, 64), (128, 64)])
def test_head_tiles_are_no_wider_than_the_heads(problem, heads, widest):
    for direction in tuning.LEGAL:
        tiles = {config.block_h for config in tuning.legal(replace(problem, heads=heads, direction=direction))}
        assert max(tiles) == widest


def test_blackwell_gets_no_tile_of_64_heads(problem, monkeypatch):
    monkeypatch.setattr(tuning, "device_kind", lambda device: "NVIDIA B200 sm_100")
    assert max(config.block_h for config in tuning.legal(problem)) == 32
