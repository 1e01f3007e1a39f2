"""Runs scripts written for a GPU (NVIDIA's public CuTe DSL examples) on CPU tensors, under emulation.

The scripts are not part of this repository: a test names the folder they lie in. Everything they ask of ``torch.cuda``
and of the driver is answered here; their own checks against torch stay as they are.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

import cuda.bindings.driver as driver  # noqa: E402
import cutlass.cute.testing as cute_testing  # noqa: E402
import cutlass.utils  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

from cute_emulator import Gpu, emulate  # noqa: E402

CAPABILITY = {"sm_90a": (9, 0), "sm_100a": (10, 0)}
MULTIPROCESSORS = 4  # few, so that persistent kernels take several tiles each


ALIGNMENT = 256  # what CUDA's allocator gives at least


def aligned(t: Any) -> Any:
    """The tensor, at an address that an allocation on a GPU could have."""
    if not isinstance(t, torch.Tensor) or t.data_ptr() % ALIGNMENT == 0 or t.numel() == 0:
        return t
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    raw = torch.empty(span * t.element_size() + ALIGNMENT, dtype=torch.uint8)
    start = -raw.data_ptr() % ALIGNMENT
    storage = raw[start : start + span * t.element_size()].view(t.dtype)
    return storage.as_strided(t.shape, t.stride()).copy_(t)


class OnCpu(TorchFunctionMode):
    """Reads every mention of a CUDA device as the CPU, and ``Tensor.cuda()`` as no change.

    What would have been memory of the GPU is told to the emulated one: kernels reach some of it through pointers only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Any] = []
        self.gpu: Gpu | None = None

    def _device_memory(self, t: Any) -> Any:
        t = aligned(t)
        if isinstance(t, torch.Tensor):
            self.tensors.append(t)
            if self.gpu is not None:
                self.gpu.track(**{f"tensor {len(self.tensors)} of the example": t})
        return t

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") == "cuda":
            return self._device_memory(args[0])
        moved = False

        def on_cpu(x: Any) -> Any:
            nonlocal moved
            if (isinstance(x, str) and x.split(":")[0] == "cuda") or (isinstance(x, torch.device) and x.type == "cuda"):
                moved = True
                return torch.device("cpu")
            return x

        arguments = {k: on_cpu(v) for k, v in (kwargs or {}).items() if k != "pin_memory"}
        result = function(*map(on_cpu, args), **arguments)
        return self._device_memory(result) if moved else result


def once(function: Any, *, kernel_arguments: Any = None, workspace_generator: Any = None, **_: Any) -> float:
    """In place of a benchmark: a single call, and a made-up time."""
    arguments = kernel_arguments or workspace_generator()
    function(*arguments.args, **arguments.kwargs)
    return 1.0


@contextlib.contextmanager
def pretended_gpu(arch: str) -> Iterator[OnCpu]:
    """torch.cuda and the driver answer as if a device of ``arch`` were there."""
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None, wait_stream=lambda _: None)
    properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS, major=CAPABILITY[arch][0], minor=0, name=arch)
    success = driver.CUresult.CUDA_SUCCESS
    answers = {
        "is_available": True,
        "synchronize": None,
        "current_stream": stream,
        "default_stream": stream,
        "Stream": stream,
        "current_device": 0,
        "device_count": 1,
        "get_device_capability": CAPABILITY[arch],
        "get_device_properties": properties,
        "stream": contextlib.nullcontext(),
        "device": contextlib.nullcontext(),
        "graph": contextlib.nullcontext(),  # a captured launch runs at once, a replay does nothing
        "CUDAGraph": SimpleNamespace(replay=lambda: None),
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, return_value=answer))
        for name in (n for n in vars(driver) if n.startswith("cu") and n[2:3].isupper()):
            stack.enter_context(mock.patch.object(driver, name, return_value=(success, 1)))
        hardware = mock.Mock()
        hardware.return_value.get_max_active_clusters.side_effect = lambda size, *_: max(1, MULTIPROCESSORS // size)
        stack.enter_context(mock.patch.object(cutlass.utils, "HardwareInfo", hardware))
        stack.enter_context(mock.patch.object(cute_testing, "benchmark", once))
        on_cpu = stack.enter_context(OnCpu())
        yield on_cpu


def run_example(script: Path, arguments: Sequence[str] = (), arch: str = "sm_100a", **options: Any) -> Gpu:
    """Runs the script as ``__main__``; its own assertions and every hazard are the caller's to meet."""
    folders = [str(script.parent), *(str(p) for p in script.parents if (p / "utils").is_dir() or (p / "cute").is_dir())]
    loaded = set(sys.modules)
    try:
        with (
            pretended_gpu(arch) as on_cpu,
            emulate(arch, **options) as gpu,
            mock.patch.object(sys, "argv", [str(script), *arguments]),
            mock.patch.object(sys, "path", [*folders, *sys.path]),
        ):
            on_cpu.gpu = gpu
            try:
                runpy.run_path(str(script), run_name="__main__")
            except SystemExit as e:
                if e.code:
                    raise
    finally:
        # the scripts' helpers share names (utils, ...) across folders
        for name in set(sys.modules) - loaded:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if any(file.startswith(f + "/") for f in folders):
                del sys.modules[name]
    return gpu
