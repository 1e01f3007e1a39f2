"""Shapes of named models, as the operator sees one layer of them."""

from __future__ import annotations

from typing import NamedTuple


class ModelShape(NamedTuple):
    """H query heads, D head_dim (the absorbed MLA latent and its rotary columns), K selected keys a query."""

    name: str
    heads: int
    head_dim: int
    topk: int


# With 576 columns: the absorbed MLA latent (512) and its rotary part (64). K is what one query attends to in all.
MODEL_SHAPES = {
    "v3.2": ModelShape("DeepSeek-V3.2", heads=128, head_dim=576, topk=2048),
    "v4-flash": ModelShape("DeepSeek-V4-Flash", heads=64, head_dim=512, topk=512),
    "v4-pro": ModelShape("DeepSeek-V4-Pro", heads=128, head_dim=512, topk=1152),
    "glm-5": ModelShape("GLM-5", heads=64, head_dim=576, topk=2048),
}
# Queries and keys of the published comparisons.
FULL_S_Q = 4096
FULL_S_KV = 8192


def forward_flops(s_q: int, heads: int, topk: int, head_dim: int, head_dim_v: int) -> int:
    """2 * S_q * H * K * (D + D_v): the products q.k and p.v."""
    return 2 * s_q * heads * topk * (head_dim + head_dim_v)


def backward_flops(s_q: int, heads: int, topk: int, head_dim: int, head_dim_v: int) -> int:
    """2 * S_q * H * K * (3 * D + 2 * D_v): scores again, dout.v, ds.k, ds^T.q and p^T.dout."""
    return 2 * s_q * heads * topk * (3 * head_dim + 2 * head_dim_v)
