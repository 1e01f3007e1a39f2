"""The Triton kernels in the interpreter against the float64 oracles. Run by test_triton_interpreted.py, which sets
TRITON_INTERPRET=1 for a process of its own; the name keeps pytest from collecting this file by itself."""

from dataclasses import replace

import dsa_oracle
import pytest
import torch
from dsa_cases import CASES, Sizes, assert_gradients, bound, make
from triton_interpreter import backward, forward, problem_of

from cudnn_dsa import interface
from cudnn_dsa.admission import by_name
from cudnn_dsa.backends import triton as backend
from cudnn_dsa.backends.triton import plans, tuning
from cudnn_dsa.contracts.sparse_attention import Options

HALVES = (torch.bfloat16, torch.float16)
SMALL = Sizes(s_q=4, topk=40)  # two tiles of keys, the second one partly filled


def sized(head_dim, **changes):
    return Sizes(**{**vars(SMALL), "head_dim": head_dim, **changes})


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_data(name, dtype):
    head_dim = (512, 576)[(list(CASES).index(name) + HALVES.index(dtype)) % 2]
    case = make(name, dtype, sized(head_dim))
    out, lse = forward(case)
    want_out, want_lse = case.forward_oracle()
    assert dsa_oracle.relative_error(out, want_out) <= bound(name, dtype)
    empty = torch.isneginf(want_lse)
    assert torch.equal(torch.isneginf(lse), empty)
    torch.testing.assert_close(lse.double()[~empty], want_lse[~empty], rtol=2e-6, atol=1e-5)

    got = backward(case)
    assert_gradients(name, case, got)
    counts = dsa_oracle.multiplicity(case.topk_idxs, case.topk_length, case.kv.shape[0])
    assert (got[0][counts.sum(1) == 0] == 0).all(), "a row without a key has dq exactly 0"
    assert (got[1][counts.sum(0) == 0] == 0).all(), "an unselected key has dkv exactly 0"


@pytest.mark.parametrize("heads", [1, 3, 16, 24, 65])
def test_every_number_of_heads(heads):
    case = make("sink", torch.bfloat16, sized(576, heads=heads, s_q=2))
    assert_gradients("sink", case, backward(case))
    assert dsa_oracle.relative_error(forward(case)[0], case.forward_oracle()[0]) <= 3e-3


@pytest.mark.parametrize("topk", [1, 31, 32, 33, 130])
def test_every_k(topk):
    case = make("topk_length", torch.float16, sized(512, topk=topk, s_kv=150))
    # Of a single key p is 1 and dp - delta cancels.
    assert_gradients("one_key_only" if topk == 1 else "topk_length", case, backward(case))


@pytest.mark.parametrize(
    "name", ["random", "duplicates", "one_row_for_all", "scattered_invalid", "sink_and_empty_rows"]
)
def test_the_sum_in_a_fixed_order(name):
    """Five queries in chunks of two: the fold runs three times, the last chunk is not full."""
    case = make(name, torch.bfloat16, sized(576, s_q=5))
    got = backward(case, deterministic=True)
    assert_gradients(name, case, got)
    for tensor, plain in zip(got, backward(case), strict=True):
        assert tensor is None or dsa_oracle.relative_error(tensor, plain) < 3e-3


@pytest.mark.parametrize("s_kv", [1, 7, 40])
def test_the_pieces_of_the_workspace_are_apart_and_aligned(s_kv):
    """Also at odd lengths: a piece that starts elsewhere than on 16 bytes would be another kernel to compile."""
    case = make("sink", torch.bfloat16, sized(576, s_kv=s_kv, topk=1))
    work = plans.backward_workspace(problem_of(case, deterministic=True))
    memory = torch.zeros(work.total, dtype=torch.uint8)
    for number, name in enumerate(work.pieces, 1):
        piece = work.view(memory, name)
        assert (piece.data_ptr() - memory.data_ptr()) % 256 == 0
        assert not piece.any(), "overlaps an earlier piece"
        piece.fill_(number)
    assert set(work.pieces) == {"dkv", "sink_terms", "partials", "count", "rank"}


def test_the_sum_in_a_fixed_order_over_head_tiles():
    case = make("sink", torch.float16, sized(512, heads=65, s_q=3))
    assert_gradients("sink", case, backward(case, deterministic=True))


