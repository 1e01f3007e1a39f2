"""From per-sequence and batched layouts to the packed one, in which ``topk_idxs`` holds global rows of kv."""

from __future__ import annotations

from typing import Any, cast

import torch

from cudnn_dsa.admission import describe_all
from cudnn_dsa.autograd import sparse_attention
from cudnn_dsa.contracts import ContractError, Dims, TensorSpec, check_device, check_dtype, check_range, check_shape


def _specs(**tensors: Any) -> dict[str, TensorSpec]:
    specs = describe_all(tensors)
    for name, spec in specs.items():
        if spec is None:
            raise ContractError(name, "a tensor", "None")
    return cast("dict[str, TensorSpec]", specs)


def local_to_global(topk_idxs: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_kv: torch.Tensor) -> torch.Tensor:
    """Indices into each query's own sequence, as rows of the packed kv. Nothing is synchronised.

    Args:
        topk_idxs: (S_q, K), int32; entry j of query i is a row of the keys of i's sequence, or invalid: < 0, or not
            less than that sequence's number of keys.
        cu_seqlens_q: (B + 1,), int32, 0 first: queries cu_seqlens_q[b] to cu_seqlens_q[b+1] belong to sequence b.
        cu_seqlens_kv: (B + 1,), int32, likewise for keys.

    Returns:
        (S_q, K), int32; -1 for an invalid entry, and for every entry of a query beyond the last sequence.
    """
    dims = Dims()
    specs = _specs(topk_idxs=topk_idxs, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv)
    shapes = {"topk_idxs": ("S_q", "K"), "cu_seqlens_q": ("B+1",), "cu_seqlens_kv": ("B+1",)}
    for name, shape in shapes.items():
        spec = specs[name]
        check_shape(name, spec, shape, dims)
        check_dtype(name, spec, ("int32",))
        check_device(name, spec, "topk_idxs", specs["topk_idxs"])
    check_range("cu_seqlens_q", dims["B+1"], low=1, hint="B + 1, the number of its entries")
    if dims["B+1"] == 1:  # no sequence
        return torch.full_like(topk_idxs, -1)
    rows = torch.arange(topk_idxs.shape[0], device=topk_idxs.device, dtype=torch.int32)
    sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), rows, right=True)
    inside = sequence < cu_seqlens_q.shape[0] - 1
    sequence = torch.where(inside, sequence, 0)
    start = cu_seqlens_kv[:-1][sequence][:, None]
    length = cu_seqlens_kv.diff()[sequence][:, None]
    valid = inside[:, None] & (topk_idxs >= 0) & (topk_idxs < length)
    return torch.where(valid, topk_idxs + start, -1)


def sparse_attention_bshd(
    q: torch.Tensor,
    kv: torch.Tensor,
    topk_idxs: torch.Tensor,
    *,
    topk_length: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    """:func:`cudnn_dsa.sparse_attention` on a batch of equally long sequences.

    Args:
        q: (B, S, H, D); kv: (B, T, D); topk_idxs: (B, S, K), int32, rows of the own sequence; topk_length: (B, S).
        options: the keywords of :func:`cudnn_dsa.sparse_attention`.

    Returns:
        out (B, S, H, D_v); with ``return_lse`` also lse (B, S, H).
    """
    dims = Dims()
    shapes = {"q": ("B", "S", "H", "D"), "kv": ("B", "T", "D"), "topk_idxs": ("B", "S", "K"), "topk_length": ("B", "S")}
    specs = _specs(q=q, kv=kv, topk_idxs=topk_idxs, **({} if topk_length is None else {"topk_length": topk_length}))
    for name, spec in specs.items():
        check_shape(name, spec, shapes[name], dims)
        check_device(name, spec, "q", specs["q"])
    batch, queries, keys = q.shape[0], q.shape[1], kv.shape[1]
    first_row = torch.arange(batch, device=q.device, dtype=torch.int32).mul(keys)[:, None, None]
    valid = (topk_idxs >= 0) & (topk_idxs < keys)
    result = sparse_attention(
        q.flatten(0, 1),
        kv.flatten(0, 1),
        torch.where(valid, topk_idxs + first_row, -1).flatten(0, 1),
        topk_length=None if topk_length is None else topk_length.flatten(),
        **options,
    )

    def unpack(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (batch, queries))

    return tuple(unpack(x) for x in result) if isinstance(result, tuple) else unpack(result)
