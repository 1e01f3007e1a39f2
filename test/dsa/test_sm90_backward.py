"""The Hopper backward in the emulator, against the float64 oracle: the contract's cases, sizes, schedules, hazards."""

from __future__ import annotations

import importlib.util
import itertools
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dsa_cases import CASES, Sizes, assert_gradients, make

pytest.importorskip("cutlass")

import artifact_capture
from sm90_problem import backward
from sm100_problem import problem_of

import cute_emulator
from cudnn_dsa import artifact
from cudnn_dsa.backends import sm90
from cudnn_dsa.backends.sm90.config import SHARED_BYTES, Config, backward_config
from cudnn_dsa.backends.sm90.sources import sources
from cute_emulator import ExecutionError, HazardError

# Two full tiles and a part of one; more keys than that, so that rows differ.
SIZES = Sizes(s_q=4, s_kv=150, heads=64, head_dim=576, topk=140)
VARIANTS = {
    "bf16-576": (torch.bfloat16, SIZES),
    "fp16-512": (torch.float16, replace(SIZES, head_dim=512)),
    "fp16-576": (torch.float16, SIZES),
    "bf16-512": (torch.bfloat16, replace(SIZES, head_dim=512)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("variant", list(VARIANTS)[:2])
def test_the_contract(variant: str, name: str) -> None:
    dtype, sizes = VARIANTS[variant]
    case = make(name, dtype, sizes)
    got, _ = backward(case, seed=len(name))
    assert_gradients(name, case, got)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("variant", list(VARIANTS)[2:])
def test_the_contract_in_the_other_variants(variant: str, name: str) -> None:
    dtype, sizes = VARIANTS[variant]
    case = make(name, dtype, sizes, seed=1)
    got, _ = backward(case, seed=len(name))
    assert_gradients(name, case, got)


@pytest.mark.parametrize("topk", [1, 63, 64, 65, 129])
def test_any_number_of_keys(topk: int) -> None:
    """One key, a tile less one, a tile, a tile and one, and more keys than there are rows."""
    case = make("random", torch.bfloat16, replace(SIZES, s_q=2, s_kv=100, topk=topk))
    got, _ = backward(case, multiprocessors=1)  # both queries by one CTA
    assert_gradients("leading_invalid" if topk == 1 else "random", case, got)


@pytest.mark.parametrize("heads", [1, 70])
def test_any_number_of_heads(heads: int) -> None:
    case = make("sink", torch.bfloat16, replace(SIZES, s_q=3, heads=heads))
    got, _ = backward(case, multiprocessors=2)
    assert_gradients("sink", case, got)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [512, 576])
@pytest.mark.parametrize("heads", [8, 16, 24, 32, 96, 128])
def test_more_numbers_of_heads(heads: int, head_dim: int) -> None:
    case = make("topk_length", torch.float16, replace(SIZES, s_q=3, heads=heads, head_dim=head_dim))
    got, _ = backward(case, multiprocessors=2)
    assert_gradients("topk_length", case, got)


def test_fp32_out_given_delta_and_fp32_dkv() -> None:
    case = make("logits_200", torch.bfloat16, SIZES, out_dtype=torch.float32)
    got, _ = backward(case, dkv=torch.full(case.kv.shape, float("nan")))
    assert_gradients("logits_200", case, got)
    assert got[1].dtype == torch.float32

    delta = (case.out.double() * case.dout.double()).sum(-1).float()
    case.out = torch.full_like(case.dout, float("nan"))  # nothing reads it
    got, _ = backward(case, delta=delta)
    assert_gradients("logits_200", case, got, delta)


def test_accumulate_adds_to_what_dkv_holds() -> None:
    case = make("duplicates", torch.bfloat16, SIZES)
    before = torch.randn(case.kv.shape, generator=torch.Generator().manual_seed(5))
    (dq, dkv, d_sink), _ = backward(case, dkv=before.clone(), accumulate=True)
    assert_gradients("duplicates", case, (dq, dkv - before, d_sink))
    untouched = torch.ones(len(before), dtype=torch.bool)
    untouched[case.topk_idxs.unique().long()] = False
    assert torch.equal(dkv[untouched], before[untouched])


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**11])
def test_fp16_gradients_of_any_size(scale: float) -> None:
    """dS far below and far above what fp16 holds; and a first tile that is smaller than the others by 2**-20, so that
    the power of two falls on the way."""
    case = make("random", torch.float16, replace(SIZES, head_dim=512))
    case.dout = (case.dout.double() * scale).half()
    case.topk_idxs, case.kv = case.topk_idxs.clone(), case.kv.clone()
    case.topk_idxs[:, :64] = torch.arange(64, dtype=torch.int32)
    case.topk_idxs[:, 64:] = torch.arange(64, 140, dtype=torch.int32)
    case.kv[:64] *= 2.0**-10
    out, lse = case.forward_oracle()
    # In fp32 and given, or its rounding would be most of dS where dP is small.
    case.out, case.lse = out.float(), lse.float()
    got, _ = backward(case)
    dkv = case.backward_oracle()[1]
    if scale < 1:  # the results are subnormal numbers of fp16: dkv is asked for in fp32, dq has no bits
        (_, dkv32, _), _ = backward(case, dkv=torch.full(case.kv.shape, float("nan")))
        assert (dkv32.double() - dkv).norm() < 2e-2 * dkv.norm()
        return
    assert_gradients("random", case, got)


