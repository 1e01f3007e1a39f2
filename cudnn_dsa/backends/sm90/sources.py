"""The kernels that a problem launches on Hopper, as descriptions that need no CuTe DSL until one is compiled."""

from __future__ import annotations

from cudnn_dsa.artifact import Launch, Pointer, Scalar, Source, Struct, TensorMap
from cudnn_dsa.backends.sm90.config import (
    Config,
    backward_config,
    backward_shared,
    forward_config,
    forward_shared,
)
from cudnn_dsa.contracts.sparse_attention import Problem
from cudnn_dsa.cute import sources as shared

COLUMNS = 64  # of a tensor copy: a 128-byte row


def sources(problem: Problem, arch: str) -> tuple[Source, ...]:
    """The kernels of a problem, in the order of their launches."""
    if problem.direction == "forward":
        return (forward(problem, arch, forward_config(problem)),)
    found = [shared.prepare(problem, arch), backward(problem, arch, backward_config(problem))]
    if problem.has_sink:
        found.append(shared.sink_gradient(problem, arch))
    found.append(shared.finish(problem, arch, interleaved=True))
    return tuple(found)


def backward(problem: Problem, arch: str, config: Config) -> Source:
    """dq, and the fp32 sums of dkv: see backward_kernel.py."""
    p = problem
    parameters = (p.heads, p.head_dim, p.head_dim_v, p.has_topk_length)

    def host():
        from cudnn_dsa.backends.sm90.backward_kernel import BackwardSm90

        return BackwardSm90(_element(p), *parameters, config)

    element = f"{p.dtype}*16"
    inputs = {
        "q": element, "kv": element, "dout": element, "z2": "float32*", "delta": "float32*", "topk_idxs": "int32*",
        "topk_length": "int32*", "dq": element, "sums": "float32*16", "s_q": "int32", "s_kv": "int32", "topk": "int32",
        "softmax_scale": "float32", "multiprocessors": "int32",
    }  # fmt: skip
    pointers = ("kv", "z2", "delta", "topk_idxs", "topk_length", "dq", "sums")
    dense = [("q", p.head_dim), ("dout", p.head_dim_v)]
    launch = _launch(p, config, dense, pointers, backward_shared(config, p.head_dim, p.head_dim_v))
    return Source("backward", arch, (arch, parameters, config.key), host, inputs, launch)


def forward(problem: Problem, arch: str, config: Config) -> Source:
    """out and lse: see forward_kernel.py."""
    p = problem
    parameters = (p.heads, p.head_dim, p.head_dim_v, p.has_sink, p.has_topk_length)

    def host():
        from cudnn_dsa.backends.sm90.forward_kernel import ForwardSm90

        return ForwardSm90(_element(p), *parameters, config)

    element = f"{p.dtype}*16"
    inputs = {
        "q": element, "kv": element, "topk_idxs": "int32*", "attn_sink": "float32*", "topk_length": "int32*",
        "out": f"{p.out_dtype}*16", "lse": "float32*", "s_q": "int32", "s_kv": "int32", "topk": "int32",
        "softmax_scale": "float32", "multiprocessors": "int32",
    }  # fmt: skip
    pointers = ("kv", "topk_idxs", "attn_sink", "topk_length", "out", "lse")
    launch = _launch(p, config, [("q", p.head_dim)], pointers, forward_shared(config, p.head_dim))
    return Source("forward", arch, (arch, parameters, config.key), host, inputs, launch)


def _element(problem: Problem):
    import cutlass

    return {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[problem.dtype]


def _launch(problem: Problem, config: Config, dense: list[tuple[str, int]], pointers: tuple, shared_bytes: int):
    """A persistent launch. Arguments: a tensor map and its coordinates for each of ``dense`` (name, columns), pointers,
    sizes, the scale."""
    p = problem
    maps: list[TensorMap | Struct] = []
    for name, columns in dense:
        dims, strides = (columns, p.heads, "s_q"), (2 * columns, 2 * columns * p.heads)
        maps.append(TensorMap(name, p.dtype, dims, strides, (COLUMNS, config.block_heads, 1), 128))
        maps.append(Struct("int32", "s_q"))
    sizes = [Scalar("int32", name) for name in ("s_q", "s_kv", "topk")]
    arguments = (*maps, *map(Pointer, pointers), *sizes, Scalar("float32", "softmax_scale"))
    grid = f"min(s_q * {config.head_tiles(p.heads)}, multiprocessors)"
    return Launch(arguments, (grid, 1, 1), (config.threads, 1, 1), shared_bytes)
