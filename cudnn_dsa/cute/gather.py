"""The key gather: selected rows of kv into a swizzled tile of shared memory, 16 bytes a thread and copy."""

# mypy: ignore-errors
# (Device code: the DSL stages it, and most of its types are the DSL's.)

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cudnn_dsa.cute import ptx
from cudnn_dsa.cute.selection import WARP

CHUNK = 64  # columns of a 128-byte row of the swizzled layout
PIECE = 8  # columns of a 16-byte copy
UNIT = 8  # rows after which the swizzle repeats: what a warp copies before it looks further


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
    batch: cutlass.Constexpr[int] = 1,
):
    """Start copying columns [first, first + columns) of ``rows`` into ``tile``; zeros where a row is NO_ROW.

    The tile is what a tensor copy with 128-byte swizzle writes, and both matrix units read, K-major over columns and
    MN-major over keys: chunks of 64 columns one after the other, in each 128 bytes a key, whose 16-byte pieces are
    permuted by key % 8. Neighbouring lanes copy neighbouring pieces of a row, so that a warp reads whole lines. Eight
    rows are unrolled: within them the permutation is known, and a copy costs four instructions.

    Args:
        kv: (S_kv, head_dim) in global memory, two bytes an element.
        rows: (keys,) int32 in shared memory, a multiple of 8; NO_ROW only behind the last valid one.
        tile: of the first of these columns; 1024-byte aligned.
        thread: of ``threads``, whole warps, that share the work.
        columns: 64, 128 or 256.
        batch: row numbers loaded ahead of their copies, a register each: 1, 2, 4 or 8.
    """
    keys = cutlass.const_expr(cute.size(rows))
    lanes = cutlass.const_expr(columns // PIECE)  # that copy a row
    at_once = cutlass.const_expr(WARP // lanes)  # rows of a copy by a warp
    piece, row_of = thread % WARP % lanes, thread % WARP // lanes
    source = kv + (first + piece * PIECE)
    # Addresses in bytes. A key has 128 of them, whose bits 4 to 6 say which piece.
    chunk = tile.toint() + piece // UNIT * (keys * 2 * CHUNK)
    target = chunk + row_of * (2 * CHUNK) + (piece % UNIT ^ row_of) * (2 * PIECE)
    batch = cutlass.const_expr(min(batch, UNIT // at_once))
    unit = thread // WARP
    while unit < keys // UNIT:
        place = target + unit * (UNIT * 2 * CHUNK)
        # Numbers first: a copy might write what a load behind it reads, for all that the compiler knows.
        numbers = cute.make_rmem_tensor(batch, Int32)
        if rows[unit * UNIT + UNIT - 1] >= 0:
            for start in cutlass.range_constexpr(0, UNIT // at_once, batch):
                for i in cutlass.range_constexpr(batch):
                    numbers[i] = rows[unit * UNIT + (start + i) * at_once + row_of]
                for i in cutlass.range_constexpr(batch):
                    key = (start + i) * at_once
                    ptx.cp_async_16(_at(tile, place, key), source + Int64(numbers[i]) * head_dim)
        else:
            for i in cutlass.range_constexpr(UNIT // at_once):
                row = rows[unit * UNIT + i * at_once + row_of]
                size = Int32(16) if row >= 0 else Int32(0)
                # A row that does not count reads nothing, and points at row 0, which exists.
                offset = Int64(cutlass.max(row, 0)) * head_dim
                ptx.cp_async_16(_at(tile, place, i * at_once), source + offset, size)
        unit += threads // WARP


def _at(tile: cute.Pointer, place: Int32, key: int) -> cute.Pointer:
    """A piece's place, ``key`` rows behind that of ``place`` in a unit."""
    address = (place ^ (key * 2 * PIECE)) + key * 2 * CHUNK
    return cute.make_ptr(tile.dtype, address, cute.AddressSpace.smem, assumed_align=16)
