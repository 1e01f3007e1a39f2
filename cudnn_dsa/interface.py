"""The runtime interface: check, normalise, allocate, launch, all on one resolved stream.

``sparse_attention_backward`` and ``sparse_attention_forward`` are what the plans, the wrappers and the operators call,
and may be called directly. Callers differ in the layouts that they take (``contracts.sparse_attention.LAYOUTS``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from cudnn_dsa import backends, selftest, transforms, verify
from cudnn_dsa.backends import BackwardTensors, ForwardTensors
from cudnn_dsa.contracts import TensorSpec, describe
from cudnn_dsa.contracts.errors import ContractError
from cudnn_dsa.contracts.rules import reach
from cudnn_dsa.contracts.sparse_attention import (
    ARGUMENTS,
    Options,
    Problem,
    check,
    check_aliases,
    check_properties,
    check_workspace,
)
from cudnn_dsa.streams import launch_scope


class _StringKeys:
    """A named tuple whose fields are also reached by name as a key, as the cuDNN frontend's results are."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            if key not in self.keys():
                raise KeyError(key)
            return getattr(self, key)
        return super().__getitem__(key)  # type: ignore[misc]

    def keys(self) -> tuple[str, ...]:
        return self._fields  # type: ignore[attr-defined]


class _Gradients(NamedTuple):
    dq: torch.Tensor
    dkv: torch.Tensor
    d_sink: torch.Tensor | None


class _Outputs(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor


class Gradients(_StringKeys, _Gradients):
    """(dq (S_q, H, D), dkv (S_kv, D), d_sink (H,) or None); ``g["dq"]`` works as ``g.dq`` does."""

    __slots__ = ()


class Outputs(_StringKeys, _Outputs):
    """(out (S_q, H, D_v), lse (S_q, H)); ``o["lse"]`` works as ``o.lse`` does."""

    __slots__ = ()


Tensors = Mapping[str, torch.Tensor | None]


def describe_all(tensors: Mapping[str, Any]) -> dict[str, TensorSpec | None]:
    """Specs by argument name. Raises ``ContractError`` for what is no strided tensor."""
    specs: dict[str, TensorSpec | None] = {}
    for name, tensor in tensors.items():
        try:
            specs[name] = None if tensor is None else describe(tensor)
        except TypeError as error:
            raise ContractError(name, "a strided tensor", type(tensor).__name__, str(error)) from None
    return specs


def resolve_deterministic(deterministic: bool | None) -> bool:
    """None follows ``torch.use_deterministic_algorithms``."""
    return torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic


@dataclass(frozen=True)
class _Verdict:
    """A call that passed, and the bytes that each of its tensors spans."""

    problem: Problem
    reach: dict[str, int]


# A whole check costs a few times what a kernel launch does, and a training loop repeats its calls: what does not depend
# on addresses is remembered by exactly what it depends on. Emptied when full; a lost or doubled entry costs a check.
_verdicts: dict[tuple, _Verdict] = {}
_VERDICTS_KEPT = 1024
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)  # fake and other subclasses may have symbolic sizes


def gate(tensors: Mapping[str, Any], options: Options) -> Problem:
    """Every rule of the contract, applied to real, meta or fake tensors (or specs). Nothing is launched."""
    entries: list[Any] = [options, *tensors]
    for tensor in tensors.values():
        if tensor is None:
            entries.append(None)
        elif type(tensor) in _PLAIN_TENSORS and tensor.layout is torch.strided:
            entries += (tensor.shape, tensor.dtype, tensor.stride(), tensor.device)
        else:
            return check(describe_all(tensors), options)
    key = tuple(entries)
    verdict = _verdicts.get(key)
    if verdict is None:
        specs = describe_all(tensors)
        verdict = _Verdict(
            check_properties(specs, options), {name: reach(spec) for name, spec in specs.items() if spec is not None}
        )
        if len(_verdicts) >= _VERDICTS_KEPT:
            _verdicts.clear()
        _verdicts[key] = verdict
    if _may_alias(tensors, verdict):
        check_aliases(describe_all(tensors), options.direction)
    return verdict.problem


def _may_alias(tensors: Mapping[str, Any], verdict: _Verdict) -> bool:
    """Whether address ranges of an output and of another tensor meet; views that interleave are for the full check."""
    spans = {}
    for name, length in verdict.reach.items():
        start = tensors[name].data_ptr()
        if length and start:  # meta tensors have no address
            spans[name] = (start, start + length)
    for argument in ARGUMENTS[verdict.problem.direction]:
        if argument.output and argument.name in spans:
            start, end = spans.pop(argument.name)
            if any(start < other_end and other_start < end for other_start, other_end in spans.values()):
                return True
    return False


@dataclass(frozen=True)
class Launch:
    """How an execution runs: what is neither a tensor of the operator nor a matter of its contract.

    Attributes:
        stream: see :func:`cudnn_dsa.streams.resolve_stream`.
        workspace: the caller's scratch memory, or None.
        planned: the problem of the plan that executes, which fixes all but S_q and S_kv; None outside a plan.
    """

    stream: Any = None
    workspace: torch.Tensor | None = None
    planned: Problem | None = None


