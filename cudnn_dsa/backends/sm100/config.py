"""The choices of the SM100 backward in one value: tiles, stages, roles, and the memory maps that follow from them."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import cached_property

from cudnn_dsa.backends.sm100.layout import Tile

SHARED_LIMIT = 227 * 1024
TMEM_COLUMNS = 512
KEYS = 64  # keys of a tile
CHUNK = 128  # rows of dkv^T that one accumulator holds: the M of a full-rate instruction
HEAD_TILES = (16, 32, 64)


def head_tile(heads: int) -> int:
    """Heads that one CTA handles: the smallest tile that holds them all, at most 64."""
    return next((tile for tile in HEAD_TILES if tile >= heads), HEAD_TILES[-1])


@dataclass(frozen=True)
class Registers:
    """Registers a thread of each warpgroup after setmaxnreg; the sum over warpgroups is what the CTA started with."""

    gather: int = 40
    softmax: int = 152
    reduce: int = 96
    issue: int = 96


@dataclass(frozen=True)
class Config:
    """``element``: "bf16" or "f16". ``heads``: H of the problem. ``heads_tile``: heads of one CTA."""

    element: str
    head_dim: int
    heads: int
    heads_tile: int
    has_topk_length: bool = False
    head_dim_v: int = 512
    partials: bool = False  # rows of dkv are stored, each to a slot of its own, and added by another kernel
    ring: int = 4  # tiles of row numbers that the index warp may be ahead
    registers: Registers = Registers()

    def __post_init__(self) -> None:
        if self.shared_bytes > SHARED_LIMIT or self.tmem_end > TMEM_COLUMNS:
            raise ValueError(f"{self}: {self.shared_bytes} bytes of shared memory, {self.tmem_end} TMEM columns")

    @property
    def key(self) -> tuple:
        """All of it, as plain values."""
        return astuple(self)

    # Warps: four warpgroups of one role each, then a warp that issues products and one that reads indices.
    gather_warps = range(4)
    softmax_warps = range(4, 8)
    reduce_warps = range(8, 16)
    issue_warp = 16
    index_warp = 17
    threads = 640

    # Tiles
    @cached_property
    def q(self) -> Tile:
        return Tile(self.heads_tile, self.head_dim)

    @cached_property
    def dout(self) -> Tile:
        return Tile(self.heads_tile, self.head_dim_v)

    @cached_property
    def kv(self) -> Tile:
        return Tile(KEYS, self.head_dim)

    @cached_property
    def p(self) -> Tile:
        """P and dS: keys x heads."""
        return Tile(KEYS, self.heads_tile, self.heads_tile)

    @cached_property
    def full_chunks(self) -> int:
        return self.head_dim // CHUNK

    @cached_property
    def rest(self) -> int:
        """Rows of dkv^T past the full chunks: 0 or 64."""
        return self.head_dim % CHUNK

    @cached_property
    def chunks(self) -> int:
        return self.full_chunks + (self.rest > 0)

    def chunk_rows(self, chunk: int) -> int:
        return CHUNK if chunk < self.full_chunks else self.rest

    @cached_property
    def head_tiles(self) -> int:
        return -(-self.heads // self.heads_tile)

    @cached_property
    def lookahead_chunk(self) -> int:
        """The chunk before which the next tile's scores are issued: two of them stay in flight over it."""
        return self.chunks - 2

    # Shared memory, bytes
    @cached_property
    def kv_stages(self) -> int:
        fixed = self.q.bytes + self.dout.bytes + 2 * self.p.bytes + 2048
        return min(2, (SHARED_LIMIT - fixed) // self.kv.bytes)

    @cached_property
    def offset_dout(self) -> int:
        return self.q.bytes

    @cached_property
    def offset_kv(self) -> int:
        return self.offset_dout + self.dout.bytes

    @cached_property
    def offset_p(self) -> int:
        return self.offset_kv + self.kv_stages * self.kv.bytes

    @cached_property
    def offset_ds(self) -> int:
        return self.offset_p + self.p.bytes

    @cached_property
    def offset_rows(self) -> int:
        return self.offset_ds + self.p.bytes

    @cached_property
    def offset_counts(self) -> int:
        return self.offset_rows + self.ring * KEYS * 4

    @cached_property
    def offset_tmem(self) -> int:
        return self.offset_counts + self.ring * 4

    @cached_property
    def offset_barriers(self) -> int:
        return self.offset_tmem + 16

    @cached_property
    def rings(self) -> dict[str, tuple[int, int, int]]:
        """name -> (stages, arrivals at ``full``, arrivals at ``empty``); commits of the tensor core count as one."""
        return {
            "rows": (self.ring, 1, len(self.reduce_warps)),
            "kv": (self.kv_stages, len(self.gather_warps), 1),
            "scores": (1, 1, 1),  # emptied by whoever fills p
            "p": (1, len(self.softmax_warps), 1),
            "dkv": (self.dkv_buffers, 1, len(self.reduce_warps) // 2),
            "dq": (1, 1, 1),
        }

    @cached_property
    def shared_bytes(self) -> int:
        return self.offset_barriers + 8 * sum(2 * stages for stages, _, _ in self.rings.values())

    # Tensor memory, columns. S lies in lanes 0-15 of each warp's 32, dP in lanes 16-31 of the same columns (M = 64).
    tmem_dp = 16 << 16

    @cached_property
    def tmem_dkv(self) -> int:
        return self.heads_tile

    @cached_property
    def dkv_buffers(self) -> int:
        """Two, or four where the columns are there: a multiple of the two warpgroups that empty them."""
        return 4 if self.heads_tile + 4 * KEYS + self.dq_columns <= TMEM_COLUMNS else 2

    @cached_property
    def tmem_dq(self) -> int:
        return self.tmem_dkv + self.dkv_buffers * KEYS

    @cached_property
    def dq_columns(self) -> int:
        return self.chunks * self.heads_tile

    @cached_property
    def tmem_end(self) -> int:
        return self.tmem_dq + self.dq_columns

    @cached_property
    def tmem_allocated(self) -> int:
        return max(32, 1 << (self.tmem_end - 1).bit_length())


@dataclass(frozen=True)
class ForwardConfig:
    """The choices of the forward. Tiles always have 64 heads: those past H are zeros.

    Shared memory at D = 576: Q 72 KB, two stages of keys 144 KB, P 8 KB.
    """

    element: str
    head_dim: int
    heads: int
    has_sink: bool
    has_topk_length: bool
    head_dim_v: int = 512
    ring: int = 4
    registers: tuple[int, int, int] = (80, 240, 120)  # gather, softmax, issue

    issue_warp = 8
    index_warp = 9
    threads = 384
    heads_tile = 64
    kv_stages = 2
    tmem_out = 64
    tmem_allocated = 512
    offset_kv = property(lambda self: self.q.bytes)
    offset_p = property(lambda self: self.offset_kv + self.kv_stages * self.kv.bytes)
    offset_rows = property(lambda self: self.offset_p + self.p.bytes)
    offset_counts = property(lambda self: self.offset_rows + self.ring * KEYS * 4)
    offset_factors = property(lambda self: self.offset_counts + self.ring * 4)
    offset_tmem = property(lambda self: self.offset_factors + (2 * KEYS + 8) * 4)
    offset_barriers = property(lambda self: self.offset_tmem + 16)

    @property
    def q(self) -> Tile:
        return Tile(self.heads_tile, self.head_dim)

    @property
    def kv(self) -> Tile:
        return Tile(KEYS, self.head_dim)

    @property
    def p(self) -> Tile:
        """P: heads x keys."""
        return Tile(self.heads_tile, KEYS)

    @property
    def head_tiles(self) -> int:
        return -(-self.heads // self.heads_tile)

    @property
    def rings(self) -> dict[str, tuple[int, int, int]]:
        """As ``Config.rings``."""
        return {"rows": (self.ring, 1, 4), "kv": (self.kv_stages, 4, 1), "scores": (1, 1, 1), "p": (1, 4, 1)}

    @property
    def shared_bytes(self) -> int:
        return self.offset_barriers + 8 * sum(2 * stages for stages, _, _ in self.rings.values())

    @property
    def key(self) -> tuple:
        return astuple(self)
