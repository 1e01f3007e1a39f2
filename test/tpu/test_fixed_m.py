"""The mathematics of a fixed m, and attention with it on one device, against float64."""

import dataclasses

import fixed_m_oracle as model
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tpu_oracle
from jax.experimental.pallas import tpu as pltpu

from cudnn_dsa.contracts import ContractError
from cudnn_dsa_tpu import (
    BlockSizes,
    FixedM,
    FixedMNorms,
    fixed_m_attention,
    fixed_m_dtype_is_safe,
    fixed_m_k_mean,
    fixed_m_norms,
    get_fixed_m_constants,
    splash_attention,
)
from cudnn_dsa_tpu.contracts import check_attention
from cudnn_dsa_tpu.fixed_m import LogitBound, is_eligible, logit_bound, shift
from cudnn_dsa_tpu.forward import FixedOperands, Launch, forward

SMALL = BlockSizes(block_q=128, block_kv=128)
TABLE = {
    1024: (109, 234, 117),
    4096: (107, 232, 116),
    4097: (106, 231, 115),
    65536: (103, 228, 114),
    75600: (102, 227, 113),
    131073: (101, 226, 113),
}


@pytest.mark.parametrize("n", TABLE)
def test_constants(n):
    assert get_fixed_m_constants(n) == TABLE[n]


@pytest.mark.parametrize("n", [1, 2, 3, 1023, 1025, 1 << 20, (1 << 20) + 1])
def test_constants_keep_the_proofs(n):
    """Overflow: the largest sum. Flush: the lowest exponent at the gate, and one unit above the window."""
    c, w, gate = get_fixed_m_constants(n)
    assert n * 2.0**c * 256 <= 2.0**127 < n * 2.0 ** (c + 1) * 256 * 2
    assert c - gate - np.ceil(gate) >= -125
    assert w == c + 125
    assert c - (gate + 1) - np.ceil(gate + 1) < -125


@pytest.mark.parametrize("n", [0, -1, 1.5, True])
def test_constants_refuse(n):
    with pytest.raises(ContractError, match="kv_seq_len"):
        get_fixed_m_constants(n)


def test_safe_dtypes():
    assert [fixed_m_dtype_is_safe(x) for x in (jnp.bfloat16, jnp.float32)] == [True, True]
    assert not any(fixed_m_dtype_is_safe(x) for x in (jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2))


def exact_bound(upper, mean):
    return LogitBound(np.float32(upper), np.float32(mean), np.float32(0))


@pytest.mark.parametrize("n", [1024, 4096, 75600])
def test_eligibility_at_the_gate(n):
    constants = get_fixed_m_constants(n)
    assert is_eligible(exact_bound(constants.gate, 0), constants)
    assert not is_eligible(exact_bound(constants.gate + 0.01, 0), constants)
    for wrong in (np.nan, np.inf):
        assert not is_eligible(exact_bound(wrong, 0), constants)
        assert not is_eligible(exact_bound(wrong, 0), constants, "wide", 1.0)
    assert not is_eligible(exact_bound(50, 0)._replace(rounding=np.float32(1.1)), constants)


@pytest.mark.parametrize("n", [100, 1024, 4096])
@pytest.mark.parametrize("seed", range(3))
def test_eligible_logits_lose_nothing(n, seed):
    """The model: logits anywhere within the bound, of which the decision knows the mean."""
    rng = np.random.default_rng(seed)
    constants = get_fixed_m_constants(n)
    used = 0
    for upper in (constants.gate, constants.gate - 0.5, 100.0, 86.0, 60.0, 3.3):
        for logits in (
            rng.uniform(-upper, upper, (1, n)),
            np.full((1, n), -upper),
            np.full((1, n), upper),
            np.where(rng.random((1, n)) < 0.01, upper, -upper),
            np.where(rng.random((1, n)) < 0.5, 1.45, -1.45),
        ):
            if is_eligible(exact_bound(upper, logits.mean()), constants):
                v = rng.standard_normal((n, 3)) * rng.choice([1e-3, 1.0, 64.0])
                out, kept = model.fixed_m_softmax(logits, v, shift(upper, constants))
                assert kept.min() == 1.0
                exact = model.softmax(logits, v)
                assert np.abs(out - exact).max() <= 2.0**-40 + 1e-12 * np.abs(v).max()
                used += 1
    assert used >= 15


