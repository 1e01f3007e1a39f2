"""S = Q K^T of a tile, from groups of columns as they arrive."""

# mypy: ignore-errors
# (Device code: the DSL stages it, and most of its types are the DSL's.)

import cutlass.cute as cute
from cutlass import Int32

from cudnn_dsa.backends.sm90 import wgmma
from cudnn_dsa.cute.ring import Ring


def issue_scores(
    mma: cute.TiledMma, acc: cute.Tensor, part: "cute.Tensor | None", q: cute.Tensor, keys: cute.Tensor,
    groups: "list[tuple[int, int]]", rings: "list[Ring]", n: Int32, chunks: int,
) -> None:  # fmt: skip
    """Start the product, and commit it.

    Matrix units cut a sum off after every 16 terms, where rounding would be right: over 576 columns and at |s| = 200
    that is as much as fp16 rounds P by, and nothing beside what bf16 does.

    Args:
        acc: the scores.
        part: for fp16 an accumulator, in which each group but the first is summed from zero and added by ordinary
            instructions; None sums all groups in one.
        q, keys: operands by chunks of 64 columns; of keys, ``chunks`` a stage.
        groups: (first column, columns) of what each of ``rings`` hands over for the n-th time.
    """
    for group, (first, columns) in enumerate(groups):
        ring = rings[group]
        ring.wait_full(n)
        # The rows were written by cp.async, in the generic proxy; wgmma reads in the async proxy.
        cute.arch.fence_view_async_shared()
        span = (first // wgmma.CHUNK, (first + columns) // wgmma.CHUNK)
        apart = part is not None and group > 0
        wgmma.fence()
        wgmma.issue_chunks(mma, part if apart else acc, q, keys, span, ring.stage(n) * chunks, apart or group == 0)
        if part is not None:
            wgmma.commit()
        if apart:
            wgmma.wait(0)
            acc.store(acc.load() + part.load())
    if part is None:
        wgmma.commit()
