"""The Blackwell backend (compute capability 10.x): CuTe-DSL kernels; D in (512, 576), bf16 and fp16.

``backward_kernel.py`` is the kernel, ``config.py`` its tiles and memory maps, ``sources.py`` the kernels that a problem
launches, ``plans.py`` the launches of a call. docs/sm100.md explains them. Nothing of the CuTe DSL is imported before a
kernel has to be compiled.
"""

from __future__ import annotations

from typing import Any

from cudnn_dsa import artifact
from cudnn_dsa.backends import BackwardTensors, ForwardTensors
from cudnn_dsa.contracts.sparse_attention import CUDA_DTYPES, CUDA_HEAD_DIM_V, CUDA_HEAD_DIMS, INT32_MAX, Problem

MAJOR_CAPABILITY = 10


def unavailable(device: str) -> str | None:
    return artifact.unavailable(device, MAJOR_CAPABILITY)


def supports(problem: Problem) -> str | None:
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
