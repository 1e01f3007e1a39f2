"""CuTe DSL kernels of one tensor-core tile each, equal to NumPy's product of the same small integers."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

import cutlass.cute as cute  # noqa: E402
import emulator_mma_kernels as kernels  # noqa: E402
from cutlass.cute.nvgpu import tcgen05  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402

from cute_emulator import emulate  # noqa: E402

TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
K = 64


def operand(rows: int, k: int, major: str, dtype, seed: int):
    """Integers from -3 to 3 as a (rows, k) view whose contiguous dimension is ``major``: sums are exact in fp32."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, (rows, k), generator=g).to(dtype)
    return x if major == "k" else x.t().contiguous().t()


def tensor(t):
    return from_dlpack(t, assumed_align=16)


def product(f, arch: str, m: int, n: int, k: int, majors: str, dtype, *options):
    a, b = operand(m, k, majors[0], dtype, 1), operand(n, k, majors[1], dtype, 2)
    d = torch.full((m, n), float("nan"))
    ptx: list[str] = []

    def keep(text: str) -> str:
        ptx.append(text)
        return text

    with emulate(arch, seed=7, transform=keep) as gpu:
        arguments = tensor(a), tensor(b), tensor(d)
        cute.compile(f, *arguments, (m, n, k), majors, *options)(*arguments)
    expected = a.double().numpy() @ b.double().numpy().T
    assert (d.double().numpy() == expected).all()
    (launch,) = gpu.report.launches
    return ptx[0], launch


MAJORS = ("kk", "mk", "kn", "mn")
LOAD = {
    "32x32b": tcgen05.Ld32x32bOp(tcgen05.Repetition.x64),
    "16x64b": tcgen05.Ld16x64bOp(tcgen05.Repetition.x32),
    "16x128b": tcgen05.Ld16x128bOp(tcgen05.Repetition.x16),
    "16x256b": tcgen05.Ld16x256bOp(tcgen05.Repetition.x8),
}


@pytest.mark.parametrize("majors", MAJORS)
@pytest.mark.parametrize(("m", "n"), [(64, 64), (64, 128), (128, 64), (128, 256)])
def test_umma_from_shared_memory(m: int, n: int, majors: str) -> None:
    load = LOAD["16x256b"] if m == 64 else LOAD["32x32b"]
    _, launch = product(kernels.umma, "sm_100a", m, n, K, majors, torch.bfloat16, 1, load, None)
    assert launch.mma == {f"tcgen05 f16 SS cta_group::1 {m}x{n}x16": (4, 2 * m * n * K)}


# an accumulator of 64 rows uses 16 lanes of each warp's 32
@pytest.mark.parametrize(("m", "shape"), [(m, s) for m in (64, 128) for s in LOAD if (m, s) != (64, "32x32b")])
def test_shapes_of_tensor_memory_loads(m: int, shape: str) -> None:
    ptx, _ = product(kernels.umma, "sm_100a", m, 64, K, "kk", torch.float16, 1, LOAD[shape], None)
    assert re.search(rf"tcgen05\.ld\.sync\.aligned\.{shape}\.", ptx)


@pytest.mark.parametrize("majors", ["kk", "kn"])
@pytest.mark.parametrize(
    ("m", "store"),
    [
        (64, tcgen05.St16x256bOp(tcgen05.Repetition.x4)),
        (64, tcgen05.St16x128bOp(tcgen05.Repetition.x8)),
        (64, tcgen05.St16x64bOp(tcgen05.Repetition.x16)),
        (128, tcgen05.St32x32bOp(tcgen05.Repetition.x32)),
    ],
)
def test_umma_from_tensor_memory(m: int, store, majors: str) -> None:
    load = LOAD["16x256b"] if m == 64 else LOAD["32x32b"]
    ptx, launch = product(kernels.umma, "sm_100a", m, 64, K, majors, torch.bfloat16, 1, load, store)
    assert "tcgen05.st.sync.aligned" in ptx
    assert list(launch.mma) == [f"tcgen05 f16 TS cta_group::1 {m}x64x16"]


@pytest.mark.parametrize("majors", MAJORS)
@pytest.mark.parametrize(("m", "n"), [(128, 128), (256, 128), (256, 256)])
def test_umma_of_two_ctas(m: int, n: int, majors: str) -> None:
    _, launch = product(kernels.umma, "sm_100a", m, n, K, majors, torch.float16, 2, LOAD["32x32b"], None)
    assert list(launch.mma) == [f"tcgen05 f16 SS cta_group::2 {m}x{n}x16"]


# registers have no major, and eight columns are no swizzle atom
@pytest.mark.parametrize(("source", "majors"), [*(("SS", m) for m in MAJORS), ("RS", "kk"), ("RS", "kn")])
@pytest.mark.parametrize("n", [8, 64, 256])
def test_wgmma(n: int, majors: str, source: str) -> None:
    n = 16 if (n, majors[1]) == (8, "n") else n
    _, launch = product(kernels.wgmma, "sm_90a", 64, n, K, majors, torch.bfloat16, source == "RS")
    assert launch.mma == {f"wgmma bf16 {source} 64x{n}x16": (4, 2 * 64 * n * K)}


@pytest.mark.slow
@pytest.mark.parametrize("n", range(8, 257, 8))
def test_wgmma_of_every_width(n: int) -> None:
    _, launch = product(kernels.wgmma, "sm_90a", 64, n, K, "kk", torch.float16, False)
    assert list(launch.mma) == [f"wgmma f16 SS 64x{n}x16"]
