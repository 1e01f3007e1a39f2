"""tcgen05 and wgmma by hand: operands laid out here as the ISA's canonical layouts say, results from NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from emulator_ptx import HEADER

from cute_emulator import ExecutionError, HazardError, run_ptx

IMAGE = 32768
N = 32
K = 16

KERNEL = (
    HEADER
    + f"""
.shared .align 1024 .b8 image[{IMAGE}];
.shared .align 8 .b64 bar;
.shared .align 4 .b32 holder;
.visible .entry k(.param .u64 p_image, .param .u64 p_out, .param .u64 p_a, .param .u64 p_b, .param .u32 p_idesc,
                  .param .u64 p_tmem, .param .u32 p_again)
{{
  .reg .pred %p<8>; .reg .b32 %r<64>; .reg .b64 %d<32>;
  ld.param.u64 %d0, [p_image]; ld.param.u64 %d1, [p_out]; ld.param.u64 %d2, [p_a]; ld.param.u64 %d3, [p_b];
  ld.param.u32 %r1, [p_idesc]; ld.param.u64 %d4, [p_tmem]; ld.param.u32 %r2, [p_again];
  mov.u32 %r0, %tid.x;
  mov.u32 %r3, image;
  mov.u32 %r4, bar;
  mov.u32 %r5, holder;
  setp.eq.u32 %p1, %r0, 0;
  @%p1 mbarrier.init.shared.b64 [%r4], 1;
  shr.u32 %r6, %r0, 5;
  setp.ne.u32 %p2, %r6, 0;
  @%p2 bra ALLOCATED;
  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r5], 512;
ALLOCATED:
  mov.u32 %r7, %r0;
COPY:
  shl.b32 %r8, %r7, 2;
  cvt.u64.u32 %d5, %r8;
  add.u64 %d6, %d0, %d5;
  ld.global.b32 %r9, [%d6];
  add.u32 %r10, %r3, %r8;
  st.shared.b32 [%r10], %r9;
  add.u32 %r7, %r7, 128;
  setp.lt.u32 %p3, %r7, {IMAGE // 4};
  @%p3 bra COPY;
  fence.proxy.async.shared::cta;
  bar.sync 0;
  ld.shared.b32 %r11, [%r5];
  shl.b32 %r12, %r6, 21;
  add.u32 %r13, %r11, %r12;
  mul.wide.u32 %d7, %r0, 32;
  add.u64 %d8, %d4, %d7;
  ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%d8];
  ld.global.v4.b32 {{%r24, %r25, %r26, %r27}}, [%d8+16];
  tcgen05.st.sync.aligned.32x32b.x8.b32 [%r13+256], {{%r20, %r21, %r22, %r23, %r24, %r25, %r26, %r27}};
  tcgen05.wait::st.sync.aligned;
  bar.sync 0;
  @!%p1 bra ISSUED;
  and.b32 %r14, %r3, 0x3ffff;
  shr.u32 %r15, %r14, 4;
  cvt.u64.u32 %d9, %r15;
  add.u64 %d10, %d2, %d9;
  add.u64 %d11, %d3, %d9;
  setp.ne.u32 %p4, %r2, 0;
  OPERATION
  @%p4 OPERATION2
  tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4];
ISSUED:
WAIT:
  mbarrier.try_wait.parity.shared.b64 %p5, [%r4], 0;
  @!%p5 bra WAIT;
  tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{", ".join(f"%r{20 + i}" for i in range(N))}}}, [%r13];
  tcgen05.wait::ld.sync.aligned;
  mul.wide.u32 %d12, %r0, {4 * N};
  add.u64 %d13, %d1, %d12;
"""
    + "".join(
        f"  st.global.v4.b32 [%d13+{16 * i}], {{%r{20 + 4 * i}, %r{21 + 4 * i}, %r{22 + 4 * i}, %r{23 + 4 * i}}};\n"
        for i in range(N // 4)
    )
    + """  bar.sync 0;
  @%p2 bra FREED;
  tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r11, 512;
