"""The Hopper forward in the emulator, against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dsa_cases import CASES, Sizes, bound, make
from dsa_oracle import relative_error

pytest.importorskip("cutlass")

import artifact_capture
from sm90_problem import forward
from sm100_problem import problem_of

from cudnn_dsa.backends.sm90.sources import sources

SIZES = Sizes(s_q=4, s_kv=150, heads=64, head_dim=576, topk=140)
VARIANTS = {
    "bf16-576": (torch.bfloat16, SIZES),
    "fp16-512": (torch.float16, replace(SIZES, head_dim=512)),
    "fp16-576": (torch.float16, SIZES),
    "bf16-512": (torch.bfloat16, replace(SIZES, head_dim=512)),
}


def assert_forward(name: str, case, got) -> None:
    """out within the contract's bound; lse to fp32's rounding of scores, -inf exactly where there is no key."""
    (out, lse), (want_out, want_lse) = got, case.forward_oracle()
    assert relative_error(out, want_out) <= bound(name, case.q.dtype)
    empty = torch.isneginf(want_lse)
    assert torch.equal(torch.isneginf(lse), empty)
    assert torch.equal(out[empty], torch.zeros_like(out[empty]))
    torch.testing.assert_close(lse[~empty].double(), want_lse[~empty], rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("variant", list(VARIANTS)[:2])
def test_the_contract(variant: str, name: str) -> None:
    dtype, sizes = VARIANTS[variant]
    case = make(name, dtype, sizes)
    assert_forward(name, case, forward(case, seed=len(name), multiprocessors=3)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("variant", list(VARIANTS)[2:])
def test_the_contract_in_the_other_variants(variant: str, name: str) -> None:
    dtype, sizes = VARIANTS[variant]
    case = make(name, dtype, sizes, seed=1)
    assert_forward(name, case, forward(case, seed=len(name), multiprocessors=3)[0])


@pytest.mark.parametrize("topk", [1, 63, 64, 65, 300])
def test_any_number_of_keys(topk: int) -> None:
    case = make("random", torch.bfloat16, replace(SIZES, s_q=3, topk=topk))
    assert_forward("random", case, forward(case, multiprocessors=1)[0])


@pytest.mark.parametrize("heads", [1, 70])
def test_any_number_of_heads(heads: int) -> None:
    case = make("sink", torch.bfloat16, replace(SIZES, s_q=3, heads=heads))
    assert_forward("sink", case, forward(case, multiprocessors=2)[0])


def test_fp32_out_keeps_what_bf16_would_round() -> None:
    """The rounding of P is left, the rounding of out is not."""
    case = make("equal_logits", torch.bfloat16, replace(SIZES, topk=128))  # P is 1 for every key, exact in bf16
    (out, _), _ = forward(case, out_dtype=torch.float32)
    assert relative_error(out, case.forward_oracle()[0]) < 1e-6


@pytest.mark.parametrize("rise", [0.5, 3.0, 40.0])
def test_scores_that_rise_from_tile_to_tile(rise: float) -> None:
    """Below the slack of the running maximum, around it, and far above it, in every tile."""
    case = make("random", torch.bfloat16, replace(SIZES, s_q=2, s_kv=300, topk=300))
    case.topk_idxs = torch.arange(300, dtype=torch.int32).repeat(2, 1)
    case.q, case.kv = case.q.clone(), case.kv.clone()
    case.q[..., 0] = 1 / case.softmax_scale
    case.kv[:, 0] = (torch.arange(300) // 64 * rise).bfloat16()
    assert_forward("random", case, forward(case)[0])


@pytest.mark.parametrize("scale", [0.0, -0.07])
def test_a_scale_that_is_not_positive(scale: float) -> None:
    case = make("sink", torch.bfloat16, SIZES)
    case.softmax_scale = scale
    assert_forward("sink", case, forward(case)[0])


@pytest.mark.parametrize("variant", ["bf16-576", "fp16-512"])
def test_the_schedule_changes_nothing(variant: str) -> None:
    dtype, sizes = VARIANTS[variant]
    case = make("sink", dtype, replace(sizes, s_q=3, topk=260))
    first = forward(case, schedule="eager")[0]
    for seed in range(5):
        again = forward(case, seed=seed, multiprocessors=1 + seed % 3)[0]
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


@pytest.mark.parametrize("name", ["sink", "topk_length"])
def test_the_description_is_what_the_host_code_launches(name: str) -> None:
    problem = problem_of(make(name, torch.bfloat16, replace(SIZES, heads=70)), "forward", backend="sm90")
    (source,) = sources(problem, "sm_90a")
    pointers = {key: 4096 * (1 + i) for i, key in enumerate(source.inputs) if "*" in source.inputs[key]}
    for sizes in ({"s_q": 5, "s_kv": 300, "topk": 7}, {"s_q": 1, "s_kv": 1, "topk": 2000}):
        given = {**pointers, **sizes, "softmax_scale": 0.05, "multiprocessors": 3}
        artifact_capture.assert_same_launch(source, given)
