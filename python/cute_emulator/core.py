"""The C++ core through ctypes: programs, launches and what comes back."""

from __future__ import annotations

import ctypes
import struct
from ctypes import POINTER, c_char_p, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

from .analysis import early_uses
from .lowering import Kernel, Operation

COUNTERS = (
    "global_load",
    "global_store",
    "shared_load",
    "shared_store",
    "atomic_bytes",
    "atomics",
    "copy_async",
    "tma_load",
    "tma_store",
    "tma_reduce",
    "bulk_dsmem",
    "tmem_load",
    "tmem_store",
    "exp",
    "shared_passes",
    "shared_accesses",
    "async_ops",
    "clusters",
    "instructions",
)


# Kinds of work that a warp's role is told by, and the handlers that do it. At most 15, numbered from 1 in the core.
WORK: dict[str, tuple[str, ...]] = {
    "tcgen05.mma": ("tcgen05.mma",),
    "wgmma": ("wgmma.mma",),
    "mma.sync": ("mma.sync",),
    "TMA loads": ("tensor.load", "bulk.load"),
    "TMA stores": ("tensor.store", "bulk.store"),
    "cp.async": ("cp.async",),
    "tcgen05.ld": ("tmem.ld",),
    "tcgen05.st": ("tmem.st", "tcgen05.cp"),
    "exponentials": ("ex2.",),
    "shared loads": ("ld.shared", "ldmatrix"),
    "shared stores": ("st.shared", "stmatrix"),
    "global loads": ("ld.global",),
    "global stores": ("st.global",),
    "atomics": ("atom.",),
    "barrier waits": ("mbarrier.wait", "bar", "cluster.wait"),
}


@cache
def _kind(name: str) -> int:
    best, kind = "", 0
    for i, prefixes in enumerate(WORK.values(), 1):
        for p in prefixes:
            if (name == p or (p[-1] == "." and name.startswith(p))) and len(p) > len(best):
                best, kind = p, i
    return kind


def work_kind(o: Operation) -> int:
    """Number of the kind of work (in the order of :data:`WORK`, from 1), or 0."""
    name = o.handler
    if name == "tensor.copy":
        name = "tensor.load" if o.immediates[1] else "tensor.store"
    elif name == "bulk.copy":
        name = "bulk.store" if o.immediates[0] == 0 else "bulk.load"
    elif name.startswith(("ld.u", "ld.s", "st.u")):
        name = f"{name[:2]}.{'shared' if o.immediates[3] == 1 else 'local' if o.immediates[3] == 2 else 'global'}"
    return _kind(name)


class RawLaunch(ctypes.Structure):
    _fields_ = (
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("cluster", c_uint32 * 3),
        ("dynamic_shared", c_uint32),
        ("params", c_void_p),
        ("regions", POINTER(c_uint64)),
        ("region_names", POINTER(c_char_p)),
        ("region_count", c_uint32),
        ("strict_regions", c_uint32),
        ("check", c_uint32),
        ("profile", c_uint32),
        ("schedule", c_uint32),
        ("unused", c_uint32),
        ("seed", c_uint64),
        ("instruction_limit", c_uint64),
    )


def libraries() -> tuple[Path, Path]:
    """What :func:`cute_emulator.build.build` returns; built on first use."""
    from .build import build  # not above: `python -m cute_emulator.build` must find a module nobody has imported

    return build()


@cache
def library() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(libraries()[0]))
    for name, result, arguments in (
        ("emu_handler", c_uint64, [c_char_p]),
        (
            "emu_program",
            c_void_p,
            [
                c_char_p,
                c_uint64,
                c_char_p,
                c_uint64,
                c_char_p,
                c_uint64,
                c_char_p,
                c_uint64,
                c_char_p,
                c_uint64,
                c_uint32,
                c_uint32,
                c_uint32,
            ],
        ),
        ("emu_program_free", None, [c_void_p]),
        ("emu_program_hits", POINTER(c_uint64), [c_void_p]),
        ("emu_launch", c_void_p, [c_void_p, POINTER(RawLaunch)]),
        ("emu_launch_free", None, [c_void_p]),
        ("emu_launch_error", c_char_p, [c_void_p]),
        ("emu_launch_fault", c_uint32, [c_void_p, POINTER(c_uint32)]),
        ("emu_launch_counters", POINTER(c_uint64), [c_void_p]),
        ("emu_launch_hazards", c_uint64, [c_void_p]),
        ("emu_launch_hazard", c_char_p, [c_void_p, c_uint64]),
        ("emu_launch_mma", c_char_p, [c_void_p]),
        ("emu_launch_work", POINTER(c_uint64), [c_void_p]),
        ("emu_launch_printed", c_char_p, [c_void_p]),
        ("emu_launch_timeline", c_void_p, [c_void_p, POINTER(c_uint64)]),
        ("emu_launch_warps", POINTER(c_uint64), [c_void_p, POINTER(c_uint64)]),
    ):
        f = getattr(lib, name)
        f.restype, f.argtypes = result, arguments
    return lib


@cache
def handler(name: str) -> int:
    h = library().emu_handler(name.encode())
    if not h:
        raise KeyError(f"the C++ core has no handler {name!r}")
    return h


class Program:
    """A kernel in the core's form."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.early_uses = early_uses(kernel.operations)
        operands: list[int] = []
        immediates: list[int] = []
        raw = bytearray()
        pack = struct.Struct("<QIIIIHHBB2x").pack
        waits_for = {e.use: e.load for e in self.early_uses}
        for i, o in enumerate(kernel.operations):
            name, values = o.handler, o.immediates
            if i in waits_for:
                name, values = "tmem.consume", (*values, waits_for[i], handler(name))
            raw += pack(
                handler(name),
                len(operands),
                len(immediates),
                o.guard,
                o.guard_xor,
                len(o.operands),
                len(values),
                int(o.always),
                work_kind(o),
            )
            operands += o.operands
            immediates += values
        special = [x for pair in kernel.special for x in pair]
        lib = library()
        self.handle = lib.emu_program(
            bytes(raw),
            len(kernel.operations),
            struct.pack(f"<{len(operands)}I", *operands),
            len(operands),
            b"".join(int(v).to_bytes(8, "little", signed=v < 1 << 63) for v in immediates),
            len(immediates),
            kernel.constants,
            len(kernel.constants),
            struct.pack(f"<{len(special)}I", *special),
            len(special),
            kernel.register_bytes,
            kernel.static_shared,
            kernel.local_bytes,
        )
        self._free = lib.emu_program_free

    def hits(self) -> list[int]:
        """Executed warp instructions of each operation, over all launches so far."""
        return library().emu_program_hits(self.handle)[: len(self.kernel.operations)]

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._free(self.handle)