def test_flushed_products_need_the_mean():
    """All logits -U at the gate: no weight is flushed, but half of the products are."""
    n = 1024
    constants = get_fixed_m_constants(n)
    logits = np.full((1, n), -float(constants.gate))
    v = np.random.default_rng(0).standard_normal((n, 3))
    out, kept = model.fixed_m_softmax(logits, v, shift(constants.gate, constants))
    assert kept.min() == 1.0
    assert np.abs(out - v.mean(axis=0)).max() > 1e-3
    assert not is_eligible(exact_bound(constants.gate, -constants.gate), constants)


def adversarial_centered_logits(n=4096):
    a = np.log2(7.5) / 2
    return np.where(np.arange(n) % 2 == 0, a, -a)[None]


def test_the_whole_window_as_a_gate_loses_mass():
    """Centered keys, U = 231.01: 15/17 of the mass is kept if W is taken for the gate; nothing else accepts this U."""
    constants = get_fixed_m_constants(4096)
    logits, upper = adversarial_centered_logits(), np.float32(231.01)
    assert abs(logits.mean()) < 1e-12
    assert upper <= constants.W
    _, kept = model.fixed_m_softmax(logits, np.ones((4096, 1)), shift(upper, constants))
    np.testing.assert_allclose(kept, 15 / 17, rtol=1e-9)
    assert not is_eligible(exact_bound(upper, 0), constants)
    assert not is_eligible(exact_bound(upper, 0), constants, "wide", 256.0)


@pytest.mark.parametrize("seed", range(3))
def test_wide_gate_bound(seed):
    """At C + 116 and mean zero the worst split keeps all but 2^-10, and out moves by 2^-8 max|v| at most."""
    rng = np.random.default_rng(seed)
    for n in (1024, 4096):
        constants = get_fixed_m_constants(n)
        upper = float(constants.C + 116)
        assert is_eligible(exact_bound(upper, 0), constants, "wide", 4.0)
        assert not is_eligible(exact_bound(upper, 0), constants, "wide", 0.5)
        assert not is_eligible(exact_bound(upper + 0.01, 0), constants, "wide", 256.0)
        for spread in (0.0, 1.0, 9.9, 10.1, 12.0):
            logits = np.where(np.arange(n) % 2 == 0, spread, -spread)[None] + rng.uniform(-1e-3, 1e-3, (1, n))
            logits -= logits.mean()
            v = rng.uniform(-4, 4, (n, 3))
            out, kept = model.fixed_m_softmax(logits, v, shift(upper, constants))
            assert 1 - kept.min() <= 2.0**-10
            assert np.abs(out - model.softmax(logits, v)).max() <= 2.0**-8 * 4


def bound_of(q_norm, k_norm, squared):
    norms = FixedMNorms(q=jnp.array([q_norm], jnp.float32), k=jnp.array([k_norm], jnp.float32))
    return float(logit_bound(norms, scale_log2e=1.0, group=1, squared=squared).upper[0])


def test_squared_norms_are_declared_not_guessed():
    """(1000, 2) as norms bound the logits by 2000; taken for squared ones, by 44.7."""
    assert bound_of(1000.0, 2.0, squared=False) == pytest.approx(2000, rel=1e-3)
    assert bound_of(1000.0, 2.0, squared=True) == pytest.approx(44.72, rel=1e-3)