def test_rows_without_a_valid_key_may_hold_anything() -> None:
    case = make("sink_and_empty_rows", torch.bfloat16, SIZES)
    want = case.backward_oracle()
    case.lse[::2] = torch.nan
    case.out[::2], case.dout[::2] = torch.nan, torch.inf
    (dq, dkv, d_sink), _ = backward(case)
    assert torch.equal(dq[::2], torch.zeros_like(dq[::2]))
    assert (dkv.double() - want[1]).norm() < 3e-3 * want[1].norm()
    assert (d_sink.double() - want[2]).norm() < 1e-5 * want[2].norm()


@pytest.mark.parametrize("variant", ["bf16-576", "fp16-512"])
def test_schedules_change_nothing_but_the_order_of_sums(variant: str) -> None:
    dtype, sizes = VARIANTS[variant]
    case = make("sink", dtype, replace(sizes, s_q=3))
    dkv = torch.full(case.kv.shape, float("nan"))
    first = backward(case, dkv=dkv.clone(), schedule="eager")[0]
    for seed in range(4):
        again = backward(case, dkv=dkv.clone(), seed=seed, multiprocessors=1 + seed % 3)[0]
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[2], again[2])
        assert (first[1] - again[1]).norm() < 1e-6 * first[1].norm()


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_fifty_schedules(variant: str) -> None:
    dtype, sizes = VARIANTS[variant]
    names = list(CASES)
    for seed in range(50):
        name = names[seed % len(names)]
        case = make(name, dtype, replace(sizes, topk=70 + 5 * seed), seed=seed)
        assert_gradients(name, case, backward(case, seed=seed, multiprocessors=1 + seed % 5)[0])


def flops(case) -> int:
    _, gpu = backward(case)
    return next(launch for launch in gpu.report.launches if launch.mma).flops


def test_entries_that_do_not_count_cost_nothing() -> None:
    """Ten keys between 600 entries that do not count are one tile."""
    case = make("random", torch.bfloat16, replace(SIZES, s_q=1, topk=10))
    compact = flops(case)
    spread = torch.full((1, 610), -1, dtype=torch.int32)
    spread[0, ::61] = case.topk_idxs[0]
    assert compact == 2 * 64 * 64 * (3 * 576 + 2 * 512)
    assert flops(replace(case, topk_idxs=spread)) == compact


