"""Every backend against the float64 oracles: all data, dtypes, sizes and options of the contract."""

import itertools
from dataclasses import replace

import dsa_oracle
import pytest
import torch
from dsa_cases import CASES, Sizes, assert_gradients, bound, make

import cudnn_dsa
from cudnn_dsa import interface
from cudnn_dsa.backends import reference

H_AND_SIZES = [
    Sizes(s_q=1, heads=1, topk=5),
    Sizes(s_q=3, heads=3, topk=33),
    Sizes(s_q=2, heads=16, topk=64),
    Sizes(s_q=2, heads=24, topk=100, s_kv=300),
    Sizes(s_q=2, heads=65, topk=70, s_kv=90),
    Sizes(s_q=3, heads=128, topk=130, s_kv=200),
    Sizes(s_q=5, heads=2, topk=50, s_kv=20),  # K > S_kv
    Sizes(s_q=9, heads=2, topk=1),
]


def with_dim(sizes, head_dim):
    return Sizes(**{**vars(sizes), "head_dim": head_dim})


def backward(target, case, **options):
    return interface.sparse_attention_backward(
        case.q, case.kv, case.out, case.dout, case.lse, case.attn_sink, case.topk_idxs, case.softmax_scale,
        case.topk_length, backend=target.backend, **options,
    )  # fmt: skip


def forward(target, case, **options):
    return interface.sparse_attention_forward(
        case.q, case.kv, case.topk_idxs, case.attn_sink, case.topk_length, case.softmax_scale, backend=target.backend,
        **options,
    )  # fmt: skip


def check_backward(target, name, dtype, sizes, **options):
    case = make(name, dtype, sizes).to(target.device)
    got = backward(target, case, **options)
    for tensor in (*got[:2], *([] if got.d_sink is None else [got.d_sink])):
        assert torch.isfinite(tensor).all()
    assert_gradients(name, case, got)
    return case, got


@pytest.mark.parametrize("name", CASES)
def test_backward_on_every_kind_of_data(target, name):
    for dtype, head_dim in itertools.product(target.dtypes, target.head_dims):
        case, got = check_backward(target, name, dtype, Sizes(head_dim=head_dim, topk=20))
        counts = dsa_oracle.multiplicity(case.topk_idxs.cpu(), _cpu(case.topk_length), case.kv.shape[0])
        assert (got.dq[counts.sum(1).to(target.device) == 0] == 0).all(), "a row without a key has dq exactly 0"
        assert (got.dkv[counts.sum(0).to(target.device) == 0] == 0).all(), "an unselected key has dkv exactly 0"


