"""The lowering of the opcodes, one module for each chapter of the PTX ISA's instruction set."""

from . import (  # noqa: F401
    arithmetic,
    async_copy,
    control,
    conversion,
    matrix,
    memory,
    synchronization,
    tcgen05,
    warp,
    wgmma,
)
