"""The dkv reduction: rows of an accumulator tile added to the selected rows of an fp32 buffer.

A lane of a wgmma accumulator holds, of each row, columns (2q, 2q + 1) of every eight, q = lane % 4. Four consecutive
fp32 make a vector reduction, so two neighbouring groups of eight are stored interleaved: of 16 columns, lane q's
(2q, 2q + 1, 8 + 2q, 9 + 2q) lie together at 4q. ``finish.py`` undoes that.
"""

# mypy: ignore-errors
# (Device code: the DSL stages it, and most of its types are the DSL's.)

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cudnn_dsa.cute import ptx
from cudnn_dsa.cute.softmax import accumulator_rows

GROUP = 16  # columns that are interleaved with each other
LINE = 32  # fp32 of a 128-byte line
MAX_ELEMENTS = 2**33 - 4  # of dkv: offsets in vectors of four are int32


def real_column(place: int) -> int:
    """The column, of 16, whose value lies at ``place`` of the interleaved row."""
    lane, value = divmod(place, 4)
    return 2 * lane + value % 2 + 8 * (value // 2)


@dataclass(frozen=True)
class Targets:
    """Where a lane adds to: its pairs of neighbouring rows.

    Two lanes whose rows are neighbours (l and l ^ 4, rows 2i and 2i + 1) swap halves first: then eight lanes cover 128
    bytes of one row, and a warp's vector reduction covers four whole lines instead of eight halves.

    Attributes:
        odd: whether the lane's own rows are the second ones of their pairs.
        offsets: of two pairs of rows, into dkv, in vectors of four fp32; negative where nothing is to be added. They
            are 32 bits wide, since registers are short: S_kv * D is at most ``MAX_ELEMENTS``.
    """

    odd: Boolean
    offsets: tuple[Int32, ...]

    @staticmethod
    def create(rows: cute.Tensor, thread: Int32, head_dim: int) -> "Targets":
        """Of a warpgroup's (64 keys, columns) accumulator.

        Args:
            rows: the tile's rows, (64,) int32 in shared memory; NO_ROW where nothing is to be added.
            thread: of the warpgroup.
        """
        lane = thread % 32
        odd = (lane // 4) % 2
        first = thread // 32 * 16 + lane // 8 * 2
        column = (lane % 4) * 4 + odd * GROUP
        # NO_ROW is -1, and column < head_dim: the offset of such a row stays negative.
        offsets = [rows[first + i] * (head_dim // 4) + column // 4 for i in (0, 1, 8, 9)]
        return Targets(odd == 1, tuple(offsets))


def add(dkv: cute.Pointer, targets: Targets, acc: cute.Tensor, column: int, factor: Float32 | None = None) -> None:
    """Add an accumulator of (64 keys, columns), times ``factor``, to columns [column, ...) of the targets.

    dkv is (S_kv, head_dim) fp32.
    """
    if factor is not None:
        acc.store(acc.load() * factor)
    values = accumulator_rows(acc)
    for half in range(2):
        even_row, odd_row = targets.offsets[2 * half : 2 * half + 2]
        for line in range(cute.size(values, mode=[1]) // 8):
            even, odd = [], []
            for i in range(4):
                first, second = values[half, 8 * line + i], values[half, 8 * line + 4 + i]
                given = ptx.choose(targets.odd, first, second)
                got = cute.arch.shuffle_sync_bfly(given, offset=4)
                even.append(ptx.choose(targets.odd, got, first))
                odd.append(ptx.choose(targets.odd, second, got))
            for offset, four in ((even_row, even), (odd_row, odd)):
                place = dkv + (Int64(offset) * 4 + (column + line * LINE))
                ptx.red_add_v4(place, four, offset >= 0)