@pytest.mark.parametrize("name", CASES)
def test_forward_on_every_kind_of_data(target, name):
    for dtype, head_dim in itertools.product(target.dtypes, target.head_dims):
        case = make(name, dtype, Sizes(head_dim=head_dim, topk=20)).to(target.device)
        out, lse = forward(target, case)
        want_out, want_lse = case.to("cpu").forward_oracle()
        assert dsa_oracle.relative_error(out, want_out) <= bound(name, dtype)
        empty = torch.isneginf(want_lse)
        assert torch.equal(torch.isneginf(lse.cpu()), empty)
        assert (out.cpu()[empty] == 0).all()
        # fp32 holds |lse| of 200 to 8e-6; scores of 64 to 576 terms accumulate as much again.
        torch.testing.assert_close(lse.cpu().double()[~empty], want_lse[~empty], rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("sizes", H_AND_SIZES, ids=str)
def test_backward_at_every_size(target, sizes):
    for dtype, head_dim in itertools.product(target.dtypes, target.head_dims):
        check_backward(target, "sink", dtype, with_dim(sizes, head_dim))


@pytest.mark.parametrize("sizes", [Sizes(s_q=1, heads=1, topk=5), Sizes(s_q=3, heads=3, topk=3)], ids=str)
def test_backward_of_few_terms(target, sizes):
    """Rounding errors do not average out here: the one of dq reaches 3.5e-3 in bf16, and 3.6e-3 with three elements."""
    for dtype, head_dim in itertools.product(target.dtypes, (3, 64) if target.wide else target.head_dims):
        for seed in range(20):
            case = make("sink", dtype, with_dim(sizes, head_dim), seed).to(target.device)
            assert_gradients("sink", case, backward(target, case))


@pytest.mark.parametrize("sizes", H_AND_SIZES, ids=str)
def test_forward_at_every_size(target, sizes):
    for dtype, head_dim in itertools.product(target.dtypes, target.head_dims):
        case = make("sink", dtype, with_dim(sizes, head_dim)).to(target.device)
        out, _ = forward(target, case)
        assert dsa_oracle.relative_error(out, case.to("cpu").forward_oracle()[0]) <= bound("sink", dtype)


@pytest.mark.parametrize("empty", ["s_q", "s_kv", "topk"])
def test_sizes_of_zero_give_zeros(target, empty):
    sizes = Sizes(**{"head_dim": target.head_dims[-1], "s_q": 3, empty: 0})
    for dtype in target.dtypes:
        case = make("sink", dtype, sizes).to(target.device)
        got = backward(target, case)
        assert got.dq.shape == case.q.shape
        assert got.dkv.shape == case.kv.shape
        assert all((x == 0).all() for x in got)
        out, lse = forward(target, case)
        assert out.shape == case.dout.shape
        assert (out == 0).all()
        assert torch.isneginf(lse).all()


def _key_0_overflows_dp(dtype, head_dim):
    """Every row lists key 0; column 0 of its product with dout is beyond the range of the dtype, and no part of q.k."""
    case = make("random", dtype, Sizes(head_dim=head_dim))
    case.topk_idxs[case.topk_idxs == 0] = 1
    case.topk_idxs[:, 0] = 0
    case.q[..., 0] = case.kv[1:, 0] = 0
    largest = torch.finfo(dtype).max
    case.kv[0, 0], case.dout[..., 0] = largest**0.7, largest**0.35
    return case


def test_a_sink_of_infinity_gives_zeros_whatever_overflows(target):
    for dtype, head_dim in itertools.product(target.dtypes, target.head_dims):
        case = _key_0_overflows_dp(dtype, head_dim)
        case.kv[:, 0] = torch.finfo(dtype).max  # the sums of out as well
        case.attn_sink = torch.full(case.lse.shape[1:], torch.inf, dtype=case.lse.dtype)
        case.out.zero_()
        case = case.to(target.device)
        assert (forward(target, case).out == 0).all()
        for gradient in backward(target, case):
            assert (gradient == 0).all()


def test_nothing_passes_a_weight_that_underflows(target):
    """exp(-2000) is 0, dp of that key infinite: as if the key were not listed."""
    for dtype, head_dim in itertools.product(target.dtypes, target.head_dims):
        case = _key_0_overflows_dp(dtype, head_dim)
        case.q[..., 1], case.kv[1:, 1], case.kv[0, 1] = 1, 0, -2000 / case.softmax_scale
        without = replace(case, topk_idxs=torch.where(case.topk_idxs == 0, -1, case.topk_idxs))
        out, lse = without.forward_oracle()
        case.out = without.out = out.to(dtype)
        case.lse = without.lse = lse.to(case.lse.dtype)
        got = backward(target, case.to(target.device))
        assert_gradients("random", without, got)
        assert (got.dkv[0] == 0).all()


@pytest.mark.parametrize("given", [-torch.inf, torch.inf, torch.nan])
def test_any_lse_of_an_empty_row_is_fine(target, given):
    for dtype in target.dtypes:
        case = make("empty_rows", dtype, Sizes(head_dim=target.head_dims[-1])).to(target.device)
        _sink_and_hostile_empty_rows(case, given)
        got = backward(target, case)
        assert_gradients("empty_rows", case, got)
        assert (got.dq[::3] == 0).all()


def _sink_and_hostile_empty_rows(case, lse):
    case.lse[::3] = lse
    case.dout[::3] = torch.nan  # 0 * NaN must not reach dkv or d_sink
    case.attn_sink = torch.zeros(case.q.shape[1], dtype=case.lse.dtype, device=case.q.device)
    out, _ = case.to("cpu").forward_oracle()
    case.out = out.to(case.out)


def test_fp32_out_and_delta_are_taken(target):
    """Two ways to keep delta accurate where a 16-bit out would cost 5e-3."""
    for dtype in target.dtypes:
        case = make("logits_200", dtype, Sizes(head_dim=target.head_dims[-1]), out_dtype=torch.float32)
        delta = (case.out.double() * case.dout.double()).sum(-1).to(case.lse.dtype).to(target.device)
        case = case.to(target.device)
        # fp32 resolves dp - delta to 1e-7 of the terms, which cancel here.
        limit = 1e-5
        for got, given in ((backward(target, case), None), (backward(target, case, delta=delta), delta)):
            assert_gradients("logits_200", case, got, given, limit)


def test_delta_wins_over_out(target):
    dtype = target.dtypes[0]
    case = make("random", dtype, Sizes(head_dim=target.head_dims[-1])).to(target.device)
    delta = torch.randn(case.lse.shape, dtype=case.lse.dtype).to(target.device)
    assert_gradients("random", case, backward(target, case, delta=delta), delta)


def test_fp32_dkv_and_accumulation(target):
    """Queries in two chunks, added into one fp32 dkv that already holds something."""
    for dtype in target.dtypes:
        case = make("sink", dtype, Sizes(s_q=7, head_dim=target.head_dims[-1])).to(target.device)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        start = torch.randn(case.kv.shape, dtype=wide).to(target.device)
        dkv = start.clone()
        for rows in (slice(0, 3), slice(3, 7)):
            part = {k: getattr(case, k)[rows].contiguous() for k in ("q", "out", "dout", "lse", "topk_idxs")}
            result = interface.sparse_attention_backward(
                kv=case.kv, attn_sink=case.attn_sink, softmax_scale=case.softmax_scale, dkv=dkv, accumulate=True,
                backend=target.backend, **part,
            )  # fmt: skip
            assert result.dkv is dkv
        _, want, _, _ = case.to("cpu").backward_oracle()
        # Never rounded to 16 bits: fp32 accuracy whatever the inputs. CUDA kernels round p and ds for the products.
        rounded = {} if target.wide else {torch.bfloat16: 2e-3, torch.float16: 3e-4}
        limit = rounded.get(dtype, 1e-12 if dtype == torch.float64 else 1e-5)
        assert dsa_oracle.relative_error(dkv - start, want) <= limit
        fresh = backward(target, case, dkv=torch.full_like(start, torch.nan)).dkv
        assert dsa_oracle.relative_error(fresh, want) <= limit


def test_outputs_are_written_where_asked(target):
    dtype = target.dtypes[0]
    case = make("sink", dtype, Sizes(head_dim=target.head_dims[-1])).to(target.device)
    dq, dkv = torch.full_like(case.q, torch.nan), torch.full_like(case.kv, torch.nan)
    d_sink = torch.full_like(case.attn_sink, torch.nan)
    got = backward(target, case, dq=dq, dkv=dkv, d_sink=d_sink)
    assert got.dq is dq
    assert got.dkv is dkv
    assert got.d_sink is d_sink
    assert_gradients("sink", case, got)
    out, lse = torch.full_like(case.out, torch.nan), torch.full_like(case.lse, torch.nan)
    result = forward(target, case, out=out, lse=lse)
    assert result.out is out
    assert result.lse is lse
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("name", ["duplicates", "one_row_for_all", "sink"])
def test_deterministic_is_bitwise_repeatable(target, name):
    for dtype in target.dtypes:
        case = make(name, dtype, Sizes(s_q=48, heads=5, head_dim=target.head_dims[-1])).to(target.device)
        first = backward(target, case, deterministic=True)
        for _ in range(3):
            again = backward(target, case, deterministic=True)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True) if a is not None)


