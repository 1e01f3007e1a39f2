"""The SM100 backward, run whole in the emulator (adversarial schedule, poison, hazard checker), against float64.

CI runs a covering subset; the slow part covers pairs of (heads, head_dim, dtype, case, S_q, K) and runs twelve named
cases on twenty seeds each.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("cutlass")

import dsa_cases
from dsa_cases import Sizes, assert_gradients
from sm100_problem import backward

from cudnn_dsa.backends.sm100 import plans
from cute_emulator import EmulatorError

BF16, FP16 = torch.bfloat16, torch.float16


def check(name: str, dtype: torch.dtype, sizes: Sizes, seed: int = 0, **options) -> None:
    case = dsa_cases.make(name, dtype, sizes, seed)
    got, gpu = backward(case, seed=seed, **options)
    assert gpu.report.hazards == []
    assert_gradients(name, case, got, options.get("delta"))


# case, dtype, S_q, S_kv, H, D, K: every H tile, both dims and dtypes, tiles full, ragged, several and none.
COVERING = [
    ("random", BF16, 3, 150, 64, 576, 130),
    ("scattered_invalid", FP16, 1, 90, 64, 576, 100),
    ("topk_length", BF16, 3, 100, 24, 512, 70),
    ("sink_mixed", FP16, 1, 200, 16, 576, 150),
    ("empty_rows", BF16, 3, 100, 16, 576, 65),
    ("duplicates", FP16, 3, 70, 96, 512, 64),
    ("sink_and_empty_rows", FP16, 3, 70, 96, 512, 20),
    ("odd_lengths", BF16, 6, 70, 24, 512, 66),
    ("poisoned_rows", BF16, 3, 150, 64, 576, 140),
    ("logits_200", FP16, 1, 80, 16, 576, 64),
]


@pytest.mark.parametrize(("name", "dtype", "s_q", "s_kv", "heads", "head_dim", "topk"), COVERING)
def test_gradients(name, dtype, s_q, s_kv, heads, head_dim, topk) -> None:
    check(name, dtype, Sizes(s_q, s_kv, heads, head_dim, topk), seed=1)


PAIRWISE = [
    (1, 512, BF16, "random", 1, 64),
    (1, 576, FP16, "sink", 3, 100),
    (1, 576, BF16, "cut_off_entries", 3, 130),
    (16, 512, FP16, "topk_length", 3, 130),
    (16, 576, BF16, "sink_plus_inf", 1, 64),
    (24, 576, FP16, "empty_rows", 1, 130),
    (24, 512, BF16, "sink_mixed", 3, 64),
    (32, 512, BF16, "scattered_invalid", 3, 100),
    (32, 576, FP16, "duplicates", 1, 64),
    (32, 512, FP16, "odd_lengths", 6, 100),
    (64, 512, FP16, "sink_minus_inf", 3, 100),
    (64, 512, BF16, "hot_key", 1, 130),
    (64, 576, FP16, "cut_off_entries", 3, 64),
    (96, 576, BF16, "sink_overflow", 1, 100),
    (96, 576, FP16, "leading_invalid", 3, 130),
    (96, 512, BF16, "topk_length", 1, 64),
    (128, 576, BF16, "random", 3, 130),
    (128, 512, FP16, "scattered_invalid", 1, 64),
    (128, 512, BF16, "sink_and_empty_rows", 3, 100),
    (128, 576, FP16, "one_row_for_all", 1, 100),
]


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "head_dim", "dtype", "name", "s_q", "topk"), PAIRWISE)
def test_pairs(heads, head_dim, dtype, name, s_q, topk) -> None:
    check(name, dtype, Sizes(s_q, 150, heads, head_dim, topk), seed=2)


TWELVE = (
    "random", "topk_length", "sink_mixed", "sink_and_empty_rows", "logits_200", "hot_key", "empty_rows",
    "scattered_invalid", "duplicates", "odd_lengths", "poisoned_rows", "cut_off_entries",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TWELVE)
def test_twenty_schedules(name: str) -> None:
    for seed in range(20):
        check(name, BF16, Sizes(2, 180, 64, 576, 150), seed)


@pytest.mark.slow
def test_a_real_row_of_2048_keys() -> None:
    check("random", BF16, Sizes(1, 4096, 64, 576, 2048))


def test_the_same_dq_and_d_sink_whatever_the_schedule() -> None:
    case = dsa_cases.make("sink", BF16, Sizes(2, 90, 16, 512, 80))
    first, *others = [backward(case, seed=seed)[0] for seed in (1, 2, 3)]
    for other in others:
        assert torch.equal(first[0], other[0])
        assert torch.equal(first[2], other[2])


@pytest.mark.parametrize(
    ("name", "dtype", "heads", "head_dim", "queries_at_a_time"),
    [
        ("duplicates", BF16, 16, 512, 3),
        ("scattered_invalid", BF16, 16, 512, 2),
        pytest.param("odd_lengths", FP16, 96, 576, 1, marks=pytest.mark.slow),
        pytest.param("sink_and_empty_rows", FP16, 96, 576, 4, marks=pytest.mark.slow),
        pytest.param("one_row_for_all", BF16, 16, 512, 2, marks=pytest.mark.slow),
    ],
)
def test_deterministic(monkeypatch, name, dtype, heads, head_dim, queries_at_a_time) -> None:
    """The same bits in every schedule, right ones, with the queries in one chunk or in several."""
    sizes = Sizes(5, 70, heads, head_dim, 90)
    monkeypatch.setattr(plans, "PARTIALS", queries_at_a_time * 4 * -(-heads // 64) * sizes.topk * head_dim)
    plans.workspace.cache_clear()
    case = dsa_cases.make(name, dtype, sizes)
    first, gpu = backward(case, deterministic=True, seed=1)
    assert len([x for x in gpu.report.launches if x.block == (640, 1, 1)]) == -(-5 // queries_at_a_time)
    assert_gradients(name, case, first)
    for seed in (2, 3):
        assert torch.equal(first[1], backward(case, deterministic=True, seed=seed)[0][1])
    start = torch.full((70, head_dim), 3.0)
    added, again = start.clone(), start.clone()
    backward(case, deterministic=True, dkv=added, accumulate=True, seed=4)
    backward(case, deterministic=True, dkv=again, accumulate=True, seed=5)
    assert torch.equal(added, again)
    assert_gradients(name, case, (first[0], added - start, first[2]))
    plans.workspace.cache_clear()


def test_delta_and_fp32_out_as_given() -> None:
    case = dsa_cases.make("logits_200", BF16, Sizes(2, 90, 16, 512, 80), out_dtype=torch.float32)
    assert_gradients("logits_200", case, backward(case)[0])
    delta = torch.randn(case.lse.shape, generator=torch.Generator().manual_seed(3))
    got, _ = backward(case, delta=delta)
    assert_gradients("logits_200", case, got, delta)


def test_fp32_dkv_is_added_to() -> None:
    case = dsa_cases.make("random", BF16, Sizes(2, 90, 16, 512, 80))
    start = torch.randn(90, 512, generator=torch.Generator().manual_seed(4))
    dkv = start.clone()
    (dq, _, _), _ = backward(case, dkv=dkv, accumulate=True)
    assert_gradients("random", case, (dq, dkv - start, None))
    overwritten = torch.full_like(start, float("nan"))
    (_, fresh, _), _ = backward(case, dkv=overwritten)
    assert_gradients("random", case, (dq, fresh, None))
    assert torch.allclose(fresh, dkv - start, atol=1e-5)


@pytest.mark.parametrize("magnitude", [1e-4, 1e-2, 1e3])
def test_fp16_gradients_of_any_magnitude(magnitude: float) -> None:
    """A loss scale, or none: dS lies below fp16's smallest number or above its largest."""
    sizes = Sizes(2, 90, 16, 512, 80)
    case = dsa_cases.make("random", FP16, sizes)
    case = dataclasses.replace(case, dout=(case.dout.double() * magnitude).to(FP16))
    got, _ = backward(case, dkv=torch.zeros(90, 512))
    # dq is fp16 and may underflow itself, which relative_error allows for.
    assert_gradients("random", case, got)


