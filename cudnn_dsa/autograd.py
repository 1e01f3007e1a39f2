"""``sparse_attention``: the differentiable operator."""

from __future__ import annotations

from typing import Any

import torch

from cudnn_dsa import ops, transforms
from cudnn_dsa.contracts import ContractError


def sparse_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    topk_idxs: torch.Tensor,
    *,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    deterministic: bool | None = None,
    head_dim_v: int | None = None,
    backend: str | None = None,
    return_lse: bool = False,
) -> Any:
    """DeepSeek sparse attention: every query attends to its own selection of keys.

    out[i, h] = sum_j p_ij v_j over the selected keys j of query i, p = exp(s - logaddexp(lse, attn_sink)),
    s = softmax_scale * q.k, v = kv[:, :D_v] (DeepSeek-V3.2, section 2.1).

    Args:
        q: (S_q, H, D).
        kv: (S_kv, D), keys and values in one latent tensor. Under autocast q and kv are cast to its dtype.
        topk_idxs: (S_q, K), int32, rows of kv; an entry < 0 or >= S_kv does not count, a repeated one counts again.
        attn_sink: (H,), fp32: the logit of a key without a value, in the denominator only.
        topk_length: (S_q,), int32: only the first topk_length[i] entries of row i count.
        softmax_scale: multiplier of q.k; None is D**-0.5.
        deterministic: True: a backward that is bitwise equal from run to run; None follows
            ``torch.use_deterministic_algorithms``.
        head_dim_v: D_v; None is 512 where D is 512 or 576, and D elsewhere.
        backend: None dispatches on the device; "cpu", "reference", or a CUDA backend by name.
        return_lse: return (out, lse).

    Returns:
        out (S_q, H, D_v) in the dtype of q; with ``return_lse`` also lse (S_q, H), fp32, natural log over the selected
        keys without the sink (-inf for a row without one). Gradients flow to q, kv and attn_sink, through lse as well.

    Raises:
        ContractError: shape, dtype, device, head_dim, range. RuntimeError: no backend for the device; a second
        derivative.
    """
    tensors = {"q": q, "kv": kv, "topk_idxs": topk_idxs, "attn_sink": attn_sink, "topk_length": topk_length}
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor) and (x is not None or name in ("q", "kv", "topk_idxs")):
            raise ContractError(name, "a tensor", type(x).__name__)
        if x is not None:
            transforms.refuse_distributed(name, x)
            if transforms.active():
                transforms.refuse_derivatives(name, x)
    if isinstance(softmax_scale, torch.Tensor):  # it would be taken as a number, without a gradient
        raise ContractError("softmax_scale", "a number", "a tensor", "no gradient is computed for it")
    device_type = q.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        q, kv = (_autocast(x, torch.get_autocast_dtype(device_type)) for x in (q, kv))
    differentiable = (q, kv) if attn_sink is None else (q, kv, attn_sink)
    # An exported program does not know yet whether it will train.
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in differentiable)
    save = trains or torch.compiler.is_exporting()
    out, lse, _ = ops.sparse_attention_forward(
        q, kv, topk_idxs, attn_sink, topk_length, softmax_scale, head_dim_v, save, backend, deterministic, return_lse
    )
    return (out, lse) if return_lse else out


def _autocast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As autocast treats a matmul's operands: everything but float64 is cast."""
    return x if x.dtype == torch.float64 else x.to(dtype)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, kv, topk_idxs, attn_sink, topk_length, softmax_scale, head_dim_v, save, backend, deterministic, lse_grad = inputs
    out, lse, wide_out = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, kv, wide_out if ops.widens(q, save) else out, lse, attn_sink, topk_idxs, topk_length)
    ctx.options = {
        "softmax_scale": softmax_scale, "head_dim_v": head_dim_v, "deterministic": deterministic, "backend": backend,
    }  # fmt: skip
    ctx.lse_gradient = lse_grad


def _backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, _: Any) -> tuple:
    q, kv, out, lse, attn_sink, topk_idxs, topk_length = ctx.saved_tensors
    if not ctx.lse_gradient:
        dlse = None
    gradients: tuple[torch.Tensor | None, ...] = (None, None, None)
    if dout is not None:
        # Without a sink, p is the derivative of lse as well as the softmax, so that its gradient rides on delta:
        # ds = p * (dp - delta) * scale + p * dlse * scale.
        delta = None
        if dlse is not None and attn_sink is None:
            delta = (out * dout.to(lse.dtype)).sum(-1) - dlse
            dlse = None
        gradients = _gradients(ctx, q, kv, out, dout, lse, attn_sink, topk_idxs, topk_length, delta)
    if dlse is not None:
        # With a sink, p = exp(s - Z) is not the derivative of lse, exp(s - lse) is, and their ratio is unbounded: a
        # second pass without the sink, in which dout is 0 and delta is -dlse.
        zeros = torch.zeros_like(out, dtype=q.dtype)
        more = _gradients(ctx, q, kv, out, zeros, lse, None, topk_idxs, topk_length, -dlse)
        gradients = more if dout is None else (gradients[0] + more[0], gradients[1] + more[1], gradients[2])
    dq, dkv, d_sink = gradients
    return dq, dkv, None, d_sink, *[None] * 7


def _gradients(ctx: Any, q: Any, kv: Any, out: Any, dout: Any, lse: Any, sink: Any, idxs: Any, length: Any, delta: Any):
    dq, dkv, d_sink = ops.sparse_attention_backward(
        q, kv, out, dout, lse, sink, idxs, length, delta, **ctx.options
    )  # fmt: skip
    return dq, dkv, None if sink is None else d_sink


def _no_second_derivative(ctx: Any, *gradients: Any) -> Any:
    raise RuntimeError("cudnn_dsa.sparse_attention: second derivatives are not supported")


torch.library.register_autograd("cudnn_dsa::sparse_attention_forward", _backward, setup_context=_setup_context)
torch.library.register_autograd("cudnn_dsa::sparse_attention_backward", _no_second_derivative)
