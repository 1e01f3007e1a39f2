"""Every side of a benchmark, one adapter each: this project's backends, and others' kernels where they are installed.

A side is made from the shared inputs and is then a function without arguments that runs once into its own outputs. One
that cannot run here raises :class:`Unavailable` with the reason.

- this project: the plans of every backend that runs here, outputs and workspace given;
- cuDNN frontend: its DSA backward (``cudnn.DSA.SparseAttentionBackward``), called directly;
- FlashMLA: ``flash_mla_sparse_fwd``; its public kernel takes bf16, no sink;
- plain PyTorch: gather, einsum, softmax, autograd.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import cudnn_dsa
from cudnn_dsa import backends
from cudnn_dsa.cli.bench.memory import free_bytes
from cudnn_dsa.cli.bench.plain import plain_bytes, plain_sparse_attention

OURS = ("sm100", "sm90", "triton", "cpu")
PLAIN = "plain PyTorch"


class Unavailable(Exception):
    """A side cannot run here; the message says why."""


@dataclass
class Inputs:
    """q (S_q, H, D), kv (S_kv, D), topk_idxs (S_q, K), attn_sink (H,) fp32, dout (S_q, H, D_v); for a backward also
    out (S_q, H, D_v) and lse (S_q, H) of the forward."""

    q: torch.Tensor
    kv: torch.Tensor
    topk_idxs: torch.Tensor
    attn_sink: torch.Tensor
    dout: torch.Tensor
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None

    @property
    def softmax_scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def first(self, queries: int) -> Inputs:
        """The same with fewer queries."""
        cut = {k: v[:queries] for k, v in vars(self).items() if v is not None and k not in ("kv", "attn_sink")}
        return Inputs(kv=self.kv, attn_sink=self.attn_sink, **cut)


@dataclass
class Side:
    """``run()`` executes once; ``results()`` are its outputs by name; ``note`` says what is special about it."""

    run: Callable[[], Any]
    results: Callable[[], dict[str, torch.Tensor]]
    note: str = ""


def ours(backend: str, direction: str, deterministic: bool = False) -> Callable[[Inputs], Side]:
    def make(i: Inputs) -> Side:
        try:
            reason = backends.load(backend).unavailable(str(i.q.device))
        except RuntimeError as error:
            reason = str(error)
        if reason:
            raise Unavailable(reason)
        return (_our_backward if direction == "backward" else _our_forward)(i, backend, deterministic)

    return make


def _our_forward(i: Inputs, backend: str, deterministic: bool) -> Side:
    plan = cudnn_dsa.SparseAttentionForward(i.q, i.kv, i.topk_idxs, i.attn_sink, backend=backend)
    _compile(plan)
    out, lse = torch.empty_like(i.dout), torch.empty(i.q.shape[:2], device=i.q.device)
    return Side(
        lambda: plan.execute(i.q, i.kv, i.topk_idxs, i.attn_sink, out=out, lse=lse), lambda: {"out": out, "lse": lse}
    )


def _our_backward(i: Inputs, backend: str, deterministic: bool) -> Side:
    assert i.out is not None
    tensors = (i.q, i.kv, i.out, i.dout, i.lse, i.attn_sink, i.topk_idxs)
    plan = cudnn_dsa.SparseAttentionBackward(*tensors, deterministic=deterministic, backend=backend)
    _compile(plan)
    dq, dkv, d_sink = torch.empty_like(i.q), torch.empty_like(i.kv), torch.empty_like(i.attn_sink)
    workspace = torch.empty(plan.scratch_workspace_bytes(), dtype=torch.uint8, device=i.q.device)
    return Side(
        lambda: plan.execute(*tensors, dq, dkv, workspace=workspace, d_sink=d_sink),
        lambda: {"dq": dq, "dkv": dkv, "d_sink": d_sink},
    )


def _compile(plan: Any) -> None:
    try:
        plan.check_support()
        plan.compile()
    except (NotImplementedError, RuntimeError) as error:
        raise Unavailable(str(error)) from error


def cudnn_frontend_backward(i: Inputs) -> Side:
    frontend = _package("cudnn", "nvidia-cudnn-frontend[cutedsl]")
    _package("cutlass", "nvidia-cutlass-dsl")
    assert i.out is not None
    tensors = (i.q, i.kv, i.out, i.dout, i.lse, i.attn_sink, i.topk_idxs)
    try:
        plan = frontend.DSA.SparseAttentionBackward(*tensors)
        plan.check_support()
        plan.compile()
    except Exception as error:
        raise Unavailable(f"{type(error).__name__}: {error}") from error
    dq, dkv, d_sink = torch.empty_like(i.q), torch.empty_like(i.kv), torch.empty_like(i.attn_sink)
    workspace = torch.empty(plan.scratch_workspace_bytes(), dtype=torch.uint8, device=i.q.device)
    return Side(
        lambda: plan.execute(*tensors, dq, dkv, workspace=workspace, d_sink=d_sink),
        lambda: {"dq": dq, "dkv": dkv, "d_sink": d_sink},
        f"nvidia-cudnn-frontend {getattr(frontend, '__version__', '?')}",
    )


def flash_mla_forward(i: Inputs) -> Side:
    flash_mla = _package("flash_mla", "see github.com/deepseek-ai/FlashMLA")
    if i.q.dtype != torch.bfloat16:
        raise Unavailable("bfloat16 only")
    made: list[torch.Tensor] = []

    def run() -> None:
        made[:] = flash_mla.flash_mla_sparse_fwd(i.q, i.kv[:, None], i.topk_idxs[:, None], i.softmax_scale)

    return Side(run, dict, "without the sink; allocates its outputs")


def plain_forward(i: Inputs) -> Side:
    _fits(i)
    made: list[torch.Tensor] = []

    def run() -> None:
        made[:] = [plain_sparse_attention(i.q, i.kv, i.topk_idxs, i.attn_sink, i.dout.shape[-1])]

    return Side(run, lambda: {"out": made[0]}, "materialises the gathered keys and the scores")


def plain_backward(i: Inputs) -> Side:
    """Its own forward, kept, and autograd through it."""
    _fits(i)
    leaves = [x.detach().requires_grad_() for x in (i.q, i.kv, i.attn_sink)]
    out = plain_sparse_attention(*leaves[:2], i.topk_idxs, leaves[2], i.dout.shape[-1])
    made: list[torch.Tensor] = []

    def run() -> None:
        made[:] = torch.autograd.grad(out, leaves, i.dout, retain_graph=True)

    return Side(run, lambda: dict(zip(("dq", "dkv", "d_sink"), made, strict=True)), "autograd; keeps its forward")


def _fits(i: Inputs) -> None:
    if not (i.topk_idxs >= 0).all():
        raise Unavailable("it takes no invalid entries")
    (s_q, heads, head_dim), topk = i.q.shape, i.topk_idxs.shape[1]
    needed = plain_bytes(s_q, heads, topk, head_dim, i.q.element_size())
    free = free_bytes(str(i.q.device))
    if needed > 0.8 * free:
        raise Unavailable(f"it would want up to {needed / 2**30:.0f} GiB of {free / 2**30:.0f} GiB free")


def _package(name: str, install: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unavailable(f"{name} is not installed ({install}): {error}") from error


# Name -> how it is made; the first one is what the others are compared with.
SIDES: dict[str, dict[str, Callable[[Inputs], Side]]] = {
    "backward": {
        "cuDNN frontend": cudnn_frontend_backward,
        **{name: ours(name, "backward") for name in OURS},
        **{f"{name} deterministic": ours(name, "backward", True) for name in OURS},
        PLAIN: plain_backward,
    },
    "forward": {
        "FlashMLA": flash_mla_forward,
        **{name: ours(name, "forward") for name in OURS},
        PLAIN: plain_forward,
    },
}
