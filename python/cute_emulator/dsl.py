"""``emulate``: CuTe DSL calls on CPU tensors, run by the emulator.

The DSL compiles as for the real architecture; its jitted host code is linked against the stand-in runtime library
(``csrc/emulator/runtime.c``), which calls back here to load an image, find a kernel and launch. The PTX that belongs to
an image is found by the image's bytes, which the DSL keeps beside the PTX when it is told to.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from .core import libraries
from .errors import EmulatorError, HazardError, LaunchError
from .launch import Options, Region, launch, load
from .report import Report
from .run import memory_of


@dataclass
class _Library:
    image: int
    ptx: str | None = None


@dataclass
class Gpu:
    """The emulated device of an :func:`emulate` block. ``report`` holds what happened so far."""

    arch: str
    options: Options
    report: Report = field(default_factory=Report)
    regions: list[Region] = field(default_factory=list)
    strict: bool = False
    transform: Callable[[str], str] | None = None
    error: BaseException | None = None

    def track(self, **tensors: Any) -> None:
        """Names memory that kernels may touch beside the arguments of the call (``gpu.track(workspace=w)``)."""
        for name, t in tensors.items():
            memory = memory_of(t)
            if memory is None:
                raise LaunchError(f"{name} is neither an array nor a tensor")
            self.regions.append(Region(*memory, name))


# What the process has seen: images by handle, kernels by handle, PTX by image bytes. Compiled functions outlive the
# block that compiled them, so this does too.
_libraries: list[_Library] = []
_kernels: list[tuple[_Library, str]] = []
_ptx_of_image: dict[bytes, str] = {}
_current: list[Gpu] = []


_FATBINARY = 0xBA55ED50


def _image_bytes(address: int) -> bytes:
    """The image handed to the runtime: a fatbinary (whose header says how long it is) or a bare ELF file."""
    head = ctypes.string_at(address, 64)
    magic, _, header, size = struct.unpack_from("<IHHQ", head)
    if magic == _FATBINARY:
        return ctypes.string_at(address, header + size)
    if head[:4] != b"\x7fELF":
        raise LaunchError(f"the kernel image is neither an ELF file nor a fatbinary: {head[:8].hex()}")
    programs, sections = struct.unpack_from("<QQ", head, 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<HHHH", head, 54)
    return ctypes.string_at(
        address, max(sections + section_size * section_count, programs + program_size * program_count)
    )


def _on_load(image: int) -> int:
    _libraries.append(_Library(image))
    return len(_libraries)


def _on_kernel(library: int, name: bytes) -> int:
    _kernels.append((_libraries[library - 1], name.decode()))
    return len(_kernels)


def _on_launch(config: int, kernel: int, arguments: int) -> int:
    gpu = _current[-1] if _current else None
    if gpu is None:
        print("cute_emulator: a function compiled for emulation was called outside emulate()", file=sys.stderr)
        return 1
    try:
        _launch(gpu, config, kernel, arguments)
    except BaseException as e:
        gpu.error = e
        return 1
    return 0


def _ptx_of(library: _Library) -> str:
    if library.ptx is None:
        image = _image_bytes(library.image)
        library.ptx = _ptx_of_image.get(image)
        if library.ptx is None:  # the cubin lies inside a fatbinary
            library.ptx = next((t for k, t in _ptx_of_image.items() if k in image or image in k), None)
        if library.ptx is None:
            raise LaunchError("no PTX is known for this kernel image: was the function compiled inside emulate()?")
    return library.ptx


_CLUSTER_DIMENSION = 4  # cudaLaunchAttributeClusterDimension


def _launch(gpu: Gpu, config: int, kernel: int, arguments: int) -> None:
    library, name = _kernels[kernel - 1]
    text = _ptx_of(library)
    module = load(gpu.transform(text) if gpu.transform else text)
    entry = module.program(name).kernel.entry
    *dims, shared = struct.unpack("<6IQ", ctypes.string_at(config, 32))
    attributes, count = struct.unpack("<QI", ctypes.string_at(config + 40, 12))
    cluster = entry.cluster or (1, 1, 1)
    for i in range(count):
        if ctypes.c_uint32.from_address(attributes + 72 * i).value == _CLUSTER_DIMENSION:
            cluster = struct.unpack("<3I", ctypes.string_at(attributes + 72 * i + 8, 12))
    pointers: Any = (ctypes.c_uint64 * len(entry.parameters)).from_address(arguments) if entry.parameters else []
    parameters = [ctypes.string_at(a, p.size) for a, p in zip(pointers, entry.parameters, strict=True)]
    report = launch(
        module,
        name,
        dims[:3],
        dims[3:],
        parameters,
        cluster=cluster,
        dynamic_shared=shared,
        regions=gpu.regions,
        strict=gpu.strict,
        options=gpu.options,
    )
    gpu.report.launches.append(report)


@cache
def _callbacks() -> tuple[Any, ...]:
    stub = ctypes.CDLL(str(libraries()[1]))
    callbacks = (
        ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(_on_load),
        ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p)(_on_kernel),
        ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)(_on_launch),
    )
    stub.emu_set_callbacks(*callbacks)
    return stub, callbacks


class _Patches:
    """Attributes and environment variables that are put back in the end."""

    def __init__(self) -> None:
        self._undo: list[Any] = []

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        missing = object()
        old = vars(owner).get(name, missing) if hasattr(owner, "__dict__") else getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append(lambda: delattr(owner, name) if old is missing else setattr(owner, name, old))

    def environment(self, name: str, value: str) -> None:
        old = os.environ.get(name)
        os.environ[name] = value
        self._undo.append(lambda: os.environ.pop(name, None) if old is None else os.environ.__setitem__(name, old))

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


class AsCuda:
    """A CPU tensor that says it lies on a CUDA device, for code that compiles from example tensors.

    ``from_dlpack(AsCuda(t))`` describes global memory, as a tensor on a GPU would; everything else is the tensor's.
    """

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the tensor's own fast exchange protocols would give the CPU away
            raise AttributeError(name)
        return getattr(self.tensor, name)

    def detach(self) -> AsCuda:
        return self

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self.tensor.detach().__dlpack__()
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        ctypes.c_int32.from_address(get(capsule, b"dltensor") + 8).value = 2  # DLDevice.device_type: kDLCUDA
        return capsule


def _as_cuda(x: Any) -> Any:
    """A CPU tensor as tvm-ffi's CUDA tensor on the same memory; anything else as it is."""
    if not (hasattr(x, "data_ptr") and hasattr(x, "element_size") and x.device.type == "cpu"):
        return x
    import tvm_ffi

    return tvm_ffi.from_dlpack(AsCuda(x))


