"""The differentiable operator: derivatives, and everything PyTorch does with an operator."""

import itertools

import dsa_oracle
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from dsa_cases import CASES, Sizes, make
from torch.utils.checkpoint import checkpoint

import cudnn_dsa
from cudnn_dsa import ContractError, sparse_attention

SMALL = Sizes(s_q=4, s_kv=9, heads=3, head_dim=6, topk=5)


def leaves_of(case):
    return [x.detach().clone().requires_grad_() for x in (case.q, case.kv, case.attn_sink) if x is not None]


def attend(case, q, kv, sink=None, **options):
    return sparse_attention(
        q, kv, case.topk_idxs, attn_sink=sink, topk_length=case.topk_length, softmax_scale=case.softmax_scale,
        **options,
    )  # fmt: skip


def wide(target):
    if not target.wide:
        pytest.skip("needs fp64")


def tuned(target, name="sink", dtype=None, **sizes):
    """A case at sizes and a dtype that the target runs."""
    dtype = dtype or (torch.float32 if target.wide else torch.bfloat16)
    head_dim = 64 if target.wide else 576
    return make(name, dtype, Sizes(**{"head_dim": head_dim, **sizes})).to(target.device)


@pytest.mark.parametrize("name", ["random", "sink", "topk_length", "empty_rows", "scattered_invalid", "duplicates"])
@pytest.mark.parametrize("head_dim_v", [None, 4])
def test_gradcheck(target, name, head_dim_v):
    wide(target)
    case = make(name, torch.float64, SMALL).to(target.device)

    def call(*leaves):
        return attend(case, *leaves, backend=target.backend, head_dim_v=head_dim_v)

    assert torch.autograd.gradcheck(call, leaves_of(case))


@pytest.mark.parametrize("name", ["random", "sink"])
def test_gradcheck_through_lse(target, name):
    wide(target)
    case = make(name, torch.float64, SMALL).to(target.device)

    def call(*leaves):
        return attend(case, *leaves, backend=target.backend, return_lse=True)

    assert torch.autograd.gradcheck(call, leaves_of(case))


@pytest.mark.parametrize("sink", [None, 0.0, 200.0, torch.inf])
def test_gradient_of_lse_alone_does_not_see_the_sink(target, sink):
    """exp(Z - lse) overflows fp32 at a sink of 200: the gradient of lse must not pass through it."""
    case = tuned(target, "random")
    if sink is not None:
        case.attn_sink = torch.full((4,), sink, dtype=case.lse.dtype, device=target.device)
    leaves = leaves_of(case)
    _, lse = attend(case, *leaves, backend=target.backend, return_lse=True)
    dlse = torch.linspace(-1, 2, lse.numel()).view(lse.shape).to(lse)
    got = torch.autograd.grad(lse, leaves[:2], dlse)
    case.dout = torch.zeros_like(case.dout)
    want = case.to("cpu").end_to_end_oracle(dlse.cpu())
    limit = 1e-5 if target.wide else 3e-3
    for have, expected in zip(got, want[:2], strict=True):
        assert dsa_oracle.relative_error(have, expected) < limit


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("with_length", [False, True])
def test_gradients_of_out_and_lse_add(target, with_sink, with_length):
    case = tuned(target, "sink" if with_sink else "random")
    if with_length:
        case.topk_length = torch.arange(1, 7, dtype=torch.int32, device=target.device)
    leaves = leaves_of(case)
    out, lse = attend(case, *leaves, backend=target.backend, return_lse=True)
    dlse = torch.linspace(-1, 2, lse.numel()).view(lse.shape).to(lse)
    got = torch.autograd.grad((out, lse), leaves, (case.dout, dlse))
    want = case.to("cpu").end_to_end_oracle(dlse.cpu())
    limit = 1e-5 if target.wide else 5e-3
    for have, expected in zip(got, want, strict=False):
        assert dsa_oracle.relative_error(have, expected) < limit


@pytest.mark.parametrize("name", CASES)
def test_end_to_end_on_every_kind_of_data(target, name):
    case = tuned(target, name)
    leaves = leaves_of(case)
    got = torch.autograd.grad(attend(case, *leaves, backend=target.backend), leaves, case.dout)
    _, _, _, terms = case.to("cpu").backward_oracle()
    limit = (5e-5 if name == "logits_200" else 1e-5) if target.wide else 5e-3
    for key, have, want in zip(("dq", "dkv", "d_sink"), got, case.to("cpu").end_to_end_oracle(), strict=False):
        cancels = name in ("one_key_only", "leading_invalid", "one_row_for_all") and key == "dq"
        assert dsa_oracle.relative_error(have, want, terms[key] if cancels else None) < limit, key


