"""Calls of the SM90 backend on CPU tensors, in the emulator."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")

from dsa_cases import Case
from sm100_problem import name_of, problem_of

import cute_emulator
from cudnn_dsa.backends import BackwardTensors, ForwardTensors, sm90

POISON = float("nan")


def backward(
    case: Case, *, delta: torch.Tensor | None = None, dkv: torch.Tensor | None = None, accumulate: bool = False,
    **emulation,
):  # fmt: skip
    """((dq, dkv, d_sink), emulated device). Outputs that are not given, and the workspace, start as NaN."""
    dkv = torch.full_like(case.kv, POISON) if dkv is None else dkv
    problem = problem_of(
        case, backend="sm90", delta_dtype=None if delta is None else "float32", dkv_dtype=name_of(dkv.dtype),
        accumulate=accumulate,
    )  # fmt: skip
    assert sm90.supports(problem) is None
    dq = torch.full_like(case.q, POISON)
    d_sink = None if case.attn_sink is None else torch.full_like(case.attn_sink, POISON)
    # Four bytes of 0xff are a NaN.
    workspace = torch.full((sm90.workspace_bytes(problem) + 256,), 255, dtype=torch.uint8)
    workspace = workspace[-workspace.data_ptr() % 256 :]
    tensors = BackwardTensors(
        q=case.q, kv=case.kv, out=case.out, dout=case.dout, lse=case.lse, attn_sink=case.attn_sink,
        topk_idxs=case.topk_idxs, topk_length=case.topk_length, delta=delta, softmax_scale=case.softmax_scale,
        dq=dq, dkv=dkv, d_sink=d_sink,
    )  # fmt: skip
    with cute_emulator.device("sm_90a", **emulation) as gpu:
        sm90.backward(problem, tensors, workspace, None)
    return (dq, dkv, d_sink), gpu


def forward(case: Case, *, out_dtype: torch.dtype | None = None, **emulation):
    """((out, lse), emulated device); out and lse start as NaN."""
    out_dtype = out_dtype or case.q.dtype
    problem = problem_of(case, "forward", backend="sm90", out_dtype=name_of(out_dtype))
    assert sm90.supports(problem) is None
    out = torch.full(case.dout.shape, POISON, dtype=out_dtype)
    lse = torch.full(case.dout.shape[:2], POISON)
    tensors = ForwardTensors(
        q=case.q, kv=case.kv, topk_idxs=case.topk_idxs, attn_sink=case.attn_sink, topk_length=case.topk_length,
        softmax_scale=case.softmax_scale, out=out, lse=lse,
    )  # fmt: skip
    with cute_emulator.device("sm_90a", **emulation) as gpu:
        sm90.forward(problem, tensors, None, None)
    return (out, lse), gpu
