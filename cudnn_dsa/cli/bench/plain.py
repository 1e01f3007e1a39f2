"""Sparse attention as one writes it in PyTorch without this package: gather, einsum, softmax, autograd."""

from __future__ import annotations

import torch


def plain_sparse_attention(
    q: torch.Tensor, kv: torch.Tensor, topk_idxs: torch.Tensor, attn_sink: torch.Tensor, head_dim_v: int
) -> torch.Tensor:
    """out (S_q, H, D_v) in the dtype of q, by the operator's formula; every entry of ``topk_idxs`` must be a row of kv.

    Products are in the dtype of q, the softmax in at least fp32. Materialises the gathered keys (S_q, K, D) and the
    scores (S_q, H, K).
    """
    keys = kv[topk_idxs.long()]
    scores = torch.einsum("ihd,ikd->ihk", q, keys) * q.shape[-1] ** -0.5
    wide = torch.promote_types(q.dtype, torch.float32)
    sink = attn_sink.to(wide)[None, :, None].expand(*scores.shape[:2], 1)
    # The sink is one more column of the softmax, whose value is zero.
    probabilities = torch.softmax(torch.cat([scores.to(wide), sink], dim=-1), dim=-1)[..., :-1].to(q.dtype)
    return torch.einsum("ihk,ikd->ihd", probabilities, keys[..., :head_dim_v])


def plain_bytes(s_q: int, heads: int, topk: int, head_dim: int, itemsize: int) -> int:
    """Upper estimate of what its forward and backward hold at once.

    The gathered keys and their gradients (three of that size while the gradients of keys and values are summed), the
    scores in the dtype of q and in fp32, and their gradients.
    """
    return s_q * topk * (4 * head_dim * itemsize + heads * (4 * itemsize + 4 * 4))
