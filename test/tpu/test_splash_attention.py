"""Splash attention and its gradients against the float64 oracle, on every path of the kernels."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tpu_oracle
from jax.experimental.pallas import tpu as pltpu

from cudnn_dsa_tpu import BlockSizes, SegmentIds, splash_attention
from cudnn_dsa_tpu.attention import RESIDUAL_NAMES

SMALL = BlockSizes(block_q=128, block_kv=128)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. Lengths are chosen against the blocks: ragged, shorter than a block, one tile, four tiles."""

    q_len: int
    kv_len: int
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    head_dim_v: int = 64
    dtype: str = "float32"
    blocks: BlockSizes | str = SMALL
    sink: bool = False
    segments: bool = False
    options: tuple = ()

    def __str__(self):
        parts = [f"{self.heads}/{self.kv_heads}h", f"{self.q_len}x{self.kv_len}", f"d{self.head_dim}-{self.head_dim_v}"]
        parts += [self.dtype, *(["sink"] if self.sink else []), *(["segments"] if self.segments else [])]
        return "-".join(parts + [f"{name}={value}" for name, value in self.options])


FUSED_FULL = (("dq_reduction_steps", None),)
UNFUSED = (("use_fused_bwd_kernel", False),)
WIDE = BlockSizes(block_q=128, block_kv=256, block_kv_compute=128)
UNEVEN = BlockSizes(
    block_q=256,
    block_kv=128,
    block_q_dkv=128,
    block_kv_dkv=256,
    block_kv_dkv_compute=128,
    block_q_dq=384,
    block_kv_dq=256,
)

CASES = [
    Case(256, 512),  # whole tiles, four of keys: one slot is revisited
    Case(200, 897, kv_heads=2),  # eight tiles of keys, the last with one key
    Case(200, 300, heads=4, kv_heads=2, options=FUSED_FULL),
    Case(130, 600, options=FUSED_FULL),
    Case(130, 600, options=UNFUSED),
    Case(300, 700, head_dim=72, head_dim_v=200, blocks=WIDE, dtype="bfloat16"),
    Case(300, 700, blocks=UNEVEN, options=UNFUSED, dtype="bfloat16"),
    Case(130, 700, head_dim=128, head_dim_v=128, blocks=WIDE, dtype="bfloat16", sink=True, segments=True),
    Case(260, 530, heads=2, kv_heads=2, sink=True),
    Case(200, 530, segments=True),
    Case(200, 300, segments=True, options=UNFUSED),
    Case(100, 260, heads=1, head_dim=256, head_dim_v=256, dtype="bfloat16"),
    Case(5, 3, heads=1, sink=True, blocks="auto"),
    pytest.param(Case(1350, 1777, blocks=BlockSizes(512, 512), head_dim=128, head_dim_v=128), marks=pytest.mark.slow),
    pytest.param(
        Case(
            1350, 1777, blocks=BlockSizes(512, 512, 256), head_dim=128, head_dim_v=128, dtype="bfloat16", segments=True
        ),
        marks=pytest.mark.slow,
    ),
]


def make_inputs(case: Case, seed: int = 0):
    rng = np.random.default_rng(seed)
    shapes = {
        "q": (case.heads, case.q_len, case.head_dim),
        "k": (case.kv_heads, case.kv_len, case.head_dim),
        "v": (case.kv_heads, case.kv_len, case.head_dim_v),
        "dout": (case.heads, case.q_len, case.head_dim_v),
    }
    inputs = {name: jnp.asarray(rng.standard_normal(shape), case.dtype) for name, shape in shapes.items()}
    inputs["sink"] = jnp.asarray(rng.standard_normal(case.heads), jnp.float32) if case.sink else None
    inputs["ids"] = None
    if case.segments:  # sorted as in packing; the last id of the queries has no key
        ids = [np.sort(rng.integers(0, n, size)) for n, size in ((4, case.q_len), (3, case.kv_len))]
        inputs["ids"] = SegmentIds(*(jnp.asarray(x, jnp.int32) for x in ids))
    return inputs


def run(case: Case, inputs, dlse=None, transform=lambda call: call, **options) -> dict:
    """Outputs and gradients by name; dlse adds the logsumexp's cotangent. ``transform``: of the function that is
    differentiated."""

    def call(q, k, v, sink):
        return splash_attention(
            q, k, v, attn_sink=sink, segment_ids=inputs["ids"], block_sizes=case.blocks, save_residuals=True,
            **{**dict(case.options), **options},
        )  # fmt: skip

    @jax.jit
    def both(q, k, v, sink, dout):
        (out, lse), pullback = jax.vjp(transform(call), q, k, v, sink)
        return out, lse, *pullback((dout, jnp.zeros_like(lse) if dlse is None else dlse))

    out, lse, dq, dk, dv, dsink = both(*(inputs[name] for name in ("q", "k", "v", "sink", "dout")))
    assert out.dtype == dq.dtype == dk.dtype == dv.dtype == case.dtype
    assert lse.dtype == jnp.float32
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv, **({"dsink": dsink} if case.sink else {})}


