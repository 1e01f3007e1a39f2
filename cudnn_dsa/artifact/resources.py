"""What a kernel takes of a multiprocessor, read from its cubin: no GPU, no driver and no tool is needed.

A cubin is an ELF file. Its section ``.nv.info`` is a list of attributes; those used here are the ones that NVIDIA's
cuobjdump names EIATTR_REGCOUNT, EIATTR_FRAME_SIZE and EIATTR_MAX_STACK_SIZE.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from cudnn_dsa.artifact.description import Artifact

_REGISTER_COUNT, _FRAME_SIZE, _MAX_STACK_SIZE = 0x2F, 0x11, 0x23
_SIZED = 0x04  # format of an attribute: a 16-bit length and that many bytes follow


class Resources(NamedTuple):
    """Per thread: ``registers``, and bytes of local memory in ``stack`` (any spilled register is there: 0 means that
    nothing spills). Per block: bytes of shared memory, ``static_shared`` (1 KiB of it is the system's) and dynamic."""

    registers: int
    stack: int
    static_shared: int
    dynamic_shared: int


def resources(artifact: Artifact) -> Resources:
    """Registers, stack and shared memory of a compiled kernel.

    Raises:
        ValueError: the cubin is no ELF file or does not have the kernel.
    """
    sections = _sections(artifact.cubin)
    if ".text." + artifact.entry not in sections:
        raise ValueError(f"the cubin has no kernel {artifact.entry!r}")
    function = _symbols(sections, artifact.cubin).index(artifact.entry)
    counts = dict.fromkeys((_REGISTER_COUNT, _FRAME_SIZE, _MAX_STACK_SIZE), 0)
    for attribute, data in _attributes(_content(sections, artifact.cubin, ".nv.info")):
        if attribute in counts and len(data) == 8:
            symbol, value = struct.unpack("<II", data)
            if symbol == function:
                counts[attribute] = value
    shared = sections.get(".nv.shared." + artifact.entry)
    return Resources(
        counts[_REGISTER_COUNT],
        max(counts[_FRAME_SIZE], counts[_MAX_STACK_SIZE]),
        shared[1] if shared else 0,
        artifact.launch.shared,
    )


def _sections(elf: bytes) -> dict[str, tuple[int, int]]:
    """name -> (offset, size)."""
    if elf[:4] != b"\x7fELF" or elf[4] != 2:
        raise ValueError("not a 64-bit ELF file")
    table = struct.unpack_from("<Q", elf, 40)[0]
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    heads = [struct.unpack_from("<IIQQQQ", elf, table + size * i) for i in range(count)]
    strings = heads[names][4]
    found = {}
    for name, _, _, _, offset, length in heads:
        start = strings + name
        found[elf[start : elf.index(b"\0", start)].decode()] = (offset, length)
    return found


def _content(sections: dict[str, tuple[int, int]], elf: bytes, name: str) -> bytes:
    offset, size = sections.get(name, (0, 0))
    return elf[offset : offset + size]


def _symbols(sections: dict[str, tuple[int, int]], elf: bytes) -> list[str]:
    strings = _content(sections, elf, ".strtab")
    table = _content(sections, elf, ".symtab")
    starts = [struct.unpack_from("<I", table, at)[0] for at in range(0, len(table), 24)]
    return [strings[start : strings.index(b"\0", start)].decode() for start in starts]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _SIZED:
            yield attribute, data[at : at + value]
            at += value