@pytest.mark.slow
def test_addresses_above_four_gigabytes() -> None:
    """Rows of kv and of the sums whose offsets are no int32: in elements, in bytes, in vectors of four."""
    rows, few = 3_800_000, 40
    case = make("random", torch.bfloat16, replace(SIZES, s_q=2, s_kv=few, topk=few))
    kv = torch.empty(rows, 576, dtype=torch.bfloat16)  # pages that nothing touches take no memory
    sums = torch.empty(rows, 576)
    place = torch.linspace(0, rows - 1, few).long()
    kv[place], sums[place] = case.kv, 0.0
    index = place[case.topk_idxs.long()].int()
    problem = problem_of(case, backend="sm90", s_kv=rows)
    assert problem.wide_address
    z2 = case.lse * torch.tensor(1.4426950408889634)
    delta = (case.out.double() * case.dout.double()).sum(-1).float()
    dq = torch.empty_like(case.q)
    with cute_emulator.device("sm_90a"):
        kernels = artifact.load(sources, problem)
        kernels["backward"].launch(None, {
            "q": case.q, "kv": kv, "dout": case.dout, "z2": z2, "delta": delta, "topk_idxs": index,
            "topk_length": None, "dq": dq, "sums": sums, "s_q": 2, "s_kv": rows, "topk": few,
            "softmax_scale": case.softmax_scale,
        })  # fmt: skip
        dkv = torch.empty(few, 576, dtype=torch.bfloat16)
        kernels["finish"].launch(None, {"sums": sums[place].contiguous(), "dkv": dkv, "s_kv": few})
    assert_gradients("random", case, (dq, dkv, None))


# What lines guard, as (pattern in the PTX of the kernel, what stands there instead).
BROKEN = {
    "proxy fences": (r"fence\.proxy\.async\.shared::cta;", ""),
    "arrival of gathered rows": (r"cp\.async\.mbarrier\.arrive\.noinc\.shared\.b64\s+\[[^\]]+\];", ""),
    "zero fill": (r"(cp\.async\.cg\.shared\.global \[%r\d+\], \[%rd\d+\], 16), %r\d+;", r"\1;"),
    "waits for wgmma": (r"wgmma\.wait_group\.sync\.aligned\s+[012];", ""),
    "bytes of Q and dO": (r"(mbarrier\.arrive\.expect_tx[^;]*, )%r\d+;", r"\g<1>1024;"),
}
# A wait for an mbarrier, and what never waits nor learns anything.
WAIT = re.compile(r"mbarrier\.try_wait\.parity\.shared\.b64 P1, \[%r\d+\], %r\d+, \d+;")
NO_WAIT = "setp.eq.u32 P1, 0, 0;"
WAITS = 19  # of D = 512 with bf16, in the order of the PTX
IMPLIED = {
    1: "the first tile of a query's rows: Q is free only when the tiles of the query before it are",
    13: "the other warps' part of dS: each warp of a wgmma reads its own rows of A, which the PTX ISA does not promise",
    15: "Q and dO in the dkv warpgroup: P comes later",
}


def is_caught(case, pattern, replacement: str, seeds, hit: int | None = None) -> bool:
    """Whether a change of the kernel's PTX shows as a hazard, a deadlock or a wrong result under one of the seeds.

    ``hit``: which match to change; None is all of them.
    """
    changed = []

    def transform(ptx: str) -> str:
        if "wgmma" not in ptx:
            return ptx
        matches = list(re.finditer(pattern, ptx))
        for match in reversed(matches if hit is None else [matches[hit]]):
            ptx = ptx[: match.start()] + match.expand(replacement) + ptx[match.end() :]
        changed.append(len(matches))
        return ptx

    for seed in seeds:
        try:
            got, _ = backward(case, transform=transform, multiprocessors=1, seed=seed)
            assert_gradients("random", case, got)
        except (HazardError, ExecutionError, AssertionError):
            assert changed[0] > (hit or 0), "the line to break is not there"
            return True
    return False


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_caught(name: str) -> None:
    """Partial tiles, and NaN in the row that invalid entries point at."""
    case = make("poisoned_rows", torch.bfloat16, replace(SIZES, s_q=3, head_dim=512))
    assert is_caught(case, *BROKEN[name], seeds=[0])


@pytest.mark.parametrize("index", [i for i in range(WAITS) if i not in IMPLIED])
def test_every_wait_is_needed(index: int) -> None:
    """Several tiles, the last one partial, of two queries of one CTA."""
    case = make("random", torch.bfloat16, replace(SIZES, s_q=2, s_kv=700, head_dim=512, topk=650))
    assert is_caught(case, WAIT, NO_WAIT, range(2), index)


