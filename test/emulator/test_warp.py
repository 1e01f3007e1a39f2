"""Control flow, votes, shuffles, barriers, mbarriers and memory, against what the PTX ISA says of them."""

from __future__ import annotations

import numpy as np
import pytest
from emulator_ptx import HEADER, bits32, integers, kernel

from cute_emulator import ExecutionError, HazardError, UnsupportedInstruction, run_ptx

SEEDS = range(4)


def lanes(body: str, *inputs: np.ndarray, seed: int = 0, shared: str = "", threads: int = 32, **options) -> np.ndarray:
    """Runs ``body`` in one CTA; it leaves its result in %r20, an array of uint32 by thread."""
    out = np.zeros(threads, np.uint64)
    body += "  cvt.u64.u32 %d20, %r20;\n  add.u64 %q15, %q0, %o;\n  st.global.b64 [%q15], %d20;\n"
    run_ptx(kernel(body, 1 + len(inputs), shared=shared), 1, (threads,), [out, *inputs], seed=seed, **options)
    return out.astype(np.uint32)


def expected_shfl(mode: str, a: list[int], b: int, c: int) -> list[int]:
    """The pseudo-code of shfl.sync in the PTX ISA."""
    out = []
    for lane in range(32):
        segment, clamp = c >> 8 & 31, c & 31
        max_lane = (lane & segment) | (clamp & ~segment & 31)
        min_lane = lane & segment
        if mode == "up":
            j, ok = lane - b, lane - b >= max_lane
        elif mode == "down":
            j, ok = lane + b, lane + b <= max_lane
        elif mode == "bfly":
            j, ok = lane ^ b, lane ^ b <= max_lane
        else:
            j = min_lane | (b & ~segment & 31)
            ok = j <= max_lane
        out.append(a[j if ok else lane])
    return out


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("width", [32, 16, 8])
def test_shfl(mode: str, width: int) -> None:
    for b in (0, 1, 3, 7, 16, 31):
        c = ((32 - width) << 8) | (0 if mode == "up" else 31)
        got = lanes(f"  mul.lo.u32 %r1, %r0, 7;\n  shfl.sync.{mode}.b32 %r20, %r1, {b}, {c}, -1;\n")
        assert got.tolist() == expected_shfl(mode, [7 * i for i in range(32)], b, c)


def test_votes_and_elect() -> None:
    got = lanes("  setp.gt.u32 %p1, %r0, 4;\n  vote.sync.ballot.b32 %r20, %p1, -1;\n")
    assert (got == 0xFFFFFFE0).all()
    got = lanes(
        "  setp.gt.u32 %p1, %r0, 4;\n  vote.sync.any.pred %p2, %p1, -1;\n  vote.sync.all.pred %p3, %p1, -1;\n"
        "  selp.b32 %r1, 2, 0, %p2;\n  selp.b32 %r2, 1, 0, %p3;\n  or.b32 %r20, %r1, %r2;\n"
    )
    assert (got == 2).all()
    got = lanes("  elect.sync %r1|%p1, -1;\n  selp.b32 %r2, 100, 0, %p1;\n  add.u32 %r20, %r1, %r2;\n")
    assert got.tolist() == [100] + [0] * 31
    # in a divergent part the lowest lane that is there
    got = lanes(
        "  mov.b32 %r20, 9;\n  setp.lt.u32 %p2, %r0, 5;\n  @%p2 bra L;\n  elect.sync %r20|%p1, 0xffffffe0;\nL:\n"
    )
    assert got.tolist() == [9] * 5 + [5] * 27