@pytest.mark.parametrize("per_q_block", [True, False])
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_bound_holds_and_both_representations_agree(per_q_block, centered, dtype):
    q, k, _ = (jnp.asarray(x, dtype) for x in model.batch(0, 10, 200, 150))
    k_mean = fixed_m_k_mean(k) if centered else None
    options = {"block_q": 128 if per_q_block else None, "k_mean": k_mean}
    bounds = [
        logit_bound(fixed_m_norms(q, k, squared=squared, **options), scale_log2e=0.2, group=1, k_mean=k_mean,
                    squared=squared)
        for squared in (True, False)
    ]  # fmt: skip
    np.testing.assert_allclose(bounds[0].upper, bounds[1].upper, rtol=1e-6)
    assert bounds[0].upper.shape == ((10, 2) if per_q_block else (10,))
    q64, k64 = (np.asarray(x, np.float64) for x in (q, k))
    k64 = k64 - (np.asarray(k_mean, np.float64)[:, None] if centered else 0)
    logits = 0.2 * np.einsum("hsd,htd->hst", q64, k64)
    blocks = [logits[:, :128], logits[:, 128:]] if per_q_block else [logits]
    for n, block in enumerate(blocks):
        upper, mean = (np.asarray(x).reshape(10, -1)[:, n] for x in bounds[0][:2])
        assert (np.abs(block).max(axis=(1, 2)) <= upper).all()
        assert (block.mean(axis=-1).min(axis=-1) >= mean - 1e-9).all()


# --- attention ------------------------------------------------------------------------------------------------------


def arrays(q_len=200, kv_len=300, heads=2, kv_heads=1, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((heads, q_len, 64), (kv_heads, kv_len, 64), (kv_heads, kv_len, 64), (heads, q_len, 64))
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def with_gradients(q, k, v, dout, **options):
    @jax.jit
    def both(q, k, v, dout):
        call = lambda *x: fixed_m_attention(*x, block_sizes=SMALL, **options)  # noqa: E731
        out, pullback = jax.vjp(call, q, k, v)
        return out, *pullback(dout)

    return dict(zip(("out", "dq", "dk", "dv"), both(q, k, v, dout), strict=True))


def centering(q, k, squared=True, per_q_block=True):
    mean = fixed_m_k_mean(k)
    block = 128 if per_q_block else None
    return {"k_mean": mean, "norms": fixed_m_norms(q, k, block_q=block, k_mean=mean, squared=squared)}


def only_launches(monkeypatch):
    """The kinds of launches that are traced from now on."""
    import cudnn_dsa_tpu.attention

    seen = []
    original = cudnn_dsa_tpu.attention.forward

    def spy(*args, **options):
        seen.append(options["which"])
        return original(*args, **options)

    monkeypatch.setattr(cudnn_dsa_tpu.attention, "forward", spy)
    return seen


CASES = [
    {},
    {"uniform": True},
    {"uniform": True, "per_q_block": False, "dtype": "bfloat16"},
    {"dtype": "bfloat16", "heads": 4, "kv_heads": 2, "kv_len": 385},
    {"uniform": True, "kv_len": 257},  # the last tile has one key
    {"uniform": True, "kv_len": 100, "center": True},  # one tile
    {"center": True, "dtype": "bfloat16", "kv_len": 260},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients(case):
    case = dict(case)
    sizes = {n: case.pop(n) for n in ("kv_len", "heads", "kv_heads", "dtype") if n in case}
    x = arrays(**sizes)
    options = centering(*x[:2], per_q_block=case.get("per_q_block", True)) if case.pop("center", False) else {}
    result = with_gradients(*x, **case, **options)
    tpu_oracle.assert_close(result, tpu_oracle.attention(*x)._asdict(), sizes.get("dtype", "float32"))


def test_the_fixed_body_is_what_runs(monkeypatch):
    """An m that is wrong by 300 ruins the result of an eligible pair, and of no other."""
    q, k, v, _ = arrays()
    problem = check_attention(q, k, v, scale=None, orig_q_seq_len=None, orig_kv_seq_len=None)
    table = np.zeros((2, 2, 2), np.float32)
    table[0], table[1, 0, 1] = 300.0, 1.0
    padded = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % 128), (0, 0))) for x in (q, k, v))
    out, _ = forward(
        *padded, None, None, None, FixedOperands(jnp.asarray(table), None), problem=problem,
        tiles=SMALL.forward, which=Launch.HYBRID, out_dtype=jnp.float32, interpret=True,
    )  # fmt: skip
    want = tpu_oracle.attention(q, k, v, q).out
    out = np.asarray(out)[:, :200]
    assert tpu_oracle.relative_error(out[1], want[1]) < 1e-5
    assert tpu_oracle.relative_error(out[0, :128], want[0, :128]) < 1e-5
    assert not tpu_oracle.relative_error(out[0, 128:], want[0, 128:]) < 1e-2


