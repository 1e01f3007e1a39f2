"""Tile configurations: what is legal, what is shipped, what was measured on this machine.

A configuration is chosen per (device kind, kernel): shipped defaults first; ``tune`` measures the legal ones and keeps
the fastest in the user's cache (``cudnn_dsa.artifact.cache``). A choice is only ever read back if it is one of the
legal ones, so nothing in the cache is trusted. Under ``deterministic`` the shipped choice is used and nothing is
measured: another tile shape would round differently.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cudnn_dsa.artifact import cache
from cudnn_dsa.artifact.key import digest
from cudnn_dsa.backends.triton import launch
from cudnn_dsa.contracts.sparse_attention import Problem

logger = logging.getLogger(__name__)

FORMAT = 1  # of a choice
MAX_REMEMBERED = 1000
REPETITIONS = 5


@dataclass(frozen=True)
class Config:
    """Tile sizes of a kernel (heads, keys, columns of a part) and the compiler's options."""

    block_h: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int

    @property
    def constants(self) -> tuple[tuple[str, Any], ...]:
        return (("BLOCK_H", self.block_h), ("BLOCK_N", self.block_n), ("BLOCK_D", self.block_d))

    @property
    def options(self) -> tuple[tuple[str, int], ...]:
        return (("num_warps", self.num_warps), ("num_stages", self.num_stages))


# Best first on an H200, head tiles ever narrower, so that the first one that fits is a good choice on a smaller device.
LEGAL: dict[str, tuple[Config, ...]] = {
    "backward": (
        Config(64, 64, 128, 8, 1),
        Config(64, 32, 256, 8, 1),
        Config(64, 32, 128, 8, 1),
        Config(32, 32, 256, 8, 1),
        Config(32, 64, 64, 8, 1),
        Config(16, 32, 128, 4, 1),
        Config(16, 64, 128, 8, 1),
        Config(16, 16, 128, 4, 1),
    ),
    "forward": (
        Config(64, 128, 128, 8, 1),
        Config(64, 64, 256, 8, 1),
        Config(32, 128, 128, 8, 1),
        Config(32, 64, 256, 8, 1),
        Config(16, 64, 256, 4, 1),
        Config(16, 32, 256, 4, 1),
        Config(16, 16, 128, 4, 1),
    ),
}


def legal(problem: Problem) -> tuple[Config, ...]:
    """The configurations for the problem, best first: head tiles no wider than the heads need.

    On compute capability 10.x tiles of 64 heads are left out: Triton 3.6 and 3.9 compile them to a trap there.
    """
    widest = max(16, min(64, 1 << (int(problem.heads) - 1).bit_length()))
    if " sm_10" in device_kind(problem.device):
        widest = min(widest, 32)
    return tuple(c for c in LEGAL[problem.direction] if c.block_h <= widest)


def key(problem: Problem, device: str) -> str:
    """What a choice depends on; sequence lengths are not in it."""
    p = problem
    return "|".join(map(str, (device_kind(device), p.direction, p.dtype, p.head_dim, p.heads, _size_class(p.topk))))


def choose(problem: Problem, fits: Callable[[Config], bool]) -> Config:
    """The measured choice if there is one, else the first legal configuration that fits the device."""
    candidates = legal(problem)
    if not problem.deterministic:
        measured = _read(key(problem, problem.device))
        for config in candidates:
            if measured == asdict(config) and fits(config):
                return config
    for config in candidates:
        if fits(config):
            return config
    raise RuntimeError(f"triton: no tile configuration fits {problem.device} ({device_kind(problem.device)})")


def tune(problem: Problem, fits: Callable[[Config], bool], run: Callable[[Config], None]) -> None:
    """Measure the legal configurations with the widest head tiles that fit, and keep the fastest.

    Nothing happens where the choice is pinned or already made, nor inside a graph capture.

    Args:
        fits: compiles a configuration; False if the device cannot hold it.
        run: launches it once on the current stream.
    """
    name = key(problem, problem.device)
    if problem.deterministic or _read(name) is not None or torch.cuda.is_current_stream_capturing():
        return
    times: dict[Config, float] = {}
    for config in legal(problem):
        if times and config.block_h < next(iter(times)).block_h:
            break  # a narrower tile gathers every key more often: it is there for devices that hold nothing wider
        if fits(config):
            times[config] = _measure(functools.partial(run, config))
    if not times:
        return  # ``choose`` says so
    best = min(times, key=times.__getitem__)
    logger.info("triton: %s: %s (%.3f ms)", name, best, times[best])
    _write(name, asdict(best))


def _measure(run: Callable[[], None]) -> float:
    """Median milliseconds."""
    run()
    times = []
    for _ in range(REPETITIONS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[REPETITIONS // 2]


@functools.lru_cache(maxsize=64)
def device_kind(device: str) -> str:
    """The name of a CUDA device and its compute capability; "interpreter" for the CPU."""
    if launch.interpreted():
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} sm_{properties.major}{properties.minor}"


def _size_class(n: Any) -> int:
    """The power of two at or above n."""
    return 1 << (int(n) - 1).bit_length()


# Choices that were read, so that a launch reads no disk; (directory, key) -> the choice, None where there is none.
_memory: dict[tuple[Path, str], Any] = {}


def _read(name: str) -> Any:
    entry = (cache.directory(), name)
    if entry not in _memory:
        _remember(entry, cache.CACHE.get_value(_digest(name)))
    return _memory[entry]


def _write(name: str, choice: dict[str, Any]) -> None:
    """Without a directory that can be written to the choice is forgotten at the end of the process."""
    _remember((cache.directory(), name), choice)
    cache.CACHE.put_value(_digest(name), choice)


def _remember(entry: tuple[Path, str], choice: Any) -> None:
    if len(_memory) >= MAX_REMEMBERED:
        _memory.clear()
    _memory[entry] = choice


def _digest(name: str) -> str:
    return digest({"triton tuning": FORMAT, "key": name})
