"""Calls of the SM100 backend on CPU tensors, in the emulator."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")

import cutlass.cute as cute
from dsa_cases import Case

import cute_emulator
from cudnn_dsa.backends import BackwardTensors, ForwardTensors, sm100
from cudnn_dsa.contracts.sparse_attention import Problem

POISON = float("nan")


@cute.jit
def _nothing():
    pass


# Of the emulator's stand-in and the DSL's own runtime library, the first that a process loads serves all host code in
# it. A kernel compiled outside ``emulate`` would load the latter, and no host code could be emulated after that.
with cute_emulator.emulate("sm_100a"):
    cute.compile(_nothing)()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def problem_of(case: Case, direction: str = "backward", **changes) -> Problem:
    dtype = name_of(case.q.dtype)
    fields = {
        "direction": direction, "s_q": case.q.shape[0], "s_kv": case.kv.shape[0], "heads": case.q.shape[1],
        "head_dim": case.q.shape[2], "head_dim_v": case.d_v, "topk": case.topk_idxs.shape[1], "dtype": dtype,
        "out_dtype": name_of(case.out.dtype), "stat_dtype": "float32",
        "sink_dtype": None if case.attn_sink is None else "float32", "delta_dtype": None, "dkv_dtype": dtype,
        "has_topk_length": case.topk_length is not None, "deterministic": False, "accumulate": False,
        "block_tile": 64, "q_cluster_mode": "off", "backend": "sm100", "device": "cpu",
    }  # fmt: skip
    return Problem(**{**fields, **changes})


def backward(
    case: Case, *, delta: torch.Tensor | None = None, dkv: torch.Tensor | None = None, accumulate: bool = False,
    arch: str = "sm_100a", deterministic: bool = False, **emulation,
):  # fmt: skip
    """((dq, dkv, d_sink), emulated device). Outputs that are not given, and the workspace, start as NaN."""
    dkv = torch.full_like(case.kv, POISON) if dkv is None else dkv
    problem = problem_of(
        case, delta_dtype=None if delta is None else "float32", dkv_dtype=name_of(dkv.dtype), accumulate=accumulate,
        deterministic=deterministic,
    )  # fmt: skip
    assert sm100.supports(problem) is None
    dq = torch.full_like(case.q, POISON)
    d_sink = None if case.attn_sink is None else torch.full_like(case.attn_sink, POISON)
    # Four bytes of 0xff are a NaN.
    workspace = torch.full((sm100.workspace_bytes(problem) + 256,), 255, dtype=torch.uint8)
    workspace = workspace[-workspace.data_ptr() % 256 :]
    tensors = BackwardTensors(
        q=case.q, kv=case.kv, out=case.out, dout=case.dout, lse=case.lse, attn_sink=case.attn_sink,
        topk_idxs=case.topk_idxs, topk_length=case.topk_length, delta=delta, softmax_scale=case.softmax_scale,
        dq=dq, dkv=dkv, d_sink=d_sink,
    )  # fmt: skip
    with cute_emulator.device(arch, **emulation) as gpu:
        sm100.backward(problem, tensors, workspace, None)
    return (dq, dkv, d_sink), gpu


def forward(case: Case, *, out_dtype: torch.dtype | None = None, arch: str = "sm_100a", **emulation):
    """((out, lse), emulated device); out and lse start as NaN."""
    out_dtype = out_dtype or case.q.dtype
    problem = problem_of(case, "forward", out_dtype=name_of(out_dtype))
    assert sm100.supports(problem) is None
    out = torch.full(case.dout.shape, POISON, dtype=out_dtype)
    lse = torch.full(case.dout.shape[:2], POISON)
    tensors = ForwardTensors(
        q=case.q, kv=case.kv, topk_idxs=case.topk_idxs, attn_sink=case.attn_sink, topk_length=case.topk_length,
        softmax_scale=case.softmax_scale, out=out, lse=lse,
    )  # fmt: skip
    with cute_emulator.device(arch, **emulation) as gpu:
        sm100.forward(problem, tensors, None, None)
    return (out, lse), gpu
