"""Which backends can run on which device of this machine, and what is missing where one cannot."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from cudnn_dsa import backends
from cudnn_dsa.cli.console import CannotRun
from cudnn_dsa.contracts.sparse_attention import BACKENDS, CUDA_BACKENDS


@dataclass(frozen=True)
class Requirement:
    """What a backend is for, and the extra of this distribution that brings the packages it needs."""

    runs_on: str
    packages: tuple[str, ...] = ()
    extra: str = ""

    def to_install(self) -> str | None:
        """The pip command that brings what is missing, or None."""
        missing = [name for name in self.packages if version(name) is None]
        return f"pip install 'cudnn-dsa[{self.extra}]' (missing: {', '.join(missing)})" if missing else None


_CUTE = ("nvidia-cutlass-dsl",)
REQUIREMENTS = {
    "sm100": Requirement("Blackwell GPUs (compute capability 10.x), CuTe DSL", _CUTE, "cuda"),
    "sm90": Requirement("Hopper GPUs (compute capability 9.0), CuTe DSL", _CUTE, "cuda"),
    "triton": Requirement(
        "NVIDIA GPUs from compute capability 8.0 (run on 9.0 only so far), Triton", ("triton",), "cuda"
    ),
    "cudnn": Requirement("NVIDIA's own DSA kernels, to compare with", ("nvidia-cudnn-frontend",), "bench"),
    "cpu": Requirement("any CPU, C++ extension"),
    "reference": Requirement("any device, the formulas in plain PyTorch"),
}


@dataclass(frozen=True)
class State:
    """One backend on one device.

    Attributes:
        backend: its name.
        device: ``"cpu"``, ``"cuda:0"``...; ``"cuda"`` where there is no CUDA device to ask about.
        reason: why it cannot run, or None where it can.
        install: what to install, or None where nothing is missing that pip can bring.
    """

    backend: str
    device: str
    reason: str | None
    install: str | None

    @property
    def available(self) -> bool:
        return self.reason is None


def version(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def cuda_devices() -> list[str]:
    """``["cuda:0", ...]``, as many as torch sees."""
    import torch

    return [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


def state(backend: str, device: str) -> State:
    """Whether ``backend`` can run on ``device``. Never raises: a backend that fails to load says why in its state."""
    install = REQUIREMENTS[backend].to_install()
    if backend not in backends.MODULES:
        return State(backend, device, "not in this version", None)
    if device == "cuda":
        return State(backend, device, "no CUDA device", install)
    try:
        reason = backends.load(backend).unavailable(device)
    except Exception as error:  # whatever a half-installed package raises on import is the reason
        reason = f"{type(error).__name__}: {error}"
    return State(backend, device, reason, install if reason else None)


def states() -> list[State]:
    """Every backend of the contract on every device it is for."""
    cuda = cuda_devices()
    found = []
    for backend in BACKENDS:
        if backend == "auto":
            continue
        devices = (cuda or ["cuda"]) if backend in CUDA_BACKENDS else ["cpu"]
        found += [state(backend, device) for device in devices]
    return found


def resolve_device(asked: str | None) -> str:
    """``"cpu"`` or ``"cuda:<index>"``: as asked, else the first GPU if a CUDA backend runs on it, else the CPU.

    Raises:
        CannotRun: this machine has no such device.
    """
    gpus = cuda_devices()
    if asked is None:
        return gpus[0] if gpus and runnable(gpus[0]) != ["reference"] else "cpu"
    device = "cuda:0" if asked == "cuda" else asked
    if device not in ["cpu", *gpus]:
        raise CannotRun(f"no device {asked!r} here: there is {', '.join(['cpu', *gpus])}")
    return device


def runnable(device: str) -> list[str]:
    """The backends that can run on a device, best first; the reference backend, which runs everywhere, is last."""
    names = [*CUDA_BACKENDS, "reference"] if device.startswith("cuda") else ["cpu", "reference"]
    return [name for name in names if state(name, device).available]
