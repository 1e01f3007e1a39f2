"""The dkv reduction: rows of an accumulator tile added to the selected rows of an fp32 buffer.

A lane of a wgmma accumulator holds, of each row, columns (2q, 2q + 1) of every eight, q = lane % 4. Four consecutive
fp32 make a vector reduction, so two neighbouring groups of eight are stored interleaved: of 16 columns, lane q's
(2q, 2q + 1, 8 + 2q, 9 + 2q) lie together at 4q. ``finish.py`` undoes that.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cudnn_dsa.cute import ptx
from cudnn_dsa.cute.softmax import accumulator_rows

GROUP = 16  # columns that are interleaved with each other
LINE = 32  # fp32 of a 128-byte line


def real_column(place: int) -> int:
    """The column, of 16, whose value lies at ``place`` of the interleaved row."""
    lane, value = divmod(place, 4)
    return 2 * lane + value % 2 + 8 * (value // 2)


@dataclass(frozen=True)
class Targets:
    """Where a lane adds to: its pairs of neighbouring rows, (pointer, whether the row counts) each.

    Two lanes whose rows are neighbours (l and l ^ 4, rows 2i and 2i + 1) swap halves first: then eight lanes cover 128
    bytes of one row, and a warp's vector reduction covers four whole lines instead of eight halves.
    """

    odd: Boolean
    rows: tuple[tuple[cute.Pointer, Boolean], ...]

    @staticmethod
    def create(dkv: cute.Pointer, rows: cute.Tensor, thread: Int32, head_dim: int) -> "Targets":
        """Of a warpgroup's (64 keys, columns) accumulator.

        Args:
            dkv: (S_kv, head_dim) fp32.
            rows: the tile's rows, (64,) int32 in shared memory; NO_ROW where nothing is to be added.
            thread: of the warpgroup.
        """
        lane = thread % 32
        odd = (lane // 4) % 2
        first = thread // 32 * 16 + lane // 8 * 2
        column = (lane % 4) * 4 + odd * GROUP
        targets = []
        for offset in (0, 1, 8, 9):
            row = rows[first + offset]
            targets.append((dkv + (Int64(row) * head_dim + column), row >= 0))
        return Targets(odd == 1, tuple(targets))


def add(targets: Targets, acc: cute.Tensor, column) -> None:
    """Add an accumulator of (64 keys, columns) to columns [column, ...) of the targets."""
    values = accumulator_rows(acc)
    for half in range(2):
        (even_row, even_valid), (odd_row, odd_valid) = targets.rows[2 * half : 2 * half + 2]
        for line in range(cute.size(values, mode=[1]) // 8):
            even, odd = [], []
            for i in range(4):
                first, second = values[half, 8 * line + i], values[half, 8 * line + 4 + i]
                given = ptx.choose(targets.odd, first, second)
                got = cute.arch.shuffle_sync_bfly(given, offset=4)
                even.append(ptx.choose(targets.odd, got, first))
                odd.append(ptx.choose(targets.odd, second, got))
            ptx.red_add_v4(even_row + (column + line * LINE), even, even_valid)
            ptx.red_add_v4(odd_row + (column + line * LINE), odd, odd_valid)
