"""The rule vocabulary, and its messages as text."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_dsa.contracts import (
    ContractError,
    Dims,
    TensorSpec,
    UnsupportedError,
    check_alias,
    check_apart,
    check_choice,
    check_device,
    check_dtype,
    check_layout,
    check_presence,
    check_range,
    check_shape,
    describe,
)
from cudnn_dsa.contracts.rules import may_overlap


def spec(shape, dtype="float32", strides=None, device="cpu", address=None):
    return TensorSpec(tuple(shape), dtype, strides, device, address)


def message(rule, *args, **kwargs):
    with pytest.raises(ContractError) as caught:
        rule(*args, **kwargs)
    return str(caught.value)


def test_shape_names_argument_expected_and_got():
    dims = Dims()
    check_shape("q", spec((4, 2, 64)), ("S_q", "H", "D"), dims)
    assert dims == {"S_q": 4, "H": 2, "D": 64}
    assert (
        message(check_shape, "dout", spec((2, 4, 64)), ("S_q", "H", "D_v"), dims)
        == "dout: expected shape (S_q=4, H=2, D_v), got (2, 4, 64)"
    )
    assert message(check_shape, "lse", spec((4,)), ("S_q", "H"), dims) == "lse: expected shape (S_q=4, H=2), got (4,)"
    assert message(check_shape, "x", spec((3,)), (5,), dims) == "x: expected shape (5,), got (3,)"


def test_a_refused_shape_binds_nothing():
    dims = Dims(H=2)
    message(check_shape, "x", spec((7, 3)), ("N", "H"), dims)
    assert dims == {"H": 2}


def test_a_dimension_named_twice_must_agree_with_itself():
    check_shape("x", spec((3, 3)), ("N", "N"), Dims())
    assert message(check_shape, "x", spec((3, 4)), ("N", "N"), Dims()) == "x: expected shape (N, N), got (3, 4)"


def test_messages_of_the_other_rules():
    a = spec((2,), "float16")
    assert message(check_dtype, "kv", a, ("bfloat16", "float32")) == (
        "kv: expected dtype bfloat16 or float32, got float16"
    )
    assert message(check_device, "kv", a, "q", spec((2,), device="cuda:1")) == (
        "kv: expected device cuda:1 (that of q), got cpu"
    )
    strided = spec((2, 3), strides=(1, 2))
    assert message(check_layout, "dq", strided) == (
        "dq: expected a contiguous tensor, got shape (2, 3) with strides (1, 2)"
    )
    assert message(check_range, "K", -1, low=0) == "K: expected a value >= 0, got -1"
    assert message(check_range, "rate", 2.0, low=0, high=1) == "rate: expected a value >= 0 and <= 1, got 2.0"
    assert message(check_range, "rate", float("nan"), low=0) == "rate: expected a value >= 0, got nan"
    assert message(check_choice, "mode", "fast", ("off", "on")) == "mode: expected one of 'off', 'on', got 'fast'"
    assert message(check_presence, "d_sink", True, False, "there is no sink") == (
        "d_sink: expected None, got a tensor (there is no sink)"
    )


def test_errors_are_what_callers_catch():
    error = ContractError("q", "a", "b", "c")
    assert isinstance(error, ValueError)
    assert isinstance(error, AssertionError)
    assert not isinstance(error, NotImplementedError)
    assert isinstance(UnsupportedError("q", "a", "b"), NotImplementedError)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "q: expected a, got b (c)"
    assert (again.argument, again.expected, again.got, again.hint) == ("q", "a", "b", "c")


def test_describe_torch():
    x = torch.zeros(4, 6, dtype=torch.bfloat16)[:, 1:3]
    got = describe(x)
    assert got == TensorSpec((4, 2), "bfloat16", (6, 1), "cpu", x.data_ptr())
    assert not got.is_contiguous
    assert describe(torch.empty(2, device="meta")).address is None
    assert str(got) == "bfloat16 (4, 2) on cpu"


def test_describe_numpy_and_shapes():
    x = np.zeros((4, 6), np.float32)[::2]
    assert describe(x) == TensorSpec((2, 6), "float32", (12, 1), "cpu", x.__array_interface__["data"][0])

    class Shaped:
        shape, dtype = (3,), np.dtype("int32")

    assert describe(Shaped()) == TensorSpec((3,), "int32")


@pytest.mark.parametrize("x", [1.0, "q", [1, 2], None])
def test_describe_refuses_what_is_no_array(x):
    with pytest.raises(TypeError, match="expected a tensor or array"):
        describe(x)


def test_describe_refuses_sparse_layouts():
    with pytest.raises(TypeError, match="strided"):
        describe(torch.eye(3).to_sparse())


shapes = st.lists(st.integers(0, 4), min_size=0, max_size=4).map(tuple)


@given(shapes, st.randoms())
def test_contiguity_agrees_with_torch(shape, random):
    order = list(range(len(shape)))
    random.shuffle(order)
    x = torch.zeros(shape).permute(order)
    assert describe(x).is_contiguous == x.is_contiguous()


views = st.tuples(st.integers(0, 5), st.integers(0, 6), st.integers(1, 5), st.integers(1, 6), st.integers(1, 2))


def view_of(base, numbers):
    row, column, rows, columns, step = numbers
    return base[row : row + rows, column : column + columns : step]


@settings(max_examples=300)
@given(views, views)
def test_overlap_is_never_missed(a, b):
    base = torch.arange(80).reshape(10, 8)
    x, y = view_of(base, a), view_of(base, b)
    shared = bool(set(x.flatten().tolist()) & set(y.flatten().tolist()))
    assert may_overlap(describe(x), describe(y)) >= shared


bounds = st.one_of(st.none(), st.integers(-12, 12))
slices = st.builds(slice, bounds, bounds, st.sampled_from([-3, -2, -1, 1, 2, 3]))


@settings(max_examples=500)
@given(st.tuples(slices, slices), st.tuples(slices, slices), st.booleans())
def test_overlap_is_never_missed_with_strides_of_either_sign(a, b, transposed):
    """NumPy's views may walk backwards: their first element is not their lowest address."""
    base = np.arange(80, dtype=np.int32).reshape(10, 8)
    x, y = base[a], base[b].T if transposed else base[b]
    shared = bool(np.intersect1d(x, y).size)
    assert may_overlap(describe(x), describe(y)) >= shared
    assert may_overlap(describe(y), describe(x)) >= shared
    if not shared and x.size and y.size and (x.max() < y.min() or y.max() < x.min()):
        assert not may_overlap(describe(x), describe(y))


def test_a_view_that_walks_backwards_is_dense_and_apart_from_its_neighbour():
    base = np.zeros((6, 10), np.float32)
    left, right = describe(base[::-1, 3::-1]), describe(base[:, 4:])
    assert not may_overlap(left, right)
    assert may_overlap(left, describe(base[:, 3:]))
    check_apart("dq", left)


def test_column_slices_of_one_buffer_do_not_overlap():
    base = torch.zeros(6, 10)
    left, right = describe(base[:, :4]), describe(base[:, 4:])
    assert not may_overlap(left, right)
    check_alias({"dq": left}, {"q": right})
    assert message(check_alias, {"dq": left, "dkv": describe(base[:, 3:])}, {}) == (
        "dkv: expected memory of its own, apart from dq, got memory shared with dq"
    )
    assert message(check_alias, {"dq": left}, {"q": left}).startswith("dq: expected memory of its own, apart from q")


def test_empty_arrays_overlap_nothing():
    base = torch.zeros(4, 4)
    assert not may_overlap(describe(base[:0]), describe(base))
