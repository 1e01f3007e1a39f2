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
from cudnn_dsa_tpu import BlockSizes, ring_attention

SMALL = BlockSizes(block_q=128, block_kv=128)


def run(
    devices, *, ring, ulysses=1, q_len, kv_len, heads=2, kv_heads=1, dtype="float32", pad=0, garbage=0.0, **options
):
    """Outputs and gradients of ring * ulysses shards of ``q_len`` and ``kv_len`` tokens, and the oracle's.

    ``pad``: so many further tokens, of value ``garbage``, follow the valid ones in every shard.
    """
    axes = ("ring", "ulysses") if ulysses > 1 else ("ring",)
    mesh = Mesh(np.array(devices[: ring * ulysses]).reshape((ring, ulysses)[: len(axes)]), axes)
    rng = np.random.default_rng(0)
    shards, d = ring * ulysses, 64
    shapes = {"q": (heads, q_len), "k": (kv_heads, kv_len), "v": (kv_heads, kv_len), "dout": (heads, q_len)}
    whole = {n: jnp.asarray(rng.standard_normal((h, shards * s, d)), dtype) for n, (h, s) in shapes.items()}

    def with_tails(x):
        x = x.reshape(x.shape[0], shards, -1, d)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, pad), (0, 0)), constant_values=garbage)
        return x.reshape(x.shape[0], -1, d)

    def without_tails(x):
        x = x.reshape(x.shape[0], shards, -1, d)
        valid = x.shape[2] - pad
        np.testing.assert_array_equal(np.asarray(x[:, :, valid:], np.float32), 0.0)
        return x[:, :, :valid].reshape(x.shape[0], -1, d)

    spec = P(None, axes)
    attention = functools.partial(
        ring_attention,
        axis_name="ring",
        ulysses_axis_name="ulysses" if ulysses > 1 else None,
        block_sizes=SMALL,
        orig_q_seq_len=q_len,
        orig_kv_seq_len=kv_len,
        **options,
    )
    sharded = jax.shard_map(attention, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec)

    @jax.jit
    def both(q, k, v, dout):
        out, pullback = jax.vjp(sharded, q, k, v)
        return out, *pullback(dout)

    results = both(*(with_tails(x) for x in whole.values()))
    results = dict(zip(("out", "dq", "dk", "dv"), map(without_tails, results), strict=True))
    return results, tpu_oracle.attention(*whole.values())._asdict()


CASES = [
    {"ring": 1, "q_len": 130, "kv_len": 140},
    {"ring": 2, "q_len": 100, "kv_len": 150, "dtype": "bfloat16", "pad": 7, "garbage": float("nan")},
    {"ring": 4, "q_len": 65, "kv_len": 73, "pad": 3, "garbage": 1000.0},
    {"ring": 4, "q_len": 40, "kv_len": 130, "bidirectional": True, "kv_heads": 2},
    {"ring": 2, "ulysses": 2, "q_len": 33, "kv_len": 47, "heads": 4, "kv_heads": 2, "pad": 2, "garbage": float("nan")},
    {"ring": 8, "q_len": 20, "kv_len": 20, "heads": 1, "bidirectional": True},
    pytest.param({"ring": 8, "q_len": 20, "kv_len": 20, "heads": 1}, marks=pytest.mark.slow),
    pytest.param({"ring": 2, "bidirectional": True, "q_len": 20, "kv_len": 20}, marks=pytest.mark.slow),
    pytest.param({"ring": 4, "ulysses": 2, "q_len": 33, "kv_len": 20, "bidirectional": True, "heads": 2, "kv_heads": 2},
                 marks=pytest.mark.slow),
    pytest.param({"ring": 4, "q_len": 650, "kv_len": 733, "dtype": "bfloat16"}, marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(f"{k}={v}" for k, v in case.items()))
def test_outputs_and_gradients(devices, case):
    result, want = run(devices, **case)
    tpu_oracle.assert_close(result, want, case.get("dtype", "float32"))


@pytest.mark.parametrize(
    ("options", "argument", "got"),
    [
        ({"axis_name": "columns"}, "axis_name", "'columns'"),
        ({"axis_name": "ring", "ulysses_axis_name": "rows"}, "ulysses_axis_name", "'rows'"),
        ({"axis_name": "ring", "ulysses_axis_name": "ulysses"}, "ulysses_axis_name", "size 2"),
        ({"axis_name": "ring", "orig_kv_seq_len": 9}, "orig_kv_seq_len", "9"),
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
