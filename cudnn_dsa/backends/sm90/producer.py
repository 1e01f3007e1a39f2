"""The producer warpgroup of the Hopper kernels: row numbers, dense operands, gathered keys.

Value objects pass into ``cute.jit`` functions as Constexpr: they hold run-time values, but are themselves known. A loop
would carry an object whose methods it calls, and forget what is known of it; so functions unpack them first.

Warp 0 walks over the queries of the CTA: it starts the tensor copies of their dense operands and packs the numbers of
their valid rows into tiles. The other warps gather the rows of K of each tile, group of columns by group of columns.
"""

# mypy: ignore-errors
# (Device code: the DSL stages it, and most of its types are the DSL's.)

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from cudnn_dsa.backends.sm90 import wgmma
from cudnn_dsa.cute import selection
from cudnn_dsa.cute.gather import gather_columns
from cudnn_dsa.cute.ring import Ring

READ_ONCE = 0x12F0000000000000  # cache policy of tensor copies: evict_first


class Work(NamedTuple):
    """What the CTAs share out: S_q * head_tiles items, a query and a tile of its heads each."""

    s_q: Int32
    head_tiles: int


def exists(work: Work, item: Int32) -> Boolean:
    """Whether there is such an item. Compared as a query: the number of items would take every role a register."""
    return item // work.head_tiles < work.s_q


def split(work: Work, item: Int32) -> tuple[Int32, Int32]:
    """(query, tile of heads). Tiles of one query are neighbours, so that its keys are gathered from L2."""
    return item // work.head_tiles, item % work.head_tiles


class Rows(NamedTuple):
    """Tiles of row numbers: ``numbers`` (stages, keys) and ``counts`` (stages,) in shared memory, handed over by
    ``ring``; see ``selection.feed_rows``."""

    numbers: cute.Tensor
    counts: cute.Tensor
    ring: Ring


class Selection(NamedTuple):
    """The rows that queries select: topk_idxs (S_q, K), topk_length (S_q,) or None, K and S_kv."""

    topk_idxs: cute.Pointer
    topk_length: cute.Pointer | None
    topk: Int32
    s_kv: Int32


class Dense(NamedTuple):
    """A dense operand: a tensor map of (H, columns, S_q), its coordinates, and the tile it is copied to."""

    map: cute.CopyAtom
    source: cute.Tensor
    tile: cute.Tensor


def tensor_map(base: cute.Pointer, heads: int, columns: int, s_q: Int32, block_heads: int):
    """(map, coordinates) for copies of ``block_heads`` heads x 64 columns of one query; heads past H are zeros."""
    layout = cute.make_layout((heads, columns, s_q), stride=(columns, 1, heads * columns))
    box = wgmma.swizzled(base.dtype, block_heads, wgmma.CHUNK)
    return cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), cute.make_tensor(base, layout), box, (block_heads, wgmma.CHUNK)
    )


def swizzled_tile(memory, dtype: type[cutlass.Numeric], rows: int, columns: int) -> cute.Tensor:
    """A tile of shared memory in the layout of tensor copies, gather and wgmma."""
    layout = wgmma.swizzled(dtype, rows, columns)
    return memory.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)


def row_tiles(memory, stages: int, keys: int) -> tuple[cute.Tensor, cute.Tensor]:
    """(numbers, counts) of :class:`Rows`."""
    numbers = memory.allocate_tensor(Int32, cute.make_layout((stages, keys), stride=(keys, 1)), byte_alignment=128)
    return numbers, memory.allocate_tensor(Int32, cute.make_layout(stages))


@cute.jit
def feed(
    work: cutlass.Constexpr[Work], rows: cutlass.Constexpr[Rows], selected: cutlass.Constexpr[Selection],
    operands: cutlass.Constexpr[tuple], ring: Ring,
):  # fmt: skip
    """By warp 0: the dense operands of each query, handed over by ``ring``, and its rows."""
    slots = Int32(0)
    queries = Int32(0)
    item = cute.arch.block_idx()[0]
    while exists(work, item):
        query, head_tile = split(work, item)
        ring.wait_empty(queries)
        if cute.arch.lane_idx() == 0:
            size = sum(cute.size(x.tile) * x.tile.element_type.width // 8 for x in operands)
            cute.arch.mbarrier_arrive_and_expect_tx(ring.full(queries), size)
        for x in operands:
            _copy(x, query, head_tile, ring.full(queries))
        slots = selection.feed_rows(
            selection.index_row(selected.topk_idxs, query, selected.topk),
            selection.row_length(selected.topk_length, query, selected.topk),
            selected.s_kv, rows.numbers, rows.counts, rows.ring, slots, cute.size(rows.numbers, mode=[1]),
        )  # fmt: skip
        queries += 1
        item += cute.arch.grid_dim()[0]


def _copy(x: Dense, query: Int32, head_tile: Int32, barrier: cute.Pointer) -> None:
    block_heads = cute.size(x.tile, mode=[0])
    source = cute.local_tile(x.source[None, None, query], (block_heads, wgmma.CHUNK), (head_tile, None))
    shared, outside = cpasync.tma_partition(
        x.map, 0, cute.make_layout(1), cute.group_modes(wgmma.chunks_of(x.tile), 0, 2), cute.group_modes(source, 0, 2)
    )
    for chunk in range(cute.size(shared, mode=[1])):
        cute.copy(x.map, outside[None, chunk], shared[None, chunk], tma_bar_ptr=barrier, cache_policy=Int64(READ_ONCE))


@cute.jit
def gather(
    work: cutlass.Constexpr[Work], rows: cutlass.Constexpr[Rows], kv: cute.Pointer, tiles: cute.Tensor,
    head_dim: cutlass.Constexpr[int], groups: cutlass.Constexpr[list], rings: cutlass.Constexpr[list],
    thread: Int32, threads: cutlass.Constexpr[int], batch: cutlass.Constexpr[int],
):  # fmt: skip
    """By the other warps: the keys of each tile.

    Args:
        tiles: swizzled (keys, stages * D): a tile for each stage of the rings.
        groups: (first column, columns) of what each of ``rings`` hands over.
        thread: of ``threads``.
    """
    numbers, counts, row_ring = rows
    slots = Int32(0)
    n = Int32(0)
    keys = cutlass.const_expr(cute.size(tiles, mode=[0]))
    item = cute.arch.block_idx()[0]
    while exists(work, item):
        row_ring.wait_full(slots)
        count = counts[row_ring.stage(slots)]
        while count > 0:
            for group in cutlass.range_constexpr(len(groups)):
                first, columns = groups[group]
                rings[group].wait_empty(n)
                target = tiles.iterator + (rings[group].stage(n) * (keys * head_dim) + first * keys)
                gather_columns(
                    kv, numbers[row_ring.stage(slots), None], target, thread, threads, head_dim, first, columns, batch
                )
                cute.arch.cp_async_mbarrier_arrive_noinc(rings[group].full(n))
            row_ring.arrive_empty(slots)
            slots += 1
            n += 1
            row_ring.wait_full(slots)
            count = counts[row_ring.stage(slots)]
        row_ring.arrive_empty(slots)
        slots += 1
        item += cute.arch.grid_dim()[0]
