"""Descriptions of the kernels around a backward, which all CuTe backends launch: see ``artifact.Source``.

A tensor that the problem does not have is passed as None, a null pointer that the kernel never reads.
"""

from __future__ import annotations

from cudnn_dsa.artifact import Launch, Pointer, Scalar, Source
from cudnn_dsa.contracts.sparse_attention import Problem

FINISH_THREADS = 256


def simple(name: str, arch: str, key: tuple, host, inputs: dict[str, str], kernel: str, grid, threads: int, shared=0):
    """A source whose kernel takes pointers and scalars alone, named in ``kernel`` in its order."""
    arguments = [Pointer(n) if "*" in inputs[n] else Scalar(inputs[n], n) for n in kernel.split()]
    return Source(name, arch, key, host, inputs, Launch(tuple(arguments), (grid, 1, 1), (threads, 1, 1), shared))


def prepare(problem: Problem, arch: str) -> Source:
    """z2 and delta from out, dout, lse, attn_sink and the selection."""
    p = problem
    parameters = (p.heads, p.head_dim_v, p.has_sink, p.has_topk_length, p.has_delta)

    def host():
        from cudnn_dsa.cute.prepare import Prepare

        return Prepare(*parameters)

    inputs = {
        "out": f"{p.out_dtype}*16", "dout": f"{p.dtype}*16", "lse": "float32*", "attn_sink": "float32*",
        "topk_idxs": "int32*", "topk_length": "int32*", "z2": "float32*", "delta": "float32*",
        "s_q": "int32", "s_kv": "int32", "topk": "int32",
    }  # fmt: skip
    kernel = "out dout lse attn_sink topk_idxs topk_length z2 delta s_kv topk"
    return simple("prepare", arch, (arch, parameters), host, inputs, kernel, "s_q", 256)


def sink_gradient(problem: Problem, arch: str) -> Source:
    """d_sink from z2, delta and attn_sink."""
    heads = problem.heads

    def host():
        from cudnn_dsa.cute.prepare import SinkGradient

        return SinkGradient(heads)

    inputs = {"z2": "float32*", "delta": "float32*", "attn_sink": "float32*", "d_sink": "float32*", "s_q": "int32"}
    return simple("sink_gradient", arch, (arch, heads), host, inputs, " ".join(inputs), -(-heads // 8), 1024, 4096)


def finish(problem: Problem, arch: str, interleaved: bool) -> Source:
    """dkv from its fp32 sums."""
    p = problem
    parameters = (p.head_dim, p.dkv_dtype, p.accumulate, interleaved)

    def host():
        import cutlass

        from cudnn_dsa.cute.finish import Finish

        dtypes = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}
        return Finish(p.head_dim, dtypes[p.dkv_dtype], p.accumulate, interleaved)

    inputs = {"sums": "float32*16", "dkv": f"{p.dkv_dtype}*16", "s_kv": "int32"}
    grid = f"ceil_div(s_kv * {p.head_dim // 16}, {FINISH_THREADS})"
    return simple("finish", arch, (arch, parameters), host, inputs, "sums dkv s_kv", grid, FINISH_THREADS)
