"""vmap, jit, grad, checkpoint and shard_map give what the plain call gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from pallas_triton_cases import SMALL, Sizes, assert_close, expect, inputs, normal

from cudnn_dsa_pallas_triton import attention

SIZES = Sizes((4,), 20, 20, 4, 2, 16, 16)
TOLERANCE = 4e-6
call = functools.partial(attention, is_causal=True, config=SMALL)


@pytest.fixture(scope="module")
def case():
    """(floats, dout, expected) of one causal call with a bias that all of the batch shares."""
    rng = np.random.default_rng(0)
    arrays = inputs(rng, SIZES)
    bias = normal(rng, 4, 20, 20)
    arrays["dl"][:] = 0
    want = expect(arrays, {"bias": bias, "is_causal": True})
    return {n: arrays[n] for n in "qkv"} | {"bias": bias}, arrays["dout"], want


def _loss(f, dout):
    return lambda floats: (f(floats) * dout).sum()


def _compare(grads, want):
    assert_close({"d" + n: np.asarray(g) for n, g in grads.items()}, want, TOLERANCE)


def test_grad_of_vmap(case):
    """Over a batch dimension that the bias does not have: its gradient is the sum."""
    floats, dout, want = case
    mapped = jax.vmap(lambda q, k, v, bias: call(q, k, v, bias=bias), in_axes=(0, 0, 0, None))
    _compare(jax.jit(jax.grad(_loss(lambda f: mapped(f["q"], f["k"], f["v"], f["bias"]), dout)))(floats), want)


def test_vmap_of_grad_over_two_axes(case):
    floats, dout, want = case
    floats = {n: x.reshape(2, 2, *x.shape[1:]) if n != "bias" else x for n, x in floats.items()}
    grad = jax.grad(lambda f, dout: (call(**f) * dout).sum())
    axes = ({"q": 0, "k": 0, "v": 0, "bias": None}, 0)
    grads = jax.jit(jax.vmap(jax.vmap(grad, axes), axes))(floats, dout.reshape(2, 2, *dout.shape[1:]))
    grads = {n: x.reshape(4, *x.shape[2:]) for n, x in grads.items()}
    _compare(grads | {"bias": grads["bias"].sum(axis=0)}, want)


def test_checkpoint(case):
    floats, dout, want = case
    _compare(jax.jit(jax.grad(_loss(jax.checkpoint(lambda f: call(**f)), dout)))(floats), want)


def _sharded_loss(dout, *, interpret, check_vma):
    """q, k and v split over batch and heads, the bias over heads: its gradient is summed over the batch shards."""
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "heads"))
    spec = PartitionSpec("data", None, "heads", None)
    bias_spec = PartitionSpec("heads", None, None)
    sharded = jax.shard_map(
        lambda q, k, v, bias: call(q, k, v, bias=bias, interpret=interpret),
        mesh=mesh,
        in_specs=(spec, spec, spec, bias_spec),
        out_specs=spec,
        check_vma=check_vma,
    )
    return _loss(lambda f: sharded(f["q"], f["k"], f["v"], f["bias"]), jnp.asarray(dout))


def test_shard_map_over_batch_and_heads(case):
    floats, dout, want = case
    grad = jax.jit(jax.grad(_sharded_loss(dout, interpret=None, check_vma=False)))
    _compare(grad({n: jnp.asarray(x) for n, x in floats.items()}), want)


def test_shard_map_with_replication_checks(case):
    """Interpret mode itself does not pass these checks, so the kernels are only traced here."""
    floats, dout, _ = case
    jax.make_jaxpr(jax.grad(_sharded_loss(dout, interpret=False, check_vma=True)))(floats)


def test_the_row_maximum_is_a_stop_gradient(case):
    floats, _, _ = case
    grads = jax.jit(jax.grad(lambda f: call(**f, return_residuals=True)[1][0].sum()))(floats)
    assert all(abs(x).max() == 0.0 for x in grads.values())
