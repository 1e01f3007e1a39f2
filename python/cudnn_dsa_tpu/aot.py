"""Ahead-of-time compilation for a TPU on a machine without one, and what can be read off the result.

The TPU compiler comes with libtpu (the ``tpu-aot`` extra), under its own terms; nothing else in this package needs it.
What it reports: whether a kernel compiles and fits, the memory of the whole program, the final instruction schedules
and the order of communication and kernels. It reports no times.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cudnn_dsa_tpu.bundles import Schedule, read_dump
from cudnn_dsa_tpu.chips import Chip


class MissingCompiler(RuntimeError):
    """libtpu, the TPU compiler, is not installed."""


def prepare(dump: str | os.PathLike | None = None) -> None:
    """Set what libtpu reads when it is loaded; call it before the first compilation of the process.

    Args:
        dump: folder that receives the compiler's schedules; None for no dump.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise MissingCompiler("ahead-of-time compilation needs libtpu: pip install 'cudnn-dsa[tpu-aot]'")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # or concurrent processes abort on a lock file
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no metadata server to ask
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    if dump is not None:
        llo, mosaic = pathlib.Path(dump, "llo"), pathlib.Path(dump, "mosaic")
        # Without a folder of its own for Mosaic, concurrent processes share one and abort on its lock.
        flags = f"--xla_jf_dump_to={llo} --xla_jf_dump_llo_text=true --xla_mosaic_dump_to={mosaic}"
        os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()


def topology_mesh(chip: Chip, shape: Sequence[int] = (1,), axes: Sequence[str] = ("ring",)) -> Mesh:
    """A mesh of devices that exist only for the compiler."""
    count = int(np.prod(shape))
    devices = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology_of(count)).devices
    return Mesh(np.array(devices[:count]).reshape(tuple(shape)), tuple(axes))


def compile_for(mesh: Mesh, function: Callable, *operands: tuple[jax.ShapeDtypeStruct, P]) -> Any:
    """``function`` compiled for the mesh's chips; an operand is a shape and how it is sharded."""
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)) for x, spec in operands]
    # The abstract mesh tells index maps and current_chip() what they are traced for; without it they ask the CPU.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(function).trace(*structs).lower(lowering_platforms=("tpu",))
    return lowered.compile()


def overlap(hlo: str) -> str:
    """The order of the compiled program: S starts a permute, D waits for one, K is a Pallas kernel."""
    entry = hlo[hlo.index("\nENTRY ") :]
    letters = {"collective-permute-start": "S", "collective-permute-done": "D"}
    order = ""
    for line in entry.splitlines():
        found = re.search(r" (collective-permute-start|collective-permute-done|custom-call)\(", line)
        if found and found.group(1) in letters:
            order += letters[found.group(1)]
        elif found and '"tpu_custom_call"' in line:
            order += "K"
    return order


@dataclasses.dataclass(frozen=True)
class Report:
    """What the compiler said of a program.

    Attributes:
        temporary_bytes, argument_bytes, output_bytes: memory of one device.
        order: see :func:`overlap`.
        schedules: of the Pallas kernels, where a dump was asked for.
    """

    temporary_bytes: int
    argument_bytes: int
    output_bytes: int
    order: str
    schedules: tuple[Schedule, ...]


def report(compiled: Any, dump: str | os.PathLike | None = None, kernel: str = "splash") -> Report:
    """The report of a compiled program; ``dump`` as given to :func:`prepare`."""
    memory = compiled.memory_analysis()
    return Report(
        temporary_bytes=memory.temp_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        order=overlap(compiled.as_text()),
        schedules=tuple(read_dump(pathlib.Path(dump, "llo"), kernel)) if dump is not None else (),
    )
