"""What is special to the C++ CPU kernels: every instruction set, any number of threads, sizes that are no multiple of
a vector or a tile, bounded memory. The contract itself is tested over all backends in test_backends.py."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import dsa_oracle
import pytest
import torch
from dsa_cases import BOUNDS, Case, Sizes, assert_gradients, bound, make

from cudnn_dsa.backends import cpu

reason = cpu.unavailable("cpu")
if reason:
    pytest.skip(reason, allow_module_level=True)

ops = torch.ops.cudnn_dsa
DTYPES = list(BOUNDS)


@pytest.fixture(params=ops._cpu_instruction_sets())
def instruction_set(request):
    before = ops._cpu_use_instruction_set(request.param)
    yield request.param
    ops._cpu_use_instruction_set(before)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def forward(case: Case, out_dtype: torch.dtype | None = None):
    out = torch.full_like(case.dout, torch.nan, dtype=out_dtype or case.q.dtype)
    lse = torch.full_like(case.lse, torch.nan)
    ops.forward_out(
        case.q, case.kv, case.topk_idxs, case.attn_sink, case.topk_length, case.softmax_scale, out, lse
    )  # fmt: skip
    return out, lse


def backward(case: Case, delta=None, accumulate=False, dkv=None):
    dq = torch.full_like(case.q, torch.nan)
    dkv = torch.full_like(case.kv, torch.nan) if dkv is None else dkv
    d_sink = None if case.attn_sink is None else torch.full_like(case.attn_sink, torch.nan)
    ops.backward_out(
        case.q, case.kv, case.out, case.dout, case.lse, case.attn_sink, case.topk_idxs, case.topk_length, delta,
        case.softmax_scale, accumulate, dq, dkv, d_sink,
    )  # fmt: skip
    return dq, dkv, d_sink


def with_head_dim_v(case: Case, head_dim_v: int) -> Case:
    case = replace(case, dout=case.dout[..., :head_dim_v].contiguous())
    out, lse = case.forward_oracle()
    return replace(case, out=out.to(case.q.dtype), lse=lse.to(case.lse.dtype))


def check(name: str, case: Case) -> None:
    """Forward and backward against the float64 oracle."""
    out, lse = forward(case)
    want_out, want_lse = case.forward_oracle()
    assert dsa_oracle.relative_error(out, want_out) <= bound(name, case.q.dtype)
    empty = torch.isneginf(want_lse)
    assert torch.equal(torch.isneginf(lse), empty)
    torch.testing.assert_close(lse.double()[~empty], want_lse[~empty], rtol=2e-6, atol=1e-5)
    assert_gradients(name, case, backward(case))


# (S_q, S_kv, H, D, K), D_v: below, at and just beyond vectors (2 to 16 lanes), register tiles (6 rows; 4 to 64
# columns), blocks of D (96), key tiles (64) and segments (512).
RAGGED = [
    (Sizes(1, 1, 1, 1, 1), 1),
    (Sizes(2, 3, 3, 7, 5), 4),
    (Sizes(3, 9, 5, 17, 6), 17),
    (Sizes(2, 40, 16, 64, 7), 63),
    (Sizes(2, 70, 17, 65, 65), 33),
    (Sizes(2, 130, 7, 97, 63), 96),
    (Sizes(3, 200, 65, 129, 129), 65),
    (Sizes(2, 700, 2, 193, 513), 192),
    (Sizes(40, 300, 6, 33, 70), 31),
]


@pytest.mark.parametrize(("sizes", "head_dim_v"), RAGGED, ids=str)
def test_ragged_sizes(instruction_set, sizes, head_dim_v):
    for dtype in DTYPES:
        check("sink", with_head_dim_v(make("sink", dtype, sizes), head_dim_v))


@pytest.mark.parametrize(
    "name",
    [
        "poisoned_rows", "cut_off_entries", "scattered_invalid", "duplicates", "logits_200", "sink_mixed",
        "sink_overflow", "sink_and_empty_rows", "odd_lengths", "one_key_only",
    ],
)  # fmt: skip
def test_hostile_data_on_every_instruction_set(instruction_set, name):
    for dtype in DTYPES:
        check(name, make(name, dtype, Sizes(head_dim=100, heads=5, topk=20)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_16_bit_conversions_round_to_nearest_even(instruction_set, dtype):
    """One key of weight 1: out is kv itself, so every value of the format must come back bit for bit, and a float32
    dkv that is rounded to the format must round as torch does."""
    if dtype.itemsize != 2:
        pytest.skip("16-bit formats")
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    kv = every[torch.isfinite(every)].view(-1, 8).contiguous()
    n = kv.shape[0]
    case = Case(
        q=torch.zeros(n, 1, 8, dtype=dtype), kv=kv, topk_idxs=torch.arange(n, dtype=torch.int32)[:, None],
        attn_sink=None, topk_length=None, dout=torch.zeros(n, 1, 8, dtype=dtype), softmax_scale=1.0,
        out=torch.zeros(n, 1, 8, dtype=dtype), lse=torch.zeros(n, 1),
    )  # fmt: skip
    out, _ = forward(case)
    assert torch.equal(out[:, 0].view(torch.int16) & 0x7FFF, kv.view(torch.int16) & 0x7FFF)
    # p = exp(-lse) scales dout before dkv is rounded: values between those of the format, ties among them.
    case.dout, case.kv = kv[:, None].contiguous(), torch.zeros_like(kv)
    case.lse = -torch.log(torch.linspace(0.5, 1, n))[:, None].contiguous()
    wide = torch.zeros(n, 8)
    backward(case, accumulate=True, dkv=wide)
    _, narrow, _ = backward(case)
    assert torch.equal(narrow, wide.to(dtype))


@pytest.mark.parametrize("name", ["duplicates", "one_row_for_all", "sink", "topk_length"])
def test_bitwise_equal_for_any_number_of_threads(instruction_set, threads, name):
    for dtype in DTYPES:
        case = make(name, dtype, Sizes(s_q=70, s_kv=90, heads=5, head_dim=150, topk=80))
        threads(1)
        first = (*forward(case), *backward(case))
        for count in (2, 3, 8):
            threads(count)
            again = (*forward(case), *backward(case))
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True) if a is not None), count


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_rows_longer_than_a_chunk(threads, dtype):
    """So many keys that p and ds of one query do not fit the buffer of a chunk: several passes over one row."""
    case = make("duplicates", dtype, Sizes(s_q=2, s_kv=50, heads=3, head_dim=24, topk=70_000))
    case.topk_idxs = torch.randint(-1, 50, case.topk_idxs.shape, dtype=torch.int32)
    case.topk_length = torch.tensor([70_000, 40_001], dtype=torch.int32)
    out, lse = case.forward_oracle()
    case.out, case.lse = out.to(dtype), lse.to(case.lse.dtype)
    threads(1)
    first = backward(case)
    assert_gradients("duplicates", case, first)
    threads(4)
    assert all(torch.equal(a, b) for a, b in zip(first, backward(case), strict=True) if a is not None)


@pytest.mark.parametrize("gap", [0.4, 1.0, 2.2, 3.1])
def test_long_lists_of_equal_terms(instruction_set, gap):
    """Equal terms round to the same side again and again: one fp32 chain of 9000 was off by 5e-5."""
    case = make("random", torch.float32, Sizes(s_q=1, s_kv=9000, heads=3, head_dim=16, topk=9000))
    case.kv[1:] = case.kv[1]
    case.q[..., 1:], case.q[..., 0], case.kv[:, 0] = 0, 1, 0
    case.kv[0, 0] = gap / case.softmax_scale
    out, lse = case.forward_oracle()
    case.out, case.lse = out.float(), lse.float()
    check("one_row_for_all", case)


def test_addresses_beyond_32_bits():
    """kv and dkv of 2**31 elements and more; only the selected rows are ever touched, so it costs no memory."""
    rows, head_dim = 2**22 + 11, 520
    try:
        kv, dkv = torch.empty(rows, head_dim), torch.empty(rows, head_dim)
    except RuntimeError as error:
        pytest.skip(f"no address space: {error}")
    picked = torch.tensor([3, rows - 1, rows // 2, rows - 7])
    small = make("random", torch.float32, Sizes(s_q=2, s_kv=4, heads=3, head_dim=head_dim, topk=4))
    small.topk_idxs = torch.tensor([[0, 1, 2, 3], [3, 3, 1, -1]], dtype=torch.int32)
    out, lse = small.forward_oracle()
    small.out, small.lse = out.float(), lse.float()
    kv[picked], dkv[picked] = small.kv, torch.zeros(4, head_dim)
    selected = torch.where(small.topk_idxs >= 0, picked[small.topk_idxs.clamp(min=0).long()], -1).int()
    large = replace(small, kv=kv, topk_idxs=selected)
    assert dsa_oracle.relative_error(forward(large)[0], out) <= 1e-5
    dq, _, _ = backward(large, accumulate=True, dkv=dkv)
    assert_gradients("random", small, (dq, dkv[picked], None))


MEMORY = """
import sys, torch
from pathlib import Path
from dsa_memory import allocated_peak
from cudnn_dsa.backends import cpu
assert cpu.unavailable("cpu") is None
torch.set_num_threads(2)
ops = torch.ops.cudnn_dsa

