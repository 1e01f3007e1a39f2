"""The Blackwell backend (compute capability 10.x): CuTe-DSL kernels; D in (512, 576), bf16 and fp16.

``backward_kernel.py`` is the kernel, ``config.py`` its tiles and memory maps, ``sources.py`` the kernels that a problem
launches, ``plans.py`` the launches of a call. docs/sm100.md explains them. Nothing of the CuTe DSL is imported before a
kernel has to be compiled.
"""

from __future__ import annotations

from typing import Any

from cudnn_dsa import artifact
from cudnn_dsa.backends import BackwardTensors, ForwardTensors, unsupported_on_cuda
from cudnn_dsa.contracts.sparse_attention import Problem

MAJOR_CAPABILITY = 10


def unavailable(device: str) -> str | None:
    return artifact.unavailable(device, MAJOR_CAPABILITY)


def supports(problem: Problem) -> str | None:
    return unsupported_on_cuda(problem)


def workspace_bytes(problem: Problem) -> int:
    from cudnn_dsa.backends.sm100 import plans

    return plans.workspace(problem).total


def prepare(problem: Problem) -> None:
    from cudnn_dsa.backends.sm100 import plans

    plans.prepare(problem)


def fingerprint(problem: Problem) -> str | None:
    from cudnn_dsa.backends.sm100 import plans

    return plans.fingerprint(problem)


def forward(problem: Problem, tensors: ForwardTensors, workspace: Any, stream: Any) -> None:
    from cudnn_dsa.backends.sm100 import plans

    plans.forward(problem, tensors, stream)


def backward(problem: Problem, tensors: BackwardTensors, workspace: Any, stream: Any) -> None:
    from cudnn_dsa.backends.sm100 import plans

    plans.backward(problem, tensors, workspace, stream)
