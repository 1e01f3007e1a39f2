"""The side-by-side benchmarks run from a checkout, here on the CPU and at toy sizes, and say who is absent and why."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SIZES = ["--s-q", "20", "--s-kv", "64", "--heads", "2", "--topk", "16", "--rounds", "2"]


@pytest.mark.parametrize("direction", ["backward", "forward"])
def test_a_benchmark(direction, tmp_path):
    table, plot = tmp_path / "results" / "measured.csv", tmp_path / "results" / "plot.png"
    done = subprocess.run(
        [sys.executable, f"benchmark/dsa_{direction}.py", "--device", "cpu", "--forward-by", "reference", *SIZES,
         "--overlap", "0.5", "--csv", str(table), "--plot", str(plot)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "overlap 0.5" in done.stdout
    assert "not timed: triton: it runs on CUDA devices" in done.stdout or "triton is not installed" in done.stdout
    with table.open() as file:
        rows = {row["side"]: row for row in csv.DictReader(file)}
    assert "plain PyTorch" in rows
    for row in rows.values():
        assert row["direction"] == direction
        assert 0 < float(row["ms_min"]) <= float(row["ms_median"]) <= float(row["ms_max"])
        assert 0 < float(row["relative_l2_error"]) < 1e-2
        assert float(row["tflops"]) > 0
    assert plot.stat().st_size > 1000
