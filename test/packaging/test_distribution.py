"""The three ways to have the package: a checkout, an editable install, a wheel."""

import fcntl
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WHERE = "import cudnn_dsa, pathlib; print(pathlib.Path(cudnn_dsa.__file__).parent)"
WORKS = """
import torch, cudnn_dsa
q, kv = torch.randn(3, 2, 8), torch.randn(5, 8)
out = cudnn_dsa.sparse_attention(q, kv, torch.zeros(3, 1, dtype=torch.int32), backend="reference")
assert torch.allclose(out, kv[0].expand(3, 2, 8))
"""


def python(code, cwd, path=None):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | ({"PYTHONPATH": path} if path else {})
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), "."]
    # Builds write into the checkout's build/, and another worker may want the wheel too: one at a time.
    lock = tmp_path_factory.getbasetemp().parent / "wheel.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"SKIP_EXTENSION": "1"})
    (path,) = out.glob("*.whl")
    return path


def test_from_a_checkout(tmp_path):
    assert python(WHERE, tmp_path, f"{ROOT}:{ROOT}/python") == str(ROOT / "cudnn_dsa")


def test_from_a_wheel(wheel, tmp_path):
    target = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(target)
    assert python(WHERE, tmp_path, str(target)) == str(target / "cudnn_dsa")
    python(WORKS, tmp_path, str(target))


@pytest.mark.slow
def test_what_a_wheel_promises_runs_outside_of_the_checkout(wheel, tmp_path):
    """The commands of the README, from a new environment that sees this one's dependencies but not the checkout."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    (site / "dependencies.pth").write_text(next(p for p in sys.path if p.endswith("site-packages")) + "\n")

    def run(*arguments):
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        command = [str(tmp_path / "venv" / "bin" / "python"), *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    where = "import {0}, pathlib; print(pathlib.Path({0}.__file__).parent)"
    for package in ("cudnn_dsa", "cudnn_dsa_tpu", "cudnn_dsa_pallas_triton", "cute_emulator"):
        assert run("-c", where.format(package)).strip() == str(site / package)
    assert "reference" in run("-m", "cudnn_dsa", "info")
    assert "gradient check: PASS" in run("-m", "cudnn_dsa", "demo", "--steps", "2", "--device", "cpu")
    run("-m", "cute_emulator.build")


def test_a_wheel_holds_the_emulators_sources(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = [p for p in (ROOT / "csrc" / "emulator").iterdir() if p.is_file()]
    assert sources
    assert {f"cute_emulator/csrc/{p.name}" for p in sources} <= names


def test_a_wheel_holds_the_packages_the_licence_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    packages = {p.parent.relative_to(ROOT) for p in ROOT.glob("cudnn_dsa/**/__init__.py")}
    packages |= {p.parent.relative_to(ROOT / "python") for p in ROOT.glob("python/*/**/__init__.py")}
    for package in packages:
        assert f"{package}/__init__.py" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("licenses/NOTICE") for name in names)
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops <= {"cudnn_dsa", "cudnn_dsa_tpu", "cudnn_dsa_pallas_triton", "cute_emulator"}


def test_a_build_with_torch_brings_the_extension():
    """`make setup` has built it; a wheel without SKIP_EXTENSION takes the same path through setup.py."""
    assert (ROOT / "cudnn_dsa" / "_C.so").exists()
    text = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"SKIP_EXTENSION": "1"}, check=False,
    )  # fmt: skip
    assert text.returncode != 0
    assert "cannot build the C++ extension: SKIP_EXTENSION=1" in text.stderr
