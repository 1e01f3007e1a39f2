"""What the kernels rely on in a Pallas TPU grid, and that breaking it is noticed.

"arbitrary" dimensions run one after the other, in lexicographic order, on one core; only "parallel" ones may be
reordered or split over cores (docs.jax.dev/en/latest/pallas/tpu/details.html: "the iteration proceeds in lexicographic
order", and docs.jax.dev/en/latest/pallas/tpu/pipelining.html on dimension_semantics). So a sum over an "arbitrary"
dimension in scratch memory is sound, and an output block may be written again in consecutive steps.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tpu_oracle
from jax.experimental.pallas import tpu as pltpu

import cudnn_dsa_tpu.backward
import cudnn_dsa_tpu.forward
from cudnn_dsa_tpu import BlockSizes, splash_attention
from cudnn_dsa_tpu.block_sizes import Tiles
from cudnn_dsa_tpu.contracts import check_attention

SMALL = BlockSizes(block_q=128, block_kv=128)
SEEDS = [1, 7]


def inputs(q_len=256, kv_len=512, heads=2, head_dim=64):
    rng = np.random.default_rng(0)
    shapes = [(heads, q_len, head_dim), (heads, kv_len, head_dim), (heads, kv_len, head_dim), (heads, q_len, head_dim)]
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def errors(interpret, **sizes):
    """Relative errors of outputs and gradients by name."""
    q, k, v, dout = inputs(**sizes)

    def attention(q, k, v):
        return splash_attention(q, k, v, block_sizes=SMALL, interpret=interpret)

    @jax.jit
    def both(q, k, v, dout):
        out, pullback = jax.vjp(attention, q, k, v)
        return out, *pullback(dout)

    want = tpu_oracle.attention(q, k, v, dout)._asdict()
    results = zip(("out", "dq", "dk", "dv"), both(q, k, v, dout), strict=True)
    return {name: tpu_oracle.relative_error(x, want[name]) for name, x in results}


def launch_with(monkeypatch, module, change):
    """Every kernel of ``module`` is launched with ``change(options)`` applied."""
    original = module.launch

    def launch(kernel, operands, **options):
        change(options)
        return original(kernel, operands, **options)

    monkeypatch.setattr(module, "launch", launch)


@pytest.mark.parametrize("seed", SEEDS)
def test_order_of_the_grid(seed):
    """For every setting of the parallel dimensions the arbitrary ones run in lexicographic order on one core."""
    points = []

    def record(token, point, core):
        points.append((tuple(int(i) for i in point), int(core)))
        return token

    interpret = pltpu.InterpretParams(random_seed=seed, num_cores_or_threads=2, grid_point_recorder=record)
    q, k, v, _ = inputs(heads=4)
    jax.block_until_ready(splash_attention(q, k, v, block_sizes=SMALL, interpret=interpret))
    jax.effects_barrier()
    grid = (4, 1, 2, 4)
    assert sorted(point for point, _ in points) == list(itertools.product(*map(range, grid)))
    by_parallel: dict = {}
    for point, core in points:
        by_parallel.setdefault(point[:3], []).append((point[3], core))
    for steps in by_parallel.values():
        assert [step for step, _ in steps] == list(range(4))
        assert len({core for _, core in steps}) == 1
    assert len({core for _, core in points}) == 2


def test_no_output_block_is_left_and_entered_again():
    """dk and dv blocks: all writes to one are consecutive. Slots of dq: revisited after three steps or more."""
    for kv_heads, group, q_tiles, kv_tiles, slots in itertools.product((1, 2), (1, 2), (1, 2), (4, 5, 7), (3,)):
        last_block, left, written = None, set(), {}
        for step, (h, j, g, i) in enumerate(itertools.product(*map(range, (kv_heads, kv_tiles, group, q_tiles)))):
            if (h, j) != last_block:
                assert (h, j) not in left
                left.add(last_block)
                last_block = (h, j)
            slot = (j % slots, h * group + g, i)
            assert step - written.get(slot, -99) >= 3
            written[slot] = step


@pytest.mark.parametrize("seed", SEEDS)
def test_breakage_accumulator_on_a_parallel_dimension(monkeypatch, seed):
    launch_with(monkeypatch, cudnn_dsa_tpu.forward, lambda options: options.update(semantics=("parallel",) * 4))
    assert errors(pltpu.InterpretParams(random_seed=seed))["out"] > 1e-2


def test_breakage_accumulator_split_over_cores(monkeypatch):
    """One head and one query tile: the second core takes over in the middle of the sum over key tiles."""
    launch_with(monkeypatch, cudnn_dsa_tpu.forward, lambda options: options.update(semantics=("parallel",) * 4))
    interpret = pltpu.InterpretParams(num_cores_or_threads=2)
    assert errors(interpret, q_len=128, heads=1)["out"] > 1e-2


def test_breakage_one_slot():
    """One slot that is read again in the very next step holds what it held before the previous step."""
    q, k, v, dout = inputs(q_len=128, heads=1)
    good, bad = (slot_gradient(q, k, v, dout, slots) for slots in (3, 1))
    want = tpu_oracle.attention(q, k, v, dout).dq
    assert tpu_oracle.relative_error(good, want) < 1e-5
    assert not tpu_oracle.relative_error(bad, want) < 1e-2


def slot_gradient(q, k, v, dout, slots):
    """dq by the fused kernel with any number of slots, which the public interface would refuse."""
    from cudnn_dsa_tpu.attention import delta_rows, lse_rows
    from cudnn_dsa_tpu.backward import Gradients, Operands, backward

    problem = check_attention(q, k, v, scale=None, orig_q_seq_len=None, orig_kv_seq_len=None)
    want = tpu_oracle.attention(q, k, v, dout)
    operands = Operands(
        q=q,
        dout=dout,
        lse=lse_rows(jnp.asarray(want.lse / np.log(2), jnp.float32)),
        delta=delta_rows(jnp.asarray(want.out, jnp.float32), dout)[:, None, :],
        k=k,
        v=v,
        segment_ids=None,
    )
    dtypes = Gradients(jnp.float32, jnp.float32, jnp.float32)
    return backward(
        operands, problem=problem, sizes=SMALL, fused=True, dq_reduction_steps=slots, dtypes=dtypes, interpret=True
    ).q


def test_breakage_unwritten_output(monkeypatch):
    """A grid that stops short leaves NaN where the output was never written."""

    def shorten(options):
        heads, group, q_tiles, kv_tiles = options["grid"]
        options["grid"] = (heads, group, q_tiles - 1, kv_tiles)

    launch_with(monkeypatch, cudnn_dsa_tpu.forward, shorten)
    assert errors(None)["out"] == np.inf


def test_kernels_never_read_beyond_the_valid_keys():
    """NaN in the padding of the last key tile, put there behind the wrapper's back."""
    q, k, v, _ = inputs(q_len=128, kv_len=256, heads=1)
    problem = dataclasses.replace(
        check_attention(q, k, v, scale=None, orig_q_seq_len=None, orig_kv_seq_len=None), valid_kv=200
    )
    poisoned = [x.at[:, 200:].set(jnp.nan) for x in (k, v)]
    out, lse = cudnn_dsa_tpu.forward.forward(
        q, *poisoned, None, None, problem=problem, tiles=Tiles(128, 128, 128), out_dtype=jnp.float32, interpret=True
    )
    want = tpu_oracle.attention(q, k[:, :200], v[:, :200], out)
    assert tpu_oracle.relative_error(out, want.out) < 1e-5
    assert tpu_oracle.relative_error(np.asarray(lse)[:, 0] * np.log(2), want.lse) < 1e-5