def compiled(variant: str, heads: int, direction: str, name: str) -> dict[str, artifact.Artifact]:
    dtype, sizes = VARIANTS[variant]
    case = make(name, dtype, replace(sizes, s_q=1, topk=4, heads=heads))
    found = sources(problem_of(case, direction, backend="sm90"), "sm_90a")
    return {source.name: artifact.find(source) for source in found}


def disassemble(cubin: bytes, folder) -> str:
    """SASS, by the nvdisasm that Triton's package carries."""
    triton = importlib.util.find_spec("triton")
    tool = Path(triton.origin).parent / "backends/nvidia/bin/nvdisasm" if triton else Path("/nowhere")
    if not tool.exists():
        pytest.skip("no disassembler")
    (folder / "kernel.cubin").write_bytes(cubin)
    return subprocess.run([tool, "-c", folder / "kernel.cubin"], capture_output=True, text=True, check=True).stdout


def _variants() -> list:
    """Two head tiles need one register more than one tile; all variants are slow to compile."""
    quick = {("bf16-576", 128, "topk_length"), ("bf16-576", 64, "random"), ("fp16-512", 64, "random")}
    return [
        pytest.param(*chosen, marks=[] if chosen in quick else [pytest.mark.slow])
        for chosen in itertools.product(VARIANTS, (16, 64, 128), ("random", "topk_length"))
    ]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("variant", "heads", "name"), _variants())
def test_nothing_spills(variant: str, heads: int, name: str, direction: str, tmp_path) -> None:
    """Per thread all registers that a CTA starts with, which setmaxnreg then divides; per CTA at most 227 KB; and
    wgmma in groups: ptxas waits for each one where it is short of registers."""
    kernels = compiled(variant, heads, direction, name)
    by_name = {key: artifact.resources(kernel) for key, kernel in kernels.items()}
    assert {found.stack for found in by_name.values()} == {0}
    main = by_name[direction]
    assert main.registers == {"forward": 128, "backward": 168}[direction]
    assert main.dynamic_shared <= SHARED_BYTES
    sass = disassemble(kernels[direction].cubin, tmp_path)
    assert sass.count("WARPGROUP.DEPBAR") < sass.count("HGMMA") / 2
    assert "STL" not in sass
    assert "LDL" not in sass


def test_registers_that_a_multiprocessor_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="504 in all"):
        Config(registers=(32, 240, 240))
    with pytest.raises(ValueError, match="multiples of 8"):
        Config(registers=(20, 240, 240))


@pytest.mark.parametrize("case", ["sink", "topk_length"])
def test_the_description_is_what_the_host_code_launches(case: str) -> None:
    problem = problem_of(make(case, torch.bfloat16, replace(SIZES, heads=70)), backend="sm90")
    values = {
        name: 4096 * (1 + i)
        for i, name in enumerate(
            ("q", "kv", "out", "dout", "lse", "attn_sink", "topk_idxs", "topk_length", "delta", "z2", "dq", "dkv",
             "sums", "d_sink")
        )
    }  # fmt: skip
    for sizes in ({"s_q": 5, "s_kv": 300, "topk": 7}, {"s_q": 1, "s_kv": 1, "topk": 2000}):
        for source in sources(problem, "sm_90a"):
            given = {**values, **sizes, "softmax_scale": 0.05, "multiprocessors": 3}
            artifact_capture.assert_same_launch(source, {name: given[name] for name in source.inputs})


def test_what_it_does_not_run_is_refused_with_a_reason() -> None:
    problem = problem_of(make("sink", torch.bfloat16, SIZES), backend="sm90")
    assert sm90.supports(problem) is None
    for change in (
        {"deterministic": True}, {"q_cluster_mode": "adaptive_pair"},
        {"head_dim": 64, "head_dim_v": 64}, {"dtype": "float32"}, {"s_q": 2**30}, {"s_kv": 2**24},
    ):  # fmt: skip
        assert sm90.supports(replace(problem, **change)), change


def test_the_tiles_follow_from_the_kernel_key() -> None:
    problem = problem_of(make("sink", torch.bfloat16, SIZES), backend="sm90")
    for change in ({"s_q": 10**6}, {"s_kv": 10**6}, {"topk": 9}):
        assert backward_config(replace(problem, **change)) == backward_config(problem)
