"""Plans and wrappers: the cuDNN frontend's names, orders and habits."""

import inspect
import logging
import pickle
from dataclasses import replace

import pytest
import torch
from dsa_cases import Sizes, assert_gradients, make

import cudnn_dsa
from cudnn_dsa import (
    DSA,
    ContractError,
    SparseAttentionBackward,
    SparseAttentionForward,
    admission,
    backends,
    interface,
)
from cudnn_dsa.backends import reference

ORDER = {
    SparseAttentionBackward.__init__: "self sample_q sample_kv sample_out sample_dout sample_lse sample_attn_sink "
    "sample_topk_idxs sample_dq sample_dkv sample_topk_length softmax_scale block_tile deterministic q_cluster_mode | "
    "sample_delta backend",
    SparseAttentionBackward.execute: "self q kv out dout lse attn_sink topk_idxs dq dkv topk_length softmax_scale "
    "current_stream workspace | d_sink delta accumulate",
    SparseAttentionForward.__init__: "self sample_q sample_kv sample_topk_idxs sample_attn_sink sample_topk_length "
    "softmax_scale | head_dim_v backend",
    SparseAttentionForward.execute: "self q kv topk_idxs attn_sink topk_length softmax_scale out lse current_stream |",
    cudnn_dsa.sparse_attention_backward_wrapper: "q kv out dout lse attn_sink topk_idxs softmax_scale topk_length dq "
    "dkv block_tile deterministic stream workspace q_cluster_mode | delta accumulate backend",
    cudnn_dsa.sparse_attention_forward_wrapper: "q kv topk_idxs attn_sink topk_length softmax_scale stream | "
    "head_dim_v backend",
}


@pytest.mark.parametrize("function", ORDER, ids=lambda f: f.__qualname__)
def test_names_and_orders(function):
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keyword = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert " ".join([*positional, "|", *keyword]) == ORDER[function]


def test_the_namespace_alias():
    assert DSA.SparseAttentionBackward is SparseAttentionBackward
    assert DSA.sparse_attention_backward_wrapper is cudnn_dsa.sparse_attention_backward_wrapper


def arguments(case, prefix=""):
    names = ("q", "kv", "out", "dout", "lse", "attn_sink", "topk_idxs")
    return {prefix + name: getattr(case, name) for name in names}


def usual(target, name="sink", **sizes):
    dtype = target.dtypes[0]
    return make(name, dtype, Sizes(**{"head_dim": target.head_dims[-1], **sizes})).to(target.device)


def test_a_plan_serves_other_lengths(target):
    case = usual(target)
    plan = SparseAttentionBackward(
        **arguments(case, "sample_"), softmax_scale=case.softmax_scale, backend=target.backend
    )
    assert plan.check_support() is True
    plan.compile()
    assert isinstance(plan.scratch_workspace_bytes(), int)
    for s_q, s_kv in ((6, 40), (3, 90), (17, 12)):
        other = usual(target, s_q=s_q, s_kv=s_kv)
        assert_gradients("sink", other, plan.execute(**arguments(other)))
        assert_gradients("sink", other, plan(**arguments(other)))


@pytest.mark.parametrize(
    ("change", "argument"),
    [({"heads": 5}, "q"), ({"topk": 13}, "topk_idxs"), ({"head_dim": 32}, "q")],
)
def test_a_plan_serves_nothing_else(change, argument):
    case = make("sink", torch.float32, Sizes())
    plan = SparseAttentionBackward(**arguments(case, "sample_"), backend="reference")
    other = make("sink", torch.float32, Sizes(**change))
    with pytest.raises(ContractError) as caught:
        plan.execute(**arguments(other))
    assert caught.value.argument == argument


def test_a_plan_fixes_dtypes_and_options():
    case = make("sink", torch.bfloat16, Sizes())
    plan = SparseAttentionBackward(**arguments(case, "sample_"), backend="reference")
    half = make("sink", torch.float16, Sizes())
    good = arguments(case)
    for change, argument in (
        (arguments(half), "q"),
        ({"attn_sink": None}, "attn_sink"),
        ({"out": case.out.float()}, "out"),
        ({"topk_length": torch.ones(6, dtype=torch.int32)}, "topk_length"),
        ({"delta": torch.zeros_like(case.lse)}, "delta"),
        ({"dkv": torch.zeros(case.kv.shape)}, "dkv"),
    ):
        with pytest.raises(ContractError) as caught:
            plan.execute(**{**good, **change})
        assert caught.value.argument == argument, str(caught.value)


