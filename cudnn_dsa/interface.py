"""The runtime interface: check, normalise, allocate, launch, all on one resolved stream.

``sparse_attention_backward`` and ``sparse_attention_forward`` are what the plans, the wrappers and the operators call,
and may be called directly. Callers differ in the layouts that they take (``contracts.sparse_attention.LAYOUTS``).
"""

from __future__ import annotations

from typing import Any, overload

import torch

from cudnn_dsa import selftest, verify
from cudnn_dsa.admission import BACKWARD, FORWARD, admit, by_name, check_addresses, gate, options_of, output_shapes
from cudnn_dsa.backends import BackwardTensors, ForwardTensors
from cudnn_dsa.contracts.errors import ContractError
from cudnn_dsa.contracts.sparse_attention import ARGUMENTS, Options, Problem
from cudnn_dsa.results import Gradients, Outputs
from cudnn_dsa.streams import launch_scope

__all__ = [
    "Gradients",
    "Outputs",
    "gate",
    "output_shapes",
    "run",
    "sparse_attention_backward",
    "sparse_attention_forward",
]


@overload
def run(tensors: BackwardTensors, options: Options, *launch: Any) -> Gradients: ...
@overload
def run(tensors: ForwardTensors, options: Options, *launch: Any) -> Outputs: ...
def run(
    tensors: Any,
    options: Options,
    stream: Any = None,
    workspace: torch.Tensor | None = None,
    planned: Problem | None = None,
) -> Gradients | Outputs:
    """Check everything, then do everything on one stream.

    Args:
        tensors: as the caller gave them; outputs may be None, and the scale is taken from ``options``.
        options: the rest of the contract.
        stream: see :func:`cudnn_dsa.streams.stream_or_handle`.
        workspace: the caller's scratch memory, or None.
        planned: the problem of the plan that executes, which fixes all but S_q and S_kv; None outside a plan.
    """
    verdict = admit(tensors, options)
    problem, backend = verdict.problem, verdict.backend
    if planned is not None and planned is not verdict.planned:
        problem.check_same_plan(planned)
        verdict.planned = planned
    needed = backend.workspace_bytes(problem)
    check_addresses(tensors, workspace, needed, verdict)

    forward = problem.direction == "forward"
    name = "cudnn_dsa.forward" if forward else "cudnn_dsa.backward"
    with launch_scope(name, verdict.device, stream, (*tensors, workspace)) as resolved:
        ready = list(tensors)
        if not verdict.as_given:
            _make_plain(ready, problem)
        for place, shape, dtype in verdict.missing:
            ready[place] = torch.empty(shape, dtype=dtype, device=verdict.device)
        ready[-1] = verdict.scale
        bundle: Any = (ForwardTensors if forward else BackwardTensors)(*ready)
        if problem.s_q == 0 or problem.s_kv == 0 or problem.topk == 0:
            _write_nothing_selected(by_name(bundle), problem)
        else:
            if not verdict.tested:
                verdict.tested = selftest.ensure(backend, problem)
            if workspace is None and needed:
                workspace = torch.empty(needed, dtype=torch.uint8, device=verdict.device)
            if forward:
                backend.forward(problem, bundle, workspace, resolved)
            else:
                if verify.enabled():
                    verify.check_forward(bundle)
                backend.backward(problem, bundle, workspace, resolved)
        if verdict.given:
            for place in verdict.given:
                if ready[place] is not tensors[place]:
                    # The caller's own tensor is what comes back: its identity is part of the contract.
                    ready[place] = tensors[place].copy_(ready[place])
            # Kernels write through raw pointers; autograd must still see that what a graph saved has changed.
            torch.autograd.graph.increment_version([tensors[place] for place in verdict.given])
    return (Outputs if forward else Gradients)(*[ready[place] for place in verdict.outputs])


def _make_plain(ready: list, problem: Problem) -> None:
    """In place of what is strided or lazily negated: contiguous copies of inputs, and stages for outputs."""
    for place, argument in enumerate(ARGUMENTS[problem.direction]):
        tensor = ready[place]
        if tensor is None or (tensor.is_contiguous() and not tensor.is_neg()):
            continue
        if argument.output and not (argument.name == "dkv" and problem.accumulate):
            ready[place] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        else:
            ready[place] = tensor.resolve_neg().contiguous()


