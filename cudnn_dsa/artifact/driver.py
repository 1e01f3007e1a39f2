"""The CUDA driver: the few functions that load and launch a kernel, through ctypes.

libcuda is on every machine that can run a kernel; a binding of it need not be, and a call through one costs more than
the launch. ``Device`` is what an artifact runs on; ``cute_emulator.device`` installs one that is no GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import threading
from collections.abc import Iterator, Mapping
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_void_p
from dataclasses import dataclass, field
from typing import Any, Protocol

from cudnn_dsa.artifact.description import Artifact

MAX_KERNELS = 512  # loaded at a time, and remembered by problem


@dataclass(frozen=True)
class Configuration:
    """Extents of a launch, for one set of sizes."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared: int


class Device(Protocol):
    """What runs artifacts.

    Attributes:
        architectures: targets whose machine code it runs, the best first.
        kind: names the model and, for anything but silicon, what it is: the verdict of a self-test holds for a kind.
        multiprocessors: how many.
        memory: kernels by problem, see ``load``.
    """

    architectures: tuple[str, ...]
    kind: str
    multiprocessors: int
    memory: Memory

    def load(self, artifact: Artifact) -> Any:
        """A handle of the artifact's kernel."""

    def launch(
        self, handle: Any, config: Configuration, block: bytearray, stream: Any, values: Mapping[str, Any]
    ) -> None:
        """Launch on ``stream``.

        Args:
            block: the parameters, at the offsets of the artifact's ``launch``.
            values: the inputs as the caller gave them, by name.
        """


@dataclass
class Memory:
    """Loaded kernels by key, the oldest forgotten first; threads share it."""

    lock: Any = field(default_factory=threading.RLock)
    kernels: dict[Any, Any] = field(default_factory=dict)

    def keep(self, key: Any, value: Any) -> None:
        """Call it with the lock held."""
        while len(self.kernels) >= MAX_KERNELS:
            del self.kernels[next(iter(self.kernels))]
        self.kernels[key] = value


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


# CUlaunchConfig: grid, block, shared memory, stream, attributes and their number. Packing it costs a tenth of what
# filling a ctypes structure does, and a backward is several launches.
_CONFIG = struct.Struct("<7I4xQQI4x")
_ATTRIBUTE = struct.Struct("<I4x3I52x")  # CUlaunchAttribute, of a cluster: its id, and a value of 64 bytes
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_NON_PORTABLE_CLUSTER = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_PORTABLE_CLUSTER = 8
_MAP_ALIGNMENT = 64  # of a CUtensorMap
_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76  # CU_DEVICE_ATTRIBUTE_...
_INVALID_CONTEXT = 201


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"no CUDA driver: {error}") from None
    for name, types in {
        "cuInit": (c_uint,),
        "cuDriverGetVersion": (POINTER(c_int),),
        "cuGetErrorName": (c_int, POINTER(c_char_p)),
        "cuGetErrorString": (c_int, POINTER(c_char_p)),
        "cuDeviceGet": (POINTER(c_int), c_int),
        "cuDeviceGetName": (c_char_p, c_int, c_int),
        "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
        "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
        "cuCtxPushCurrent_v2": (c_void_p,),
        "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
        "cuLibraryLoadData": (POINTER(c_void_p), c_char_p, c_void_p, c_void_p, c_uint, c_void_p, c_void_p, c_uint),
        "cuLibraryGetKernel": (POINTER(c_void_p), c_void_p, c_char_p),
        "cuLibraryUnload": (c_void_p,),
        "cuKernelGetFunction": (POINTER(c_void_p), c_void_p),
        "cuKernelSetAttribute": (c_int, c_int, c_void_p, c_int),
        "cuLaunchKernelEx": (c_char_p, c_void_p, c_char_p, c_void_p),
    }.items():
        try:
            getattr(library, name).argtypes = types
        except AttributeError:
            raise DriverError(f"the CUDA driver is too old: it has no {name}") from None
    return library


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_library(), name)(*arguments)
    if code:
        raise DriverError(f"{name}: {_error(code)}")


def _error(code: int) -> str:
    texts = []
    for name in ("cuGetErrorName", "cuGetErrorString"):
        text = c_char_p()
        getattr(_library(), name)(code, byref(text))
        texts.append((text.value or b"?").decode())
    return f"{texts[0]} ({code}): {texts[1]}"