def test_dq_and_d_sink_repeat_in_every_mode(target):
    for dtype in target.dtypes:
        case = make("sink", dtype, Sizes(s_q=48, heads=5, head_dim=target.head_dims[-1])).to(target.device)
        first, again = backward(target, case), backward(target, case)
        assert torch.equal(first.dq, again.dq)
        assert torch.equal(first.d_sink, again.d_sink)
        assert dsa_oracle.relative_error(again.dkv, first.dkv) <= 1e-5 or dtype in (torch.bfloat16, torch.float16)


def test_without_a_sink_there_is_no_gradient_for_it(target):
    case = make("random", target.dtypes[0], Sizes(head_dim=target.head_dims[-1])).to(target.device)
    assert backward(target, case).d_sink is None


def test_end_to_end_at_large_logits(target):
    """5e-3 in bf16 at |s| near 200, against gradients of q, kv and sink alone."""
    for dtype in target.dtypes:
        sizes = Sizes(s_q=12, heads=8, head_dim=target.head_dims[-1], topk=32)
        case = make("logits_200", dtype, sizes).to(target.device)
        case.attn_sink = torch.linspace(-3, 150, 8, dtype=case.lse.dtype).to(target.device)
        leaves = [x.detach().requires_grad_() for x in (case.q, case.kv, case.attn_sink)]
        out = cudnn_dsa.sparse_attention(
            leaves[0], leaves[1], case.topk_idxs, attn_sink=leaves[2], softmax_scale=case.softmax_scale,
            backend=target.backend,
        )  # fmt: skip
        got = torch.autograd.grad(out, leaves, case.dout)
        limit = {torch.float64: 1e-10, torch.float32: 5e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype]
        for have, want in zip(got, case.to("cpu").end_to_end_oracle(), strict=True):
            assert dsa_oracle.relative_error(have, want) <= limit


