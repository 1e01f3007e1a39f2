"""Packing, lse converters, and the check of a forward's results."""

import math

import dsa_oracle
import pytest
import torch
from dsa_cases import CASES, Sizes, make
from hypothesis import given, settings
from hypothesis import strategies as st

import cudnn_dsa
from cudnn_dsa import ContractError, local_to_global, lse_from_base2, lse_without_sink, sparse_attention_bshd

lengths = st.lists(st.integers(0, 4), min_size=1, max_size=5)


@settings(max_examples=100)
@given(lengths, st.data())
def test_local_to_global_by_hand(q_lengths, data):
    kv_lengths = [data.draw(st.integers(0, 5)) for _ in q_lengths]
    padding = data.draw(st.integers(0, 2))
    rows = sum(q_lengths) + padding
    local = torch.tensor(
        [[data.draw(st.integers(-2, 6)) for _ in range(3)] for _ in range(rows)], dtype=torch.int32
    ).reshape(rows, 3)
    want, row = [], 0
    for b, count in enumerate(q_lengths):
        for _ in range(count):
            start = sum(kv_lengths[:b])
            want.append([start + j if 0 <= j < kv_lengths[b] else -1 for j in local[row].tolist()])
            row += 1
    want += [[-1] * 3] * padding
    cu = [torch.tensor([sum(x[:i]) for i in range(len(x) + 1)], dtype=torch.int32) for x in (q_lengths, kv_lengths)]
    got = local_to_global(local, *cu)
    assert got.dtype == torch.int32
    assert got.tolist() == want


def test_local_to_global_refuses_by_name():
    idxs, cu = torch.zeros(3, 2, dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ContractError, match=r"cu_seqlens_kv: expected shape \(B\+1=2,\), got \(3,\)"):
        local_to_global(idxs, cu, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ContractError, match="topk_idxs: expected dtype int32, got int64"):
        local_to_global(idxs.long(), cu, cu)


def test_packing_without_sequences_and_with_foreign_arguments():
    idxs, none = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    assert (local_to_global(idxs, none, none) == -1).all()
    with pytest.raises(ContractError, match="cu_seqlens_q: expected a value >= 1, got 0"):
        local_to_global(idxs, none[:0], none[:0])
    with pytest.raises(ContractError, match=r"cu_seqlens_q: expected device cpu \(that of topk_idxs\), got meta"):
        local_to_global(idxs, none.to("meta"), none)
    with pytest.raises(ContractError, match="topk_idxs: expected a strided tensor, got list"):
        local_to_global([[1]], none, none)
    q, kv = torch.zeros(2, 4, 1, 8), torch.zeros(2, 5, 8)
    with pytest.raises(ContractError, match=r"topk_idxs: expected device cpu \(that of q\), got meta"):
        sparse_attention_bshd(q, kv, torch.zeros(2, 4, 3, dtype=torch.int32, device="meta"))
    with pytest.raises(ContractError, match="kv: expected a tensor, got None"):
        sparse_attention_bshd(q, None, torch.zeros(2, 4, 3, dtype=torch.int32))


@pytest.mark.parametrize("with_length", [False, True])
def test_bshd_equals_one_call_a_sequence(with_length):
    batch, sizes = 3, Sizes(s_q=4, s_kv=9, head_dim=8, topk=5)
    cases = [make("scattered_invalid", torch.float64, sizes, seed=b) for b in range(batch)]
    stack = {k: torch.stack([getattr(c, k) for c in cases]) for k in ("q", "kv", "topk_idxs", "dout")}
    length = torch.arange(12, dtype=torch.int32).view(3, 4) % 6 if with_length else None
    q, kv = stack["q"].requires_grad_(), stack["kv"].requires_grad_()
    sink = torch.linspace(-1, 1, 4, dtype=torch.float64)
    out, lse = sparse_attention_bshd(
        q, kv, stack["topk_idxs"], topk_length=length, attn_sink=sink, return_lse=True, backend="reference"
    )
    out.backward(stack["dout"])
    for b, case in enumerate(cases):
        case.attn_sink, case.topk_length = sink, None if length is None else length[b]
        want_out, want_lse = case.forward_oracle()
        torch.testing.assert_close(out[b], want_out)
        torch.testing.assert_close(lse[b], want_lse)
        dq, dkv, _ = case.end_to_end_oracle()
        torch.testing.assert_close(q.grad[b], dq)
        torch.testing.assert_close(kv.grad[b], dkv)


def test_bshd_refuses_by_name():
    with pytest.raises(ContractError, match=r"kv: expected shape \(B=2, T, D=8\), got \(3, 5, 8\)"):
        sparse_attention_bshd(torch.zeros(2, 4, 1, 8), torch.zeros(3, 5, 8), torch.zeros(2, 4, 3, dtype=torch.int32))


