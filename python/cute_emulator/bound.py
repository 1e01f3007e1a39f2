"""A lower bound on a launch's time from unit rates: a model, not a measurement.

Each unit's work (counted by the emulator) is divided by its peak rate on the whole device; the largest quotient is the
bound. Latency, waves, occupancy and clocks below the boost clock are not modelled, so a kernel cannot be expected to
reach it. Rates are the vendor's published dense peaks and memory bandwidths; the rates per SM and cycle of the special
function units, shared memory and tensor memory are the architecture documents'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .report import LaunchReport


@dataclass(frozen=True)
class Device:
    name: str
    sms: int
    clock: float  # Hz
    f16_flops: float  # dense, per second
    tf32_flops: float
    f8_flops: float
    memory: float  # bytes per second
    exp: int  # per SM and cycle
    shared: int  # bytes per SM and cycle
    issue: int = 4  # warp instructions per SM and cycle


DEVICES = {
    "B200": Device("B200", 148, 1.85e9, 2.25e15, 1.1e15, 4.5e15, 8.0e12, 16, 128),
    "H200": Device("H200", 132, 1.83e9, 0.989e15, 0.494e15, 1.979e15, 4.8e12, 16, 128),
}


@dataclass(frozen=True)
class Bound:
    device: str
    seconds: float
    unit: str
    parts: dict[str, float]

    def __str__(self) -> str:
        parts = ", ".join(f"{k} {1e6 * v:.3g}" for k, v in sorted(self.parts.items(), key=lambda x: -x[1]))
        head = f"modelled bound on {self.device} (a model, every SM busy): {1e6 * self.seconds:.3g} us"
        return f"{head}, by {self.unit} [us: {parts}]"


def bound(launch: LaunchReport, device: str = "B200") -> Bound:
    """The modelled bound of one launch, in seconds, with the share of each unit."""
    d, c = DEVICES[device], launch.counters
    per_cycle = d.sms * d.clock
    tensor = 0.0
    for shape, (_, flops) in launch.mma.items():
        rate = (
            d.tf32_flops
            if "tf32" in shape
            else d.f8_flops
            if any(x in shape for x in ("f8", "e4m3", "e5m2"))
            else d.f16_flops
        )
        tensor += flops / rate
    memory_bytes = (
        c["global_load"]
        + c["global_store"]
        + c["copy_async"]
        + c["tma_load"]
        + c["tma_store"]
        + 2 * c["tma_reduce"]
        + c["atomic_bytes"]
    )
    shared_bytes = (
        c["shared_load"] + c["shared_store"] + c["copy_async"] + c["tma_load"] + c["tma_store"] + c["bulk_dsmem"]
    )
    parts = {
        "tensor cores": tensor,
        "device memory (no reuse in L2)": memory_bytes / d.memory,
        "shared memory": shared_bytes / (d.shared * per_cycle),
        "exponentials": c["exp"] / (d.exp * per_cycle),
        "instruction issue": c["instructions"] / (d.issue * per_cycle),
    }
    unit = max(parts, key=lambda k: parts[k])
    return Bound(d.name, parts[unit], unit, parts)
