"""The launches of a call: which kernels, over which grids, with which scratch memory.

A backward is: zero the fp32 dkv; ``backward_kernel``; the sum of d_sink; the cast of dkv. Where dkv is wanted in fp32
it is added to in place. Under ``deterministic`` the queries go in chunks, each through ``index_kernel``,
``backward_kernel`` and ``fold_kernel``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any

import torch

from cudnn_dsa.artifact.key import digest, program_text
from cudnn_dsa.backends import BackwardTensors, ForwardTensors
from cudnn_dsa.backends.triton import tuning
from cudnn_dsa.backends.triton.backward_kernel import backward_kernel
from cudnn_dsa.backends.triton.deterministic import fold_kernel, index_kernel, sink_kernel
from cudnn_dsa.backends.triton.forward_kernel import forward_kernel
from cudnn_dsa.backends.triton.launch import DOES_NOT_FIT, Pointer, compiled, interpreted, launch, signature
from cudnn_dsa.backends.triton.tuning import Config
from cudnn_dsa.contracts.sparse_attention import WORKSPACE_ALIGNMENT, Problem

# Scratch for the contributions of one chunk of queries under deterministic; a single query may need more.
PARTIALS_BYTES = 1 << 30
FALLBACK_PROCESSORS = 2  # in the interpreter: chunks of two queries

FOLD_OPTIONS = (("num_warps", 4),)
INDEX = (("BLOCK", 1024),)
SINK = (("BLOCK_Q", 128), ("BLOCK_H", 16))


@dataclass(frozen=True)
class Workspace:
    """The scratch memory of a backward: (offset, shape, dtype) of each piece, and the bytes of all."""

    pieces: dict[str, tuple[int, tuple[int, ...], torch.dtype]]
    total: int
    chunk: int  # queries at a time under deterministic

    def view(self, memory: torch.Tensor | None, name: str) -> torch.Tensor:
        assert memory is not None
        offset, shape, dtype = self.pieces[name]
        size = _bytes(shape, dtype)
        return memory[offset : offset + size].view(dtype).view(shape)


@functools.lru_cache(maxsize=256)
def backward_workspace(problem: Problem) -> Workspace:
    """What a backward needs beside its outputs.

    fp32 dkv (unless dkv is fp32 itself); fp32 (S_q, H) for d_sink; under deterministic, for a chunk of queries, fp32
    (K, D) per query and head tile and two int32 per key and query, as many queries as keep the device busy and fit
    ``PARTIALS_BYTES``.
    """
    p = problem
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if p.dkv_dtype != "float32":
        wanted["dkv"] = ((p.s_kv, p.head_dim), torch.float32)
    if p.has_sink:
        wanted["sink_terms"] = ((p.s_q, p.heads), torch.float32)
    chunk = p.s_q
    if p.deterministic:
        tiles = _tiles(p.heads, config_of(p).block_h)
        per_query = 4 * tiles * p.topk * p.head_dim + 8 * p.s_kv
        busy = -(-_processors(p.device) // tiles)
        chunk = max(1, min(p.s_q, busy, PARTIALS_BYTES // per_query))
        wanted["partials"] = ((chunk * tiles, p.topk, p.head_dim), torch.float32)
        # Apart, since the start of each piece is aligned: an address of another alignment is another kernel.
        wanted["count"] = wanted["rank"] = ((p.s_kv, chunk), torch.int32)
    pieces, total = {}, 0
    for name, (shape, dtype) in wanted.items():
        pieces[name] = (total, shape, dtype)
        total += -(-_bytes(shape, dtype) // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    return Workspace(pieces, total, chunk)


def forward(problem: Problem, t: ForwardTensors, stream: Any, config: Config | None = None) -> None:
    p = problem
    config = config or config_of(p)
    args = (
        t.q, t.kv, t.attn_sink, t.topk_idxs, t.topk_length, t.out, t.lse, float(t.softmax_scale), p.s_kv, p.topk,
    )  # fmt: skip
    grid = p.s_q * _tiles(p.heads, config.block_h)
    launch(forward_kernel, grid, args, forward_constants(p, config), config.options, stream)


def backward(
    problem: Problem, t: BackwardTensors, memory: torch.Tensor | None, stream: Any, config: Config | None = None
) -> None:
    p = problem
    config = config or config_of(p)
    work = backward_workspace(p)
    dkv = work.view(memory, "dkv") if "dkv" in work.pieces else t.dkv
    if not p.accumulate:
        dkv.zero_()
    terms = work.view(memory, "sink_terms") if p.has_sink else None

    tiles = _tiles(p.heads, config.block_h)
    target = work.view(memory, "partials") if p.deterministic else dkv
    for first in range(0, p.s_q, work.chunk):
        queries = min(work.chunk, p.s_q - first)
        args = (
            t.q, t.kv, t.out, t.dout, t.lse, t.attn_sink, t.topk_idxs, t.topk_length, t.delta, t.dq, target, terms,
            float(t.softmax_scale), p.s_kv, p.topk, first,
        )  # fmt: skip
        launch(backward_kernel, queries * tiles, args, backward_constants(p, config), config.options, stream)
        if p.deterministic:
            tables = work.view(memory, "count"), work.view(memory, "rank")
            _fold(p, t, tables, target, dkv, (first, queries), tiles, stream)
    if terms is not None:
        launch(sink_kernel, _tiles(p.heads, 16), (terms, t.d_sink, p.s_q), (("H", p.heads), *SINK), (), stream)
    if dkv is not t.dkv:
        t.dkv.copy_(dkv)


def _fold(
    p: Problem,
    t: BackwardTensors,
    tables: tuple[torch.Tensor, torch.Tensor],
    partials: torch.Tensor,
    dkv: torch.Tensor,
    rows: tuple[int, int],
    tiles: int,
    stream: Any,
) -> None:
    """Add the contributions of the queries ``rows`` = (first, number) to dkv."""
    first, queries = rows
    for table in tables:
        table.zero_()
    args: tuple = (t.topk_idxs, t.topk_length, *tables, p.s_kv, p.topk, first, queries)
    launch(index_kernel, queries, args, INDEX, (), stream)
    args = (partials, *tables, dkv, p.topk, queries)
    launch(fold_kernel, p.s_kv, args, fold_constants(p, tiles), FOLD_OPTIONS, stream)


@functools.lru_cache(maxsize=256)
def config_of(problem: Problem) -> Config:
    """The tiles of the problem's kernel. Compiles it; measures nothing."""
    return tuning.choose(problem, functools.partial(_fits, problem))


