"""The key gather: selected rows of kv into a swizzled tile of shared memory, 16 bytes a thread and copy."""

# mypy: ignore-errors
# (Device code: the DSL stages it, and most of its types are the DSL's.)

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cudnn_dsa.cute import ptx

CHUNK = 64  # columns of a 128-byte row of the swizzled layout
PIECE = 8  # columns of a 16-byte copy


@cute.jit
def gather_columns(
    kv: cute.Pointer,
    rows: cute.Tensor,
    tile: cute.Pointer,
    thread: Int32,
    threads: cutlass.Constexpr[int],
    head_dim: cutlass.Constexpr[int],
    first: cutlass.Constexpr[int],
    columns: cutlass.Constexpr[int],
):
    """Start copying columns [first, first + columns) of ``rows`` into ``tile``; zeros where a row is NO_ROW.

    The tile is what a tensor copy with 128-byte swizzle writes, and both matrix units read, K-major over columns and
    MN-major over keys: chunks of 64 columns one after the other, in each 128 bytes a key, whose 16-byte pieces are
    permuted by key % 8. Neighbouring threads copy neighbouring pieces of a row, so that a warp reads whole lines.

    Args:
        kv: (S_kv, head_dim) in global memory, two bytes an element.
        rows: (keys,) int32 in shared memory.
        tile: of the first of these columns; 1024-byte aligned.
        thread: of ``threads`` that share the work.
    """
    keys = cutlass.const_expr(cute.size(rows))
    pieces = cutlass.const_expr(columns // PIECE)
    at_once = cutlass.const_expr(threads // pieces)  # rows that the threads copy together
    piece = thread % pieces
    first_key = thread // pieces
    source = kv + (first + piece * PIECE)
    chunk = tile + (piece // (CHUNK // PIECE)) * (keys * CHUNK)
    key = first_key
    if first_key < at_once:
        while key < keys:
            row = rows[key]
            size = Int32(16) if row >= 0 else Int32(0)
            # A row that does not count reads nothing, and points at row 0, which exists.
            offset = Int64(cutlass.max(row, 0)) * head_dim
            place = key * CHUNK + ((piece ^ key) % (CHUNK // PIECE)) * PIECE
            ptx.cp_async_16(chunk + place, source + offset, size)
            key += at_once
