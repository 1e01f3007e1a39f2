"""Operands of tcgen05.mma: how a tile lies in shared memory, and the descriptors that say so.

A ``Tile`` has ``rows`` rows of 16-bit elements (keys or heads), cut into blocks of ``span`` columns. A block is
contiguous: row r at byte r * 2 * span, its 16-byte pieces permuted by the hardware's swizzle of that span. One and the
same tile serves as an operand in both directions: along its columns (K-major: the columns are the contraction) and
along its rows (MN-major: the rows are contracted), so a gathered tile of keys is read by three products without a copy.

Descriptor fields: PTX ISA, "Matrix descriptor" and "Instruction descriptor" of tcgen05.
"""

from __future__ import annotations

from dataclasses import dataclass

SWIZZLE_CODE = {128: 2, 64: 4, 32: 6}  # bytes of a swizzled row -> layout field
ELEMENT_BYTES = 2
K_STEP = 16  # elements that one instruction contracts


@dataclass(frozen=True)
class Tile:
    """``rows`` x ``columns`` 16-bit elements in blocks of ``span`` columns (16, 32 or 64)."""

    rows: int
    columns: int
    span: int = 64

    @property
    def width(self) -> int:
        """Bytes of a row within a block."""
        return self.span * ELEMENT_BYTES

    @property
    def block_bytes(self) -> int:
        return self.rows * self.width

    @property
    def bytes(self) -> int:
        return self.columns // self.span * self.block_bytes

    @property
    def swizzle_mask(self) -> int:
        """Which bits of a 16-byte piece's number change with the row."""
        return self.width // 16 - 1

    @property
    def swizzle_shift(self) -> int:
        """Piece ^= (row >> shift) & mask: the hardware permutes by address bits 7 and up."""
        return {128: 0, 64: 1, 32: 2}[self.width]

    def descriptor(self, contract_rows: bool) -> int:
        """The 64-bit matrix descriptor without its start address."""
        # Groups of eight rows follow each other in a block; LBO is read only where the columns are the M or N extent.
        stride, leading = 8 * self.width, self.block_bytes if contract_rows else 16
        return leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | SWIZZLE_CODE[self.width] << 61

    def step(self, k: int, contract_rows: bool) -> int:
        """Byte offset of contraction step ``k``."""
        if contract_rows:
            return k * K_STEP * self.width
        block, inner = divmod(k * K_STEP, self.span)
        return block * self.block_bytes + inner * ELEMENT_BYTES

    def column(self, column: int) -> int:
        """Byte offset of a column that begins a block."""
        assert column % self.span == 0
        return column // self.span * self.block_bytes

    def row(self, row: int) -> int:
        """Byte offset of a row that begins a swizzle pattern."""
        assert row * self.width % 1024 == 0
        return row * self.width


def instruction(m: int, n: int, element: str, a_contracts_rows: bool, b_contracts_rows: bool) -> int:
    """The instruction descriptor of a 16-bit product with fp32 accumulators, ``m`` x ``n``."""
    fmt = {"f16": 0, "bf16": 1}[element]
    return 1 << 4 | fmt << 7 | fmt << 10 | a_contracts_rows << 15 | b_contracts_rows << 16 | n >> 3 << 17 | m >> 4 << 24
