"""An adapter to the DSA backward of the cuDNN frontend (package nvidia-cudnn-frontend, 1.32 and up).

It is a second opinion: the cross-check of tests and benchmarks, and there for a user who asks for ``backend="cudnn"``.
``backend="auto"`` never picks it. What the frontend lacks is refused here by name before it is called, or closed:

- no sink: it gets a sink of -inf, and its d_sink is dropped;
- an lse of -inf or +inf of a row without a valid key: it gets 0 there, since its own kernel would meet inf - inf;
- shapes, dtypes and aliases, which it does not check on Hopper at execution, are checked by the contract first;
- refused: determinism, H = 1, an fp32 out, a given delta, an fp32 dkv and with it ``accumulate``, offsets past 2**31,
  and the forward, which it has on Blackwell alone.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import replace
from typing import Any

import torch

from cudnn_dsa.backends import BackwardTensors, ForwardTensors, device_capability
from cudnn_dsa.contracts.sparse_attention import WORKSPACE_ALIGNMENT, Problem

MAJOR_CAPABILITIES = (9, 10)


def unavailable(device: str) -> str | None:
    for package, install in (("cudnn", "nvidia-cudnn-frontend[cutedsl]"), ("cutlass", "nvidia-cutlass-dsl")):
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed (pip install {install})"
    if not device.startswith("cuda"):
        return f"it runs on CUDA devices, not on {device}"
    try:
        _plan_class()
    except (ImportError, AttributeError) as error:
        return f"this cuDNN frontend has no usable DSA backward ({error})"
    major, minor = device_capability(device)
    if major not in MAJOR_CAPABILITIES:
        return f"the cuDNN frontend has no kernel for compute capability {major}.{minor} ({device})"
    return None


def supports(problem: Problem) -> str | None:
    p = problem
    gaps = (
        (p.direction == "forward", "only the backward is adapted"),
        (p.deterministic, "it has no deterministic mode on Hopper"),
        (p.heads == 1, "it needs at least 2 heads"),
        (p.out_dtype != p.dtype, f"it takes out in {p.dtype} only"),
        (p.has_delta, "it computes delta itself and takes none"),
        (p.dkv_dtype != p.dtype or p.accumulate, f"it writes dkv in {p.dtype} only"),
        (p.q_cluster_mode != "off", "queries are not clustered here"),
        (p.wide_address, "its offsets are 32-bit"),
    )
    return next((reason for present, reason in gaps if present), None)


def workspace_bytes(problem: Problem) -> int:
    return sum(_aligned(n) for n in _pieces(problem).values())


def prepare(problem: Problem) -> None:
    """Compile. On Hopper the frontend compiles when it first executes: it is executed once, on a few rows of zeros."""
    _plan(problem)
    p = replace(problem, s_q=min(int(problem.s_q), 2), s_kv=min(int(problem.s_kv), 64))
    device, element = torch.device(p.device), getattr(torch, p.dtype)

    def zeros(*shape: int, dtype: torch.dtype = element) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    statistic, index = torch.float32, torch.int32
    q, kv, out = zeros(p.s_q, p.heads, p.head_dim), zeros(p.s_kv, p.head_dim), zeros(p.s_q, p.heads, p.head_dim_v)
    tensors = BackwardTensors(
        q=q, kv=kv, out=out, dout=torch.zeros_like(out), lse=zeros(p.s_q, p.heads, dtype=statistic),
        attn_sink=zeros(p.heads, dtype=statistic) if p.has_sink else None,
        topk_idxs=zeros(p.s_q, p.topk, dtype=index),
        topk_length=zeros(p.s_q, dtype=index) if p.has_topk_length else None,
        delta=None, softmax_scale=1.0, dq=torch.zeros_like(q), dkv=torch.zeros_like(kv),
        d_sink=zeros(p.heads, dtype=statistic) if p.has_sink else None,
    )  # fmt: skip
    with torch.cuda.device(device):
        workspace = zeros(workspace_bytes(p), dtype=torch.uint8)
        backward(p, tensors, workspace, torch.cuda.current_stream(device))


def fingerprint(problem: Problem) -> str | None:
    return None


def forward(problem: Problem, tensors: ForwardTensors, workspace: Any, stream: Any) -> None:
    raise NotImplementedError("the cudnn backend has no forward")  # supports() refuses it first


def backward(problem: Problem, tensors: BackwardTensors, workspace: Any, stream: Any) -> None:
    from cuda.bindings import driver

    t = tensors
    scratch, start = {}, 0
    for name, size in _pieces(problem).items():
        scratch[name] = workspace[start : start + size]
        start += _aligned(size)
    lse = scratch["lse"].view(torch.float32).view(t.lse.shape)
    torch.nan_to_num(t.lse, nan=torch.nan, posinf=0.0, neginf=0.0, out=lse)
    sink, d_sink = t.attn_sink, t.d_sink
    if sink is None:
        sink, d_sink = (scratch[name].view(torch.float32) for name in ("sink", "d_sink"))
        sink.fill_(-torch.inf)
    _plan(problem).execute(
        t.q, t.kv, t.out, t.dout, lse, sink, t.topk_idxs, t.dq, t.dkv, topk_length=t.topk_length,
        softmax_scale=t.softmax_scale, current_stream=driver.CUstream(stream.cuda_stream),
        workspace=scratch["plan"], d_sink=d_sink,
    )  # fmt: skip


def _plan_class() -> Any:
    from cudnn import DSA

    return DSA.SparseAttentionBackward


@functools.lru_cache(maxsize=64)
def _plan(problem: Problem) -> Any:
    """The frontend's plan for exactly these sizes: it reads shapes, dtypes and the device of its samples alone."""
    from torch._subclasses import FakeTensorMode

    p = problem
    element = getattr(torch, p.dtype)
    with FakeTensorMode():

        def sample(*shape: int, dtype: torch.dtype = element) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=p.device)

        out = sample(p.s_q, p.heads, p.head_dim_v)
        plan = _plan_class()(
            sample(p.s_q, p.heads, p.head_dim), sample(p.s_kv, p.head_dim), out, out,
            sample(p.s_q, p.heads, dtype=torch.float32), sample(p.heads, dtype=torch.float32),
            sample(p.s_q, p.topk, dtype=torch.int32),
            sample_topk_length=sample(p.s_q, dtype=torch.int32) if p.has_topk_length else None,
            block_tile=p.block_tile,
        )  # fmt: skip
        plan.check_support()
    plan.compile()
    return plan


def _pieces(problem: Problem) -> dict[str, int]:
    """Scratch memory by name, in bytes."""
    p = problem
    pieces = {"plan": int(_plan(p).scratch_workspace_bytes()), "lse": 4 * p.s_q * p.heads}
    if not p.has_sink:
        pieces |= {"sink": 4 * p.heads, "d_sink": 4 * p.heads}
    return pieces


def _aligned(size: int) -> int:
    return -(-size // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