def test_match_and_redux() -> None:
    got = lanes("  and.b32 %r1, %r0, 3;\n  match.any.sync.b32 %r20, %r1, -1;\n")
    assert got.tolist() == [sum(1 << j for j in range(32) if j % 4 == i % 4) for i in range(32)]
    for operation, value in (
        ("add.s32", sum(range(32))),
        ("max.u32", 31),
        ("min.s32", 0),
        ("or.b32", 31),
        ("and.b32", 0),
        ("xor.b32", 0),
    ):
        assert (lanes(f"  redux.sync.{operation} %r20, %r0, -1;\n") == value).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_divergent_loops_meet_again(seed: int) -> None:
    body = """  mov.b32 %r20, 0;
  mov.b32 %r1, %r0;
LOOP:
  setp.eq.u32 %p1, %r1, 0;
  @%p1 bra DONE;
  add.u32 %r20, %r20, %r1;
  sub.u32 %r1, %r1, 1;
  bra LOOP;
DONE:
  redux.sync.add.s32 %r2, %r20, -1;
  add.u32 %r20, %r20, %r2;
"""
    total = sum(i * (i + 1) // 2 for i in range(32))
    assert lanes(body, seed=seed).tolist() == [i * (i + 1) // 2 + total for i in range(32)]


def test_scopes_of_inline_assembly_reuse_names() -> None:
    block = """  {{
  .reg .pred P;
  .reg .b32 t;
  add.u32 t, %r0, {k};
  setp.gt.u32 P, t, 20;
  @P bra DONE;
  add.u32 %r20, %r20, {k};
  DONE:
  }}
"""
    got = lanes("  mov.b32 %r20, 0;\n" + block.format(k=1) + block.format(k=10))
    assert got.tolist() == [(1 if i + 1 <= 20 else 0) + (10 if i + 10 <= 20 else 0) for i in range(32)]


def test_several_entries_and_sinks() -> None:
    one = kernel("  mov.b32 %r1, 1;\n  add.u64 %q15, %q0, %o;\n  st.global.b32 [%q15], %r1;\n", 1)
    two = (
        kernel(
            "  mov.b64 %d1, 0x500000002;\n  mov.b64 {_, %r1}, %d1;\n"
            "  add.u64 %q15, %q0, %o;\n  st.global.b32 [%q15], %r1;\n",
            1,
        )
        .replace(HEADER, "")
        .replace(" k(", " k2(")
    )
    for name, value in (("k", 1), ("k2", 5)):
        out = np.zeros(32, np.uint64)
        run_ptx(one + two, 1, 32, [out], kernel=name)
        assert (out == value).all()


@pytest.mark.parametrize("t", ["s32", "u32", "s64", "u64", "s16"])
@pytest.mark.parametrize("comparison", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_setp_integers(comparison: str, t: str) -> None:
    bits = int(t[1:])
    rng = np.random.default_rng(5)
    a, b = integers(rng, bits), integers(rng, bits)
    b[::5] = a[::5]
    read = (lambda v: v - (1 << bits) if v >> (bits - 1) else v) if t[0] == "s" else (lambda v: v)
    names = {64: "%d", 32: "%r", 16: "%h"}[bits]
    out = np.zeros(len(a), np.uint64)
    body = f"""  add.u64 %q15, %q1, %o;
  ld.global.b{bits} {names}1, [%q15];
  add.u64 %q15, %q2, %o;
  ld.global.b{bits} {names}2, [%q15];
  setp.{comparison}.{t} %p1|%p2, {names}1, {names}2;
  selp.b32 %r3, 1, 0, %p1;
  selp.b32 %r4, 2, 0, %p2;
  or.b32 %r5, %r3, %r4;
  add.u64 %q15, %q0, %o;
  st.global.b32 [%q15], %r5;
"""
    run_ptx(kernel(body, 3), 1, len(a), [out, a, b])
    f = {"eq": "__eq__", "ne": "__ne__", "lt": "__lt__", "le": "__le__", "gt": "__gt__", "ge": "__ge__"}[comparison]
    assert out.tolist() == [
        1 if getattr(read(x), f)(read(y)) else 2 for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]


@pytest.mark.parametrize(
    ("comparison", "on_nan"),
    [("lt", 0), ("ge", 0), ("ne", 0), ("ltu", 1), ("geu", 1), ("neu", 1), ("equ", 1), ("num", 0), ("nan", 1)],
)
def test_setp_floats_and_nan(comparison: str, on_nan: int) -> None:
    a = np.array([1, 2, np.nan, np.inf, -0.0], np.float32)
    b = np.array([2, 1, 0, np.inf, 0.0], np.float32)
    body = f"""  add.u64 %q15, %q1, %o;
  ld.global.f32 %f1, [%q15];
  add.u64 %q15, %q2, %o;
  ld.global.f32 %f2, [%q15];
  setp.{comparison}.f32 %p1, %f1, %f2;
  selp.b32 %r5, 1, 0, %p1;
  add.u64 %q15, %q0, %o;
  st.global.b32 [%q15], %r5;
"""
    padded = [np.zeros(32, np.uint64) for _ in range(3)]
    padded[1][:5], padded[2][:5] = bits32(a), bits32(b)
    run_ptx(kernel(body, 3), 1, 32, padded)
    base = {
        "lt": np.less,
        "ge": np.greater_equal,
        "ne": np.not_equal,
        "ltu": np.less,
        "geu": np.greater_equal,
        "neu": np.not_equal,
        "equ": np.equal,
    }
    for i in range(5):
        nan = np.isnan(a[i]) or np.isnan(b[i])
        want = on_nan if nan else {"num": 1, "nan": 0}.get(comparison)
        assert padded[0][i] == (int(base[comparison](a[i], b[i])) if want is None else want)


SHARED = ".shared .align 16 .b8 buffer[4096];\n.shared .align 8 .b64 bar;\n"


@pytest.mark.parametrize("seed", SEEDS)
def test_bar_sync_orders_shared_memory(seed: int) -> None:
    body = """  mov.u32 %r1, buffer;
  shl.b32 %r2, %r0, 2;
  add.u32 %r3, %r1, %r2;
  st.shared.b32 [%r3], %r0;
  {barrier}
  xor.b32 %r4, %r2, 508;
  add.u32 %r5, %r1, %r4;
  ld.shared.b32 %r20, [%r5];
"""
    got = lanes(body.format(barrier="bar.sync 0;"), seed=seed, shared=SHARED, threads=128)
    assert got.tolist() == [i ^ 127 for i in range(128)]
    with pytest.raises(HazardError, match="read after write"):
        lanes(body.format(barrier=""), seed=seed, shared=SHARED, threads=128)


def test_bytes_of_one_word_by_two_warps_are_no_race() -> None:
    body = """  mov.u32 %r1, buffer;
  shr.u32 %r2, %r0, 5;
  and.b32 %r3, %r0, 31;
  mad.lo.u32 %r4, %r3, 2, %r2;
  add.u32 %r5, %r1, %r4;
  cvt.u16.u32 %h1, %r0;
  st.shared.b8 [%r5], %h1;
  ld.shared.u8 %r20, [%r5];
"""
    assert lanes(body, shared=SHARED, threads=64).tolist() == list(range(64))


@pytest.mark.parametrize("seed", SEEDS)
def test_mbarrier_phases(seed: int) -> None:
    body = """  mov.u32 %r1, bar;
  mov.u32 %r9, buffer;
  setp.ne.u32 %p1, %r0, 0;
  @%p1 bra READY;
  mbarrier.init.shared.b64 [%r1], 64;
READY:
  bar.sync 0;
  mov.b32 %r20, 0;
  mov.b32 %r2, 0;
LOOP:
  shl.b32 %r3, %r0, 2;
  add.u32 %r4, %r9, %r3;
  add.u32 %r5, %r0, %r2;
  st.shared.b32 [%r4], %r5;
  mbarrier.arrive.shared.b64 _, [%r1];
  and.b32 %r6, %r2, 1;
WAIT:
  mbarrier.try_wait.parity.shared.b64 %p2, [%r1], %r6;
  @!%p2 bra WAIT;
  xor.b32 %r7, %r3, 252;
  add.u32 %r8, %r9, %r7;
  ld.shared.b32 %r10, [%r8];
  add.u32 %r20, %r20, %r10;
  bar.sync 0;
  add.u32 %r2, %r2, 1;
  setp.lt.u32 %p3, %r2, 3;
  @%p3 bra LOOP;
"""
    assert lanes(body, seed=seed, shared=SHARED, threads=64).tolist() == [3 * (i ^ 63) + 3 for i in range(64)]
    broken = body.replace("add.u32 %r20, %r20, %r10;\n  bar.sync 0;", "add.u32 %r20, %r20, %r10;")
    with pytest.raises(HazardError):  # without the second barrier the next store may overtake a reader
        lanes(broken, seed=seed, shared=SHARED, threads=64)


def test_deadlock_names_the_barrier_and_who_waits() -> None:
    body = """  mov.u32 %r1, bar;
  setp.ne.u32 %p1, %r0, 0;
  @%p1 bra READY;
  mbarrier.init.shared.b64 [%r1], 2;
  mbarrier.arrive.shared.b64 _, [%r1];
READY:
  bar.sync 0;
  mov.b32 %r20, 0;
WAIT:
  mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;
  @!%p2 bra WAIT;
"""
    with pytest.raises(ExecutionError, match=r"(?s)deadlock.*warp 1.*mbarrier 0x[0-9a-f]+: phase 0, 1 of 2 arrivals"):
        lanes(body, shared=SHARED, threads=64)


def test_errors_name_the_line_and_the_tensor() -> None:
    out = np.zeros(32, np.uint64)
    with pytest.raises(
        ExecutionError,
        match=r"(?s)past the start of argument p0, which has 256 bytes, lane 0.*PTX line \d+: st.global.b32",
    ):
        run_ptx(kernel("  st.global.b32 [%q0+256], %r0;\n", 1), 1, 32, [out])
    with pytest.raises(ExecutionError, match="not a multiple of 8"):
        run_ptx(kernel("  st.global.b64 [%q0+4], %o;\n", 1), 1, 32, [out])
    with pytest.raises(ExecutionError, match="outside the CTA"):
        run_ptx(kernel("  mov.b32 %r1, 500000;\n  st.shared.b32 [%r1], %r0;\n", 1), 1, 32, [out])
    with pytest.raises(UnsupportedInstruction, match=r"PTX line 19: frobnicate.b32 %r1, %r2"):
        run_ptx(kernel("  frobnicate.b32 %r1, %r2;\n", 1), 1, 32, [out])
    with pytest.raises(UnsupportedInstruction, match=r"fma.rz.bf16"):
        run_ptx(kernel("  fma.rz.bf16 %h1, %h2, %h3, %h4;\n", 1), 1, 32, [out])


@pytest.mark.parametrize(
    ("space", "setup"), [("global", "  mov.b64 %d1, %q1;\n"), ("shared", "  mov.u32 %r9, buffer;\n")]
)
def test_atomics(space: str, setup: str) -> None:
    address = "[%d1]" if space == "global" else "[%r9]"
    init = f"  setp.ne.u32 %p1, %r0, 0;\n  mov.b32 %r8, 0;\n  @!%p1 st.{space}.b32 {address}, %r8;\n  bar.sync 0;\n"
    word = np.zeros(4, np.uint32)
    got = lanes(setup + init + f"  atom.{space}.add.u32 %r20, {address}, 3;\n", word, shared=SHARED)
    assert sorted(got.tolist()) == [3 * i for i in range(32)]
    got = lanes(
        setup
        + init
        + f"  atom.{space}.max.s32 %r1, {address}, %r0;\n  bar.sync 0;\n  ld.{space}.b32 %r20, {address};\n",
        word,
        shared=SHARED,
    )
    assert (got == 31).all()
    got = lanes(setup + init + f"  atom.{space}.cas.b32 %r20, {address}, %r0, 7;\n", word, shared=SHARED)
    assert got[0] == 0
    assert got.tolist().count(0) == 1


def test_vector_atomics_add_floats() -> None:
    x = np.zeros(4, np.float32)
    body = "  cvt.rn.f32.u32 %f1, %r0;\n  mov.f32 %f2, 0f3F800000;\n"
    body += "  red.global.add.v4.f32 [%q1], {%f1, %f2, %f1, %f2};\n  mov.b32 %r20, 0;\n"
    lanes(body, x)
    assert x.tolist() == [496, 32, 496, 32]


def test_cluster_barrier_and_distributed_shared_memory() -> None:
    ptx = f"""{HEADER}{SHARED}
.visible .entry k(.param .u64 p0)
{{
  .reg .pred %p<4>; .reg .b32 %r<16>; .reg .b64 %q<4>;
  ld.param.u64 %q0, [p0];
  mov.u32 %r0, %tid.x;
  mov.u32 %r1, %cluster_ctarank;
  mov.u32 %r2, buffer;
  xor.b32 %r3, %r1, 1;
  mapa.shared::cluster.u32 %r4, %r2, %r3;
  mad.lo.u32 %r5, %r1, 100, %r0;
  shl.b32 %r6, %r0, 2;
  add.u32 %r7, %r4, %r6;
  st.shared::cluster.b32 [%r7], %r5;
  barrier.cluster.arrive.release;
  barrier.cluster.wait.acquire;
  add.u32 %r8, %r2, %r6;
  ld.shared.b32 %r9, [%r8];
  mad.lo.u32 %r10, %r1, 32, %r0;
  mul.wide.u32 %q1, %r10, 4;
  add.u64 %q2, %q0, %q1;
  st.global.b32 [%q2], %r9;
  ret;
}}
"""
    for seed in SEEDS:
        out = np.zeros(64, np.uint32)
        run_ptx(ptx, 2, 32, [out], cluster=(2,), seed=seed)
        assert out.tolist() == [100 + i for i in range(32)] + list(range(32))
    broken = ptx.replace("  barrier.cluster.arrive.release;\n  barrier.cluster.wait.acquire;\n", "")
    with pytest.raises(HazardError):
        run_ptx(broken, 2, 32, [np.zeros(64, np.uint32)], cluster=(2,))


def test_the_same_seed_gives_the_same_run() -> None:
    x = [np.zeros(1, np.float32) for _ in range(2)]
    body = "  cvt.rn.f32.u32 %f1, %r0;\n  mul.f32 %f1, %f1, 0f3DCCCCCD;\n"
    body += "  red.global.add.f32 [%q1], %f1;\n  mov.b32 %r20, 0;\n"
    for y in x:
        lanes(body, y, seed=11, threads=512)
    assert x[0] == x[1]
