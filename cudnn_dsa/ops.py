"""The torch operators: schemas, meta ("fake") implementations, and the low-level ones that the C++ code implements.

Functional operators, which dispatch on the device and which torch.compile, export and autograd see (``autograd.py``
adds the derivative):

- ``cudnn_dsa::sparse_attention_forward`` -> (out, lse, wide_out): wide_out is out in fp32 for the backward's delta, or
  empty where out is that already or is not wanted;
- ``cudnn_dsa::sparse_attention_backward`` -> (dq, dkv, d_sink): d_sink is empty without a sink.

Low-level operators, which write into given tensors, for one implementation a device (csrc/cpu for the CPU):
``cudnn_dsa::forward_out`` and ``cudnn_dsa::backward_out``; D_v is the last dimension of out.
"""

from __future__ import annotations

from typing import cast

import torch

from cudnn_dsa import interface
from cudnn_dsa.contracts.sparse_attention import Options
from cudnn_dsa.interface import Gradients, Launch, Outputs

torch.library.define(
    "cudnn_dsa::forward_out",
    "(Tensor q, Tensor kv, Tensor topk_idxs, Tensor? attn_sink, Tensor? topk_length, float softmax_scale, "
    "Tensor(a!) out, Tensor(b!) lse) -> ()",
)
torch.library.define(
    "cudnn_dsa::backward_out",
    "(Tensor q, Tensor kv, Tensor out, Tensor dout, Tensor lse, Tensor? attn_sink, Tensor topk_idxs, "
    "Tensor? topk_length, Tensor? delta, float softmax_scale, bool accumulate, Tensor(a!) dq, Tensor(b!) dkv, "
    "Tensor(c!)? d_sink) -> ()",
)


def device_backend(device_type: str) -> str:
    """The backend that serves a device where the caller names none."""
    return "auto" if device_type == "cuda" else "cpu"


def widens(q: torch.Tensor, save_for_backward: bool) -> bool:
    """Whether the forward also returns out in fp32: a 16-bit out alone costs 5e-3 to 7e-3 in dq at |s| near 100."""
    return save_for_backward and q.dtype in (torch.bfloat16, torch.float16)


def _forward_arguments(
    q: torch.Tensor,
    kv: torch.Tensor,
    topk_idxs: torch.Tensor,
    attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    softmax_scale: float | None,
    head_dim_v: int | None,
    save_for_backward: bool,
    backend: str | None,
) -> tuple[dict[str, torch.Tensor | None], Options, bool]:
    """(tensors, options, whether a 16-bit out is wanted in fp32 as well)."""
    tensors = {
        "q": q, "kv": kv, "topk_idxs": topk_idxs, "attn_sink": attn_sink, "topk_length": topk_length, "out": None,
        "lse": None,
    }  # fmt: skip
    widen = widens(q, save_for_backward)
    options = Options(
        direction="forward",
        backend=backend or device_backend(q.device.type),
        head_dim_v=head_dim_v,
        softmax_scale=softmax_scale,
        out_dtype="float32" if widen else None,
        layout="wrapper",
    )
    return tensors, options, widen


@torch.library.custom_op("cudnn_dsa::sparse_attention_forward", mutates_args=())
def sparse_attention_forward(
    q: torch.Tensor,
    kv: torch.Tensor,
    topk_idxs: torch.Tensor,
    attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    softmax_scale: float | None,
    head_dim_v: int | None,
    save_for_backward: bool,
    backend: str | None,
    deterministic: bool | None,
    lse_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out (S_q, H, D_v) in the dtype of q, lse (S_q, H), wide_out).

    ``deterministic`` and ``lse_gradient`` (whether a gradient of lse counts) concern the derivative alone.
    """
    tensors, options, widen = _forward_arguments(
        q, kv, topk_idxs, attn_sink, topk_length, softmax_scale, head_dim_v, save_for_backward, backend
    )
    out, lse = cast(Outputs, interface.run(tensors, options, Launch()))
    if widen:
        return out.to(q.dtype), lse, out
    return out, lse, out.new_empty(0)


@sparse_attention_forward.register_fake
def _(
    q, kv, topk_idxs, attn_sink, topk_length, softmax_scale, head_dim_v, save_for_backward, backend, deterministic,
    lse_gradient,
):  # fmt: skip
    tensors, options, widen = _forward_arguments(
        q, kv, topk_idxs, attn_sink, topk_length, softmax_scale, head_dim_v, save_for_backward, backend
    )
    problem = interface.gate(tensors, options)
    shapes = interface.output_shapes(problem)
    (out_shape, wide_dtype), (lse_shape, lse_dtype) = shapes["out"], shapes["lse"]
    wide = q.new_empty(out_shape, dtype=wide_dtype) if widen else q.new_empty(0)
    return q.new_empty(out_shape), q.new_empty(lse_shape, dtype=lse_dtype), wide


def _backward_arguments(
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    attn_sink: torch.Tensor | None,
    topk_idxs: torch.Tensor,
    topk_length: torch.Tensor | None,
    delta: torch.Tensor | None,
    softmax_scale: float | None,
    head_dim_v: int | None,
    deterministic: bool | None,
    backend: str | None,
) -> tuple[dict[str, torch.Tensor | None], Options]:
    tensors = {
        "q": q, "kv": kv, "out": out, "dout": dout, "lse": lse, "attn_sink": attn_sink, "topk_idxs": topk_idxs,
        "topk_length": topk_length, "delta": delta, "dq": None, "dkv": None, "d_sink": None,
    }  # fmt: skip
    options = Options(
        direction="backward",
        backend=backend or device_backend(q.device.type),
        head_dim_v=head_dim_v,
        softmax_scale=softmax_scale,
        deterministic=interface.resolve_deterministic(deterministic),
        layout="wrapper",
    )
    return tensors, options


@torch.library.custom_op("cudnn_dsa::sparse_attention_backward", mutates_args=())
def sparse_attention_backward(
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    attn_sink: torch.Tensor | None,
    topk_idxs: torch.Tensor,
    topk_length: torch.Tensor | None,
    delta: torch.Tensor | None,
    softmax_scale: float | None,
    head_dim_v: int | None,
    deterministic: bool | None,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dkv, d_sink); d_sink is (0,) without a sink."""
    tensors, options = _backward_arguments(
        q, kv, out, dout, lse, attn_sink, topk_idxs, topk_length, delta, softmax_scale, head_dim_v, deterministic,
        backend,
    )  # fmt: skip
    dq, dkv, d_sink = cast(Gradients, interface.run(tensors, options, Launch()))
    return dq, dkv, lse.new_empty(0) if d_sink is None else d_sink


@sparse_attention_backward.register_fake
def _(
    q, kv, out, dout, lse, attn_sink, topk_idxs, topk_length, delta, softmax_scale, head_dim_v, deterministic, backend
):
    tensors, options = _backward_arguments(
        q, kv, out, dout, lse, attn_sink, topk_idxs, topk_length, delta, softmax_scale, head_dim_v, deterministic,
        backend,
    )  # fmt: skip
    problem = interface.gate(tensors, options)
    shapes = interface.output_shapes(problem)
    return tuple(q.new_empty(shape, dtype=dtype) for shape, dtype in shapes.values())
