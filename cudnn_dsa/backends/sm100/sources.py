"""The kernels that a problem launches on Blackwell, as descriptions that need no CuTe DSL until one is compiled."""

from __future__ import annotations

from cudnn_dsa.artifact import Source
from cudnn_dsa.backends.sm100.config import Config, ForwardConfig, head_tile
from cudnn_dsa.contracts.sparse_attention import Problem
from cudnn_dsa.cute import sources as shared

ELEMENTS = {"bfloat16": "bf16", "float16": "f16"}
GAIN_WARPS = 8
TABLE_WARPS = 8


def config(problem: Problem) -> Config:
    p = problem
    return Config(
        ELEMENTS[p.dtype],
        p.head_dim,
        p.heads,
        head_tile(p.heads),
        p.has_topk_length,
        p.head_dim_v,
        p.deterministic,
    )


def sources(problem: Problem, arch: str) -> tuple[Source, ...]:
    """The kernels of a call, in the order of their launches."""
    p = problem
    if p.direction == "forward":
        return (_forward(p, arch),)
    found = [shared.prepare(p, arch)]
    if p.dtype == "float16":
        found += [_key_norms(p, arch), _gain(p, arch)]
    found.append(_backward(p, arch))
    if p.deterministic:
        found += [_tables(p, arch), _fold(p, arch)]
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
        "topk_idxs": "int32*", "topk_length": "int32*", "dq": element, "sums": "float32*16", "first_query": "int32",
        "queries": "int32", "s_kv": "int32", "topk": "int32", "softmax_scale": "float32",
    }  # fmt: skip
    if p.deterministic:
        inputs = {{"sums": "partials"}.get(name, name): text for name, text in inputs.items()}
    kernel = " ".join(name for name in inputs if name != "queries")
    return shared.simple(
        "backward", arch, (arch, c.key), host, inputs, kernel, f"queries * {c.head_tiles}", c.threads, c.shared_bytes
    )


def _forward(problem: Problem, arch: str) -> Source:
    """out and lse: see forward_kernel.py."""
    p = problem
    c = ForwardConfig(ELEMENTS[p.dtype], p.head_dim, p.heads, p.has_sink, p.has_topk_length, p.head_dim_v)

    def host():
        from cudnn_dsa.backends.sm100.forward_kernel import ForwardSm100

        return ForwardSm100(c)

    element = f"{p.dtype}*16"
    inputs = {
        "q": element, "kv": element, "attn_sink": "float32*", "topk_idxs": "int32*", "topk_length": "int32*",
        "out": f"{p.out_dtype}*16", "lse": "float32*",
        "s_q": "int32", "s_kv": "int32", "topk": "int32", "softmax_scale": "float32",
    }  # fmt: skip
    kernel = " ".join(name for name in inputs if name != "s_q")
    key = (arch, c.key, p.out_dtype)
    return shared.simple("forward", arch, key, host, inputs, kernel, f"s_q * {c.head_tiles}", c.threads, c.shared_bytes)


def _tables(problem: Problem, arch: str) -> Source:
    """Where the fold finds the rows that the queries of a chunk contribute to a key."""
    has_topk_length = problem.has_topk_length

    def host():
        from cudnn_dsa.backends.sm100.partials import Tables

        return Tables(has_topk_length)

    inputs = {
        "topk_idxs": "int32*", "topk_length": "int32*", "counts": "int32*", "ranks": "int32*",
        "first_query": "int32", "queries": "int32", "s_kv": "int32", "topk": "int32",
    }  # fmt: skip
    grid = f"ceil_div(queries, {TABLE_WARPS})"
    return shared.simple(
        "tables", arch, (arch, has_topk_length), host, inputs, " ".join(inputs), grid, 32 * TABLE_WARPS
    )


def _fold(problem: Problem, arch: str) -> Source:
    """The sums of dkv from the rows that the queries of a chunk contribute."""
    parameters = (problem.head_dim, config(problem).head_tiles)

    def host():
        from cudnn_dsa.backends.sm100.partials import Fold

        return Fold(*parameters)

    inputs = {
        "partials": "float32*16", "counts": "int32*", "ranks": "int32*", "sums": "float32*16",
        "queries": "int32", "s_kv": "int32", "topk": "int32",
    }  # fmt: skip
    kernel = "partials counts ranks sums queries topk"
    return shared.simple("fold", arch, (arch, parameters), host, inputs, kernel, "s_kv", problem.head_dim // 4)


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
