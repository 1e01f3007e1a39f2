"""Drives the cuDNN frontend's SM100 sparse-attention backward kernels through their own host code, on CPU tensors.

The frontend is a test dependency: code that is known to run on B200s and that nobody here wrote.
"""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")
pytest.importorskip("cudnn")

from cute_emulator import AsCuda, Gpu, emulate  # noqa: E402

D_V = 512


@dataclass(frozen=True)
class Plan:
    """One of the frontend's plans: its backend's name, tile of keys, heads and head dimension."""

    backend: str
    tile: int
    heads: int
    head_dim: int


PLANS = {
    "H64 D512": Plan("generic_m64", 64, 64, 512),
    "H64 D576": Plan("generic_m64", 64, 64, 576),
    "H16 D576": Plan("h16_m128", 128, 16, 576),
    "H32 D576": Plan("h32_m64", 64, 32, 576),
    "H128 D512 2-CTA": Plan("h128_2cta_m64", 64, 128, 512),
    "H128 D576 2-CTA": Plan("h128_d576_2cta_m64", 64, 128, 576),
}


@cache
def compiled(plan: Plan, keys: int, single_query: bool) -> Any:
    """The frontend's compiled launchable; compiling takes about ten seconds, so it is kept."""
    with emulate("sm_100a"), mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext()):
        from cudnn.deepseek_sparse_attention.sparse_attention_backward import _interface_sm100 as generic
        from cudnn.deepseek_sparse_attention.sparse_attention_backward import _interface_sm100_d576 as two_cta
        from cudnn.deepseek_sparse_attention.utils.compiler import compile_options

        if plan.backend == "h128_d576_2cta_m64":
            with mock.patch.object(two_cta, "compile_options", return_value=compile_options(gpu_arch="sm_100a")):
                return two_cta._compile_d576_2cta((10, 0), keys, False, single_query, False)
        return generic._compile_nondeterministic_sm100(
            0, (10, 0), plan.backend, torch.bfloat16, plan.head_dim, D_V, plan.heads, keys, False, plan.tile
        )


@dataclass
class Problem:
    """Inputs, and the gradients of a float64 reference."""

    plan: Plan
    q: Any
    kv: Any
    out: Any
    dout: Any
    lse: Any
    sink: Any
    indices: Any
    expected: dict[str, Any] = field(default_factory=dict)

    @property
    def keys(self) -> int:
        return self.indices.shape[1]


def problem(
    plan: Plan, queries: int = 1, keys: int = 128, tokens: int = 256, seed: int = 1, dtype: Any = None
) -> Problem:
    """Random inputs; softmax over the chosen keys and the sink, values are the first 512 dimensions of the keys."""
    g = torch.Generator().manual_seed(seed)
    bf = dtype or torch.bfloat16
    q = torch.randn(queries, plan.heads, plan.head_dim, generator=g).to(bf)
    kv = torch.randn(tokens, plan.head_dim, generator=g).to(bf)
    dout = torch.randn(queries, plan.heads, D_V, generator=g).to(bf)
    sink = torch.randn(plan.heads, generator=g)
    indices = torch.stack([torch.randperm(tokens, generator=g)[:keys] for _ in range(queries)]).int()
    q64, kv64, sink64 = (x.double().requires_grad_() for x in (q, kv, sink))
    rows = kv64[indices.long()]
    scores = torch.einsum("qhd,qkd->qhk", q64, rows) * plan.head_dim**-0.5
    lse = torch.logsumexp(scores, -1).detach().float()
    p = torch.softmax(torch.cat([scores, sink64[None, :, None].expand(queries, plan.heads, 1)], -1), -1)[..., :keys]
    out = torch.einsum("qhk,qkd->qhd", p, rows[..., :D_V])
    out.backward(dout.double())
    rounded = out.detach().to(bf)
    # d_sink is a small difference of large terms; the kernels get `out` rounded, so the reference does too
    delta = (rounded.double() * dout.double()).sum(-1)
    d_sink = -(torch.exp(sink.double() - torch.logaddexp(lse.double(), sink.double())) * delta).sum(0)
    expected = {"dq": q64.grad, "dkv": kv64.grad, "d_sink": d_sink}
    return Problem(plan, q, kv, rounded, dout, lse, sink, indices, expected)


