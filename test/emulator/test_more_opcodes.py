"""Opcodes that the cuDNN kernels do not use and the DSL can emit: each against Python, NumPy or the ISA's text."""

from __future__ import annotations

import numpy as np
import pytest
from emulator_ptx import HEADER, apply, bits16, bits32, f32, hostile_f32, integers, kernel

from cute_emulator import ExecutionError, HazardError, UnsupportedInstruction, run_ptx

SEEDS = range(4)
MASK = (1 << 32) - 1


def signed(x: int, n: int) -> int:
    return x - (1 << n) if x >> (n - 1) else x


def words(out: np.ndarray, body: str, threads: int, *inputs: np.ndarray, shared: str = "", **options) -> np.ndarray:
    """Runs the body, then stores %r20 of each thread."""
    body += "  mul.wide.u32 %d20, %r0, 4;\n  add.u64 %d20, %q0, %d20;\n  st.global.b32 [%d20], %r20;\n"
    run_ptx(kernel(body, 1 + len(inputs), shared=shared), 1, threads, [out, *inputs], **options)
    return out


# ------------------------------------------------------------------------------------------------ arithmetic


@pytest.mark.parametrize("operation", ["add", "sub"])
def test_carry_chains(operation: str) -> None:
    """128 bits in four words."""
    rng = np.random.default_rng(3)
    a, b = ([int.from_bytes(rng.bytes(16), "little") for _ in range(32)] for _ in range(2))
    a[:4], b[:4] = [0, (1 << 128) - 1, 1 << 127, 0], [1, 1, 1 << 127, 0]
    a[4], b[4] = (1 << 96) - 1, (1 << 96) - 1
    data = [np.array([[x >> (32 * i) & MASK for i in range(4)] for x in v], np.uint32) for v in (a, b)]
    body = "  mul.wide.u32 %d1, %r0, 16;\n"
    for i, first in enumerate((1, 5)):
        registers = ", ".join(f"%r{first + j}" for j in range(4))
        body += f"  add.u64 %d2, %q{i + 1}, %d1;\n  ld.global.v4.b32 {{{registers}}}, [%d2];\n"
    body += f"  {operation}.cc.u32 %r9, %r1, %r5;\n  {operation}c.cc.u32 %r10, %r2, %r6;\n"
    body += f"  {operation}c.cc.u32 %r11, %r3, %r7;\n  {operation}c.u32 %r12, %r4, %r8;\n"
    body += "  add.u64 %d2, %q0, %d1;\n  st.global.v4.b32 [%d2], {%r9, %r10, %r11, %r12};\n"
    out = np.zeros((32, 4), np.uint32)
    run_ptx(kernel(body, 3), 1, 32, [out, *data])
    for x, y, row in zip(a, b, out.tolist(), strict=True):
        expected = (x + y if operation == "add" else x - y) % (1 << 128)
        assert sum(w << (32 * i) for i, w in enumerate(row)) == expected


def test_multiply_add_with_carry() -> None:
    """64-bit a * b + c from 32-bit parts, by mad.lo.cc and madc.hi."""
    rng = np.random.default_rng(4)
    a, b, c = (integers(rng, 32, 64) for _ in range(3))
    body = ""
    for i in range(3):
        body += f"  add.u64 %q15, %q{i + 1}, %o;\n  ld.global.b32 %r{i + 1}, [%q15];\n"
    body += "  mad.lo.cc.u32 %r4, %r1, %r2, %r3;\n  madc.hi.u32 %r5, %r1, %r2, 0;\n  mov.b64 %d1, {%r4, %r5};\n"
    body += "  add.u64 %q15, %q0, %o;\n  st.global.b64 [%q15], %d1;\n"
    out = np.zeros(64, np.uint64)
    run_ptx(kernel(body, 4), 1, 64, [out, a, b, c])
    assert out.tolist() == [int(x) * int(y) + int(z) for x, y, z in zip(a, b, c, strict=True)]


