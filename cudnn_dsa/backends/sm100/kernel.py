"""What the Blackwell kernels share: the CTA's common knowledge, its gather warps, and products by descriptor."""

# mypy: ignore-errors
# (Device code: types are the DSL's.)

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cudnn_dsa.backends.sm100 import tcgen05
from cudnn_dsa.backends.sm100.layout import K_STEP, instruction
from cudnn_dsa.cute import ptx
from cudnn_dsa.cute.gather import CHUNK as BLOCK
from cudnn_dsa.cute.gather import PIECE, gather_columns
from cudnn_dsa.cute.ring import Ring

ELEMENTS = {"bf16": cutlass.BFloat16, "f16": cutlass.Float16}
WARPGROUP = 128


@dataclass(frozen=True)
class Cta:
    """What every role knows: the query (Int64), its first head, shared memory and tensor memory."""

    query: Int64
    head: Int32
    shared: Int32  # address of shared memory
    rows: cute.Tensor  # (ring, KEYS): row numbers of a tile
    counts: cute.Tensor  # (ring,): valid rows of a tile, 0 behind the last one
    rings: dict[str, Ring]
    tmem: Int32

    @cute.jit
    def tile(self, n: Int32) -> Int32:
        """Valid keys of tile ``n``, once its row numbers are there; 0 behind the last one."""
        self.rings["rows"].wait_full(n)
        return self.counts[self.rings["rows"].stage(n)]

    def rows_of(self, n: Int32) -> cute.Tensor:
        return self.rows[self.rings["rows"].stage(n), None]


class Sm100Kernel:
    """``config``: tiles, rings and offsets of the kernel."""

    def __init__(self, config):
        self.config = config
        self.dtype = ELEMENTS[config.element]

    def place_rings(self, barriers: cute.Pointer) -> dict[str, Ring]:
        rings = {}
        for name, (stages, _, _) in self.config.rings.items():
            rings[name] = Ring(barriers, stages)
            barriers = barriers + Ring.barriers_of(stages)
        return rings

    def int32s(self, pointer: cute.Pointer, shape: tuple[int, ...]) -> cute.Tensor:
        layout = cute.make_ordered_layout(shape, order=(1, 0)[-len(shape) :])
        return cute.make_tensor(cute.recast_ptr(pointer, dtype=Int32), layout)

    def shared_pointer(self, dtype, address, align: int) -> cute.Pointer:
        return cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=align)

    # Gather warps

    @cute.jit
    def gather(self, cta: Cta, kv: cute.Pointer, dense: cutlass.Constexpr, thread: Int32):
        """``dense`` (pointer, tile, offset) once, waited for together with the first tile of keys; then the keys."""
        c = self.config
        for source, tile, offset in dense:
            self.load_heads(cta, source, tile, offset, thread)
        n = Int32(0)
        while cta.tile(n) > 0:
            cta.rings["kv"].wait_empty(n)
            for block in cutlass.range_constexpr(c.head_dim // BLOCK):
                target = self.kv_address(cta, n) + c.kv.column(block * BLOCK)
                gather_columns(
                    kv, cta.rows_of(n), self.shared_pointer(self.dtype, target, 1024), thread, WARPGROUP,
                    c.head_dim, block * BLOCK, BLOCK,
                )  # fmt: skip
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            # Copied by the generic proxy, read by the tensor core through the async proxy.
            cute.arch.fence_view_async_shared()
            cta.rings["kv"].arrive_full(n)
            n += 1
        # A query without a key leaves copies under way that no tile waits for.
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def load_heads(self, cta: Cta, source: cute.Pointer, tile: cutlass.Constexpr, offset: cutlass.Constexpr, thread):
        """Start copying the CTA's heads of a (S_q, H, columns) tensor; zeros past the last head."""
        heads = self.config.heads
        pieces = BLOCK // PIECE
        piece = thread % pieces
        for i in cutlass.range_constexpr(tile.rows * pieces // WARPGROUP):
            r = i * (WARPGROUP // pieces) + thread // pieces
            inside = cta.head + r < heads
            size = Int32(16) if inside else Int32(0)
            row = source + (cta.query * heads + (cta.head + r if inside else Int32(0))) * tile.columns
            place = cta.shared + offset + r * tile.width + ((piece ^ r) % pieces) * 16
            for block in cutlass.range_constexpr(tile.columns // BLOCK):
                target = self.shared_pointer(self.dtype, place + tile.column(block * BLOCK), 16)
                ptx.cp_async_16(target, row + (block * BLOCK + piece * PIECE), size)

    def kv_address(self, cta: Cta, n: Int32) -> Int32:
        return cta.shared + self.config.offset_kv + cta.rings["kv"].stage(n) * self.config.kv.bytes

    # Issue warp

    @cute.jit
    def multiply(
        self, target, a: cutlass.Constexpr, a_address, b: cutlass.Constexpr, b_address, shape: cutlass.Constexpr,
        a_rows: cutlass.Constexpr, b_rows: cutlass.Constexpr, accumulate,
    ):  # fmt: skip
        """``target`` (+)= A B^T, ``shape`` = (M, N, K); ``a_rows``: A is contracted over its rows, not columns."""
        m, n, contraction = shape
        desc = instruction(m, n, self.config.element, a_rows, b_rows)
        a_desc = Int64(a.descriptor(a_rows)) + Int64(a_address >> 4)
        b_desc = Int64(b.descriptor(b_rows)) + Int64(b_address >> 4)
        for k in cutlass.range_constexpr(contraction // K_STEP):
            again = accumulate if cutlass.const_expr(k == 0) else Int32(1)
            tcgen05.mma(target, a_desc + (a.step(k, a_rows) >> 4), b_desc + (b.step(k, b_rows) >> 4), desc, again)