def sparse_attention_backward(
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    attn_sink: torch.Tensor | None,
    topk_idxs: torch.Tensor,
    softmax_scale: float | None = None,
    topk_length: torch.Tensor | None = None,
    dq: torch.Tensor | None = None,
    dkv: torch.Tensor | None = None,
    block_tile: int = 64,
    deterministic: bool | None = None,
    stream: Any = None,
    workspace: torch.Tensor | None = None,
    q_cluster_mode: str = "off",
    *,
    delta: torch.Tensor | None = None,
    accumulate: bool = False,
    backend: str = "auto",
    current_stream: Any = None,
    d_sink: torch.Tensor | None = None,
    head_dim_v: int | None = None,
) -> Gradients:
    """Gradients of sparse attention with respect to q, kv and the sink.

    Args:
        q: (S_q, H, D), bf16 or fp16; fp32 and fp64 on the CPU and reference backends.
        kv: (S_kv, D), dtype of q; the value of a key is its first D_v columns.
        out: (S_q, H, D_v), the forward's result, dtype of q or fp32 (which keeps delta accurate at large logits).
        dout: (S_q, H, D_v), the gradient of out, dtype of q.
        lse: (S_q, H), fp32, natural log, over the selected keys, without the sink.
        attn_sink: (H,), fp32, or None.
        topk_idxs: (S_q, K), int32, rows of kv; an entry < 0 or >= S_kv does not count.
        softmax_scale: multiplier of q.k; None is D**-0.5.
        topk_length: (S_q,), int32, or None: only the first topk_length[i] entries of row i count.
        dq, dkv, d_sink: where to write; None allocates. dkv may be fp32.
        block_tile: 64 or 128; a hint.
        deterministic: True: bitwise equal from run to run; None follows torch's setting.
        stream, current_stream: two names of one argument, see :func:`cudnn_dsa.streams.resolve_stream`.
        workspace: uint8, 256-byte aligned, at least the plan's ``scratch_workspace_bytes()``; None allocates.
        q_cluster_mode: "off".
        delta: (S_q, H), fp32, sum(out * dout) over the value dimension; None computes it from out.
        accumulate: add into the given fp32 dkv instead of overwriting it.
        backend: "auto" picks by the CUDA device; "cpu", "reference" or one of the CUDA backends by name.
        head_dim_v: D_v; None is 512 where D is 512 or 576, and D elsewhere.

    Inputs that are not contiguous are copied on the launch stream; outputs that are not are refused.

    Returns:
        :class:`Gradients`; d_sink is None without a sink.

    Raises:
        ContractError: shape, dtype, device, head_dim, range, alias.
        UnsupportedError: a layout or a mode nothing here runs (a ``NotImplementedError`` too).
        RuntimeError: no backend for the device.
    """
    tensors = BackwardTensors(q, kv, out, dout, lse, attn_sink, topk_idxs, topk_length, delta, dq, dkv, d_sink)
    options = options_of(
        BACKWARD, backend=backend, head_dim_v=head_dim_v, softmax_scale=softmax_scale, deterministic=deterministic,
        accumulate=accumulate, block_tile=block_tile, q_cluster_mode=q_cluster_mode,
    )  # fmt: skip
    return run(tensors, options, one_stream(stream, current_stream), workspace)


def sparse_attention_forward(
    q: torch.Tensor,
    kv: torch.Tensor,
    topk_idxs: torch.Tensor,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    stream: Any = None,
    *,
    head_dim_v: int | None = None,
    backend: str = "auto",
    current_stream: Any = None,
    workspace: torch.Tensor | None = None,
) -> Outputs:
    """Sparse attention over the selected keys, with the lse that the backward needs.

    Arguments are those of :func:`sparse_attention_backward`. ``out`` (S_q, H, D_v) may be fp32; ``lse`` (S_q, H) is
    the natural log over the selected keys without the sink, -inf for a row without a valid key (whose out is 0).
    """
    tensors = ForwardTensors(q, kv, topk_idxs, attn_sink, topk_length, out, lse)
    options = options_of(FORWARD, backend=backend, head_dim_v=head_dim_v, softmax_scale=softmax_scale)
    return run(tensors, options, one_stream(stream, current_stream), workspace)


def one_stream(stream: Any, current_stream: Any) -> Any:
    """Of two names for one argument, the one that is given."""
    if stream is not None and current_stream is not None:
        raise ContractError("stream", "one of stream and current_stream", "both")
    return current_stream if stream is None else stream


def _write_nothing_selected(ready: dict[str, Any], problem: Problem) -> None:
    """The result where there are no queries, no keys or no selection: zeros, and an lse of -inf."""
    for argument in ARGUMENTS[problem.direction]:
        tensor = ready[argument.name]
        if argument.output and tensor is not None:
            if argument.name == "dkv" and problem.accumulate:
                continue
            tensor.fill_(-torch.inf if argument.name == "lse" else 0)
