"""The command line, the timeline, the report, the modelled bound, the build."""

from __future__ import annotations

import numpy as np
import pytest
from emulator_ptx import kernel

from cute_emulator import LaunchError, PtxSyntaxError, run_ptx
from cute_emulator.__main__ import main
from cute_emulator.bound import DEVICES
from cute_emulator.build import build
from cute_emulator.ptx import parse, split_operands

BODY = "  bar.sync 0;\n  add.u64 %q15, %q0, %o;\n  st.global.b64 [%q15], %o;\n"


def test_command_line(tmp_path, capsys) -> None:
    path = tmp_path / "kernel.ptx"
    path.write_text(kernel(BODY, 1))
    np.save(tmp_path / "x.npy", np.zeros(64, np.uint64))
    picture = tmp_path / "timeline.png"
    argument = f"{tmp_path / 'x.npy'}:{tmp_path / 'y.npy'}"
    assert main([str(path), "--block", "64", argument, "--timeline", str(picture)]) == 0
    assert np.load(tmp_path / "y.npy").tolist() == [8 * i for i in range(64)]
    assert picture.stat().st_size > 0
    out = capsys.readouterr().out
    assert "no hazards" in out
    assert "CTA 0 warp  1 epilogue |" in out
    assert "modelled bound on B200" in out
    assert "modelled bound on H200" in out
    assert main([str(path), "--list"]) == 0
    assert ".u64 p0 (8 bytes)" in capsys.readouterr().out
    assert main([str(path), "uint64[8]=zeros"]) == 2
    assert "past the start of argument p0" in capsys.readouterr().err


def test_report_counts_what_was_moved() -> None:
    report = run_ptx(kernel(BODY, 1), (3,), (64,), [np.zeros(64, np.uint64)])
    assert report.counters["global_store"] == 3 * 64 * 8
    assert sum(report.warp_instructions) == report.counters["instructions"]
    assert len(report.warp_instructions) == 2
    assert report.flops == 0


def test_bound_is_the_slowest_unit() -> None:
    report = run_ptx(kernel(BODY, 1), 1, (64,), [np.zeros(64, np.uint64)])
    b = report.bound("H200")
    assert b.seconds == max(b.parts.values()) == b.parts[b.unit]
    device = DEVICES["H200"]
    assert b.parts["device memory (no reuse in L2)"] == pytest.approx(64 * 8 / device.memory)
    assert "a model" in str(b)


def test_roles_are_named_by_what_warps_do() -> None:
    """Warps 0 and 1 reduce, warp 2 copies, warp 3 computes nothing."""
    body = """  shr.u32 %r1, %r0, 5;
  setp.lt.u32 %p1, %r1, 2;
  setp.eq.u32 %p2, %r1, 2;
  mov.u32 %r2, buffer;
  @%p1 red.global.add.u32 [%q0], %r0;
  @%p2 cp.async.ca.shared.global [%r2], [%q0+16], 4;
  cp.async.wait_all;
"""
    text = kernel(body, 1, shared=".shared .align 16 .b8 buffer[16];\n")
    report = run_ptx(text, (2,), (128,), [np.zeros(8, np.uint32)])
    found = [(r.warps, r.name, r.work) for r in report.roles()]
    assert found == [
        ("0-1", "reduction", {"atomics": 4}),
        ("2", "cp.async producer", {"cp.async": 2}),
        ("3", "other", {}),
    ]
    assert sum(r.instructions for r in report.roles()) == report.counters["instructions"]
    assert sum(r.share for r in report.roles()) == pytest.approx(1)


@pytest.mark.parametrize(("rows", "columns"), [(16, 8), (5, 8), (16, 3), (0, 8)])
def test_useful_flops_leave_padding_out(rows: int, columns: int) -> None:
    """mma.sync.m16n8k16 with ones in the first rows of A and columns of B, zeros elsewhere."""
    a, b = np.zeros((16, 16), np.float16), np.zeros((8, 16), np.float16)
    a[:rows], b[:columns] = 1, 1
    body = "  shr.u32 %r1, %r0, 2;\n  and.b32 %r2, %r0, 3;\n  shl.b32 %r3, %r1, 5;\n  mad.lo.u32 %r3, %r2, 4, %r3;\n"
    body += "  cvt.u64.u32 %d1, %r3;\n  add.u64 %d2, %q1, %d1;\n  add.u64 %d3, %q2, %d1;\n"
    for i, at in enumerate((0, 256, 16, 272)):
        body += f"  ld.global.b32 %r{10 + i}, [%d2+{at}];\n"
    body += "  ld.global.b32 %r14, [%d3];\n  ld.global.b32 %r15, [%d3+16];\n  mov.f32 %f1, 0f00000000;\n"
    body += "  mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f2, %f3, %f4, %f5}, {%r10, %r11, %r12, %r13}, "
    body += "{%r14, %r15}, {%f1, %f1, %f1, %f1};\n"
    report = run_ptx(kernel(body, 3), 1, 32, [np.zeros(1), a, b])
    assert report.flops == 2 * 16 * 8 * 16
    assert report.useful_flops == 2 * rows * columns * 16


def test_bank_conflicts() -> None:
    body = "  mov.u32 %r1, buffer;\n  mad.lo.u32 %r2, %r0, {stride}, %r1;\n  st.shared.b32 [%r2], %r0;\n"
    for stride, passes in ((4, 1), (8, 2), (128, 32), (0, 1), (132, 1)):
        text = kernel(body.format(stride=stride), 1, shared=".shared .align 128 .b8 buffer[8192];\n")
        report = run_ptx(text, 1, 32, [np.zeros(1, np.uint64)], profile=True)
        assert report.counters["shared_passes"] == passes * report.counters["shared_accesses"], stride


def test_arguments_are_checked() -> None:
    text = kernel(BODY, 1)
    with pytest.raises(LaunchError, match="has 1 parameters, 2 were given"):
        run_ptx(text, 1, 32, [np.zeros(32), 1])
    with pytest.raises(LaunchError, match="no kernel 'other'"):
        run_ptx(text, 1, 32, [np.zeros(32)], kernel="other")
    with pytest.raises(LaunchError, match="schedule is one of"):
        run_ptx(text, 1, 32, [np.zeros(32)], schedule="fast")


def test_syntax_errors_name_the_line() -> None:
    with pytest.raises(PtxSyntaxError, match="line 3"):
        parse(".version 9.0\n.target sm_100a\n.entry k()\n{ ret;\n")
    with pytest.raises(PtxSyntaxError, match=r"line \d+: label NOWHERE is not defined"):
        run_ptx(kernel("  bra NOWHERE;\n", 1), 1, 32, [np.zeros(1)])


def test_operands() -> None:
    assert split_operands("{a, b}, [c+4], [d, {x, y}], e") == ["{a, b}", "[c+4]", "[d, {x, y}]", "e"]


def test_parameters_are_placed_like_c_and_tensor_maps_at_64_bytes() -> None:
    parameters = ".param .u32 a, .param .align 8 .b8 b[24], .param .align 64 .b8 m[128], .param .u8 c"
    module = parse(f".target sm_100a\n.entry k({parameters})\n{{ ret; }}\n")
    assert [(p.offset, p.size) for p in module.entries["k"].parameters] == [(0, 4), (8, 24), (64, 128), (192, 1)]


def test_the_build_is_cached() -> None:
    assert build() == build()
