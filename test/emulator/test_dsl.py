"""CuTe DSL kernels that use one feature alone, equal to NumPy."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

import cutlass.cute as cute  # noqa: E402
import emulator_kernels as kernels  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402

from cute_emulator import emulate  # noqa: E402

SWIZZLES = {"none": (0, 4, 3), "32B": (1, 4, 3), "64B": (2, 4, 3), "128B": (3, 4, 3)}
WIDTH = {"none": 64, "32B": 16, "64B": 32, "128B": 64}


def tensor(t):
    return from_dlpack(t, assumed_align=16)


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_tma_load_store_and_reduce(swizzle: str, reduce: bool) -> None:
    g = torch.Generator().manual_seed(3)
    box = (32, WIDTH[swizzle])
    # the last tiles hang over the tensor's edge
    source = torch.randn(80, 2 * box[1] - 8, generator=g).half()
    target = torch.randn(source.shape, generator=g).half()
    expected = (target + 2 * source) if reduce else 2 * source
    grid = (3, 2, 1)
    plain = torch.full((96, 2 * box[1]), float("nan")).half()
    with emulate("sm_100a", seed=5):
        f = cute.compile(
            kernels.tma_copy, tensor(source), tensor(target), tensor(plain), box, SWIZZLES[swizzle], reduce, grid
        )
        f(tensor(source), tensor(target), tensor(plain))
    padded = torch.zeros(plain.shape).half()
    padded[: source.shape[0], : source.shape[1]] = source
    assert torch.equal(plain, padded)
    assert torch.equal(target, expected)
