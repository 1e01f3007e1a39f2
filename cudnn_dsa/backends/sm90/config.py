"""The choices of the Hopper kernels that are not part of the problem, and the sizes that follow from them."""

from dataclasses import astuple, dataclass

from cudnn_dsa.contracts.sparse_attention import Problem

SHARED_BYTES = 232448  # 227 KB: what a CTA of compute capability 9.0 may have
REGISTERS = 65536  # of a multiprocessor
WARPGROUP = 128
WARPS = 4  # of a warpgroup


@dataclass(frozen=True)
class Config:
    """What the kernels have in common.

    Attributes:
        registers: a thread of each warpgroup, the producer first; multiples of 8.
        kv_stages: tiles of keys in shared memory.
        block_heads: heads of a CTA: the 64 rows of a wgmma.
        block_keys: keys of a tile, likewise.
        group_columns: columns of kv that are handed over as one; at most 256, what a wgmma is wide.
        row_stages: tiles of row numbers that the index warp may be ahead.
        gather_warps: that copy keys, beside the index warp.
        gather_batch: row numbers that a gather warp loads ahead, where it has registers for them.
    """

    registers: tuple[int, ...]
    kv_stages: int = 1
    block_heads: int = 64
    block_keys: int = 64
    group_columns: int = 256
    row_stages: int = 4
    gather_warps: int = 3
    gather_batch: int = 1

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
        """(first column, number of columns) of each group of a row."""
        step = self.group_columns
        return [(first, min(step, columns - first)) for first in range(0, columns, step)]

    def shared_bytes(self, dense_columns: int, tiles: int, words: int, head_dim: int, rings: int) -> int:
        """Of one CTA.

        Args:
            dense_columns: of all dense operands together, ``block_heads`` rows in 16 bits.
            tiles: of block_heads x block_keys in 16 bits.
            words: of 4 bytes, beside row numbers and their counts.
            rings: of one stage, beside those of rows and keys.
        """
        halves = self.block_heads * (dense_columns + tiles * self.block_keys)
        halves += self.kv_stages * self.block_keys * head_dim
        stages = self.row_stages + self.kv_stages * len(self.groups(head_dim)) + rings
        small = 4 * (self.row_stages * (self.block_keys + 1) + words) + 16 * stages
        return 2 * halves + -(-small // 128) * 128


def backward_config(problem: Problem) -> Config:
    """Of ``backward_kernel.py``: (producer, score, dkv) warpgroups; depends on the problem's kernel key alone.

    The accumulators of the score warpgroup take 64 + 128 registers, those of the dkv warpgroup 64 and half of the
    columns from 256 on: 512 columns leave it 32 more than 576.
    """
    return Config(registers=(24, 240, 240) if problem.head_dim == 512 else (24, 224, 256))


def backward_shared(config: Config, head_dim: int, head_dim_v: int) -> int:
    """Bytes: Q, dO; P, dS; the peaks of four warps and a gain; rings of queries and of P."""
    return config.shared_bytes(head_dim + head_dim_v, 2, WARPS + 1, head_dim, 2)


def forward_config(problem: Problem) -> Config:
    """Of ``forward_kernel.py``: (producer, score, output, output) warpgroups; depends on the kernel key alone."""
    return Config(registers=(40, 136, 168, 168), kv_stages=2, gather_batch=8)


def forward_shared(config: Config, head_dim: int) -> int:
    """Bytes: Q; P; a rescaling and a final factor for each head; rings of queries, of P and of the final factors."""
    return config.shared_bytes(head_dim, 1, 2 * config.block_heads, head_dim, 3)
