"""Integer, floating-point, half-precision and conversion opcodes against Python integers, fractions and NumPy."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from emulator_ptx import apply, bits16, bits32, bits64, f32, hostile_f32, integers

SEED = 20240731


def signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


def truncated(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


INTEGER = {
    "add.s32": (32, 2, lambda a, b: a + b),
    "sub.s32": (32, 2, lambda a, b: a - b),
    "add.s16": (16, 2, lambda a, b: a + b),
    "add.u64": (64, 2, lambda a, b: a + b),
    "sub.s64": (64, 2, lambda a, b: a - b),
    "mul.lo.s32": (32, 2, lambda a, b: a * b),
    "mul.lo.s64": (64, 2, lambda a, b: a * b),
    "mul.hi.u32": (32, 2, lambda a, b: (a * b) >> 32),
    "mul.hi.s32": (32, 2, lambda a, b: (signed(a, 32) * signed(b, 32)) >> 32),
    "mul.hi.u64": (64, 2, lambda a, b: (a * b) >> 64),
    "mul.hi.s64": (64, 2, lambda a, b: (signed(a, 64) * signed(b, 64)) >> 64),
    "mad.lo.s32": (32, 3, lambda a, b, c: a * b + c),
    "mad.lo.u64": (64, 3, lambda a, b, c: a * b + c),
    "mad.hi.s32": (32, 3, lambda a, b, c: ((signed(a, 32) * signed(b, 32)) >> 32) + c),
    "min.s32": (32, 2, lambda a, b: min(signed(a, 32), signed(b, 32))),
    "min.relu.s32": (32, 2, lambda a, b: max(0, min(signed(a, 32), signed(b, 32)))),
    "max.relu.s32": (32, 2, lambda a, b: max(0, signed(a, 32), signed(b, 32))),
    "max.u32": (32, 2, max),
    "min.u64": (64, 2, min),
    "max.s64": (64, 2, lambda a, b: max(signed(a, 64), signed(b, 64))),
    "max.s16": (16, 2, lambda a, b: max(signed(a, 16), signed(b, 16))),
    "and.b32": (32, 2, lambda a, b: a & b),
    "or.b64": (64, 2, lambda a, b: a | b),
    "xor.b32": (32, 2, lambda a, b: a ^ b),
    "and.b16": (16, 2, lambda a, b: a & b),
    "not.b32": (32, 1, lambda a: ~a),
    "not.b64": (64, 1, lambda a: ~a),
    "neg.s32": (32, 1, lambda a: -a),
    "abs.s32": (32, 1, lambda a: abs(signed(a, 32))),
    "abs.s64": (64, 1, lambda a: abs(signed(a, 64))),
    "popc.b32": (32, 1, lambda a: bin(a).count("1")),
    "clz.b32": (32, 1, lambda a: 32 - a.bit_length()),
    "brev.b32": (32, 1, lambda a: int(f"{a:032b}"[::-1], 2)),
    "bfind.u32": (32, 1, lambda a: a.bit_length() - 1),
    "bfind.s32": (32, 1, lambda a: (a if a < 1 << 31 else ~a & 0xFFFFFFFF).bit_length() - 1),
    "sad.u32": (32, 3, lambda a, b, c: abs(a - b) + c),
}


@pytest.mark.parametrize("opcode", INTEGER)
def test_integer(opcode: str) -> None:
    bits, n, f = INTEGER[opcode]
    rng = np.random.default_rng(SEED)
    inputs = [integers(rng, bits) for _ in range(n)]
    got = apply(opcode, f"b{bits}", [f"b{bits}"] * n, *inputs)
    expected = [f(*(int(v) for v in row)) % (1 << bits) for row in zip(*inputs, strict=True)]
    assert got.tolist() == expected


@pytest.mark.parametrize("opcode", ["div.s32", "rem.s32", "div.u32", "rem.u32", "div.s64", "rem.u64"])
def test_division_truncates_towards_zero(opcode: str) -> None:
    bits = int(opcode[-2:])
    rng = np.random.default_rng(SEED)
    a, b = integers(rng, bits), integers(rng, bits)
    b[b == 0] = 7
    read = (lambda v: signed(v, bits)) if ".s" in opcode else (lambda v: v)
    got = apply(opcode, f"b{bits}", [f"b{bits}"] * 2, a, b)
    for x, y, g in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        q = truncated(read(x), read(y))
        assert g == (q if opcode.startswith("div") else read(x) - q * read(y)) % (1 << bits)


@pytest.mark.parametrize(
    ("opcode", "bits"),
    [
        ("shl.b32", 32),
        ("shl.b64", 64),
        ("shr.u32", 32),
        ("shr.s32", 32),
        ("shr.u64", 64),
        ("shr.s64", 64),
        ("shr.s16", 16),
        ("shr.u16", 16),
    ],
)
def test_shift_amounts_clamp(opcode: str, bits: int) -> None:
    rng = np.random.default_rng(SEED)
    a = integers(rng, bits)
    n = rng.integers(0, 2 * bits + 2, len(a)).astype(np.uint64)
    got = apply(opcode, f"b{bits}", [f"b{bits}", "b32"], a, n)
    for x, k, g in zip(a.tolist(), n.tolist(), got.tolist(), strict=True):
        v = signed(x, bits) if ".s" in opcode else x
        assert g == ((v << k) if opcode.startswith("shl") else (v >> k)) % (1 << bits)


@pytest.mark.parametrize("opcode", ["mul.wide.u32", "mul.wide.s32", "mul.wide.u16", "mul.wide.s16"])
def test_wide_products(opcode: str) -> None:
    bits = int(opcode[-2:])
    rng = np.random.default_rng(SEED)
    a, b = integers(rng, bits), integers(rng, bits)
    read = (lambda v: signed(v, bits)) if ".s" in opcode else (lambda v: v)
    got = apply(opcode, f"b{2 * bits}", [f"b{bits}"] * 2, a, b)
    assert got.tolist() == [read(x) * read(y) % (1 << 2 * bits) for x, y in zip(a.tolist(), b.tolist(), strict=True)]


def test_bit_fields() -> None:
    rng = np.random.default_rng(SEED)
    a, b = integers(rng, 32), integers(rng, 32)
    position, length = (rng.integers(0, 40, len(a)).astype(np.uint64) for _ in range(2))
    unsigned = apply("bfe.u32", "b32", ["b32"] * 3, a, position, length)
    with_sign = apply("bfe.s32", "b32", ["b32"] * 3, a, position, length)
    inserted = apply("bfi.b32", "b32", ["b32"] * 4, a, b, position, length)
    for i, (x, y, p, n) in enumerate(zip(a.tolist(), b.tolist(), position.tolist(), length.tolist(), strict=True)):
        field = (x >> p) & ((1 << n) - 1)
        assert unsigned[i] == field
        sign = (x >> min(p + n - 1, 31)) & 1 if n else 0
        taken = max(0, min(n, 32 - p))
        assert with_sign[i] == ((field | (-1 << taken)) if sign and taken < 32 else field) % (1 << 32)
        mask = (((1 << n) - 1) << p) & 0xFFFFFFFF
        assert inserted[i] == (y & ~mask & 0xFFFFFFFF) | ((x << p) & mask)


@pytest.mark.parametrize("table", [0x96, 0xE8, 0xCA, 0x01, 0xFE])
def test_lop3(table: int) -> None:
    rng = np.random.default_rng(SEED)
    a, b, c = (integers(rng, 32) for _ in range(3))
    got = apply("lop3.b32", "b32", ["b32"] * 3, a, b, c, tail=f", {table}")
    for x, y, z, g in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        assert g == sum(((table >> (4 * (x >> i & 1) + 2 * (y >> i & 1) + (z >> i & 1))) & 1) << i for i in range(32))


def test_prmt_selects_bytes_and_replicates_signs() -> None:
    rng = np.random.default_rng(SEED)
    a, b, c = (integers(rng, 32) for _ in range(3))
    got = apply("prmt.b32", "b32", ["b32"] * 3, a, b, c)
    for x, y, s, g in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        source = [*x.to_bytes(4, "little"), *y.to_bytes(4, "little")]
        out = []
        for i in range(4):
            k = s >> (4 * i) & 15
            byte = source[k & 7]
            out.append((255 if byte >> 7 else 0) if k & 8 else byte)
        assert g == int.from_bytes(bytes(out), "little")


def test_funnel_shift() -> None:
    rng = np.random.default_rng(SEED)
    a, b = integers(rng, 32), integers(rng, 32)
    n = rng.integers(0, 70, len(a)).astype(np.uint64)
    left = apply("shf.l.wrap.b32", "b32", ["b32"] * 3, a, b, n)
    right = apply("shf.r.clamp.b32", "b32", ["b32"] * 3, a, b, n)
    for x, y, k, l, r in zip(a.tolist(), b.tolist(), n.tolist(), left.tolist(), right.tolist(), strict=True):
        v = (y << 32) | x
        assert l == (v << (k % 32)) >> 32 & 0xFFFFFFFF
        assert r == v >> min(k, 32) & 0xFFFFFFFF


# ---------------------------------------------------------------------------------------------------- floating point


def rounded(x: Fraction, mode: str) -> float:
    """The float32 that ``x`` rounds to, from exact arithmetic; finite, normal or subnormal results only."""
    if x == 0:
        return 0.0
    e = math.floor(math.log2(abs(x))) if abs(x) > Fraction(1, 2**200) else -200
    while Fraction(2) ** (e + 1) <= abs(x):
        e += 1
    while Fraction(2) ** e > abs(x):
        e -= 1
    quantum = Fraction(2) ** (max(e, -126) - 23)
    q = x / quantum
    low = math.floor(q)
    if q == low or mode == "rm":
        n = low
    elif mode == "rp":
        n = low + 1
    elif mode == "rz":
        n = low if x > 0 else low + 1
    else:
        n = low if q - low < Fraction(1, 2) or (q - low == Fraction(1, 2) and low % 2 == 0) else low + 1
    return float(n * quantum)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("operation", ["add", "mul", "fma"])
def test_f32_rounding(operation: str, mode: str) -> None:
    rng = np.random.default_rng(SEED)
    a, b, c = ((rng.standard_normal(200) * np.exp2(rng.integers(-12, 12, 200))).astype(np.float32) for _ in range(3))
    n = 3 if operation == "fma" else 2
    got = f32(apply(f"{operation}.{mode}.f32", "f32", ["f32"] * n, *(bits32(x) for x in (a, b, c)[:n])))
    for x, y, z, g in zip(a, b, c, got, strict=True):
        fx, fy, fz = Fraction(float(x)), Fraction(float(y)), Fraction(float(z))
        exact = fx + fy if operation == "add" else fx * fy if operation == "mul" else fx * fy + fz
        assert float(g) == rounded(exact, mode)


@pytest.mark.parametrize("operation", ["add", "sub", "mul"])
def test_f32_special_values(operation: str) -> None:
    rng = np.random.default_rng(SEED)
    a, b = hostile_f32(rng), hostile_f32(rng)
    with np.errstate(all="ignore"):
        expected = {"add": a + b, "sub": a - b, "mul": a * b}[operation]
    got = f32(apply(f"{operation}.f32", "f32", ["f32"] * 2, bits32(a), bits32(b)))
    np.testing.assert_array_equal(got, expected)
    assert (got.view(np.uint32)[np.isnan(got)] == 0x7FFFFFFF).all()


def test_ftz_flushes_inputs_and_results() -> None:
    tiny = np.float32(2.0**-130)
    a = np.array([tiny, -tiny, 2.0**-100, 1.0], np.float32)
    b = np.array([1.0, 1.0, 2.0**-40, 2.0**-149], np.float32)
    got = apply("mul.ftz.f32", "f32", ["f32"] * 2, bits32(a), bits32(b))
    assert got.tolist() == [0, 0x80000000, 0, 0]
    assert apply("mul.f32", "f32", ["f32"] * 2, bits32(a), bits32(b)).tolist() == bits32(a * b).tolist()


def test_saturation() -> None:
    a = np.array([-1.0, 0.25, 2.0, np.nan, np.inf, -0.0], np.float32)
    got = f32(apply("add.sat.f32", "f32", ["f32"] * 2, bits32(a), bits32(np.zeros_like(a))))
    assert got.tolist() == [0.0, 0.25, 1.0, 0.0, 1.0, 0.0]


def test_min_and_max_prefer_numbers_unless_nan_is_asked_for() -> None:
    a = np.array([np.nan, 1.0, np.nan, -0.0, 3.0], np.float32)
    b = np.array([2.0, np.nan, np.nan, 0.0, -3.0], np.float32)
    assert apply("min.f32", "f32", ["f32"] * 2, bits32(a), bits32(b)).tolist() == [
        *bits32([2.0, 1.0]).tolist(),
        0x7FFFFFFF,
        0x80000000,
        *bits32([-3.0]).tolist(),
    ]
    assert apply("max.f32", "f32", ["f32"] * 2, bits32(a), bits32(b)).tolist() == [
        *bits32([2.0, 1.0]).tolist(),
        0x7FFFFFFF,
        0,
        *bits32([3.0]).tolist(),
    ]
    assert apply("max.NaN.f32", "f32", ["f32"] * 2, bits32(a), bits32(b)).tolist()[:3] == [0x7FFFFFFF] * 3


@pytest.mark.parametrize("opcode", ["add.rn.f32x2", "mul.rn.f32x2", "fma.rn.f32x2"])
def test_packed_f32(opcode: str) -> None:
    rng = np.random.default_rng(SEED)
    lo, hi = (rng.standard_normal((3, 64)).astype(np.float32) for _ in range(2))
    packed = [bits32(lo[i]) | bits32(hi[i]) << np.uint64(32) for i in range(3)]
    n = 3 if "fma" in opcode else 2
    got = apply(opcode, "b64", ["b64"] * n, *packed[:n])
    for half, x in ((got & np.uint64(0xFFFFFFFF), lo), (got >> np.uint64(32), hi)):
        x64 = x.astype(np.float64)
        expected = (
            x[0] + x[1]
            if "add" in opcode
            else x[0] * x[1]
            if "mul" in opcode
            else (x64[0] * x64[1] + x64[2]).astype(np.float32)
        )
        np.testing.assert_allclose(f32(half), expected, rtol=6e-8)


@pytest.mark.parametrize(
    ("opcode", "function", "bound"),
    [
        ("ex2.approx.f32", np.exp2, 2.0**-22),
        ("rcp.approx.f32", lambda x: 1 / x, 2.0**-23),
        ("rsqrt.approx.f32", lambda x: 1 / np.sqrt(np.abs(x)), 2.0**-22),
        ("lg2.approx.f32", lambda x: np.log2(np.abs(x)), 2.0**-22),
        ("tanh.approx.f32", np.tanh, 2.0**-11),
        ("sqrt.approx.f32", lambda x: np.sqrt(np.abs(x)), 2.0**-22),
    ],
)
def test_approximations_keep_the_bound_of_the_isa(opcode: str, function, bound: float) -> None:
    rng = np.random.default_rng(SEED)
    x = rng.uniform(-20, 20, 500).astype(np.float32)
    if opcode.split(".")[0] in ("rsqrt", "lg2", "sqrt"):
        x = np.abs(x)
    got = f32(apply(opcode, "f32", ["f32"], bits32(x))).astype(np.float64)
    exact = function(x.astype(np.float64))
    assert (np.abs(got - exact) <= bound * np.maximum(np.abs(exact), 1.0 if opcode.startswith("lg2") else 0)).all()


def test_exponential_of_the_ends() -> None:
    got = f32(
        apply(
            "ex2.approx.ftz.f32",
            "f32",
            ["f32"],
            bits32(np.array([-np.inf, np.inf, -0.0, 128.0, -127.0, np.nan], np.float32)),
        )
    )
    np.testing.assert_array_equal(got, np.array([0, np.inf, 1, np.inf, 0, np.nan], np.float32))


def bf16_of(x: np.ndarray) -> np.ndarray:
    """float64 to bf16 bits by exact rounding of the value (to nearest even), independent of bit tricks."""
    out = []
    for v in np.asarray(x, np.float64):
        if math.isnan(v):
            out.append(0x7FFF)
            continue
        if math.isinf(v) or v == 0:
            out.append(int(np.float32(v).view(np.uint32)) >> 16)
            continue
        f = Fraction(float(v))
        e = math.frexp(v)[1] - 1
        quantum = Fraction(2) ** (max(e, -126) - 7)
        q = f / quantum
        low = math.floor(q)
        n = low if q - low < Fraction(1, 2) or (q - low == Fraction(1, 2) and low % 2 == 0) else low + 1
        r = float(n * quantum)
        r = math.copysign(math.inf, r) if abs(r) >= 2.0**128 else r
        out.append(int(np.float32(r).view(np.uint32)) >> 16 if r else (0x8000 if v < 0 else 0))
    return np.array(out, np.uint64)


def test_cvt_bf16_from_f32() -> None:
    rng = np.random.default_rng(SEED)
    a, b = hostile_f32(rng), hostile_f32(rng)
    assert apply("cvt.rn.bf16.f32", "b16", ["f32"], bits32(a)).tolist() == bf16_of(a).tolist()
    packed = apply("cvt.rn.bf16x2.f32", "b32", ["f32", "f32"], bits32(a), bits32(b))
    assert packed.tolist() == (bf16_of(a) << np.uint64(16) | bf16_of(b)).tolist()


def test_cvt_f16_from_f32() -> None:
    rng = np.random.default_rng(SEED)
    a = hostile_f32(rng)
    a[100:200] = rng.standard_normal(100)
    with np.errstate(all="ignore"):
        expected = a.astype(np.float16).view(np.uint16)
    expected = np.where(np.isnan(a), 0x7FFF, expected)
    assert apply("cvt.rn.f16.f32", "b16", ["f32"], bits32(a)).tolist() == expected.tolist()
    back = f32(apply("cvt.f32.f16", "f32", ["b16"], expected.astype(np.uint64)))
    np.testing.assert_array_equal(back, expected.astype(np.uint16).view(np.float16).astype(np.float32))


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("target", ["s32", "u32", "s64", "u8"])
def test_cvt_integer_from_f32_rounds_and_saturates(target: str, mode: str) -> None:
    x = np.array(
        [0.5, 1.5, 2.5, -0.5, -1.5, 3.7, -3.7, 1e10, -1e10, 1e30, -1e30, np.inf, -np.inf, 255.4, 300.0, 0.0], np.float32
    )
    bits = int(target[1:])
    lo, hi = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if target[0] == "s" else (0, (1 << bits) - 1)
    function = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode]
    expected = [(lo if v < 0 else hi) if math.isinf(v) else min(max(function(float(v)), lo), hi) for v in x]
    width = 64 if bits == 64 else 32
    got = apply(f"cvt.{mode}.{target}.f32", f"b{width}", ["f32"], bits32(x))
    assert got.tolist() == [v % (1 << width) for v in expected]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("s32", "s64"),
        ("u32", "u64"),
        ("s16", "s32"),
        ("s8", "s32"),
        ("u8", "u32"),
        ("s32", "s8"),
        ("u64", "u32"),
        ("s64", "s16"),
    ],
)
def test_cvt_between_integers(source: str, target: str) -> None:
    rng = np.random.default_rng(SEED)
    sb, tb = int(source[1:]), int(target[1:])
    storage = max(sb, 16)
    a = integers(rng, storage)
    width = max(tb, 32)
    got = apply(f"cvt.{target}.{source}", f"b{width}", [f"b{storage}"], a)
    for x, g in zip(a.tolist(), got.tolist(), strict=True):
        v = x % (1 << sb)
        v = signed(v, sb) if source[0] == "s" else v
        v %= 1 << tb
        v = signed(v, tb) if target[0] == "s" else v
        assert g == v % (1 << width)


def test_cvt_saturating_between_integers() -> None:
    a = np.array([300, 0xFFFFFF00, 127, 128, 0x80000000], np.uint64)
    assert apply("cvt.sat.s8.s32", "b32", ["b32"], a).tolist() == [127, 0xFFFFFF80, 127, 127, 0xFFFFFF80]
    assert apply("cvt.sat.u8.s32", "b32", ["b32"], a).tolist() == [255, 0, 127, 128, 0]


def test_cvt_f32_from_integers() -> None:
    rng = np.random.default_rng(SEED)
    a = integers(rng, 64)
    np.testing.assert_array_equal(
        f32(apply("cvt.rn.f32.u64", "f32", ["b64"], a)), [np.float32(rounded(Fraction(int(v)), "rn")) for v in a]
    )
    b = integers(rng, 32)
    np.testing.assert_array_equal(
        f32(apply("cvt.rz.f32.s32", "f32", ["b32"], b)),
        [np.float32(rounded(Fraction(signed(int(v), 32)), "rz")) for v in b],
    )


def half(bits: np.ndarray, bf16: bool) -> list[Fraction]:
    return [
        Fraction(float(v))
        for v in ((bits.astype(np.uint32) << 16).view(np.float32) if bf16 else bits.astype(np.uint16).view(np.float16))
    ]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("operation", ["add", "mul", "fma"])
def test_half_precision_rounds_once(operation: str, bf16: bool) -> None:
    rng = np.random.default_rng(SEED)
    t = "bf16" if bf16 else "f16"
    inputs = []
    for _ in range(3):
        x = (rng.standard_normal(512) * np.exp2(rng.integers(-6, 6, 512))).astype(np.float32)
        inputs.append(bf16_of(x) if bf16 else bits16(x.astype(np.float16)))
    n = 3 if operation == "fma" else 2
    got = apply(f"{operation}.rn.{t}", "b16", ["b16"] * n, *inputs[:n])
    a, b, c = (half(x, bf16) for x in inputs)
    digits, smallest = (7, -126) if bf16 else (10, -14)
    for x, y, z, g in zip(a, b, c, half(got, bf16), strict=True):
        exact = x + y if operation == "add" else x * y if operation == "mul" else x * y + z
        if exact == 0:
            assert g == 0
            continue
        e = math.frexp(float(exact))[1] - 1
        quantum = Fraction(2) ** (max(e, smallest) - digits)
        q = exact / quantum
        low = math.floor(q)
        assert g == quantum * (
            low if q - low < Fraction(1, 2) or (q - low == Fraction(1, 2) and low % 2 == 0) else low + 1
        )


def test_mixed_precision_fma() -> None:
    rng = np.random.default_rng(SEED)
    a, b = (bf16_of(rng.standard_normal(256)) for _ in range(2))
    c = rng.standard_normal(256).astype(np.float32)
    got = f32(apply("fma.rn.f32.bf16", "f32", ["b16", "b16", "f32"], a, b, bits32(c)))
    expected = [
        np.float32(rounded(x * y + Fraction(float(z)), "rn"))
        for x, y, z in zip(half(a, True), half(b, True), c, strict=True)
    ]
    np.testing.assert_array_equal(got, expected)


def test_double_precision() -> None:
    rng = np.random.default_rng(SEED)
    a, b = rng.standard_normal(100), rng.standard_normal(100)
    np.testing.assert_array_equal(apply("mul.rn.f64", "f64", ["f64"] * 2, bits64(a), bits64(b)).view(np.float64), a * b)
    np.testing.assert_array_equal(
        apply("cvt.rn.f32.f64", "f32", ["f64"], bits64(a)).astype(np.uint32).view(np.float32), a.astype(np.float32)
    )


def test_tf32_and_fp8() -> None:
    x = np.array([1.0 + 2.0**-11, 1.0 + 2.0**-12, -3.0000002, 0.1], np.float32)
    got = f32(apply("cvt.rna.tf32.f32", "b32", ["f32"], bits32(x)))
    assert got.tolist() == [1.0 + 2.0**-10, 1.0, -3.0, float(np.float32(round(0.1 * 2**14) / 2**14))]
    a = np.array([448.0, 500.0, 1.0, -0.0625], np.float32)
    b = np.array([0.0, 2.0**-9, 17.0, 18.0], np.float32)
    assert apply("cvt.rn.satfinite.e4m3x2.f32", "b16", ["f32", "f32"], bits32(a), bits32(b)).tolist() == [
        0x7E00,
        0x7E01,
        0x3858,
        0x9859,
    ]
