"""The interface's promises on a CUDA device: one stream, one device, no allocation, no synchronisation, graphs.

The tests with a parked stream fail when something runs on the wrong stream: the parked one is busy for about half a
second, and what is checked is checked before it is done.
"""

import pytest
import torch
from dsa_cases import Sizes, assert_gradients, make

import cudnn_dsa
from cudnn_dsa import SparseAttentionBackward, SparseAttentionForward, interface

PARKED_CYCLES = 1_000_000_000  # about half a second at 1.8 GHz
SIZES = Sizes(s_q=16, s_kv=80, heads=8, head_dim=576, topk=64)

pytestmark = pytest.mark.gpu


def stream_kinds():
    def bindings(stream):
        driver = pytest.importorskip("cuda.bindings.driver")
        return driver.CUstream(stream.cuda_stream)

    return {"torch": lambda s: s, "handle": lambda s: s.cuda_stream, "CUstream": bindings}


def arguments(case, prefix=""):
    names = ("q", "kv", "out", "dout", "lse", "attn_sink", "topk_idxs")
    return {prefix + name: getattr(case, name) for name in names}


def on_gpu(target, name="sink", sizes=SIZES, dtype=torch.bfloat16):
    if target.device != "cuda":
        pytest.skip("a promise about CUDA")
    return make(name, dtype, sizes).to("cuda")


def warm(target, case):
    """Compile and tune before anything is parked."""
    call(target, case)
    torch.cuda.synchronize()


def call(target, case, **options):
    return interface.sparse_attention_backward(
        **arguments(case), softmax_scale=case.softmax_scale, backend=target.backend, **options
    )


def park(stream):
    with torch.cuda.stream(stream):
        torch.cuda._sleep(PARKED_CYCLES)


@pytest.mark.gpu_exclusive
@pytest.mark.parametrize("kind", stream_kinds())
def test_nothing_runs_on_the_ambient_stream(target, kind):
    case = on_gpu(target)
    warm(target, case)
    side = torch.cuda.Stream()
    dq, dkv = torch.full_like(case.q, torch.nan), torch.full_like(case.kv, torch.nan)
    d_sink = torch.full_like(case.attn_sink, torch.nan)
    # A strided input, so that a normalising copy is among what must not wait for the ambient stream.
    case.dout = case.dout.transpose(0, 1).contiguous().transpose(0, 1)
    torch.cuda.synchronize()
    park(torch.cuda.current_stream())
    call(target, case, dq=dq, dkv=dkv, d_sink=d_sink, stream=stream_kinds()[kind](side))
    with torch.cuda.stream(side):
        host = [x.to("cpu", non_blocking=False) for x in (dq, dkv, d_sink)]
    assert not torch.cuda.current_stream().query(), "the ambient stream was done before the side stream was read"
    torch.cuda.synchronize()
    assert_gradients("sink", case, tuple(host))


@pytest.mark.gpu_exclusive
@pytest.mark.parametrize("kind", stream_kinds())
def test_everything_waits_for_the_given_stream(target, kind):
    """Inputs appear on the side stream late, and outputs are poisoned there late: a launch elsewhere sees neither."""
    case = on_gpu(target)
    warm(target, case)
    side = torch.cuda.Stream()
    late = {name: torch.zeros_like(x) for name, x in arguments(case).items()}
    dq, dkv = torch.zeros_like(case.q), torch.zeros_like(case.kv)
    torch.cuda.synchronize()
    park(side)
    with torch.cuda.stream(side):
        for name, x in arguments(case).items():
            late[name].copy_(x)
        dq.fill_(torch.nan)
        dkv.fill_(torch.nan)
    got = interface.sparse_attention_backward(
        **late, softmax_scale=case.softmax_scale, dq=dq, dkv=dkv, backend=target.backend,
        stream=stream_kinds()[kind](side),
    )  # fmt: skip
    torch.cuda.synchronize()
    assert_gradients("sink", case, got)


@pytest.mark.gpu_exclusive
def test_a_staged_output_is_copied_on_the_launch_stream(target):
    case = on_gpu(target)
    warm(target, case)
    side = torch.cuda.Stream()
    dkv = torch.zeros(case.kv.shape[0], 2 * case.kv.shape[1], dtype=torch.float32, device="cuda")[:, ::2]

    def staged():
        return cudnn_dsa.sparse_attention_backward_wrapper(
            **arguments(case), softmax_scale=case.softmax_scale, dkv=dkv, backend=target.backend, stream=side
        )

    # To load a kernel for the first time may wait for the whole device: the staged path, its copy and the copy to the
    # host are walked once before anything is parked.
    staged()
    dkv.cpu()
    dkv.zero_()
    torch.cuda.synchronize()
    park(torch.cuda.current_stream())
    result = staged()
    assert result.dkv is dkv
    with torch.cuda.stream(side):
        host = dkv.cpu()
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert_gradients("sink", case, (result.dq, host, result.d_sink))


