"""The disk cache: whole entries or none, whoever else reads and writes."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cudnn_dsa.artifact import cache
from cudnn_dsa.artifact.cache import Cache

FILES = {"a": b"1234", "b": bytes(range(256)), "empty": b""}
KEY = "0" * 64


@pytest.fixture
def store(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def test_what_is_put_is_got(store: Cache) -> None:
    assert store.get(KEY) is None
    store.put(KEY, FILES)
    assert store.get(KEY) == FILES
    store.put(KEY, {"a": b"other"})
    assert store.get(KEY) == {"a": b"other"}
    store.put_value("1" * 64, {"x": [1, None, "y"]})
    assert store.get_value("1" * 64) == {"x": [1, None, "y"]}
    assert store.get_value(KEY) is None, "an entry of another kind"
    assert list(store.values()) == [{"x": [1, None, "y"]}]


def test_reading_makes_nothing(store: Cache, tmp_path: Path) -> None:
    assert store.get(KEY) is None
    assert store.get_value(KEY) is None
    assert store.entries() == list(store.values()) == []
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_the_users_own(store: Cache, tmp_path: Path) -> None:
    store.put(KEY, FILES)
    (folder,) = (tmp_path / "cache").iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    assert store.get(KEY) == FILES
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.name for path in folder.iterdir()] == [KEY + ".entry"], "a temporary file was left behind"


def test_another_users_folder_is_not_touched(store: Cache, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    store.put(KEY, FILES)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with caplog.at_level(logging.WARNING):
        assert store.get(KEY) is None
        assert store.get_or_make(KEY, lambda: {"a": b"made"}) == {"a": b"made"}
    assert [record.message for record in caplog.records if "belongs to user" in record.message] != []
    assert len(caplog.records) == 1, "said once"
    monkeypatch.undo()
    assert store.get(KEY) == FILES


def test_a_directory_that_cannot_be_had_costs_only_the_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Cache(tmp_path / "file")
    store.put(KEY, FILES)
    assert store.get(KEY) is None
    assert store.get_or_make(KEY, lambda: FILES) == FILES
    assert store.entries() == []


def damages(data: bytes) -> dict[str, bytes]:
    middle = len(data) // 2
    return {
        "empty": b"",
        "cut": data[:-1],
        "cut in the index": data[:20],
        "longer": data + b"x",
        "one bit": data[:-40] + bytes([data[-40] ^ 1]) + data[-39:],
        "one bit of the index": data[:10] + bytes([data[10] ^ 1]) + data[11:],
        "zeros": bytes(len(data)),
        "another half": data[:middle] + data[:middle],
        "a list": b"[1]\n",
        "odd lengths": b'{"a": [-1, "x"]}\n',
        "not JSON": b"\xff\xfe\n" + data,
    }


@pytest.mark.parametrize("damage", damages(bytes(100)))
def test_a_damaged_entry_is_made_again_and_said(store: Cache, damage: str, caplog) -> None:
    store.put(KEY, FILES)
    (path,) = store.entries()
    path.write_bytes(damages(path.read_bytes())[damage])
    with caplog.at_level(logging.WARNING):
        assert store.get_or_make(KEY, lambda: FILES) == FILES
    assert any("is damaged" in record.message for record in caplog.records)
    assert store.get_or_make(KEY, lambda: pytest.fail("made again")) == FILES


def test_the_entries_used_longest_ago_go(tmp_path: Path) -> None:
    store = Cache(tmp_path, max_bytes=5000)
    for i in range(4):
        store.put(str(i), {"data": bytes(1000)})
        os.utime(store.entries()[-1], (i, i))
    assert store.get("0") is not None  # used now: the oldest is 1
    store.put("4", {"data": bytes(1500)})
    assert store.get("1") is None
    assert store.get("0") is not None
    store.put("huge", {"data": bytes(10_000)})
    assert [path.name for path in store.entries()] == ["huge.entry"]


def test_what_a_killed_process_left_goes_too(tmp_path: Path) -> None:
    store = Cache(tmp_path, max_bytes=2000)
    store.put("0", {"data": bytes(10)})
    left = store.entries()[0].parent / ".new-left"
    left.write_bytes(bytes(3000))
    os.utime(left, (1, 1))
    store.put("1", {"data": bytes(10)})
    assert not left.exists()
    assert store.get("0") is not None


def test_threads_make_an_entry_once(store: Cache) -> None:
    made = []

    def make() -> dict[str, bytes]:
        time.sleep(0.1)
        made.append(1)
        return FILES

    threads = [threading.Thread(target=store.get_or_make, args=(KEY, make)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]


PROCESS = """
import os, sys, time
from pathlib import Path
from cudnn_dsa.artifact.cache import Cache
root = Path(sys.argv[1])
def make():
    (root / f"made-{os.getpid()}").write_text("")
    time.sleep(0.3)
    return {"a": b"x" * 100_000}