def test_base2_converter():
    lse = torch.tensor([1.0, -3.5, -torch.inf])
    assert torch.allclose(lse_from_base2(lse / math.log(2)), lse)


@pytest.mark.parametrize("sink", [-torch.inf, -40.0, 0.0, 5.0, torch.inf])
def test_sink_converter(sink):
    lse = torch.tensor([[2.0], [-3.0], [-torch.inf], [30.0]], dtype=torch.float64)
    sinks = torch.tensor([sink], dtype=torch.float64)
    inside = dsa_oracle.log_normaliser(lse, sinks)
    want = torch.full_like(lse, -torch.inf) if sink == torch.inf else lse
    torch.testing.assert_close(lse_without_sink(inside, sinks), want, rtol=1e-9, atol=1e-9)


def call(case):
    return cudnn_dsa.sparse_attention_backward_wrapper(
        case.q, case.kv, case.out, case.dout, case.lse, case.attn_sink, case.topk_idxs, case.softmax_scale,
        case.topk_length, backend="reference",
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_check_passes_a_right_forward(monkeypatch, name, dtype):
    monkeypatch.setenv("CUDNN_DSA_CHECK", "1")
    call(make(name, dtype, Sizes()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.lse / math.log(2), "an lse in base 2 .*lse_from_base2"),
        (
            lambda c: dsa_oracle.log_normaliser(c.lse.double(), c.attn_sink).float(),
            "sink inside .*without_sink",
        ),
        (
            lambda c: dsa_oracle.log_normaliser(c.lse.double(), c.attn_sink).float() / math.log(2),
            "base 2 with the sink inside",
        ),
        (lambda c: c.lse + 1, "values up to 1 away"),
        (lambda c: c.lse * torch.nan, "values up to nan away"),
    ],
)
def test_check_names_a_foreign_lse(monkeypatch, change, words):
    case = make("sink", torch.bfloat16, Sizes())
    case.lse = change(case)
    call(case)  # not asked, not looked at
    monkeypatch.setenv("CUDNN_DSA_CHECK", "1")
    with pytest.raises(ContractError, match=f"lse: expected the natural log.*{words}"):
        call(case)


def test_check_names_a_foreign_out(monkeypatch):
    case = make("sink", torch.bfloat16, Sizes())
    case.out = case.out * 1.1
    monkeypatch.setenv("CUDNN_DSA_CHECK", "1")
    with pytest.raises(ContractError, match="out: expected the forward's result"):
        call(case)


@pytest.mark.parametrize(
    ("s_q", "looked_at"), [(1, [0]), (2, [0, 1]), (4, [0, 1, 2, 3]), (7, [0, 2, 4, 6]), (10, [0, 3, 6, 9])]
)
def test_check_looks_at_rows_from_the_first_to_the_last(monkeypatch, s_q, looked_at):
    """A forward that went wrong in one chunk of queries is most often wrong in a stretch of rows."""
    monkeypatch.setenv("CUDNN_DSA_CHECK", "1")
    case = make("sink", torch.bfloat16, Sizes(s_q=s_q))
    for argument in ("lse", "out"):
        right, seen = getattr(case, argument), []
        for row in range(s_q):
            wrong = right.clone()
            wrong[row] += 1
            setattr(case, argument, wrong)
            try:
                call(case)
            except ContractError as error:
                seen.append((error.argument, row))
        setattr(case, argument, right)
        assert seen == [(argument, row) for row in looked_at]


@pytest.mark.parametrize("name", ["random", "sink"])
def test_check_passes_training_through_out_and_lse(monkeypatch, name):
    """With a sink the gradient of lse takes a pass of its own, whose out is not used."""
    monkeypatch.setenv("CUDNN_DSA_CHECK", "1")
    case = make(name, torch.bfloat16, Sizes())
    q, kv = case.q.requires_grad_(), case.kv.requires_grad_()
    out, lse = cudnn_dsa.sparse_attention(
        q, kv, case.topk_idxs, attn_sink=case.attn_sink, return_lse=True, backend="reference"
    )
    (out.float().sum() + lse.sum()).backward()
    assert q.grad is not None


def test_check_leaves_out_alone_where_delta_is_given(monkeypatch):
    monkeypatch.setenv("CUDNN_DSA_CHECK", "1")
    case = make("sink", torch.bfloat16, Sizes())
    delta = (case.out.float() * case.dout.float()).sum(-1)
    cudnn_dsa.sparse_attention_backward_wrapper(
        case.q, case.kv, torch.zeros_like(case.out), case.dout, case.lse, case.attn_sink, case.topk_idxs,
        case.softmax_scale, delta=delta, backend="reference",
    )  # fmt: skip


def test_check_of_zero_is_off(monkeypatch):
    case = make("sink", torch.bfloat16, Sizes())
    case.lse = case.lse + 1
    for off in ("", "0"):
        monkeypatch.setenv("CUDNN_DSA_CHECK", off)
        call(case)
