"""What is special to the Triton backend on a GPU; what every backend promises is in the suites that all share."""

import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dsa_cases import Sizes, assert_gradients, make

from cudnn_dsa import SparseAttentionBackward, SparseAttentionForward, interface

pytestmark = pytest.mark.gpu
if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

NAMES = ("q", "kv", "out", "dout", "lse", "attn_sink", "topk_idxs")
SIZES = Sizes(s_q=150, s_kv=64, heads=24, head_dim=576, topk=100)


def backward(case, **options):
    return interface.sparse_attention_backward(
        **{name: getattr(case, name) for name in NAMES}, topk_length=case.topk_length,
        softmax_scale=case.softmax_scale, backend="triton", **options,
    )  # fmt: skip


def shifted(tensor):
    """The same values at an address that is not a multiple of 16."""
    place = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:].view(tensor.shape)
    return place.copy_(tensor)


def test_unaligned_tensors():
    case = make("sink", torch.bfloat16, Sizes(heads=64, head_dim=576, topk=70)).to("cuda")
    backward(case)  # the aligned kernel exists and must not be taken
    for name in NAMES:
        setattr(case, name, shifted(getattr(case, name)))
    outputs = {"dq": shifted(case.q), "dkv": shifted(case.kv.float())}
    assert_gradients("sink", case, backward(case, **outputs))


def test_new_lengths_compile_nothing():
    """Multiples of 16, 1 and odd numbers among them, which Triton would otherwise specialise for."""
    from cudnn_dsa.backends.triton import launch

    for deterministic in (False, True):
        backward(make("sink", torch.bfloat16, Sizes(s_q=5, head_dim=512)).to("cuda"), deterministic=deterministic)
    before = launch.compiled.cache_info().misses
    for s_q, s_kv, topk in ((1, 1, 1), (16, 64, 32), (7, 33, 31), (2, 1000, 16)):
        for deterministic in (False, True):
            case = make("sink", torch.bfloat16, Sizes(s_q=s_q, s_kv=s_kv, topk=topk, head_dim=512)).to("cuda")
            backward(case, deterministic=deterministic)
    assert launch.compiled.cache_info().misses == before


def test_compile_leaves_nothing_to_compile():
    from cudnn_dsa.backends.triton import launch

    case = make("sink", torch.float16, Sizes(heads=16, head_dim=576)).to("cuda")
    plan = SparseAttentionBackward(*(getattr(case, name) for name in NAMES), backend="triton")
    forward = SparseAttentionForward(case.q, case.kv, case.topk_idxs, case.attn_sink, backend="triton")
    for either in (plan, forward):
        either.check_support()
        either.compile()
    before = launch.compiled.cache_info().misses
    got = plan.execute(*(getattr(case, name) for name in NAMES), softmax_scale=case.softmax_scale)
    forward.execute(case.q, case.kv, case.topk_idxs, case.attn_sink)
    assert launch.compiled.cache_info().misses == before
    assert_gradients("sink", case, got)


@pytest.mark.parametrize("name", ["random", "duplicates", "one_row_for_all", "scattered_invalid"])
def test_the_fixed_order_repeats_while_the_device_is_busy(name):
    """Many queries on few keys, so that atomics would collide, and other work that changes the order of programs."""
    case = make(name, torch.bfloat16, SIZES).to("cuda")
    first = backward(case, deterministic=True)
    noise = torch.randn(2048, 2048, device="cuda")
    side = torch.cuda.Stream()
    for _ in range(5):
        with torch.cuda.stream(side):
            noise = (noise @ noise).clamp(-1, 1)
        again = backward(case, deterministic=True)
        for a, b in zip(first[:2], again[:2], strict=True):
            assert torch.equal(a, b)
    torch.cuda.synchronize()


def test_atomics_would_fail_the_test_above():
    """On the same data without a fixed order dkv does vary: the test above can fail."""
    case = make("one_row_for_all", torch.bfloat16, SIZES).to("cuda")
    runs = [backward(case, dkv=torch.empty(case.kv.shape, device="cuda")).dkv for _ in range(20)]
    assert any(not torch.equal(runs[0], run) for run in runs)
    assert max((run - runs[0]).norm() / runs[0].norm() for run in runs) < 1e-5


def fingerprint():
    case = make("duplicates", torch.float16, SIZES).to("cuda")
    got = backward(case, deterministic=True)
    return hashlib.sha256(b"".join(x.cpu().numpy().tobytes() for x in got[:2])).hexdigest()


def test_the_fixed_order_is_that_of_another_process(tmp_path):
    """Whose cache of tuned choices is empty."""
    code = "import test_triton_gpu; print(test_triton_gpu.fingerprint())"
    env = {"PYTHONPATH": ":".join([str(Path(__file__).parent), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env, "CUDNN_DSA_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split()[-1] == fingerprint()


@pytest.mark.gpu_exclusive
def test_invalid_tiles_cost_next_to_nothing():
    """2,000 invalid entries between the first and the last valid one: skipped, not computed."""
    from triton.testing import do_bench

    case = make("random", torch.bfloat16, Sizes(s_q=264, s_kv=4096, heads=64, head_dim=576, topk=2048)).to("cuda")
    full = do_bench(lambda: backward(case), return_mode="median")
    case.topk_idxs[:, 20:-20] = -1
    sparse = do_bench(lambda: backward(case), return_mode="median")
    assert sparse < full / 4, (sparse, full)