def run(tensors: Tensors, options: Options, launch: Launch) -> Gradients | Outputs:
    """Check everything, then do everything on one stream.

    Args:
        tensors: by argument name, outputs included; None for what is not given.
        options: the rest of the contract.
        launch: how to run it.
    """
    wrapped = transforms.active()
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and (wrapped or type(tensor) not in _PLAIN_TENSORS):
            transforms.refuse_wrapped(name, tensor)
    problem = gate(tensors, options)
    if launch.planned is not None:
        problem.check_same_plan(launch.planned)
    backend = backends.select(problem)
    selftest.ensure(backend, problem)
    needed = backend.workspace_bytes(problem)
    if launch.workspace is not None:
        _check_workspace(launch.workspace, needed, tensors)

    device = torch.device(problem.device)
    scale = problem.head_dim**-0.5 if options.softmax_scale is None else options.softmax_scale
    outputs = [a.name for a in ARGUMENTS[problem.direction] if a.output]
    recorded = (*tensors.values(), launch.workspace)
    with launch_scope(f"cudnn_dsa.{problem.direction}", device, launch.stream, recorded) as stream:
        ready: dict[str, Any] = {
            name: _output(name, tensor, problem) if name in outputs else _input(tensor)
            for name, tensor in tensors.items()
        }
        if problem.s_q == 0 or problem.s_kv == 0 or problem.topk == 0:
            _write_nothing_selected(ready, problem)
        else:
            workspace = launch.workspace
            if workspace is None and needed:
                workspace = torch.empty(needed, dtype=torch.uint8, device=device)
            if problem.direction == "forward":
                backend.forward(problem, ForwardTensors(softmax_scale=scale, **ready), workspace, stream)
            else:
                bundle = BackwardTensors(softmax_scale=scale, **ready)
                if verify.enabled():
                    verify.check_forward(bundle)
                backend.backward(problem, bundle, workspace, stream)
        written: list[Any] = [_deliver(tensors[name], ready[name]) for name in outputs]
        # Kernels write through raw pointers; autograd must still see that what a graph saved has changed.
        torch.autograd.graph.increment_version([x for name in outputs if (x := tensors[name]) is not None])
    return (Outputs if problem.direction == "forward" else Gradients)(*written)


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
    tensors: Tensors = {
        "q": q, "kv": kv, "out": out, "dout": dout, "lse": lse, "attn_sink": attn_sink, "topk_idxs": topk_idxs,
        "topk_length": topk_length, "delta": delta, "dq": dq, "dkv": dkv, "d_sink": d_sink,
    }  # fmt: skip
    options = Options(
        "backward", backend, head_dim_v, softmax_scale, resolve_deterministic(deterministic), accumulate, block_tile,
        q_cluster_mode, layout="interface",
    )  # fmt: skip
    return cast(Gradients, run(tensors, options, Launch(one_stream(stream, current_stream), workspace)))


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
    tensors: Tensors = {
        "q": q, "kv": kv, "topk_idxs": topk_idxs, "attn_sink": attn_sink, "topk_length": topk_length, "out": out,
        "lse": lse,
    }  # fmt: skip
    options = Options("forward", backend, head_dim_v, softmax_scale, layout="interface")
    return cast(Outputs, run(tensors, options, Launch(one_stream(stream, current_stream), workspace)))


def one_stream(stream: Any, current_stream: Any) -> Any:
    """Of two names for one argument, the one that is given."""
    if stream is not None and current_stream is not None:
        raise ContractError("stream", "one of stream and current_stream", "both")
    return current_stream if stream is None else stream


def _check_workspace(workspace: torch.Tensor, needed: int, tensors: Tensors) -> None:
    spec = describe_all({"workspace": workspace})["workspace"]
    assert spec is not None
    # To describe all tensors takes longer than to launch: beside q, those whose memory may meet the workspace's.
    near = {k: x for k, x in tensors.items() if x is not None and (k == "q" or _storages_meet(workspace, x))}
    given = {name: other for name, other in describe_all(near).items() if other is not None}
    check_workspace(spec, needed, given["q"], given)


def _storages_meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    first, second = a.untyped_storage(), b.untyped_storage()
    start, other = first.data_ptr(), second.data_ptr()
    return start < other + second.nbytes() and other < start + first.nbytes()


def _input(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _output(name: str, given: torch.Tensor | None, problem: Problem) -> torch.Tensor | None:
    """Contiguous memory for an output: the caller's, a stage for it, or new."""
    if given is not None:
        if given.is_contiguous():
            return given
        stage = torch.empty_like(given, memory_format=torch.contiguous_format)
        return stage.copy_(given) if name == "dkv" and problem.accumulate else stage
    if name == "d_sink" and not problem.has_sink:
        return None
    shape, dtype = output_shapes(problem)[name]
    return torch.empty(shape, dtype=dtype, device=problem.device)


def _deliver(given: torch.Tensor | None, ready: torch.Tensor | None) -> torch.Tensor | None:
    """The caller's own tensor where one was given: its identity is part of the contract."""
    if given is None or given is ready:
        return ready
    assert ready is not None
    return given.copy_(ready)


def output_shapes(problem: Problem) -> dict[str, tuple[tuple[Any, ...], torch.dtype]]:
    """(shape, dtype) of each output of a problem; d_sink is (0,) without a sink."""
    p = problem
    if p.direction == "forward":
        return {
            "out": ((p.s_q, p.heads, p.head_dim_v), _torch_dtype(p.out_dtype)),
            "lse": ((p.s_q, p.heads), _torch_dtype(p.stat_dtype)),
        }
    return {
        "dq": ((p.s_q, p.heads, p.head_dim), _torch_dtype(p.dtype)),
        "dkv": ((p.s_kv, p.head_dim), _torch_dtype(p.dkv_dtype)),
        "d_sink": ((p.heads if p.has_sink else 0,), _torch_dtype(p.sink_dtype or p.stat_dtype)),
    }


def _torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def _write_nothing_selected(ready: Tensors, problem: Problem) -> None:
    """The result where there are no queries, no keys or no selection: zeros, and an lse of -inf."""
    for argument in ARGUMENTS[problem.direction]:
        tensor = ready[argument.name]
        if argument.output and tensor is not None:
            if argument.name == "dkv" and problem.accumulate:
                continue
            tensor.fill_(-torch.inf if argument.name == "lse" else 0)
