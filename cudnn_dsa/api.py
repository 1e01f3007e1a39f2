"""Plans and wrappers: the cuDNN frontend's DSA interface, by the same names and orders of arguments.

A plan is made from sample tensors, checked (``check_support``), compiled (``compile``) and executed many times, with
other S_q and S_kv if need be. A wrapper does it all in one call. Both only prepare arguments: the rules are in
``contracts``, the execution in ``interface``.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from cudnn_dsa import backends, selftest
from cudnn_dsa.admission import BACKWARD, FORWARD, Tensors, describe_all, gate, options_of
from cudnn_dsa.backends import BackwardTensors, ForwardTensors
from cudnn_dsa.contracts.sparse_attention import Options, Problem
from cudnn_dsa.interface import run
from cudnn_dsa.results import Gradients, Outputs


class _Plan:
    """What the two directions share: sample specs, the gate, the chosen backend."""

    def __init__(self, samples: Tensors, options: Options):
        self._samples = describe_all(samples)  # specs only: a plan keeps no tensor alive
        self._options = options
        self._problem: Problem | None = None

    def check_support(self) -> bool:
        """True if ``execute`` runs what the samples describe; raises otherwise.

        Raises:
            ContractError: shape, dtype, device or head_dim (a ``ValueError`` and an ``AssertionError``).
            UnsupportedError: a layout or a mode that nothing here runs (a ``NotImplementedError``).
            RuntimeError: no backend for the device.
        """
        self._checked()
        return True

    def compile(self) -> None:
        """Compile and tune everything, so that the first ``execute`` does neither and can be captured in a graph.

        That includes what a call may still choose: ``accumulate`` where the plan's dkv is wide enough, and a forward's
        out in fp32. Not included are tensors that pass 2**31 elements where the samples do not: another kernel, which
        their first ``execute`` compiles.

        Kernels that have not run on this kind of device are compared with the reference (``cudnn_dsa.selftest``).

        Raises:
            UnsupportedError: they compute something else.
        """
        for problem in _executions(self._checked()):
            backend = backends.select(problem)
            backend.prepare(problem)
            selftest.ensure(backend, problem)

    def scratch_workspace_bytes(self) -> int:
        """Bytes of workspace that ``execute`` takes at the samples' sizes (0: none). It grows with S_q and S_kv."""
        problem = self._checked()
        return backends.select(problem).workspace_bytes(problem)

    def _options_for(self, softmax_scale: float | None, accumulate: bool = False) -> Options:
        """The plan's options, with what a call may change."""
        if softmax_scale is None and not accumulate:
            return self._options
        scale = self._options.softmax_scale if softmax_scale is None else softmax_scale
        return options_of(self._options, softmax_scale=scale, accumulate=accumulate)

    def _checked(self) -> Problem:
        if self._problem is None:
            problem = gate(self._samples, self._options)
            backends.select(problem)
            self._problem = problem
            self._options = options_of(self._options, dkv_dtype=problem.dkv_dtype)
        return self._problem


def _executions(problem: Problem) -> list[Problem]:
    """The kernels that a plan's executions choose among by their arguments, as problems: an execution may add into an
    fp32 or fp64 dkv, and a forward, which has no sample of out, may write it in fp32."""
    found = [problem]
    if problem.direction == "backward" and problem.dkv_dtype in ("float32", "float64"):
        found.append(replace(problem, accumulate=True))
    if problem.direction == "forward" and problem.dtype in ("bfloat16", "float16"):
        found.append(replace(problem, out_dtype="float32"))
    return found


