"""Launches: from a lowered kernel, dimensions and parameter bytes to a report."""

from __future__ import annotations

import ctypes
import hashlib
import re
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from . import core, lowering, ptx
from .errors import ExecutionError, LaunchError
from .report import Hazard, LaunchReport, locate
from .timeline import Segment

SCHEDULES = {"adversarial": 0, "eager": 1}


@dataclass(frozen=True)
class Options:
    """How to run.

    ``schedule``: "adversarial" (warps in seeded random order, asynchronous operations late or at random moments) or
    "eager" (the same every time, asynchronous operations at once: fast, and hides races). ``check``: the
    happens-before checker. ``profile``: bank conflicts too. ``instruction_limit``: warp instructions before a launch
    counts as hung (0: none).
    """

    seed: int = 0
    schedule: str = "adversarial"
    check: bool = True
    profile: bool = False
    instruction_limit: int = 0

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise LaunchError(f"schedule is one of {', '.join(SCHEDULES)}, not {self.schedule!r}")


@dataclass(frozen=True)
class Region:
    """Memory that a kernel may touch: a tensor's bytes."""

    base: int
    size: int
    name: str


class LoadedModule:
    """A parsed PTX module; its kernels are lowered on first use."""

    def __init__(self, text: str) -> None:
        self.module = ptx.parse(text)
        self.lines = text.splitlines()
        self._programs: dict[str, core.Program] = {}

    def program(self, name: str) -> core.Program:
        if name not in self._programs:
            if name not in self.module.entries:
                raise LaunchError(
                    f"the module has no kernel {name!r}; it has {', '.join(self.module.entries) or 'none'}"
                )
            self._programs[name] = core.Program(lowering.lower(self.module, name))
        return self._programs[name]


@lru_cache(maxsize=64)
def _load(digest: bytes, text: str) -> LoadedModule:
    return LoadedModule(text)


def load(text: str) -> LoadedModule:
    """Parses PTX text, or returns what an earlier call made of the same text."""
    return _load(hashlib.sha256(text.encode()).digest(), text)