def _track_arguments(gpu: Gpu, arguments: tuple[Any, ...]) -> None:
    gpu.regions = [r for r in gpu.regions if not r.name.startswith("argument ")]
    gpu.strict = True
    for i, x in enumerate(arguments):
        x = getattr(x, "tensor", x)
        memory = memory_of(x)
        if memory is None and hasattr(x, "data_ptr") and hasattr(x, "_dltensor_wrapper"):
            memory = _cute_tensor_memory(x)
        if memory is not None:
            gpu.regions.append(Region(*memory, f"argument {i}"))
        elif type(x).__name__ in ("_Pointer", "Pointer") or "Pointer" in type(x).__name__:
            gpu.strict = False  # nobody says how far it reaches
    gpu.strict = gpu.strict and bool(gpu.regions)


def _cute_tensor_memory(x: Any) -> tuple[int, int] | None:
    try:
        shape, stride, bits = x.shape, x.stride, x.element_type.width
        n = 1 + sum((int(s) - 1) * int(t) for s, t in zip(shape, stride, strict=True))
        return int(x.data_ptr), (n * bits + 7) // 8
    except (AttributeError, TypeError, ValueError):
        return None


@contextmanager
def emulate(
    arch: str = "sm_100a",
    *,
    seed: int = 0,
    schedule: str = "adversarial",
    check: bool = True,
    profile: bool = False,
    instruction_limit: int = 0,
    line_info: bool = False,
    raise_on_hazard: bool = True,
    transform: Callable[[str], str] | None = None,
) -> Iterator[Gpu]:
    """Runs CuTe DSL calls on CPU tensors as if a GPU of ``arch`` were there.

    Inside the block ``cute.compile`` compiles for ``arch`` and compiled functions launch into the emulator, tvm-ffi
    ones included. A function compiled inside one block may be called inside another one.

    Args:
        arch: "sm_100a" or "sm_90a".
        seed, schedule, check, profile, instruction_limit: see :class:`cute_emulator.launch.Options`.
        line_info: compile with source lines, so that hazards name them.
        raise_on_hazard: raise :class:`HazardError` on leaving the block if the checker found hazards.
        transform: applied to the PTX of each launched module: how mutation tests break a kernel.

    Yields: a :class:`Gpu`; its ``report`` has a :class:`LaunchReport` for each launch.

    Raises: from inside the block, what :func:`run_ptx` raises.
    """
    try:
        import cutlass.base_dsl.jit_executor as base_executor
        from cutlass.cutlass_dsl import cuda_jit_executor
        from cutlass.cutlass_dsl import cutlass as cutlass_dsl
    except ImportError as e:
        raise EmulatorError("emulate() needs nvidia-cutlass-dsl; run_ptx() does not") from e
    _callbacks()
    gpu = Gpu(arch, Options(seed, schedule, check, profile, instruction_limit), transform=transform)
    patches = _Patches()
    stub = str(libraries()[1])
    dump = tempfile.TemporaryDirectory(prefix="cute_emulator_")
    settings = {"LIBS": stub, "ARCH": arch, "KEEP": "ptx,cubin", "DUMP_DIR": dump.name, "DISABLE_FILE_CACHING": "1"}
    if line_info:
        settings["LINEINFO"] = "1"
    for name, value in settings.items():
        patches.environment(f"CUTE_DSL_{name}", value)
    dsl = cutlass_dsl.CuTeDSL._get_dsl()
    for name, v in (
        ("shared_libs", stub),
        ("arch", arch),
        ("keep_tokens", frozenset({"ptx", "cubin"})),
        ("keep_ptx", True),
        ("keep_cubin", True),
        ("dump_dir", dump.name),
        ("disable_file_caching", True),
        ("lineinfo", line_info),
    ):
        patches.attribute(dsl.envar, name, v)

    post_init = base_executor.JitFunctionArtifacts.__post_init__

    def remember(self: Any) -> None:
        post_init(self)
        if isinstance(self.CUBIN, bytes) and isinstance(self.PTX, str):
            _ptx_of_image[self.CUBIN] = self.PTX

    patches.attribute(base_executor.JitFunctionArtifacts, "__post_init__", remember)
    for c in vars(cuda_jit_executor).values():
        if isinstance(c, type) and "num_devices" in vars(c):
            patches.attribute(c, "num_devices", 1)
    _patch_calls(patches, gpu, cuda_jit_executor)
    _current.append(gpu)
    try:
        yield gpu
    except BaseException:
        if gpu.error is not None:
            raise gpu.error from None
        raise
    finally:
        _current.remove(gpu)
        patches.undo()
        dump.cleanup()
    if gpu.error is not None:
        raise gpu.error
    if gpu.report.hazards and raise_on_hazard:
        raise HazardError(
            f"{len(gpu.report.hazards)} hazards\n" + "\n".join(str(h) for h in gpu.report.hazards), gpu.report
        )


def _patch_calls(patches: _Patches, gpu: Gpu, cuda_jit_executor: Any) -> None:
    def wrap(owner: type, as_cuda: bool) -> None:
        call = owner.__call__

        def tracked(self: Any, *arguments: Any, **keywords: Any) -> Any:
            _track_arguments(gpu, (*arguments, *keywords.values()))
            if not as_cuda:
                result = call(self, *arguments, **keywords)
            else:
                # compiled from fake tensors it wants CUDA tensors, compiled from CPU tensors those
                try:
                    result = call(self, *map(_as_cuda, arguments), **keywords)
                except ValueError as e:
                    if "expected device_type=cpu" not in str(e):
                        raise
                    result = call(self, *arguments, **keywords)
            if gpu.error is not None:
                raise gpu.error
            return result

        patches.attribute(owner, "__call__", tracked)

    wrap(cuda_jit_executor.CudaDialectJitCompiledFunction, False)
    try:
        from cutlass.cutlass_dsl import tvm_ffi_provider
    except ImportError:
        return
    for name, c in vars(tvm_ffi_provider).items():
        if isinstance(c, type) and name.startswith("TVMFFIJitCompiledFunction") and "__call__" in vars(c):
            wrap(c, True)