def inputs_of(seed, dtype, heads=40, q_len=32, kv_len=300):
    q, k, v = (jnp.asarray(x, dtype) for x in model.batch(seed, heads, q_len, kv_len))
    norms = fixed_m_norms(q, k, block_q=128)
    bound = logit_bound(norms, scale_log2e=np.log2(np.e) / 8, group=1)
    eligible = np.asarray(is_eligible(bound, get_fixed_m_constants(kv_len)))[:, 0]
    return q, k, v, eligible


@pytest.mark.parametrize(
    ("dtype", "seeds"),
    [
        ("bfloat16", range(1)),
        ("float32", range(1, 2)),
        pytest.param("bfloat16", range(100, 125), marks=pytest.mark.slow),
        pytest.param("float32", range(200, 225), marks=pytest.mark.slow),
    ],
)
def test_equals_softmax_within_the_online_kernels_error(dtype, seeds):
    """40 inputs a seed, random and adversarial. Hybrid launch: all finite, all right. Uniform launch of the eligible
    ones: right too. 'Right' is the online kernel's own error on the input plus, in bf16, one rounding of P (a running
    maximum makes the largest weight exactly 1, here it is 2^(s - m) of any size) and the unit in the last place by
    which out may then round otherwise; in fp32 the rounding of s - m (|s - m| < 256, so 2^-17 ln 2)."""
    hybrid = jax.jit(lambda q, k, v: fixed_m_attention(q, k, v, block_sizes=SMALL))
    uniform = jax.jit(lambda q, k, v: fixed_m_attention(q, k, v, block_sizes=SMALL, uniform=True))
    online = jax.jit(lambda q, k, v: splash_attention(q, k, v, block_sizes=SMALL))
    floor = {"bfloat16": 2.0**-9 + 2.0**-8, "float32": 2.0**-17 * np.log(2) + 1e-6}[dtype]
    fallbacks, worst = 0, {}
    for seed in seeds:
        q, k, v, eligible = inputs_of(seed, dtype)
        assert 8 <= eligible.sum() <= 38
        fallbacks += (~eligible).sum()
        chosen = np.resize(np.flatnonzero(eligible), len(q))
        results = {
            "hybrid": np.asarray(hybrid(q, k, v), np.float64),
            "uniform": np.asarray(uniform(q[chosen], k[chosen], v[chosen]), np.float64),
        }
        reference = np.asarray(online(q, k, v), np.float64)
        for h in range(len(q)):
            logits = np.asarray(q[h], np.float64) @ np.asarray(k[h], np.float64).T * (np.log2(np.e) / 8)
            want = model.softmax(logits, np.asarray(v[h], np.float64))
            allowed = tpu_oracle.relative_error(reference[h], want) + floor
            for name, out in results.items():
                places = [h] if name == "hybrid" else np.flatnonzero(chosen == h)[:1]
                for place in places:
                    assert np.isfinite(out[place]).all()
                    error = tpu_oracle.relative_error(out[place], want)
                    assert error <= allowed, f"{name}, seed {seed}, head {h}: {error:.1e} > {allowed:.1e}"
                    worst[name] = max(worst.get(name, 0.0), error)
    assert fallbacks
    print(dtype, f"{fallbacks} of {40 * len(seeds)} not eligible; largest relative errors", worst)


