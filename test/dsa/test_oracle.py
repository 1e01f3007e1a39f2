"""The oracles agree with each other where both apply: explicit formulas against autograd of a dense softmax."""

import dsa_oracle
import pytest
import torch
from dsa_cases import BOUNDS, CASES, Sizes, assert_gradients, gradient_errors, make


@pytest.mark.parametrize("name", CASES)
def test_explicit_formulas_equal_autograd(name):
    case = make(name, torch.float64, Sizes(heads=3, head_dim=24))
    dq, dkv, d_sink = case.end_to_end_oracle()
    errors = gradient_errors(name, case, (dq, dkv, d_sink))
    assert max(errors.values()) < 1e-9, errors


def test_multiplicity_by_hand():
    idxs = torch.tensor([[0, 2, 2, -1, 3], [1, 1, 1, 0, 2]], dtype=torch.int32)
    lengths = torch.tensor([9, 2], dtype=torch.int32)
    assert dsa_oracle.multiplicity(idxs, lengths, 3).tolist() == [[1, 0, 2], [0, 2, 0]]


def test_out_of_one_key_is_its_value():
    case = make("one_row_for_all", torch.float64, Sizes())
    want = case.kv[1].expand_as(case.out)
    assert dsa_oracle.relative_error(case.out, want) < 1e-14


TINY = [Sizes(s_q=1, heads=1, topk=5), Sizes(s_q=1, heads=1, head_dim=3, topk=2), Sizes(s_q=3, heads=3, head_dim=3)]


def towards_zero(x, dtype):
    """x cut off to ``dtype`` instead of rounded."""
    near = x.to(dtype)
    return torch.where(near.double().abs() > x.abs(), torch.nextafter(near, torch.zeros_like(near)), near)


@pytest.mark.parametrize("sizes", TINY, ids=str)
def test_rounding_passes_however_few_elements_there_are(sizes):
    """Of few elements it does not average out: among these are errors beyond the contract's bound. What is not
    explained by rounding to nearest still fails there."""
    dtype = torch.bfloat16
    beyond = cut_off = 0
    for seed in range(60):
        case = make("sink", dtype, sizes, seed)
        for operand_dtype in (torch.float64, dtype):
            best = case.backward_oracle(operand_dtype=operand_dtype)[:3]
            rounded = (best[0].to(dtype), best[1].to(dtype), best[2].float())
            assert_gradients("sink", case, rounded)
            beyond += max(gradient_errors("sink", case, rounded).values()) > BOUNDS[dtype]
        dq, dkv, d_sink, _ = case.backward_oracle()
        try:
            assert_gradients("sink", case, (towards_zero(dq, dtype), towards_zero(dkv, dtype), d_sink.float()))
        except AssertionError:
            cut_off += 1
    assert beyond > 0
    assert cut_off > 30
