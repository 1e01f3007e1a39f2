"""What a launch costs on the host, counted in Python-level calls: the same number on every machine and every run.

The bounds are what is reached, with a little room for other versions of Python and torch.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from dsa_cases import Sizes, make

from cudnn_dsa import SparseAttentionBackward, SparseAttentionForward, interface
from cudnn_dsa.backends import reference
from cudnn_dsa.streams import launch_scope

NAMES = ("q", "kv", "out", "dout", "lse", "attn_sink", "topk_idxs")


def counted(function):
    """(calls of Python functions, calls of built-ins) in one call of ``function``, after two to warm up."""
    counts = {"call": 0, "c_call": 0}

    def count(frame, event, argument):
        if event in counts:
            counts[event] += 1

    function()
    function()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    # The function itself, and the call that ends the counting.
    return counts["call"] - 1, counts["c_call"] - 1


@pytest.fixture
def case(monkeypatch):
    """A call, and a backend that does nothing."""
    for name in ("forward", "backward"):
        monkeypatch.setattr(reference, name, lambda *_: None)
    case = make("topk_length", torch.bfloat16, Sizes(head_dim=576))
    case.attn_sink = torch.zeros(4)
    return case


def test_execute_with_everything_given(case, monkeypatch):
    monkeypatch.setattr(reference, "workspace_bytes", lambda problem: 256)
    call = {name: getattr(case, name) for name in (*NAMES, "topk_length")}
    plan = SparseAttentionBackward(**{f"sample_{k}": v for k, v in call.items()}, backend="reference")
    memory = torch.empty(1024, dtype=torch.uint8)
    call |= {
        "dq": torch.empty_like(case.q), "dkv": torch.empty_like(case.kv), "d_sink": torch.empty_like(case.attn_sink),
        "workspace": memory[-memory.data_ptr() % 256 :][:256],
    }  # fmt: skip
    python, builtin = counted(lambda: plan.execute(**call))
    assert python <= 27
    assert builtin <= 72


def test_execute_that_allocates(case):
    call = {name: getattr(case, name) for name in NAMES}
    plan = SparseAttentionBackward(**{f"sample_{k}": v for k, v in call.items()}, backend="reference")
    python, builtin = counted(lambda: plan.execute(**call, softmax_scale=0.5))
    assert python <= 26
    assert builtin <= 42


def test_the_interface_and_a_forward_plan(case):
    call = {name: getattr(case, name) for name in NAMES}
    plan = SparseAttentionForward(case.q, case.kv, case.topk_idxs, case.attn_sink, backend="reference")
    for function in (
        lambda: interface.sparse_attention_backward(**call, backend="reference", deterministic=None),
        lambda: plan.execute(case.q, case.kv, case.topk_idxs, case.attn_sink, out=case.out, lse=case.lse),
    ):
        python, builtin = counted(function)
        assert python <= 26
        assert builtin <= 47


def test_the_launch_scope_on_the_ambient_stream(monkeypatch):
    """The runtime's own calls are stood in for; they are what is left to pay."""
    stream = SimpleNamespace()
    for name, value in {"current_device": lambda: 0, "current_stream": lambda device: stream}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("range_push", "range_pop"):
        monkeypatch.setattr(torch.cuda.nvtx, name, lambda *_: None)

    def body():
        with launch_scope("name", torch.device("cuda", 0), None, ()):
            pass

    python, builtin = counted(body)
    assert python <= 10
    assert builtin <= 6