def test_a_wrong_topk_length_is_refused_on_a_warm_plan(target):
    case = usual(target, "topk_length")
    plan = SparseAttentionBackward(
        **arguments(case, "sample_"), sample_topk_length=case.topk_length, softmax_scale=case.softmax_scale,
        backend=target.backend,
    )  # fmt: skip
    plan.execute(**arguments(case), topk_length=case.topk_length)
    for wrong in (case.topk_length[:-1], case.topk_length[:, None], case.topk_length.long()):
        with pytest.raises(ContractError, match="topk_length: expected"):
            plan.execute(**arguments(case), topk_length=wrong)


def test_a_plan_with_a_wide_dkv_allocates_one(target):
    case = usual(target)
    dkv = torch.zeros(case.kv.shape, dtype=torch.float32, device=target.device)
    if target.dtypes[0] == torch.float64:
        pytest.skip("fp64 is as wide")
    plan = SparseAttentionBackward(
        **arguments(case, "sample_"), sample_dkv=dkv, softmax_scale=case.softmax_scale, backend=target.backend
    )
    assert plan.execute(**arguments(case)).dkv.dtype == torch.float32
    first = plan.execute(**arguments(case), dkv=dkv).dkv.clone()
    plan.execute(**arguments(case), dkv=dkv, accumulate=True)
    torch.testing.assert_close(dkv, 2 * first, rtol=1e-5, atol=1e-6)


def test_the_scale_of_the_plan_and_of_a_call():
    case = make("sink", torch.float64, Sizes())
    plan = SparseAttentionBackward(**arguments(case, "sample_"), softmax_scale=0.3, backend="reference")

    def wants(scale):
        case.softmax_scale = scale
        out, lse = case.forward_oracle()
        case.out, case.lse = out, lse
        return case

    assert_gradients("sink", wants(0.3), plan.execute(**arguments(case)))
    assert_gradients("sink", wants(0.7), plan.execute(**arguments(case), softmax_scale=0.7))
    plain = SparseAttentionBackward(**arguments(case, "sample_"), backend="reference")
    assert_gradients("sink", wants(64**-0.5), plain.execute(**arguments(case)))


def test_a_plan_holds_no_tensor():
    import gc
    import weakref

    case = make("sink", torch.float32, Sizes())
    plan = SparseAttentionBackward(**arguments(case, "sample_"), backend="reference")
    plan.check_support()
    watch = weakref.ref(case.q)
    del case
    gc.collect()
    assert watch() is None


def test_forward_plan_feeds_the_backward_plan(target):
    case = usual(target)
    forward = SparseAttentionForward(
        case.q, case.kv, case.topk_idxs, case.attn_sink, softmax_scale=case.softmax_scale, backend=target.backend
    )
    assert forward.check_support()
    forward.compile()
    wide = torch.empty(case.out.shape, dtype=torch.float32, device=target.device)
    case.out, case.lse = forward.execute(case.q, case.kv, case.topk_idxs, case.attn_sink, out=wide)
    assert case.out is wide
    result = cudnn_dsa.sparse_attention_backward_wrapper(
        **arguments(case), softmax_scale=case.softmax_scale, backend=target.backend
    )
    assert_gradients("sink", case, result)


def test_results_take_names_positions_and_string_keys():
    case = make("sink", torch.float32, Sizes())
    result = cudnn_dsa.sparse_attention_backward_wrapper(**arguments(case), backend="reference")
    dq, dkv, d_sink = result
    assert result["dq"] is result.dq is result[0] is dq
    assert result["dkv"] is dkv
    assert result["d_sink"] is d_sink
    assert result.keys() == ("dq", "dkv", "d_sink")
    with pytest.raises(KeyError):
        result["dv"]
    outputs = cudnn_dsa.sparse_attention_forward_wrapper(case.q, case.kv, case.topk_idxs, backend="reference")
    assert outputs["lse"] is outputs.lse is outputs[1]