@pytest.mark.parametrize("infinite", ["q", "kv", "dout"])
def test_fp16_non_finite_inputs_are_not_hidden(infinite: str) -> None:
    """An infinity of the inputs must reach the gradients; the gain's bound is infinite then."""
    case = dsa_cases.make("random", FP16, Sizes(1, 70, 16, 512, 64))
    getattr(case, infinite)[..., 0] = torch.inf
    (dq, dkv, _), _ = backward(case)
    assert not torch.isfinite(dkv).all()
    if infinite != "q":  # dq depends on q through P alone, and the lse is given
        assert not torch.isfinite(dq).all()


# What is deleted -> how many sites the kernel has (but for a wait for copies that only a query without a key needs).
BREAKS = {"fence.proxy.async": 2, "tcgen05.commit": 9, "mbarrier.arrive": 7, "cp.async.wait_group": 1}


def site(ptx: str, what: str, number: int) -> int:
    """The line of the main kernel's ``number``-th ``what``; -1 in any other kernel."""
    lines = [i for i, line in enumerate(ptx.splitlines()) if what in line] if "tcgen05.mma" in ptx else []
    return lines[number] if number < len(lines) else -1


@pytest.mark.parametrize(("what", "number"), [(what, i) for what, count in BREAKS.items() for i in range(count)])
def test_a_broken_line_is_caught(what: str, number: int) -> None:
    """The checker or the comparison sees each of these."""
    case = dsa_cases.make("random", BF16, Sizes(1, 300, 16, 512, 300))
    removed = []

    def without(ptx: str) -> str:
        line = site(ptx, what, number)
        if line < 0:
            return ptx
        lines = ptx.splitlines()
        removed.append(lines[line])
        return "\n".join(lines[:line] + lines[line + 1 :])

    with pytest.raises((EmulatorError, AssertionError)):
        assert_gradients("random", case, backward(case, transform=without)[0])
    assert len(removed) == 1
