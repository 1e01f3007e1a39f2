"""The backends, and the choice among them.

A backend is a module with these calls:

- ``unavailable(device) -> str | None``: None where it can run on ``device`` (``"cpu"``, ``"cuda:0"``), else why it
  cannot and what to install;
- ``supports(problem) -> str | None``: None if it runs this problem, else why not;
- ``workspace_bytes(problem) -> int``: scratch memory it wants for the problem;
- ``prepare(problem)``: compile and tune, so that the first launch does neither;
- ``fingerprint(problem) -> str | None``: digest of the kernels that run it, which are tested where they have not run
  before (``cudnn_dsa.selftest``); None where there is nothing that a device could do differently;
- ``forward(problem, tensors, workspace, stream)`` and ``backward(...)``: launch on ``stream`` (None on the CPU). The
  tensors passed the contract, are contiguous, and no size is 0.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from cudnn_dsa.contracts.errors import ContractError, UnsupportedError
from cudnn_dsa.contracts.sparse_attention import CUDA_DTYPES, CUDA_HEAD_DIM_V, CUDA_HEAD_DIMS, INT32_MAX, Problem

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# Name -> module.
MODULES = {
    "cpu": "cudnn_dsa.backends.cpu",
    "cudnn": "cudnn_dsa.backends.cudnn",
    "reference": "cudnn_dsa.backends.reference",
    "sm90": "cudnn_dsa.backends.sm90",
    "sm100": "cudnn_dsa.backends.sm100",
    "triton": "cudnn_dsa.backends.triton",
}
# What backend="auto" tries, best first, by the major compute capability of the device. On Hopper the kernels that have
# run on silicon come first: sm90 passed in the emulator only, and a hang is not what a self-test can refuse.
AUTO_BY_CAPABILITY = {
    8: ("triton",),
    9: ("triton", "sm90"),
    10: ("sm100", "triton"),
    12: ("triton",),
}


# An output that the caller did not give is None until the interface has allocated it.
Output = Any


class ForwardTensors(NamedTuple):
    """Tensors of a forward call, in the order of ``ARGUMENTS["forward"]``, and the scale, a run-time value that the
    interface fills in. ``out`` and ``lse`` are written."""

    q: torch.Tensor
    kv: torch.Tensor
    topk_idxs: torch.Tensor
    attn_sink: torch.Tensor | None = None
    topk_length: torch.Tensor | None = None
    out: Output = None
    lse: Output = None
    softmax_scale: Any = None


class BackwardTensors(NamedTuple):
    """Tensors of a backward call, in the order of ``ARGUMENTS["backward"]``, and the scale, a run-time value that the
    interface fills in. ``dq``, ``dkv`` and ``d_sink`` are written; without a sink ``d_sink`` is None."""

    q: torch.Tensor
    kv: torch.Tensor
    out: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor
    attn_sink: torch.Tensor | None
    topk_idxs: torch.Tensor
    topk_length: torch.Tensor | None = None
    delta: torch.Tensor | None = None
    dq: Output = None
    dkv: Output = None
    d_sink: Output = None
    softmax_scale: Any = None


class Backend(Protocol):
    """The calls of a backend module."""

    def unavailable(self, device: str) -> str | None: ...
    def supports(self, problem: Problem) -> str | None: ...
    def workspace_bytes(self, problem: Problem) -> int: ...
    def prepare(self, problem: Problem) -> None: ...
    def fingerprint(self, problem: Problem) -> str | None: ...
    def forward(self, problem: Problem, tensors: ForwardTensors, workspace: Any, stream: Any) -> None: ...
    def backward(self, problem: Problem, tensors: BackwardTensors, workspace: Any, stream: Any) -> None: ...


def unsupported_on_cuda(problem: Problem) -> str | None:
    """What none of this project's CUDA kernels runs, or None: the part of ``supports`` that they share."""
    p = problem
    if p.q_cluster_mode != "off":
        return "queries are not clustered here"
    if p.head_dim not in CUDA_HEAD_DIMS or p.head_dim_v != CUDA_HEAD_DIM_V:
        return f"head_dim 512 or 576 with a value dimension of 512, not {p.head_dim} with {p.head_dim_v}"
    if p.dtype not in CUDA_DTYPES:
        return f"bfloat16 and float16, not {p.dtype}"
    if p.s_q * p.heads > INT32_MAX:
        return "S_q * H is at most 2**31 - 1: tiles of queries and heads are counted in int32"
    return None


def load(name: str) -> Backend:
    """The backend module of that name. Raises ``RuntimeError`` for one that this version does not have."""
    if name not in MODULES:
        raise RuntimeError(f"backend {name!r} is not in this version (it has {', '.join(MODULES)})")
    return cast(Backend, importlib.import_module(MODULES[name]))


def candidates(problem: Problem) -> tuple[str, ...]:
    """The backends that may serve the problem, best first."""
    if problem.backend == "cpu":
        return ("cpu", "reference")
    if problem.backend != "auto":
        return (problem.backend,)
    major, minor = device_capability(problem.device)
    if major not in AUTO_BY_CAPABILITY:
        raise RuntimeError(f"no backend for compute capability {major}.{minor} ({problem.device})")
    return AUTO_BY_CAPABILITY[major]


def device_capability(device: str) -> tuple[int, int]:
    import torch

    return torch.cuda.get_device_capability(device)


def select(problem: Problem) -> Backend:
    """The backend that runs the problem.

    Raises:
        ContractError: the tensors are on the meta device, without data.
        RuntimeError: none of the candidates can run on this device.
        UnsupportedError: one can, but not this problem (a mode it lacks).
    """
    if problem.device_type == "meta":
        raise ContractError("q", "a device with memory", problem.device)
    here: dict[str, str] = {}
    refused: dict[str, str] = {}
    for name in candidates(problem):
        try:
            backend = load(name)
            reason = backend.unavailable(problem.device)
        except RuntimeError as error:
            reason = str(error)
        if reason is not None:
            here[name] = reason
            continue
        reason = backend.supports(problem)
        if reason is None:
            if here:
                _say_fallback(name, tuple(here.items()))
            return backend
        refused[name] = reason
    if refused:
        if problem.q_cluster_mode != "off":
            raise UnsupportedError("q_cluster_mode", "'off'", repr(problem.q_cluster_mode), _reasons(refused))
        raise UnsupportedError("backend", "a problem that it runs", repr(problem.backend), _reasons(refused))
    raise RuntimeError(f"backend {problem.backend!r} cannot run on {problem.device}: {_reasons(here)}")


def _reasons(by_name: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in by_name.items())


_said: set[tuple] = set()


def _say_fallback(name: str, unavailable: tuple[tuple[str, str], ...]) -> None:
    if unavailable not in _said:
        _said.add(unavailable)
        logger.warning("using backend %r, because %s", name, _reasons(dict(unavailable)))
