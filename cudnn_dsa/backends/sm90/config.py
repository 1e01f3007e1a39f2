"""The choices of the Hopper backward that are not part of the problem, and the sizes that follow from them."""

from dataclasses import astuple, dataclass

from cudnn_dsa.contracts.sparse_attention import Problem

SHARED_BYTES = 232448  # 227 KB: what a CTA of compute capability 9.0 may have
REGISTERS = 65536  # of a multiprocessor
WARPGROUP = 128


@dataclass(frozen=True)
class BackwardConfig:
    """Tiles, stages and registers of ``backward_kernel.py``.

    Attributes:
        block_heads: heads of a CTA: the 64 rows of a wgmma.
        block_keys: keys of a tile, likewise.
        group_columns: columns of kv that are handed over, and whose dq a warpgroup owns, as one; at most 256, what a
            wgmma is wide.
        row_stages: tiles of row numbers that the index warp may be ahead.
        gather_warps: that copy keys, beside the index warp.
        registers: a thread of the (producer, score, dkv) warpgroups; multiples of 8. Accumulators take, of the score
            warpgroup, 64 + group_columns / 2, of the dkv warpgroup 64 and half of the other columns.
    """

    block_heads: int = 64
    block_keys: int = 64
    group_columns: int = 256
    row_stages: int = 4
    gather_warps: int = 3
    registers: tuple[int, int, int] = (24, 224, 256)

    def __post_init__(self) -> None:
        # A CTA starts with the same number for every thread, and setmaxnreg only moves what it has then.
        most = REGISTERS // self.threads // 8 * 8 * len(self.registers)
        if sum(self.registers) > most or any(r % 8 for r in self.registers):
            raise ValueError(f"registers {self.registers}: multiples of 8, {most} in all")

    @property
    def key(self) -> tuple:
        return astuple(self)

    @property
    def threads(self) -> int:
        return WARPGROUP * len(self.registers)

    def head_tiles(self, heads: int) -> int:
        return -(-heads // self.block_heads)

    def groups(self, columns: int) -> list[tuple[int, int]]:
        """(first column, number of columns) of each group of a row. The first is the score warpgroup's."""
        step = self.group_columns
        return [(first, min(step, columns - first)) for first in range(0, columns, step)]

    def shared_bytes(self, head_dim: int, head_dim_v: int) -> int:
        """Of one CTA: Q, dO, a tile of keys, P and dS in 16 bits; row numbers, counts and gains; barriers."""
        tiles = self.block_heads * (head_dim + head_dim_v + 2 * self.block_keys) + self.block_keys * head_dim
        rows = 4 * (self.row_stages * (self.block_keys + 1) + 5)
        barriers = 8 * 2 * (self.row_stages + len(self.groups(head_dim)) + 2)
        return 2 * tiles + -(-(rows + barriers) // 128) * 128


def backward_config(problem: Problem) -> BackwardConfig:
    """The tiles of a problem's kernel; depends on its kernel key alone."""
    # 512 columns leave the dkv warpgroup 32 accumulators fewer.
    return BackwardConfig(registers=(24, 240, 240) if problem.head_dim == 512 else (24, 224, 256))