def tensors(s_q, s_kv, heads, head_dim, topk):
    return (
        torch.randn(s_q, heads, head_dim), torch.randn(s_kv, head_dim),
        torch.randint(s_kv, (s_q, topk), dtype=torch.int32), torch.randn(s_q, heads, head_dim),
    )

def step(q, kv, idxs, dout):
    out, lse, dq, dkv = torch.empty_like(q), torch.empty(q.shape[:2]), torch.empty_like(q), torch.empty_like(kv)
    ops.forward_out(q, kv, idxs, None, None, 0.1, out, lse)
    ops.backward_out(q, kv, out, dout, lse, None, idxs, None, None, 0.1, False, dq, dkv, None)

def peak():
    return next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM"))

step(*tensors(4, 32, 2, 64, 8))
inputs = tensors(64, 16384, 16, 64, 8192)
Path("/proc/self/clear_refs").write_text("5")
before = peak()
step(*inputs)
resident = (peak() - before) * 1024
print(allocated_peak(lambda: step(*inputs)), resident)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures through /proc")
def test_memory_is_bounded():
    """No (S_q, H, K) scores (34 MB here), no (S_q, K, D) gather (134 MB): outputs are 5 MB, the rest is tiles.

    What torch hands out is the same on every run. Resident memory also has what torch does not see, and noise of MBs.
    """
    directory = {"cwd": Path(__file__).parent}
    result = subprocess.run([sys.executable, "-c", MEMORY], check=True, capture_output=True, text=True, **directory)
    allocated, resident = map(int, result.stdout.split())
    assert allocated < 12e6
    assert resident < 32e6


def test_calls_that_would_leave_the_tensors_are_refused():
    case = make("sink", torch.float32, Sizes())
    for change in (
        {"kv": case.kv[:, :-1].contiguous()},
        {"topk_idxs": case.topk_idxs[:-1].contiguous()},
        {"topk_idxs": case.topk_idxs.long()},
        {"attn_sink": case.attn_sink[:-1].contiguous()},
        {"topk_length": torch.ones(1, dtype=torch.int32)},
        {"kv": case.kv.half()},
        {"lse": case.lse[:, :-1].contiguous()},
        {"dout": case.dout[..., :-1].contiguous()},
        {"q": case.q.transpose(0, 1)},
    ):
        wrong = replace(case, **change)
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=next(iter(change)) + ": expected"):
            backward(wrong)
    with pytest.raises(TypeError, match="dkv: expected dtype float32 or float64"):
        backward(make("sink", torch.float16, Sizes()), accumulate=True)


def test_an_unknown_instruction_set_is_refused_by_name():
    with pytest.raises(ValueError, match=r"expected one that this machine runs .*generic.*got sse9"):
        ops._cpu_use_instruction_set("sse9")
