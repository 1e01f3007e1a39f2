"""tcgen05.cp, tcgen05.mma.ws, f16 accumulators and 16-bit packing: expectations from the ISA's figures, in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from test_tcgen05 import IMAGE, KERNEL, K, bits, descriptor, place

from cute_emulator import ExecutionError, HazardError, UnsupportedInstruction, run_ptx


def columns(operation: str, image: np.ndarray, a: int = 0, b: int = 0, idesc: int = 0, **options) -> np.ndarray:
    """The first 32 columns of tensor memory, (128, 32) words, after one operation."""
    out = np.zeros((128, 32), np.uint32)
    text = KERNEL.replace("OPERATION2", operation).replace("OPERATION", operation)
    run_ptx(text, 1, 128, [image, out, a, b, idesc, np.zeros((128, 16), np.uint16), 0], **options)
    return out


# shape: bytes of a row, the lanes that get each row of the source
COPIES = {
    "128x256b": (32, [[r] for r in range(128)]),
    "4x256b": (32, [[0], [32], [64], [96]]),
    "128x128b": (16, [[r] for r in range(128)]),
    "64x128b.warpx2::02_13": (16, [[r, r + 64] for r in range(64)]),  # warps 0 and 2, warps 1 and 3
    "64x128b.warpx2::01_23": (16, [[r % 32 + 64 * (r // 32), r % 32 + 64 * (r // 32) + 32] for r in range(64)]),
    "32x128b.warpx4": (16, [[r, r + 32, r + 64, r + 96] for r in range(32)]),
}


@pytest.mark.parametrize("swizzle", [0, 32])
@pytest.mark.parametrize("shape", COPIES)
def test_copy_to_tensor_memory(shape: str, swizzle: int) -> None:
    row_bytes, lanes = COPIES[shape]
    rows = max(len(lanes), 8)
    source = np.random.default_rng(5).integers(0, 1 << 32, (rows, 8), dtype=np.uint32)
    image = np.zeros(IMAGE, np.uint8)
    for r in range(rows):
        for chunk in range(2):
            if swizzle:  # lines of 32 bytes; the second four lines of eight have their halves exchanged
                at = r * 32 + 16 * (chunk ^ (r // 4 % 2))
            else:  # core matrices of 8 rows: first those along the rows, then those along the row
                at = chunk * 16 * rows + r * 16
            image[at : at + 16] = source[r, 4 * chunk : 4 * chunk + 4].view(np.uint8)
    d = descriptor(0, 0, 256, 32) if swizzle else descriptor(0, 16 * rows, 128, 0)
    for seed in range(3):
        got = columns(f"tcgen05.cp.cta_group::1.{shape} [%r11], %d10;", image, d, seed=seed)
        words = row_bytes // 4
        written = np.zeros(128, bool)
        for r, targets in enumerate(lanes):
            for lane in targets:
                np.testing.assert_array_equal(got[lane, :words], source[r, :words])
                written[lane] = True
        assert not (got[~written, :words] == source[0, :words]).any()
        assert (got[:, words:] == got[0, words]).all()  # never written


def test_copies_that_decompress_are_refused() -> None:
    with pytest.raises(UnsupportedInstruction, match="b4x16_p64"):
        columns("tcgen05.cp.cta_group::1.128x256b.b8x16.b4x16_p64 [%r11], %d10;", np.zeros(IMAGE, np.uint8))


def test_a_copy_is_complete_only_after_a_commit() -> None:
    text = KERNEL.replace("@%p4 OPERATION2", "").replace("OPERATION", "tcgen05.cp.cta_group::1.128x256b [%r11], %d10;")
    waiting = "WAIT:\n  mbarrier.try_wait.parity.shared.b64 %p5, [%r4], 0;\n  @!%p5 bra WAIT;\n"
    assert waiting in text
    arguments = [np.zeros(IMAGE, np.uint8), np.zeros((128, 32), np.uint32), descriptor(0, 2048, 128, 0), 0, 0]
    arguments += [np.zeros((128, 16), np.uint16), 0]
    run_ptx(text, 1, 128, arguments)
    # nor does a wait for stores to tensor memory cover it
    for instead in ("", "tcgen05.wait::st.sync.aligned;\n"):
        with pytest.raises((HazardError, ExecutionError)):
            run_ptx(text.replace(waiting, instead), 1, 128, arguments)


def test_cp_async_writes_through_the_generic_proxy() -> None:
    """A barrier alone does not show the tensor cores what cp.async has written."""
    store = "  ld.global.b32 %r9, [%d6];\n  add.u32 %r10, %r3, %r8;\n  st.shared.b32 [%r10], %r9;\n"
    fence = "  fence.proxy.async.shared::cta;\n"
    assert store in KERNEL
    assert fence in KERNEL
    text = KERNEL.replace(store, "  add.u32 %r10, %r3, %r8;\n  cp.async.ca.shared.global [%r10], [%d6], 4;\n")
    text = text.replace(fence, "  cp.async.wait_all;\n" + fence)
    mma = "tcgen05.mma.cta_group::1.kind::f16 [%r11], %d10, %d11, %r1, 0;"
    text = text.replace("@%p4 OPERATION2", "").replace("OPERATION", mma)
    a = descriptor(0, 2048, 128, 0)
    arguments = [np.zeros(IMAGE, np.uint8), np.zeros((128, 32), np.uint32), a, a, 1 << 4 | 4 << 17 | 8 << 24]
    arguments += [np.zeros((128, 16), np.uint16), 0]
    run_ptx(text, 1, 128, arguments)
    with pytest.raises(HazardError, match=r"(?s)without fence\.proxy\.async.*cp\.async of warp"):
        run_ptx(text.replace(fence, ""), 1, 128, arguments)


def test_an_accumulator_is_free_only_after_the_wait_for_its_load() -> None:
    """Load, barrier, next product into the same columns; the loaded values are used after that."""
    mma = "tcgen05.mma.cta_group::1.kind::f16 [%r11], %d10, %d11, %r1, 0;"
    wait = "  tcgen05.wait::ld.sync.aligned;\n"
    again = f"""  bar.sync 0;
  @!%p1 bra AGAIN;
  {mma}
  tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4];
