"""The 128-byte tensor map (CUtensorMap) of a tiled tensor, as the CuTe DSL's host code writes it.

TMA instructions find a tensor's address, sizes, strides, box and swizzle in it. NVIDIA documents only the function
that fills it, cuTensorMapEncodeTiled. The layout here was found by varying one thing at a time in what the DSL's own
host code passes to the driver (it fills the map without that function), and a test compares the two. 32-bit words:

    0-1    address
    2      2 | (rank - 1) << 4 | type << 7 | swizzle << 13 | 1 << 18 | large << 21
    3-6    byte strides of dims 1-4, >> 4
    7      their bits 36-39, a nibble each
    8-12   sizes - 1, fastest first
    13     box of dim 0, - 1, << 24
    14     boxes of dims 1-4, - 1, a byte each
    15-31  nothing

``large`` says that the tensor spans at least 128 KiB. The driver's own function sets it always up to CUDA 13.1, an
error on Blackwell that CUTLASS corrects too (copy_traits_sm90_tma.hpp, "driver_version <= 13010").
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

BYTES = 128
DEFINED = 64  # the bytes that hold something; the rest of what the DSL passes is whatever was on its stack
# dtype -> (the map's number for it, bytes of an element). The DSL passes integers as the unsigned type.
TYPES = {
    "uint8": (0, 1), "int32": (2, 4), "int64": (4, 8), "float16": (6, 2), "float32": (7, 4), "float64": (9, 8),
    "bfloat16": (10, 2),
}  # fmt: skip
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes of the span -> the map's number for it
_LARGE = 128 * 1024
_ALWAYS = 1 << 1 | 1 << 18


def encode(
    dtype: str, dims: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int, address: int = 0
) -> bytes:
    """The map of a tensor.

    Args:
        dtype: a name of ``TYPES``.
        dims: sizes in elements, fastest first; one to five, each at least 1.
        strides: bytes from one element to the next along dims[1:], multiples of 16 below 2**40.
        box: elements of a tile along each dimension, 1 to 256.
        swizzle: bytes of the swizzle's span (a key of ``SWIZZLES``).
        address: of the first element, a multiple of 16. It fills the first 8 bytes of the map and no others.

    Raises:
        ValueError: outside these limits, which are the hardware's.
    """
    number, size = TYPES[dtype]
    rank = len(dims)
    if not 1 <= rank <= 5 or len(strides) != rank - 1 or len(box) != rank:
        raise ValueError(f"{len(dims)} sizes, {len(strides)} strides and {len(box)} boxes make no tensor map")
    if address % 16 or any(s % 16 or not 0 <= s < 1 << 40 for s in strides):
        raise ValueError(f"a tensor map needs multiples of 16: address {address:#x}, strides {tuple(strides)}")
    if not all(1 <= n <= 1 << 32 for n in dims) or not all(1 <= n <= 256 for n in box):
        raise ValueError(f"sizes {tuple(dims)} or boxes {tuple(box)} are outside the limits of a tensor map")
    inner = box[0] * size
    if inner % 16 or (swizzle and inner > swizzle):
        raise ValueError(f"an inner box of {inner} bytes with a swizzle span of {swizzle}")
    span = size + (dims[0] - 1) * size + sum((n - 1) * s for n, s in zip(dims[1:], strides, strict=True))
    words = [0] * 32
    words[0], words[1] = address & 0xFFFFFFFF, address >> 32
    words[2] = _ALWAYS | (rank - 1) << 4 | number << 7 | SWIZZLES[swizzle] << 13 | (span >= _LARGE) << 21
    for i, stride in enumerate(strides):
        words[3 + i] = stride >> 4 & 0xFFFFFFFF
        words[7] |= stride >> 36 << 4 * i
    for i, n in enumerate(dims):
        words[8 + i] = n - 1
    words[13] = (box[0] - 1) << 24
    for i, n in enumerate(box[1:]):
        words[14] |= (n - 1) << 8 * i
    return struct.pack("<32I", *words)


def decode(data: bytes) -> dict[str, object]:
    """What a map says, in the arguments of :func:`encode` (for error messages and tests)."""
    words = struct.unpack("<16I", data[:DEFINED])
    rank = (words[2] >> 4 & 7) + 1
    return {
        "dtype": next((name for name, (number, _) in TYPES.items() if number == words[2] >> 7 & 15), "?"),
        "dims": tuple(words[8 + i] + 1 for i in range(rank)),
        "strides": tuple((words[3 + i] | (words[7] >> 4 * i & 15) << 32) << 4 for i in range(rank - 1)),
        "box": ((words[13] >> 24) + 1, *((words[14] >> 8 * i & 255) + 1 for i in range(rank - 1))),
        "swizzle": next(span for span, number in SWIZZLES.items() if number == words[2] >> 13 & 3),
        "address": words[0] | words[1] << 32,
    }
