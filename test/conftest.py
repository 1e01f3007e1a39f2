"""Shared by all areas: what a machine has, and markers that skip with a reason."""

from __future__ import annotations

import sys

import pytest


def _cuda_reason() -> str | None:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return None if torch.cuda.is_available() else "no CUDA device here"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanting = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("gpu_exclusive")]
    if not wanting:
        return
    reason = _cuda_reason()
    if reason:
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_report_header() -> str:
    return f"python {sys.version.split()[0]}"