def test_second_derivatives_raise_clearly(target):
    case = tuned(target)
    leaves = leaves_of(case)
    out = attend(case, *leaves, backend=target.backend)
    (dq,) = torch.autograd.grad(out.sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        dq.sum().backward()


def dual_call(case, name, requires_grad=False):
    """The operator with a tangent on one of its inputs."""
    with forward_ad.dual_level():
        inputs = {"q": case.q, "kv": case.kv, "sink": case.attn_sink}
        tensor = inputs[name].clone().requires_grad_(requires_grad)
        return attend(case, **{**inputs, name: forward_ad.make_dual(tensor, torch.ones_like(tensor))})


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", ["q", "kv", "sink"])
def test_forward_mode_is_refused_rather_than_zero(name, requires_grad):
    case = make("sink", torch.float64, SMALL)
    with pytest.raises(NotImplementedError, match="expected a tensor without a tangent, got a dual tensor"):
        dual_call(case, name, requires_grad)


def test_forward_mode_is_refused_by_the_operator_itself():
    case = make("sink", torch.float64, SMALL)
    with forward_ad.dual_level():
        call = (forward_ad.make_dual(case.q, case.q), case.kv, case.topk_idxs, None, None, None, None)
        with pytest.raises(NotImplementedError, match="q: expected a tensor without a tangent"):
            torch.ops.cudnn_dsa.sparse_attention_forward(*call, False, "reference", None, False)


def transforms(f, x):
    return {
        "jvp": lambda: torch.func.jvp(f, (x,), (x,)),
        "jacfwd": lambda: torch.func.jacfwd(f)(x),
        "forward-mode jacobian": lambda: torch.autograd.functional.jacobian(
            f, x, vectorize=True, strategy="forward-mode"
        ),
        "grad": lambda: torch.func.grad(lambda x: f(x).sum())(x),
        "vjp": lambda: torch.func.vjp(f, x),
        "jacrev": lambda: torch.func.jacrev(f)(x),
        "hessian": lambda: torch.func.hessian(lambda x: f(x).sum())(x),
        "vmap of grad": lambda: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(torch.stack([x, x])),
        "grad of vmap": lambda: torch.func.grad(lambda x: torch.func.vmap(f)(x).sum())(torch.stack([x, x])),
    }


@pytest.mark.parametrize("transform", transforms(None, None))
def test_derivatives_of_torch_func_are_refused_by_name(transform):
    case = make("random", torch.float64, SMALL)
    words = "without a tangent" if transform in ("jvp", "jacfwd", "forward-mode jacobian") else "use torch.autograd"
    with pytest.raises(NotImplementedError, match=words):
        transforms(lambda q: attend(case, q, case.kv), case.q)[transform]()


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "tangent"])
def test_the_interface_refuses_what_torch_func_wraps(transform):
    """It works on memory: without these refusals a tangent would be lost, and a batch has no address."""
    case = make("random", torch.float64, SMALL)

    def forward(q):
        return cudnn_dsa.sparse_attention_forward_wrapper(q, case.kv, case.topk_idxs, backend="reference").out

    def with_tangent():
        with forward_ad.dual_level():
            forward(forward_ad.make_dual(case.q, case.q))

    calls = {
        **transforms(forward, case.q),
        "vmap": lambda: torch.func.vmap(forward)(torch.stack([case.q, case.q])),
        "tangent": with_tangent,
    }
    with pytest.raises(NotImplementedError, match="q: expected a tensor"):
        calls[transform]()


