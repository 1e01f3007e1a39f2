"""The Triton kernels on the CPU, in a process of its own: Triton reads TRITON_INTERPRET=1 when it is imported."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

HERE = Path(__file__).parent
# Two halves of about the same duration, for two workers.
PARTS = {"data": "test_every_kind_of_data", "the rest": "not test_every_kind_of_data"}


@pytest.mark.parametrize("part", PARTS)
def test_in_the_interpreter(part):
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    env.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--durations=3"]
    done = subprocess.run(
        [*command, str(HERE / "triton_interpreted_cases.py"), "-k", PARTS[part]],
        env=env, cwd=HERE.parents[1], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 20
