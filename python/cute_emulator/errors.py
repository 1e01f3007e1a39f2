"""What the emulator raises."""

from __future__ import annotations


class EmulatorError(RuntimeError):
    """Base of everything the emulator raises."""


class PtxSyntaxError(EmulatorError):
    """PTX text that the front end cannot read; the message names the line."""


class UnsupportedInstruction(EmulatorError):
    """An opcode, a modifier or an operand form that the emulator does not model; the message names the line."""


class LaunchError(EmulatorError):
    """A launch that cannot start: unknown kernel, wrong arguments, impossible dimensions."""


class ExecutionError(EmulatorError):
    """The kernel did something illegal: a bad address, a bad descriptor, an over-arrival, a deadlock."""


class HazardError(EmulatorError):
    """The run finished, but the checker found hazards; ``report`` has them."""

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report
