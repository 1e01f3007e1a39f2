"""Ring attention on simulated devices against the float64 oracle of the whole sequence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tpu_oracle
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from cudnn_dsa.contracts import ContractError
from cudnn_dsa_tpu import BlockSizes, local_seq_len, ring_attention
from cudnn_dsa_tpu.attention import RESIDUAL_NAMES

SMALL = BlockSizes(block_q=128, block_kv=128)


def run(
    devices, *, ring, ulysses=1, q_len, kv_len, heads=2, kv_heads=1, dtype="float32", pad=0, garbage=0.0,
    checkpoint=None, **options,
):  # fmt: skip
    """Outputs and gradients of ring * ulysses shards, and the oracle's of the tokens that exist.

    ``q_len``, ``kv_len``: tokens of every shard, or a tuple of each shard's own. ``pad``: so many further tokens, of
    value ``garbage``, follow the longest; shorter shards are filled up with it as well.
    """
    shards, d = ring * ulysses, 64
    axes = ("ring", "ulysses") if ulysses > 1 else ("ring",)
    mesh = Mesh(np.array(devices[:shards]).reshape((ring, ulysses)[: len(axes)]), axes)
    rng = np.random.default_rng(0)
    lengths = {"q": q_len, "k": kv_len, "v": kv_len, "dout": q_len}
    lengths = {name: (n,) * shards if isinstance(n, int) else n for name, n in lengths.items()}
    arrays = {
        name: [jnp.asarray(rng.standard_normal((kv_heads if name in "kv" else heads, n, d)), dtype) for n in ns]
        for name, ns in lengths.items()
    }

    def with_tails(parts):
        longest = max(x.shape[1] for x in parts) + pad
        tails = [((0, 0), (0, longest - x.shape[1]), (0, 0)) for x in parts]
        padded = [jnp.pad(x, tail, constant_values=garbage) for x, tail in zip(parts, tails, strict=True)]
        return jnp.concatenate(padded, axis=1)

    def without_tails(x, ns):
        parts = np.split(np.asarray(x, np.float64), shards, axis=1)
        for part, n in zip(parts, ns, strict=True):
            np.testing.assert_array_equal(part[:, n:], 0.0)
        return np.concatenate([part[:, :n] for part, n in zip(parts, ns, strict=True)], axis=1)

    spec = P(None, axes)
    own = [jnp.asarray(lengths[name], jnp.int32) for name in "qk"]

    def attention(q, k, v, own_q, own_kv):
        return ring_attention(
            q, k, v, axis_name="ring", ulysses_axis_name="ulysses" if ulysses > 1 else None, block_sizes=SMALL,
            orig_q_seq_len=q_len if isinstance(q_len, int) else own_q,
            orig_kv_seq_len=kv_len if isinstance(kv_len, int) else own_kv, **options,
        )  # fmt: skip

    sharded = jax.shard_map(attention, mesh=mesh, in_specs=(spec,) * 3 + (P(axes),) * 2, out_specs=spec)

    @jax.jit
    def both(q, k, v, dout):
        def call(q, k, v):
            return sharded(q, k, v, *own)

        out, pullback = jax.vjp(jax.checkpoint(call, policy=checkpoint) if checkpoint else call, q, k, v)
        return out, *pullback(dout)

    results = both(*map(with_tails, arrays.values()))
    results = zip(("out", "dq", "dk", "dv"), results, ("q", "q", "k", "v"), strict=True)
    want = tpu_oracle.attention(*(np.concatenate(parts, axis=1, dtype=np.float64) for parts in arrays.values()))
    return {name: without_tails(x, lengths[like]) for name, x, like in results}, want._asdict()


NAN = float("nan")
# Tuples are lengths of single devices: tiles of 128 that they end in, before and at; shards without any token.
CASES = [
    {"ring": 1, "q_len": 130, "kv_len": 140},
    {"ring": 2, "q_len": 100, "kv_len": 150, "dtype": "bfloat16", "pad": 7, "garbage": NAN},
    {"ring": 4, "q_len": 65, "kv_len": 73, "pad": 3, "garbage": 1000.0},
    {"ring": 4, "q_len": 40, "kv_len": 130, "bidirectional": True, "kv_heads": 2},
    {"ring": 2, "ulysses": 2, "q_len": 33, "kv_len": 47, "heads": 4, "kv_heads": 2, "pad": 2, "garbage": NAN},
    {"ring": 8, "q_len": 20, "kv_len": 20, "heads": 1, "bidirectional": True},
    {"ring": 4, "q_len": (20, 31, 0, 7), "kv_len": (128, 0, 150, 5), "kv_heads": 2, "pad": 1, "garbage": NAN},
    {"ring": 2, "ulysses": 2, "q_len": (20, 0, 3, 9), "kv_len": (0, 30, 70, 1), "kv_heads": 2, "pad": 1,
     "garbage": NAN, "bidirectional": True},
    *(pytest.param(case, marks=pytest.mark.slow) for case in (
        {"ring": 8, "q_len": 20, "kv_len": 20, "heads": 1},
        {"ring": 2, "bidirectional": True, "q_len": 20, "kv_len": 20},
        {"ring": 4, "ulysses": 2, "q_len": 33, "kv_len": 20, "bidirectional": True, "heads": 2, "kv_heads": 2},
        {"ring": 4, "q_len": 650, "kv_len": 733, "dtype": "bfloat16"},
        {"ring": 2, "q_len": (650, 733), "kv_len": (733, 650), "pad": 5, "garbage": NAN},
        {"ring": 4, "q_len": (650, 733, 0, 1), "kv_len": (733, 650, 512, 0), "garbage": 1000.0, "bidirectional": True},
        {"ring": 2, "ulysses": 2, "q_len": (650, 733, 9, 0), "kv_len": (733, 0, 650, 129), "kv_heads": 2},
        {"ring": 8, "q_len": (20,) * 7 + (0,), "kv_len": (20,) * 6 + (13, 0), "garbage": NAN},
    )),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(f"{k}={v}" for k, v in case.items()))
def test_outputs_and_gradients(devices, case):
    result, want = run(devices, **case)
    tpu_oracle.assert_close(result, want, case.get("dtype", "float32"))


@pytest.mark.usefixtures("checkpoint_of_interpreted_kernels")
@pytest.mark.parametrize("policy", ["nothing", "named"])
def test_checkpoint(devices, policy):
    policies = jax.checkpoint_policies
    saved = policies.save_only_these_names(*RESIDUAL_NAMES) if policy == "named" else policies.nothing_saveable
    result, want = run(devices, ring=2, q_len=40, kv_len=60, pad=3, garbage=NAN, checkpoint=saved)
    tpu_oracle.assert_close(result, want, "float32")


@pytest.mark.parametrize("ulysses", [1, 2])
def test_no_device_has_a_key(devices, ulysses):
    """Zeros, and no gradient, whatever the arrays hold."""
    mesh = Mesh(np.array(devices[:4]).reshape(4 // ulysses, ulysses), ("ring", "ulysses"))
    spec = P(None, ("ring", "ulysses"))

    def call(q, k, v):
        ring = {"axis_name": "ring", "ulysses_axis_name": "ulysses" if ulysses > 1 else None}
        return ring_attention(q, k, v, orig_kv_seq_len=jnp.int32(0), **ring)

    x = jnp.full((2, 4 * 16, 64), NAN)
    q = jnp.ones_like(x)

    @jax.jit
    def both(q, k, v):
        out, pullback = jax.vjp(jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec), q, k, v)
        return out, *pullback(q)

    for result in both(q, x, x):
        np.testing.assert_array_equal(result, 0.0)


def test_local_seq_len(devices):
    """Shards of 7 tokens of a sequence of 17, along one axis and along two."""
    for shape, axes in (((4,), "a"), ((2, 2), ("a", "b"))):
        mesh = Mesh(np.array(devices[:4]).reshape(shape), tuple(axes))
        own = jax.shard_map(lambda: local_seq_len(17, 7, axes)[None], mesh=mesh, in_specs=(), out_specs=P(axes))  # noqa: B023
        np.testing.assert_array_equal(own(), [7, 7, 3, 0])


@pytest.mark.parametrize(
    ("options", "argument", "got"),
    [
        ({"axis_name": "columns"}, "axis_name", "'columns'"),
        ({"axis_name": "ring", "ulysses_axis_name": "rows"}, "ulysses_axis_name", "'rows'"),
        ({"axis_name": "ring", "ulysses_axis_name": "ulysses"}, "ulysses_axis_name", "size 2"),
        ({"axis_name": "ring", "orig_kv_seq_len": 9}, "orig_kv_seq_len", "9"),
        ({"axis_name": "ring", "orig_kv_seq_len": jnp.zeros(2, jnp.int32)}, "orig_kv_seq_len", "shape (2,)"),
        ({"axis_name": "ring", "orig_q_seq_len": jnp.zeros(())}, "orig_q_seq_len", "float32"),
    ],
)
def test_refusals(devices, options, argument, got):
    mesh = Mesh(np.array(devices[:4]).reshape(2, 2), ("ring", "ulysses"))
    spec = P(None, ("ring", "ulysses"))
    x = jnp.zeros((3, 32, 64))
    call = jax.shard_map(functools.partial(ring_attention, **options), mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    with pytest.raises(ContractError) as caught:
        call(x, x, x)
    assert caught.value.argument == argument
    assert got in caught.value.got


def test_outside_of_shard_map():
    x = jnp.zeros((2, 32, 64))
    with pytest.raises(ContractError, match="axis_name"):
        ring_attention(x, x, x, axis_name="ring")