@pytest.mark.parametrize("types", ["u32.u32", "s32.s32", "u32.s32", "s32.u32"])
def test_dot_products_of_bytes(types: str) -> None:
    rng = np.random.default_rng(5)
    a, b, c = (integers(rng, 32) for _ in range(3))
    sa, sb = (t[0] == "s" for t in types.split("."))

    def part(x: int, at: int, n: int, sign: bool) -> int:
        v = int(x) >> at & ((1 << n) - 1)
        return signed(v, n) if sign else v

    got = apply(f"dp4a.{types}", "b32", ["b32"] * 3, a, b, c)
    for x, y, z, r in zip(a, b, c, got, strict=True):
        assert r == (int(z) + sum(part(x, 8 * i, 8, sa) * part(y, 8 * i, 8, sb) for i in range(4))) & MASK
    for which, first in (("lo", 0), ("hi", 16)):
        got = apply(f"dp2a.{which}.{types}", "b32", ["b32"] * 3, a, b, c)
        for x, y, z, r in zip(a, b, c, got, strict=True):
            total = sum(part(x, 16 * i, 16, sa) * part(y, first + 8 * i, 8, sb) for i in range(2))
            assert r == (int(z) + total) & MASK


@pytest.mark.parametrize("name", ["min", "max"])
def test_minimum_of_three(name: str) -> None:
    rng = np.random.default_rng(6)
    a, b, c = (hostile_f32(rng) for _ in range(3))
    f = np.fmin if name == "min" else np.fmax
    got = f32(apply(f"{name}.f32", "f32", ["f32"] * 3, *map(bits32, (a, b, c))))
    np.testing.assert_array_equal(got, f(f(a, b), c))
    got = f32(apply(f"{name}.NaN.f32", "f32", ["f32"] * 3, *map(bits32, (a, b, c))))
    g = np.minimum if name == "min" else np.maximum
    np.testing.assert_array_equal(got, g(g(a, b), c))


@pytest.mark.parametrize(("t", "lo", "hi"), [("u16", 0, 65535), ("s16", -32768, 32767)])
def test_packing_conversion(t: str, lo: int, hi: int) -> None:
    rng = np.random.default_rng(7)
    a, b = integers(rng, 32), integers(rng, 32) % 70000
    got = apply(f"cvt.pack.sat.{t}.s32", "b32", ["b32"] * 2, a, b)
    for x, y, r in zip(a, b, got, strict=True):
        x, y = (min(max(signed(int(v), 32), lo), hi) & 0xFFFF for v in (x, y))
        assert r == (x << 16 | y)


@pytest.mark.parametrize(("t", "lo", "hi"), [("u8", 0, 255), ("s8", -128, 127)])
def test_packing_conversion_of_bytes(t: str, lo: int, hi: int) -> None:
    rng = np.random.default_rng(8)
    a, b, c = integers(rng, 32) % 400, integers(rng, 32), integers(rng, 32)
    got = apply(f"cvt.pack.sat.{t}.s32.b32", "b32", ["b32"] * 3, a, b, c)
    for x, y, z, r in zip(a, b, c, got, strict=True):
        x, y = (min(max(signed(int(v), 32), lo), hi) & 0xFF for v in (x, y))
        assert r == (int(z) << 16 | x << 8 | y) & MASK


def test_e4m3_from_halves_is_e4m3_from_their_fp32_values() -> None:
    rng = np.random.default_rng(9)
    low, high = (np.asarray(rng.standard_normal(256) * 2.0 ** rng.integers(-12, 12, 256), np.float16) for _ in range(2))
    packed = bits16(high) << np.uint64(16) | bits16(low)
    for t in ("e4m3x2", "e5m2x2"):
        got = apply(f"cvt.rn.satfinite.{t}.f16x2", "b16", ["b32"], packed)
        expected = apply(f"cvt.rn.satfinite.{t}.f32", "b16", ["f32", "f32"], bits32(high), bits32(low))
        np.testing.assert_array_equal(got & np.uint64(0xFFFF), expected & np.uint64(0xFFFF))


def test_halves_to_doubles_are_exact() -> None:
    every = np.arange(65536, dtype=np.uint64)
    got = apply("cvt.f64.f16", "f64", ["b16"], every).view(np.float64)
    np.testing.assert_array_equal(got, every.astype(np.uint16).view(np.float16).astype(np.float64))
    got = apply("cvt.f64.bf16", "f64", ["b16"], every).view(np.float64)
    np.testing.assert_array_equal(got, (every.astype(np.uint32) << 16).view(np.float32).astype(np.float64))


@pytest.mark.parametrize("t", ["f16", "bf16"])
def test_scalar_half_atomics(t: str) -> None:
    """Small integers: exact in both formats whatever the order."""
    one = {"f16": 0x3C00, "bf16": 0x3F80}[t]
    total = {"f16": int(np.float16(96).view(np.uint16)), "bf16": 0x42C0}[t]
    x = np.zeros(4, np.uint16)
    body = f"  mov.b32 %r1, {one};\n  cvt.u16.u32 %h1, %r1;\n  red.global.add.noftz.{t} [%q1+2], %h1;\n"
    words(np.zeros(96, np.uint32), body + "  mov.b32 %r20, 0;\n", 96, x)
    assert x.tolist() == [0, total, 0, 0]


