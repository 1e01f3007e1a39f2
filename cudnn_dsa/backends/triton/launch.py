"""Compiled kernels, and the short way to launch them.

Triton's own launch path (``kernel[grid](...)``) inspects every argument on every call. Here a launch computes a small
key (dtype and 16-byte alignment of each tensor, nothing of the sizes), finds the compiled kernel under it and calls it
with a raw stream handle. A kernel that is missing is compiled, never tuned. In Triton's interpreter there is nothing to
compile and the kernel is called as it is.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton import knobs
from triton.runtime.errors import OutOfResources, PTXASError

MAX_COMPILED = 512  # kernels kept loaded; each is a few hundred KB on the device

# What a configuration that does not fit a device raises.
DOES_NOT_FIT = (OutOfResources, PTXASError)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1 before the first import)."""
    return bool(knobs.runtime.interpret)


class Pointer:
    """Stands in for a tensor when a kernel is compiled: a dtype and an address modulo 16."""

    def __init__(self, dtype: torch.dtype, remainder: int = 0):
        self.dtype = dtype
        self.remainder = remainder

    def data_ptr(self) -> int:
        return self.remainder


def signature(args: tuple) -> tuple[Any, ...]:
    """What compilation sees of the arguments: (dtype, alignment) of tensors, the type of numbers, None."""
    return tuple(map(_seen, args))


def _seen(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor | Pointer):
        return argument.dtype, argument.data_ptr() % 16
    return None if argument is None else type(argument)


@functools.lru_cache(maxsize=MAX_COMPILED)
def compiled(kernel: Any, device: int, args: tuple, constants: tuple, options: tuple) -> Any:
    """The kernel for a signature, loaded on ``device``.

    Args:
        kernel: a ``triton.jit`` function whose constexpr arguments come last.
        device: index of a CUDA device.
        args: see :func:`signature`.
        constants: the constexpr arguments, (name, value) in order.
        options: of the compiler, (name, value): num_warps, num_stages.

    Raises:
        OutOfResources: it needs more shared memory or threads than the device has.
    """
    stand_ins = [Pointer(*a) if isinstance(a, tuple) else None if a is None else a(7) for a in args]
    with torch.cuda.device(device):
        result = kernel.warmup(*stand_ins, grid=(1,), **dict(constants), **dict(options))
        result[(1, 1, 1)]  # loads the module: the first launch may be inside a graph capture
    return result


def launch(kernel: Any, grid: int, args: tuple, constants: tuple, options: tuple, stream: Any) -> None:
    """Launch ``grid`` programs on ``stream`` (a torch stream; None in the interpreter)."""
    if stream is None:
        kernel[(grid,)](*args, **dict(constants))
        return
    function = compiled(kernel, stream.device.index, signature(args), constants, options)
    function[(grid, 1, 1)](*args, *(value for _, value in constants), stream=stream.cuda_stream)
