"""``run_ptx``: a kernel from PTX text, on NumPy arrays or anything that exposes its memory."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from .errors import HazardError, LaunchError
from .launch import Options, Region, launch, load
from .ptx import Parameter
from .report import LaunchReport


def memory_of(x: Any) -> tuple[int, int] | None:
    """(address, bytes) of an array or a tensor, or None if ``x`` is neither. The bytes run to the last element."""
    if hasattr(x, "__array_interface__"):
        a = x.__array_interface__
        address, shape, strides = a["data"][0], a["shape"], a["strides"]
        item = int(a["typestr"][2:])
        if strides is None:
            n = item
            for s in shape:
                n *= s
            return address, n
        return address, item + sum((s - 1) * t for s, t in zip(shape, strides, strict=True)) if all(shape) else 0
    if hasattr(x, "data_ptr") and hasattr(x, "element_size"):
        n = (
            x.element_size() * (1 + sum((s - 1) * t for s, t in zip(x.shape, x.stride(), strict=True)))
            if x.numel()
            else 0
        )
        return x.data_ptr(), n
    return None


def _pack(p: Parameter, x: Any) -> bytes:
    memory = memory_of(x)
    if memory is not None and not (hasattr(x, "shape") and x.shape == () and p.size != 8):
        x = memory[0]
    if isinstance(x, bytes | bytearray):
        return bytes(x)
    if isinstance(x, float) and p.type in ("f32", "b32", "f64", "b64"):
        return struct.pack("<f" if p.size == 4 else "<d", x)
    if hasattr(x, "__int__") and p.size in (1, 2, 4, 8):
        return (int(x) % (1 << (8 * p.size))).to_bytes(p.size, "little")
    raise LaunchError(f"cannot pass {type(x).__name__} as parameter {p.name} of type .{p.type} and {p.size} bytes")


def run_ptx(
    ptx: str,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[Any],
    *,
    kernel: str | None = None,
    cluster: Sequence[int] = (1, 1, 1),
    shared: int = 0,
    seed: int = 0,
    schedule: str = "adversarial",
    check: bool = True,
    profile: bool = False,
    instruction_limit: int = 0,
    raise_on_hazard: bool = True,
) -> LaunchReport:
    """Runs a kernel of a PTX module on the CPU.

    Args:
        ptx: the module's text.
        grid, block, cluster: up to three extents each.
        args: one for each kernel parameter: an array (NumPy, or a CPU tensor with ``data_ptr``), whose address is
            passed and whose bytes are all that the kernel may touch; an int or a float; or the parameter's bytes.
        kernel: the entry's name; may be left out if the module has one.
        shared: bytes of dynamic shared memory.
        seed, schedule, check, profile, instruction_limit: see :class:`cute_emulator.launch.Options`.
        raise_on_hazard: whether hazards raise :class:`HazardError` (its ``report`` is the report) or are only reported.

    Returns: the launch's report.

    Raises: :class:`PtxSyntaxError`, :class:`UnsupportedInstruction`, :class:`LaunchError`, :class:`ExecutionError`,
        :class:`HazardError`.
    """
    module = load(ptx)
    if kernel is None:
        if len(module.module.entries) != 1:
            raise LaunchError(f"which kernel? The module has {', '.join(module.module.entries) or 'none'}")
        kernel = next(iter(module.module.entries))
    program = module.program(kernel)
    if len(args) != len(program.kernel.entry.parameters):
        raise LaunchError(f"{kernel} has {len(program.kernel.entry.parameters)} parameters, {len(args)} were given")
    regions = []
    for p, x in zip(program.kernel.entry.parameters, args, strict=True):
        memory = memory_of(x)
        if memory is not None:
            regions.append(Region(*memory, f"argument {p.name}"))
    report = launch(
        module,
        kernel,
        _three(grid),
        _three(block),
        [_pack(p, x) for p, x in zip(program.kernel.entry.parameters, args, strict=True)],
        cluster=_three(cluster),
        dynamic_shared=shared,
        regions=regions,
        strict=bool(regions),
        options=Options(seed, schedule, check, profile, instruction_limit),
    )
    if report.hazards and raise_on_hazard:
        raise HazardError(f"{len(report.hazards)} hazards\n" + "\n".join(str(h) for h in report.hazards), report)
    return report


def _three(x: Sequence[int] | int) -> tuple[int, int, int]:
    t = (x,) if isinstance(x, int) else tuple(x)
    return (*t, *(1,) * (3 - len(t)))  # type: ignore[return-value]
