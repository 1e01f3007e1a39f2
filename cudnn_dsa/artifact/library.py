"""Where a kernel comes from: memory, a directory of ahead-of-time builds, the disk cache, or the compiler."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from cudnn_dsa.artifact import aot, build, driver, key
from cudnn_dsa.artifact.cache import CACHE
from cudnn_dsa.artifact.description import Artifact, Source
from cudnn_dsa.artifact.kernel import Kernel
from cudnn_dsa.contracts.sparse_attention import Problem

logger = logging.getLogger(__name__)

MAX_ARTIFACTS = 256  # kept in memory, some hundred KB each
PACKAGED = Path(__file__).resolve().parent.parent / "kernels"  # what a wheel may carry
Sources = Callable[[Problem, str], Iterable[Source]]

_lock = threading.Lock()
_artifacts: dict[str, Artifact] = {}


def unavailable(device: str, major: int) -> str | None:
    """Why kernels for compute capability ``major``.x cannot run on a torch device, or None: the answer of a backend.

    Args:
        device: ``"cuda:0"``, ``"cpu"``.
        major: 9 for Hopper, 10 for Blackwell.
    """
    stand_in = driver.installed()
    if stand_in is None and not device.startswith("cuda"):
        return f"it runs on CUDA devices, not on {device}"
    try:
        targets = (stand_in or driver.current(device)).architectures
    except driver.DriverError as error:
        return str(error)
    if targets[0][:-2] != f"sm_{major}":
        return f"{device} is {targets[0][:-1]}, the kernels are for sm_{major}x"
    ahead = any(record["arch"] in targets for folder in directories() for record in _records(folder).values())
    return None if ahead else build.unavailable()


def load(sources: Sources, problem: Problem) -> Mapping[str, Kernel]:
    """The loaded kernels of a problem, by name.

    The first call for a kernel key finds or compiles them; later ones cost a dictionary look-up.

    Args:
        sources: of a backend: ``sources(problem, arch)``. What it returns may depend on what is in ``kernel_key`` only.
        problem: the problem; its device says where.

    Raises:
        RuntimeError: a kernel has to be compiled and there is no CuTe DSL.
        DriverError: there is no such GPU.
    """
    device = driver.current(problem.device)
    name = (sources, problem.kernel_key(device.architectures[0]))
    found = device.memory.kernels.get(name)
    if found is None:
        with device.memory.lock:
            found = device.memory.kernels.get(name)
            if found is None:
                artifacts = artifacts_of(sources, problem, device.architectures)
                found = {a.name: Kernel(a, device) for a in artifacts}
                device.memory.keep(name, found)
    return found


def fingerprint(sources: Sources, problem: Problem) -> str:
    """Digest of the kernels that run a problem: what a self-test's verdict is about."""
    kernels = load(sources, problem)
    return key.digest({name: [k.artifact.identity, dict(k.artifact.toolchain)] for name, k in kernels.items()})


def artifacts_of(sources: Sources, problem: Problem, architectures: tuple[str, ...]) -> list[Artifact]:
    """The artifacts of a problem: built ahead of time for the first target that has them all, else for the first."""
    for arch in architectures:
        ahead = [_ahead_of_time(source) for source in sources(problem, arch)]
        whole = [artifact for artifact in ahead if artifact is not None]
        if len(whole) == len(ahead):
            return whole
    return [compiled(source) for source in sources(problem, architectures[0])]


def find(source: Source) -> Artifact:
    """The artifact of a source: built ahead of time, else compiled, here or earlier."""
    return _ahead_of_time(source) or compiled(source)


def compiled(source: Source) -> Artifact:
    """The artifact of a source by the compiler that is installed here: from memory, the disk cache or the compiler."""
    digest = key.cache_key(source)
    with _lock:
        found = _artifacts.get(digest)
    if found is not None:
        return found

    def make() -> dict[str, bytes]:
        start = time.perf_counter()
        files = build.compile_source(source).to_files()
        logger.info("compiled %s for %s in %.1f s", source.name, source.arch, time.perf_counter() - start)
        return files

    files = CACHE.get_or_make(digest, make)
    try:
        artifact = Artifact.from_files(files)
    except (ValueError, KeyError, TypeError) as error:  # whole, but of a version that described kernels otherwise
        logger.warning("the cache entry %s is not understood (%r) and is made again", digest, error)
        CACHE.put(digest, files := make())
        artifact = Artifact.from_files(files)
    with _lock:
        while len(_artifacts) >= MAX_ARTIFACTS:
            del _artifacts[next(iter(_artifacts))]
        _artifacts[digest] = artifact
    return artifact


def directories() -> tuple[Path, ...]:
    """Where ahead-of-time builds are looked for: ``CUDNN_DSA_KERNELS`` (paths with ``:`` between them), the package."""
    given = os.environ.get("CUDNN_DSA_KERNELS", "")
    return (*(Path(part).expanduser() for part in given.split(os.pathsep) if part), PACKAGED)


def _ahead_of_time(source: Source) -> Artifact | None:
    for folder in directories():
        records = _records(folder)
        if records:
            record = records.get(key.identity(source))
            if record is not None:
                return aot.read(folder, record)
    return None


@functools.lru_cache(maxsize=16)
def _records(folder: Path) -> dict[str, aot.Record]:
    return {record["identity"]: record for record in aot.manifest(folder)}