def prepare(problem: Problem) -> None:
    """Compile, load and tune, so that a later call does none of it (and may be captured in a CUDA graph)."""
    if interpreted():
        return
    with torch.cuda.device(problem.device):
        tuning.tune(problem, functools.partial(_fits, problem), sample_runner(problem))
        config_of.cache_clear()
        # One small call: it loads every kernel of the path, PyTorch's fill and cast among them.
        sample_runner(replace(problem, s_q=1, s_kv=64))(config_of(problem))


def fingerprint(problem: Problem) -> str | None:
    if interpreted():
        return None
    parts = {
        "text": program_text(__name__), "triton": metadata.version("triton"), "config": asdict(config_of(problem)),
        "key": repr(problem.kernel_key("")),
    }  # fmt: skip
    return digest(parts)


def sample_runner(problem: Problem) -> Callable[[Config], None]:
    """A function that runs the problem on random tensors of its own, made when it is first called."""
    made: list[Any] = []

    def run(config: Config) -> None:
        if not made:
            made.append(_sample(problem))
        stream = torch.cuda.current_stream(problem.device)
        p, tensors, memory = made[0]
        if p.direction == "forward":
            forward(p, tensors, stream, config)
        else:
            backward(p, tensors, memory, stream, config)

    return run


def _sample(problem: Problem) -> tuple[Problem, Any, torch.Tensor | None]:
    """Random tensors for a problem of a size that fills the device a few times over, or smaller."""
    p = replace(problem, s_q=min(int(problem.s_q), 4 * _processors(problem.device)), s_kv=min(int(problem.s_kv), 8192))
    device = torch.device(p.device)
    generator = torch.Generator(device).manual_seed(0)  # the caller's random state is left alone

    def random(*shape: int, dtype: str = p.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=getattr(torch, dtype))

    def empty(*shape: int, dtype: str = p.dtype) -> torch.Tensor:
        return torch.zeros(shape, device=device, dtype=getattr(torch, dtype))

    q, kv = random(p.s_q, p.heads, p.head_dim), random(p.s_kv, p.head_dim)
    sink = random(p.heads, dtype="float32") if p.has_sink else None
    topk_idxs = torch.randint(0, p.s_kv, (p.s_q, p.topk), generator=generator, device=device, dtype=torch.int32)
    length = torch.full((p.s_q,), p.topk, device=device, dtype=torch.int32) if p.has_topk_length else None
    out, lse = empty(p.s_q, p.heads, p.head_dim_v, dtype=p.out_dtype), empty(p.s_q, p.heads, dtype="float32")
    scale = p.head_dim**-0.5
    if p.direction == "forward":
        return p, ForwardTensors(q, kv, topk_idxs, sink, length, out=out, lse=lse, softmax_scale=scale), None
    memory = torch.empty(backward_workspace(p).total, device=device, dtype=torch.uint8)
    delta = empty(p.s_q, p.heads, dtype="float32") if p.has_delta else None
    d_sink = empty(p.heads, dtype="float32") if p.has_sink else None
    tensors = BackwardTensors(
        q, kv, out, random(p.s_q, p.heads, p.head_dim_v), lse + 10, sink, topk_idxs, length, delta,
        dq=torch.empty_like(q), dkv=empty(p.s_kv, p.head_dim, dtype=p.dkv_dtype), d_sink=d_sink, softmax_scale=scale,
    )  # fmt: skip
    return p, tensors, memory


