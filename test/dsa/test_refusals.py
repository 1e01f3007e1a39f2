"""A valid call with one property broken is refused at the gate and at the interface, before anything happens.

No backend is entered and no output touched. The same breaks run against the wrapper and, where it has the argument, the
differentiable operator.
"""

from __future__ import annotations

import pytest
import torch
from dsa_cases import Case, Sizes, make
from hypothesis import given, settings
from hypothesis import strategies as st

import cudnn_dsa
from cudnn_dsa import ContractError, UnsupportedError, backends, interface
from cudnn_dsa.backends import reference

BACKWARD_INPUTS = ("q", "kv", "out", "dout", "lse", "attn_sink", "topk_idxs", "topk_length", "delta")
OUTPUTS = ("dq", "dkv", "d_sink")
FORWARD_INPUTS = ("q", "kv", "topk_idxs", "attn_sink", "topk_length")
POISON = 7.0


@pytest.fixture
def no_backend(monkeypatch):
    """Entering a backend is an error of the test."""

    def entered(*args, **kwargs):
        raise RuntimeError("a backend was entered")

    for name in ("forward", "backward"):
        monkeypatch.setattr(reference, name, entered)
    monkeypatch.setattr(backends, "candidates", lambda problem: ("reference",))


@st.composite
def valid_calls(draw):
    """All tensors of a backward call, optional ones drawn in or out."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    sizes = Sizes(
        s_q=draw(st.integers(2, 4)), s_kv=draw(st.integers(5, 9)), heads=draw(st.sampled_from([3, 7])),
        head_dim=draw(st.sampled_from([16, 20])), topk=draw(st.sampled_from([6, 11])),
    )  # fmt: skip
    case = make("sink", dtype, sizes)
    call = {name: getattr(case, name, None) for name in BACKWARD_INPUTS}
    call["topk_length"] = torch.full((sizes.s_q,), 4, dtype=torch.int32)
    call["delta"] = torch.zeros_like(case.lse)
    call["dq"], call["dkv"] = torch.full_like(case.q, POISON), torch.full_like(case.kv, POISON)
    call["d_sink"] = torch.full_like(case.attn_sink, POISON)
    for name in ("topk_length", "delta", *OUTPUTS):
        if draw(st.booleans()):
            call[name] = None
    return call


def other_dtype(tensor, draw):
    floats = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.bool]
    return tensor.to(draw(st.sampled_from([d for d in floats if d != tensor.dtype])))


BREAKS = {
    "a dimension longer": lambda t, draw: t.repeat_interleave(2, dim=draw(st.integers(0, t.ndim - 1))),
    "a dimension more": lambda t, draw: t.unsqueeze(draw(st.integers(0, t.ndim))),
    "a dimension less": lambda t, draw: t.select(draw(st.integers(0, t.ndim - 1)), 0).contiguous(),
    "dimensions swapped": lambda t, draw: t.transpose(0, t.ndim - 1).contiguous(),
    "another dtype": other_dtype,
    "another device": lambda t, draw: t.to("meta"),
    "no tensor": lambda t, draw: t.tolist(),
}


def accepted_anyway(name, call, broken):
    """Breaks that give a valid call all the same: an allowed companion dtype, or an S_kv or K that nothing pins."""
    try:
        given_dtype, dtype = call[name].dtype, broken.dtype
    except AttributeError:
        return False
    same_shape = call[name].shape == broken.shape
    if not same_shape or broken.device != call[name].device:
        # A longer kv is a larger S_kv, a wider topk_idxs a larger K, unless another tensor pins them.
        longer_kv = name == "kv" and broken.shape[1:] == call["kv"].shape[1:] and call["dkv"] is None
        wider = name == "topk_idxs" and broken.shape[:1] == call["q"].shape[:1] and broken.ndim == 2
        return broken.device == call[name].device and (longer_kv or wider)
    if given_dtype == dtype:
        return True  # a swap of equal sizes, a device that is the same
    q = call["q"].dtype
    if name in ("out", "dkv"):
        return dtype in (q, torch.float32)
    if name in ("lse", "delta"):
        return q == torch.float64 and dtype in (torch.float32, torch.float64)
    if name in ("attn_sink", "d_sink"):
        lone = call["d_sink" if name == "attn_sink" else "attn_sink"] is None
        return q == torch.float64 and dtype in (torch.float32, torch.float64) and lone
    return False


def interface_call(call):
    return interface.sparse_attention_backward(**call, backend="reference")


def wrapper_call(call):
    call = {name: value for name, value in call.items() if name != "d_sink"}
    return cudnn_dsa.sparse_attention_backward_wrapper(**call, backend="reference")


def plan_of(call):
    samples = {f"sample_{name}": value for name, value in call.items() if name != "d_sink"}
    return cudnn_dsa.SparseAttentionBackward(**samples, backend="reference")


def refused(entry, call, name):
    """The entry refuses the call, naming the argument (or one that the break makes disagree), and writes nothing."""
    kept = {key: call[key].clone() for key in OUTPUTS if isinstance(call.get(key), torch.Tensor)}
    with pytest.raises(ContractError) as caught:
        entry(call)
    for key, before in kept.items():
        if before.device.type != "meta":
            assert torch.equal(call[key], before)
    # A broken q or kv changes what the others are compared with, and a companion is told by its partner.
    if name not in ("q", "kv", "attn_sink"):
        assert caught.value.argument == name, str(caught.value)


@settings(max_examples=400)
@given(st.data())
def test_one_broken_property_is_refused_everywhere(no_backend, data):
    call = data.draw(valid_calls())
    name = data.draw(st.sampled_from([name for name, value in call.items() if value is not None]), label="argument")
    how = data.draw(st.sampled_from(list(BREAKS)), label="break")
    broken = BREAKS[how](call[name], data.draw)
    if accepted_anyway(name, call, broken):
        return
    fine_without_d_sink = accepted_anyway(name, {**call, "d_sink": None}, broken)
    call = {**call, name: broken}
    refused(interface_call, call, name)
    if name != "d_sink" and not fine_without_d_sink:  # the wrapper and the plan take no d_sink
        refused(wrapper_call, {**call, "d_sink": None}, name)
        refused(lambda c: plan_of(c).check_support(), {**call, "d_sink": None}, name)


@settings(max_examples=60)
@given(valid_calls())
def test_the_unbroken_call_reaches_a_backend(no_backend, call):
    """The breaks above are refused for their break: without it the backend is entered."""
    assert plan_of({**call, "d_sink": None}).check_support()
    with pytest.raises(RuntimeError, match="a backend was entered"):
        interface_call(call)
    with pytest.raises(RuntimeError, match="a backend was entered"):
        wrapper_call(call)


@settings(max_examples=60)
@given(st.data())
def test_a_missing_tensor_is_refused(no_backend, data):
    call = data.draw(valid_calls())
    name = data.draw(st.sampled_from(["q", "kv", "out", "dout", "lse", "topk_idxs"]))
    for entry in (interface_call, wrapper_call):
        with pytest.raises(ContractError, match=f"{name}: expected a tensor, got None"):
            entry({**call, name: None})


@settings(max_examples=100)
@given(st.data())
def test_aliased_outputs_are_refused(no_backend, data):
    call = data.draw(valid_calls())
    call["dq"], call["dkv"] = torch.full_like(call["q"], POISON), torch.full_like(call["kv"], POISON)
    output, source = data.draw(st.sampled_from([("dq", "q"), ("dkv", "kv"), ("d_sink", "attn_sink")]))
    call[output] = call[source]
    refused(interface_call, call, output)
    if output != "d_sink":
        refused(wrapper_call, call, output)
        with pytest.raises(ContractError, match=f"{output}: expected memory of its own"):
            plan_of(call).check_support()


@settings(max_examples=100)
@given(st.data())
def test_strided_tensors_are_refused_by_plans_and_strided_outputs_by_the_interface(no_backend, data):
    call = data.draw(valid_calls())
    plan = plan_of({**call, "d_sink": None})
    names = [name for name, value in call.items() if value is not None and value.ndim > 1]
    name = data.draw(st.sampled_from(names))
    strided = call[name].transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    call[name] = strided
    with pytest.raises(UnsupportedError, match=f"{name}: expected a contiguous tensor"):
        plan.execute(**call)
    with pytest.raises(NotImplementedError):
        plan_of({**call, "d_sink": None}).check_support()
    if name in OUTPUTS:
        with pytest.raises(UnsupportedError, match=f"{name}: expected a contiguous tensor"):
            interface_call(call)
    else:
        with pytest.raises(RuntimeError, match="a backend was entered"):
            interface_call(call)
    with pytest.raises(RuntimeError, match="a backend was entered"):
        wrapper_call(call)


@settings(max_examples=150)
@given(st.data())
def test_forward_refuses_one_broken_property(no_backend, data):
    call = data.draw(valid_calls())
    call = {name: call[name] for name in FORWARD_INPUTS} | {"dkv": None, "d_sink": None}
    name = data.draw(st.sampled_from([name for name in FORWARD_INPUTS if call[name] is not None]))
    broken = BREAKS[data.draw(st.sampled_from(list(BREAKS)))](call[name], data.draw)
    if accepted_anyway(name, call, broken):
        return
    call = {name: value for name, value in {**call, name: broken}.items() if name in FORWARD_INPUTS}
    with pytest.raises(ContractError):
        interface.sparse_attention_forward(**call, backend="reference")
    with pytest.raises(ContractError):
        cudnn_dsa.sparse_attention_forward_wrapper(**call, backend="reference")
    samples = {f"sample_{key}": value for key, value in call.items()}
    with pytest.raises(ContractError):
        cudnn_dsa.SparseAttentionForward(**samples, backend="reference").check_support()
    # Tensors of two devices end in torch's dispatcher before they reach the contract.
    with pytest.raises((ContractError, RuntimeError, NotImplementedError)):
        cudnn_dsa.sparse_attention(**call, backend="reference")


def call_of(case: Case, **changes):
    call = {name: getattr(case, name, None) for name in BACKWARD_INPUTS}
    return {**call, **changes}


def test_auto_is_the_cuda_gate():
    call = call_of(make("sink", torch.bfloat16, Sizes(head_dim=576)))
    for entry in (interface.sparse_attention_backward, cudnn_dsa.sparse_attention_backward_wrapper):
        with pytest.raises(ContractError, match=r"q: expected a CUDA device \(backend 'auto'\), got cpu"):
            entry(**call)


@pytest.mark.parametrize("head_dim", [64, 511, 513, 575, 577, 1024])
def test_head_dims_of_the_cuda_backends(head_dim):
    from cudnn_dsa.contracts import TensorSpec
    from cudnn_dsa.contracts.sparse_attention import Options, check

    def cuda(*shape, dtype="bfloat16"):
        return TensorSpec(shape, dtype, None, "cuda:0")

    specs = {"q": cuda(2, 3, head_dim), "kv": cuda(9, head_dim), "topk_idxs": cuda(2, 4, dtype="int32")}
    with pytest.raises(ContractError, match=f"q: expected head_dim 512 or 576, got {head_dim}"):
        check(specs, Options("forward"))
    with pytest.raises(ContractError, match="q: expected dtype bfloat16 or float16, got float32"):
        check({**specs, "q": cuda(2, 3, 512, dtype="float32")}, Options("forward"))
    good = {"q": cuda(2, 3, 512), "kv": cuda(9, 512), "topk_idxs": cuda(2, 4, dtype="int32")}
    with pytest.raises(ContractError, match="head_dim_v: expected 512, got 256"):
        check(good, Options("forward", head_dim_v=256))
    assert check(good, Options("forward")).head_dim_v == 512


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"block_tile": 32}, "block_tile"),
        ({"q_cluster_mode": "pairs"}, "q_cluster_mode"),
        ({"softmax_scale": float("nan")}, "softmax_scale"),
        ({"softmax_scale": float("inf")}, "softmax_scale"),
        ({"backend": "sm70"}, "backend"),
        ({"accumulate": True}, "dkv"),
    ],
)
def test_options_out_of_range(options, argument):
    call = call_of(make("sink", torch.bfloat16, Sizes()))
    with pytest.raises(ContractError) as caught:
        interface.sparse_attention_backward(**call, **{"backend": "reference", **options})
    assert caught.value.argument == argument


def test_accumulation_needs_a_wide_dkv():
    case = make("sink", torch.bfloat16, Sizes())
    with pytest.raises(ContractError, match="dkv: expected dtype float32 or float64, got bfloat16"):
        interface_call({**call_of(case), "dkv": torch.zeros_like(case.kv), "accumulate": True})


def test_a_mode_that_nothing_runs_is_not_implemented():
    case = make("sink", torch.bfloat16, Sizes())
    for mode in ("adaptive_pair", "pairs"):
        with pytest.raises(NotImplementedError, match="q_cluster_mode"):
            interface_call({**call_of(case), "q_cluster_mode": mode})


def test_d_sink_without_a_sink_is_refused():
    case = make("random", torch.float32, Sizes())
    with pytest.raises(ContractError, match="d_sink: expected None, got a tensor"):
        interface_call(call_of(case, d_sink=torch.zeros(4)))


def test_capabilities_are_refused_by_name(monkeypatch):
    from cudnn_dsa.contracts import TensorSpec
    from cudnn_dsa.contracts.sparse_attention import Options, check

    specs = {
        "q": TensorSpec((2, 3, 512), "bfloat16", None, "cuda:0"),
        "kv": TensorSpec((9, 512), "bfloat16", None, "cuda:0"),
        "topk_idxs": TensorSpec((2, 4), "int32", None, "cuda:0"),
    }
    monkeypatch.setattr(backends, "device_capability", lambda device: (7, 5))
    with pytest.raises(RuntimeError, match=r"compute capability 7\.5"):
        backends.select(check(specs, Options("forward")))


@pytest.mark.parametrize(
    ("workspace", "words"),
    [
        (torch.zeros(512), "workspace: expected dtype uint8"),
        (torch.zeros(8, 512, dtype=torch.uint8), "workspace: expected shape"),
        (torch.zeros(512, dtype=torch.uint8, device="meta"), "workspace: expected device cpu"),
        (torch.zeros(1024, dtype=torch.uint8)[::2], "workspace: expected a contiguous tensor"),
        (torch.zeros(100, dtype=torch.uint8), "workspace: expected at least 512 bytes, got 100 bytes"),
    ],
)
def test_bad_workspaces(monkeypatch, no_backend, workspace, words):
    monkeypatch.setattr(reference, "workspace_bytes", lambda problem: 512)
    with pytest.raises(ContractError, match=words):
        interface_call(call_of(make("sink", torch.float32, Sizes()), workspace=workspace))


def test_a_misaligned_workspace_is_refused(monkeypatch, no_backend):
    monkeypatch.setattr(reference, "workspace_bytes", lambda problem: 512)
    base = torch.zeros(2048, dtype=torch.uint8)
    start = -base.data_ptr() % 256
    call = call_of(make("sink", torch.float32, Sizes()))
    with pytest.raises(ContractError, match="workspace: expected 256-byte alignment"):
        interface_call({**call, "workspace": base[start + 16 :]})
    with pytest.raises(RuntimeError, match="a backend was entered"):
        interface_call({**call, "workspace": base[start:]})


def test_outputs_that_share_memory_with_each_other_are_refused(no_backend):
    case = make("sink", torch.float32, Sizes(heads=1, s_q=40))
    dq = torch.zeros_like(case.q)
    with pytest.raises(ContractError, match="dkv: expected memory of its own, apart from dq"):
        interface_call(call_of(case, dq=dq, dkv=dq.view(case.kv.shape)))


@pytest.mark.parametrize("strides", [(0, 64, 1), (64, 16, 1), (4, 1, 1)])
def test_outputs_whose_own_elements_overlap_are_refused(no_backend, strides):
    case = make("sink", torch.float32, Sizes())
    dq = torch.zeros(6 * 4 * 64).as_strided((6, 4, 64), strides)
    with pytest.raises(ContractError, match="dq: expected a tensor whose elements lie apart"):
        wrapper_call(call_of(case, dq=dq))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("softmax_scale", torch.tensor(0.25)),
        ("softmax_scale", "x"),
        ("softmax_scale", [1.0]),
        ("softmax_scale", True),
        ("softmax_scale", 10**400),
        ("head_dim_v", 16.0),
        ("block_tile", 64.0),
        ("deterministic", "no"),
        ("accumulate", 1),
        ("backend", ["cpu"]),
        ("q_cluster_mode", None),
    ],
)
def test_options_of_a_wrong_type_are_named(no_backend, name, value):
    call = call_of(make("sink", torch.float32, Sizes()))
    with pytest.raises(ContractError, match=f"{name}: expected"):
        interface.sparse_attention_backward(**call, **{"backend": "reference", name: value})


def test_a_refused_option_leaves_nothing_behind():
    """16.0 == 16 and hashes alike: the refused call must not be what the right one finds remembered."""
    case = make("random", torch.float32, Sizes(head_dim=24))
    call = (case.q, case.kv, case.topk_idxs)
    with pytest.raises(ContractError, match="head_dim_v: expected an integer"):
        interface.sparse_attention_forward(*call, head_dim_v=16.0, backend="reference")
    assert interface.sparse_attention_forward(*call, head_dim_v=16, backend="reference").out.shape[-1] == 16
    import numpy as np

    for scale in (np.float32(0.25), np.float64(0.25), 1):
        interface.sparse_attention_forward(*call, softmax_scale=scale, backend="reference")
