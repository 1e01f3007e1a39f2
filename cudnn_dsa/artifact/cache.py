"""The disk cache: named files under a digest, in a directory of the user's own.

It holds compiled kernels, tuning choices and self-test verdicts. An entry is one file (a line of JSON with lengths and
hashes, then the contents), written beside its place and renamed into it, so that a reader meets all of an entry or none
of it; one that does not verify is dropped and made again. Entries are data only: nothing is unpickled or executed. When
the directory grows past its cap the entries that were used longest ago go.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

FORMAT = 1  # of the entries; part of the folder's name
MAX_BYTES = 1 << 30
LOCK_SECONDS = 120.0  # a compile takes seconds; whoever holds a lock longer is stuck
_LOCKS = 256  # lock files: few enough to stay, many enough that two kernels rarely share one
_SUFFIX = ".entry"
_VALUE = "value.json"

Files = Mapping[str, bytes]


def directory() -> Path:
    """``CUDNN_DSA_CACHE_DIR``, else ``cudnn_dsa`` in the user's cache folder."""
    given = os.environ.get("CUDNN_DSA_CACHE_DIR")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cudnn_dsa"


class Cache:
    """Entries below a directory. Safe among threads and processes.

    A directory that cannot be had (read-only, another user's) only means that nothing is kept: it is logged once.

    Args:
        root: where; None follows :func:`directory` at every call.
        max_bytes: the cap on the entries' size together.
    """

    def __init__(self, root: Path | None = None, max_bytes: int = MAX_BYTES) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._refused: set[Path] = set()

    def get(self, digest: str) -> dict[str, bytes] | None:
        """The files of an entry, or None."""
        folder = self._folder(make=False)
        if folder is None:
            return None
        path = folder / (digest + _SUFFIX)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        try:
            files = _unpack(data)
        except ValueError as error:
            logger.warning("the cache entry %s is damaged (%s) and is made again", path, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # what "used longest ago" goes by
        return files

    def put(self, digest: str, files: Files) -> None:
        """Keep an entry, in the place of one with the same digest."""
        folder = self._folder(make=True)
        if folder is None:
            return
        try:
            _replace(folder / (digest + _SUFFIX), _pack(files))
            self._evict(folder)
        except OSError as error:
            logger.warning("%s is not kept in the cache: %s", digest, error)

    def get_or_make(self, digest: str, make: Callable[[], Files]) -> dict[str, bytes]:
        """The files of an entry; where there is none, one process makes it and the others wait for that."""
        found = self.get(digest)
        if found is None:
            with self._lock(digest):
                found = self.get(digest)
                if found is None:
                    found = dict(make())
                    self.put(digest, found)
        return found

    def get_value(self, digest: str) -> Any:
        """The plain data of an entry of :meth:`put_value`, or None."""
        files = self.get(digest)
        try:
            return None if files is None else json.loads(files[_VALUE])
        except (KeyError, ValueError):
            return None

    def put_value(self, digest: str, value: Any) -> None:
        """Keep plain data (what JSON holds) as an entry."""
        self.put(digest, {_VALUE: json.dumps(value).encode()})

    def values(self) -> Iterator[Any]:
        """The plain data of all entries of :meth:`put_value`."""
        for path in self.entries():
            with contextlib.suppress(OSError), path.open("rb") as file:
                if json.dumps(_VALUE).encode() in file.readline():  # machine code is not read
                    yield self.get_value(path.name.removesuffix(_SUFFIX))

    def entries(self) -> list[Path]:
        """The files of all entries, those used longest ago first."""
        folder = self._folder(make=False)
        if folder is None:
            return []
        return [path for _, path, _ in _by_age(folder)]

    def _folder(self, make: bool) -> Path | None:
        """The folder of the entries, the user's own; None where it cannot be had, or is not there and not made."""
        folder = (self._root or directory()) / f"v{FORMAT}"
        reason = None
        try:
            if make:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.lstat()
            if status.st_uid != os.geteuid():
                reason = f"it belongs to user {status.st_uid}"
            elif status.st_mode & 0o077:
                folder.chmod(0o700)
        except FileNotFoundError:
            return None
        except OSError as error:
            reason = str(error)
        if reason is None:
            return folder
        if folder not in self._refused:
            self._refused.add(folder)
            logger.warning("the kernel cache %s is not used: %s", folder, reason)
        return None

    @contextlib.contextmanager
    def _lock(self, digest: str) -> Iterator[None]:
        """One holder among all threads and processes. The system frees the lock of a process that dies; of one that
        hangs nobody waits forever: an entry is replaced as a whole, so that to make it twice does no harm."""
        handle = self._open_lock(digest)
        if handle is None:
            yield
            return
        try:
            if not _acquire(handle, LOCK_SECONDS):
                logger.warning("gave up waiting for the lock of %s", digest)
            yield
        finally:
            os.close(handle)

    def _open_lock(self, digest: str) -> int | None:
        folder = self._folder(make=True)
        if folder is None:
            return None
        number = int(hashlib.sha256(digest.encode()).hexdigest(), 16) % _LOCKS
        try:
            return os.open(folder / f"lock-{number:02x}", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:  # a file system that is read-only or full: what is there is used, nothing is added
            logger.warning("there is no lock for %s: %s", digest, error)
            return None

    def _evict(self, folder: Path) -> None:
        found = _by_age(folder)
        excess = sum(size for _, _, size in found) - self._max_bytes
        for _, path, size in found[:-1]:  # the newest stays, however large
            if excess <= 0:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            excess -= size


def _acquire(handle: int, seconds: float) -> bool:
    deadline, pause = time.monotonic() + seconds, 0.001
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
        except OSError:  # a file system without locks
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _replace(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _by_age(folder: Path) -> list[tuple[float, Path, int]]:
    found = []
    for path in folder.iterdir():
        # A temporary file of a process that was killed counts too, so that it goes with time.
        if path.name.endswith(_SUFFIX) or path.name.startswith(".new-"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                found.append((status.st_mtime, path, status.st_size))
    return sorted(found)


def _pack(files: Files) -> bytes:
    index = {name: [len(data), hashlib.sha256(data).hexdigest()] for name, data in files.items()}
    return json.dumps(index).encode() + b"\n" + b"".join(files.values())


def _unpack(data: bytes) -> dict[str, bytes]:
    """Raises ``ValueError`` where the entry is not whole."""
    head, newline, body = data.partition(b"\n")
    if not newline:
        raise ValueError("no index")
    index = json.loads(head)  # JSONDecodeError and UnicodeDecodeError are ValueErrors
    if not isinstance(index, dict):
        raise ValueError("no index")
    files, at = {}, 0
    for name, record in index.items():
        if not (isinstance(record, list) and len(record) == 2 and type(record[0]) is int and record[0] >= 0):
            raise ValueError("an odd index")
        files[name] = body[at : at + record[0]]
        at += record[0]
        if len(files[name]) != record[0] or hashlib.sha256(files[name]).hexdigest() != record[1]:
            raise ValueError(f"{name} is not what was written")
    if at != len(body):
        raise ValueError("something follows the last file")
    return files


CACHE = Cache()