def test_tensors_of_tensors_are_refused_by_name(tmp_path):
    """A DTensor is refused everywhere; the interface, which works on memory, refuses whatever else wraps tensors."""
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.testing._internal.two_tensor import TwoTensor

    case = make("random", torch.float64, SMALL)
    call = (case.q, case.kv, case.topk_idxs)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        for place, name in enumerate(("q", "kv", "topk_idxs")):
            wrapped = list(call)
            wrapped[place] = distribute_tensor(call[place], mesh, [Replicate()])
            for entry in (sparse_attention, cudnn_dsa.sparse_attention_forward_wrapper):
                with pytest.raises(NotImplementedError, match=rf"{name}: expected .*, got a DTensor \(.*to_local\(\)"):
                    entry(*wrapped)
    finally:
        dist.destroy_process_group()
    both = TwoTensor(case.q, case.q)
    with pytest.raises(NotImplementedError, match="q: expected a tensor with memory of its own, got a TwoTensor"):
        cudnn_dsa.sparse_attention_forward_wrapper(both, *call[1:], backend="reference")
    out = sparse_attention(both, *call[1:], softmax_scale=case.softmax_scale)  # unwrapped by the dispatcher
    assert dsa_oracle.relative_error(out.a, case.out) < 1e-12


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_a_loop_over_calls():
    cases = [make("random", torch.float64, SMALL, seed) for seed in range(3)]
    stacked = [torch.stack([getattr(c, name) for c in cases]) for name in ("q", "kv", "topk_idxs")]
    out = torch.func.vmap(lambda q, kv, idxs: sparse_attention(q, kv, idxs))(*stacked)
    for got, case in zip(out, cases, strict=True):
        assert dsa_oracle.relative_error(got, case.forward_oracle()[0]) < 1e-12
    # and so are batched gradients, which vectorised jacobians use
    q = cases[0].q.requires_grad_()
    seeds = torch.stack([c.dout for c in cases])
    (batched,) = torch.autograd.grad(attend(cases[0], q, cases[0].kv), q, seeds, is_grads_batched=True)
    for got, seed in zip(batched, seeds, strict=True):
        cases[0].dout = seed
        assert dsa_oracle.relative_error(got, cases[0].end_to_end_oracle()[0]) < 1e-10


def test_no_gradient_no_saving():
    """Without gradients nothing wide is made: the third output of the operator is empty."""
    case = make("sink", torch.bfloat16, SMALL)
    args = (case.q, case.kv, case.topk_idxs, case.attn_sink, None, None, None)
    assert torch.ops.cudnn_dsa.sparse_attention_forward(*args, False, "reference", None, False)[2].numel() == 0
    wide_out = torch.ops.cudnn_dsa.sparse_attention_forward(*args, True, "reference", None, False)[2]
    assert wide_out.dtype == torch.float32


def test_only_what_requires_a_gradient_gets_one(target):
    case = tuned(target)
    kv = case.kv.clone().requires_grad_()
    attend(case, case.q, kv, case.attn_sink, backend=target.backend).sum().backward()
    assert kv.grad is not None
    assert case.q.grad is None


def test_expanded_and_transposed_gradients_are_taken(target):
    case = tuned(target)
    leaves = leaves_of(case)
    out = attend(case, *leaves, backend=target.backend)
    got = torch.autograd.grad(out.sum(), leaves, retain_graph=True)  # a gradient of stride 0
    ones = torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(got, ones, strict=True))
    strided = case.dout.transpose(0, 1).contiguous().transpose(0, 1)
    got = torch.autograd.grad(out, leaves, strided, retain_graph=True)
    want = torch.autograd.grad(out, leaves, case.dout)
    assert all(torch.equal(a, b) for a, b in zip(got[:1], want[:1], strict=True))


def test_strided_inputs_give_the_same(target):
    case = tuned(target)
    q = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    kv = torch.cat([case.kv, case.kv], 1)[:, : case.kv.shape[1]]
    idxs = case.topk_idxs.t().contiguous().t()
    want = attend(case, case.q, case.kv, case.attn_sink, backend=target.backend)
    case.topk_idxs = idxs
    assert torch.equal(attend(case, q, kv, case.attn_sink, backend=target.backend), want)


@pytest.mark.parametrize("with_options", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(target, with_options, dtype):
    if not target.wide and dtype == torch.float32:
        pytest.skip("bf16 and fp16 only")
    case = tuned(target, dtype=dtype, topk=5)
    length = torch.full((6,), 3, dtype=torch.int32, device=target.device) if with_options else None
    sink = case.attn_sink.requires_grad_() if with_options else None
    q, kv = case.q.requires_grad_(), case.kv.requires_grad_()
    ops = torch.ops.cudnn_dsa
    torch.library.opcheck(
        ops.sparse_attention_forward.default,
        (q, kv, case.topk_idxs, sink, length, None, None, True, target.backend, None, with_options),
    )
    case.attn_sink, case.topk_length = (None if sink is None else sink.detach()), length
    out, lse = (x.detach().to(target.device) for x in case.to("cpu").forward_oracle())
    tensors = (q.detach(), kv.detach(), out.to(q), case.dout, lse.to(case.lse), case.attn_sink, case.topk_idxs, length)
    torch.library.opcheck(
        ops.sparse_attention_backward.default, (*tensors, None, None, None, True, target.backend),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )  # fmt: skip


def gradients(function, case):
    leaves = leaves_of(case)
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, case.dout[: out.shape[0]])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(target, dynamic):
    case = tuned(target)
    torch._dynamo.reset()

    def layer(q, kv, sink):
        return attend(case, q * 1.0, kv * 1.0, sink, backend=target.backend)

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for got, want in zip(gradients(compiled, case), gradients(layer, case), strict=True):
        torch.testing.assert_close(got, want)