while not (root / "go").exists():
    time.sleep(0.005)
assert Cache(root / "cache").get_or_make("k", make) == {"a": b"x" * 100_000}
"""


def test_of_16_processes_one_makes_the_entry(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROCESS, str(tmp_path)]
    processes = [subprocess.Popen(command) for _ in range(16)]
    (tmp_path / "go").write_text("")
    assert [process.wait(60) for process in processes] == [0] * 16
    assert len(list(tmp_path.glob("made-*"))) == 1


def test_a_process_that_dies_while_it_makes_an_entry_is_replaced(tmp_path: Path) -> None:
    body = PROCESS.replace("time.sleep(0.3)", "os.kill(os.getpid(), 9)")
    (tmp_path / "go").write_text("")
    assert subprocess.run([sys.executable, "-c", body, str(tmp_path)], check=False).returncode == -9
    start = time.monotonic()
    assert Cache(tmp_path / "cache").get_or_make("k", lambda: FILES) == FILES
    assert time.monotonic() - start < 5


def test_a_lock_that_is_never_given_back_does_not_hang(store: Cache, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.2)
    store.get_or_make("another", lambda: FILES)
    folder = store.entries()[0].parent
    handles = []
    for number in range(256):
        handle = os.open(folder / f"lock-{number:02x}", os.O_CREAT | os.O_RDWR)
        fcntl.flock(handle, fcntl.LOCK_EX)
        handles.append(handle)
    try:
        with caplog.at_level(logging.WARNING):
            assert store.get_or_make(KEY, lambda: FILES) == FILES
        assert any("gave up waiting" in record.message for record in caplog.records)
    finally:
        for handle in handles:
            os.close(handle)


def test_a_folder_that_only_can_be_read_serves_what_it_has(
    store: Cache, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    """A cache on a read-only file system, as in an image of a container: no lock, no file can be made."""
    store.put(KEY, FILES)

    def refuse(path: object, flags: int, *rest: object, **more: object) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(30, "Read-only file system", str(path))
        return opened(path, flags, *rest, **more)  # type: ignore[arg-type]

    opened = os.open
    monkeypatch.setattr(os, "open", refuse)
    assert store.get_or_make(KEY, lambda: pytest.fail("it is there")) == FILES
    with caplog.at_level(logging.WARNING):
        assert store.get_or_make("other", lambda: {"a": b"made"}) == {"a": b"made"}
    assert {record.message.partition(":")[0] for record in caplog.records} == {
        "there is no lock for other", "other is not kept in the cache",
    }  # fmt: skip
    monkeypatch.undo()
    assert store.get("other") is None


def test_an_error_while_an_entry_is_made_is_the_callers(store: Cache) -> None:
    def fail() -> dict[str, bytes]:
        raise RuntimeError("no compiler")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no compiler"):
            store.get_or_make(KEY, fail)
    assert store.get_or_make(KEY, lambda: FILES) == FILES
