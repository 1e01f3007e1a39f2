"""Mistakes seen in public implementations of this operator, each as a test; plus the hostile data of the contract."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from pallas_triton_cases import (
    SMALL,
    TOLERANCE,
    Sizes,
    assert_close,
    check,
    expect,
    inputs,
    normal,
    run,
)

from cudnn_dsa_pallas_triton import Config, KernelConfig, attention
from cudnn_dsa_pallas_triton.tile import tanh_by_exp2

ONE_HEAD = Sizes((1,), 33, 33, 1, 1, 16, 16)


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("lengths", [(20, 70), (70, 20)])
def test_causal_with_unequal_lengths(lengths):
    """t > T must not read past q; T > t must not skip the last queries."""
    check(rng(), ["is_causal"], Sizes((1,), *lengths, 2, 1, 16, 16))


PAIRS = [(16, 64), (64, 16), (32, 64), (64, 32)]


@pytest.mark.parametrize("pair", PAIRS[:2], ids=str)
def test_block_pairs_under_causality(pair):
    """No divisibility between the blocks of a pair, nor between kernels, may matter."""
    check(rng(), ["is_causal"], Sizes((1,), 70, 90, 1, 1, 16, 16), config=Config(*[KernelConfig(*pair)] * 4))


@pytest.mark.slow
@pytest.mark.parametrize("block_q", [16, 32, 64, 128])
@pytest.mark.parametrize("block_k", [16, 32, 64, 128])
@pytest.mark.parametrize("mask", ["is_causal", "local_window_size", "segment_ids", "k_end"])
def test_every_block_pair(block_q, block_k, mask):
    config = Config(*[KernelConfig(block_q, block_k)] * 4)
    check(rng(), [mask, "bias"], Sizes((1,), 150, 170, 1, 1, 16, 16), config=config)


@pytest.mark.parametrize("sign", [1, -1])
def test_row_maxima_far_from_zero(sign):
    """Row maxima of +-200 with ragged lengths: exp(0 - m) of a padded key overflows, and 0 * inf is NaN."""
    s = Sizes((1,), 37, 41, 1, 1, 16, 16)
    arrays = inputs(rng(), s)
    direction = np.full(16, 5.0, np.float32)
    arrays["q"] = direction + 0.05 * arrays["q"]
    arrays["k"] = sign * 2 * direction + 0.05 * arrays["k"]
    got, want = run(arrays, {"is_causal": True}), expect(arrays, {"is_causal": True})
    assert abs(want["m"]).min() > 150
    # fp32 logits of 200 carry an error of about 200 * 2**-23, which is the relative error of every probability.
    assert_close(got, want, 4e-5)


@pytest.mark.parametrize("cap", [1.0, 60.0])
def test_fp16_with_soft_caps(cap):
    check(rng(), ["bias"], ONE_HEAD, dtype="float16", scale=3.0, logits_soft_cap=cap)


def test_fp32_soft_cap_accuracy():
    """Forward within 2e-6 and gradients within 5e-6 absolute at cap 10: no approximate tanh, IEEE dots."""
    arrays, kwargs = inputs(rng(), Sizes((2,), 64, 64, 2, 2, 32, 32)), {"logits_soft_cap": 10.0}
    got, want = run(arrays, kwargs), expect(arrays, kwargs)
    assert abs(got["out"] - want["out"]).max() <= 2e-6
    for name in ("dq", "dk", "dv"):
        assert abs(got[name] - want[name]).max() <= 5e-6, name


def test_the_tanh_of_16_bit_inputs_is_within_3e_7():
    """The bound that its docstring states, over everything a logit can be."""
    x = np.concatenate([np.linspace(-12, 12, 200_001), np.geomspace(1e-30, 1e38, 10_001), [np.inf]]).astype(np.float32)
    x = np.concatenate([x, -x])
    error = abs(np.asarray(tanh_by_exp2(jnp.asarray(x)), np.float64) - np.tanh(x.astype(np.float64)))
    assert error.max() <= 3e-7


def test_bf16_soft_cap_accuracy():
    """Relative error of the gradients at cap 30 with pre-cap logits to 168."""
    s = Sizes((1,), 128, 128, 2, 2, 64, 64)
    arrays = inputs(rng(), s, "bfloat16")
    arrays["q"] = np.asarray(jnp.asarray(arrays["q"]) * 4)
    arrays["k"] = np.asarray(jnp.asarray(arrays["k"]) * 4)
    kwargs = {"logits_soft_cap": 30.0, "bias": normal(rng(1), 1, 128, 128, dtype="bfloat16")}
    logits = np.einsum("bthd,bshd->bhts", *(arrays[n].astype(np.float64) for n in "qk")) / 8
    arrays["q"] = np.asarray(jnp.asarray(arrays["q"]) * (168 / abs(logits).max()), arrays["q"].dtype)
    got, want = run(arrays, kwargs), expect(arrays, kwargs)
    for name, bound in {"dq": 4.3e-3, "dk": 4.3e-3, "dv": 4.3e-3, "dbias": 3.4e-3}.items():
        error = np.linalg.norm(got[name].astype(np.float64) - want[name]) / np.linalg.norm(want[name])
        assert error <= bound, f"{name}: {error:.2e}"


HIDDEN = {
    # The first 20 keys and 25 queries are real; the rest is padding that holds inf and NaN.
    "key mask": lambda: {"mask": (np.arange(33) < 20)[None, :]},
    "dense mask": lambda: {"mask": (np.arange(33) < 20)[None, :] & (np.arange(33) < 25)[:, None]},
    "k_end": lambda: {"k_end": np.int32([20]), "q_end": np.int32([25])},
    "segments": lambda: {"segment_ids": (np.where(np.arange(33) < 25, 1, 3).astype(np.int32)[None],
                                         np.where(np.arange(33) < 20, 1, 2).astype(np.int32)[None])},
    # The padding keys have the id 0, which is what rows past the end of a ragged length look like.
    "ragged segments": lambda: {"segment_ids": (np.ones((1, 33), np.int32),
                                                (np.arange(33) < 20).astype(np.int32)[None])},
    "bias": lambda: {"bias": np.where((np.arange(33) < 20)[None, :] & (np.arange(33) < 25)[:, None], 0.5, -np.inf)
                     .astype(np.float32)},
    "bias and causal": lambda: {"bias": np.where(np.arange(33) < 20, 0.5, -np.inf).astype(np.float32)[None]
                                + np.where(np.arange(33) < 25, 0.0, -np.inf).astype(np.float32)[:, None],
                                "is_causal": True},
    "causal": lambda: {"is_causal": True, "q_end": np.int32([20])},
}  # fmt: skip


@pytest.mark.parametrize("kind", HIDDEN)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_masked_padding_does_not_leak(kind, poison):
    kwargs = HIDDEN[kind]()
    arrays = inputs(rng(), ONE_HEAD)
    for name in "kv":
        arrays[name][:, 20:] = poison
    if kind not in ("key mask", "ragged segments"):  # there the queries past 25 do attend, and their dout counts
        arrays["q"][:, 25:] = poison
        arrays["dout"][:, 25:] = poison
    got, want = run(arrays, kwargs), expect(arrays, kwargs)
    names = ("out", "dq", "dk", "dv", *(["dbias"] if "bias" in kwargs else []))
    assert all(np.isfinite(want[n]).all() for n in names)
    assert_close(got, want, TOLERANCE["float32"], names)


def test_an_attended_nan_shows():
    """Cleaning the operands of masked blocks must not hide a NaN that does count."""
    arrays = inputs(rng(), ONE_HEAD)
    arrays["v"][0, 10, 0, 3] = np.nan
    got = run(arrays, {"is_causal": True})
    assert np.isnan(got["out"][0, 10:]).any(axis=(1, 2)).all()
    assert np.isfinite(got["out"][0, :10]).all()
    arrays = inputs(rng(), ONE_HEAD)
    arrays["dout"][0, 10, 0, 3] = np.nan
    got = run(arrays, {"is_causal": True})
    assert np.isnan(got["dv"][0, :11]).any(axis=(1, 2)).all()
    assert np.isfinite(got["dv"][0, 11:]).all()
    assert np.isnan(got["dq"][0, 10]).any()
    assert np.isfinite(got["dq"][0, 11:]).all()


@pytest.mark.parametrize("cap", [None, 2.0])
def test_bias_of_minus_infinity(cap):
    """Without a cap it masks (row 3 as a whole); under a cap it is -c, so row 3 attends everything equally."""
    bias = np.where(rng(1).random((1, 33, 33)) < 0.5, -np.inf, 0.0).astype(np.float32)
    bias[0, 3] = -np.inf
    arrays, kwargs = inputs(rng(), ONE_HEAD), {"bias": bias, "logits_soft_cap": cap}
    got = run(arrays, {k: x for k, x in kwargs.items() if x is not None})
    want = expect(arrays, kwargs)
    assert_close(got, want, TOLERANCE["float32"])
    assert (abs(got["out"][0, 3]).max() == 0.0) == (cap is None)
    assert abs(got["dbias"][np.isinf(bias)]).max() == 0.0


def test_a_row_of_the_most_negative_number_is_not_masked():
    """A bias of finfo.min on a whole row is a constant: detecting masked rows by their maximum would zero it."""
    bias = np.zeros((1, 33, 33), np.float32)
    bias[0, 3] = np.finfo(np.float32).min
    arrays = inputs(rng(), ONE_HEAD)
    got = run(arrays, {"bias": bias})
    np.testing.assert_allclose(got["out"][0, 3], arrays["v"].mean(axis=1)[0], atol=1e-6)
    assert all(np.isfinite(got[n]).all() for n in ("dq", "dk", "dv", "dbias"))


def test_rows_without_an_allowed_key():
    """Zero output and gradients, m of -inf, l of 0; also where a whole block is masked."""
    mask = np.ones((33, 33), bool)
    mask[:17] = False
    arrays = inputs(rng(), ONE_HEAD) | {"dl": np.zeros((1, 1, 33), np.float32)}
    got = run(arrays, {"mask": mask})
    assert abs(got["out"][:, :17]).max() == 0.0
    assert abs(got["dq"][:, :17]).max() == 0.0
    assert (got["m"][..., :17] == -np.inf).all()
    assert (got["l"][..., :17] == 0.0).all()
    assert_close(got, expect(arrays, {"mask": mask}), TOLERANCE["float32"])


def test_a_range_and_the_same_dense_mask_agree_bitwise():
    r = rng()
    arrays = inputs(r, Sizes())
    start, end = (np.sort(r.integers(0, 50, (2, 1, 41))).astype(np.int32) for _ in range(2))
    j = np.arange(50)
    dense = (j >= start[..., None]) & (j < end[..., None])
    bias = normal(r, 1, 2, 41, 50)
    a = run(arrays, {"bias": bias, "k_start": start, "k_end": end})
    b = run(arrays, {"bias": bias, "mask": dense})
    if jax.default_backend() == "gpu":
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    else:  # a CPU compiler at its lowest level may sum the same numbers of two programs in two orders
        assert_close(a, {n: x.astype(np.float64) for n, x in b.items()}, 1e-6)


def test_a_second_run_gives_the_same_bits():
    arrays, kwargs = inputs(rng(), Sizes()), {"bias": normal(rng(1), 2, 41, 50), "is_causal": True}
    a, b = run(arrays, kwargs), run(arrays, kwargs)
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def _gradient_jaxpr(**kwargs):
    """The jaxpr of a whole backward, kernels included."""
    s = Sizes((3,), 48, 64, 2, 2, 16, 16)
    x = inputs(rng(), s)
    floats = {n: x[n] for n in "qkv"} | {n: a for n, a in kwargs.items() if n == "bias"}
    static = {n: a for n, a in kwargs.items() if n != "bias"}
    return jax.make_jaxpr(jax.grad(lambda f: attention(**f, **static, config=SMALL).sum()))(floats), s


def _avals(jaxpr):
    for eqn in jaxpr.eqns:
        yield from (v.aval for v in eqn.outvars)
        for sub in jaxprs_in_params(eqn.params):
            yield from _avals(sub)


def test_the_bias_gradient_has_no_atomics_and_no_dense_intermediate():
    jaxpr, s = _gradient_jaxpr(bias=np.zeros((2, 48, 64), np.float32))
    assert "atomic" not in str(jaxpr)
    dense = np.prod(s.full)
    sizes = [np.prod(getattr(a, "shape", ())) for a in _avals(jaxpr.jaxpr)]
    assert max(sizes) >= 2 * 48 * 64  # the walk does see the gradient
    assert max(sizes) < dense


@pytest.mark.parametrize(("precision", "expected"), [(None, "HIGHEST"), ("highest", "HIGHEST"), ("default", "DEFAULT")])
def test_fp32_dots_are_ieee_unless_asked_otherwise(precision, expected):
    text = str(_gradient_jaxpr(precision=precision)[0])
    other = {"HIGHEST": "DEFAULT", "DEFAULT": "HIGHEST"}[expected]
    assert f"Precision.{expected}" in text
    assert f"Precision.{other}" not in text


def test_no_tanh_without_a_cap():
    assert "tanh" not in str(_gradient_jaxpr()[0])
    assert "tanh" in str(_gradient_jaxpr(logits_soft_cap=5.0)[0])
