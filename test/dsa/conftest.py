"""The backends under test: every test that takes ``target`` runs on each, and its id names the backend."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch

from cudnn_dsa import backends
from cudnn_dsa.contracts.sparse_attention import BACKENDS, CUDA_BACKENDS, CUDA_HEAD_DIMS, WIDE_DTYPES


@dataclass(frozen=True)
class Target:
    """A backend on a device, and what it runs."""

    backend: str
    device: str

    @property
    def wide(self) -> bool:
        return self.backend not in CUDA_BACKENDS

    @property
    def dtypes(self) -> list[torch.dtype]:
        names = WIDE_DTYPES if self.wide else ("bfloat16", "float16")
        return [getattr(torch, name) for name in names]

    @property
    def head_dims(self) -> tuple[int, ...]:
        return (64, 576) if self.wide else CUDA_HEAD_DIMS

    def skip_unless_runs(self) -> None:
        if self.device == "cuda" and not torch.cuda.is_available():
            pytest.skip("no CUDA device here")
        try:
            reason = backends.load(self.backend).unavailable(torch.device(self.device, 0).__str__())
        except RuntimeError as error:
            reason = str(error)
        if reason:
            pytest.skip(f"{self.backend}: {reason}")


def _targets() -> list:
    """All of them, or on CUDA those that CUDNN_DSA_TEST_BACKENDS (names with commas between) leaves."""
    chosen = os.environ.get("CUDNN_DSA_TEST_BACKENDS", ",".join(BACKENDS)).split(",")
    on_cuda = [name for name in BACKENDS if name not in ("auto", "cpu", "cudnn") and name in chosen]
    return [
        *[pytest.param(Target(name, "cpu"), id=f"{name}-on-cpu") for name in ("reference", "cpu")],
        *[pytest.param(Target(name, "cuda"), id=name, marks=pytest.mark.gpu) for name in on_cuda],
    ]


@pytest.fixture(params=_targets())
def target(request: pytest.FixtureRequest) -> Target:
    request.param.skip_unless_runs()
    return request.param