class SparseAttentionBackward(_Plan):
    """A plan for the backward pass.

    Args:
        sample_q: (S_q, H, D); sample_kv: (S_kv, D); sample_out, sample_dout: (S_q, H, D_v); sample_lse: (S_q, H);
        sample_attn_sink: (H,) or None; sample_topk_idxs: (S_q, K); sample_dq, sample_dkv: of q and kv, or None (then
            of their dtypes); sample_topk_length: (S_q,) or None; sample_delta: (S_q, H) or None.
            Their values are not read and no tensor is kept; outputs must not share memory with inputs.
        softmax_scale: multiplier of q.k; None is D**-0.5.
        block_tile: 64 or 128; a hint.
        deterministic: True: bitwise equal from run to run. None follows
            ``torch.are_deterministic_algorithms_enabled()``, read when the plan is made.
        q_cluster_mode: "off".
        backend: "auto" picks by the CUDA device; "cpu", "reference", or a CUDA backend by name.

    See docs/contract.md for dtypes and meanings.
    """

    def __init__(
        self,
        sample_q: torch.Tensor,
        sample_kv: torch.Tensor,
        sample_out: torch.Tensor,
        sample_dout: torch.Tensor,
        sample_lse: torch.Tensor,
        sample_attn_sink: torch.Tensor | None,
        sample_topk_idxs: torch.Tensor,
        sample_dq: torch.Tensor | None = None,
        sample_dkv: torch.Tensor | None = None,
        sample_topk_length: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        block_tile: int = 64,
        deterministic: bool | None = None,
        q_cluster_mode: str = "off",
        *,
        sample_delta: torch.Tensor | None = None,
        backend: str = "auto",
    ):
        samples = BackwardTensors(
            sample_q, sample_kv, sample_out, sample_dout, sample_lse, sample_attn_sink, sample_topk_idxs,
            sample_topk_length, sample_delta, sample_dq, sample_dkv,
        )  # fmt: skip
        options = options_of(
            BACKWARD, layout="plan", backend=backend, softmax_scale=softmax_scale, deterministic=deterministic,
            block_tile=block_tile, q_cluster_mode=q_cluster_mode,
        )  # fmt: skip
        super().__init__(samples, options)

    def execute(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        out: torch.Tensor,
        dout: torch.Tensor,
        lse: torch.Tensor,
        attn_sink: torch.Tensor | None,
        topk_idxs: torch.Tensor,
        dq: torch.Tensor | None = None,
        dkv: torch.Tensor | None = None,
        topk_length: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        current_stream: Any = None,
        workspace: torch.Tensor | None = None,
        *,
        d_sink: torch.Tensor | None = None,
        delta: torch.Tensor | None = None,
        accumulate: bool = False,
    ) -> Gradients:
        """The gradients, on ``current_stream``. With outputs and workspace given it allocates nothing.

        Every call checks the whole contract again. Tensors are contiguous; S_q and S_kv may differ from the samples',
        nothing else. ``softmax_scale`` None is the plan's. Errors are those of :meth:`check_support`.
        """
        planned = self._checked()
        tensors = BackwardTensors(q, kv, out, dout, lse, attn_sink, topk_idxs, topk_length, delta, dq, dkv, d_sink)
        return run(tensors, self._options_for(softmax_scale, accumulate), current_stream, workspace, planned)

    __call__ = execute


class SparseAttentionForward(_Plan):
    """A plan for the forward pass; arguments as in :class:`SparseAttentionBackward`.

    Args:
        head_dim_v: D_v; None is 512 where D is 512 or 576, and D elsewhere.
    """

    def __init__(
        self,
        sample_q: torch.Tensor,
        sample_kv: torch.Tensor,
        sample_topk_idxs: torch.Tensor,
        sample_attn_sink: torch.Tensor | None = None,
        sample_topk_length: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        *,
        head_dim_v: int | None = None,
        backend: str = "auto",
    ):
        samples = ForwardTensors(sample_q, sample_kv, sample_topk_idxs, sample_attn_sink, sample_topk_length)
        options = options_of(
            FORWARD, layout="plan", backend=backend, head_dim_v=head_dim_v, softmax_scale=softmax_scale
        )
        super().__init__(samples, options)

    def execute(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        topk_idxs: torch.Tensor,
        attn_sink: torch.Tensor | None = None,
        topk_length: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        current_stream: Any = None,
    ) -> Outputs:
        """(out, lse), on ``current_stream``. ``out`` may be fp32. See :meth:`SparseAttentionBackward.execute`."""
        planned = self._checked()
        tensors = ForwardTensors(q, kv, topk_idxs, attn_sink, topk_length, out, lse)
        return run(tensors, self._options_for(softmax_scale), current_stream, None, planned)

    __call__ = execute


def sparse_attention_backward_wrapper(
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
) -> Gradients:
    """:func:`cudnn_dsa.interface.sparse_attention_backward` that also takes strided outputs.

    A strided dq or dkv is computed in a contiguous stage and copied on the launch stream; the caller's tensor is what
    comes back.
    """
    tensors = BackwardTensors(q, kv, out, dout, lse, attn_sink, topk_idxs, topk_length, delta, dq, dkv)
    options = options_of(
        BACKWARD, layout="wrapper", backend=backend, softmax_scale=softmax_scale, deterministic=deterministic,
        accumulate=accumulate, block_tile=block_tile, q_cluster_mode=q_cluster_mode,
    )  # fmt: skip
    return run(tensors, options, stream, workspace)


def sparse_attention_forward_wrapper(
    q: torch.Tensor,
    kv: torch.Tensor,
    topk_idxs: torch.Tensor,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    stream: Any = None,
    *,
    head_dim_v: int | None = None,
    backend: str = "auto",
) -> Outputs:
    """:func:`cudnn_dsa.interface.sparse_attention_forward` without output arguments."""
    tensors = ForwardTensors(q, kv, topk_idxs, attn_sink, topk_length)
    options = options_of(FORWARD, layout="wrapper", backend=backend, head_dim_v=head_dim_v, softmax_scale=softmax_scale)
    return run(tensors, options, stream)


# `from cudnn_dsa import DSA` stands where code had `from cudnn import DSA`.
DSA = SimpleNamespace(
    SparseAttentionBackward=SparseAttentionBackward,
    SparseAttentionForward=SparseAttentionForward,
    sparse_attention_backward_wrapper=sparse_attention_backward_wrapper,
    sparse_attention_forward_wrapper=sparse_attention_forward_wrapper,
)
