"""Runs host functions of CuTe kernels in the emulator, on CPU tensors."""

import pytest
import torch

pytest.importorskip("cutlass")

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_ptr

from cute_emulator import emulate

DTYPES = {
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.float32: cutlass.Float32,
    torch.int32: cutlass.Int32,
}


def argument(value):
    """A tensor as a pointer to global memory, a number as a 32-bit scalar, (dtype,) as a null pointer."""
    if isinstance(value, torch.Tensor):
        assert value.is_contiguous()
        return make_ptr(DTYPES[value.dtype], value.data_ptr(), cute.AddressSpace.gmem, assumed_align=16)
    if isinstance(value, tuple):
        return make_ptr(DTYPES[value[0]], 0, cute.AddressSpace.gmem, assumed_align=16)
    return cutlass.Float32(value) if isinstance(value, float) else cutlass.Int32(value)


COMPILED = {}


def run(kernel, *values, arch="sm_90a", key=None, **options):
    """Call a host function; every tensor among ``values`` is a region that the kernel may touch.

    ``key`` names what is compiled, so that it is compiled once. Returns the emulator's device, without hazards.
    """
    arguments = [argument(value) for value in values]
    with emulate(arch, **options) as gpu:
        compiled = COMPILED.get(key)
        if compiled is None:
            compiled = cute.compile(kernel, *arguments)
            if key is not None:
                COMPILED[key] = compiled
        gpu.track(**{f"tensor{i}": value for i, value in enumerate(values) if isinstance(value, torch.Tensor)})
        gpu.strict = True
        compiled(*arguments)
    assert gpu.report.hazards == []
    return gpu
