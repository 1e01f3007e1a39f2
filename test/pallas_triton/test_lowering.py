"""The Triton lowering accepts what interpret mode ran: every feature and every shipped configuration, without a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_triton_cases import DIFFERENTIABLE, FEATURES, Sizes, draw

from cudnn_dsa_pallas_triton import Config, KernelConfig, attention, default_config
from cudnn_dsa_pallas_triton.config import KERNELS, candidates, head_chunks
from cudnn_dsa_pallas_triton.contracts import Options, check

# The lowering of later JAX versions calls the GPU compiler itself.
pytestmark = pytest.mark.skipif(
    tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 11), reason="lowering to Triton needs a GPU in this JAX"
)


def _spec(x):
    return jax.ShapeDtypeStruct(np.shape(x), jnp.asarray(x).dtype)


def lower(sizes, dtype, kwargs, config=None):
    """Lower the gradient for CUDA; the module text."""
    s = sizes
    floats = {
        "q": jax.ShapeDtypeStruct((*s.batch, s.q_len, s.q_heads, s.head_dim), dtype),
        "k": jax.ShapeDtypeStruct((*s.batch, s.kv_len, s.kv_heads, s.head_dim), dtype),
        "v": jax.ShapeDtypeStruct((*s.batch, s.kv_len, s.kv_heads, s.v_head_dim), dtype),
    } | {n: _spec(x) for n, x in kwargs.items() if n in DIFFERENTIABLE}
    masks = {n: x for n, x in kwargs.items() if n not in DIFFERENTIABLE and n != "local_window_size"}
    masks = {n: x for n, x in masks.items() if not np.isscalar(x)}
    static = {n: x for n, x in kwargs.items() if n not in floats | masks}
    masks = {n: tuple(map(_spec, x)) if isinstance(x, tuple) else _spec(x) for n, x in masks.items()}

    def loss(floats, masks):
        return attention(**floats, **masks, **static, config=config, interpret=False).astype(jnp.float32).sum()

    return jax.jit(jax.grad(loss)).trace(floats, masks).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", [None, *FEATURES])
def test_every_feature(name):
    text = lower(Sizes(), "bfloat16", draw(np.random.default_rng(0), [name] if name else [], Sizes()))
    assert text.count("triton") >= 3 + (name == "bias")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dim", [8, 64, 80, 128, 192, 256, 512])
def test_shipped_configurations(dim, dtype):
    sizes = Sizes((1,), 300, 300, 1, 1, dim, dim)
    lower(sizes, dtype, {"bias": np.zeros((300, 300), np.float32), "is_causal": True})


def test_every_candidate_has_a_legal_tile():
    spec = jax.ShapeDtypeStruct((1, 4096, 1, 128), "bfloat16")
    problem = check({"q": spec, "k": spec, "v": spec}, Options())
    for kernel in KERNELS:
        assert len(candidates(problem, kernel)) > 10
    assert isinstance(default_config(problem), Config)


@pytest.mark.parametrize("dim", [8, 16, 24, 72, 80, 96, 120, 192, 256, 320, 512])
@pytest.mark.parametrize("limit", [16, 64, 512])
def test_head_chunks_cover_the_dimension(dim, limit):
    chunks = head_chunks(dim, limit)
    assert [c.start for c in chunks] == list(np.cumsum([0] + [c.size for c in chunks[:-1]]))
    assert chunks[-1].start < dim <= chunks[-1].start + chunks[-1].size
    assert all(16 <= c.size <= max(16, limit) and c.size & (c.size - 1) == 0 for c in chunks)
    assert sum(c.size for c in chunks) - dim <= max(8, dim // 4)


def test_a_small_chunk_lowers():
    config = Config(*[KernelConfig(32, 32, head_chunk=32)] * 4)
    lower(Sizes((1,), 64, 64, 1, 1, 128, 96), "bfloat16", {}, config)
