"""The real TPU compiler on every kernel variant and chip; its schedules; the overlap of a ring. Needs libtpu."""

import functools
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from cudnn_dsa_tpu import BlockSizes, SegmentIds, aot, attention, bundles, launch, ring_attention, splash_attention
from cudnn_dsa_tpu.__main__ import main
from cudnn_dsa_tpu.attention import RESIDUAL_NAMES
from cudnn_dsa_tpu.block_sizes import resolve, vmem_bytes
from cudnn_dsa_tpu.chips import CHIPS, current_chip
from cudnn_dsa_tpu.contracts import check_attention

pytest.importorskip("libtpu", reason="the TPU compiler is not installed (extra tpu-aot)")

BLOCKS = BlockSizes(block_q=256, block_kv=256, block_kv_compute=128)
VARIANTS = {
    "slots": {},
    "full": {"dq_reduction_steps": None},
    "unfused": {"use_fused_bwd_kernel": False},
    "segments-sink": {"segments": True, "sink": True},
    "unfused-segments": {"use_fused_bwd_kernel": False, "segments": True},
    "fp32": {"dtype": "float32"},
    "d64": {"d": 64, "dv": 64},
    "d72-200": {"d": 72, "dv": 200},
    "d256": {"d": 256, "dv": 256},
    "fp32-d256-sink": {"dtype": "float32", "d": 256, "dv": 256, "sink": True, "segments": True},
}
# The variants cover the kernels' branches. One chip compiles nearly all of them, every chip the one with most branches.
MATRIX = [("v6e", name) for name in VARIANTS if name not in ("fp32-d256-sink", "d256")]
MATRIX += [(chip, name) for chip in ("v5e", "v5p", "tpu7x") for name in ("segments-sink", "unfused")]
SLOW = [(chip, name) for chip in CHIPS for name in VARIANTS if (chip, name) not in MATRIX]


@pytest.mark.parametrize(("chip", "variant"), MATRIX + [pytest.param(*point, marks=pytest.mark.slow) for point in SLOW])
def test_compiles(chip, variant):
    """Ragged lengths: 700 queries and 897 keys, so the last key tile has one key."""
    aot.prepare()
    options = dict(VARIANTS[variant])
    d, dv = options.pop("d", 128), options.pop("dv", 128)
    dtype, sink, segments = options.pop("dtype", "bfloat16"), options.pop("sink", False), options.pop("segments", False)
    q_len, kv_len, heads, kv_heads = 700, 897, 4, 2

    def both(q, k, v, dout, ids_q, ids_kv, sinks):
        def attention(q, k, v, sinks):
            return splash_attention(
                q, k, v, segment_ids=SegmentIds(ids_q, ids_kv) if segments else None,
                attn_sink=sinks if sink else None, block_sizes=BLOCKS, interpret=False, **options,
            )  # fmt: skip

        out, pullback = jax.vjp(attention, q, k, v, sinks)
        return out, pullback(dout)

    shapes = [(heads, q_len, d), (kv_heads, kv_len, d), (kv_heads, kv_len, dv), (heads, q_len, dv)]
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    structs += [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (q_len, kv_len)]
    structs += [jax.ShapeDtypeStruct((heads,), jnp.float32)]
    compiled = aot.compile_for(aot.topology_mesh(CHIPS[chip]), both, *((x, P()) for x in structs))
    assert aot.overlap(compiled.as_text()).count("K") == (3 if "unfused" in variant else 2)


