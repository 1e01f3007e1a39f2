"""Builds the C++ core and the stand-in runtime library with the system's compiler, once for each state of the sources.

``python -m cute_emulator.build`` builds ahead of time (what ``make setup`` calls); the first use builds otherwise. The
result lies in a cache folder (``CUTE_EMULATOR_CACHE``, else ``$XDG_CACHE_HOME/cute_emulator``, else
``~/.cache/cute_emulator``) under a name made of the sources, the compiler and the processor, so that a changed source
or another machine never meets a stale library.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from .errors import EmulatorError

_FLAGS = [
    "-std=c++17",
    "-O2",
    "-ftree-vectorize",
    "-march=native",
    "-fwrapv",
    "-fno-math-errno",
    "-fPIC",
    "-Wall",
    "-Wextra",
]
# Only the tensor cores' inner product may contract a product and a sum: elsewhere PTX says which are fused.
_CONTRACT = {"mma_kernel.cpp": "fast"}


def sources() -> Path:
    """The folder of the C++ sources: beside the package in a wheel, ``csrc/emulator`` in a checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "csrc", here.parents[1] / "csrc" / "emulator"):
        if (folder / "core.h").exists():
            return folder
    raise EmulatorError(f"the emulator's C++ sources are neither in {here / 'csrc'} nor in csrc/emulator of a checkout")


def cache_folder() -> Path:
    root = os.environ.get("CUTE_EMULATOR_CACHE")
    if root:
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cute_emulator"


def _compiler(name: str, variable: str) -> str:
    found = shutil.which(os.environ.get(variable) or name)
    if not found:
        raise EmulatorError(f"cute_emulator needs a C++17 compiler: {name} is not on the PATH (or set {variable})")
    return found


@cache
def _machine() -> str:
    flags = ""
    try:
        with open("/proc/cpuinfo") as f:
            flags = next((line for line in f if line.startswith("flags")), "")
    except OSError:
        pass
    return platform.machine() + flags


def _digest(parts: Iterable[bytes]) -> str:
    h = hashlib.sha256()
    for p in parts:
        h.update(p)
        h.update(b"\0")
    return h.hexdigest()[:20]


def _run(command: list[str]) -> None:
    r = subprocess.run(command, capture_output=True, text=True)
    if r.returncode:
        raise EmulatorError(f"building the emulator failed:\n{' '.join(command)}\n{r.stderr}")


def build(verbose: bool = False) -> tuple[Path, Path]:
    """Returns (C++ core, stand-in runtime library), building what is not in the cache."""
    folder = sources()
    cxx, cc = _compiler("g++", "CXX"), _compiler("gcc", "CC")
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True).stdout
    out = cache_folder()
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "lock", "w") as lock:  # of several processes one builds, the others wait for it
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build(folder, out, cxx, cc, version, verbose)


def _build(folder: Path, out: Path, cxx: str, cc: str, version: str, verbose: bool) -> tuple[Path, Path]:
    files = sorted(folder.glob("*.cpp"))
    headers = [p.read_bytes() for p in sorted(folder.glob("*.h"))]
    common = [version.encode(), _machine().encode(), " ".join(_FLAGS).encode(), *headers]
    objects = []
    todo = []
    for f in files:
        contract = _CONTRACT.get(f.name, "off")
        o = out / f"{f.stem}-{_digest([*common, f.read_bytes(), contract.encode()])}.o"
        objects.append(o)
        if not o.exists():
            todo.append((f, o, contract))

    def compile_one(job: tuple[Path, Path, str]) -> None:
        f, o, contract = job
        if verbose:
            print(f"  {f.name}", file=sys.stderr)
        with tempfile.NamedTemporaryFile(dir=out, suffix=".o", delete=False) as t:
            part = Path(t.name)
        _run([cxx, *_FLAGS, f"-ffp-contract={contract}", "-c", str(f), "-o", str(part)])
        part.replace(o)  # atomic: two processes may build at once

    core = out / f"libcute_emulator-{_digest(o.name.encode() for o in objects)}.so"
    if not core.exists():
        with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
            list(pool.map(compile_one, todo))
        part = core.with_suffix(f".{os.getpid()}")
        _run([cxx, "-shared", "-o", str(part), *map(str, objects)])
        part.replace(core)
    stub_source = folder / "runtime.c"
    stub = out / f"libcute_emulator_runtime-{_digest([version.encode(), stub_source.read_bytes()])}.so"
    if not stub.exists():
        part = stub.with_suffix(f".{os.getpid()}")
        _run([cc, "-shared", "-fPIC", "-O2", "-Wall", "-o", str(part), str(stub_source)])
        part.replace(stub)
    return core, stub


if __name__ == "__main__":
    for path in build(verbose=True):
        print(path)
