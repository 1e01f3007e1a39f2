"""The oracles agree with each other where both apply: explicit formulas against autograd of a dense softmax."""

import dsa_oracle
import pytest
import torch
from dsa_cases import CASES, Sizes, gradient_errors, make


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