@pytest.mark.parametrize("tail", [1, 9, 129, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 100, 255))])
@pytest.mark.parametrize("fused", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_ragged_tails_compile(tail, fused):
    """Slices of every alignment; one key makes products with vectors, for which Mosaic has another lowering."""
    aot.prepare()

    def gradients(q, k, v):
        def attention(*qkv):
            return splash_attention(*qkv, block_sizes=BLOCKS, use_fused_bwd_kernel=fused, interpret=False).sum()

        return jax.grad(attention, argnums=(0, 1, 2))(q, k, v)

    shapes = [(1, 300, 128), (1, 256 + tail, 128), (1, 256 + tail, 128)]
    structs = [(jax.ShapeDtypeStruct(shape, jnp.bfloat16), P()) for shape in shapes]
    aot.compile_for(aot.topology_mesh(CHIPS["v6e"]), gradients, *structs)


@pytest.mark.parametrize(("policy", "kernels"), [("nothing", 3), ("named", 2)])
def test_checkpoint(policy, kernels):
    """Under jax.checkpoint the named residuals decide whether the forward kernel runs again."""
    aot.prepare()
    policies = jax.checkpoint_policies
    saved = policies.save_only_these_names(*RESIDUAL_NAMES) if policy == "named" else policies.nothing_saveable

    def loss(q, k, v):
        return jnp.sum(splash_attention(q, k, v, block_sizes=BLOCKS, interpret=False) ** 2)

    gradient = jax.value_and_grad(jax.checkpoint(loss, policy=saved), argnums=(0, 1, 2))
    x = (jax.ShapeDtypeStruct((2, 512, 128), jnp.bfloat16), P())
    compiled = aot.compile_for(aot.topology_mesh(CHIPS["v6e"]), gradient, x, x, x)
    assert aot.overlap(compiled.as_text()) == "K" * kernels


def test_chip_is_that_of_the_abstract_mesh():
    aot.prepare()
    for chip in CHIPS.values():
        with jax.sharding.use_abstract_mesh(aot.topology_mesh(chip).abstract_mesh):
            assert current_chip() is chip


def ring_program(ring, *, backward, bidirectional=False, heads=8, length=2048, d=128):
    """The compiled ring of one shard's ``length`` on v6e."""
    aot.prepare()
    mesh = aot.topology_mesh(CHIPS["v6e"], (ring,))
    spec = P(None, "ring")
    attention = functools.partial(
        ring_attention, axis_name="ring", bidirectional=bidirectional, interpret=False, block_sizes=BlockSizes(512, 512)
    )
    sharded = jax.shard_map(attention, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)

    def both(q, k, v, dout):
        if not backward:
            return sharded(q, k, v)
        return jax.vjp(sharded, q, k, v)[1](dout)

    x = jax.ShapeDtypeStruct((heads, ring * length, d), jnp.bfloat16)
    return aot.compile_for(mesh, both, *((x, spec),) * 4)


RINGS = [4, pytest.param(2, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]


@pytest.mark.parametrize("ring", RINGS)
def test_ring_forward_overlaps(ring):
    """Every hop's permutes start before a kernel and are awaited after it; none is awaited before the first kernel."""
    order = aot.overlap(ring_program(ring, backward=False).as_text())
    assert order == "SSKDD" * (ring - 1) + "K"


@pytest.mark.parametrize("ring", RINGS)
def test_ring_backward_overlaps(ring):
    """Every transfer starts before a kernel and is awaited behind it, the sums' last way home too."""
    order = aot.overlap(ring_program(ring, backward=True).as_text())
    assert order.count("K") == 2 * ring + 1
    assert order.count("S") == order.count("D") == 6 * (ring - 1)
    parts = order.split("K")
    assert "D" not in parts[0], order
    # Within a part no transfer is awaited after one was started, so what is awaited started before an earlier kernel.
    assert all("D" not in part[part.find("S") :] for part in parts if "S" in part), order
    assert "S" not in parts[-1], order


def test_ring_of_one_does_not_communicate():
    assert aot.overlap(ring_program(1, backward=True).as_text()) == "KK"


@pytest.mark.parametrize("backward", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_barrier_saves_memory(monkeypatch, backward):
    """Against the same loop without the barriers: at most 0.9 of the temporary memory."""
    ours = ring_program(4, backward=backward, length=4096)
    monkeypatch.setattr(jax.lax, "optimization_barrier", lambda x: x)
    plain = ring_program(4, backward=backward, length=4096)
    assert aot.overlap(plain.as_text()) != aot.overlap(ours.as_text())
    assert ours.memory_analysis().temp_size_in_bytes <= 0.9 * plain.memory_analysis().temp_size_in_bytes


def test_bundles_against_jax_splash():
    """In one process: the dump's flags are read once, when libtpu is loaded."""
    command = [sys.executable, "-m", "cudnn_dsa_tpu", "aot", "--shape", "2x4096x128", "--compare",
               "--blocks", "1024,1024,512"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    ratios = {}
    for line in result.stdout.splitlines():
        if line.endswith("of jax splash's bundles"):
            ratios[line.split(":")[0]] = float(line.split("=")[1].split()[0])
    assert ratios["forward"] <= 0.95
    assert ratios["backward"] <= 0.92


def compile_kernels(chip, shape, dtype, sizes, limit):
    """Forward and fused backward with so many bytes of vector memory, in all."""

    def both(q, k, v, dout):
        out, pullback = jax.vjp(functools.partial(splash_attention, block_sizes=sizes, interpret=False), q, k, v)
        return out, pullback(dout)

    aot.prepare()
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "current_chip", lambda: CHIPS["v6e"])  # which refuses nothing that is compiled here
        patch.setattr(launch, "current_chip", lambda: types.SimpleNamespace(vmem_limit_bytes=limit))
        x = (jax.ShapeDtypeStruct(shape, dtype), P())
        aot.compile_for(aot.topology_mesh(chip), both, x, x, x, x)


def estimate(shape, dtype, sizes):
    x = jax.ShapeDtypeStruct(shape, dtype)
    problem = check_attention(x, x, x, scale=None, orig_q_seq_len=None, orig_kv_seq_len=None)
    needs = vmem_bytes(sizes, problem)
    return max(needs["block_q x block_kv"], needs["block_q_dkv x block_kv_dkv"])


SIZES = [
    ("v6e", 128, "bfloat16", BlockSizes(512, 512)),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("v6e", 128, "bfloat16", BlockSizes(1024, 1024, 512)),
            ("v6e", 128, "bfloat16", BlockSizes(512, 2048, 256)),
            ("v6e", 256, "float32", BlockSizes(256, 1024, 512)),
            ("v5e", 128, "float32", BlockSizes(512, 512)),
            ("v5p", 256, "bfloat16", BlockSizes(512, 1024, 512)),
            ("v4", 128, "float32", BlockSizes(256, 512)),
            ("tpu7x", 256, "float32", BlockSizes(256, 512)),
        )
    ),
]


@pytest.mark.parametrize(("chip", "head_dim", "dtype", "sizes"), SIZES)
def test_estimated_vector_memory_suffices_and_is_needed(chip, head_dim, dtype, sizes):
    """With the estimate as its limit the compiler is content, with less than a half of it not."""
    shape = (2, 4096, head_dim)
    need = estimate(shape, dtype, sizes)
    compile_kernels(CHIPS[chip], shape, dtype, sizes, need)
    with pytest.raises(Exception, match=r"(?i)vmem"):
        compile_kernels(CHIPS[chip], shape, dtype, sizes, need * 0.45)


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "head_dim", "dtype"), [
    ("v4", 128, "bfloat16"), ("v4", 256, "float32"), ("v5p", 256, "float32"), ("tpu7x", 256, "float32"),
])  # fmt: skip
def test_auto_compiles_where_memory_is_short(chip, head_dim, dtype):
    shape = (2, 5000, head_dim)
    x = jax.ShapeDtypeStruct(shape, dtype)
    problem = check_attention(x, x, x, scale=None, orig_q_seq_len=None, orig_kv_seq_len=None)
    sizes = resolve("auto", problem, CHIPS[chip])
    compile_kernels(CHIPS[chip], shape, dtype, sizes, CHIPS[chip].vmem_limit_bytes)


