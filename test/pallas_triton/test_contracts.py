"""Every refusal names its argument; what is legal passes."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from cudnn_dsa.contracts import ContractError, UnsupportedError
from cudnn_dsa_pallas_triton import KernelConfig, attention
from cudnn_dsa_pallas_triton.contracts import Options, check


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


GOOD = {"q": spec(2, 10, 4, 16), "k": spec(2, 12, 2, 16), "v": spec(2, 12, 2, 24)}
I32 = jnp.int32
BAD = [
    ("q", {"q": spec(10, 16)}),
    ("q", {"q": spec(2, 10, 4, 16, dtype=jnp.float64 if jax.config.jax_enable_x64 else jnp.int32)}),
    ("q", {"q": spec(2, 10, 4, 7), "k": spec(2, 12, 2, 7)}),
    ("q", {"q": spec(2, 10, 4, 513), "k": spec(2, 12, 2, 513)}),
    ("q", {"q": spec(2, 0, 4, 16)}),
    ("q", {"q": [1, 2]}),
    ("k", {"k": spec(2, 12, 2, 8)}),
    ("k", {"k": spec(2, 12, 3, 16), "v": spec(2, 12, 3, 24)}),
    ("k", {"k": spec(2, 12, 2, 16, dtype=jnp.bfloat16)}),
    ("k", {"k": spec(3, 12, 2, 16)}),
    ("v", {"v": spec(2, 11, 2, 24)}),
    ("v", {"v": spec(2, 12, 2, 4)}),
    ("bias", {"bias": spec(3, 12)}),
    ("bias", {"bias": spec(1, 2, 4, 10, 12)}),
    ("bias", {"bias": spec(10, 12, dtype=I32)}),
    ("mask", {"mask": spec(10, 12)}),
    ("mask", {"mask": spec(2, 2, 10, 12, dtype=jnp.bool_)}),
    ("dropout_mask", {"dropout_mask": spec(10, 13, dtype=jnp.bool_)}),
    ("dropout_mask", {"dropout_rate": 0.1}),
    ("dropout_rate", {"dropout_rate": 1.0}),
    ("dropout_rate", {"dropout_rate": float("nan")}),
    ("k_start", {"k_start": spec(12, dtype=I32)}),
    ("k_end", {"k_end": spec(10)}),
    ("q_start", {"q_start": spec(10, dtype=I32)}),
    ("q_end", {"q_end": spec(3, 12, dtype=I32)}),
    ("q_indices", {"q_indices": spec(11, dtype=I32)}),
    ("k_indices", {"k_indices": spec(11, dtype=I32)}),
    ("segment_ids", {"segment_ids": spec(2, 10, dtype=I32)}),
    ("segment_ids", {"segment_ids": (spec(2, 10, dtype=I32), spec(2, 10, dtype=I32))}),
    ("segment_ids", {"segment_ids": (spec(2, 10), spec(2, 12))}),
    ("attn_sink", {"attn_sink": spec(2)}),
    ("attn_sink", {"attn_sink": spec(4, dtype=I32)}),
    ("logits_soft_cap", {"logits_soft_cap": 0.0}),
    ("logits_soft_cap", {"logits_soft_cap": float("inf")}),
    ("logits_scale", {"logits_scale": float("nan")}),
    ("local_window_size", {"local_window_size": (1, -1)}),
    ("local_window_size", {"local_window_size": (1, 2, 3)}),
    ("local_window_size", {"local_window_size": (1.5, 2)}),
    ("logits_dtype", {"logits_dtype": jnp.int32}),
    ("precision", {"precision": "exact"}),
]


@pytest.mark.parametrize(("argument", "change"), BAD)
def test_a_refusal_names_the_argument(argument, change):
    with pytest.raises(ContractError) as e:
        jax.eval_shape(lambda: attention(**(GOOD | change)))
    assert e.value.argument == argument


@pytest.mark.parametrize("field", ["block_q", "block_k", "num_warps", "num_stages", "head_chunk"])
def test_a_configuration_refuses_illegal_values(field):
    with pytest.raises(ContractError, match=field):
        dataclasses.replace(KernelConfig(16, 16), **{field: 24})


def test_a_mask_whose_offsets_would_overflow_is_refused():
    """Offsets into arrays of bytes are 32 bits wide up to 4 GiB."""
    q = spec(1, 2**16, 1, 16)
    mask = spec(1, 2**16, 2**15, dtype=jnp.bool_)
    with pytest.raises(UnsupportedError, match="mask"):
        check({"q": q, "k": spec(1, 2**15, 1, 16), "v": spec(1, 2**15, 1, 16), "mask": mask}, Options())


def test_band_and_defaults():
    problem = check(GOOD, Options(is_causal=True, local_window_size=(3, 5)))
    assert problem.band == (3, 0)
    assert problem.scale == 16**-0.5
    assert problem.precision == "highest"
    assert check(GOOD, Options(local_window_size=4)).band == (4, 4)
    assert check(GOOD, Options()).band == (None, None)
    assert check(GOOD, Options(precision=jax.lax.Precision.DEFAULT)).precision == "default"
    assert check(GOOD, Options(logits_dtype=jnp.bfloat16)).logits_dtype == "bfloat16"


def test_shapes_of_the_results():
    out, (m, l) = jax.eval_shape(lambda q, k, v: attention(q, k, v, return_residuals=True), *(GOOD[n] for n in "qkv"))
    assert out.shape == (2, 10, 4, 24)
    assert out.dtype == jnp.float32
    assert m.shape == l.shape == (2, 4, 10)
