"""What a call gives back: named tuples that also take string keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class _StringKeys:
    """A named tuple whose fields are also reached by name as a key, as the cuDNN frontend's results are."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            if key not in self.keys():
                raise KeyError(key)
            return getattr(self, key)
        return super().__getitem__(key)  # type: ignore[misc]

    def keys(self) -> tuple[str, ...]:
        return self._fields  # type: ignore[attr-defined]


class _Gradients(NamedTuple):
    dq: torch.Tensor
    dkv: torch.Tensor
    d_sink: torch.Tensor | None


class _Outputs(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor


class Gradients(_StringKeys, _Gradients):
    """(dq (S_q, H, D), dkv (S_kv, D), d_sink (H,) or None); ``g["dq"]`` works as ``g.dq`` does."""

    __slots__ = ()


class Outputs(_StringKeys, _Outputs):
    """(out (S_q, H, D_v), lse (S_q, H)); ``o["lse"]`` works as ``o.lse`` does."""

    __slots__ = ()