def backward(p: Problem, **options: Any) -> tuple[Gpu, dict[str, Any]]:
    """Runs the plan under emulation: (the emulated device, the gradients). Outputs and workspaces start as NaN."""
    plan = p.plan
    queries, tokens = p.q.shape[0], p.kv.shape[0]
    launchable = compiled(plan, p.keys, queries == 1)
    from cudnn.deepseek_sparse_attention.sparse_attention_backward import _interface_sm100 as generic
    from cudnn.deepseek_sparse_attention.sparse_attention_backward import _interface_sm100_d576 as two_cta

    split = plan.backend == "h128_d576_2cta_m64"
    if split:
        shapes: Any = [(n,) for n in two_cta._workspace_sizes(queries, tokens, False, plan.heads)]
    else:
        shapes = generic._workspace_shapes_sm100(queries, tokens, plan.head_dim, plan.heads, False, plan.backend)
    workspaces = [torch.full(tuple(int(n) for n in s), 0xFF, dtype=torch.uint8) for s in shapes]
    nan = float("nan")
    grads = {"dq": torch.full_like(p.q, nan), "dkv": torch.full_like(p.kv, nan), "d_sink": torch.zeros(plan.heads)}
    shape = (queries, tokens, plan.head_dim, (plan.heads, 1))
    with emulate("sm_100a", **options) as gpu:
        launchable(
            shape,
            p.q,
            p.kv,
            p.out,
            p.dout,
            p.lse,
            p.sink,
            p.indices,
            None,
            grads["dq"],
            grads["dkv"],
            grads["d_sink"],
            *workspaces,
            float(plan.head_dim**-0.5),
            *((1,) if split else ()),
            0,
        )
    return gpu, grads


def backward_entry(p: Problem, arch: str = "sm_90a", types: dict[Any, Any] | None = None, **options: Any):
    """The frontend's low-level entry point, its checks and its compilation from the arguments included.

    ``types`` replaces entries of the table from which the kernel's element type is read. Returns (device, gradients).
    """
    import cuda.bindings.driver as driver
    from cudnn.deepseek_sparse_attention.sparse_attention_backward import _interface_sm90 as hopper
    from cudnn.deepseek_sparse_attention.sparse_attention_backward import _interface_sm100 as blackwell

    module = hopper if arch == "sm_90a" else blackwell
    run = hopper.flash_attn_bwd_sm90 if arch == "sm_90a" else blackwell.flash_attn_bwd_sm100
    size = (
        hopper.flash_attn_bwd_sm90_workspace_size if arch == "sm_90a" else blackwell.flash_attn_bwd_sm100_workspace_size
    )
    queries, tokens, heads = p.q.shape[0], p.kv.shape[0], p.plan.heads
    convert = module.to_cute_tensor
    replaced = {
        "all": lambda *_: True,  # the check that every tensor is a CUDA tensor
        "_get_device_capability": lambda *_: 9,
        "_device_capability": lambda *_: (10, 0),
        "resolve_stream": lambda _: driver.CUstream(0),
        "memset_zero_async": lambda pointer, n, _: ctypes.memset(pointer, 0, n),
        "to_cute_tensor": lambda t, *a, **k: convert(AsCuda(t), *a, **k),
    }
    workspace = torch.full((size(queries, tokens, p.plan.head_dim, heads),), 0xFF, dtype=torch.uint8)
    nan = float("nan")
    grads = {"dq": torch.full_like(p.q, nan), "dkv": torch.full_like(p.kv, nan), "d_sink": torch.zeros(heads)}
    outputs = {name: grads[name] for name in ("dq", "dkv", "d_sink")}
    with contextlib.ExitStack() as stack:
        gpu = stack.enter_context(emulate(arch, **options))
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(module, name, value, create=True))
        if types is not None:
            stack.enter_context(mock.patch.dict(module.torch2cute_dtype_map, types))
            stack.enter_context(mock.patch.object(run, "compile_cache", {}))
        stack.enter_context(mock.patch.object(torch.cuda.nvtx, "range", return_value=contextlib.nullcontext()))
        run(p.q, p.kv, p.out, p.dout, p.lse, p.sink, p.indices, workspace=workspace, **outputs)
    return gpu, grads


def errors(p: Problem, grads: dict[str, Any]) -> dict[str, float]:
    """Relative error of each gradient in the Frobenius norm; NaN counts as infinite."""
    out = {}
    for name, expected in p.expected.items():
        e = ((grads[name].double() - expected).norm() / expected.norm()).item()
        out[name] = e if e == e else float("inf")
    return out
