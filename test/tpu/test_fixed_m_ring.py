"""A fixed m around the ring: one decision, merging by addition or by logsumexp, on simulated devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tpu_oracle
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import cudnn_dsa_tpu.ring
from cudnn_dsa.contracts import ContractError
from cudnn_dsa_tpu import (
    BlockSizes,
    FixedM,
    FixedMNorms,
    fixed_m_attention,
    fixed_m_k_mean,
    fixed_m_norms,
    ring_attention,
)
from cudnn_dsa_tpu.ring import _Partial

SMALL = BlockSizes(block_q=128, block_kv=128)


def mesh_of(devices, ring, ulysses):
    axes = ("ring", "ulysses") if ulysses > 1 else ("ring",)
    return Mesh(np.array(devices[: ring * ulysses]).reshape((ring, ulysses)[: len(axes)]), axes), axes


def run(devices, q, k, v, dout=None, *, ring, ulysses=1, center=False, v_ok=True, v_ok_is_local=False, **options):
    """out, and with dout the gradients, of sharded whole-sequence arrays."""
    mesh, axes = mesh_of(devices, ring, ulysses)
    spec = P(None, axes)
    verdicts = jnp.asarray(np.broadcast_to(v_ok, (ring * ulysses,)))

    def attention(q, k, v, verdict):
        chosen = dict(options)
        ring_options = {n: chosen.pop(n) for n in ("bidirectional", "orig_kv_seq_len") if n in chosen}
        if center:
            keys = k[:, : ring_options.get("orig_kv_seq_len")]
            mean = fixed_m_k_mean(keys, axis_names=axes)
            block = None if ulysses > 1 else 128
            norms = fixed_m_norms(q, keys, block_q=block, k_mean=mean, axis_names=axes)
            chosen.update(k_mean=mean, norms=norms, per_q_block=ulysses == 1)
        fixed_m = FixedM(v_ok=verdict if v_ok_is_local else v_ok, **chosen)
        return ring_attention(
            q, k, v, axis_name="ring", ulysses_axis_name="ulysses" if ulysses > 1 else None, block_sizes=SMALL,
            fixed_m=fixed_m, **ring_options,
        )  # fmt: skip

    sharded = jax.shard_map(attention, mesh=mesh, in_specs=(spec, spec, spec, P(axes)), out_specs=spec)
    if dout is None:
        return jax.block_until_ready(jax.jit(sharded)(q, k, v, verdicts))

    @jax.jit
    def both(q, k, v, dout):
        out, pullback = jax.vjp(lambda *x: sharded(*x, verdicts), q, k, v)
        return out, *pullback(dout)

    return dict(zip(("out", "dq", "dk", "dv"), both(q, k, v, dout), strict=True))


def arrays(length, heads=2, kv_heads=1, dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = ((heads, length, 64), (kv_heads, length, 64), (kv_heads, length, 64), (heads, length, 64))
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


CASES = [
    {"ring": 1, "uniform": True},
    {"ring": 2, "uniform": True, "dtype": "bfloat16"},
    {"ring": 4, "bidirectional": True, "uniform": True, "center": True},
    {"ring": 2, "ulysses": 2, "uniform": True, "kv_heads": 2, "center": True},
    {"ring": 2, "kv_heads": 2, "ineligible": True},
    {"ring": 2, "ulysses": 2, "kv_heads": 2, "ineligible": True, "per_q_block": False},
    pytest.param({"ring": 2, "uniform": True, "ineligible": True}, marks=pytest.mark.slow),
    pytest.param({"ring": 4, "ulysses": 2, "kv_heads": 2, "uniform": True}, marks=pytest.mark.slow),
    pytest.param({"ring": 8, "uniform": True}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients(devices, case):
    """Shards of 70 queries and keys. ``ineligible``: one query of one head on one device is far too long."""
    case = dict(case)
    sizes = {n: case.pop(n) for n in ("kv_heads", "dtype") if n in case}
    x = arrays(70 * case["ring"] * case.get("ulysses", 1), **sizes)
    ineligible = case.pop("ineligible", False)
    if ineligible:
        x[0] = x[0].at[1, 5].mul(100.0)
    result = run(devices, *x, **case)
    want = tpu_oracle.attention(*x)._asdict()
    # An fp32 logit of 600 is off by up to 600 * 2^-24 = 4e-5, and so is its weight.
    tpu_oracle.assert_close(result, want, sizes.get("dtype", "float32"), factor=6 if ineligible else 1)


def count_merges(monkeypatch):
    """Which merges are traced."""
    seen = []
    for kind in ("_Partial", "_Sums"):
        cls = getattr(cudnn_dsa_tpu.ring, kind)
        original = cls.merge
        monkeypatch.setattr(
            cls, "merge", lambda a, b, kind=kind, original=original: seen.append(kind) or original(a, b)
        )
    return seen


@pytest.mark.parametrize(("uniform", "kinds"), [(True, {"_Sums", "_Partial"}), (False, {"_Partial"})])
def test_how_hops_are_merged(devices, monkeypatch, uniform, kinds):
    """Uniform: by addition in one branch, by logsumexp in the branch for ineligible calls. Mixed: by logsumexp."""
    seen = count_merges(monkeypatch)
    run(devices, *arrays(140)[:3], ring=2, uniform=uniform)
    assert set(seen) == kinds


def test_merging_from_a_finite_nothing():
    """A partial result that starts from -1e30 changes nothing, in either order; two of them give no NaN."""
    nothing = _Partial(jnp.zeros((1, 2, 3)), jnp.full((1, 2), -1e30))
    some = _Partial(jnp.ones((1, 2, 3)), jnp.array([[-700.0, 900.0]]))
    for merged in (nothing.merge(some), some.merge(nothing)):
        np.testing.assert_array_equal(merged.out, some.out)
        np.testing.assert_array_equal(merged.lse, some.lse)
    assert np.isfinite(np.asarray(nothing.merge(nothing).out)).all()


def tables(monkeypatch):
    """The decisions of all devices, [devices, 2, H, blocks], once per call."""
    seen = []
    original = FixedM.metadata

    def spy(*args, **options):
        table = original(*args, **options)
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), table)
        return table

    monkeypatch.setattr(FixedM, "metadata", spy)
    return seen


def test_m_and_gate_are_those_of_the_whole_ring(devices, monkeypatch):
    """The longest key lives on one device; every device's m is that of one device with all keys. For N = 4 x 70 the
    constants are those of 280 keys, not of 70."""
    q, k, v, _ = arrays(280)
    k = k.at[0, 200].mul(4.0)
    q = q.at[:, ::70].set(q[:, :1])  # every shard has the same longest query
    q = q.at[:, ::70].mul(4.0)
    seen = tables(monkeypatch)
    run(devices, q, k, v, ring=4)
    jax.effects_barrier()
    ring_tables = list(seen)
    seen.clear()
    jax.block_until_ready(fixed_m_attention(q, k, v, block_sizes=SMALL))
    jax.effects_barrier()
    assert len(ring_tables) == 4
    for table in ring_tables:
        np.testing.assert_array_equal(table[..., 0], seen[0][..., 0])


@pytest.mark.parametrize("v_ok", [False, np.array([True, False])], ids=["everywhere", "one device"])
def test_unsafe_verdict_falls_back_on_all_devices(devices, v_ok):
    """|v| of 1e36 overflows a fixed m's accumulator; one device's verdict suffices for all."""
    q, k, v, _ = arrays(140)
    v = v.at[0, 100].mul(1e36)
    for uniform in (False, True):
        out = run(devices, q, k, v, ring=2, v_ok=v_ok, v_ok_is_local=np.ndim(v_ok) > 0, uniform=uniform)
        assert np.isfinite(np.asarray(out)).all()
        assert tpu_oracle.relative_error(out, tpu_oracle.attention(q, k, v, q).out) < 1e-5


def test_padding_beyond_the_length_has_no_influence(devices):
    q, k, v, _ = arrays(140)
    mask = (jnp.arange(140) % 70 < 61)[None, :, None]
    dirty = run(devices, q, jnp.where(mask, k, 1e4), jnp.where(mask, v, jnp.nan), ring=2, orig_kv_seq_len=61,
                uniform=True, center=True)  # fmt: skip
    keep = np.flatnonzero(np.arange(140) % 70 < 61)
    want = tpu_oracle.attention(q, k[:, keep], v[:, keep], q).out
    assert tpu_oracle.relative_error(dirty, want) < 1e-5


def test_float16(devices):
    zeros, ones = jnp.zeros((1, 140, 64), jnp.float16), jnp.ones((1, 140, 64), jnp.float16)
    out = run(devices, zeros, zeros, ones, ring=2, v_ok=False)
    assert out.dtype == jnp.float16
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1.0)


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_unsafe_dtype_called_safe(devices, dtype):
    x = jnp.zeros((1, 140, 64), dtype)
    with pytest.raises(ContractError) as caught:
        run(devices, x, x, x, ring=2, v_ok=True)
    assert (caught.value.argument, caught.value.got) == ("v_ok", "True")


@pytest.mark.parametrize(
    ("options", "argument", "got"),
    [
        ({}, "v_ok", "None"),
        ({"v_ok": True, "gate": "wide"}, "k_mean", "None"),
        ({"v_ok": True, "norms": FixedMNorms(q=jnp.ones(2), k=jnp.ones(1))}, "norms.q", "(2,)"),
        ({"v_ok": True, "k_mean": jnp.zeros((1, 64))}, "norms", "None"),
    ],
)
def test_refusals(devices, options, argument, got):
    mesh, axes = mesh_of(devices, 2, 1)
    spec = P(None, axes)

    def attention(q, k, v):
        return ring_attention(q, k, v, axis_name="ring", block_sizes=SMALL, fixed_m=FixedM(**options))

    with pytest.raises(ContractError) as caught:
        jax.shard_map(attention, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)(*arrays(140)[:3])
    assert caught.value.argument.startswith(argument)
    assert got in caught.value.got


@pytest.mark.parametrize(
    ("length", "options", "argument"),
    [
        (jnp.array([70], jnp.int32), {}, "orig_kv_seq_len"),
        (None, {"norms": FixedMNorms(q=jnp.ones((2, 1)), k=jnp.ones(1))}, "per_q_block"),
    ],
)
def test_ring_specific_refusals(devices, length, options, argument):
    mesh, axes = mesh_of(devices, 2, 2)
    spec = P(None, axes)
    ulysses = "ulysses" if options else None

    def attention(q, k, v):
        fixed_m = dataclasses.replace(FixedM(v_ok=True), **options)
        return ring_attention(q, k, v, axis_name="ring", ulysses_axis_name=ulysses, orig_kv_seq_len=length,
                              fixed_m=fixed_m)  # fmt: skip

    with pytest.raises(ContractError) as caught:
        jax.shard_map(attention, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)(*arrays(280, kv_heads=2)[:3])
    assert caught.value.argument == argument
