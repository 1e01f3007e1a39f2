"""The fifth-generation tensor core: single PTX instructions (PTX ISA, "TensorCore 5th Generation Family Instructions").

Addresses of tensor memory are ``Int32``, as the hardware reads them: lane << 16 | column. Shared memory is addressed by
``Int32`` in its window.
"""

# mypy: ignore-errors
# (Device functions: types are the DSL's.)

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.arch import inline_ptx
from cutlass.cutlass_dsl import dsl_user_op

LANE = 1 << 16
REGISTERS = {"32x32b": 1, "16x256b": 4}  # of a lane, per repetition


@dsl_user_op
def alloc(holder: cute.Pointer, columns: int, *, loc=None, ip=None) -> None:
    """By one warp; the address is written to ``holder``. ``columns``: a power of two from 32 on."""
    inline_ptx(
        f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [{{$r0}}], {columns};"
        " tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
        read_only_args=[holder.toint(loc=loc, ip=ip)],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def dealloc(tmem: Int32, columns: int, *, loc=None, ip=None) -> None:
    """By the warp that allocated."""
    inline_ptx(
        f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 {{$r0}}, {columns};", read_only_args=[tmem], loc=loc, ip=ip
    )


@dsl_user_op
def mma(tmem: Int32, a, b, instruction: int, accumulate: Int32, *, loc=None, ip=None) -> None:
    """By one thread: a product of 16-bit operands in shared memory (their matrix descriptors), K = 16."""
    inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r4}, 0;"
        " tcgen05.mma.cta_group::1.kind::f16 [{$r0}], {$r1}, {$r2}, {$r3}, p; }",
        read_only_args=[tmem, a, b, Int32(instruction), accumulate],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def commit(barrier: cute.Pointer, *, loc=None, ip=None) -> None:
    """One arrival at ``barrier`` once everything that this thread gave the tensor core is done."""
    inline_ptx(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{$r0}];",
        read_only_args=[barrier.toint(loc=loc, ip=ip)],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def fence(side: str, *, loc=None, ip=None) -> None:
    """``side``: "before" or "after" the barrier that orders this thread's tensor-memory accesses with another one's."""
    inline_ptx(f"tcgen05.fence::{side}_thread_sync;", loc=loc, ip=ip)


@dsl_user_op
def load(tmem: Int32, shape: str, repeat: int, *, loc=None, ip=None) -> tuple:
    """By a warp, from its quarter of the lanes: fp32 registers, waited for.

    - "32x32b": register j is (lane, column j);
    - "16x256b": register 4a + 2b + e is (lane/4 + 8b, column 8a + 2(lane%4) + e), of 16 lanes from ``tmem`` on.

    The wait is part of the same statement, so that no compiler can move a use of the registers before it.
    """
    count = repeat * REGISTERS[shape]
    registers = ", ".join(f"{{$w{i}}}" for i in range(count))
    return inline_ptx(
        f"tcgen05.ld.sync.aligned.{shape}.x{repeat}.b32 {{{registers}}}, [{{$r0}}]; tcgen05.wait::ld.sync.aligned;",
        write_only_types=[Float32] * count,
        read_only_args=[tmem],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def store(tmem: Int32, values, *, loc=None, ip=None) -> None:
    """By a warp, to its quarter of the lanes: register j to (lane, column j); complete when it returns."""
    registers = ", ".join(f"{{$r{1 + i}}}" for i in range(len(values)))
    inline_ptx(
        f"tcgen05.st.sync.aligned.32x32b.x{len(values)}.b32 [{{$r0}}], {{{registers}}}; tcgen05.wait::st.sync.aligned;",
        read_only_args=[tmem, *values],
        loc=loc,
        ip=ip,
    )
