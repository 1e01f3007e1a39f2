"""cute_emulator: runs compiled CuTe DSL kernels (Hopper and Blackwell) on a CPU and checks them for hazards.

``emulate`` runs CuTe DSL calls on CPU tensors, ``run_ptx`` a kernel from PTX text. See docs/emulator.md.
"""

from .device import EmulatedDevice, device
from .dsl import AsCuda, Gpu, emulate
from .errors import EmulatorError, ExecutionError, HazardError, LaunchError, PtxSyntaxError, UnsupportedInstruction
from .report import Hazard, LaunchReport, Report
from .run import run_ptx

__all__ = [
    "AsCuda",
    "EmulatedDevice",
    "EmulatorError",
    "ExecutionError",
    "Gpu",
    "Hazard",
    "HazardError",
    "LaunchError",
    "LaunchReport",
    "PtxSyntaxError",
    "Report",
    "UnsupportedInstruction",
    "device",
    "emulate",
    "run_ptx",
]