def check(case: Case, inputs, result, *, dlse=None, scale=None, **tolerance) -> None:
    names = ("q", "k", "v", "dout")
    arrays = (inputs[name] for name in names)
    want = tpu_oracle.attention(*arrays, ids=inputs["ids"], sink=inputs["sink"], dlse=dlse, scale=scale)._asdict()
    empty = np.isneginf(want["lse"])
    np.testing.assert_array_equal(np.isneginf(result["lse"]), empty)
    for x in (want, result):
        x["lse"] = np.where(empty, 0.0, x["lse"])
    tpu_oracle.assert_close(result, want, case.dtype, **tolerance)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients(case):
    inputs = make_inputs(case)
    check(case, inputs, run(case, inputs))


@pytest.mark.parametrize("seed", [1, 7])
@pytest.mark.parametrize("options", [(), FUSED_FULL, UNFUSED], ids=["slots", "full", "unfused"])
def test_two_cores_any_order_no_race(seed, options):
    """Parallel dimensions in random order, split over two cores, with the race detector on."""
    case = Case(130, 600, kv_heads=2, options=options)
    interpret = pltpu.InterpretParams(random_seed=seed, num_cores_or_threads=2, detect_races=True)
    inputs = make_inputs(case)
    check(case, inputs, run(case, inputs, interpret=interpret))
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    assert not interpret_pallas_call.races.races_found


def test_one_key():
    """With one key the gradients of q and k are exactly zero; what is left is rounding."""
    case = Case(1, 1, heads=1, blocks="auto")
    inputs = make_inputs(case)
    check(case, inputs, run(case, inputs), floor=1.0)


def test_logsumexp_is_differentiable():
    case = Case(130, 200, sink=True)
    inputs = make_inputs(case)
    dlse = jnp.asarray(np.random.default_rng(3).standard_normal((2, 130)), jnp.float32)
    check(case, inputs, run(case, inputs, dlse=dlse), dlse=dlse)


def test_scale_is_used_as_given():
    case = Case(100, 200)
    inputs = make_inputs(case)
    check(case, inputs, run(case, inputs, scale=-0.3), scale=-0.3)


@pytest.mark.usefixtures("checkpoint_of_interpreted_kernels")
@pytest.mark.parametrize("policy", ["nothing", "named"])
def test_checkpoint(policy):
    policies = jax.checkpoint_policies
    saved = policies.save_only_these_names(*RESIDUAL_NAMES) if policy == "named" else policies.nothing_saveable
    case = Case(130, 300, kv_heads=2, sink=True, segments=True)
    inputs = make_inputs(case)
    dlse = jnp.asarray(np.random.default_rng(3).standard_normal((2, 130)), jnp.float32)
    result = run(case, inputs, dlse=dlse, transform=functools.partial(jax.checkpoint, policy=saved))
    check(case, inputs, result, dlse=dlse)


def test_hostile_logits():
    """Logits of +-1757 (where exp overflows), a constant row, and a key that takes all the weight.

    All within 1e-5 but dk, which holds dS q of the query that is 200 times the others. Its dS is P (dP - delta) = 0,
    the difference of two equal sums of D terms: each is off by sqrt(D) u of its size (Higham, Mary 2019), u = 2^-24.
    """
    case = Case(128, 300, sink=True)
    inputs = make_inputs(case)
    inputs["q"] = inputs["q"].at[:, 0].mul(200.0).at[:, 1].set(0.0)
    inputs["k"] = inputs["k"].at[:, 5].mul(4.0)
    assert 1000 < np.abs(np.einsum("hsd,gtd->hst", inputs["q"], inputs["k"])).max() / 8 < 2000
    result = run(case, inputs)
    want = tpu_oracle.attention(*(inputs[name] for name in ("q", "k", "v", "dout")), sink=inputs["sink"]).dk
    dk = np.asarray(result.pop("dk"), np.float64)
    q, dout = (np.asarray(inputs[name], np.float64)[:, 0] for name in ("q", "dout"))
    best = np.asarray(inputs["k"], np.float64)[0] @ q.T
    v = np.asarray(inputs["v"], np.float64)[0, best.argmax(axis=0)]
    u = np.sqrt(case.head_dim) * 2.0**-24
    bound = sum(2 * u * np.abs(v[h] * dout[h]).sum() * np.linalg.norm(q[h]) / 8 for h in range(2))
    assert np.linalg.norm(dk - want) <= 1e-5 * np.linalg.norm(want) + bound
    check(case, inputs, result)