@pytest.mark.parametrize("scale", [0.0, -0.2])
def test_scales_of_zero_and_below(target, scale):
    for dtype in target.dtypes:
        case = make("random", dtype, Sizes(head_dim=target.head_dims[-1]))
        case.softmax_scale = scale
        out, lse = case.forward_oracle()
        case.out, case.lse = out.to(dtype), lse.to(case.lse.dtype)
        case = case.to(target.device)
        assert_gradients("random", case, backward(target, case))
        assert dsa_oracle.relative_error(forward(target, case).out, out) <= bound("random", dtype)


@pytest.mark.parametrize("empty", ["s_q", "topk"])
def test_nothing_is_added_where_nothing_is_selected(target, empty):
    case = make("random", target.dtypes[0], Sizes(**{"head_dim": target.head_dims[-1], empty: 0})).to(target.device)
    dkv = torch.full(case.kv.shape, 3.0, device=target.device)
    backward(target, case, dkv=dkv, accumulate=True)
    assert (dkv == 3).all()


def test_the_reference_adds_its_chunks(monkeypatch):
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 2 * 12 * (64 + 3 * 4))  # two queries a chunk
    case = make("sink", torch.float64, Sizes(s_q=7))
    case.topk_length = torch.tensor([3, 12, 5, 0, 9, 1, 7], dtype=torch.int32)
    out, case.lse = case.forward_oracle()
    case.out = out
    got = interface.sparse_attention_backward(
        case.q, case.kv, case.out, case.dout, case.lse, case.attn_sink, case.topk_idxs, case.softmax_scale,
        case.topk_length, backend="reference",
    )  # fmt: skip
    assert_gradients("sink", case, got)


def _cpu(x):
    return None if x is None else x.cpu()