FREED:
  ret;
}
"""
)


def mma(a: str, accumulate: str) -> str:
    return f"tcgen05.mma.cta_group::1.kind::f16 [%r11], {a}, %d11, %r1, {accumulate};"


def program(a_in_tmem: bool) -> str:
    a = "[%r11+256]" if a_in_tmem else "%d10"
    return KERNEL.replace("OPERATION2", mma(a, "1")).replace("OPERATION", mma(a, "0"))


def descriptor(start: int, leading: int, stride: int, swizzle: int) -> int:
    return (
        (start >> 4)
        | (leading >> 4) << 16
        | (stride >> 4) << 32
        | 1 << 46
        | {0: 0, 128: 2, 64: 4, 32: 6}[swizzle] << 61
    )


def instruction(m: int, bf16: bool, a_mn: bool, b_mn: bool, negate_a: bool = False) -> int:
    return (
        1 << 4
        | int(bf16) << 7
        | int(bf16) << 10
        | int(negate_a) << 13
        | int(a_mn) << 15
        | int(b_mn) << 16
        | (N >> 3) << 17
        | (m >> 4) << 24
    )


def place(image: np.ndarray, start: int, x: np.ndarray, mn_major: bool, swizzle: int) -> int:
    """Writes the operand x (rows, K) of 16-bit elements into the image; returns its descriptor.

    Core matrices are 8 rows of 16 bytes. Without swizzle they lie contiguously, one after the other along the rows,
    then along K. With a swizzle of W bytes an atom is 8 lines of W bytes whose 16-byte chunks are permuted by the
    line's number.
    """
    rows = x.shape[0]
    flat = image.view(np.uint16)
    lines = x if not mn_major else x.T  # what runs along a line of shared memory
    if swizzle == 0:
        if not mn_major:
            leading, stride = rows * 16, 128  # next core matrix along K, next 8 rows
            for r in range(rows):
                for k in range(K):
                    flat[(start + (k // 8) * leading + (r // 8) * stride + (r % 8) * 16) // 2 + k % 8] = x[r, k]
        else:
            leading, stride = rows * 16, 128  # next 8 of K, next 8 rows
            for r in range(rows):
                for k in range(K):
                    flat[(start + (k // 8) * leading + (r // 8) * stride + (k % 8) * 16) // 2 + r % 8] = x[r, k]
        return descriptor(start, leading, stride, 0)
    per_line = swizzle // 2
    spread = 128 // swizzle  # lines of an atom that share a number
    stride, leading = 8 * swizzle, 0
    if mn_major:
        leading = 8 * swizzle * (K // 8)  # next atom along the rows
    for i in range(lines.shape[0]):
        for j in range(lines.shape[1]):
            atom, line, column = j // per_line, i % 8, j % per_line
            chunk = (column // 8) ^ (line // spread)
            at = start + (i // 8) * stride + atom * leading + line * swizzle + chunk * 16
            flat[at // 2 + column % 8] = lines[i, j]
    return descriptor(start, leading, stride, swizzle)


def bits(x: np.ndarray, bf16: bool) -> np.ndarray:
    return (
        (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) if bf16 else x.astype(np.float16).view(np.uint16)
    )


def operands(m: int, bf16: bool) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(m)
    return rng.integers(-8, 9, (m, K)) / 4, rng.integers(-8, 9, (N, K)) / 4  # exact in both formats


def lane_of(m: int, row: int) -> int:
    return row if m == 128 else (row // 16) * 32 + row % 16


def run(
    m: int,
    bf16: bool,
    a_layout: tuple[bool, int] | None,
    b_layout: tuple[bool, int],
    again: bool = False,
    negate: bool = False,
    text: str | None = None,
    **options,
):
    """D = A B^T (twice with `again`) for A in shared memory, or in tensor memory if ``a_layout`` is None."""
    a, b = operands(m, bf16)
    image = np.zeros(IMAGE, np.uint8)
    tmem = np.zeros((128, 16), np.uint16)
    a_descriptor = 0
    if a_layout is None:
        for row in range(m):
            tmem[lane_of(m, row)] = bits(a, bf16)[row]
    else:
        a_descriptor = place(image, 0, bits(a, bf16), *a_layout)
    b_descriptor = place(image, IMAGE // 2, bits(b, bf16), *b_layout)
    out = np.full((128, N), np.nan, np.float32)
    idesc = instruction(m, bf16, bool(a_layout and a_layout[0]), b_layout[0], negate)
    report = run_ptx(
        text or program(a_layout is None),
        1,
        128,
        [image, out, a_descriptor, b_descriptor, idesc, tmem, int(again)],
        **options,
    )
    return report, out[[lane_of(m, r) for r in range(m)]], a @ b.T


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("m", [64, 128])
@pytest.mark.parametrize("b_layout", [(False, 0), (False, 32), (True, 0), (True, 64)])
@pytest.mark.parametrize(
    "a_layout",
    [None, (False, 0), (False, 32), (False, 64), (False, 128), (True, 0), (True, 32), (True, 64), (True, 128)],
)
def test_products(m: int, bf16: bool, a_layout, b_layout) -> None:
    _, got, expected = run(m, bf16, a_layout, b_layout)
    np.testing.assert_array_equal(got, expected)


def test_accumulation_and_negation() -> None:
    report, got, expected = run(128, True, (False, 128), (False, 128), again=True, negate=True)
    np.testing.assert_array_equal(got, -2 * expected)
    assert report.mma == {"tcgen05 f16 SS cta_group::1 128x32x16": (2, 2 * 2 * 128 * N * K)}


@pytest.mark.parametrize("side", ["before", "after"])
def test_the_fences_between_threads_change_nothing(side: str) -> None:
    fence = f"tcgen05.fence::{side}_thread_sync;\n  "
    text = program(True).replace("tcgen05.ld", fence + "tcgen05.ld", 1)
    assert fence in text
    _, got, expected = run(128, True, None, (False, 128), text=text)
    np.testing.assert_array_equal(got, expected)


def test_illegal_descriptors_are_errors() -> None:
    for change, message in (
        (2 << 46, "version"),
        (3 << 61, "layout 3"),
        (1 << 61, "32-byte atoms"),
        (3 << 49, "base offset"),
    ):
        a, b = operands(128, False)
        image = np.zeros(IMAGE, np.uint8)
        good = place(image, 0, bits(a, False), False, 128)
        bad = (
            (good & ~(3 << 46) | change)
            if message == "version"
            else good & ~(7 << 61) | change
            if change >> 61
            else good | change
        )
        arguments = [
            image,
            np.zeros((128, N), np.float32),
            bad,
            place(image, IMAGE // 2, bits(b, False), False, 128),
            instruction(128, False, False, False),
        ]
        with pytest.raises(ExecutionError, match=rf"(?s){message}.*PTX line \d+: tcgen05.mma"):
            run_ptx(program(False), 1, 128, [*arguments, np.zeros((128, 16), np.uint16), 0])
    with pytest.raises(ExecutionError, match="shape of 96 x 32"):
        run(96, False, (False, 128), (False, 128))


BREAKS = {
    "fence": ("  fence.proxy.async.shared::cta;\n", ""),
    "first barrier": ("  fence.proxy.async.shared::cta;\n  bar.sync 0;\n", "  fence.proxy.async.shared::cta;\n"),
    "wait for the commit": ("  @!%p5 bra WAIT;\n", ""),
    "commit": ("  tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4];\n", ""),
    "free before the last read": (
        "  tcgen05.ld.sync",
        "  tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r11, 512;\n  tcgen05.ld.sync",
    ),
    "barrier before the free": ("  bar.sync 0;\n  @%p2 bra FREED;", "  @%p2 bra FREED;"),
    "free": ("  tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r11, 512;\n", ""),
    "wait for stores": ("  tcgen05.wait::st.sync.aligned;\n", ""),
    "phase": ("[%r4], 0;\n  @!%p5", "[%r4], 1;\n  @!%p5"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_line_is_caught(name: str) -> None:
    text = program(True)
    assert BREAKS[name][0] in text
    with pytest.raises((HazardError, ExecutionError)):
        run(128, False, None, (False, 128), text=text.replace(*BREAKS[name]), seed=0)


SHAPES = {
    "32x32b.x16": (16, lambda lane, j: (lane, j)),
    "16x64b.x16": (16, lambda lane, j: (lane // 4 + 8 * (lane % 2), 2 * j + lane // 2 % 2)),
    "16x128b.x8": (16, lambda lane, j: (lane // 4 + 8 * (j % 2), 4 * (j // 2) + lane % 4)),
    "16x256b.x4": (16, lambda lane, j: (lane // 4 + 8 * (j // 2 % 2), 8 * (j // 4) + 2 * (lane % 4) + j % 2)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("direction", ["ld", "st"])
def test_shapes_of_tensor_memory_access(direction: str, shape: str) -> None:
    """One direction in the shape under test, the other one in 32x32b, whose meaning is lane and column."""
    n, position = SHAPES[shape]
    registers = "{" + ", ".join(f"%r{20 + i}" for i in range(n)) + "}"
    width = 32 if not shape.startswith("32") else 16
    wide = "{" + ", ".join(f"%r{20 + i}" for i in range(width)) + "}"
    store, load = (
        (("32x32b.x" + str(width), wide), (shape, registers))
        if direction == "ld"
        else ((shape, registers), ("32x32b.x" + str(width), wide))
    )
    count_in, count_out = (width, n) if direction == "ld" else (n, width)
    text = f"""{HEADER}.shared .align 4 .b32 holder;
