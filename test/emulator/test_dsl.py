"""CuTe DSL kernels that use one feature alone, equal to NumPy."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

import cutlass.cute as cute  # noqa: E402
import emulator_kernels as kernels  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402

from cute_emulator import AsCuda, ExecutionError, HazardError, emulate  # noqa: E402

SWIZZLES = {"none": (0, 4, 3), "32B": (1, 4, 3), "64B": (2, 4, 3), "128B": (3, 4, 3), "128B atom 32B": (2, 5, 2)}
WIDTH = {"none": 64, "32B": 16, "64B": 32, "128B": 64, "128B atom 32B": 64}


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


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_elementwise(arch: str) -> None:
    a, b = torch.randn(256), torch.zeros(256)
    with emulate(arch) as gpu:
        f = cute.compile(kernels.double, tensor(a), tensor(b), 2)
        f(tensor(a), tensor(b))
    assert torch.equal(b, 2 * a)
    (launch,) = gpu.report.launches
    assert launch.counters["global_load"] == launch.counters["global_store"] == 1024


def test_an_access_out_of_bounds_names_the_tensor_the_thread_and_the_source_line() -> None:
    a, b = torch.randn(256), torch.zeros(256)
    pattern = r"(?s)past the start of argument \d, which has 1024 bytes, lane \d+ \[CTA \(2, 0, 0\), warp \d\]"
    pattern += r".*emulator_kernels.py:\d+"
    with pytest.raises(ExecutionError, match=pattern), emulate("sm_100a", line_info=True):
        cute.compile(kernels.double, tensor(a), tensor(b), 3)(tensor(a), tensor(b))


BREAKS = {
    "wait for the load": (r"@P1 bra\.uni DONE;", "bra.uni DONE;"),
    "proxy fence": (r"fence\.proxy\.async\.shared::cta;", ""),
    "byte count": (r"(mbarrier\.arrive\.expect_tx[^;]*, )(%r\d+);", r"\g<1>16;"),
    "wait for the store": (r"cp\.async\.bulk\.wait_group(\.read)?\s+0;", ""),
    "swizzle": (r"(and\.b32\s+%r\d+, %r\d+), 112;", r"\g<1>, 48;"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_tensor_copy_is_caught(name: str) -> None:
    pattern, replacement = BREAKS[name]
    box = (32, 64)
    source = torch.randn(32, 64).half()
    target, plain = torch.zeros_like(source), torch.zeros_like(source)
    arguments = tensor(source), tensor(target), tensor(plain)
    with emulate("sm_100a"):
        f = cute.compile(kernels.tma_copy, *arguments, box, SWIZZLES["128B"], False, (1, 1, 1))
    broken = []

    def transform(ptx: str) -> str:
        broken.append(re.subn(pattern, replacement, ptx, count=1))
        return broken[-1][0]

    try:
        with emulate("sm_100a", transform=transform):
            f(*arguments)
    except (HazardError, ExecutionError):
        caught = True
    else:
        caught = not (torch.equal(plain, source) and torch.equal(target, 2 * source))
    assert broken[0][1] == 1, "the line to break is not there"
    assert caught


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("rows", [7, 64])
def test_gather_by_cp_async(arch: str, rows: int) -> None:
    g = torch.Generator().manual_seed(rows)
    source = torch.randn(100, 72, generator=g).bfloat16()
    indices = torch.randint(-20, 100, (rows,), generator=g).int()
    target = torch.full((rows, 72), float("nan")).bfloat16()
    with emulate(arch, seed=rows) as gpu:
        arguments = tuple(from_dlpack(AsCuda(t), assumed_align=16) for t in (source, indices, target))
        cute.compile(kernels.gather, *arguments, rows)(*arguments)
    expected = torch.where(indices[:, None] >= 0, source[indices.clamp(min=0).long()], torch.zeros(()).bfloat16())
    assert torch.equal(target, expected)
    assert gpu.report.launches[0].counters["copy_async"] == int((indices >= 0).sum()) * 144


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_bulk_reduction(arch: str) -> None:
    g = torch.Generator().manual_seed(0)
    source = torch.randint(-1000, 1000, (5, 256), generator=g).float()
    target = torch.randint(-1000, 1000, (256,), generator=g).float()
    expected = target + source.sum(0)
    with emulate(arch, seed=2) as gpu:
        arguments = tensor(source), tensor(target)
        cute.compile(kernels.bulk_reduce, *arguments, 256, 5)(*arguments)
    assert torch.equal(target, expected)
    assert gpu.report.launches[0].counters["tma_reduce"] == 5 * 1024


@pytest.mark.parametrize("ctas", [2, 4])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_exchange_in_a_cluster(arch: str, ctas: int) -> None:
    source = torch.randint(-1000, 1000, (ctas, 128), generator=torch.Generator().manual_seed(ctas)).float()
    target = torch.zeros_like(source)
    arguments = tensor(source), tensor(target)
    with emulate(arch, seed=1):
        f = cute.compile(kernels.exchange, *arguments, ctas)
        f(*arguments)
    assert torch.equal(target, source.sum(0).flip(0).expand_as(target))
    with pytest.raises(HazardError, match="read after write"), emulate(arch, transform=without_the_first_barrier):
        f(*arguments)


def without_the_first_barrier(ptx: str) -> str:
    for what in ("arrive", "wait"):
        ptx, n = re.subn(rf"barrier\.cluster\.{what}[^;]*;", "", ptx, count=1)
        assert n
    return ptx


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_one_warp_with_ldmatrix_mma_sync_and_stmatrix(arch: str, transposed: bool) -> None:
    g = torch.Generator().manual_seed(4)
    a = torch.randint(-3, 4, (32, 48), generator=g).half()
    b = torch.randint(-3, 4, (16, 48), generator=g).half()
    d = torch.full((32, 16), float("nan")).half()
    ptx = []
    with emulate(arch, transform=lambda text: ptx.append(text) or text) as gpu:
        arguments = tensor(a), tensor(b), tensor(d)
        cute.compile(kernels.warp_mma, *arguments, transposed)(*arguments)
    assert torch.equal(d, (a.float() @ b.float().T).half())
    assert ("ldmatrix.sync.aligned.m8n8.x4.trans" in ptx[0]) == transposed
    assert "stmatrix.sync.aligned.m8n8" in ptx[0]
    assert gpu.report.launches[0].flops == 2 * 32 * 16 * 48
