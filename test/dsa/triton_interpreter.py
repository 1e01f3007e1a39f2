"""Runs the Triton backend in Triton's interpreter, on CPU tensors: what the interpreter lacks, and the way in.

Import it only where ``TRITON_INTERPRET=1`` was set before Triton's first import (see test_triton_interpreted.py).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from cudnn_dsa import interface
from cudnn_dsa.backends import BackwardTensors, ForwardTensors
from cudnn_dsa.backends import triton as backend
from cudnn_dsa.contracts.sparse_attention import Options

_create_dot = interpreter.InterpreterBuilder.create_dot
_cast = interpreter.InterpreterBuilder.cast_impl


def _dot(self, a, b, *rest):
    """The interpreter keeps bf16 as 16-bit integers and would multiply those: widen them to fp32, which is exact."""
    a, b = (_cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return _create_dot(self, a, b, *rest)


def _round(self, source, target):
    """The interpreter cuts fp32 off to bf16; the hardware rounds to nearest, ties to even."""
    if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
        return _cast(self, source, target)
    rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16)
    return interpreter.TensorHandle(rounded.numpy().view(np.uint16), tl.bfloat16)


interpreter.InterpreterBuilder.create_dot = _dot
interpreter.InterpreterBuilder.cast_impl = _round


def forward(case, out_dtype: torch.dtype | None = None):
    """(out, lse) of a case of dsa_cases."""
    tensors = {
        "q": case.q, "kv": case.kv, "attn_sink": case.attn_sink, "topk_idxs": case.topk_idxs,
        "topk_length": case.topk_length, "out": _poisoned(case.dout.shape, out_dtype or case.q.dtype), "lse": None,
    }  # fmt: skip
    problem = _problem(tensors, Options("forward", "reference"))
    tensors.update({k: v for k, v in _outputs(problem).items() if tensors[k] is None})
    backend.forward(problem, ForwardTensors(softmax_scale=case.softmax_scale, **tensors), None, None)
    return tensors["out"], tensors["lse"]


def backward(case, *, deterministic=False, delta=None, dkv=None, accumulate=False):
    """(dq, dkv, d_sink) of a case of dsa_cases."""
    tensors = _backward_tensors(case, delta, dkv)
    problem = _problem(tensors, _backward_options(deterministic, accumulate))
    tensors.update({k: v for k, v in _outputs(problem).items() if tensors[k] is None})
    workspace = torch.full((backend.workspace_bytes(problem),), 0xFF, dtype=torch.uint8)  # NaN where it is not written
    backend.backward(problem, BackwardTensors(softmax_scale=case.softmax_scale, **tensors), workspace, None)
    return tensors["dq"], tensors["dkv"], tensors["d_sink"]


def problem_of(case, *, deterministic=False, dkv=None, accumulate=False):
    """The problem of a backward of a case."""
    return _problem(_backward_tensors(case, None, dkv), _backward_options(deterministic, accumulate))


def _backward_tensors(case, delta, dkv):
    return {
        "q": case.q, "kv": case.kv, "out": case.out, "dout": case.dout, "lse": case.lse, "attn_sink": case.attn_sink,
        "topk_idxs": case.topk_idxs, "topk_length": case.topk_length, "delta": delta, "dq": None, "dkv": dkv,
        "d_sink": None,
    }  # fmt: skip


def _backward_options(deterministic, accumulate):
    return Options("backward", "reference", deterministic=deterministic, accumulate=accumulate)


def _problem(tensors, options):
    """The contract admits CPU tensors to the reference backend; what it says about a problem holds for this one too."""
    problem = interface.gate(tensors, options)
    problem = replace(problem, backend="triton")
    assert backend.unavailable(problem.device) is None
    assert backend.supports(problem) is None
    return problem


def _outputs(problem):
    shapes = interface.output_shapes(problem)
    return {k: None if shape == (0,) else _poisoned(shape, dtype) for k, (shape, dtype) in shapes.items()}


def _poisoned(shape, dtype):
    return torch.full(shape, torch.nan, dtype=dtype)