.visible .entry k(.param .u64 p_in, .param .u64 p_out)
{{
  .reg .b32 %r<64>; .reg .b64 %d<8>;
  ld.param.u64 %d0, [p_in]; ld.param.u64 %d1, [p_out];
  mov.u32 %r0, %tid.x;
  mov.u32 %r1, holder;
  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 64;
  ld.shared.b32 %r2, [%r1];
  mul.wide.u32 %d2, %r0, {4 * count_in};
  add.u64 %d3, %d0, %d2;
{"".join(f"  ld.global.b32 %r{20 + i}, [%d3+{4 * i}];" for i in range(count_in))}
  tcgen05.st.sync.aligned.{store[0]}.b32 [%r2], {store[1]};
  tcgen05.wait::st.sync.aligned;
  tcgen05.ld.sync.aligned.{load[0]}.b32 {load[1]}, [%r2];
  tcgen05.wait::ld.sync.aligned;
  mul.wide.u32 %d4, %r0, {4 * count_out};
  add.u64 %d5, %d1, %d4;
{"".join(f"  st.global.b32 [%d5+{4 * i}], %r{20 + i};" for i in range(count_out))}
  tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 64;
  ret;
}}
"""
    rng = np.random.default_rng(1)
    source = rng.integers(0, 1 << 32, (32, count_in), dtype=np.uint32)
    out = np.zeros((32, count_out), np.uint32)
    run_ptx(text, 1, 32, [source, out])
    for lane in range(32):
        for j in range(n):
            row, column = position(lane, j)
            if direction == "ld":
                assert out[lane, j] == source[row, column]
            else:
                assert out[row, column] == source[lane, j]


WGMMA = (
    HEADER.replace("sm_100a", "sm_90a")
    + f"""
