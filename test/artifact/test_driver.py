"""The CUDA driver's part, without one: structures and constants by NVIDIA's own binding, calls by a stand-in."""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import Any

import pytest

pytest.importorskip("cutlass")

from artifact_demo import backend

from cudnn_dsa import artifact
from cudnn_dsa.artifact import driver
from cudnn_dsa.artifact.driver import CudaDevice, DriverError, architectures
from cudnn_dsa.artifact.kernel import Kernel


def test_structures_and_numbers_are_those_of_the_binding() -> None:
    cu = pytest.importorskip("cuda.bindings.driver")
    theirs = cu.CUlaunchConfig()
    theirs.gridDimX, theirs.gridDimY, theirs.gridDimZ = 1, 2, 3
    theirs.blockDimX, theirs.blockDimY, theirs.blockDimZ = 4, 5, 6
    theirs.sharedMemBytes, theirs.hStream = 7, cu.CUstream(0x1122334455)
    ours = driver._CONFIG.pack(1, 2, 3, 4, 5, 6, 7, 0x1122334455, 0, 0)
    assert ours == ctypes.string_at(theirs.getPtr(), driver._CONFIG.size)
    attribute = cu.CUlaunchAttribute()
    attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = 2, 3, 4
    ours = driver._ATTRIBUTE.pack(driver._CLUSTER_DIMENSION, 2, 3, 4)
    assert ours[:4] == ctypes.string_at(attribute.getPtr(), 4)
    assert ours[8:20] == ctypes.string_at(attribute.getPtr() + 8, 12)
    theirs.attrs, theirs.numAttrs = [attribute, attribute], 2
    address, count = driver._CONFIG.unpack(ctypes.string_at(theirs.getPtr(), driver._CONFIG.size))[-2:]
    assert count == 2
    for i in range(2):
        record = ctypes.string_at(address + i * driver._ATTRIBUTE.size, driver._ATTRIBUTE.size)
        assert driver._ATTRIBUTE.unpack(record) == (driver._CLUSTER_DIMENSION, 2, 3, 4)

    function, device = cu.CUfunction_attribute, cu.CUdevice_attribute
    assert driver._MAX_DYNAMIC_SHARED == function.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert driver._NON_PORTABLE_CLUSTER == function.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    assert driver._MULTIPROCESSORS == device.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    assert driver._MAJOR == device.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    assert driver._MINOR == device.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    assert driver._INVALID_CONTEXT == cu.CUresult.CUDA_ERROR_INVALID_CONTEXT


