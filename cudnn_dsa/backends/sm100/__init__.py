"""The Blackwell backend: CuTe-DSL kernels for sm_100a and sm_103a. docs/sm100.md explains them.

A backward is up to six launches: ``prepare`` (delta and the normaliser), in fp16 ``key_norms`` and ``gain``, the main
kernel, ``sink_gradient`` where there is a sink, and ``finish`` where dkv is not fp32.
"""

from __future__ import annotations

from typing import Any

import torch

from cudnn_dsa import artifact
from cudnn_dsa.artifact import Source
from cudnn_dsa.backends import BackwardTensors, ForwardTensors, device_capability
from cudnn_dsa.backends.sm100.config import Config, head_tile
from cudnn_dsa.contracts.sparse_attention import WORKSPACE_ALIGNMENT, Problem
from cudnn_dsa.cute import sources as shared

ELEMENTS = {"bfloat16": "bf16", "float16": "f16"}
GAIN_WARPS = 8


def unavailable(device: str) -> str | None:
    if not device.startswith("cuda"):
        return f"it runs on CUDA devices, not on {device}"
    major, minor = device_capability(device)
    if major != 10:
        return f"its kernels are for compute capability 10.x, not {major}.{minor} ({device})"
    return None


def supports(problem: Problem) -> str | None:
    p = problem
    gaps = (
        (p.direction == "forward", "it has no forward yet"),
        (p.deterministic, "it has no deterministic mode yet"),
        (p.q_cluster_mode != "off", "queries are not clustered here"),
    )
    return next((reason for present, reason in gaps if present), None)


def config(problem: Problem) -> Config:
    p = problem
    return Config(
        ELEMENTS[p.dtype], p.head_dim, p.heads, head_tile(p.heads), p.has_topk_length, head_dim_v=p.head_dim_v
    )


def sources(problem: Problem, arch: str) -> tuple[Source, ...]:
    """The kernels of a backward, in the order of their launches."""
    p = problem
    found = [shared.prepare(p, arch)]
    if p.dtype == "float16":
        found += [_key_norms(p, arch), _gain(p, arch)]
    found.append(_backward(p, arch))
    if p.has_sink:
        found.append(shared.sink_gradient(p, arch))
    if p.dkv_dtype != "float32":
        found.append(shared.finish(p, arch, interleaved=False))
    return tuple(found)


def _backward(problem: Problem, arch: str) -> Source:
    p, c = problem, config(problem)

    def host():
        from cudnn_dsa.backends.sm100.backward import BackwardSm100

        return BackwardSm100(c)

    element = f"{p.dtype}*16"
    inputs = {
        "q": element, "kv": element, "dout": element, "z2": "float32*", "delta": "float32*", "gain": "int32*",
        "topk_idxs": "int32*", "topk_length": "int32*", "dq": element, "dkv": "float32*16",
        "s_q": "int32", "s_kv": "int32", "topk": "int32", "softmax_scale": "float32",
    }  # fmt: skip
    kernel = " ".join(name for name in inputs if name != "s_q")
    grid = f"s_q * {c.head_tiles}"
    return shared.simple(
        "backward", arch, (p.kernel_key(arch), repr(c)), host, inputs, kernel, grid, c.threads, c.shared_bytes
    )


def _key_norms(problem: Problem, arch: str) -> Source:
    p = problem

    def host():
        from cudnn_dsa.backends.sm100.gain import KeyNorms

        return KeyNorms(p.head_dim, p.head_dim_v)

    inputs = {"kv": f"{p.dtype}*16", "norms": "float32*", "s_kv": "int32"}
    grid = f"ceil_div(s_kv, {GAIN_WARPS})"
    return shared.simple(
        "key_norms", arch, (p.kernel_key(arch),), host, inputs, " ".join(inputs), grid, 32 * GAIN_WARPS
    )


def _gain(problem: Problem, arch: str) -> Source:
    p = problem

    def host():
        from cudnn_dsa.backends.sm100.gain import Gain

        return Gain(p.heads, p.head_dim_v, p.has_topk_length)

    inputs = {
        "dout": f"{p.dtype}*16", "delta": "float32*", "norms": "float32*", "topk_idxs": "int32*",
        "topk_length": "int32*", "gain": "int32*",
        "s_q": "int32", "s_kv": "int32", "topk": "int32", "softmax_scale": "float32",
    }  # fmt: skip
    grid = f"ceil_div(s_q, {GAIN_WARPS})"
    return shared.simple("gain", arch, (p.kernel_key(arch),), host, inputs, " ".join(inputs), grid, 32 * GAIN_WARPS)


def prepare(problem: Problem) -> None:
    artifact.load(sources, problem)


def _pieces(problem: Problem) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The parts of the workspace: name -> (shape, dtype)."""
    p = problem
    pieces: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"z2": ((p.s_q, p.heads), torch.float32)}
    if not p.has_delta:
        pieces["delta"] = ((p.s_q, p.heads), torch.float32)
    if p.dtype == "float16":
        pieces["norms"] = ((p.s_kv,), torch.float32)
        pieces["gain"] = ((p.s_q,), torch.int32)
    if p.dkv_dtype != "float32":
        pieces["sums"] = ((p.s_kv, p.head_dim), torch.float32)
    return pieces


def _bytes(shape: tuple[int, ...]) -> int:
    size = 4
    for n in shape:
        size *= n
    return -(-size // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT


def workspace_bytes(problem: Problem) -> int:
    return sum(_bytes(shape) for shape, _ in _pieces(problem).values())


def forward(problem: Problem, tensors: ForwardTensors, workspace: Any, stream: Any) -> None:
    raise NotImplementedError("the sm100 backend has no forward")  # supports() refuses it first


def backward(problem: Problem, tensors: BackwardTensors, workspace: Any, stream: Any) -> None:
    p, t = problem, tensors
    kernels = artifact.load(sources, p)
    scratch, start = {}, 0
    for name, (shape, dtype) in _pieces(p).items():
        size = _bytes(shape)
        piece = workspace[start : start + size].view(dtype)
        scratch[name] = piece[: torch.Size(shape).numel()].view(shape)
        start += size
    sums = scratch.get("sums", t.dkv)
    if not (p.accumulate and sums is t.dkv):
        sums.zero_()
    values: dict[str, Any] = {
        "q": t.q, "kv": t.kv, "out": t.out, "dout": t.dout, "lse": t.lse, "attn_sink": t.attn_sink,
        "topk_idxs": t.topk_idxs, "topk_length": t.topk_length, "delta": t.delta, "gain": None, "d_sink": t.d_sink,
        "dq": t.dq, **scratch, "s_q": p.s_q, "s_kv": p.s_kv, "topk": p.topk, "softmax_scale": t.softmax_scale,
    }  # fmt: skip
    for name, kernel in kernels.items():
        dkv = sums if name == "backward" else t.dkv
        kernel.launch(stream, {**values, "sums": sums, "dkv": dkv})