.shared .align 1024 .b8 image[{IMAGE}];
.visible .entry k(.param .u64 p_image, .param .u64 p_out, .param .u64 p_a, .param .u64 p_b, .param .u64 p_registers)
{{
  .reg .pred %p<8>; .reg .b32 %r<64>; .reg .b64 %d<32>;
  ld.param.u64 %d0, [p_image]; ld.param.u64 %d1, [p_out]; ld.param.u64 %d2, [p_a]; ld.param.u64 %d3, [p_b];
  ld.param.u64 %d4, [p_registers];
  mov.u32 %r0, %tid.x;
  mov.u32 %r3, image;
  mov.u32 %r7, %r0;
COPY:
  shl.b32 %r8, %r7, 2;
  cvt.u64.u32 %d5, %r8;
  add.u64 %d6, %d0, %d5;
  ld.global.b32 %r9, [%d6];
  add.u32 %r10, %r3, %r8;
  st.shared.b32 [%r10], %r9;
  add.u32 %r7, %r7, 128;
  setp.lt.u32 %p3, %r7, {IMAGE // 4};
  @%p3 bra COPY;
  fence.proxy.async;
  bar.sync 0;
  and.b32 %r14, %r3, 0x3ffff;
  shr.u32 %r15, %r14, 4;
  cvt.u64.u32 %d9, %r15;
  add.u64 %d10, %d2, %d9;
  add.u64 %d11, %d3, %d9;
  mul.wide.u32 %d12, %r0, 16;
  add.u64 %d13, %d4, %d12;
  ld.global.v4.b32 {{%r40, %r41, %r42, %r43}}, [%d13];
  setp.ne.u32 %p1, %r3, %r3;
  wgmma.fence.sync.aligned;
  wgmma.mma_async.sync.aligned.m64n{N}k16.f32.TYPE.TYPE
    {{{", ".join(f"%r{20 + i}" for i in range(N // 2))}}}, OPERAND, %d11, %p1, 1, 1, MAJORS;
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned 0;
  mul.wide.u32 %d14, %r0, {2 * N};
  add.u64 %d15, %d1, %d14;
"""
    + "".join(f"  st.global.b32 [%d15+{4 * i}], %r{20 + i};\n" for i in range(N // 2))
    + "  ret;\n}\n"
)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("b_layout", [(False, 0), (False, 128), (True, 64)])
@pytest.mark.parametrize("a_layout", [None, (False, 0), (False, 32), (False, 128), (True, 64), (True, 128)])
def test_wgmma(bf16: bool, a_layout, b_layout) -> None:
    a, b = operands(64, bf16)
    image = np.zeros(IMAGE, np.uint8)
    registers = np.zeros((128, 4, 2), np.uint16)
    hopper = {0: 0, 2: 1, 4: 2, 6: 3}  # the swizzle's number in bits 62 and 63; there is no version

    def convert(d: int) -> int:
        return d & ((1 << 46) - 1) | hopper[d >> 61] << 62

    if a_layout is None:
        for thread in range(128):  # the ISA's fragment: row of the warp's 16, pair of columns
            warp, lane = divmod(thread, 32)
            for i in range(4):
                row, column = 16 * warp + lane // 4 + 8 * (i % 2), 2 * (lane % 4) + 8 * (i // 2)
                registers[thread, i] = bits(a[row, column : column + 2], bf16)
        a_descriptor, operand, majors = 0, "{%r40, %r41, %r42, %r43}", f"{int(b_layout[0])}"
    else:
        a_descriptor = convert(place(image, 0, bits(a, bf16), *a_layout))
        operand, majors = "%d10", f"{int(a_layout[0])}, {int(b_layout[0])}"
    b_descriptor = convert(place(image, IMAGE // 2, bits(b, bf16), *b_layout))
    out = np.zeros((128, N // 2), np.float32)
    text = WGMMA.replace("TYPE", "bf16" if bf16 else "f16").replace("OPERAND", operand).replace("MAJORS", majors)
    run_ptx(text, 1, 128, [image, out, a_descriptor, b_descriptor, registers])
    expected = a @ b.T
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for i in range(N // 2):
            row = 16 * warp + lane // 4 + 8 * (i // 2 % 2)
            assert out[thread, i] == expected[row, 8 * (i // 4) + 2 * (lane % 4) + i % 2]
    arguments = [image, np.zeros_like(out), a_descriptor, b_descriptor, registers]
    with pytest.raises(HazardError, match="async proxy"):
        run_ptx(text.replace("  fence.proxy.async;\n", ""), 1, 128, arguments)
