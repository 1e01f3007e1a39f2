"""Directories of kernels that were built ahead of time: what a wheel carries, or ``CUDNN_DSA_KERNELS`` names.

For each kernel there are ``<arch>-<name>-<identity>.ptx``, ``.cubin`` and ``.json`` (the launch description). The
manifest says which file belongs to which kernel, with its hash. Neither a GPU nor a driver is needed to write one, and
no CuTe DSL to use one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cudnn_dsa.artifact.description import Artifact
from cudnn_dsa.artifact.resources import resources

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 1
_SUFFIXES = {"launch.json": ".json", "kernel.ptx": ".ptx", "kernel.cubin": ".cubin"}

Record = Mapping[str, Any]


def write(folder: Path, artifacts: Iterable[Artifact]) -> list[Record]:
    """Write artifacts and their manifest, in place of those of an earlier build.

    Args:
        folder: made if it is not there. A folder with other files in it keeps them.
        artifacts: what to write; they are taken one by one, so a generator may compile them.

    Returns:
        The manifest's records: ``identity``, ``name``, ``arch``, ``resources``, ``files`` (role -> [name, SHA-256]).
    """
    folder.mkdir(parents=True, exist_ok=True)
    earlier: set[str] = set()
    with contextlib.suppress(RuntimeError):  # damaged: its files are not known, those with the same names are replaced
        earlier = {name for record in manifest(folder) for name, _ in record["files"].values()}
    (folder / MANIFEST).unlink(missing_ok=True)  # while this goes on nothing here is whole
    records: dict[str, Record] = {}
    for artifact in artifacts:
        stem = f"{artifact.arch}-{artifact.name}-{artifact.identity[:16]}"
        files = {}
        for role, data in artifact.to_files().items():
            name = stem + _SUFFIXES[role]
            (folder / name).write_bytes(data)
            files[role] = [name, hashlib.sha256(data).hexdigest()]
        records[artifact.identity] = {
            "identity": artifact.identity, "name": artifact.name, "arch": artifact.arch,
            "resources": resources(artifact)._asdict(), "toolchain": dict(artifact.toolchain), "files": files,
        }  # fmt: skip
    kept = {name for record in records.values() for name, _ in record["files"].values()}
    for name in earlier - kept:
        (folder / Path(name).name).unlink(missing_ok=True)
    text = json.dumps({"format": FORMAT, "kernels": list(records.values())}, indent=1)
    (folder / MANIFEST).write_text(text)
    return list(records.values())


def manifest(folder: Path) -> list[Record]:
    """The records of a directory; none where there is no manifest, or one of another format.

    Raises:
        RuntimeError: the manifest is damaged.
    """
    try:
        data = json.loads((folder / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except ValueError as error:
        raise RuntimeError(f"{folder / MANIFEST} is damaged ({error}): build the directory again") from None
    if data["format"] != FORMAT:
        logger.warning("%s is of another version (format %s)", folder / MANIFEST, data["format"])
        return []
    return data["kernels"]


def read(folder: Path, record: Record) -> Artifact:
    """The artifact of a manifest's record.

    Raises:
        RuntimeError: a file is not the one that was built.
    """
    files = {}
    for role, (name, digest) in record["files"].items():
        path = folder / name
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise RuntimeError(f"{path} is not the file that was built: build the directory again")
        files[role] = data
    return Artifact.from_files(files)