def test_slots_are_poisoned(monkeypatch):
    """The interpreter hands out zeros for lax.empty; with NaN in the untouched slots dq is the same."""
    monkeypatch.setattr(cudnn_dsa_tpu.backward.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    assert max(errors(None).values()) < 1e-5


GARBAGE = [float("nan"), 1000.0]


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize(
    ("valid", "block", "options"),
    [
        ((100, 300), 128, {}),
        ((100, 300), 128, {"use_fused_bwd_kernel": False}),
        pytest.param((1000, 1350), 512, {}, marks=pytest.mark.slow),
    ],
)
def test_garbage_beyond_the_lengths(garbage, valid, block, options):
    """Whatever lies beyond the valid lengths of q, k, v and dout: outputs and gradients are as if it were not there."""
    valid_q, valid_kv = valid
    arrays = inputs(q_len=valid_q, kv_len=valid_kv)
    want = tpu_oracle.attention(*arrays)._asdict()
    tails = (13, 427, 427, 13)
    q, k, v, dout = (
        jnp.pad(x, ((0, 0), (0, tail), (0, 0)), constant_values=garbage) for x, tail in zip(arrays, tails, strict=True)
    )

    def call(q, k, v):
        return splash_attention(
            q, k, v, orig_q_seq_len=valid_q, orig_kv_seq_len=valid_kv, block_sizes=BlockSizes(block, block),
            save_residuals=True, **options,
        )  # fmt: skip

    @jax.jit
    def both(q, k, v, dout):
        (out, lse), pullback = jax.vjp(call, q, k, v)
        return out, lse, *pullback((dout, jnp.zeros_like(lse)))

    names = ("out", "lse", "dq", "dk", "dv")
    results = dict(zip(names, both(q, k, v, dout), strict=True))
    for name, x in results.items():
        valid_len = valid_kv if name in ("dk", "dv") else valid_q
        beyond = np.asarray(x[:, valid_len:])
        assert (np.isneginf(beyond) if name == "lse" else beyond == 0).all(), name
        results[name] = x[:, :valid_len]
    tpu_oracle.assert_close(results, want, "float32")