def test_sink_heads_fall_back_everywhere():
    rng = np.random.default_rng(0)
    q, k = (np.stack(x) for x in zip(*(model.sink(rng, 100, 300) for _ in range(4)), strict=True))
    v = rng.standard_normal((4, 300, 64))
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    bound = logit_bound(fixed_m_norms(q, k, block_q=128), scale_log2e=np.log2(np.e) / 8, group=1)
    assert not is_eligible(bound, get_fixed_m_constants(300)).any()
    out = fixed_m_attention(q, k, v, block_sizes=SMALL)
    assert tpu_oracle.relative_error(out, tpu_oracle.attention(q, k, v, q).out) < 5e-3


def metadata_of(q, k, v, **options):
    problem = check_attention(q, k, v, scale=None, orig_q_seq_len=None, orig_kv_seq_len=None)
    fixed_m = FixedM(**options)
    fixed_m.check(problem, 2)
    return np.asarray(fixed_m.metadata(q, k, v, problem, block_q=128, ring_kv_len=problem.valid_kv))


def test_eligibility_is_per_head_and_block():
    """One long query makes its block ineligible, or its head."""
    q, k, v, _ = arrays()
    q = q.at[0, 150].mul(100.0)
    np.testing.assert_array_equal(metadata_of(q, k, v, v_ok=True)[1], [[1, 0], [1, 1]])
    np.testing.assert_array_equal(metadata_of(q, k, v, v_ok=True, per_q_block=False)[1], [[0, 0], [1, 1]])
    assert not metadata_of(q, k, v, v_ok=False)[1].any()


@pytest.mark.parametrize(("largest", "eligible"), [(256.0, True), (257.0, False), (np.inf, False)])
def test_values_beyond_256_fall_back(monkeypatch, largest, eligible):
    q, k, v, _ = arrays()
    v = v.at[0, 7, 3].set(largest)
    tables = []
    original = FixedM.metadata
    monkeypatch.setattr(FixedM, "metadata", lambda *a, **o: tables.append(original(*a, **o)) or tables[-1])
    out = jax.block_until_ready(fixed_m_attention(q, k, v, block_sizes=SMALL))
    assert bool((tables[0][1] == 1).all()) is eligible
    if np.isfinite(largest):
        assert tpu_oracle.relative_error(out, tpu_oracle.attention(q, k, v, q).out) < 1e-5


def test_uniform_falls_back_as_a_whole():
    q, k, v, dout = arrays()
    q = q.at[0, 150].mul(100.0)
    result = with_gradients(q, k, v, dout, uniform=True)
    tpu_oracle.assert_close(result, tpu_oracle.attention(q, k, v, dout)._asdict(), "float32", factor=3)


def test_uniform_launch_has_one_body(monkeypatch):
    seen = only_launches(monkeypatch)
    q, k, v, _ = arrays()
    jax.eval_shape(lambda *x: fixed_m_attention(*x, block_sizes=SMALL, uniform=True), q, k, v)
    assert sorted(which.value for which in seen) == ["online", "uniform"]
    seen.clear()
    jax.eval_shape(lambda *x: fixed_m_attention(*x, block_sizes=SMALL), q, k, v)
    assert seen == [Launch.HYBRID]


@pytest.mark.parametrize("uniform", [False, True])
def test_batches_are_isolated(uniform):
    """An ineligible member of a batch, with a NaN in it, changes nothing about the others."""
    q, k, v, _ = (jnp.stack(x) for x in zip(*(arrays(seed=s) for s in range(3)), strict=True))
    call = jax.jit(jax.vmap(lambda *x: fixed_m_attention(*x, block_sizes=SMALL, uniform=uniform)))
    clean = np.asarray(call(q, k, v))
    dirty = np.asarray(call(q.at[1].mul(1000.0).at[1, 0, 0, 0].set(jnp.nan), k, v))
    np.testing.assert_array_equal(clean[[0, 2]], dirty[[0, 2]])
    want = tpu_oracle.attention(q[0], k[0], v[0], q[0]).out
    assert tpu_oracle.relative_error(clean[0], want) < 1e-5


