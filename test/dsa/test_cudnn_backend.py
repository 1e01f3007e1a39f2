"""The adapter to the cuDNN frontend: what it refuses, that nothing picks it, and, on a GPU, its gradients."""

from dataclasses import replace

import pytest
import torch
from dsa_cases import Sizes, assert_gradients, make

from cudnn_dsa import backends, interface
from cudnn_dsa.backends import cudnn
from cudnn_dsa.contracts.errors import UnsupportedError
from cudnn_dsa.contracts.sparse_attention import Options

NAMES = ("q", "kv", "out", "dout", "lse", "attn_sink", "topk_idxs")
# Cases that need nothing the frontend lacks; no sink and rows without a key are what the adapter adds.
CASES = ("random", "sink", "topk_length", "scattered_invalid", "empty_rows", "sink_minus_inf", "duplicates")


def problem(sizes=None, **options):
    case = make("sink", torch.bfloat16, sizes or Sizes(heads=64, head_dim=576))
    tensors = {name: getattr(case, name) for name in NAMES}
    tensors |= {name: options.pop(name)(case) for name in ("out", "dkv", "delta") if name in options}
    return interface.gate(tensors, Options(backend="reference", **options))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"deterministic": True}, "deterministic"),
        ({"sizes": Sizes(heads=1, head_dim=576)}, "2 heads"),
        ({"out": lambda case: case.out.float()}, "out"),
        ({"delta": lambda case: case.lse.clone()}, "delta"),
        ({"dkv": lambda case: case.kv.float()}, "dkv"),
        ({"dkv": lambda case: case.kv.float(), "accumulate": True}, "dkv"),
        ({"q_cluster_mode": "adaptive_pair"}, "clustered"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_its_gaps_are_refused_by_name(changes, word):
    assert word in cudnn.supports(problem(**changes))


def test_what_it_has_is_not_refused():
    assert cudnn.supports(problem()) is None
    assert cudnn.supports(problem(Sizes(heads=2, head_dim=512))) is None


def test_a_refusal_reaches_the_caller(monkeypatch):
    monkeypatch.setattr(cudnn, "unavailable", lambda device: None)
    with pytest.raises(UnsupportedError, match="deterministic"):
        backends.select(replace(problem(deterministic=True), backend="cudnn", device="cuda:0"))


def test_auto_never_picks_it():
    assert all("cudnn" not in names for names in backends.AUTO_BY_CAPABILITY.values())


def test_it_says_what_is_missing():
    assert "cuda" in cudnn.unavailable("cpu").lower() or "not installed" in cudnn.unavailable("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    reason = cudnn.unavailable("cuda:0")
    if reason:
        pytest.skip(reason)
    for dtype, head_dim in ((torch.bfloat16, 576), (torch.bfloat16, 512), (torch.float16, 576)):
        case = make(name, dtype, Sizes(s_q=12, s_kv=90, heads=64, head_dim=head_dim, topk=70)).to("cuda")
        got = interface.sparse_attention_backward(
            **{name: getattr(case, name) for name in NAMES}, topk_length=case.topk_length,
            softmax_scale=case.softmax_scale, backend="cudnn",
        )  # fmt: skip
        # It rounds P and dS through one more step than the contract of our own kernels allows.
        assert_gradients(name, case, got, limit=4e-3)