class Driver:
    """Answers as libcuda does and notes what was asked."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        self.calls: list[str] = []
        self.attributes: dict[int, int] = {}
        self.answers: dict[str, list[int]] = {}
        self.launches: list[dict[str, Any]] = []
        self.capability = capability
        self.offsets: tuple[int, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            answers = self.answers.get(name)
            if answers and (code := answers.pop(0)):
                return code
            return getattr(self, "_" + name, lambda *a: 0)(*arguments) or 0

        return call

    def _cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> None:
        value._obj.value = {16: 132, 75: self.capability[0], 76: self.capability[1]}[attribute]

    def _cuDeviceGetName(self, name: Any, size: int, device: Any) -> None:
        name.value = b"NVIDIA H200"

    def _cuLibraryLoadData(self, library: Any, *others: Any) -> None:
        library._obj.value = 0x11B

    def _cuLibraryGetKernel(self, kernel: Any, library: Any, name: bytes) -> None:
        kernel._obj.value = 0xABC

    def _cuKernelSetAttribute(self, attribute: int, value: int, kernel: Any, device: Any) -> None:
        self.attributes[attribute] = value

    def _cuGetErrorName(self, code: int, text: Any) -> None:
        text._obj.value = b"CUDA_ERROR_NAME"

    def _cuGetErrorString(self, code: int, text: Any) -> None:
        text._obj.value = b"what it means"

    def _cuLaunchKernelEx(self, config: Any, kernel: Any, parameters: Any, extra: Any) -> None:
        *extents, shared, stream, attributes, count = driver._CONFIG.unpack(config)
        pointers = struct.unpack(f"<{len(parameters) // 8}Q", parameters)
        assert pointers[0] % 64 == 0
        cluster = None
        if count:
            name, *cluster = driver._ATTRIBUTE.unpack(ctypes.string_at(attributes, driver._ATTRIBUTE.size))
            assert (count, name) == (1, driver._CLUSTER_DIMENSION)
        sizes = [end - start for start, end in zip(self.offsets, self.offsets[1:], strict=False)]
        self.launches.append({
            "grid": tuple(extents[:3]), "block": tuple(extents[3:]), "shared": shared, "stream": stream,
            "cluster": cluster, "kernel": kernel.value, "extra": extra,
            "block bytes": b"".join(ctypes.string_at(p, n) for p, n in zip(pointers, sizes, strict=True)),
        })  # fmt: skip


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(driver, "_library", lambda: made)
    return made


VALUES = {"x": 4096, "factor": 8, "out": 12, "rows": 100, "offset": 5, "scale": 2.0}


@pytest.mark.parametrize("cluster", [1, 2, 16])
def test_a_launch_gives_the_driver_what_was_packed(fake: Driver, cluster: int) -> None:
    device = CudaDevice(0)
    assert (device.kind, device.multiprocessors, device.architectures) == ("NVIDIA H200 sm_90", 132, ("sm_90a",))
    found = artifact.find(backend.scale_rows("sm_90a", cluster=cluster))
    kernel = Kernel(found, device)
    loading = [name for name in fake.calls if "Ctx" in name or "Library" in name or "Function" in name]
    assert loading == [
        "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuLibraryLoadData", "cuLibraryGetKernel",
        "cuKernelGetFunction", "cuCtxPopCurrent_v2",
    ]  # fmt: skip
    assert fake.attributes == {8: backend.SHARED} | ({14: 1} if cluster > 8 else {})
    fake.offsets = found.launch.offsets()
    fake.calls.clear()
    kernel.launch(0xF00, VALUES)
    assert fake.calls == ["cuLaunchKernelEx"], "a launch is one call"
    (launch,) = fake.launches
    config, block = kernel.pack(VALUES)
    assert launch == {
        "grid": config.grid, "block": (128, 1, 1), "shared": backend.SHARED, "stream": 0xF00, "kernel": 0xABC,
        "cluster": [cluster, 1, 1] if cluster > 1 else None, "extra": None, "block bytes": bytes(block),
    }  # fmt: skip


def test_threads_launch_at_once(fake: Driver) -> None:
    """Each has its own parameters."""
    kernel = Kernel(artifact.find(backend.scale_rows("sm_90a")), CudaDevice(0))
    fake.offsets = kernel.artifact.launch.offsets()

    def launch(number: int) -> None:
        for i in range(200):
            kernel.launch(None, {**VALUES, "rows": number, "offset": number, "x": 4096 * number, "out": 16 * i})

    threads = [threading.Thread(target=launch, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = sorted(launch["block bytes"] for launch in fake.launches)
    expected = [
        kernel.pack({**VALUES, "rows": n, "offset": n, "x": 4096 * n, "out": 16 * i})[1]
        for n in range(1, 5)
        for i in range(200)
    ]
    assert seen == sorted(map(bytes, expected))


def test_a_thread_without_a_context_gets_one(fake: Driver) -> None:
    kernel = Kernel(artifact.find(backend.scale_rows("sm_90a")), CudaDevice(0))
    fake.offsets = kernel.artifact.launch.offsets()
    fake.answers["cuLaunchKernelEx"] = [201]
    fake.calls.clear()
    kernel.launch(None, VALUES)
    assert fake.calls == ["cuLaunchKernelEx", "cuCtxPushCurrent_v2", "cuLaunchKernelEx", "cuCtxPopCurrent_v2"]
    assert len(fake.launches) == 1
    assert fake.launches[0]["stream"] == 0


def test_the_drivers_errors_are_said(fake: Driver) -> None:
    kernel = Kernel(artifact.find(backend.scale_rows("sm_90a")), CudaDevice(0))
    fake.answers["cuLaunchKernelEx"] = [719]
    with pytest.raises(DriverError, match=r"launch of grid \(4, 1, 1\).*CUDA_ERROR_NAME \(719\): what it means"):
        kernel.launch(None, VALUES)
    fake.answers["cuLibraryLoadData"] = [209]
    with pytest.raises(DriverError, match="cuLibraryLoadData: CUDA_ERROR_NAME"):
        Kernel(kernel.artifact, CudaDevice(0))
    assert fake.calls.count("cuCtxPushCurrent_v2") == fake.calls.count("cuCtxPopCurrent_v2")


def test_a_kernel_is_unloaded_with_its_last_reference(fake: Driver) -> None:
    kernel = Kernel(artifact.find(backend.scale_rows("sm_90a")), CudaDevice(0))
    assert "cuLibraryUnload" not in fake.calls
    del kernel
    assert fake.calls[-1] == "cuLibraryUnload"


def test_targets_of_a_device() -> None:
    assert architectures(9, 0) == ("sm_90a",)
    assert architectures(10, 0) == ("sm_100a", "sm_100f")
    assert architectures(10, 3) == ("sm_103a", "sm_100f")


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    driver._library.cache_clear()
    driver._cuda.cache_clear()
    try:
        with pytest.raises(DriverError, match="no CUDA driver: libcuda"):
            driver.current("cuda:0")
    finally:
        driver._library.cache_clear()


def test_the_cuda_version_of_the_driver(fake: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(value: Any) -> None:
        value._obj.value = 12090

    monkeypatch.setattr(fake, "_cuDriverGetVersion", answer, raising=False)
    assert driver.cuda_version() == 12
    fake.answers["cuDriverGetVersion"] = [999]
    assert driver.cuda_version() is None


def test_a_driver_without_what_is_needed_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    driver._library.cache_clear()
    try:
        with pytest.raises(driver.DriverError, match="too old: it has no cuInit"):
            driver._library()
        assert driver.cuda_version() is None
    finally:
        driver._library.cache_clear()
