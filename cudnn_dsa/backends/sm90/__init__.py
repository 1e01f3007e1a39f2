"""The Hopper backend (compute capability 9.0): CuTe-DSL kernels; D in (512, 576), bf16 and fp16.

``backward_kernel.py`` and ``forward_kernel.py`` are the kernels, ``producer.py``, ``scores.py``, ``epilogue.py`` and
``wgmma.py`` what they share, ``config.py`` their tiles and registers, ``sources.py`` the kernels that a problem
launches, ``plans.py`` the launches of a call. docs/sm90.md explains them. Nothing of the CuTe DSL is imported before a
kernel has to be compiled.
"""

from __future__ import annotations

from typing import Any

from cudnn_dsa import artifact
from cudnn_dsa.backends import BackwardTensors, ForwardTensors, unsupported_on_cuda
from cudnn_dsa.contracts.sparse_attention import INT32_MAX, Problem

MAJOR_CAPABILITY = 9
# Of the fp32 dkv: the reduction's offsets are int32, in vectors of four.
MAX_DKV_ELEMENTS = 4 * INT32_MAX


def unavailable(device: str) -> str | None:
    return artifact.unavailable(device, MAJOR_CAPABILITY)


def supports(problem: Problem) -> str | None:
    p = problem
    if p.deterministic and p.direction == "backward":
        return "dkv is summed by atomics, in no fixed order"
    if p.s_kv * p.head_dim > MAX_DKV_ELEMENTS:
        return "S_kv * D is at most 4 * (2**31 - 1): the reduction's offsets are int32"
    return unsupported_on_cuda(problem)


def workspace_bytes(problem: Problem) -> int:
    if problem.direction == "forward":
        return 0
    from cudnn_dsa.backends.sm90 import plans

    return plans.backward_workspace(problem).total


def prepare(problem: Problem) -> None:
    from cudnn_dsa.backends.sm90 import plans

    plans.prepare(problem)


def fingerprint(problem: Problem) -> str | None:
    from cudnn_dsa.backends.sm90 import plans

    return plans.fingerprint(problem)


def forward(problem: Problem, tensors: ForwardTensors, workspace: Any, stream: Any) -> None:
    from cudnn_dsa.backends.sm90 import plans

    plans.forward(problem, tensors, stream)


def backward(problem: Problem, tensors: BackwardTensors, workspace: Any, stream: Any) -> None:
    from cudnn_dsa.backends.sm90 import plans

    plans.backward(problem, tensors, workspace, stream)
