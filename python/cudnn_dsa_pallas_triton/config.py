"""Tile sizes: what a configuration is, which ones are legal, and the defaults that ship."""

from __future__ import annotations

import dataclasses
import math

from cudnn_dsa.contracts import check_choice
from cudnn_dsa_pallas_triton.contracts import Problem
from cudnn_dsa_pallas_triton.lowering import MIN_DOT

KERNELS = ("forward", "dq", "dkv", "dbias")
_BLOCKS = (16, 32, 64, 128, 256)
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """How one kernel is tiled.

    Attributes:
        block_q, block_k: queries and keys of a tile; powers of two from 16.
        num_warps: warps of a program: 1, 2, 4, 8 or 16.
        num_stages: depth of Triton's software pipeline.
        head_chunk: the widest piece of the head dimensions that one dot takes; a power of two from 16. Smaller pieces
            need less shared memory.
    """

    block_q: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 2
    head_chunk: int = 512

    def __post_init__(self) -> None:
        check_choice("config.block_q", self.block_q, _BLOCKS)
        check_choice("config.block_k", self.block_k, _BLOCKS)
        check_choice("config.num_warps", self.num_warps, (1, 2, 4, 8, 16))
        check_choice("config.num_stages", self.num_stages, (1, 2, 3, 4, 5))
        check_choice("config.head_chunk", self.head_chunk, (16, 32, 64, 128, 256, 512))


@dataclasses.dataclass(frozen=True)
class Config:
    """The tiles of every kernel of one call.

    ``dbias`` is not used without a bias.
    """

    forward: KernelConfig
    dq: KernelConfig
    dkv: KernelConfig
    dbias: KernelConfig


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One piece of a head dimension: elements ``start`` to ``start + size``, of which those below ``dim`` exist."""

    start: int
    size: int
    dim: int

    @property
    def is_partial(self) -> bool:
        return self.start + self.size > self.dim


def head_chunks(dim: int, limit: int) -> tuple[Chunk, ...]:
    """Cut a head dimension into powers of two, at least 16 and at most ``limit``.

    The tail is rounded up when that wastes at most a quarter (120 is one chunk of 128); otherwise it is cut further (96
    is 64 + 32).
    """
    chunks: list[Chunk] = []
    start = 0
    while start < dim:
        rest = dim - start
        above = max(MIN_DOT, 1 << (rest - 1).bit_length())
        below = max(MIN_DOT, 1 << (rest.bit_length() - 1))
        size = min(limit, above if above - rest <= rest // 4 else below)
        chunks.append(Chunk(start, size, dim))
        start += size
    return tuple(chunks)


def padded_dim(chunks: tuple[Chunk, ...]) -> int:
    """The head dimension rounded up to the end of the last chunk."""
    return chunks[-1].start + chunks[-1].size


def _fit(block: int, length: int) -> int:
    """No tile longer than the sequence, rounded up to a power of two."""
    return min(block, max(MIN_DOT, 1 << (length - 1).bit_length()))


def fit(config: KernelConfig, problem: Problem) -> KernelConfig:
    """``config`` with its tiles cut to the sequence lengths of ``problem``."""
    return dataclasses.replace(
        config, block_q=_fit(config.block_q, problem.q_len), block_k=_fit(config.block_k, problem.kv_len)
    )


# The defaults for 16-bit inputs whose larger head dimension is at most the key. Up to 256 they are the fastest that an
# H200 showed (causal, and for a bias the rows of the second table); small tiles of 4 warps leave room for two programs
# per multiprocessor, so that the exponentials of one run beside the dots of the other.
# fmt: off
_DEFAULTS_16_BIT: dict[int, dict[str, KernelConfig]] = {
    64:  {"forward": KernelConfig(64, 64, 4, 3), "dq": KernelConfig(64, 64, 4, 3),
          "dkv": KernelConfig(64, 64, 4, 3), "dbias": KernelConfig(64, 64, 4, 2)},
    128: {"forward": KernelConfig(64, 64, 4, 3), "dq": KernelConfig(128, 64, 8, 3),
          "dkv": KernelConfig(64, 64, 4, 2), "dbias": KernelConfig(64, 64, 4, 2)},
    256: {"forward": KernelConfig(128, 64, 8, 2), "dq": KernelConfig(64, 32, 4, 4),
          "dkv": KernelConfig(64, 64, 8, 2), "dbias": KernelConfig(64, 64, 8, 1)},
    512: {"forward": KernelConfig(64, 32, 8, 1, 128), "dq": KernelConfig(32, 32, 8, 1, 128),
          "dkv": KernelConfig(16, 32, 8, 1, 128), "dbias": KernelConfig(32, 32, 8, 1, 128)},
}
_DEFAULTS_16_BIT_BIAS: dict[int, dict[str, KernelConfig]] = {
    64:  {"forward": KernelConfig(128, 64, 8, 3), "dq": KernelConfig(64, 32, 4, 3), "dkv": KernelConfig(32, 128, 4, 3)},
}
# With grouped heads dk/dv walks many query heads per block of keys.
_DEFAULTS_16_BIT_GROUPS: dict[int, dict[str, KernelConfig]] = {128: {"dkv": KernelConfig(64, 128, 8, 3)}}
_DEFAULTS_32_BIT: dict[int, dict[str, KernelConfig]] = {
    64:  {name: KernelConfig(32, 32, 4, 1) for name in KERNELS},
    128: {name: KernelConfig(32, 32, 4, 1, 64) for name in KERNELS},
    512: {name: KernelConfig(16, 16, 4, 1, 64) for name in KERNELS},
}
# fmt: on

# Enough programs to fill a large GPU twice.
_PROGRAMS = 256


def default_config(problem: Problem) -> Config:
    """The configuration that is used when none is given."""
    table = _DEFAULTS_32_BIT if _ITEMSIZE[problem.dtype] == 4 else _DEFAULTS_16_BIT
    dim = max(problem.head_dim, problem.v_head_dim)
    key = min(key for key in table if key >= dim)
    row = table[key]
    if table is _DEFAULTS_16_BIT:
        row = row | (_DEFAULTS_16_BIT_BIAS.get(key, {}) if "bias" in problem.operands else {})
        row = row | (_DEFAULTS_16_BIT_GROUPS.get(key, {}) if problem.group > 1 else {})
    return Config(**row)


def dbias_splits(programs: int, steps: int) -> int:
    """Partial sums of the bias gradient: enough that its programs fill the GPU, each with at least 8 steps."""
    return max(1, min(math.ceil(_PROGRAMS / programs), steps // 8, 64))


# Shared memory of a program on Hopper; a device with less refuses more of the candidates when they are compiled.
_SHARED_BYTES = 227 * 1024
# fp32 accumulators that a thread can hold beside everything else.
_ACCUMULATORS = 200


def shared_bytes(config: KernelConfig, problem: Problem, kernel: str) -> int:
    """An estimate of a program's shared memory: its own tiles once, the tiles of the loop once per stage."""
    item = _ITEMSIZE[problem.dtype]
    qk, v = (padded_dim(head_chunks(n, config.head_chunk)) for n in (problem.head_dim, problem.v_head_dim))
    q_tile, k_tile = config.block_q * item, config.block_k * item
    if kernel == "forward":
        own, looped = q_tile * qk, k_tile * (qk + v)
    elif kernel == "dq":
        own, looped = q_tile * (qk + v), k_tile * (qk + v)
    else:
        own, looped = k_tile * (qk + v), q_tile * (qk + v)
    return own + looped * config.num_stages


