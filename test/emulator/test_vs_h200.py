"""The recordings that an H200 is compared with: replayed in the emulator at other addresses; bounds that can fail."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmark" / "emulator_vs_h200.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("emulator_vs_h200", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_recorded_case_gives_the_same_bytes_elsewhere(script, tmp_path: Path, capsys) -> None:
    script._bulk_reductions(tmp_path)
    script._elementwise(tmp_path, {"ex2.approx.f32": script.Bound("ulp", 2)}, 1, n=512)
    assert len(list(tmp_path.glob("*.json"))) == len(script.REDUCTIONS) + 1
    assert script.compare(tmp_path, script.Emulated()) == 0
    # and a result that is off by one unit is a failure
    path = tmp_path / "cp.reduce.min.s32.npz"
    arrays = dict(np.load(path))
    region = json.loads(path.with_suffix(".json").read_text())["outputs"][0][0]
    arrays[f"after{region}"][0] ^= 1
    np.savez(path, **arrays)
    assert script.compare(tmp_path, script.Emulated()) == 1
    assert "FAIL cp.reduce.min.s32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "got", "expected", "deviation"),
    [
        ("ulp", 1 + 2.0**-22, 1.0, 2),
        ("relative", 1.0, 2.0, 0.5),
        ("scaled", [1.0, 8.0], [2.0, 8.0], 0.125),
        ("bits", 0.0, -0.0, 1),
        ("bits", np.nan, np.nan, 0),
        ("ulp", np.nan, 1.0, np.inf),
        ("ulp", np.inf, 3e38, np.inf),
        ("ulp", np.inf, np.inf, 0),
    ],
)
def test_deviations(script, kind: str, got, expected, deviation: float) -> None:
    a, b = (np.atleast_1d(np.asarray(x, np.float32)) for x in (got, expected))
    assert script.Bound(kind).deviation(a, b) == pytest.approx(deviation)
