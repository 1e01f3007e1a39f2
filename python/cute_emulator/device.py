"""``device``: kernels of ``cudnn_dsa.artifact`` launched here instead of on a GPU, from their launch description.

Where ``emulate`` runs a kernel through the DSL's host code, this runs it through the host code that a user's process
has: a backend's, which packs the parameters itself. No DSL is needed for a kernel that is compiled already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .errors import HazardError
from .launch import Options, Region, launch, load
from .report import Report
from .run import memory_of


class EmulatedDevice:
    """A ``cudnn_dsa.artifact.driver.Device`` on the CPU. ``report`` holds what was launched so far.

    Args:
        arch: "sm_90a", "sm_100a" or another target that artifacts are compiled for.
        options: how to run.
        multiprocessors: how many the device says it has: what the grid of a persistent kernel follows.
        raise_on_hazard: raise :class:`HazardError` from a launch in which the checker found hazards.
        transform: applied to the PTX of each kernel: how mutation tests break one.
    """

    def __init__(
        self,
        arch: str,
        options: Options,
        multiprocessors: int,
        raise_on_hazard: bool,
        transform: Callable[[str], str] | None,
    ) -> None:
        from cudnn_dsa.artifact.driver import Memory

        self.architectures: tuple[str, ...] = (arch,)
        # A verdict over an altered kernel says nothing about the kernel.
        self.kind = f"emulator {arch}" + (", altered kernels" if transform else "")
        self.multiprocessors = multiprocessors
        self.memory = Memory()
        self.report = Report()
        self._options = options
        self._raise_on_hazard = raise_on_hazard
        self._transform = transform

    def load(self, artifact: Any) -> Any:
        return load(self._transform(artifact.ptx) if self._transform else artifact.ptx), artifact

    def launch(self, handle: Any, config: Any, block: bytearray, stream: Any, values: Mapping[str, Any]) -> None:
        module, artifact = handle
        sizes = [argument.layout[0] for argument in artifact.launch.arguments]
        offsets = artifact.launch.offsets()
        parameters = [bytes(block[at : at + size]) for at, size in zip(offsets, sizes, strict=False)]
        regions = [Region(*memory, name) for name, value in values.items() if (memory := memory_of(value)) is not None]
        report = launch(
            module,
            artifact.entry,
            config.grid,
            config.block,
            parameters,
            cluster=config.cluster,
            dynamic_shared=config.shared,
            regions=regions,
            strict=bool(regions),
            options=self._options,
        )
        self.report.launches.append(report)
        if report.hazards and self._raise_on_hazard:
            raise HazardError(f"{len(report.hazards)} hazards\n" + "\n".join(map(str, report.hazards)), report)


@contextmanager
def device(
    arch: str = "sm_100a",
    *,
    multiprocessors: int = 4,
    raise_on_hazard: bool = True,
    transform: Callable[[str], str] | None = None,
    **options: Any,
) -> Iterator[EmulatedDevice]:
    """Inside the block the CuTe backends of cudnn_dsa take CPU tensors and launch into the emulator.

    Call a backend directly (``backend.backward(problem, tensors, workspace, None)``): the contract still asks for CUDA
    tensors. Arguments are those of :class:`EmulatedDevice`; ``options`` are fields of
    :class:`cute_emulator.launch.Options`: seed, schedule, check, profile, instruction_limit.
    """
    from cudnn_dsa.artifact import driver

    emulated = EmulatedDevice(arch, Options(**options), multiprocessors, raise_on_hazard, transform)
    with driver.install(emulated):
        yield emulated
