"""What a Blackwell GPU would refuse or spill, read from the compiled kernels without one."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
import torch

pytest.importorskip("cutlass")

import artifact_capture
import dsa_cases
import sm100_problem
from dsa_cases import Sizes

from cudnn_dsa import artifact
from cudnn_dsa.backends.sm100 import config
from cudnn_dsa.backends.sm100.config import Config, Registers, head_tile
from cudnn_dsa.backends.sm100.sources import config as config_of
from cudnn_dsa.backends.sm100.sources import sources

SHARED_LIMIT = 227 * 1024
REGISTER_FILE = 64 * 1024
HEADS = (1, 16, 24, 32, 64, 96, 128)


def problem(heads: int, head_dim: int, dtype: torch.dtype):
    case = dsa_cases.make("sink", dtype, Sizes(1, 8, heads, head_dim, 8))
    return sm100_problem.problem_of(case, has_topk_length=True)


CASES = [
    ("sm_100a", 64, 576, torch.bfloat16),
    ("sm_103a", 16, 512, torch.float16),
    *[
        pytest.param(arch, heads, head_dim, dtype, marks=pytest.mark.slow)
        for arch in ("sm_100a", "sm_103a", "sm_100f")
        for heads in (16, 32, 64)
        for head_dim in (512, 576)
        for dtype in (torch.bfloat16, torch.float16)
    ],
]


@pytest.mark.parametrize(("arch", "heads", "head_dim", "dtype"), CASES)
def test_no_spills_and_within_the_limits(arch: str, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    p = problem(heads, head_dim, dtype)
    c = config_of(p)
    for source in sources(p, arch):
        compiled = artifact.find(source)
        used = artifact.resources(compiled)
        assert used.stack == 0, source.name
        assert used.static_shared + used.dynamic_shared <= SHARED_LIMIT
        threads = source.launch.block[0]
        assert used.registers * threads <= REGISTER_FILE
        if source.name != "backward":
            continue
        # What the roles ask for is what the CTA was launched with.
        asked = [int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", compiled.ptx)]
        groups = {"gather": 1, "softmax": 1, "reduce": 2, "issue": 1}
        assert sorted(asked) == sorted(getattr(c.registers, name) for name in groups)
        assert sum(getattr(c.registers, name) * n for name, n in groups.items()) == used.registers * threads // 128


@pytest.mark.parametrize(("heads", "deterministic"), [(96, True), pytest.param(16, False, marks=pytest.mark.slow)])
def test_the_descriptions_are_what_the_host_code_launches(heads: int, deterministic: bool) -> None:
    p = dataclasses.replace(problem(heads, 512, torch.float16), deterministic=deterministic)
    for source in sources(p, "sm_100a"):
        pointers = {key: 4096 * (1 + i) for i, key in enumerate(source.inputs) if "*" in source.inputs[key]}
        for sizes in ({"s_q": 5, "s_kv": 300, "topk": 7}, {"s_q": 1, "s_kv": 1, "topk": 2000}):
            given = {**pointers, **sizes, "softmax_scale": 0.05, "first_query": 3, "queries": 4}
            values = {key: given[key] for key in source.inputs}
            artifact_capture.assert_same_launch(source, values)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_dim", [512, 576])
@pytest.mark.parametrize("element", ["bf16", "f16"])
def test_the_memory_maps_fit_and_do_not_overlap(heads: int, head_dim: int, element: str) -> None:
    c = Config(element, head_dim, heads, head_tile(heads))
    assert c.shared_bytes + 1024 <= SHARED_LIMIT  # 1 KB is the system's
    tiles = [(0, c.q), (c.offset_dout, c.dout), (c.offset_p, c.p), (c.offset_ds, c.p)]
    tiles += [(c.offset_kv + i * c.kv.bytes, c.kv) for i in range(c.kv_stages)]
    ends = sorted((start, start + tile.bytes) for start, tile in tiles)
    assert all(start % 1024 == 0 for start, _ in ends)  # of the swizzle
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
    assert ends[-1][1] <= c.offset_rows
    columns = [(0, c.heads_tile), (c.tmem_dkv, c.dkv_buffers * config.KEYS), (c.tmem_dq, c.dq_columns)]
    assert all(a[0] + a[1] <= b[0] for a, b in itertools.pairwise(columns))
    assert c.tmem_end <= c.tmem_allocated <= 512
    assert c.dkv_buffers % 2 == 0  # two warpgroups take turns


def test_a_configuration_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes of shared memory"):
        Config("bf16", 576, 128, 128)


def test_the_registers_of_the_roles_are_what_a_cta_starts_with() -> None:
    r = Registers()
    assert (r.gather + r.softmax + 2 * r.reduce + r.issue) * 128 <= REGISTER_FILE
    assert all(n % 8 == 0 and 24 <= n <= 256 for n in vars(r).values())


@pytest.mark.parametrize(("heads", "head_dim"), [(64, 576), (16, 512)])
def test_the_products_are_the_expected_ones(heads: int, head_dim: int) -> None:
    """Shapes and how many for one query of two tiles, counted by the emulator; nothing but kind::f16 is in the PTX."""
    case = dsa_cases.make("random", torch.bfloat16, Sizes(1, 128, heads, head_dim, 128))
    _, gpu = sm100_problem.backward(case, check=False)
    launch = next(x for x in gpu.report.launches if x.mma)
    tiles, rest = 2, head_dim - 512
    steps = (  # M, N, instructions of a tile
        (64, heads, (head_dim + 512) // 16 + rest // 64 * 4),  # S, dP; the rest of dQ
        (128, heads, 4 * 4),  # dQ
        (128, 64, 4 * 2 * heads // 16),  # dKV
        (64, 32, rest // 64 * 2 * heads // 16),  # its rest, 32 keys at a time
    )
    want: dict[str, int] = {}
    for m, n, count in steps:
        if count:
            key = f"tcgen05 f16 SS cta_group::1 {m}x{n}x16"
            want[key] = want.get(key, 0) + count * tiles
    assert {key: count for key, (count, _) in launch.mma.items()} == want
    useful = 2 * heads * 128 * (3 * head_dim + 2 * 512)
    assert sum(flops for _, flops in launch.mma.values()) == useful  # every issued FLOP is useful