@pytest.mark.parametrize(("amplitude", "above"), [(1.0, ""), (100.0, "out dq dk dv")])
def test_logits_that_nearly_cancel(amplitude, above):
    """Keys with much in common, so that the logits of a query are large and close: an fp32 logit of 430 is off by more
    than 1e-5 however it is computed, and so is its weight. Where it is above 1e-5, the bound is what remains when only
    what a flash backward in fp32 rounds by construction is rounded (it computes the logits again, in another order than
    the forward that gave lse and out), and the rest is float64 (``tpu_oracle.attention(fp32=True)``).
    """
    case = Case(128, 300)
    inputs = make_inputs(case)
    inputs["q"] = inputs["q"] * amplitude
    inputs["k"] = inputs["k"][:, :1] + inputs["k"] / amplitude
    arrays = [inputs[name] for name in ("q", "k", "v", "dout")]
    want, floor = (tpu_oracle.attention(*arrays, fp32=fp32)._asdict() for fp32 in (False, True))
    names = ("out", "lse", "dq", "dk", "dv")
    floors = {name: tpu_oracle.relative_error(floor[name], want[name]) for name in names}
    assert {name for name in names if floors[name] > 1e-5} == set(above.split())
    result = run(case, inputs)
    for name in names:
        assert tpu_oracle.relative_error(result[name], want[name]) <= max(1e-5, 1.5 * floors[name]), name


@pytest.mark.parametrize("options", [(), UNFUSED], ids=["fused", "unfused"])
@pytest.mark.parametrize("amplitude", [4.0, pytest.param(40.0, marks=pytest.mark.slow)])
def test_bf16_keeps_its_digits_at_large_logits(amplitude, options):
    """Logits up to 18 and 180. A bf16 out in delta, or a q rounded again after scaling, costs 6e-3 and 4e-2 here."""
    case = Case(128, 256, heads=1, dtype="bfloat16", options=options)
    inputs = make_inputs(case)
    inputs["q"] = inputs["q"] * jnp.bfloat16(amplitude)
    check(case, inputs, run(case, inputs), factor=0.8)


def test_keys_of_other_segments_do_not_leak():
    """A NaN-free but enormous value in another segment leaves no trace, forward or backward."""
    case = Case(130, 260, segments=True)
    inputs = make_inputs(case)
    other = np.asarray(inputs["ids"].kv) == 1
    inputs["v"] = jnp.where(other[None, :, None], 1e30, inputs["v"])
    inputs["dout"] = jnp.where((np.asarray(inputs["ids"].q) == 1)[None, :, None], 0.0, inputs["dout"])
    result = run(case, inputs)
    rows = np.asarray(inputs["ids"].q) != 1
    small = {**inputs, "v": jnp.where(other[None, :, None], 0.0, inputs["v"])}
    want = tpu_oracle.attention(*(small[n] for n in ("q", "k", "v", "dout")), ids=inputs["ids"])
    assert tpu_oracle.relative_error(np.asarray(result["out"])[:, rows], want.out[:, rows]) < 1e-5
    assert tpu_oracle.relative_error(np.asarray(result["dq"])[:, rows], want.dq[:, rows]) < 1e-5


def test_batches_by_vmap():
    case = Case(130, 200, sink=True, segments=True)
    batch = [make_inputs(case, seed) for seed in (0, 1)]
    stacked = {name: jax.tree.map(lambda *x: jnp.stack(x), *(b[name] for b in batch)) for name in batch[0]}

    def one(q, k, v, sink, ids, dout):
        def call(q, k, v, sink):
            return splash_attention(q, k, v, attn_sink=sink, segment_ids=ids, block_sizes=SMALL)

        out, pullback = jax.vjp(call, q, k, v, sink)
        return (out, *pullback(dout))

    names = ("q", "k", "v", "sink", "ids", "dout")
    results = jax.jit(jax.vmap(one))(*(stacked[name] for name in names))
    for n, inputs in enumerate(batch):
        arrays = (inputs[name] for name in ("q", "k", "v", "dout"))
        want = tpu_oracle.attention(*arrays, ids=inputs["ids"], sink=inputs["sink"])._asdict()
        result = dict(zip(("out", "dq", "dk", "dv", "dsink"), (r[n] for r in results), strict=True))
        tpu_oracle.assert_close(result, want, case.dtype)
