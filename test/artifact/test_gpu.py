"""The launch path on a GPU: the driver runs what the emulator runs."""

from __future__ import annotations

import ctypes
import time

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

from artifact_demo import backend  # noqa: E402
from test_description import DTYPES, MAPS  # noqa: E402

from cudnn_dsa import artifact  # noqa: E402
from cudnn_dsa.artifact import driver, tensor_map  # noqa: E402
from cudnn_dsa.artifact.kernel import Kernel  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in (9, 10):
    pytest.skip("TMA kernels are for Hopper and Blackwell", allow_module_level=True)


@pytest.fixture
def kernel() -> Kernel:
    device = driver.current("cuda:0")
    return Kernel(artifact.find(backend.scale_rows(device.architectures[0])), device)


def values(rows: int) -> dict:
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, 64, device="cuda", generator=generator).bfloat16()
    factor = torch.randn(rows, device="cuda", generator=generator)
    out = torch.full((rows, 64), float("nan"), device="cuda")
    return {"x": x, "factor": factor, "out": out, "rows": rows, "offset": 3, "scale": 0.5}


def check(given: dict) -> None:
    exact = given["x"].double() * given["factor"].double()[:, None] * 0.5 + 3
    torch.testing.assert_close(given["out"].double(), exact, rtol=1e-6, atol=1e-6)


def test_a_launch_on_a_stream(kernel: Kernel) -> None:
    stream = torch.cuda.Stream()
    for rows in (1, 33, 1023, 1024, 100_000):
        given = values(rows)
        stream.wait_stream(torch.cuda.current_stream())
        kernel.launch(stream, given)
        stream.synchronize()
        check(given)


def test_a_launch_in_a_graph(kernel: Kernel) -> None:
    given = values(500)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.launch(torch.cuda.current_stream(), given)
    assert given["out"].isnan().all()
    graph.replay()
    torch.cuda.synchronize()
    check(given)


@pytest.mark.gpu_exclusive
def test_a_launch_takes_a_few_microseconds(kernel: Kernel) -> None:
    given = values(32)
    stream = torch.cuda.current_stream()
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            kernel.launch(stream, given)
        times.append((time.perf_counter() - start) / 100)
    assert sorted(times)[10] < 15e-6


@pytest.mark.parametrize("case", MAPS, ids=lambda case: "-".join(map(str, case)).replace(" ", ""))
def test_a_tensor_map_says_what_the_drivers_own_says(case: tuple) -> None:
    """All fields; not the bits that no field names (the driver promotes L2 reads only as told to, say)."""
    cu = pytest.importorskip("cuda.bindings.driver")
    dtype, shape, strides, box, swizzle = case
    size = tensor_map.TYPES[dtype][1]
    name = {"int32": "UINT32", "int64": "UINT64"}.get(dtype, DTYPES[dtype].upper())
    tensor = torch.empty(256, device="cuda")
    code, made = cu.cuTensorMapEncodeTiled(
        getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{name}"),
        len(shape),
        tensor.data_ptr(),
        [cu.cuuint64_t(n) for n in shape],
        [cu.cuuint64_t(s * size) for s in strides[1:]],
        [cu.cuuint32_t(n) for n in box],
        [cu.cuuint32_t(1)] * len(shape),
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(cu.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{f'{swizzle}B' if swizzle else 'NONE'}"),
        cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    assert code == cu.CUresult.CUDA_SUCCESS
    ours = tensor_map.encode(dtype, shape, [s * size for s in strides[1:]], box, swizzle, tensor.data_ptr())
    assert tensor_map.decode(ctypes.string_at(made.getPtr(), 128)) == tensor_map.decode(ours)
