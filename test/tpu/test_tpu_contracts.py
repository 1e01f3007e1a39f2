"""Every refusal names the argument, what was expected and what came."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cudnn_dsa.contracts import ContractError
from cudnn_dsa_tpu import BlockSizes, SegmentIds, splash_attention
from cudnn_dsa_tpu.block_sizes import auto_block_sizes, backward_vmem_bytes, check_vmem, resolve
from cudnn_dsa_tpu.chips import CHIPS, MIB
from cudnn_dsa_tpu.contracts import check_attention


def array(*shape, dtype=jnp.bfloat16):
    return jnp.zeros(shape, dtype)


GOOD = {"q": array(4, 16, 64), "k": array(2, 24, 64), "v": array(2, 24, 128)}
IDS = SegmentIds(array(16, dtype=jnp.int32), array(24, dtype=jnp.int32))

REFUSALS = [
    ({"q": array(16, 64)}, "q", "(H, S, D)", "(16, 64)"),
    ({"q": [[1.0]]}, "q", "an array", "list"),
    ({"k": array(2, 24, 128)}, "k", "D=64", "(2, 24, 128)"),
    ({"v": array(2, 25, 128)}, "v", "T=24", "(2, 25, 128)"),
    ({"v": array(1, 24, 128)}, "v", "H_kv=2", "(1, 24, 128)"),
    ({"q": array(3, 16, 64)}, "q", "multiple of H_kv=2", "H=3"),
    ({"q": array(4, 0, 64)}, "S", ">= 1", "0"),
    ({"k": array(2, 0, 64), "v": array(2, 0, 128)}, "T", ">= 1", "0"),
    ({"q": array(4, 16, 32), "k": array(2, 24, 32)}, "head dimension D", ">= 64 and <= 256", "32"),
    ({"v": array(2, 24, 264)}, "head dimension D_v", "<= 256", "264"),
    ({"v": array(2, 24, 100)}, "head dimension D_v", "a multiple of 8", "100"),
    ({"q": array(4, 16, 64, dtype=jnp.float16)}, "q", "bfloat16 or float32", "float16"),
    ({"k": array(2, 24, 64, dtype=jnp.float32)}, "k", "bfloat16", "float32"),
    ({"scale": float("nan")}, "scale", "a finite number", "nan"),
    ({"scale": array()}, "scale", "a number or None", "Array"),
    ({"orig_q_seq_len": 17}, "orig_q_seq_len", "<= 16", "17"),
    ({"orig_kv_seq_len": 0}, "orig_kv_seq_len", ">= 1", "0"),
    ({"orig_kv_seq_len": 2.0}, "orig_kv_seq_len", "an int or None", "float"),
    ({"segment_ids": array(16)}, "segment_ids", "SegmentIds(q, kv)", "Array"),
    ({"segment_ids": SegmentIds(IDS.kv, IDS.kv)}, "segment_ids.q", "S=16", "(24,)"),
    ({"segment_ids": SegmentIds(IDS.q, array(24))}, "segment_ids.kv", "int32", "bfloat16"),
    ({"attn_sink": array(2)}, "attn_sink", "H=4", "(2,)"),
    ({"attn_sink": array(4, dtype=jnp.int32)}, "attn_sink", "bfloat16 or float32", "int32"),
    ({"dq_reduction_steps": 2}, "dq_reduction_steps", "3, None", "2"),
    ({"block_sizes": "best"}, "block_sizes", "BlockSizes or 'auto'", "'best'"),
    ({"block_sizes": BlockSizes(8192, 8192)}, "block_sizes (block_q x block_kv)", "MiB of vector memory", "about"),
    ({"interpret": "yes"}, "interpret", "None, a bool or InterpretParams", "str"),
]


@pytest.mark.parametrize(("change", "argument", "expected", "got"), REFUSALS, ids=lambda x: str(x)[:24])
def test_refusals(change, argument, expected, got):
    call = {**GOOD, **change}
    q, k, v = (call.pop(name) for name in ("q", "k", "v"))
    with pytest.raises(ContractError) as caught:
        splash_attention(q, k, v, **call)
    assert caught.value.argument.startswith(argument)
    assert expected in caught.value.expected
    assert got in caught.value.got


@pytest.mark.parametrize(
    ("sizes", "argument"),
    [
        ({"block_q": 100, "block_kv": 128}, "block_q"),
        ({"block_q": 0, "block_kv": 128}, "block_q"),
        ({"block_q": 128, "block_kv": 128.0}, "block_kv"),
        ({"block_q": 128, "block_kv": 512, "block_kv_compute": 384}, "block_kv_compute"),
        ({"block_q": 128, "block_kv": 128, "block_kv_dkv": 256, "block_kv_dkv_compute": 512}, "block_kv_dkv_compute"),
        ({"block_q": 128, "block_kv": 128, "block_q_dq": -128}, "block_q_dq"),
    ],
)
def test_block_sizes_refuse(sizes, argument):
    with pytest.raises(ContractError) as caught:
        BlockSizes(**sizes)
    assert caught.value.argument == argument


def test_block_sizes_defaults():
    sizes = BlockSizes(256, 512, block_kv_compute=128)
    assert sizes == BlockSizes(256, 512, 128, 256, 512, 128, 256, 512)
    assert BlockSizes(256, 512, 128, block_kv_dkv=1024).block_kv_dkv_compute == 1024
    assert hash(sizes) == hash(BlockSizes(256, 512, block_kv_compute=128))


def problem(q_len, kv_len, heads=4, head_dim=128, dtype=jnp.bfloat16):
    q, k = (jax.ShapeDtypeStruct((heads, n, head_dim), dtype) for n in (q_len, kv_len))
    return check_attention(q, k, k, scale=None, orig_q_seq_len=None, orig_kv_seq_len=None)


def test_auto_pads_little():
    sizes = auto_block_sizes(problem(18_900, 18_900), CHIPS["v6e"])
    assert -(-18_900 // sizes.block_q) * sizes.block_q == 18_944
    for length in (1, 127, 128, 129, 1000, 1350, 4096, 4097, 9450, 75_600, 131_073):
        block = auto_block_sizes(problem(length, length), CHIPS["v6e"]).block_q
        padded = -(-length // block) * block
        assert padded - length < max(128, length * 0.05), f"{length} padded to {padded} by blocks of {block}"


@pytest.mark.parametrize("chip", sorted(CHIPS))
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_auto_fits_every_chip(chip, head_dim, dtype):
    case = problem(5000, 7000, head_dim=head_dim, dtype=dtype)
    sizes = resolve("auto", case, CHIPS[chip])
    check_vmem(sizes, case, CHIPS[chip])
    assert backward_vmem_bytes(sizes.dkv, case) <= CHIPS[chip].vmem_limit_bytes < CHIPS[chip].vmem_bytes


def test_vmem_depends_on_the_chip():
    case, sizes = problem(8192, 8192), BlockSizes(4096, 1024, 1024, block_q_dkv=1024, block_kv_dkv=1024)
    check_vmem(sizes, case, CHIPS["v6e"])
    with pytest.raises(ContractError, match="v4"):
        check_vmem(sizes, case, CHIPS["v4"])
    assert CHIPS["tpu7x"].vmem_bytes == 64 * MIB


def test_imports_neither_torch_nor_libtpu():
    code = "import sys, cudnn_dsa_tpu; sys.exit(any(name in sys.modules for name in ('torch', 'libtpu')))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=120, check=False).returncode == 0


def test_nothing_is_read_by_the_checks():
    """Shapes suffice: a ShapeDtypeStruct passes the same checks as an array."""
    assert np.isclose(problem(100, 200).scale, 128**-0.5)
