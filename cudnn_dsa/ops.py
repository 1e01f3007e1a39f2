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

import torch

from cudnn_dsa.admission import BACKWARD, FORWARD, gate, options_of, output_shapes
from cudnn_dsa.backends import BackwardTensors, ForwardTensors
from cudnn_dsa.contracts.sparse_attention import Options
from cudnn_dsa.interface import run

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


def _forward_call(
    q, kv, topk_idxs, attn_sink, topk_length, softmax_scale, head_dim_v, save_for_backward, backend, *_
) -> tuple[ForwardTensors, Options]:
    """The call that the forward operator's arguments stand for; the last two concern the derivative alone."""
    options = options_of(
        FORWARD, layout="wrapper", backend=backend or device_backend(q.device.type), head_dim_v=head_dim_v,
        softmax_scale=softmax_scale, out_dtype="float32" if widens(q, save_for_backward) else None,
    )  # fmt: skip
    return ForwardTensors(q, kv, topk_idxs, attn_sink, topk_length), options


def _backward_call(
    q, kv, out, dout, lse, attn_sink, topk_idxs, topk_length, delta, softmax_scale, head_dim_v, deterministic, backend
) -> tuple[BackwardTensors, Options]:
    """The call that the backward operator's arguments stand for."""
    options = options_of(
        BACKWARD, layout="wrapper", backend=backend or device_backend(q.device.type), head_dim_v=head_dim_v,
        softmax_scale=softmax_scale, deterministic=deterministic,
    )  # fmt: skip
    return BackwardTensors(q, kv, out, dout, lse, attn_sink, topk_idxs, topk_length, delta), options


def _forward(*arguments):
    """(out (S_q, H, D_v) in the dtype of q, lse (S_q, H), wide_out)."""
    tensors, options = _forward_call(*arguments)
    out, lse = run(tensors, options)
    dtype = tensors.q.dtype
    return (out, lse, out.new_empty(0)) if out.dtype == dtype else (out.to(dtype), lse, out)


sparse_attention_forward = torch.library.custom_op(
    "cudnn_dsa::sparse_attention_forward",
    _forward,
    mutates_args=(),
    schema="(Tensor q, Tensor kv, Tensor topk_idxs, Tensor? attn_sink, Tensor? topk_length, float? softmax_scale, "
    "SymInt? head_dim_v, bool save_for_backward, str? backend, bool? deterministic, bool lse_gradient) "
    "-> (Tensor, Tensor, Tensor)",
)


@sparse_attention_forward.register_fake
def _(*arguments):
    tensors, options = _forward_call(*arguments)
    shapes = output_shapes(gate(tensors, options))
    (out_shape, wide_dtype), (lse_shape, lse_dtype) = shapes["out"], shapes["lse"]
    q = tensors.q
    wide = q.new_empty(0) if wide_dtype == q.dtype else q.new_empty(out_shape, dtype=wide_dtype)
    return q.new_empty(out_shape), q.new_empty(lse_shape, dtype=lse_dtype), wide


def _backward(*arguments):
    """(dq, dkv, d_sink); d_sink is (0,) without a sink."""
    tensors, options = _backward_call(*arguments)
    dq, dkv, d_sink = run(tensors, options)
    return dq, dkv, tensors.lse.new_empty(0) if d_sink is None else d_sink


sparse_attention_backward = torch.library.custom_op(
    "cudnn_dsa::sparse_attention_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor q, Tensor kv, Tensor out, Tensor dout, Tensor lse, Tensor? attn_sink, Tensor topk_idxs, "
    "Tensor? topk_length, Tensor? delta, float? softmax_scale, SymInt? head_dim_v, bool? deterministic, str? backend) "
    "-> (Tensor, Tensor, Tensor)",
)


@sparse_attention_backward.register_fake
def _(*arguments):
    tensors, options = _backward_call(*arguments)
    shapes = output_shapes(gate(tensors, options))
    return tuple(tensors.q.new_empty(shape, dtype=dtype) for shape, dtype in shapes.values())
