"""The SM100 forward in the emulator (adversarial schedule, poison, hazard checker), against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")

import artifact_capture
import dsa_cases
from dsa_cases import CASES, Sizes, bound
from dsa_oracle import relative_error
from sm100_problem import forward, problem_of

from cudnn_dsa import artifact
from cudnn_dsa.backends.sm100.sources import sources

BF16, FP16 = torch.bfloat16, torch.float16


def check(name: str, dtype: torch.dtype, sizes: Sizes, seed: int = 0) -> None:
    case = dsa_cases.make(name, dtype, sizes, seed)
    compare(name, case, forward(case, seed=seed)[0])


def compare(name: str, case, got) -> None:
    """out within the contract's bound; lse to fp32's rounding of scores, -inf exactly where there is no key."""
    (out, lse), (want_out, want_lse) = got, case.forward_oracle()
    assert relative_error(out, want_out) <= bound(name, case.q.dtype)
    empty = torch.isneginf(want_lse)
    assert torch.equal(torch.isneginf(lse), empty)
    assert torch.equal(out[empty], torch.zeros_like(out[empty]))
    torch.testing.assert_close(lse[~empty].double(), want_lse[~empty], rtol=2e-6, atol=1e-5)


COVERING = [
    ("random", BF16, Sizes(3, 150, 64, 576, 130)),
    ("sink_mixed", BF16, Sizes(3, 150, 64, 576, 70)),
    ("sink_and_empty_rows", BF16, Sizes(3, 150, 64, 576, 64)),
    ("poisoned_rows", BF16, Sizes(3, 150, 64, 576, 140)),
    ("logits_200", FP16, Sizes(2, 150, 96, 512, 130)),
    ("scattered_invalid", FP16, Sizes(2, 150, 96, 512, 130)),
    ("odd_lengths", FP16, Sizes(6, 150, 16, 512, 100)),
]


@pytest.mark.parametrize(("name", "dtype", "sizes"), COVERING)
def test_forward(name: str, dtype: torch.dtype, sizes: Sizes) -> None:
    check(name, dtype, sizes, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "heads", "head_dim"), [(BF16, 64, 576), (FP16, 24, 512)])
def test_every_case(name: str, dtype: torch.dtype, heads: int, head_dim: int) -> None:
    for seed in range(3):
        check(name, dtype, Sizes(3, 150, heads, head_dim, 130), seed)


@pytest.mark.parametrize("rise", [0.5, 3.0, 40.0])
def test_scores_that_rise_from_tile_to_tile(rise: float) -> None:
    """Below the slack of the running maximum, around it, and far above it, in every tile."""
    case = dsa_cases.make("random", BF16, Sizes(2, 300, 64, 576, 300))
    case.topk_idxs = torch.arange(300, dtype=torch.int32).repeat(2, 1)
    case.q, case.kv = case.q.clone(), case.kv.clone()
    case.q[..., 0] = 1 / case.softmax_scale
    case.kv[:, 0] = (torch.arange(300) // 64 * rise).bfloat16()
    compare("random", case, forward(case, seed=2)[0])


def test_the_schedule_changes_nothing() -> None:
    case = dsa_cases.make("random", BF16, Sizes(1, 300, 64, 576, 260))
    first = forward(case, seed=1)[0]
    for seed in (2, 3):
        again = forward(case, seed=seed)[0]
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


def test_compiled_as_described_without_spills() -> None:
    case = dsa_cases.make("sink", BF16, Sizes(2, 150, 64, 576, 130))
    (source,) = sources(problem_of(case, "forward"), "sm_100a")
    used = artifact.resources(artifact.find(source))
    assert used.stack == 0
    assert used.static_shared + used.dynamic_shared <= 227 * 1024
    pointers = {key: 4096 * (1 + i) for i, key in enumerate(source.inputs) if "*" in source.inputs[key]}
    given = {**pointers, "s_q": 5, "s_kv": 300, "topk": 7, "softmax_scale": 0.05}
    artifact_capture.assert_same_launch(source, given)
