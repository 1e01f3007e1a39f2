"""The tuner measures, remembers per device kind, and attention uses what it remembers."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from pallas_triton_cases import Sizes, assert_close, expect, inputs

from cudnn_dsa_pallas_triton import Config, KernelConfig, attention, autotune, default_config
from cudnn_dsa_pallas_triton.config import KERNELS, accumulators, candidates, fit, shared_bytes
from cudnn_dsa_pallas_triton.contracts import Options, check
from cudnn_dsa_pallas_triton.tuner import cache_file, cached_config, remember, tune

SIZES = Sizes((1,), 33, 33, 1, 1, 16, 16)


@pytest.fixture(autouse=True)
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDNN_DSA_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def qkv():
    arrays = inputs(np.random.default_rng(0), SIZES)
    return {n: jnp.asarray(arrays[n]) for n in "qkv"}


def test_tune_measures_every_choice_of_every_kernel_that_runs(qkv):
    problem = check(qkv, Options())
    choices = [KernelConfig(16, 16), KernelConfig(32, 16)]
    seen = []
    config = tune(
        problem,
        qkv,
        {},
        interpret=True,
        choose=lambda problem, kernel: choices,
        repeats=1,
        report=lambda kernel, config, seconds: seen.append((kernel, config)),
    )
    assert seen == [(k, c) for k in KERNELS if k != "dbias" for c in choices]
    assert all(getattr(config, k) in choices for k in KERNELS if k != "dbias")
    assert config.dbias == default_config(problem).dbias


def test_what_is_remembered_is_used(qkv):
    problem = check(qkv, Options())
    assert cached_config(problem) is None
    config = Config(*[KernelConfig(16, 16, 2, 1, 16)] * 4)
    remember(problem, config)
    assert cached_config(problem) == config
    assert autotune(**qkv) == config  # read, not measured: that would take minutes here
    other = check(qkv, Options(is_causal=True))
    assert cached_config(other) is None
    remember(other, default_config(other))
    assert cached_config(problem) == config
    want = expect(inputs(np.random.default_rng(0), SIZES), {})
    assert_close({"out": np.asarray(attention(**qkv))}, want, 4e-6)


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps({"x": 1})])
def test_a_damaged_cache_is_no_cache(qkv, content):
    cache_file().write_text(content)
    assert cached_config(check(qkv, Options())) is None


def test_a_wrong_argument_is_named_before_anything_runs(qkv):
    with pytest.raises(ValueError, match="logits_soft_cap"):
        autotune(**qkv, logits_soft_cap=-1.0)


@pytest.mark.parametrize("dim", [16, 64, 128, 256, 512])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_candidates_fit_the_device_they_are_for(dim, dtype):
    x = jnp.zeros((1, 4096, 1, dim), dtype)
    problem = check({"q": x, "k": x, "v": x}, Options())
    for kernel in KERNELS:
        configs = candidates(problem, kernel)
        assert configs
        assert len(set(configs)) == len(configs)
        for c in configs:
            assert shared_bytes(c, problem, kernel) <= 227 * 1024
            assert accumulators(c, problem, kernel) <= 255
    short = check(dict.fromkeys("qkv", x[:, :20]), Options())
    assert fit(KernelConfig(128, 64), short) == KernelConfig(32, 32)
