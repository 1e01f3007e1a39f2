"""The cuDNN frontend's SM100 backward kernels: gradients against float64, no hazards, two public bugs.

Rounding the gradients to bf16 alone gives a relative error of about 2**-9 / sqrt(3) = 1.1e-3; the kernels also round P
and dS to bf16 on the way (as the hardware's users see), which is why the bound is 4e-3.
"""

from __future__ import annotations

import pytest
from emulator_cudnn import PLANS, Plan, backward, backward_entry, compiled, errors, problem, torch

from cute_emulator import HazardError

cutlass = pytest.importorskip("cutlass")

BOUND = 4e-3


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", PLANS)
def test_gradients(name: str, seed: int) -> None:
    p = problem(PLANS[name], queries=2, keys=128)
    gpu, grads = backward(p, seed=seed)
    assert gpu.report.hazards == []
    for gradient, e in errors(p, grads).items():
        assert e < BOUND, gradient


@pytest.mark.parametrize("seed", [0, 1])
def test_gradients_of_the_hopper_kernel(seed: int) -> None:
    p = problem(Plan("sm90", 64, 64, 512), queries=2)
    gpu, grads = backward_entry(p, seed=seed)
    assert gpu.report.hazards == []
    assert any(shape.startswith("wgmma bf16 RS") for launch in gpu.report.launches for shape in launch.mma)
    assert max(errors(p, grads).values()) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_gradients_on_twenty_seeds(name: str) -> None:
    p = problem(PLANS[name], queries=3, keys=512, tokens=600)
    for seed in range(20):
        gpu, grads = backward(p, seed=seed)
        assert gpu.report.hazards == []
        assert max(errors(p, grads).values()) < BOUND, seed


def test_the_schedule_does_not_change_what_is_executed() -> None:
    """The counters that no schedule may change: products of the tensor cores and bytes of the bulk copies."""
    p = problem(PLANS["H64 D512"])
    first, second = (
        backward(p, seed=s, schedule=k)[0].report.launches[2] for s, k in ((3, "adversarial"), (0, "eager"))
    )
    assert first.mma == second.mma
    # S, dP, dQ and the two parts of dKV: five products of H x K x 512
    assert first.flops == 5 * 2 * 64 * 128 * 512
    for counter in ("tma_load", "copy_async", "exp", "atomics", "tmem_load"):
        assert first.counters[counter] == second.counters[counter]


def test_bf16_kernel_fed_fp16_data_is_wrong_without_an_error() -> None:
    """A public bug: the kernel's element type was bf16 whatever the tensors were. fp16 tensors pass every check."""
    p = problem(PLANS["H64 D512"], queries=2, dtype=torch.float16)
    _, grads = backward_entry(p, "sm_100a")
    assert max(errors(p, grads).values()) < BOUND  # typed as the tensors are
    _, grads = backward_entry(p, "sm_100a", types={torch.float16: cutlass.BFloat16})
    right = (grads["dq"].double() - p.expected["dq"]).abs() <= 0.05 * p.expected["dq"].abs()  # False where dq is NaN
    assert right.double().mean() < 0.1
    assert errors(p, grads)["d_sink"] < 1e-5  # of a kernel that reads its tensors' own type: nothing gives it away


def test_a_compiled_plan_refuses_other_types_and_shapes() -> None:
    """What stands before the two bugs today: the launchable knows its arguments' types and shapes."""
    with pytest.raises(ValueError, match="Mismatched Tensor"):
        backward(problem(PLANS["H64 D512"], queries=2, dtype=torch.float16))
    p = problem(PLANS["H64 D512"], queries=2)
    p.dout = p.dout.transpose(0, 1)
    with pytest.raises(ValueError, match=r"Mismatched mdO.shape\[0\]"):
        backward(p)


def test_dout_with_swapped_dimensions_is_wrong_without_an_error() -> None:
    """A public bug: dout laid out as (heads, queries, D_v); with as many queries as heads no check can see it."""
    p = problem(PLANS["H64 D512"], queries=64, keys=64)
    p.dout = p.dout.transpose(0, 1).contiguous()
    _, grads = backward_entry(p, "sm_100a")
    assert min(errors(p, grads).values()) > 0.5


def test_a_hazard_is_raised_and_names_both_places() -> None:
    p = problem(PLANS["H64 D512"])
    with pytest.raises(
        HazardError, match=r"(?s)fence.proxy.async.*PTX line \d+: .*against warp \d+ of CTA 0.*PTX line \d+: "
    ):
        backward(p, transform=lambda ptx: ptx.replace("fence.proxy.async.shared::cta;", ""))


def test_compiled_functions_are_kept() -> None:
    assert compiled(PLANS["H64 D512"], 128, True) is compiled(PLANS["H64 D512"], 128, True)
