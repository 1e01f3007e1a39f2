"""cp.async gather, bulk copies and reductions, clusterlaunchcontrol against NumPy; their broken variants are caught."""

from __future__ import annotations

import numpy as np
import pytest
from emulator_ptx import HEADER

from cute_emulator import ExecutionError, HazardError, run_ptx

SHARED = ".shared .align 128 .b8 buffer[4096];\n.shared .align 8 .b64 bar;\n.shared .align 16 .b8 response[16];\n"
REGISTERS = "  .reg .pred %p<8>; .reg .b32 %r<32>; .reg .b64 %d<32>; .reg .b128 %w;\n"
SEEDS = range(6)

GATHER = f"""{HEADER}{SHARED}
.visible .entry k(.param .u64 p_rows, .param .u64 p_index, .param .u64 p_out)
{{
{REGISTERS}
  ld.param.u64 %d0, [p_rows]; ld.param.u64 %d1, [p_index]; ld.param.u64 %d2, [p_out];
  mov.u32 %r0, %tid.x;
  mov.u32 %r1, buffer;
  mul.wide.u32 %d3, %r0, 4;
  add.u64 %d4, %d1, %d3;
  ld.global.b32 %r2, [%d4];
  setp.lt.s32 %p1, %r2, 0;
  selp.b32 %r3, 0, %r2, %p1;
  selp.b32 %r4, 0, 16, %p1;
  mul.wide.s32 %d5, %r3, 16;
  add.u64 %d6, %d0, %d5;
  mad.lo.u32 %r5, %r0, 16, %r1;
  cp.async.cg.shared.global [%r5], [%d6], 16, %r4;
  cp.async.commit_group;
  cp.async.wait_group 0;
  bar.sync 0;
  xor.b32 %r6, %r0, 63;
  mad.lo.u32 %r7, %r6, 16, %r1;
  ld.shared.v4.b32 {{%r8, %r9, %r10, %r11}}, [%r7];
  mul.wide.u32 %d7, %r0, 16;
  add.u64 %d8, %d2, %d7;
  st.global.v4.b32 [%d8], {{%r8, %r9, %r10, %r11}};
  ret;
}}
"""


def gather(text: str, seed: int) -> None:
    rng = np.random.default_rng(2)
    rows = rng.integers(0, 1 << 32, (50, 4), dtype=np.uint32)
    index = rng.integers(-5, 50, 64).astype(np.int32)
    out = np.zeros((64, 4), np.uint32)
    run_ptx(text, 1, 64, [rows, index, out], seed=seed)
    expected = np.where(index[:, None] < 0, 0, rows[np.maximum(index, 0)])
    np.testing.assert_array_equal(out, expected[np.arange(64) ^ 63])


@pytest.mark.parametrize("seed", SEEDS)
def test_cp_async_gathers_rows_and_zero_fills(seed: int) -> None:
    gather(GATHER, seed)


@pytest.mark.parametrize("line", ["cp.async.wait_group 0;", "bar.sync 0;", "cp.async.commit_group;"])
def test_a_gather_with_a_missing_line_is_caught(line: str) -> None:
    with pytest.raises((HazardError, ExecutionError, AssertionError)):
        gather(GATHER.replace(line, ""), 0)


BULK = f"""{HEADER}{SHARED}
.visible .entry k(.param .u64 p_in, .param .u64 p_out)
{{
{REGISTERS}
  ld.param.u64 %d0, [p_in]; ld.param.u64 %d1, [p_out];
  mov.u32 %r0, %tid.x;
  mov.u32 %r1, buffer;
  mov.u32 %r2, bar;
  setp.ne.u32 %p1, %r0, 0;
  @%p1 bra READY;
  mbarrier.init.shared.b64 [%r2], 1;
  fence.mbarrier_init.release.cluster;
READY:
  bar.sync 0;
  @%p1 bra WAIT;
  mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256;
  cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%d0], 256, [%r2];
WAIT:
  mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0;
  @!%p2 bra WAIT;
  mad.lo.u32 %r3, %r0, 4, %r1;
  ld.shared.f32 %r4, [%r3];
  add.f32 %r5, %r4, %r4;
  st.shared.f32 [%r3], %r5;
  fence.proxy.async.shared::cta;
  bar.sync 0;
  @%p1 bra DONE;
  cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d1], [%r1], 256;
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;
DONE:
  ret;
}}
"""


def bulk(text: str, seed: int) -> None:
    x = np.arange(64, dtype=np.float32)
    out = np.ones(64, np.float32)
    run_ptx(text, 1, 64, [x, out], seed=seed)
    np.testing.assert_array_equal(out, 1 + 2 * x)


@pytest.mark.parametrize("seed", SEEDS)
def test_bulk_copy_and_reduction(seed: int) -> None:
    bulk(BULK, seed)


BREAKS = {
    "wait for the copy": ("  @!%p2 bra WAIT;\n", ""),
    "byte count": ("[%r2], 256;\n  cp.async", "[%r2], 128;\n  cp.async"),
    "phase": ("[%r2], 0;\n  @!%p2", "[%r2], 1;\n  @!%p2"),
    "proxy fence": ("  fence.proxy.async.shared::cta;\n", ""),
    "barrier after initialisation": ("READY:\n  bar.sync 0;", "READY:"),
    "barrier before the store": ("  bar.sync 0;\n  @%p1 bra DONE;", "  @%p1 bra DONE;"),
    "last wait": ("  cp.async.bulk.wait_group 0;\n", ""),
    "source row": ("[%d1], [%r1], 256", "[%d1], [%r1+16], 256"),
    "misaligned": ("[%d1], [%r1], 256", "[%d1], [%r1+4], 256"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_bulk_copy_is_caught(name: str) -> None:
    assert BREAKS[name][0] in BULK
    with pytest.raises((HazardError, ExecutionError, AssertionError)):
        bulk(BULK.replace(*BREAKS[name]), 0)


CANCEL = f"""{HEADER}{SHARED}
.visible .entry k(.param .u64 p_out)
{{
{REGISTERS}
  ld.param.u64 %d0, [p_out];
  mov.u32 %r1, response;
  mov.u32 %r2, bar;
  mov.u32 %r3, %ctaid.x;
  mov.u32 %r4, %tid.x;
  mov.b32 %r5, 0;
  setp.ne.u32 %p1, %r4, 0;
  @%p1 bra DONE;
  mbarrier.init.shared.b64 [%r2], 1;
LOOP:
  mul.wide.u32 %d1, %r3, 4;
  add.u64 %d2, %d0, %d1;
  red.global.add.u32 [%d2], 1;
  mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 16;
  fence.proxy.async.shared::cta;
  clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r1], [%r2];
WAIT:
  mbarrier.try_wait.parity.shared.b64 %p2, [%r2], %r5;
  @!%p2 bra WAIT;
  xor.b32 %r5, %r5, 1;
  ld.shared.v2.b64 {{%d3, %d4}}, [%r1];
  mov.b128 %w, {{%d3, %d4}};
  clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %w;
  @%p3 clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r3, %w;
  @%p3 bra LOOP;
DONE:
  ret;
}}
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_cancelled_clusters_run_once(seed: int) -> None:
    out = np.zeros(40, np.uint32)
    report = run_ptx(CANCEL, 40, 32, [out], seed=seed)
    assert (out == 1).all()
    assert report.counters["clusters"] < 40
