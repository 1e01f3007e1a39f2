"""On a GPU: every configuration that the tuner offers gives right results; large head dimensions.

The other files of this folder run on a GPU too: without one they interpret, with one they compile.
"""

import jax
import numpy as np
import pytest
from pallas_triton_cases import TOLERANCE, Sizes, assert_close, draw, expect, inputs, run

from cudnn_dsa_pallas_triton import Config, default_config
from cudnn_dsa_pallas_triton.config import KERNELS, candidates
from cudnn_dsa_pallas_triton.contracts import Options, check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA device"),
]


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_candidate(kernel, dim):
    sizes = Sizes((1,), 300, 333, 2, 1, dim, dim)
    rng = np.random.default_rng(0)
    arrays, kwargs = inputs(rng, sizes, "bfloat16"), draw(rng, ["bias", "is_causal"], sizes)
    want = expect(arrays, kwargs)
    problem = check({n: arrays[n] for n in "qkv"} | {"bias": kwargs["bias"]}, Options(is_causal=True))
    base = default_config(problem)
    ran = 0
    for candidate in candidates(problem, kernel):
        config = Config(**({k: getattr(base, k) for k in KERNELS} | {kernel: candidate}))
        try:
            got = run(arrays, kwargs, config)
        except Exception as e:  # too much shared memory for this device: the tuner passes over it as well
            assert "RESOURCE_EXHAUSTED" in str(e) or "shared memory" in str(e).lower(), e  # noqa: PT017
            continue
        assert_close(got, want, TOLERANCE["bfloat16"])
        ran += 1
    assert ran > 5


@pytest.mark.parametrize(("dtype", "dim"), [("float32", 256), ("bfloat16", 512), ("float16", 512), ("float32", 512)])
def test_large_head_dimensions(dtype, dim):
    sizes = Sizes((2,), 100, 130, 2, 1, dim, dim)
    rng = np.random.default_rng(0)
    arrays, kwargs = inputs(rng, sizes, dtype), draw(rng, ["bias", "is_causal", "attn_sink"], sizes)
    assert_close(run(arrays, kwargs, None), expect(arrays, kwargs), TOLERANCE[dtype])