def _fits(problem: Problem, config: Config) -> bool:
    """Compile a configuration for the problem's device; False if the device cannot hold it."""
    if interpreted():
        return True
    p = problem
    element, out, stat, index = (Pointer(getattr(torch, d)) for d in (p.dtype, p.out_dtype, "float32", "int32"))
    sink, length = stat if p.has_sink else None, index if p.has_topk_length else None
    if p.direction == "forward":
        kernel: Any = forward_kernel
        args: tuple = (element, element, sink, index, length, out, stat, 0.0, 0, 0)
        constants = forward_constants(p, config)
    else:
        kernel = backward_kernel
        delta = stat if p.has_delta else None
        args = (
            element, element, out, element, stat, sink, index, length, delta, element, stat, sink, 0.0, 0, 0, 0,
        )  # fmt: skip
        constants = backward_constants(p, config)
    try:
        compiled(kernel, torch.device(p.device).index or 0, signature(args), constants, config.options)
    except DOES_NOT_FIT:
        return False
    return True


def _processors(device: str) -> int:
    if interpreted():
        return FALLBACK_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def forward_constants(p: Problem, config: Config) -> tuple[tuple[str, Any], ...]:
    return (("H", p.heads), ("D", p.head_dim), ("D_V", p.head_dim_v), *config.constants)


def backward_constants(p: Problem, config: Config) -> tuple[tuple[str, Any], ...]:
    return (*forward_constants(p, config), ("PARTIALS", p.deterministic))


def fold_constants(p: Problem, tiles: int) -> tuple[tuple[str, Any], ...]:
    return (("D", p.head_dim), ("HEAD_TILES", tiles), ("BLOCK", 1024))


def _tiles(heads: int, block_h: int) -> int:
    return -(-heads // block_h)


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    size = dtype.itemsize
    for n in shape:
        size *= n
    return size
