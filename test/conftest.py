"""Shared by all areas: what a machine has, and markers that skip with a reason."""

from __future__ import annotations

import os
import sys

import pytest

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a machine that only runs GPU tests; the header says so
    collect_ignore_glob = ["*/test_rules.py", "*/test_refusals.py", "*/test_conventions.py", "*/test_features.py"]
else:
    # How long an example takes says something of the machine, not of the code; fixtures here hold no state of a test.
    settings.register_profile(
        "project",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        derandomize=bool(os.environ.get("CI")),  # CI draws the same examples every time; a developer's machine looks on
    )
    settings.load_profile("project")


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
    missing = "; hypothesis is not installed: property tests are left out" if "hypothesis" not in sys.modules else ""
    return f"python {sys.version.split()[0]}{missing}"