AGAIN:
  mbarrier.try_wait.parity.shared.b64 %p5, [%r4], 1;
  @!%p5 bra AGAIN;
"""
    text = KERNEL.replace("@%p4 OPERATION2", "").replace("OPERATION", mma).replace(wait, wait + again)
    assert again in text
    a = descriptor(0, 2048, 128, 0)
    arguments = [np.zeros(IMAGE, np.uint8), np.zeros((128, 32), np.uint32), a, a, 1 << 4 | 4 << 17 | 8 << 24]
    arguments += [np.zeros((128, 16), np.uint16), 0]
    run_ptx(text, 1, 128, arguments)
    with pytest.raises(HazardError, match=r"(?s)write after read without a wait: tensor memory.*tcgen05\.ld of warp"):
        run_ptx(text.replace(wait, ""), 1, 128, arguments)


def product(m: int, n: int, operation: str, accumulator: int) -> tuple[np.ndarray, np.ndarray]:
    """(the first 32 columns of tensor memory, A B^T) for K-major bf16 or, for an f16 accumulator, f16 operands."""
    rng = np.random.default_rng(m + n)
    a, b = rng.integers(-8, 9, (m, K)) / 4, rng.integers(-8, 9, (n, K)) / 4
    image = np.zeros(IMAGE, np.uint8)
    bf16 = accumulator == 1
    da = place(image, 0, bits(a, bf16), False, 32)
    db = place(image, IMAGE // 2, bits(b, bf16), False, 32)
    idesc = accumulator << 4 | bf16 << 7 | bf16 << 10 | (n >> 3) << 17 | (m >> 4) << 24
    return columns(operation, image, da, db, idesc), a @ b.T


@pytest.mark.parametrize(("m", "n"), [(32, 128), (64, 64)])
def test_weight_stationary(m: int, n: int) -> None:
    """Layouts G and E: the part of N that a fold of the lanes holds."""
    got, expected = product(m, n, "tcgen05.mma.ws.cta_group::1.kind::f16 [%r11], %d10, %d11, %r1, 0;", 1)
    folds = 128 // m
    d = got.view(np.float32).reshape(folds, m, 32)
    np.testing.assert_array_equal(np.concatenate(list(d), axis=1), expected)


def test_weight_stationary_shapes_are_checked() -> None:
    with pytest.raises(ExecutionError, match=r"32 x 32 does not exist with cta_group::1 and \.ws"):
        product(32, 32, "tcgen05.mma.ws.cta_group::1.kind::f16 [%r11], %d10, %d11, %r1, 0;", 1)


def test_f16_accumulators() -> None:
    got, expected = product(128, 32, "tcgen05.mma.cta_group::1.kind::f16 [%r11], %d10, %d11, %r1, 0;", 0)
    np.testing.assert_array_equal((got & 0xFFFF).astype(np.uint16).view(np.float16), expected)


@pytest.mark.parametrize(
    ("shape", "repeat", "place_of"),
    [
        ("32x32b", 8, lambda lane, j: (lane, j)),
        ("16x64b", 8, lambda lane, j: (lane // 4 + 8 * (lane % 2), 2 * j + lane // 2 % 2)),
        ("16x128b", 4, lambda lane, j: (lane // 4 + 8 * (j % 2), 4 * (j // 2) + lane % 4)),
        ("16x256b", 2, lambda lane, j: (lane // 4 + 8 * (j // 2 % 2), 8 * (j // 4) + 2 * (lane % 4) + j % 2)),
    ],
)
def test_packed_stores(shape: str, repeat: int, place_of) -> None:
    """``unpack::16b``: the two halves of a register go to two adjacent columns."""
    names = ", ".join(f"%r{20 + j}" for j in range(8))
    text = KERNEL.replace("@%p4 OPERATION2", "").replace("OPERATION", "")
    text = text.replace(
        "tcgen05.st.sync.aligned.32x32b.x8.b32 [%r13+256]",
        f"tcgen05.st.sync.aligned.{shape}.x{repeat}.unpack::16b.b32 [%r13]",
    )
    assert names in text
    values = np.random.default_rng(1).integers(0, 1 << 32, (128, 8), dtype=np.uint32)
    out = np.zeros((128, 32), np.uint32)
    run_ptx(text, 1, 128, [np.zeros(IMAGE, np.uint8), out, 0, 0, 0, values, 0])
    for thread in range(128):
        for j in range(8):
            lane, column = place_of(thread % 32, j)
            row = out[thread // 32 * 32 + lane]
            assert (row[2 * column], row[2 * column + 1]) == (values[thread, j] & 0xFFFF, values[thread, j] >> 16)