@pytest.mark.parametrize("accumulate", [False, True])
def test_the_wrapper_stages_strided_outputs(target, accumulate):
    case = usual(target, "random")
    buffer = torch.ones(case.kv.shape[0], 2 * case.kv.shape[1], device=target.device)
    dkv, guard = buffer[:, : case.kv.shape[1]], buffer[:, case.kv.shape[1] :]
    dq = torch.zeros(case.q.shape[1], case.q.shape[0], case.q.shape[2], dtype=case.q.dtype, device=target.device)
    dq = dq.transpose(0, 1)
    result = cudnn_dsa.sparse_attention_backward_wrapper(
        **arguments(case), softmax_scale=case.softmax_scale, dq=dq, dkv=dkv, accumulate=accumulate,
        backend=target.backend,
    )  # fmt: skip
    assert result.dq is dq
    assert result.dkv is dkv
    assert (guard == 1).all()
    assert_gradients("random", case, (dq, dkv - 1.0 if accumulate else dkv, None), limit=1e-5)


@pytest.mark.parametrize("name", ["q", "kv", "out", "dout", "lse", "attn_sink", "dq", "dkv", "d_sink"])
def test_a_lazy_negation_is_carried_out(target, name):
    """torch._neg_view, and the imaginary part of a conjugate, hold the negative of what their memory does."""
    case = usual(target)
    call = {**arguments(case), "softmax_scale": case.softmax_scale, "backend": target.backend}
    outputs = {
        "dq": torch.zeros_like(case.q),
        "dkv": torch.zeros_like(case.kv),
        "d_sink": torch.zeros_like(case.attn_sink),
    }
    call |= outputs
    lazy = torch._neg_view(-call[name]) if name in arguments(case) else torch._neg_view(outputs[name])
    assert lazy.is_neg()
    # The same call without the negation, so that its verdict is remembered.
    cudnn_dsa.sparse_attention_backward_wrapper(**{k: v for k, v in call.items() if k != "d_sink"})
    interface.sparse_attention_backward(**call)
    result = cudnn_dsa.sparse_attention_backward_wrapper(
        **{k: v for k, v in {**call, name: lazy}.items() if k != "d_sink"}
    )
    assert_gradients("sink", case, result)
    result = interface.sparse_attention_backward(**{**call, name: lazy})
    assert_gradients("sink", case, result)
    if name in outputs:
        assert result[name] is lazy


def test_a_workspace_of_the_right_size_is_used(monkeypatch):
    case = make("sink", torch.float32, Sizes())
    seen = []
    monkeypatch.setattr(reference, "workspace_bytes", lambda problem: 768)
    monkeypatch.setattr(reference, "backward", lambda problem, tensors, workspace, stream: seen.append(workspace))
    plan = SparseAttentionBackward(**arguments(case, "sample_"), backend="reference")
    assert plan.scratch_workspace_bytes() == 768
    base = torch.zeros(2048, dtype=torch.uint8)
    start = -base.data_ptr() % 256
    mine = base[start : start + 1024]
    plan.execute(**arguments(case), workspace=mine)
    assert seen[-1] is mine
    plan.execute(**arguments(case))
    assert seen[-1].numel() == 768


def test_prepare_runs_in_compile(monkeypatch):
    case = make("sink", torch.float32, Sizes())
    seen = []
    monkeypatch.setattr(reference, "prepare", seen.append)
    SparseAttentionBackward(**arguments(case, "sample_"), backend="reference", deterministic=True).compile()
    assert seen[0].deterministic
    assert seen[0].direction == "backward"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dkv", [None, torch.float32], ids=str)
