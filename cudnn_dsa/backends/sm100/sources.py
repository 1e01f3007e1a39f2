"""The kernels that a problem launches on Blackwell, as descriptions that need no CuTe DSL until one is compiled."""

from __future__ import annotations

from cudnn_dsa.artifact import Source
from cudnn_dsa.backends.sm100.config import Config, head_tile
from cudnn_dsa.contracts.sparse_attention import Problem
from cudnn_dsa.cute import sources as shared

ELEMENTS = {"bfloat16": "bf16", "float16": "f16"}
GAIN_WARPS = 8


def config(problem: Problem) -> Config:
    p = problem
    return Config(ELEMENTS[p.dtype], p.head_dim, p.heads, head_tile(p.heads), p.has_topk_length, p.head_dim_v)


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
    """dq, and dkv added to its fp32 sums: see backward_kernel.py."""
    p, c = problem, config(problem)

    def host():
        from cudnn_dsa.backends.sm100.backward_kernel import BackwardSm100

        return BackwardSm100(c)

    element = f"{p.dtype}*16"
    inputs = {
        "q": element, "kv": element, "dout": element, "z2": "float32*", "delta": "float32*", "gain": "int32*",
        "topk_idxs": "int32*", "topk_length": "int32*", "dq": element, "sums": "float32*16",
        "s_q": "int32", "s_kv": "int32", "topk": "int32", "softmax_scale": "float32",
    }  # fmt: skip
    kernel = " ".join(name for name in inputs if name != "s_q")
    return shared.simple(
        "backward", arch, (arch, c.key), host, inputs, kernel, f"s_q * {c.head_tiles}", c.threads, c.shared_bytes
    )


def _key_norms(problem: Problem, arch: str) -> Source:
    parameters = (problem.head_dim, problem.head_dim_v)

    def host():
        from cudnn_dsa.backends.sm100.gain import KeyNorms

        return KeyNorms(*parameters)

    inputs = {"kv": f"{problem.dtype}*16", "norms": "float32*", "s_kv": "int32"}
    grid = f"ceil_div(s_kv, {GAIN_WARPS})"
    return shared.simple("key_norms", arch, (arch, parameters), host, inputs, " ".join(inputs), grid, 32 * GAIN_WARPS)


def _gain(problem: Problem, arch: str) -> Source:
    parameters = (problem.heads, problem.head_dim_v, problem.has_topk_length)

    def host():
        from cudnn_dsa.backends.sm100.gain import Gain

        return Gain(*parameters)

    inputs = {
        "dout": f"{problem.dtype}*16", "delta": "float32*", "norms": "float32*", "topk_idxs": "int32*",
        "topk_length": "int32*", "gain": "int32*",
        "s_q": "int32", "s_kv": "int32", "topk": "int32", "softmax_scale": "float32",
    }  # fmt: skip
    grid = f"ceil_div(s_q, {GAIN_WARPS})"
    return shared.simple("gain", arch, (arch, parameters), host, inputs, " ".join(inputs), grid, 32 * GAIN_WARPS)