@pytest.mark.gpu_exclusive
def test_inputs_may_be_dropped_while_the_launch_is_pending(target):
    """record_stream: without it the allocator hands the inputs' memory to the next allocation of the ambient stream."""
    case = on_gpu(target)
    warm(target, case)
    host = case.to("cpu")
    side = torch.cuda.Stream()
    for _ in range(3):
        inputs = {name: x.clone() for name, x in arguments(case).items()}
        shapes = {name: (x.shape, x.dtype) for name, x in inputs.items()}
        torch.cuda.synchronize()
        park(side)
        got = interface.sparse_attention_backward(
            **inputs, softmax_scale=case.softmax_scale, backend=target.backend, stream=side
        )
        del inputs
        poison = [torch.empty(shape, dtype=dtype, device="cuda").fill_(1) for shape, dtype in shapes.values()]
        torch.cuda.synchronize()
        assert_gradients("sink", host, tuple(x.cpu() for x in got))
        del poison


def test_a_stream_of_another_kind_is_refused(target):
    case = on_gpu(target)
    with pytest.raises(TypeError, match="stream: expected a torch stream, an integer handle, a CUstream or None"):
        call(target, case, stream="fast")


def test_the_device_guard_follows_q(target, monkeypatch):
    """Where another device is current, q's is entered; with one device here, torch is made to say so."""
    case = on_gpu(target)
    warm(target, case)
    seen = []
    real = torch.cuda.device

    class Spy(real):
        def __init__(self, device):
            seen.append(torch.device(device))
            super().__init__(device)

    monkeypatch.setattr(torch.cuda, "device", Spy)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: case.q.device.index + 1)
    call(target, case)
    assert case.q.device in seen


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_second_device_works_while_the_first_is_current(target):
    if target.device != "cuda":
        pytest.skip("a promise about CUDA")
    with torch.cuda.device(0):
        case = make("sink", torch.bfloat16, SIZES).to("cuda:1")
        got = call(target, case)
        assert got.dq.device == torch.device("cuda:1")
        assert torch.cuda.current_device() == 0
    assert_gradients("sink", case, got)
    mixed = make("sink", torch.bfloat16, SIZES).to("cuda:0")
    case.kv = mixed.kv
    with pytest.raises(cudnn_dsa.ContractError, match=r"kv: expected device cuda:1 \(that of q\), got cuda:0"):
        call(target, case)


def kernels_only(target):
    if target.wide:
        pytest.skip("the reference allocates")


def prepared_backward(target, case, **options):
    plan = SparseAttentionBackward(
        **arguments(case, "sample_"), softmax_scale=case.softmax_scale, backend=target.backend, **options
    )
    plan.compile()
    outputs = {"dq": torch.empty_like(case.q), "dkv": torch.empty_like(case.kv)}
    outputs["d_sink"] = torch.empty_like(case.attn_sink)
    outputs["workspace"] = torch.empty(plan.scratch_workspace_bytes(), dtype=torch.uint8, device="cuda")
    return plan, outputs


@pytest.mark.parametrize("deterministic", [False, True])
def test_execute_neither_allocates_nor_synchronises(target, deterministic):
    case = on_gpu(target)
    kernels_only(target)
    plan, outputs = prepared_backward(target, case, deterministic=deterministic)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan.execute(**arguments(case), **outputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert_gradients("sink", case, (outputs["dq"], outputs["dkv"], outputs["d_sink"]))


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_first_call_after_compile_is_captured(target, deterministic):
    """Head counts that nothing else uses, so that nothing is warm; replayed with new data."""
    kernels_only(target)
    sizes = Sizes(**{**vars(SIZES), "heads": 37 if deterministic else 29})
    case = on_gpu(target, sizes=sizes)
    plan, outputs = prepared_backward(target, case, deterministic=deterministic)
    static = {name: x.clone() for name, x in arguments(case).items()}
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.execute(**static, **outputs)
    for seed in (1, 2):
        other = make("sink", torch.bfloat16, sizes, seed=seed).to("cuda")
        for name, x in arguments(other).items():
            static[name].copy_(x)
        graph.replay()
        torch.cuda.synchronize()
        assert_gradients("sink", other, (outputs["dq"], outputs["dkv"], outputs["d_sink"]))


def test_the_forward_is_captured_after_compile(target):
    kernels_only(target)
    sizes = Sizes(**{**vars(SIZES), "heads": 31})
    case = on_gpu(target, sizes=sizes)
    inputs = (case.q, case.kv, case.topk_idxs, case.attn_sink)
    plan = SparseAttentionForward(*inputs, softmax_scale=case.softmax_scale, backend=target.backend)
    plan.compile()
    out, lse = torch.empty_like(case.out), torch.empty_like(case.lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.execute(*inputs, out=out, lse=lse)
    case.q.copy_(torch.randn_like(case.q))
    graph.replay()
    torch.cuda.synchronize()
    want, _ = case.to("cpu").forward_oracle()
    assert (out.cpu().double() - want).norm() < 3e-3 * want.norm()


def test_auto_finds_a_backend_here(target):
    case = on_gpu(target)
    kernels_only(target)
    got = interface.sparse_attention_backward(**arguments(case), softmax_scale=case.softmax_scale)
    assert_gradients("sink", case, got)
    with pytest.raises(cudnn_dsa.ContractError, match=r"kv: expected device cuda:0 \(that of q\), got cpu"):
        interface.sparse_attention_backward(**{**arguments(case), "kv": case.kv.cpu()})