def test_no_execution_needs_a_kernel_that_compile_did_not_prepare(monkeypatch, dtype, dkv):
    """Whatever a plan may be executed with: what a graph captures must not be compiled inside of it."""
    case = make("sink", dtype, Sizes())
    prepared, ran = set(), set()
    for direction in ("forward", "backward"):
        call = getattr(reference, direction)
        monkeypatch.setattr(
            reference, direction, lambda p, *rest, call=call: (ran.add(p.kernel_key("")), call(p, *rest))
        )
    monkeypatch.setattr(reference, "prepare", lambda p: prepared.add(p.kernel_key("")))

    sample = None if dkv is None else torch.empty(case.kv.shape, dtype=dkv)
    plan = SparseAttentionBackward(**arguments(case, "sample_"), sample_dkv=sample, backend="reference")
    plan.compile()
    plan.execute(**arguments(case), dkv=sample)
    if torch.float32 in (dtype, dkv):
        plan.execute(**arguments(case), dkv=torch.zeros(case.kv.shape), accumulate=True)
    inputs = {"q": case.q, "kv": case.kv, "topk_idxs": case.topk_idxs, "attn_sink": case.attn_sink}
    forward = SparseAttentionForward(
        **{f"sample_{name}": tensor for name, tensor in inputs.items()}, backend="reference"
    )
    forward.compile()
    for out in (None, torch.empty(case.out.shape, dtype=dtype), torch.empty(case.out.shape)):
        forward.execute(**inputs, out=out)
    assert len(ran) >= 2
    assert ran <= prepared


def test_deterministic_follows_torch(monkeypatch):
    case = make("sink", torch.float32, Sizes())
    seen = []
    monkeypatch.setattr(reference, "backward", lambda problem, *rest: seen.append(problem.deterministic))
    call = {**arguments(case), "backend": "reference"}
    interface.sparse_attention_backward(**call)
    torch.use_deterministic_algorithms(True)
    try:
        interface.sparse_attention_backward(**call)
        interface.sparse_attention_backward(**call, deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)
    interface.sparse_attention_backward(**call, deterministic=True)
    assert seen == [False, True, False, True]


@pytest.mark.parametrize("stream", ["abc", 1.5, True, [0], object()])
def test_what_is_no_stream_is_refused_on_every_device(stream):
    """Code that is tried out on a CPU does not get its first error on the cluster."""
    case = make("sink", torch.float32, Sizes())
    forward = (case.q, case.kv, case.topk_idxs)
    plan = SparseAttentionBackward(**arguments(case, "sample_"), backend="reference")
    for call in (
        lambda: plan.execute(**arguments(case), current_stream=stream),
        lambda: cudnn_dsa.sparse_attention_backward_wrapper(**arguments(case), backend="reference", stream=stream),
        lambda: cudnn_dsa.sparse_attention_forward_wrapper(*forward, backend="reference", stream=stream),
        lambda: interface.sparse_attention_forward(*forward, backend="reference", current_stream=stream),
    ):
        with pytest.raises(TypeError, match="stream: expected a torch stream, an integer handle, a CUstream or None"):
            call()


def test_a_handle_means_nothing_on_a_cpu_and_is_taken():
    case = make("sink", torch.float32, Sizes())
    for stream in (None, 0, 7):
        interface.sparse_attention_backward(**arguments(case), backend="reference", stream=stream)


def test_two_streams_are_one_too_many():
    case = make("sink", torch.float32, Sizes())
    with pytest.raises(ContractError, match="stream: expected one of stream and current_stream, got both"):
        interface.sparse_attention_backward(**arguments(case), backend="reference", stream=1, current_stream=2)


def test_the_kernel_key_holds_no_length():
    case = make("sink", torch.float32, Sizes())
    other = make("sink", torch.float32, Sizes(s_q=90, s_kv=70, topk=33))

    def key(case):
        return _problem(case).kernel_key("sm_90a")

    assert key(case) == key(other)
    assert key(case) != key(make("random", torch.float32, Sizes()))
    assert key(case) != key(make("sink", torch.float32, Sizes(heads=8)))
    assert hash(key(case)) is not None


def _problem(case):
    from cudnn_dsa.contracts.sparse_attention import Options

    tensors = {**arguments(case), "topk_length": None}
    return interface.gate(tensors, Options("backward", "reference"))


