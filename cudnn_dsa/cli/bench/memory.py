"""Memory: what is free, and the peak that a call adds."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def free_bytes(device: str) -> int:
    """Bytes that can still be allocated on the device."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    try:
        return _kibibytes(Path("/proc/meminfo").read_text(), "MemAvailable")
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def peak_bytes(device: str, call: Callable[[], object]) -> int | None:
    """How much memory ``call`` has in use at its worst moment beyond what was in use before.

    On a GPU: what torch's allocator handed out. On the CPU: resident memory of the process, whoever allocated it, which
    needs a Linux that lets a process reset its own high-water mark; None elsewhere (the call is made all the same).
    """
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    try:
        # Freed memory that the C library keeps would be used again without growing the process.
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR.write_text("5")
        before = _kibibytes(_STATUS.read_text(), "VmRSS")
    except (OSError, AttributeError, KeyError):
        call()
        return None
    call()
    return max(0, _kibibytes(_STATUS.read_text(), "VmHWM") - before)


def _kibibytes(text: str, key: str) -> int:
    """The ``key: 123 kB`` line of a file of /proc, in bytes."""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(fields[key].split()[0]) * 1024