def launch(
    module: LoadedModule,
    name: str,
    grid: Sequence[int],
    block: Sequence[int],
    parameters: Sequence[bytes],
    *,
    cluster: Sequence[int] = (1, 1, 1),
    dynamic_shared: int = 0,
    regions: Iterable[Region] = (),
    strict: bool = False,
    options: Options = Options(),
) -> LaunchReport:
    """Runs one kernel to completion and reports. ``parameters``: the bytes of each kernel parameter in order.

    With ``strict`` an access outside all ``regions`` is an error. Raises :class:`ExecutionError` if the kernel does
    something illegal; the message names the CTA, the warp, the PTX line and the source line.
    """
    program = module.program(name)
    entry = program.kernel.entry
    if len(parameters) != len(entry.parameters):
        raise LaunchError(f"{name} has {len(entry.parameters)} parameters, {len(parameters)} were given")
    size = max(program.kernel.parameter_bytes, 1)
    buffer = ctypes.create_string_buffer(size + 128)
    base = (ctypes.addressof(buffer) + 127) // 128 * 128
    for p, data in zip(entry.parameters, parameters, strict=True):
        if len(data) != p.size:
            raise LaunchError(f"parameter {p.name} has {p.size} bytes, {len(data)} were given")
        ctypes.memmove(base + p.offset, data, p.size)
    if entry.max_threads and tuple(block) != entry.max_threads:
        raise LaunchError(f"{name} requires a block of {entry.max_threads} threads, not {tuple(block)}")
    all_regions = [*regions]
    if all_regions:
        all_regions.append(Region(base, size, "the kernel's parameters"))
        all_regions += [
            Region(ctypes.addressof(b), ctypes.sizeof(b), "a module variable")  # type: ignore[arg-type]
            for b in program.kernel.globals
        ]
    flat = (ctypes.c_uint64 * max(1, 2 * len(all_regions)))(*[x for r in all_regions for x in (r.base, r.size)])
    names = (ctypes.c_char_p * max(1, len(all_regions)))(*[r.name.encode() for r in all_regions])
    triple = ctypes.c_uint32 * 3
    raw = core.RawLaunch(
        triple(*grid),
        triple(*block),
        triple(*cluster),
        dynamic_shared,
        base,
        flat,
        names,
        len(all_regions),
        int(strict),
        int(options.check),
        int(options.profile),
        SCHEDULES[options.schedule],
        0,
        options.seed,
        options.instruction_limit,
    )
    lib = core.library()
    before = program.hits()
    begin = time.perf_counter()
    handle = lib.emu_launch(program.handle, ctypes.byref(raw))
    seconds = time.perf_counter() - begin
    try:
        operations = program.kernel.operations

        def place(pc: int):
            return locate(entry, module.lines, operations[min(pc, len(operations) - 1)].line)

        sys.stdout.write(lib.emu_launch_printed(handle).decode(errors="replace"))
        error = lib.emu_launch_error(handle).decode()
        hazards: list[Hazard] = []
        notes: list[Hazard] = []
        for i in range(lib.emu_launch_hazards(handle)):
            kind, what, earlier_agent, agent, earlier, pc, cta, address, count, note = (
                lib.emu_launch_hazard(handle, i).decode().split("\x1f")
            )
            (notes if note == "1" else hazards).append(
                Hazard(
                    kind,
                    what,
                    earlier_agent,
                    agent,
                    place(int(earlier)),
                    place(int(pc)),
                    int(cta),
                    int(address),
                    int(count),
                )
            )
        after = program.hits()
        for early in program.early_uses:
            count = after[early.use] - before[early.use]
            if count:
                notes.append(
                    Hazard(
                        "register used before tcgen05.wait::ld",
                        "registers",
                        "tcgen05.ld",
                        "the warp",
                        place(early.load),
                        place(early.use),
                        0,
                        0,
                        count,
                    )
                )
        if error:
            fault = ctypes.c_uint32()
            lib.emu_launch_fault(handle, ctypes.byref(fault))
            message = f"{name}: {_with_lines(error, place)}\n  at {place(fault.value)}"
            if hazards:
                message += "\nhazards before that:\n" + "\n".join(str(h) for h in hazards)
            raise ExecutionError(message)
        values = lib.emu_launch_counters(handle)
        n = ctypes.c_uint64()
        warps = lib.emu_launch_warps(handle, ctypes.byref(n))
        segments = lib.emu_launch_timeline(handle, ctypes.byref(n2 := ctypes.c_uint64()))
        timeline = list(struct.iter_unpack("<QQIIII", ctypes.string_at(segments, 32 * n2.value))) if n2.value else []
        mma, useful = {}, 0
        for row in lib.emu_launch_mma(handle).decode().splitlines():
            shape, count, flops, of_those = row.split("\x1f")
            mma[shape] = (int(count), int(flops))
            useful += int(of_those)
        done = lib.emu_launch_work(handle)
        work = [
            {k: int(done[16 * w + i]) for i, k in enumerate(core.WORK, 1) if done[16 * w + i]} for w in range(n.value)
        ]
        opcodes: Counter[str] = Counter()
        for o, a, b in zip(operations, before, after, strict=True):
            if b > a:
                opcodes[o.handler] += b - a
        return LaunchReport(
            name,
            tuple(grid),
            tuple(block),
            tuple(cluster),
            program.kernel.static_shared + dynamic_shared,
            hazards,
            notes,
            {k: int(values[i]) for i, k in enumerate(core.COUNTERS)},
            mma,
            useful,
            [int(x) for x in warps[: n.value]],
            work,
            dict(opcodes),
            seconds,
            [Segment(a, b, w, place(pc).line, why) for a, b, w, pc, why, _ in timeline],
        )
    finally:
        lib.emu_launch_free(handle)


def _with_lines(error: str, place) -> str:
    return re.sub(r"@(\d+)", lambda m: str(place(int(m.group(1)))), error)
