"""Digests that say whether a compiled kernel is the one that is wanted."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from cudnn_dsa.artifact.description import Source
from cudnn_dsa.artifact.driver import cuda_version

SHARED_PARTS = Path(__file__).resolve().parents[1] / "cute"
# What compiles. The file of another version is another file.
TOOLCHAIN = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-core")
# The assembler is in one of these, by the CUDA version it belongs to: the DSL loads the newest that the driver takes.
ASSEMBLERS = {13: "nvidia-cutlass-dsl-libs-cu13", 12: "nvidia-cutlass-dsl-libs-cu12"}
_PLAIN = (str, int, float, bool, type(None))


def identity(source: Source) -> str:
    """Digest of what a kernel is made from: name, arch, key, description, program text. Not of what compiles it."""
    parts = {
        "name": source.name, "arch": source.arch, "key": _plain(source.key), "inputs": list(source.inputs.items()),
        "launch": source.launch.to_json(), "text": program_text(source.host.__module__),
    }  # fmt: skip
    return digest(parts)


def cache_key(source: Source) -> str:
    """Digest of a kernel's identity and of the versions that would compile it here."""
    return digest({"identity": identity(source), "toolchain": toolchain()})


def digest(parts: Mapping[str, Any]) -> str:
    """SHA-256 of plain data."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _plain(key: Any) -> Any:
    """The key as JSON keeps it apart: True is not 1, (1, 2) is not 1, 2."""
    if isinstance(key, tuple):
        return [_plain(part) for part in key]
    if type(key) not in _PLAIN:
        raise TypeError(f"a kernel's key is made of tuples, strings, numbers, booleans and None, not {key!r}")
    return [type(key).__name__, key] if isinstance(key, bool | float) else key


@functools.lru_cache(maxsize=1)
def toolchain() -> dict[str, str]:
    """Versions of what compiles kernels here; empty without the CuTe DSL."""
    supported = cuda_version()
    found: dict[str, str] = {}
    for name in TOOLCHAIN:
        _add_version(found, name)
    for major, name in ASSEMBLERS.items():
        if (supported is None or supported >= major) and _add_version(found, name):
            break
    return found


def _add_version(found: dict[str, str], name: str) -> bool:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


@functools.lru_cache(maxsize=64)
def program_text(module: str) -> str:
    """Digest of the Python files of the package that ``module`` is in, and of the parts that all kernels share."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    file = Path(str(spec.origin))
    files = _files(SHARED_PARTS) | (_files(file.parent) if "." in module else {module: file})
    return digest({name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()})


def _files(folder: Path) -> dict[str, Path]:
    return {f"{folder.name}/{path.relative_to(folder).as_posix()}": path for path in folder.rglob("*.py")}