class _Staging(threading.local):
    """Where a thread's parameters stand while the driver copies them: aligned as tensor maps are in a C program."""

    def __init__(self, offsets: tuple[int, ...]) -> None:
        size = offsets[-1]
        self._memory = ctypes.create_string_buffer(size + _MAP_ALIGNMENT)
        base = -(-ctypes.addressof(self._memory) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
        self.view = memoryview((ctypes.c_char * size).from_address(base)).cast("B")
        self.pointers = struct.pack(f"<{len(offsets) - 1}Q", *(base + offset for offset in offsets[:-1]))


class _LoadedCubin:
    """A kernel of a loaded cubin; unloaded with the last reference."""

    def __init__(self, artifact: Artifact, device: int) -> None:
        library, kernel, function = c_void_p(), c_void_p(), c_void_p()
        _call("cuLibraryLoadData", byref(library), artifact.cubin, None, None, 0, None, None, 0)
        self._library = library
        _call("cuLibraryGetKernel", byref(kernel), library, artifact.entry.encode())
        # Loads it in the current context: what is loaded lazily cannot be launched while a graph is captured.
        _call("cuKernelGetFunction", byref(function), kernel)
        cluster = artifact.launch.cluster
        _call("cuKernelSetAttribute", _MAX_DYNAMIC_SHARED, artifact.launch.shared, kernel, device)
        if cluster[0] * cluster[1] * cluster[2] > _PORTABLE_CLUSTER:
            _call("cuKernelSetAttribute", _NON_PORTABLE_CLUSTER, 1, kernel, device)
        self.kernel = kernel
        self.staging = _Staging(artifact.launch.offsets())
        self._attribute = ctypes.create_string_buffer(_ATTRIBUTE.pack(_CLUSTER_DIMENSION, *cluster), _ATTRIBUTE.size)
        self.attributes = (ctypes.addressof(self._attribute), 1) if cluster != (1, 1, 1) else (0, 0)

    def __del__(self) -> None:
        if getattr(self, "_library", None):
            with contextlib.suppress(Exception):  # at exit the driver may be gone first
                _library().cuLibraryUnload(self._library)


class CudaDevice:
    """A GPU, by its index among those that the process sees."""

    def __init__(self, index: int) -> None:
        device, value, name = c_int(), c_int(), ctypes.create_string_buffer(256)
        _call("cuInit", 0)
        _call("cuDeviceGet", byref(device), index)
        found = []
        for attribute in (_MULTIPROCESSORS, _MAJOR, _MINOR):
            _call("cuDeviceGetAttribute", byref(value), attribute, device)
            found.append(value.value)
        _call("cuDeviceGetName", name, 256, device)
        self._context = c_void_p()  # the primary context, the one that PyTorch uses
        _call("cuDevicePrimaryCtxRetain", byref(self._context), device)
        self.multiprocessors, major, minor = found
        self.architectures = architectures(major, minor)
        self.kind = f"{name.value.decode()} sm_{major}{minor}"
        self.memory = Memory()
        self._device = device.value

    def load(self, artifact: Artifact) -> _LoadedCubin:
        with self._current():
            return _LoadedCubin(artifact, self._device)

    def launch(
        self, handle: _LoadedCubin, config: Configuration, block: bytearray, stream: Any, values: Mapping[str, Any]
    ) -> None:
        raw = getattr(stream, "cuda_stream", stream) or 0
        packed = _CONFIG.pack(*config.grid, *config.block, config.shared, raw, *handle.attributes)
        staging = handle.staging
        staging.view[:] = block
        launch = _library().cuLaunchKernelEx
        code = launch(packed, handle.kernel, staging.pointers, None)
        if code == _INVALID_CONTEXT:  # a thread that has not used this device yet
            with self._current():
                code = launch(packed, handle.kernel, staging.pointers, None)
        if code:
            raise DriverError(f"launch of grid {config.grid}, block {config.block}: {_error(code)}")

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        _call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent_v2", byref(c_void_p()))


def cuda_version() -> int | None:
    """The newest major version of CUDA that the driver takes; None without a driver."""
    value = c_int()
    try:
        _call("cuDriverGetVersion", byref(value))
    except DriverError:
        return None
    return value.value // 1000


def architectures(major: int, minor: int) -> tuple[str, ...]:
    """The targets whose code runs on a compute capability, the best first: its own, then the family's."""
    return (f"sm_{major}{minor}a", f"sm_{major}0f") if major >= 10 else (f"sm_{major}{minor}a",)


_installed: list[Device] = []


@contextlib.contextmanager
def install(device: Device) -> Iterator[None]:
    """Run artifacts on ``device`` instead of on a GPU, whatever device a problem names. For tests."""
    _installed.append(device)
    try:
        yield
    finally:
        _installed.remove(device)


def installed() -> Device | None:
    """What :func:`install` put in the place of GPUs, or None."""
    return _installed[-1] if _installed else None


def current(device: str) -> Device:
    """What runs the problems of a torch device, ``"cuda:0"``: the GPU, or what :func:`install` put in its place.

    Raises:
        DriverError: there is no such GPU, or no driver.
    """
    return installed() or _cuda(int(device.partition(":")[2] or 0))


@functools.lru_cache(maxsize=64)
def _cuda(index: int) -> CudaDevice:
    return CudaDevice(index)


__all__ = ["Configuration", "CudaDevice", "Device", "DriverError", "Memory", "current", "install", "installed"]
