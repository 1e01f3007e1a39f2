"""The fallback report, and what the TPU compiler makes of the kernels with a fixed m."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cudnn_dsa.contracts import ContractError
from cudnn_dsa_tpu import (
    BlockSizes,
    FixedM,
    aot,
    fallback,
    fixed_m_attention,
    fixed_m_norms,
    get_fixed_m_constants,
    ring_attention,
)
from cudnn_dsa_tpu.__main__ import main
from cudnn_dsa_tpu.chips import CHIPS


def test_fallback_report(tmp_path, capsys):
    """A head within the gate, one that only centering or the wide gate admits, one with a sink."""
    rng = np.random.default_rng(0)
    direction = np.eye(64)[0]
    q = rng.standard_normal((3, 256, 64))
    k = rng.standard_normal((3, 512, 64)) * 0.5
    k[1] += 150 * direction
    k[2, 7] = 2000 * direction
    q, k = (jnp.asarray(x, jnp.float32) for x in (q, k))
    path = tmp_path / "layers.npz"
    fallback.save(path, {"first": fallback.collect(q, k, jnp.ones((3, 512, 64)), block_q=128)})
    assert main(["fallback", "--statistics", str(path), "--png", str(tmp_path / "picture.png")]) == 0
    assert (tmp_path / "picture.png").stat().st_size > 1000
    assert "first" in capsys.readouterr().out
    rows = fallback.report(fallback.load(path))
    assert [(r.strict, r.strict_centered, r.wide) for r in rows] == [(0, 0, 0), (1, 0, 0), (1, 1, 1)]
    constants = get_fixed_m_constants(512)
    assert (rows[0].strict_gate, rows[0].wide_gate) == (constants.gate, constants.C + 116)
    logits = np.einsum("hsd,htd->hst", np.asarray(q, np.float64), np.asarray(k, np.float64)) * np.log2(np.e) / 8
    longest = np.linalg.norm(q, axis=-1).max(axis=1) * np.linalg.norm(k, axis=-1).max(axis=1) * np.log2(np.e) / 8
    np.testing.assert_allclose([r.bound for r in rows], longest, rtol=1e-3)
    assert (np.abs(logits).max(axis=(1, 2)) <= [r.bound for r in rows]).all()


def test_fallback_refuses_another_file(tmp_path):
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(ContractError, match="layer/field"):
        fallback.load(tmp_path / "other.npz")


BLOCKS = BlockSizes(block_q=256, block_kv=256, block_kv_compute=128)


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("chip", ["v6e", *(pytest.param(c, marks=pytest.mark.slow) for c in ("v5e", "v5p", "tpu7x"))])
@pytest.mark.parametrize("tail", [129, 1, pytest.param(9, marks=pytest.mark.slow)])
def test_compiles(chip, uniform, tail):
    """With centering, grouped heads and a ragged tail, forward and backward."""
    pytest.importorskip("libtpu")
    aot.prepare()

    def gradients(q, k, v, k_mean):
        norms = fixed_m_norms(q, k, block_q=256, k_mean=k_mean)

        def attention(*qkv):
            return fixed_m_attention(
                *qkv, block_sizes=BLOCKS, uniform=uniform, k_mean=k_mean, norms=norms, interpret=False
            ).sum()

        return jax.grad(attention, argnums=(0, 1, 2))(q, k, v)

    shapes = [((4, 700, 128), jnp.bfloat16), *[((2, 512 + tail, 128), jnp.bfloat16)] * 2, ((2, 128), jnp.float32)]
    structs = [(jax.ShapeDtypeStruct(*x), P()) for x in shapes]
    aot.compile_for(aot.topology_mesh(CHIPS[chip]), gradients, *structs)


def orders(hlo):
    """The order of transfers and kernels (see ``aot.overlap``) in every computation that has both."""
    found = []
    for computation in re.split(r"\n(?=%?\S.*\{\n)", hlo):
        order = aot.overlap("\nENTRY " + computation)
        if "S" in order:
            found.append(order)
    return found


@pytest.mark.parametrize(("uniform", "computations"), [(False, 1), (True, 2)])
def test_ring_overlaps_in_every_branch(uniform, computations):
    pytest.importorskip("libtpu")
    aot.prepare()
    mesh, spec = aot.topology_mesh(CHIPS["v6e"], (4,)), P(None, "ring")

    def attention(q, k, v):
        fixed_m = FixedM(v_ok=True, uniform=uniform)
        return ring_attention(
            q, k, v, axis_name="ring", interpret=False, block_sizes=BlockSizes(512, 512), fixed_m=fixed_m
        )

    sharded = jax.shard_map(attention, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    x = (jax.ShapeDtypeStruct((8, 4 * 2048, 128), jnp.bfloat16), spec)
    assert orders(aot.compile_for(mesh, sharded, x, x, x).as_text()) == ["SSKDDSSKDDSSKDDK"] * computations


@pytest.mark.slow
def test_bundles():
    """2048 x 1024 tiles on v6e: a uniform body needs at most 0.75 of the running maximum's; the two of a hybrid launch
    no more than alone. Each in a process of its own (the dump's flags are read once); the body is what is left of a
    step without its first and last parts."""
    pytest.importorskip("libtpu")

    def schedules(*more):
        command = [sys.executable, "-m", "cudnn_dsa_tpu", "aot", "--shape", "2x4096x128", "--blocks", "2048,1024,512"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        result = subprocess.run([*command, *more], capture_output=True, text=True, check=True, timeout=500,
                                env=environment)  # fmt: skip
        lines = [line for line in result.stdout.splitlines() if line.startswith("splash_forward:")]
        return [[int(n) for n in re.findall(r"\d+", line)] for line in lines]

    uniform_program = sorted(step - sum(parts) for step, *parts in schedules("--fixed-m", "uniform"))
    (online,) = (step - sum(parts) for step, *parts in schedules())
    (hybrid,) = schedules("--fixed-m", "hybrid")
    fixed = uniform_program[0]
    assert fixed <= 0.75 * online
    assert fixed <= 0.75 * uniform_program[1]
    _, _, hybrid_fixed, _, hybrid_online, _ = hybrid
    assert hybrid_fixed <= fixed
    assert hybrid_online <= online