@pytest.mark.slow
def test_what_is_refused_does_not_compile():
    shape, sizes = (2, 8192, 128), BlockSizes(2048, 1024, 512)
    chip = CHIPS["v4"]
    assert estimate(shape, "bfloat16", sizes) > chip.vmem_limit_bytes
    with pytest.raises(Exception, match=r"(?i)vmem"):
        compile_kernels(chip, shape, "bfloat16", sizes, chip.vmem_limit_bytes)


def test_missing_compiler_is_said_clearly(monkeypatch, capsys):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    assert main(["aot", "--shape", "2x256x64"]) == 2
    assert "pip install 'cudnn-dsa[tpu-aot]'" in capsys.readouterr().err


def test_schedule_parser():
    """A loop with a first-step part of two bundles and a last-step part of one."""
    text = "\n".join(
        [
            "     0   :  { %s0 = nop }",
            "   0x1 LB: > { %s1 = nop } /* Start region 7 */",
            "   0x2   : > { %s2 = sbr.rel (%p1_p0) target = $region9 }",
            "   0x3   : > { %s3 = nop }",
            "   0x4   : > { %s4 = nop }",
            "   0x5 PF: > { %s5 = nop } /* Start region 9 */",
            "   0x6   : > { %s6 = sbr.rel (!%p2_p0) target = $region11 }",
            "   0x7   : > { %s7 = nop }",
            "   0x8 PF: > { %s8 = nop } /* Start region 11 */",
            "   0x9   : > { %s9 = sbr.rel (!%p3_p0) target = $region7 }",
            "   0xa   :  { %s10 = nop }",
        ]
    )
    schedule = bundles.parse("example", text)
    assert (schedule.total, schedule.step, schedule.conditional) == (11, 8, (3, 2))
    with pytest.raises(ValueError, match="no bundle"):
        bundles.parse("empty", "nothing here")
