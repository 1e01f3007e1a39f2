"""Single PTX instructions of sm_100a as device functions, on shared-memory and tensor-memory addresses.

Addresses of shared memory are ``Int32`` (shared window), of global memory ``Int64``, of tensor memory ``Int32`` as the
hardware reads them: lane << 16 | column.
"""

# mypy: ignore-errors
# (Device functions: types are the DSL's.)

from cutlass import Float32, Int32
from cutlass.cute.arch import inline_ptx
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def mbarrier_init(barrier, count: int, *, loc=None, ip=None):
    inline_ptx(f"mbarrier.init.shared.b64 [{{$r0}}], {count};", read_only_args=[barrier], loc=loc, ip=ip)


@dsl_user_op
def mbarrier_arrive(barrier, *, loc=None, ip=None):
    inline_ptx("mbarrier.arrive.shared.b64 _, [{$r0}];", read_only_args=[barrier], loc=loc, ip=ip)


@dsl_user_op
def mbarrier_try_wait(barrier, parity, *, loc=None, ip=None):
    """Int32: not 0 if the phase of that parity is complete; may suspend the thread for a while first."""
    return inline_ptx(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [{$r0}], {$r1}; selp.b32 {$w0}, 1, 0, p; }",
        write_only_types=[Int32],
        read_only_args=[barrier, parity],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def copy_16_bytes(shared, source, size, *, loc=None, ip=None):
    """cp.async of 16 bytes past L1; of them ``size`` (0 or 16) are read, the rest is zero."""
    inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[shared, source, size],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def load_shared_int(address, *, loc=None, ip=None):
    return inline_ptx(
        "ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address], loc=loc, ip=ip
    )


@dsl_user_op
def load_shared_int4(address, *, loc=None, ip=None):
    return inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def store_shared(address, value, *, loc=None, ip=None):
    """32 bits."""
    inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, value], loc=loc, ip=ip)


@dsl_user_op
def load_global_int(address, *, loc=None, ip=None):
    return inline_ptx(
        "ld.global.nc.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address], loc=loc, ip=ip
    )


@dsl_user_op
def load_global_float(address, *, loc=None, ip=None):
    return inline_ptx(
        "ld.global.nc.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address], loc=loc, ip=ip
    )


@dsl_user_op
def reduce_add(address, value, *, loc=None, ip=None):
    """fp32 addition in global memory, without a result."""
    inline_ptx("red.relaxed.gpu.global.add.f32 [{$r0}], {$r1};", read_only_args=[address, value], loc=loc, ip=ip)


@dsl_user_op
def store_element(address, value, element: str, *, loc=None, ip=None):
    """An fp32 value rounded to ``element`` ("bf16" or "f16") into global memory."""
    inline_ptx(
        f"{{ .reg .b16 h; cvt.rn.{element}.f32 h, {{$r1}}; st.global.b16 [{{$r0}}], h; }}",
        read_only_args=[address, value],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def pack_pair(low, high, element: str, *, loc=None, ip=None):
    """Two fp32 values rounded to ``element``, the first one in the low half."""
    return inline_ptx(
        f"cvt.rn.{element}x2.f32 {{$w0}}, {{$r1}}, {{$r0}};",
        write_only_types=[Int32],
        read_only_args=[low, high],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def exp2(x, *, loc=None, ip=None):
    return inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x], loc=loc, ip=ip)


@dsl_user_op
def tcgen05_alloc(holder, columns: int, *, loc=None, ip=None):
    inline_ptx(
        f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [{{$r0}}], {columns};",
        read_only_args=[holder],
        loc=loc,
        ip=ip,
    )
    inline_ptx("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;", loc=loc, ip=ip)


@dsl_user_op
def tcgen05_dealloc(tmem, columns: int, *, loc=None, ip=None):
    inline_ptx(
        f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 {{$r0}}, {columns};", read_only_args=[tmem], loc=loc, ip=ip
    )


@dsl_user_op
def tcgen05_mma(tmem, a, b, instruction: int, accumulate, *, loc=None, ip=None):
    """One product of 16-bit operands in shared memory (descriptors ``a``, ``b``), K = 16, by the calling thread."""
    inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r4}, 0; tcgen05.mma.cta_group::1.kind::f16 [{$r0}], {$r1}, {$r2}, {$r3}, p; }",
        read_only_args=[tmem, a, b, Int32(instruction), accumulate],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def tcgen05_commit(barrier, *, loc=None, ip=None):
    """One arrival at ``barrier`` once everything that this thread gave the tensor core is done."""
    inline_ptx(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{$r0}];",
        read_only_args=[barrier],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def tcgen05_fence(side: str, *, loc=None, ip=None):
    """``side``: "before" or "after" the synchronisation between threads that orders tensor-memory accesses."""
    inline_ptx(f"tcgen05.fence::{side}_thread_sync;", loc=loc, ip=ip)


@dsl_user_op
def tcgen05_load(tmem, shape: str, repeat: int, *, loc=None, ip=None):
    """``shape`` "32x32b" (one register a repeat) or "16x256b" (four): a tuple of Float32, waited for.

    The wait is part of the same statement, so that no compiler can move a use of the registers before it.
    """
    count = repeat * {"32x32b": 1, "16x256b": 4}[shape]
    registers = ", ".join(f"{{$w{i}}}" for i in range(count))
    return inline_ptx(
        f"tcgen05.ld.sync.aligned.{shape}.x{repeat}.b32 {{{registers}}}, [{{$r0}}]; tcgen05.wait::ld.sync.aligned;",
        write_only_types=[Float32] * count,
        read_only_args=[tmem],
        loc=loc,
        ip=ip,
    )