def test_compile_with_dynamic_lengths_compiles_once(target):
    """S_q and S_kv are marked dynamic: neither the contract nor anything else may specialise them."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def layer(q, kv, idxs, sink):
        return sparse_attention(q * 1.0, kv * 1.0, idxs, attn_sink=sink, backend=target.backend)

    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for s_q, s_kv in ((6, 40), (7, 50), (11, 13)):
        case = tuned(target, s_q=s_q, s_kv=s_kv)
        q, kv, sink = leaves_of(case)
        idxs = case.topk_idxs
        for tensor in (q, idxs, kv):
            torch._dynamo.mark_dynamic(tensor, 0)
        out = compiled(q, kv, idxs, sink)
        assert dsa_oracle.relative_error(out, case.to("cpu").forward_oracle()[0]) < (1e-5 if target.wide else 3e-3)
        out.sum().backward()
    assert counter.frame_count == 1


def test_compile_with_a_size_only_the_run_knows():
    """kv rows picked by a mask: an unbacked size."""
    torch._dynamo.reset()
    case = make("sink", torch.float32, SMALL)

    def layer(q, kv, keep):
        return sparse_attention(q, kv[keep.nonzero().flatten()], case.topk_idxs, backend="reference")

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        keep = torch.ones(9, dtype=torch.bool)
        torch.testing.assert_close(compiled(case.q, case.kv, keep), layer(case.q, case.kv, keep))


def test_the_contract_holds_while_tracing():
    torch._dynamo.reset()
    case = make("sink", torch.float32, SMALL)
    compiled = torch.compile(lambda q, kv: attend(case, q, kv, backend="reference"), backend="aot_eager")
    with pytest.raises(Exception, match=r"kv: expected shape \(S_kv, D=6\)"):
        compiled(case.q, case.kv[:, :5])


def test_autocast(target):
    case = tuned(target, dtype=torch.bfloat16)
    q, kv = case.q.float().requires_grad_(), case.kv.float().requires_grad_()
    sink = case.attn_sink.requires_grad_()
    with torch.autocast(target.device, torch.bfloat16):
        out = attend(case, q, kv, sink, backend=target.backend)
    assert out.dtype == torch.bfloat16
    want = gradients(lambda *leaves: attend(case, *leaves, backend=target.backend), case)
    got = torch.autograd.grad(out, (q, kv, sink), case.dout)
    assert torch.equal(out, want[0])
    assert got[0].dtype == torch.float32
    # bitwise: the arithmetic inside must not be autocast a second time
    assert torch.equal(got[0].bfloat16(), want[1])
    torch.testing.assert_close(got[2], want[3])


def test_the_interface_is_not_autocast(target):
    """Called under autocast with fp32 tensors, it computes in fp32."""
    wide(target)
    case = make("random", torch.float32, Sizes()).to(target.device)
    with torch.autocast(target.device, torch.bfloat16):
        out = cudnn_dsa.sparse_attention_forward_wrapper(
            case.q, case.kv, case.topk_idxs, softmax_scale=case.softmax_scale, backend=target.backend
        ).out
    assert dsa_oracle.relative_error(out, case.to("cpu").forward_oracle()[0]) < 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(target, reentrant):
    case = tuned(target)

    def layer(q, kv, sink):
        return attend(case, q, kv, sink, backend=target.backend, deterministic=True)

    def checkpointed(q, kv, sink):
        return checkpoint(layer, q, kv, sink, use_reentrant=reentrant)

    leaves = leaves_of(case)
    checkpointed(*leaves).backward(case.dout)
    for got, want in zip([x.grad for x in leaves], gradients(layer, case)[1:], strict=True):
        assert torch.equal(got, want)


class Layer(torch.nn.Module):
    def __init__(self, backend, heads=4):
        super().__init__()
        self.sink = torch.nn.Parameter(torch.zeros(heads))
        self.backend = backend

    def forward(self, q, kv, idxs):
        return sparse_attention(q, kv, idxs, attn_sink=self.sink, backend=self.backend)


def test_export(target):
    case = tuned(target)
    layer = Layer(target.backend).to(target.device)
    q_dim, kv_dim = torch.export.Dim("s_q", min=2), torch.export.Dim("s_kv", min=2)
    shapes = {"q": {0: q_dim}, "kv": {0: kv_dim}, "idxs": {0: q_dim}}
    program = torch.export.export(layer, (case.q, case.kv, case.topk_idxs), dynamic_shapes=shapes)
    other = tuned(target, s_q=11, s_kv=23)
    arguments = (other.q, other.kv, other.topk_idxs)
    torch.testing.assert_close(program.module()(*arguments), layer(*arguments))
    with torch.no_grad():  # exported without gradients, it must still keep what training needs
        frozen = torch.export.export(layer, (case.q, case.kv, case.topk_idxs))
    (call,) = [node for node in frozen.graph.nodes if "sparse_attention_forward" in str(node.target)]
    assert call.args[7] is True
    again = torch.export.export(layer.eval(), (case.q, case.kv, case.topk_idxs)).run_decompositions()
    assert any("sparse_attention_forward" in str(node.target) for node in again.graph.nodes)


def test_meta_tensors_give_shapes():
    """Modules that are initialised on the meta device."""
    q, kv = torch.empty(4, 3, 576, device="meta"), torch.empty(9, 576, device="meta")
    out, lse = sparse_attention(q, kv, torch.empty(4, 5, dtype=torch.int32, device="meta"), return_lse=True)
    assert out.shape == (4, 3, 512)
    assert lse.shape == (4, 3)
    assert out.device.type == "meta"


def test_hooks_see_the_gradients(target):
    """What FSDP does to a parameter and its gradient: hooks, and a parameter that is swapped between the passes."""
    case = tuned(target)
    layer = Layer(target.backend).to(target.device)
    seen = []
    layer.sink.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    layer.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(grad_out[0]))
    q = case.q.requires_grad_()
    layer(q, case.kv, case.topk_idxs).backward(case.dout)
    assert len(seen) == 2
    assert q.grad is not None


@pytest.mark.parametrize(("q_grad", "kv_grad", "sink_grad"), list(itertools.product([False, True], repeat=3)))
def test_any_subset_of_inputs(q_grad, kv_grad, sink_grad):
    case = make("sink", torch.float64, SMALL)
    inputs = [case.q, case.kv, case.attn_sink]
    leaves = [x.requires_grad_(flag) for x, flag in zip(inputs, (q_grad, kv_grad, sink_grad), strict=True)]
    out = attend(case, *leaves, backend="reference")
    assert out.requires_grad == any((q_grad, kv_grad, sink_grad))
    if out.requires_grad:
        out.backward(case.dout)
    for leaf, want in zip(leaves, case.end_to_end_oracle(), strict=True):
        assert (leaf.grad is not None) == leaf.requires_grad
        if leaf.requires_grad:
            assert dsa_oracle.relative_error(leaf.grad, want) < 1e-10


def test_the_operator_dispatches_on_the_device():
    case = make("random", torch.float32, SMALL)
    out = sparse_attention(case.q, case.kv, case.topk_idxs, softmax_scale=case.softmax_scale)
    assert dsa_oracle.relative_error(out, case.out) < 1e-5


@pytest.mark.parametrize("name", ["q", "kv", "topk_idxs", "attn_sink", "topk_length"])
def test_what_is_no_tensor_is_named(name):
    case = make("sink", torch.float32, SMALL)
    call = {"q": case.q, "kv": case.kv, "topk_idxs": case.topk_idxs, name: [1.0]}
    with pytest.raises(ContractError, match=f"{name}: expected a tensor, got list"):
        sparse_attention(**call)


def test_a_learnable_scale_is_refused_rather_than_left_without_a_gradient():
    case = make("random", torch.float32, SMALL)
    scale = torch.nn.Parameter(torch.tensor(0.25))
    with pytest.raises(ContractError, match="softmax_scale: expected a number, got a tensor"):
        sparse_attention(case.q.requires_grad_(), case.kv, case.topk_idxs, softmax_scale=scale)
