"""A small language model with DeepSeek sparse attention: latent attention (MLA) behind a lightning indexer.

Sources: DeepSeek-V2 (MLA and its absorbed form, in which all heads share one latent key-value row a token) and
DeepSeek-V3.2 (the indexer, section 2.1, and its objective).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional as F

import cudnn_dsa

ROTARY_BASE = 10000.0


class Config(NamedTuple):
    """Sizes of the model.

    D = latent + rotary and D_v = latent are the operator's head_dim and head_dim_v; ``nope`` and ``value`` are a head's
    own dimensions before and after the absorbed projections.
    """

    symbols: int
    context: int
    layers: int
    width: int
    heads: int
    latent: int
    rotary: int
    nope: int
    value: int
    topk: int
    indexer_heads: int
    indexer_dim: int


@dataclass
class Selection:
    """What the indexer chose for a batch, and what its objective needs.

    Attributes:
        scores: (B, T, T) index scores, -inf above the diagonal.
        keys: (B, T, K) int32, positions in the own sequence, -1 where a row has fewer than K keys before it.
        length: (B, T) int32, how many of a row's entries are keys.
        kl: the indexer's loss, or None where it was not asked for.
        q: (B, T, H, D), kv: (B, T, D): what the operator was given.
    """

    scores: torch.Tensor
    keys: torch.Tensor
    length: torch.Tensor
    q: torch.Tensor = field(repr=False)
    kv: torch.Tensor = field(repr=False)
    kl: torch.Tensor | None = None


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (RoFormer) of the last dimension, halves paired; ``positions`` broadcasts before it."""
    half = x.shape[-1] // 2
    frequency = ROTARY_BASE ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[..., None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class LightningIndexer(nn.Module):
    """I[t, s] = sum_j w[t, j] * relu(q[t, j] . k[s]): a few small heads that score every key for every query."""

    def __init__(self, config: Config):
        super().__init__()
        self.heads, self.dim = config.indexer_heads, config.indexer_dim
        self.query = nn.Linear(config.width, self.heads * self.dim, bias=False)
        self.key = nn.Linear(config.width, self.dim, bias=False)
        self.key_norm = nn.LayerNorm(self.dim)
        self.weight = nn.Linear(config.width, self.heads, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores (B, T, T) of x (B, T, width), -inf where the key comes after the query."""
        batch, length, _ = x.shape
        positions = torch.arange(length, device=x.device)
        q = rotate(self.query(x).view(batch, length, self.heads, self.dim), positions[:, None])
        k = rotate(self.key_norm(self.key(x)), positions)
        w = self.weight(x).float() * (self.heads * self.dim) ** -0.5
        scores = (torch.einsum("btjd,bsd->btjs", q, k).relu() * w[..., None]).sum(2)
        return scores.masked_fill(positions > positions[:, None], -torch.inf)


def select(scores: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``topk`` best keys of every query, best first.

    Args:
        scores: (B, T, T), -inf for keys that must not be chosen.

    Returns:
        keys (B, T, K) int32, -1 where a row has fewer keys to choose from, and length (B, T) int32, how many it has.
    """
    best = scores.topk(min(topk, scores.shape[-1]), dim=-1)
    chosen = best.values > -torch.inf
    return torch.where(chosen, best.indices, -1).to(torch.int32), chosen.sum(-1, dtype=torch.int32)


@torch.no_grad()
def attention_target(q: torch.Tensor, kv: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """The main attention's distribution over the selected keys: summed over heads, then L1-normalised.

    Args:
        q: (B, T, H, D); kv: (B, T, D); keys: (B, T, K), -1 for none.

    Returns:
        (B, T, K), fp32; 0 where there is no key.
    """
    valid = keys >= 0
    batch = torch.arange(kv.shape[0], device=kv.device)[:, None, None]
    chosen = kv[batch, keys.clamp(min=0).long()].float()
    scores = torch.einsum("bthd,btkd->bthk", q.float(), chosen) * scale
    summed = scores.masked_fill(~valid[:, :, None], -torch.inf).softmax(-1).sum(2)
    return summed / summed.sum(-1, keepdim=True)


def indexer_loss(scores: torch.Tensor, keys: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """KL(target || softmax of the index scores over the selected keys), the mean over queries.

    Args:
        scores: (B, T, T); keys: (B, T, K), -1 for none; target: (B, T, K), a distribution over a row's keys.
    """
    valid = keys >= 0
    chosen = scores.gather(-1, keys.clamp(min=0).long()).masked_fill(~valid, -torch.inf)
    log_p = chosen.log_softmax(-1).masked_fill(~valid, 0)
    return (torch.xlogy(target, target) - target * log_p).sum(-1).mean()


class LatentAttention(nn.Module):
    """Latent attention in its absorbed form over the keys that the indexer selects.

    Every token leaves one row kv = [latent, rotary]; a head's query enters the latent space through its ``up_key``, and
    what it reads there leaves through its ``up_value``. The softmax has a learned sink a head.
    """

    def __init__(self, config: Config, backend: str | None):
        super().__init__()
        c = self.config = config
        self.backend = backend
        self.scale = (c.nope + c.rotary) ** -0.5
        self.query = nn.Linear(c.width, c.heads * (c.nope + c.rotary), bias=False)
        self.down_kv = nn.Linear(c.width, c.latent + c.rotary, bias=False)
        self.latent_norm = nn.RMSNorm(c.latent)
        self.up_key = nn.Parameter(torch.randn(c.heads, c.nope, c.latent) * c.latent**-0.5)
        self.up_value = nn.Parameter(torch.randn(c.heads, c.latent, c.value) * c.latent**-0.5)
        self.sink = nn.Parameter(torch.zeros(c.heads))
        self.project = nn.Linear(c.heads * c.value, c.width, bias=False)
        self.indexer = LightningIndexer(config)

    def forward(self, x: torch.Tensor, with_loss: bool) -> tuple[torch.Tensor, Selection]:
        """x (B, T, width) -> (B, T, width), and what was selected on the way."""
        c, (batch, length, _) = self.config, x.shape
        q, kv = self.queries(x), self.keys_values(x)
        # The indexer learns from its own loss alone: neither its input nor its target lets a gradient through.
        with torch.profiler.record_function("demo::indexer"):
            scores = self.indexer(x.detach())
            selection = Selection(scores, *select(scores.detach(), c.topk), q, kv)
            if with_loss:
                target = attention_target(q, kv, selection.keys, self.scale)
                selection.kl = indexer_loss(scores, selection.keys, target)

        boundaries = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=x.device)
        topk_idxs = cudnn_dsa.local_to_global(selection.keys.flatten(0, 1), boundaries, boundaries)
        out = cudnn_dsa.sparse_attention(
            q.flatten(0, 1),
            kv.flatten(0, 1),
            topk_idxs,
            attn_sink=self.sink,
            topk_length=selection.length.flatten(),
            softmax_scale=self.scale,
            head_dim_v=c.latent,
            backend=self.backend,
        )
        values = torch.einsum("shc,hcv->shv", out, self.up_value.to(out.dtype))
        return self.project(values.flatten(1).view(batch, length, -1)), selection

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, H, D): [the content part carried into the latent space, the rotary part]."""
        c = self.config
        nope, rotary = self.query(x).unflatten(-1, (c.heads, -1)).split([c.nope, c.rotary], dim=-1)
        latent = torch.einsum("bthn,hnc->bthc", nope, self.up_key.to(nope.dtype))
        return torch.cat([latent, rotate(rotary, torch.arange(x.shape[1], device=x.device)[:, None])], dim=-1)

    def keys_values(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, D): what a key-value cache would hold."""
        latent, rotary = self.down_kv(x).split([self.config.latent, self.config.rotary], dim=-1)
        rotary = rotate(rotary, torch.arange(x.shape[1], device=x.device))
        return torch.cat([self.latent_norm(latent).to(rotary.dtype), rotary], dim=-1)


class FeedForward(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, config: Config, backend: str | None):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = LatentAttention(config, backend)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = FeedForward(config.width)

    def forward(self, x: torch.Tensor, with_loss: bool) -> tuple[torch.Tensor, Selection]:
        attended, selection = self.attention(self.attention_norm(x), with_loss)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), selection


class LanguageModel(nn.Module):
    """Predicts the next symbol of each position.

    Args:
        config: sizes.
        backend: what runs the operator; None dispatches on the device.
    """

    def __init__(self, config: Config, backend: str | None = None):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.symbols, config.width)
        self.blocks = nn.ModuleList(Block(config, backend) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.symbols, bias=False)
        nn.init.zeros_(self.head.weight)
        for block in self._layers():  # a residual stream that starts as the embedding
            for last in (block.attention.project, block.mlp.down):
                nn.init.normal_(last.weight, std=0.5 / math.sqrt(last.in_features * config.layers))

    def forward(self, ids: torch.Tensor, with_loss: bool = False) -> tuple[torch.Tensor, list[Selection]]:
        """(B, T) ids -> logits (B, T, symbols) in fp32, and every layer's selection (with its loss where asked)."""
        x = self.embedding(ids)
        selections = []
        for block in self.blocks:
            x, selection = block(x, with_loss)
            selections.append(selection)
        return self.head(self.norm(x)).float(), selections

    def attentions(self) -> list[LatentAttention]:
        return [block.attention for block in self._layers()]

    def indexer_parameters(self) -> list[nn.Parameter]:
        return [p for attention in self.attentions() for p in attention.indexer.parameters()]

    def main_parameters(self) -> list[nn.Parameter]:
        indexer = {id(p) for p in self.indexer_parameters()}
        return [p for p in self.parameters() if id(p) not in indexer]

    def _layers(self) -> list[Block]:
        return cast("list[Block]", list(self.blocks))
