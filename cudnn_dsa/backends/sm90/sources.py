"""The kernels that a problem launches on Hopper, as descriptions that need no CuTe DSL until one is compiled."""

from __future__ import annotations

from cudnn_dsa.artifact import Launch, Pointer, Scalar, Source, Struct, TensorMap
from cudnn_dsa.backends.sm90.config import BackwardConfig, backward_config
from cudnn_dsa.contracts.sparse_attention import Problem
from cudnn_dsa.cute import sources as shared

COLUMNS = 64  # of a tensor copy: a 128-byte row


def sources(problem: Problem, arch: str) -> tuple[Source, ...]:
    """The kernels of a backward, in the order of their launches."""
    found = [shared.prepare(problem, arch), backward(problem, arch, backward_config(problem))]
    if problem.has_sink:
        found.append(shared.sink_gradient(problem, arch))
    found.append(shared.finish(problem, arch, interleaved=True))
    return tuple(found)


def backward(problem: Problem, arch: str, config: BackwardConfig) -> Source:
    """dq, and the fp32 sums of dkv: see backward_kernel.py."""
    p = problem
    parameters = (p.heads, p.head_dim, p.head_dim_v, p.has_topk_length, config)

    def host():
        import cutlass

        from cudnn_dsa.backends.sm90.backward_kernel import BackwardSm90

        return BackwardSm90({"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[p.dtype], *parameters)

    def rows(name: str, columns: int) -> TensorMap:
        row = 2 * columns
        dims, strides = (columns, p.heads, "s_q"), (row, row * p.heads)
        return TensorMap(name, p.dtype, dims, strides, (COLUMNS, config.block_heads, 1), 128)

    pointers = ("kv", "z2", "delta", "topk_idxs", "topk_length", "dq", "sums")
    element = f"{p.dtype}*16"
    inputs = {
        "q": element, "kv": element, "dout": element, "z2": "float32*", "delta": "float32*", "topk_idxs": "int32*",
        "topk_length": "int32*", "dq": element, "sums": "float32*16", "s_q": "int32", "s_kv": "int32", "topk": "int32",
        "softmax_scale": "float32", "multiprocessors": "int32",
    }  # fmt: skip
    launch = Launch(
        (
            rows("q", p.head_dim), Struct("int32", "s_q"), rows("dout", p.head_dim_v), Struct("int32", "s_q"),
            *map(Pointer, pointers), *(Scalar("int32", name) for name in ("s_q", "s_kv", "topk")),
            Scalar("float32", "softmax_scale"),
        ),
        grid=(f"min(s_q * {config.head_tiles(p.heads)}, multiprocessors)", 1, 1),
        block=(config.threads, 1, 1),
        shared=config.shared_bytes(p.head_dim, p.head_dim_v),
    )  # fmt: skip
    return Source("backward", arch, (arch, *parameters[:-1], config.key), host, inputs, launch)