def test_centering_admits_what_the_keys_as_they_are_do_not():
    q, k, v, dout = arrays()
    k = k + 40.0
    assert not metadata_of(q, k, v, v_ok=True)[1].any()
    options = centering(q, k)
    assert metadata_of(q, k, v, v_ok=True, **options)[1].all()
    result = with_gradients(q, k, v, dout, uniform=True, **options)
    want = tpu_oracle.attention(q, k, v, dout)._asdict()
    # Logits of up to 400 in fp32 are off by 2e-5.
    tpu_oracle.assert_close(result, want, "float32", factor=12)


def test_enormous_offset_is_refused_by_the_rounding_allowance():
    q, k, v, _ = arrays()
    options = centering(q, k + 1e6)
    assert not metadata_of(q, k + 1e6, v, v_ok=True, **options)[1].any()
    assert np.isfinite(np.asarray(fixed_m_attention(q, k + 1e6, v, block_sizes=SMALL, **options))).all()


def test_wide_gate_runs():
    """A bound between the gates, centered logits: within 2^-8 max|v|; strict falls back."""
    q, k, v, _ = arrays(dtype="bfloat16")
    q, v = q * jnp.bfloat16(9.0), jnp.clip(v, -2, 2)
    options = centering(q, k)
    strict, wide = (metadata_of(q, k, v, v_ok=True, gate=gate, **options)[1] for gate in ("strict", "wide"))
    assert wide.sum() > strict.sum()
    out = fixed_m_attention(q, k, v, block_sizes=SMALL, gate="wide", **options)
    assert np.abs(np.asarray(out, np.float64) - tpu_oracle.attention(q, k, v, q).out).max() <= 2.0**-7 * 2


def test_adversarial_centered_keys_are_exact():
    """Keys half at +a, half at -a in one direction, and a bound of 231.01 because of another: exact by falling back."""
    n, c = 4096, np.log2(np.e) / 8
    a = np.log2(7.5) / 2
    sign = np.where(np.arange(n) % 2 == 0, 1.0, -1.0)
    k = np.zeros((1, n, 64), np.float32)
    k[0, :, 0] = sign * a / c
    k[0, :, 1] = sign * np.sqrt(231.01**2 - a**2) / c
    q = np.zeros((1, 128, 64), np.float32)
    q[..., 0] = 1.0
    v = np.stack([np.where(sign > 0, 1.0, 0.0)] * 64, axis=-1)[None].astype(np.float32)
    q, k, v = map(jnp.asarray, (q, k, v))
    out = fixed_m_attention(q, k, v, block_sizes=BlockSizes(128, 1024), **centering(q, k))
    np.testing.assert_allclose(np.asarray(out), 15 / 17, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_unsafe_dtypes_fall_back(dtype):
    zeros, ones = jnp.zeros((1, 70, 64), dtype), jnp.ones((1, 70, 64), dtype)
    out = fixed_m_attention(zeros, zeros, ones, block_sizes=SMALL)
    assert out.dtype == dtype
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1.0)
    if dtype == "float16":
        x = arrays(dtype=dtype)
        tpu_oracle.assert_close(with_gradients(*x), tpu_oracle.attention(*x)._asdict(), "bfloat16")


@pytest.mark.parametrize("seed", [1, 7])
@pytest.mark.parametrize("uniform", [False, True])
def test_two_cores_any_order_no_race(seed, uniform):
    interpret = pltpu.InterpretParams(
        random_seed=seed, num_cores_or_threads=2, detect_races=True, uninitialized_memory="nan"
    )
    q, k, v, _ = arrays(kv_heads=2)
    q = q.at[0, 150].mul(1.0 if uniform else 100.0)
    out = fixed_m_attention(q, k, v, block_sizes=SMALL, uniform=uniform, interpret=interpret)
    assert tpu_oracle.relative_error(out, tpu_oracle.attention(q, k, v, q).out) < 1e-4
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    assert not interpret_pallas_call.races.races_found


