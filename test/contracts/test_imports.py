"""What an import costs, and what it must not import."""

import subprocess
import sys

import pytest


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("module", ["cudnn_dsa", "cudnn_dsa.contracts", "cudnn_dsa.contracts.sparse_attention"])
def test_import_brings_no_framework(module):
    heavy = run(f"import sys, {module}; print([m for m in ('torch', 'jax', 'numpy', 'triton') if m in sys.modules])")
    assert heavy == "[]"


def test_import_takes_under_a_fifth_of_a_second():
    """Of the processor's time: the clock on the wall also counts what else the machine does."""
    code = "import time; t = time.process_time(); import cudnn_dsa; print(time.process_time() - t)"
    assert min(float(run(code)) for _ in range(3)) < 0.2


def test_every_public_name_loads_and_is_listed():
    import cudnn_dsa

    for name in cudnn_dsa.__all__:
        assert getattr(cudnn_dsa, name) is not None
        assert name in dir(cudnn_dsa)
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = cudnn_dsa.nothing_of_the_kind


@pytest.mark.parametrize(
    ("value", "level"),
    [("debug", 10), ("INFO", 20), ("warning", 30), ("1", 20), ("yes", 20), ("20", 20), ("0", 0), ("", 0)],
)
def test_log_level_comes_from_the_environment(value, level):
    """No value keeps the package from being imported."""
    code = f"import os; os.environ['CUDNN_DSA_LOG'] = {value!r}; import cudnn_dsa, logging; "
    assert run(code + "print(logging.getLogger('cudnn_dsa').level)") == str(level)


def test_a_log_level_that_does_not_exist_is_said():
    code = "import os, sys; sys.stderr = sys.stdout; os.environ['CUDNN_DSA_LOG'] = 'loud'; import cudnn_dsa"
    assert "CUDNN_DSA_LOG: expected debug, info, warning, error or critical, got 'loud'; it is info" in run(code)