def test_a_missing_extension_is_said_once(caplog, monkeypatch):
    problem = _problem(make("sink", torch.float32, Sizes()))
    monkeypatch.setattr(backends, "candidates", lambda problem: ("sm90", "reference"))
    monkeypatch.setattr(backends, "_said", set())
    with caplog.at_level(logging.WARNING, logger="cudnn_dsa"):
        assert backends.select(problem) is reference
        backends.select(problem)
    assert len([r for r in caplog.records if "using backend 'reference'" in r.message]) == 1


def test_a_remembered_verdict_still_sees_aliases_and_changes():
    """The gate remembers what passed; everything that could make the next call wrong is still seen."""
    case = make("sink", torch.float32, Sizes())
    call = {**arguments(case), "backend": "reference"}
    for _ in range(2):
        interface.sparse_attention_backward(**call, dq=torch.empty_like(case.q))
    with pytest.raises(ContractError, match="dq: expected memory of its own, apart from q"):
        interface.sparse_attention_backward(**call, dq=case.q)
    with pytest.raises(ContractError, match="dq: expected memory of its own, apart from dout"):
        interface.sparse_attention_backward(**call, dq=case.dout.view(case.q.shape))
    for wrong in ({"lse": case.lse.double()}, {"dout": case.dout[:-1]}, {"topk_idxs": case.topk_idxs.long()}):
        with pytest.raises(ContractError, match=f"{next(iter(wrong))}: expected"):
            interface.sparse_attention_backward(**{**call, **wrong})
    buffer = torch.empty(case.kv.shape[0], 2, case.kv.shape[1])
    interleaved = {"dkv": buffer[:, 0], "kv": buffer[:, 1].copy_(case.kv)}
    with pytest.raises(NotImplementedError, match="dkv: expected a contiguous tensor"):
        interface.sparse_attention_backward(**{**call, **interleaved})
    result = cudnn_dsa.sparse_attention_backward_wrapper(**{**call, **interleaved})
    assert_gradients("sink", case, (result.dq, result.dkv, result.d_sink))


@pytest.mark.parametrize("name", ["q", "kv", "out", "dout", "lse", "attn_sink"])
def test_a_verdict_is_of_tensors_that_nothing_wraps(name):
    """A tangent, or a torch.func transform, on a call whose like has just passed: nothing is dropped in silence."""
    case = make("sink", torch.float32, Sizes())
    call = {**arguments(case), "backend": "reference"}

    def backward(tensor):
        return cudnn_dsa.sparse_attention_backward_wrapper(**{**call, name: tensor}).dq

    backward(call[name])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(call[name], torch.ones_like(call[name]))
        with pytest.raises(ContractError, match=f"^{name}: expected a tensor without a tangent"):
            backward(dual)
    with pytest.raises(ContractError, match=f"^{name}: expected a tensor outside of torch.func"):
        torch.func.grad(lambda x: backward(x).sum())(call[name])
    with pytest.raises(ContractError, match=f"^{name}: expected a tensor with memory of its own"):
        torch.func.vmap(backward)(call[name][None].repeat_interleave(2, 0))
    backward(call[name])


def test_a_verdict_is_of_one_device():
    """Everything but the device is equal; on meta tensors nothing can run."""
    case = make("sink", torch.float32, Sizes())
    call = {**arguments(case), "backend": "reference"}
    cudnn_dsa.sparse_attention_backward_wrapper(**call)
    elsewhere = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    for _ in range(2):
        with pytest.raises(ContractError, match="q: expected a device with memory, got meta"):
            cudnn_dsa.sparse_attention_backward_wrapper(**elsewhere)
    # q alone is remembered to be on the CPU.
    with pytest.raises(ContractError, match=r"^kv: expected device cpu"):
        cudnn_dsa.sparse_attention_backward_wrapper(**{**call, "kv": elsewhere["kv"]})


def test_the_memory_of_verdicts_is_bounded(monkeypatch):
    monkeypatch.setattr(admission, "_VERDICTS_KEPT", 4)
    monkeypatch.setattr(admission, "_verdicts", {})
    for s_q in range(1, 12):
        case = make("sink", torch.float32, Sizes(s_q=s_q))
        interface.sparse_attention_backward(**arguments(case), backend="reference")
        assert len(admission._verdicts) <= 4