# --- contracts ------------------------------------------------------------------------------------------------------

NORMS = FixedMNorms(q=jnp.ones((2, 2)), k=jnp.ones(1))
CENTERED = dataclasses.replace(NORMS, centered=True)
MEAN = jnp.zeros((1, 64))
REFUSALS = [
    ({"norms": dataclasses.replace(NORMS, q=jnp.ones(2))}, "norms.q (per_q_block=True)", "q_blocks=2", "(2,)"),
    ({"norms": NORMS, "per_q_block": False}, "norms.q (per_q_block=False)", "(H=2,)", "(2, 2)"),
    ({"norms": dataclasses.replace(NORMS, k=jnp.ones(2))}, "norms.k", "H_kv=1", "(2,)"),
    ({"norms": dataclasses.replace(NORMS, mean=jnp.ones(2))}, "norms.mean", "q_blocks=2", "(2,)"),
    ({"norms": dataclasses.replace(NORMS, k=jnp.ones(1, jnp.int32))}, "norms.k", "float32", "int32"),
    ({"norms": (NORMS.q, NORMS.k)}, "norms", "FixedMNorms", "tuple"),
    ({"norms": CENTERED}, "k_mean", "the mean", "None"),
    ({"k_mean": MEAN}, "norms", "norms of centered keys", "None"),
    ({"k_mean": MEAN, "norms": NORMS}, "norms", "norms of centered keys", "norms of the keys as they are"),
    ({"k_mean": jnp.zeros((1, 128)), "norms": CENTERED}, "k_mean", "(H_kv=1, D=64)", "(1, 128)"),
    ({"k_mean": MEAN.astype(jnp.bfloat16), "norms": CENTERED}, "k_mean", "float32", "bfloat16"),
    ({"gate": "wide"}, "k_mean", "a tensor", "None"),
    ({"gate": 231}, "gate", "'strict', 'wide'", "231"),
    ({"uniform": 1}, "uniform", "a bool", "int"),
    ({"per_q_block": jnp.array(True)}, "per_q_block", "a bool", "Array"),
    ({"fixed_m_norms_squared": None}, "fixed_m_norms_squared", "a bool", "NoneType"),
]


@pytest.mark.parametrize(("change", "argument", "expected", "got"), REFUSALS, ids=lambda x: str(x)[:30])
def test_refusals(change, argument, expected, got):
    q, k, v, _ = arrays()
    with pytest.raises(ContractError) as caught:
        fixed_m_attention(q, k, v, block_sizes=SMALL, **change)
    assert caught.value.argument.startswith(argument)
    assert expected in caught.value.expected
    assert got in caught.value.got


def test_options_are_keyword_only():
    q, k, v, _ = arrays()
    with pytest.raises(TypeError):
        fixed_m_attention(q, k, v, None, False)
    with pytest.raises(TypeError):
        FixedM(True)


@pytest.mark.parametrize("shape", [(2, 2), (2, 2, 3), (3, 2, 2)])
def test_metadata_of_another_shape(shape):
    q, k, v, _ = arrays(q_len=256, kv_len=256)
    problem = check_attention(q, k, v, scale=None, orig_q_seq_len=None, orig_kv_seq_len=None)
    with pytest.raises(ContractError) as caught:
        forward(
            q, k, v, None, None, None, FixedOperands(jnp.zeros(shape), None), problem=problem, tiles=SMALL.forward,
            which=Launch.HYBRID, out_dtype=jnp.float32, interpret=True,
        )  # fmt: skip
    assert caught.value.argument == "metadata"
    assert "(2, H=2, q_tiles=2)" in caught.value.expected
