"""The C++ kernels of csrc/cpu: any CPU, any head_dim, all dtypes, bitwise equal for any number of threads.

The extension, cudnn_dsa/_C.so, implements the low-level operators of ``ops.py`` for the CPU; loading it registers them.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

import cudnn_dsa.ops  # noqa: F401  (defines the operators that the extension implements)
from cudnn_dsa.backends import BackwardTensors, ForwardTensors
from cudnn_dsa.contracts.sparse_attention import Problem

EXTENSION = Path(__file__).resolve().parent.parent / "_C.so"


@functools.cache
def _load() -> str | None:
    """Load the extension, once a process; why it could not be loaded, or None."""
    if not EXTENSION.exists():
        return "the C++ extension is not built (make setup, or: python setup.py build_ext --inplace)"
    try:
        torch.ops.load_library(str(EXTENSION))
    except OSError as error:  # most often built against another version of torch
        return f"the C++ extension does not load, rebuild it (python setup.py build_ext --inplace): {error}"
    return None


def unavailable(device: str) -> str | None:
    if torch.device(device).type != "cpu":
        return f"it runs on the CPU, not on {device}"
    return _load()


def supports(problem: Problem) -> str | None:
    return None if problem.q_cluster_mode == "off" else "queries are not clustered here"


def workspace_bytes(problem: Problem) -> int:
    return 0  # tiles and the fp32 dkv come from torch's CPU allocator


def prepare(problem: Problem) -> None:
    pass


def fingerprint(problem: Problem) -> str | None:
    return None


def forward(problem: Problem, tensors: ForwardTensors, workspace: Any, stream: Any) -> None:
    """Write ``out`` and ``lse`` (natural log, without the sink; -inf for a row without a valid key)."""
    t = tensors
    torch.ops.cudnn_dsa.forward_out(
        t.q, t.kv, t.topk_idxs, t.attn_sink, t.topk_length, t.softmax_scale, t.out, t.lse
    )  # fmt: skip


def backward(problem: Problem, tensors: BackwardTensors, workspace: Any, stream: Any) -> None:
    """Write ``dq``, ``dkv`` (or add into it) and ``d_sink``."""
    t = tensors
    torch.ops.cudnn_dsa.backward_out(
        t.q, t.kv, t.out, t.dout, t.lse, t.attn_sink, t.topk_idxs, t.topk_length, t.delta, t.softmax_scale,
        problem.accumulate, t.dq, t.dkv, t.d_sink,
    )  # fmt: skip