def test_writing_a_given_output_is_seen_by_autograd(target):
    """A graph that saved the tensor refuses to run backward with its new contents."""
    case = usual(target)
    call = {**arguments(case), "softmax_scale": case.softmax_scale, "backend": target.backend}
    outputs = {
        "dq": torch.ones_like(case.q),
        "dkv": torch.ones_like(case.kv),
        "d_sink": torch.ones_like(case.attn_sink),
    }
    for name, buffer in outputs.items():
        weight = torch.ones_like(buffer, requires_grad=True)
        product = (weight * buffer).sum()
        interface.sparse_attention_backward(**call, **{name: buffer})
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def test_a_verdict_belongs_to_its_device():
    """Meta tensors of the same shapes come first, as when a module is initialised without memory."""
    case = make("random", torch.float32, Sizes(heads=5, s_q=19))
    inputs = (case.q, case.kv, case.topk_idxs)
    cudnn_dsa.sparse_attention(*(x.to("meta") for x in inputs))
    assert cudnn_dsa.sparse_attention(*inputs).device.type == "cpu"


OTHER_VALUES = {
    "direction": "forward", "heads": 7, "head_dim": 32, "head_dim_v": 31, "dtype": "bfloat16", "out_dtype": "float64",
    "stat_dtype": "float64", "sink_dtype": None, "delta_dtype": "float32", "dkv_dtype": "bfloat16",
    "has_topk_length": True, "deterministic": True, "accumulate": True, "block_tile": 128,
    "q_cluster_mode": "adaptive_pair",
}  # fmt: skip


@pytest.mark.parametrize("field", OTHER_VALUES)
def test_the_kernel_key_holds_what_changes_the_code(field):
    problem = _problem(make("sink", torch.float32, Sizes()))
    assert replace(problem, **{field: OTHER_VALUES[field]}).kernel_key("sm_90a") != problem.kernel_key("sm_90a")


def test_the_kernel_key_holds_the_address_width_and_the_architecture():
    problem = _problem(make("sink", torch.float32, Sizes()))
    wide = replace(problem, s_kv=2**26)
    assert wide.wide_address
    assert wide.kernel_key("sm_90a") != problem.kernel_key("sm_90a")
    assert problem.kernel_key("sm_100a") != problem.kernel_key("sm_90a")


def test_a_remembered_hash_stays_in_its_process():
    """Problems and options are keys whose hash is kept; that of a string is another one in another process."""
    problem, options = _problem(make("sink", torch.float32, Sizes())), admission.BACKWARD
    for thing, other in ((problem, replace(problem, heads=7)), (options, replace(options, block_tile=128))):
        assert hash(thing) == hash(thing) == hash(replace(thing))
        assert hash(thing) != hash(other)
        again = pickle.loads(pickle.dumps(thing))
        assert "_hash" not in vars(again)
        assert again == thing
        assert hash(again) == hash(thing)


def test_a_workspace_apart_from_every_other_tensor(monkeypatch):
    monkeypatch.setattr(reference, "workspace_bytes", lambda problem: 256)
    case = make("sink", torch.float32, Sizes())
    base = torch.zeros(case.q.nbytes + 512, dtype=torch.uint8)
    base = base[-base.data_ptr() % 256 :]
    case.q = base[: case.q.nbytes].view(torch.float32).view(case.q.shape).copy_(case.q)
    with pytest.raises(ContractError, match="workspace: expected memory of its own, apart from q"):
        interface.sparse_attention_backward(**arguments(case), backend="reference", workspace=base[:256])


def test_the_operator_passes_deterministic_on(monkeypatch):
    seen = []
    real = reference.backward
    monkeypatch.setattr(
        reference, "backward", lambda problem, *rest: (seen.append(problem.deterministic), real(problem, *rest))
    )
    case = make("random", torch.float32, Sizes())
    for wanted in (True, False):
        out = cudnn_dsa.sparse_attention(
            case.q.requires_grad_(), case.kv, case.topk_idxs, deterministic=wanted, backend="reference"
        )
        out.sum().backward()
    assert seen == [True, False]