# ------------------------------------------------------------------------------------------------ warps and CTAs


def test_movmatrix_transposes() -> None:
    x = np.random.default_rng(0).integers(0, 1 << 16, (8, 8)).astype(np.uint16)
    body = "  mul.wide.u32 %d1, %r0, 4;\n  add.u64 %d1, %q1, %d1;\n  ld.global.b32 %r1, [%d1];\n"
    body += "  movmatrix.sync.aligned.m8n8.trans.b16 %r20, %r1;\n"
    got = words(np.zeros(32, np.uint32), body, 32, x)
    np.testing.assert_array_equal(got.view(np.uint16).reshape(8, 8), x.T)


@pytest.mark.parametrize(
    ("operation", "limit", "expected"),
    [("popc.u32", 70, 70), ("and.pred", 128, 1), ("and.pred", 127, 0), ("or.pred", 1, 1), ("or.pred", 0, 0)],
)
def test_barrier_reduction(operation: str, limit: int, expected: int) -> None:
    target = "%r20" if operation[0] == "p" else "%p2"
    body = f"  setp.lt.u32 %p1, %r0, {limit};\n  barrier.red.{operation} {target}, 3, 128, %p1;\n"
    if target == "%p2":
        body += "  selp.b32 %r20, 1, 0, %p2;\n"
    for seed in SEEDS:
        assert (words(np.zeros(128, np.uint32), body, 128, seed=seed) == expected).all()


def test_concurrent_shared_atomics_are_no_hazard_and_a_plain_read_among_them_is() -> None:
    shared = ".shared .align 16 .b32 total;\n"
    body = "  mov.u32 %r1, total;\n  setp.eq.u32 %p1, %r0, 0;\n  mov.b32 %r2, 0;\n  @%p1 st.shared.b32 [%r1], %r2;\n"
    body += "  bar.sync 0;\n  red.shared.add.u32 [%r1], %r0;\n  bar.sync 0;\n  ld.shared.b32 %r20, [%r1];\n"
    for seed in SEEDS:
        assert (words(np.zeros(256, np.uint32), body, 256, shared=shared, seed=seed) == 255 * 128).all()
    first, second = body.split("  red")
    for broken in (
        first.replace("  bar.sync 0;\n", "") + "  red" + second,
        first + "  red" + second.replace("  bar.sync 0;\n", ""),
    ):
        with pytest.raises(HazardError, match="without a wait"):
            words(np.zeros(256, np.uint32), broken, 256, shared=shared)


def test_printf(capsys) -> None:
    text = f"""{HEADER}
.extern .func (.param .b32 r) vprintf (.param .b64 f, .param .b64 a);
.global .align 1 .b8 format[24] = {{37, 100, 32, 37, 46, 50, 102, 32, 37, 120, 32, 37, 108, 108, 117, 33, 10, 0}};
.visible .entry k()
{{
  .local .align 8 .b8 depot[32];
  .reg .b32 %r<8>; .reg .b64 %d<8>; .reg .f64 %g<2>; .reg .pred %p<2>;
  mov.u32 %r0, %tid.x;
  setp.ne.u32 %p1, %r0, 5;
  @%p1 bra END;
  mov.u64 %d0, depot;
  cvta.local.u64 %d1, %d0;
  mov.b32 %r1, -7;
  st.local.b32 [%d0], %r1;
  mov.f64 %g1, 0d4009000000000000;
  st.local.f64 [%d0+8], %g1;
  st.local.b32 [%d0+16], 255;
  mov.b64 %d3, 0xFFFFFFFFFF;
  st.local.b64 [%d0+24], %d3;
  mov.u64 %d2, format;
  {{
  .param .b64 param0;
  st.param.b64 [param0], %d2;
  .param .b64 param1;
  st.param.b64 [param1], %d1;
  .param .b32 retval0;
  call.uni (retval0), vprintf, (param0, param1);
  ld.param.b32 %r2, [retval0+0];
  }}
END:
  ret;
}}
"""
    run_ptx(text, 1, 32, [])
    assert capsys.readouterr().out == "-7 3.12 ff 1099511627775!\n"


