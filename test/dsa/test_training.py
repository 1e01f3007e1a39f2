"""A training step through a layer of latent attention: what a training loop wraps around the operator."""

import pytest
import torch
from torch import nn

from cudnn_dsa import sparse_attention


class LatentAttention(nn.Module):
    """MLA in its absorbed form over given keys, with the projections of DeepSeek-V3.2 (its sizes are the defaults)."""

    def __init__(self, backend, width=7168, heads=128, q_rank=1536, latent=512, rotary=64, nope=128, value=128):
        super().__init__()
        self.backend, self.heads, self.latent, self.rotary, self.nope = backend, heads, latent, rotary, nope
        self.q_down = nn.Linear(width, q_rank, bias=False)
        self.q_up = nn.Linear(q_rank, heads * (nope + rotary), bias=False)
        self.kv_down = nn.Linear(width, latent + rotary, bias=False)
        self.k_up = nn.Parameter(torch.randn(heads, nope, latent) * latent**-0.5)
        self.v_up = nn.Parameter(torch.randn(heads, latent, value) * latent**-0.5)
        self.out = nn.Linear(heads * value, width, bias=False)
        self.sink = nn.Parameter(torch.zeros(heads))
        self.q_norm, self.kv_norm = nn.RMSNorm(q_rank), nn.RMSNorm(latent)

    def forward(self, x, topk_idxs):
        q_nope, q_rotary = (
            self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (self.heads, -1)).split([self.nope, self.rotary], -1)
        )
        q = torch.cat([torch.einsum("shn,hnc->shc", q_nope, self.k_up.to(q_nope.dtype)), q_rotary], -1)
        latent, rotary = self.kv_down(x).split([self.latent, self.rotary], -1)
        kv = torch.cat([self.kv_norm(latent).to(rotary.dtype), rotary], -1)
        scale = (self.nope + self.rotary) ** -0.5
        out = sparse_attention(
            q, kv, topk_idxs, attn_sink=self.sink, softmax_scale=scale, head_dim_v=self.latent, backend=self.backend
        )
        return x + self.out(torch.einsum("shc,hcv->shv", out, self.v_up.to(out.dtype)).flatten(1))


def causal_topk(length, topk, device):
    """(length, topk) int32: what a random indexer picks among a query's predecessors; -1 pads the early rows."""
    scores = torch.rand(length, length, device=device)
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    best = scores.topk(topk, -1)
    return torch.where(torch.isfinite(best.values), best.indices, -1).int()


def small(target):
    """Sizes that every backend runs: D 576 on CUDA backends, small ones elsewhere."""
    narrow = {} if not target.wide else {"latent": 48, "rotary": 16}
    return {"width": 64, "heads": 4, "q_rank": 32, "nope": 16, "value": 16, **narrow}


def loss_of(layer, x, idxs, device):
    with torch.autocast(device, torch.bfloat16):
        return layer(x, idxs).float().square().mean()


def gradients_of(layer, x, idxs, device):
    layer.zero_grad()
    loss_of(layer, x, idxs, device).backward()
    return {name: p.grad.clone() for name, p in layer.named_parameters()}


def assert_same_gradients(got, want, tolerance):
    assert got.keys() == want.keys()
    for name in want:
        error = (got[name].float() - want[name].float()).norm() / want[name].float().norm()
        assert error <= tolerance, f"{name}: {error:.2e}"


def test_a_few_steps_lower_the_loss(target):
    torch.manual_seed(0)
    layer = LatentAttention(target.backend, **small(target)).to(target.device)
    x, idxs = torch.randn(96, 64, device=target.device), causal_topk(96, 24, target.device)
    optimiser = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        optimiser.zero_grad()
        loss = loss_of(layer, x, idxs, target.device)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert all(torch.isfinite(p).all() for p in layer.parameters())
    assert losses[-1] < 0.9 * losses[0]


def test_a_layer_has_the_gradients_of_the_reference(target):
    torch.manual_seed(0)
    layer = LatentAttention(target.backend, **small(target)).to(target.device)
    x, idxs = torch.randn(96, 64, device=target.device), causal_topk(96, 24, target.device)
    got = gradients_of(layer, x, idxs, target.device)
    layer.backend = "reference"
    assert_same_gradients(got, gradients_of(layer, x, idxs, target.device), 2e-2)  # bf16 projections around it


def test_a_compiled_layer_has_the_same_gradients(target):
    torch.manual_seed(0)
    torch._dynamo.reset()
    layer = LatentAttention(target.backend, **small(target)).to(target.device)
    x, idxs = torch.randn(96, 64, device=target.device), causal_topk(96, 24, target.device)
    want = gradients_of(layer, x, idxs, target.device)
    compiler = "inductor" if target.device == "cuda" else "aot_eager"
    layer.compile(fullgraph=True, backend=compiler)
    assert_same_gradients(gradients_of(layer, x, idxs, target.device), want, 2e-2)


def test_fully_sharded_over_one_device(target, tmp_path):
    """FSDP2: parameters are DTensors that are gathered before and freed after each pass."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    layer = LatentAttention(target.backend, **small(target)).to(target.device)
    x, idxs = torch.randn(96, 64, device=target.device), causal_topk(96, 24, target.device)
    want = gradients_of(layer, x, idxs, target.device)
    dist.init_process_group(
        "nccl" if target.device == "cuda" else "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        mesh = dist.init_device_mesh(target.device, (1,))
        fully_shard(layer, mesh=mesh)
        layer.zero_grad()
        loss_of(layer, x, idxs, target.device).backward()
        got = {name: p.grad.full_tensor() for name, p in layer.named_parameters()}
    finally:
        dist.destroy_process_group()
    assert_same_gradients(got, want, 2e-2)


@pytest.mark.gpu
def test_a_step_at_the_sizes_of_deepseek_v32(target):
    """H 128, D 576, K 2048, 4096 tokens: forward, backward and an optimiser step, in bf16 with fp32 weights."""
    if target.device != "cuda" or target.wide:
        pytest.skip("needs a CUDA kernel")
    if torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("needs 40 GiB")
    torch.manual_seed(0)
    layer = LatentAttention(target.backend).to("cuda")
    x, idxs = torch.randn(4096, 7168, device="cuda"), causal_topk(4096, 2048, "cuda")
    optimiser = torch.optim.AdamW(layer.parameters(), lr=1e-4)
    losses = []
    for _ in range(3):
        optimiser.zero_grad()
        loss = loss_of(layer, x, idxs, "cuda")
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())
