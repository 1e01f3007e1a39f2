"""A backend that computes by the reference and then takes the main result through the kernel, whose row factors are 1.

So a wrong kernel makes a wrong gradient, and everything around a kernel is what it is in a backend that is used.
"""

from __future__ import annotations

from typing import Any

import torch

from cudnn_dsa import artifact
from cudnn_dsa.artifact import Launch, Pointer, Scalar, Source, Struct, TensorMap
from cudnn_dsa.backends import BackwardTensors, ForwardTensors, reference
from cudnn_dsa.contracts.sparse_attention import Problem

COLUMNS = 64
ROWS = 32  # of a tile
THREADS = 128
SHARED = 1024 + ROWS * COLUMNS * 2


def scale_rows(arch: str, dtype: str = "bfloat16", cluster: int = 1, key: tuple = ()) -> Source:
    def host() -> Any:
        from artifact_demo import kernel

        return kernel.host(dtype, cluster)

    tensor_map = TensorMap("x", dtype, (COLUMNS, "rows"), (2 * COLUMNS,), (COLUMNS, ROWS), 128)
    inputs = {
        "x": f"{dtype}*16", "factor": "float32*", "out": "float32*", "rows": "int32", "offset": "int64",
        "scale": "float32",
    }  # fmt: skip
    parameters = (
        tensor_map, Struct("int32", "rows"), Pointer("factor"), Pointer("out"), Scalar("int32", "rows"),
        Scalar("int64", "offset"), Scalar("float32", "scale"),
    )  # fmt: skip
    grid = (f"ceil_div(rows, {ROWS * cluster}) * {cluster}", 1, 1)
    launch = Launch(parameters, grid, (THREADS, 1, 1), SHARED, (cluster, 1, 1))
    return Source("scale_rows", arch, (arch, dtype, cluster, key), host, inputs, launch)


def sources(problem: Problem, arch: str) -> tuple[Source, ...]:
    return (scale_rows(arch, problem.dtype, key=problem.kernel_key(arch)),)


def unavailable(device: str) -> str | None:
    return artifact.unavailable(device, 9)


def supports(problem: Problem) -> str | None:
    return None


def workspace_bytes(problem: Problem) -> int:
    return 0


def prepare(problem: Problem) -> None:
    artifact.load(sources, problem)


def fingerprint(problem: Problem) -> str | None:
    return artifact.fingerprint(sources, problem)


def forward(problem: Problem, tensors: ForwardTensors, workspace: Any, stream: Any) -> None:
    reference.forward(problem, tensors, None, None)
    _through(problem, tensors.out, stream)


def backward(problem: Problem, tensors: BackwardTensors, workspace: Any, stream: Any) -> None:
    reference.backward(problem, tensors, None, None)
    _through(problem, tensors.dq, stream)


def _through(problem: Problem, result: torch.Tensor, stream: Any) -> None:
    x = result.to(getattr(torch, problem.dtype)).reshape(-1, COLUMNS)
    rows = x.shape[0]
    factor, out = x.new_ones(rows, dtype=torch.float32), x.new_empty(rows, COLUMNS, dtype=torch.float32)
    values = {"x": x, "factor": factor, "out": out, "rows": rows, "offset": 0, "scale": 1.0}
    artifact.load(sources, problem)["scale_rows"].launch(stream, values)
    result.copy_(out.view(result.shape))
