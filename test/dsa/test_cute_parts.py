"""The CuTe parts that Hopper and Blackwell share, each in a kernel of its own, in the emulator."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("cutlass")

import cutlass
import cutlass.cute as cute
from cute_harness import DTYPES, run
from cutlass import Int32
from dsa_oracle import log_normaliser

from cudnn_dsa.cute import selection
from cudnn_dsa.cute.finish import Finish
from cudnn_dsa.cute.prepare import Prepare, SinkGradient
from cudnn_dsa.cute.ring import Ring

INF, NAN = math.inf, math.nan
NO_INDEX, NO_FLOAT = (torch.int32,), (torch.float32,)
ARCHITECTURES = ("sm_90a", "sm_100a")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def prepare(lse, sink, topk_idxs, topk_length=None, out=None, dout=None, s_kv=7, arch="sm_90a"):
    """(z2, delta) of the kernel; delta is left NaN where out is None."""
    s_q, heads = lse.shape
    out, dout = (torch.zeros(s_q, heads, 512, dtype=torch.bfloat16) if x is None else x for x in (out, dout))
    z2, delta = torch.full_like(lse, NAN), torch.full_like(lse, NAN)
    flags = sink is not None, topk_length is not None, out is None
    run(
        Prepare(heads, 512, *flags), out, dout, lse, NO_FLOAT if sink is None else sink, topk_idxs,
        NO_INDEX if topk_length is None else topk_length, z2, delta, s_q, s_kv, topk_idxs.shape[1],
        arch=arch, key=("prepare", heads, flags, out.dtype, arch),
    )  # fmt: skip
    return z2, delta


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_normaliser_of_every_kind_of_sink(arch: str) -> None:
    sink = torch.tensor([0.3, -40.0, 60.0, 1e38, 2.4e38, -2.4e38, INF, -INF])
    lse = torch.tensor([-3.0, 0.0, 2.5, 80.0, -90.0, -INF])[:, None].repeat(1, len(sink)).contiguous()
    z2, _ = prepare(lse, sink, torch.zeros(6, 3, dtype=torch.int32), arch=arch)
    want = log_normaliser(lse.double(), sink) * math.log2(math.e)
    want = torch.where(want.isfinite(), want, INF)
    torch.testing.assert_close(z2.double(), want, rtol=2e-7, atol=5e-7)


def test_a_row_without_a_key_counts_for_nothing() -> None:
    """By invalid entries, by a length of 0 or below, by entries behind the length; whatever lse holds."""
    topk_idxs = torch.full((6, 70), -1, dtype=torch.int32)
    topk_idxs[1:3, 69] = 6  # the last entry, valid
    topk_idxs[3:5] = 2
    topk_idxs[5] = 7  # S_kv
    length = torch.tensor([70, 70, 69, 0, -5, 70], dtype=torch.int32)
    lse = torch.tensor([INF, 1.0, -INF, NAN, 5.0, 0.0])[:, None].repeat(1, 3).contiguous()
    z2, _ = prepare(lse, None, topk_idxs, length)
    assert torch.isinf(z2[[0, 2, 3, 4, 5]]).all()
    assert (z2[[0, 2, 3, 4, 5]] > 0).all()
    torch.testing.assert_close(z2[1], torch.full((3,), math.log2(math.e)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_delta(dtype: torch.dtype) -> None:
    g = generator()
    out = torch.randn(3, 10, 512, generator=g).to(dtype)
    dout = torch.randn(3, 10, 512, generator=g).bfloat16()
    _, delta = prepare(torch.zeros(3, 10), None, torch.zeros(3, 1, dtype=torch.int32), out=out, dout=dout)
    want = (out.double() * dout.double()).sum(-1)
    assert (delta - want).norm() < 1e-6 * want.norm()


@pytest.mark.parametrize("s_q", [1, 200, 515])
def test_d_sink_selects_what_counts(s_q: int) -> None:
    """delta is NaN where Z2 is +inf; the result has one value in every schedule."""
    g = generator()
    z2, delta = 3 * torch.randn(s_q, 11, generator=g), torch.randn(s_q, 11, generator=g)
    sink = torch.randn(11, generator=g)
    sink[3:5] = torch.tensor([INF, -INF])
    z2[:, 3] = INF
    z2[::3], delta[::3] = INF, NAN
    z2 = torch.where(z2.isfinite(), torch.maximum(z2, sink * math.log2(math.e)), z2)  # as a normaliser is
    results = []
    for seed in range(3):
        d_sink = torch.full((11,), NAN)
        run(SinkGradient(11), z2, delta, sink, d_sink, s_q, seed=seed, key="sink")
        results.append(d_sink)
    share = torch.exp2(sink.double() * math.log2(math.e) - z2.double())
    want = -torch.where(z2.isfinite(), share * delta.double(), 0).sum(0)
    assert (results[0] - want).norm() <= 1e-6 * want.norm()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("dtype", "accumulate"), [(torch.bfloat16, False), (torch.float32, False), (torch.float32, True)]
)
def test_finish(dtype: torch.dtype, accumulate: bool, interleaved: bool) -> None:
    """33 rows of 36 groups are no whole number of CTAs."""
    g = generator()
    sums, before = torch.randn(33, 576, generator=g), torch.randn(33, 576, generator=g).to(dtype)
    dkv = before.clone()
    run(Finish(576, DTYPES[dtype], accumulate, interleaved), sums, dkv, 33)
    if interleaved:  # of 16 columns, four lanes hold (2q, 2q + 1, 8 + 2q, 9 + 2q)
        order = [c for q in range(4) for c in (2 * q, 2 * q + 1, 8 + 2 * q, 9 + 2 * q)]
        real = torch.empty(33, 36, 16)
        real[..., order] = sums.view(33, 36, 16)
        sums = real.view(33, 576)
    assert torch.equal(dkv, (sums + before if accumulate else sums).to(dtype))


class PackRows:
    """Warp 0 feeds the rows of each query, warp 1 writes what it is handed: 64 numbers and the count."""

    STAGES = 3

    @cute.jit
    def __call__(
        self,
        topk_idxs: cute.Pointer,
        packed: cute.Pointer,
        tiles: cute.Pointer,
        queries: Int32,
        topk: Int32,
        s_kv: Int32,
    ):
        self.kernel(topk_idxs, packed, tiles, queries, topk, s_kv).launch(grid=(1, 1, 1), block=(64, 1, 1), smem=2048)

    @cute.kernel
    def kernel(
        self,
        topk_idxs: cute.Pointer,
        packed: cute.Pointer,
        tiles: cute.Pointer,
        queries: Int32,
        topk: Int32,
        s_kv: Int32,
    ):
        memory = cutlass.memory.SmemAllocator()
        rows = memory.allocate_tensor(Int32, cute.make_layout((self.STAGES, 64), stride=(64, 1)))
        counts = memory.allocate_tensor(Int32, cute.make_layout(self.STAGES))
        (ring,) = Ring.create(memory, [self.STAGES])
        lane = cute.arch.lane_idx()
        if cute.arch.thread_idx()[0] == 0:
            ring.init(1, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        n = Int32(0)
        query = Int32(0)
        if cute.arch.thread_idx()[0] < 32:
            while query < queries:
                entries = selection.index_row(topk_idxs, query, topk)
                n = selection.feed_rows(entries, topk, s_kv, rows, counts, ring, n, 64)
                query += 1
        else:
            while query < queries:
                ring.wait_full(n)
                count = counts[ring.stage(n)]
                (packed + n * 64 + lane).store(rows[ring.stage(n), lane])
                (packed + n * 64 + 32 + lane).store(rows[ring.stage(n), lane + 32])
                (tiles + n).store(count)
                ring.arrive_empty(n)
                n += 1
                if count == 0:
                    query += 1


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("topk", [1, 32, 64, 300])
def test_valid_rows_are_packed_in_their_order(topk: int, seed: int) -> None:
    g = generator(seed)
    topk_idxs = torch.randint(-30, 80, (5, topk), generator=g, dtype=torch.int32)
    topk_idxs[1] = -1
    topk_idxs[2] = torch.arange(topk) % 50  # all valid
    packed, tiles = torch.full((40, 64), -9, dtype=torch.int32), torch.full((40,), -9, dtype=torch.int32)
    run(PackRows(), topk_idxs, packed, tiles, 5, topk, 50, seed=seed, key="pack")
    n = 0
    for row in topk_idxs.tolist():
        valid = [j for j in row if 0 <= j < 50]
        while valid:
            part, valid = valid[:64], valid[64:]
            assert tiles[n] == len(part)
            assert packed[n].tolist() == part + [-1] * (64 - len(part))
            n += 1
        assert tiles[n] == 0
        n += 1
    assert (tiles[n:] == -9).all()