@pytest.mark.parametrize("deterministic", [False, True])
def test_fp32_dkv_and_accumulation(deterministic):
    case = make("sink", torch.bfloat16, sized(576))
    want = case.backward_oracle()[1]
    before = torch.randn(case.kv.shape)
    fresh = backward(case, deterministic=deterministic, dkv=torch.full_like(before, torch.nan))[1]
    assert dsa_oracle.relative_error(fresh, want) < 2e-3
    added = backward(case, deterministic=deterministic, dkv=before.clone(), accumulate=True)[1]
    torch.testing.assert_close(added, before + fresh, rtol=1e-5, atol=1e-5)


def test_given_delta_and_fp32_out():
    case = make("sink", torch.bfloat16, sized(576), out_dtype=torch.float32)
    assert_gradients("sink", case, backward(case))
    delta = torch.randn(case.lse.shape)
    assert_gradients("sink", case, backward(case, delta=delta), delta)
    assert forward(case, torch.float32)[0].dtype == torch.float32


@pytest.mark.parametrize("exponent", [-14, -4, 6, 11])
def test_fp16_gradients_of_any_size(exponent):
    """dS runs from far below fp16's smallest number to far above its largest; the results stay in its range, dkv in
    fp32, so that only the kernel's own rounding is seen."""
    case = make("random", torch.float16, sized(512))
    case.dout *= 2.0**exponent
    case.q *= 2.0**-6 if exponent > 0 else 1.0
    case.softmax_scale *= 2.0**6 if exponent > 0 else 2.0**-6
    out, lse = case.forward_oracle()
    case.out, case.lse = out.half(), lse.float()
    dq, dkv, _ = backward(case, dkv=torch.empty(case.kv.shape))
    want_dq, want_dkv, _, _ = case.backward_oracle()
    assert dsa_oracle.relative_error(dkv, want_dkv) <= 5e-4
    if want_dq.abs().max() < 6e4:
        assert dsa_oracle.relative_error(dq, want_dq) <= 5e-4


def test_fp16_gain_falls_between_tiles():
    """The second tile of keys has a dS some 2**9 times that of the first, so dQ is rescaled in between."""
    case = make("random", torch.float16, sized(512, topk=64, s_kv=64))
    case.topk_idxs = torch.arange(64, dtype=torch.int32).repeat(SMALL.s_q, 1)
    case.kv[:32, 1:512] *= 2.0**-10
    case.kv[:, 0] = 0
    case.kv[32:, 0] = 8
    case.q[..., 0] = 8
    case.dout[:, 0] *= 2.0**-10
    out, lse = case.forward_oracle()
    case.out, case.lse = out.half(), lse.float()
    assert_gradients("random", case, backward(case))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_tile_shape(direction, monkeypatch):
    """All legal configurations, not the first one alone: tiles wider than the heads are legal too."""
    case = make("scattered_invalid", torch.bfloat16, sized(576, s_q=2, topk=70, s_kv=100))
    for config in tuning.LEGAL[direction]:
        monkeypatch.setattr(plans, "config_of", lambda problem, config=config: config)
        if direction == "backward":
            assert_gradients("scattered_invalid", case, backward(case))
        else:
            assert dsa_oracle.relative_error(forward(case)[0], case.forward_oracle()[0]) <= 3e-3


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("name", ["random", "sink", "topk_length"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_is_tuned_on_is_a_call_of_the_contract(direction, name, accumulate):
    """The random tensors of a measurement are the problem's in name, shape and dtype, and the backend runs them."""
    case = make(name, torch.bfloat16, sized(512, s_q=2))
    dkv = torch.zeros(case.kv.shape) if accumulate else None
    problem = replace(problem_of(case, dkv=dkv, accumulate=accumulate), direction=direction)
    sample, tensors, memory = plans._sample(problem)
    options = Options(direction, "reference", accumulate=accumulate and direction == "backward")
    checked = interface.gate(by_name(tensors), options)
    assert replace(checked, backend=sample.backend, accumulate=sample.accumulate, dkv_dtype=sample.dkv_dtype) == sample
    assert type(tensors.softmax_scale) is float
    if direction == "forward":
        backend.forward(sample, tensors, None, None)
        assert torch.isfinite(tensors.out).all()
        assert tensors.out.any()
    else:
        backend.backward(sample, tensors, memory, None)
        assert torch.isfinite(tensors.dq).all()
        assert tensors.dkv.any()