def test_other_functions_are_refused() -> None:
    with pytest.raises(UnsupportedInstruction, match="functions are not modelled"):
        run_ptx(kernel("  call.uni malloc, (%r1);\n", 1), 1, 32, [np.zeros(1)])


# ------------------------------------------------------------------------------------------------ asynchronous stores

ASYNC = f"""{HEADER}
.shared .align 16 .b8 buffer[1024];
.shared .align 8 .b64 bar;
.visible .entry k(.param .u64 p0)
{{
  .reg .pred %p<4>; .reg .b32 %r<32>; .reg .b64 %d<8>;
  ld.param.u64 %d0, [p0];
  mov.u32 %r0, %tid.x;
  mov.u32 %r1, %cluster_ctarank;
  mov.u32 %r2, buffer;
  mov.u32 %r3, bar;
  shl.b32 %r4, %r0, 3;
  add.u32 %r5, %r2, %r4;
  mov.b32 %r6, 0;
  st.shared.v2.b32 [%r5], {{%r6, %r6}};
  setp.eq.u32 %p1, %r0, 0;
  @%p1 mbarrier.init.shared.b64 [%r3], 1;
  @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], BYTES;
  barrier.cluster.arrive;
  barrier.cluster.wait;
  xor.b32 %r7, %r1, 1;
  mapa.shared::cluster.u32 %r8, %r5, %r7;
  mapa.shared::cluster.u32 %r9, %r3, %r7;
  mapa.shared::cluster.u32 %r16, %r2, %r7;
  mad.lo.u32 %r10, %r1, 1000, %r0;
  OPERATION
WAIT:
  mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0;
  @!%p2 bra WAIT;
  ld.shared.v2.b32 {{%r12, %r13}}, [%r5];
  mad.lo.u32 %r14, %r1, 64, %r0;
  mul.wide.u32 %d1, %r14, 8;
  add.u64 %d2, %d0, %d1;
  st.global.v2.b32 [%d2], {{%r12, %r13}};
  barrier.cluster.arrive;
  barrier.cluster.wait;
  ret;
}}
"""
STORE = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r8], {%r10, %r0}, [%r9];"
ADD = "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r16], %r10, [%r9];"


def exchange(operation: str, expected_bytes: int, seed: int, text: str = ASYNC) -> np.ndarray:
    out = np.zeros((2, 64, 2), np.uint32)
    ptx = text.replace("OPERATION", operation).replace("BYTES", str(expected_bytes))
    run_ptx(ptx, 2, 64, [out], cluster=(2,), seed=seed)
    return out


def test_asynchronous_stores_to_a_peer() -> None:
    threads = np.arange(64)
    for seed in SEEDS:
        out = exchange(STORE, 512, seed)
        for rank in range(2):
            np.testing.assert_array_equal(out[rank, :, 0], 1000 * (1 - rank) + threads)
            np.testing.assert_array_equal(out[rank, :, 1], threads)
        out = exchange(ADD, 256, seed)
        assert [int(out[r, 0, 0]) for r in range(2)] == [64 * 1000 * (1 - r) + 64 * 63 // 2 for r in range(2)]


def test_broken_asynchronous_stores_are_caught() -> None:
    wait = "  @!%p2 bra WAIT;\n"
    assert wait in ASYNC
    for seed in SEEDS:
        with pytest.raises((HazardError, ExecutionError)):
            exchange(STORE, 512, seed, ASYNC.replace(wait, ""))
        with pytest.raises((HazardError, ExecutionError)):
            exchange(STORE, 520, seed)
        with pytest.raises(ExecutionError, match="with an mbarrier of CTA"):
            exchange(STORE.replace("[%r9]", "[%r3]"), 512, seed)


def test_bulk_zero() -> None:
    shared = ".shared .align 16 .b8 buffer[512];\n"
    body = "  mov.u32 %r1, buffer;\n  shl.b32 %r2, %r0, 2;\n  add.u32 %r3, %r1, %r2;\n  mov.b32 %r4, 77;\n"
    body += "  st.shared.b32 [%r3], %r4;\n  bar.sync 0;\n  setp.eq.u32 %p1, %r0, 0;\n  mov.b64 %d1, 64;\n"
    body += "  @%p1 st.bulk.weak.shared::cta [%r1+16], %d1, 0;\n  bar.sync 0;\n  ld.shared.b32 %r20, [%r3];\n"
    for seed in SEEDS:
        got = words(np.zeros(64, np.uint32), body, 64, shared=shared, seed=seed)
        assert got.tolist() == [77] * 4 + [0] * 16 + [77] * 44
