"""``BlockSizes``: the tiles of the kernels, what they cost in vector memory, and the automatic choice."""

from __future__ import annotations

import dataclasses

from cudnn_dsa.contracts import ContractError
from cudnn_dsa_tpu.chips import MIB, Chip
from cudnn_dsa_tpu.contracts import Problem

NUM_LANES = 128
NUM_SUBLANES = 8
_ITEMSIZE = {"bfloat16": 2, "float32": 4}


def round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Tile sizes in tokens; each a multiple of 128. They change speed and memory, never results beyond rounding.

    Attributes:
        block_q: queries per tile of the forward kernel.
        block_kv: keys per tile that the forward kernel holds in vector memory.
        block_kv_compute: keys per step of the forward kernel's inner loop; divides ``block_kv``, by default all of it.
        block_q_dkv, block_kv_dkv, block_kv_dkv_compute: the same for the fused backward kernel and for the dkv kernel;
            by default those of the forward kernel.
        block_q_dq, block_kv_dq: tile of the unfused dq kernel; by default that of the dkv kernel.
    """

    block_q: int
    block_kv: int
    block_kv_compute: int | None = None
    block_q_dkv: int | None = None
    block_kv_dkv: int | None = None
    block_kv_dkv_compute: int | None = None
    block_q_dq: int | None = None
    block_kv_dq: int | None = None

    def __post_init__(self):
        forward_defaults = self.block_kv_dkv is None and self.block_kv_dkv_compute is None
        defaults = (
            ("block_kv_compute", "block_kv"),
            ("block_q_dkv", "block_q"),
            ("block_kv_dkv", "block_kv"),
            ("block_kv_dkv_compute", "block_kv_compute" if forward_defaults else "block_kv_dkv"),
            ("block_q_dq", "block_q_dkv"),
            ("block_kv_dq", "block_kv_dkv"),
        )
        for name, source in defaults:
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(self, source))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0 or value % NUM_LANES:
                raise ContractError(field.name, f"a positive multiple of {NUM_LANES}", repr(value))
        for inner, outer in (("block_kv_compute", "block_kv"), ("block_kv_dkv_compute", "block_kv_dkv")):
            if getattr(self, outer) % getattr(self, inner):
                raise ContractError(inner, f"a divisor of {outer}={getattr(self, outer)}", str(getattr(self, inner)))

    @property
    def forward(self) -> Tiles:
        return Tiles(self.block_q, self.block_kv, self.block_kv_compute or 0)

    @property
    def dkv(self) -> Tiles:
        return Tiles(self.block_q_dkv or 0, self.block_kv_dkv or 0, self.block_kv_dkv_compute or 0)

    @property
    def dq(self) -> Tiles:
        return Tiles(self.block_q_dq or 0, self.block_kv_dq or 0, self.block_kv_dq or 0)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tile of one kernel: queries, keys held, keys per compute step."""

    q: int
    kv: int
    kv_compute: int

    def grid(self, problem: Problem) -> tuple[int, int]:
        """(query tiles, key tiles) that cover the valid tokens."""
        return -(-problem.valid_q // self.q), -(-problem.valid_kv // self.kv)

    def kv_tail(self, problem: Problem) -> int:
        """How many keys of the last key tile exist."""
        return problem.valid_kv - (self.grid(problem)[1] - 1) * self.kv


def _padded(rows: int, columns: int, itemsize: int) -> int:
    """Bytes of a 2-D tile in vector memory, whose lanes come in 128."""
    return round_up(rows, 8) * round_up(columns, NUM_LANES) * itemsize


# Bytes per logit of a compute step that the compiler keeps at once, at most, as measured (test_aot_compile.py):
# fp32 operands are multiplied as sums of three bf16 parts, which are kept as well.
_LOGIT_BYTES_FORWARD = {"bfloat16": 8, "float32": 22}
_LOGIT_BYTES_BACKWARD = {"bfloat16": 12, "float32": 36}


def forward_vmem_bytes(tiles: Tiles, problem: Problem) -> int:
    """Vector memory that suffices for the forward kernel: double-buffered blocks (the output in fp32, as for training),
    scratch, and the logits of one step."""
    item = _ITEMSIZE[problem.dtype]
    d, dv = problem.head_dim, problem.head_dim_v
    blocks = _padded(tiles.q, d, item) + _padded(tiles.kv, d, item) + _padded(tiles.kv, dv, item)
    blocks += _padded(tiles.q, dv, 4) + _padded(8, tiles.q, 4)
    scratch = _padded(tiles.q, dv, 4) + 2 * _padded(tiles.q, NUM_LANES, 4)
    logits = _padded(tiles.q, tiles.kv_compute, _LOGIT_BYTES_FORWARD[problem.dtype])
    if problem.fixed_m:  # its own, transposed scratch, and the logits of the whole tile
        scratch += _padded(dv, tiles.q, 4) + 2 * _padded(8, tiles.q, 4)
        logits = _padded(tiles.kv, tiles.q, 4 + item)
    return 2 * blocks + scratch + logits


def backward_vmem_bytes(tiles: Tiles, problem: Problem) -> int:
    """Vector memory that suffices for a backward kernel (the fused one, the largest): double-buffered blocks (dk and dv
    in fp32, as in a ring), scratch, dq's part of every step, and the logits of one step."""
    item = _ITEMSIZE[problem.dtype]
    d, dv = problem.head_dim, problem.head_dim_v
    queries = _padded(tiles.q, d, item) + _padded(tiles.q, dv, item) + 2 * _padded(8, tiles.q, 4)
    keys = _padded(tiles.kv, d, item + 4) + _padded(tiles.kv, dv, item + 4)
    scratch = _padded(tiles.kv, d, 4) + _padded(tiles.kv, dv, 4) + _padded(d, tiles.kv, item)
    dq = (2 * 2 + tiles.kv // tiles.kv_compute) * _padded(d, tiles.q, 4)
    logits = _padded(tiles.kv_compute, tiles.q, _LOGIT_BYTES_BACKWARD[problem.dtype])
    return 2 * (queries + keys) + dq + scratch + logits


def vmem_bytes(sizes: BlockSizes, problem: Problem) -> dict[str, int]:
    """Estimated vector memory of the kernels, by the block sizes that decide it."""
    return {
        "block_q x block_kv": forward_vmem_bytes(sizes.forward, problem),
        "block_q_dkv x block_kv_dkv": backward_vmem_bytes(sizes.dkv, problem),
        "block_q_dq x block_kv_dq": backward_vmem_bytes(sizes.dq, problem),
    }


def check_vmem(sizes: BlockSizes, problem: Problem, chip: Chip) -> None:
    """Raises a ``ContractError`` if a kernel with these tiles cannot fit the chip's vector memory."""
    for name, need in vmem_bytes(sizes, problem).items():
        if need > chip.vmem_limit_bytes:
            raise ContractError(
                f"block_sizes ({name})",
                f"at most {chip.vmem_limit_bytes / MIB:.0f} MiB of vector memory on {chip.name}",
                f"about {need / MIB:.0f} MiB",
                "smaller blocks, or a smaller compute block",
            )


def resolve(block_sizes: BlockSizes | str, problem: Problem, chip: Chip) -> BlockSizes:
    """The block sizes of a call: those given, checked against the chip, or the automatic choice for ``"auto"``."""
    if isinstance(block_sizes, BlockSizes):
        check_vmem(block_sizes, problem, chip)
        return block_sizes
    if block_sizes != "auto":
        raise ContractError("block_sizes", "BlockSizes or 'auto'", repr(block_sizes))
    return auto_block_sizes(problem, chip)


# Longest query tile of the automatic choice. Longer ones still gain a little, and take minutes to compile.
_LONGEST_AUTO_Q = 5120

# Bundles of forward and backward per query are proportional to 1 + this / block_q (docs/tpu.md, measured for v6e).
_TILE_OVERHEAD = 100


def auto_block_sizes(problem: Problem, chip: Chip) -> BlockSizes:
    """The query tile with the least static cost (padded length times cost per query), key tiles of 1024, both smaller
    where the chip's vector memory asks for it.

    A padded query costs as much as a real one; a padded key costs nothing (the last key tile is sliced).
    """
    queries = sorted(range(NUM_LANES, _LONGEST_AUTO_Q + 1, NUM_LANES), key=lambda q: _query_cost(problem.valid_q, q))
    longest = round_up(problem.valid_kv, NUM_LANES)
    for kv in (1024, 512, 256, 128):
        kv = min(kv, longest)
        compute = next(c for c in (512, 384, 256, NUM_LANES) if kv % c == 0)
        for q in queries:
            sizes = BlockSizes(block_q=q, block_kv=kv, block_kv_compute=compute)
            if max(vmem_bytes(sizes, problem).values()) <= chip.vmem_limit_bytes:
                return sizes
    raise ContractError("block_sizes", f"a tile that fits {chip.name}", f"none for {problem}")


def _query_cost(length: int, block: int) -> float:
    """Relative cost of covering ``length`` queries with tiles of ``block``."""
    return round_up(length, block) * (1 + _TILE_OVERHEAD / block)
