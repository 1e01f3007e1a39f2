"""The Triton backend: any CUDA device of compute capability 8.0 and up; D in (512, 576), bf16 and fp16.

``forward_kernel.py`` and ``backward_kernel.py`` hold the two kernels, ``deterministic.py`` the sum over queries in a
fixed order, ``launch.py`` the compiled kernels, ``tuning.py`` the choice of tiles, ``plans.py`` the launches of a call.
Nothing of Triton is imported before a call needs it: :func:`unavailable` says where it is missing.

Measured on an H200 (capability 9.0). On 8.x and 12.x the backward compiles, with heavy register spills; on 10.x it
compiles with tiles of at most 32 heads. Neither was run.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from cudnn_dsa.backends import BackwardTensors, ForwardTensors, device_capability, unsupported_on_cuda
from cudnn_dsa.contracts.sparse_attention import Problem

MINIMUM_CAPABILITY = (8, 0)


def unavailable(device: str) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install triton)"
    if not device.startswith("cuda"):
        if os.environ.get("TRITON_INTERPRET") == "1":
            return None
        return f"it runs on CUDA devices, not on {device} (TRITON_INTERPRET=1 interprets it on the CPU, for tests)"
    major, minor = device_capability(device)
    if (major, minor) < MINIMUM_CAPABILITY:
        return f"compute capability {major}.{minor} is below 8.0 ({device})"
    return None


def supports(problem: Problem) -> str | None:
    return unsupported_on_cuda(problem)


def workspace_bytes(problem: Problem) -> int:
    if problem.direction == "forward":
        return 0
    from cudnn_dsa.backends.triton import plans

    return plans.backward_workspace(problem).total


def prepare(problem: Problem) -> None:
    from cudnn_dsa.backends.triton import plans

    plans.prepare(problem)


def fingerprint(problem: Problem) -> str | None:
    from cudnn_dsa.backends.triton import plans

    return plans.fingerprint(problem)


def forward(problem: Problem, tensors: ForwardTensors, workspace: Any, stream: Any) -> None:
    from cudnn_dsa.backends.triton import plans

    plans.forward(problem, tensors, stream)


def backward(problem: Problem, tensors: BackwardTensors, workspace: Any, stream: Any) -> None:
    from cudnn_dsa.backends.triton import plans

    plans.backward(problem, tensors, workspace, stream)