def accumulators(config: KernelConfig, problem: Problem, kernel: str) -> int:
    """fp32 values per thread that live across the loop, plus one score tile."""
    qk, v = (padded_dim(head_chunks(n, config.head_chunk)) for n in (problem.head_dim, problem.v_head_dim))
    score = config.block_q * config.block_k
    held = {
        "forward": config.block_q * v,
        "dq": config.block_q * qk,
        "dkv": config.block_k * (qk + v),
        "dbias": score,
    }[kernel]
    return (held + score) // (32 * config.num_warps)


def candidates(problem: Problem, kernel: str) -> list[KernelConfig]:
    """Configurations worth measuring: those that fit shared memory and registers by the estimates above."""
    small = _ITEMSIZE[problem.dtype] == 4 or max(problem.head_dim, problem.v_head_dim) > 256
    blocks = (16, 32, 64) if small else (32, 64, 128)
    chunks = (64, 128) if small else (512,)
    configs = [
        KernelConfig(block_q, block_k, num_warps, num_stages, chunk)
        for block_q in blocks
        for block_k in blocks
        for num_warps in (4, 8)
        for num_stages in ((1, 2) if small else (1, 2, 3, 4))
        for chunk in chunks
    ]
    return [
        c
        for c in configs
        if shared_bytes(c, problem, kernel) <= _SHARED_BYTES and accumulators(c, problem, kernel) <= _ACCUMULATORS
    ]
