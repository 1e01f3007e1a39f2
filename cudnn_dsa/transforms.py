"""What PyTorch may put around a tensor, and what of it is refused: nothing is dropped in silence.

Derivatives are those of reverse mode (``autograd.py``). A forward-mode tangent, or a ``torch.func`` transform that
differentiates, would pass by the operator and leave a gradient of zero or an error that says nothing. The interface
works on memory and takes no wrapped tensor at all.
"""

from __future__ import annotations

import torch
from torch._C import _functorch as functorch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cudnn_dsa.contracts import UnsupportedError


def active() -> bool:
    """Whether any transform or forward-mode level is; most often not, and then no tensor need be looked at."""
    return forward_ad._current_level >= 0 or functorch.maybe_current_level() is not None


def refuse_derivatives(name: str, tensor: torch.Tensor) -> None:
    """Raise ``UnsupportedError`` for a tangent, or for a tensor that ``torch.func`` differentiates with respect to."""
    while True:
        if forward_ad.unpack_dual(tensor).tangent is not None:
            why = "there is no forward-mode derivative; reverse mode has one"
            raise UnsupportedError(name, "a tensor without a tangent", "a dual tensor", why)
        if not functorch.is_functorch_wrapped_tensor(tensor):
            return
        if functorch.is_gradtrackingtensor(tensor):
            why = "use torch.autograd.grad or backward()"
            raise UnsupportedError(name, "a tensor outside of torch.func's derivatives", "one of torch.func.grad", why)
        tensor = functorch.get_unwrapped(tensor)


def refuse_distributed(name: str, tensor: torch.Tensor) -> None:
    """Raise ``UnsupportedError`` for a DTensor: which rows a rank needs is for the caller to say."""
    if type(tensor).__name__ == "DTensor":
        raise UnsupportedError(name, "a local tensor", "a DTensor", "pass what to_local() or full_tensor() gives")


def refuse_wrapped(name: str, tensor: torch.Tensor) -> None:
    """Raise ``UnsupportedError`` for everything that is not a tensor with memory of its own."""
    refuse_derivatives(name, tensor)
    refuse_distributed(name, tensor)
    expected = "a tensor with memory of its own"
    if functorch.is_functorch_wrapped_tensor(tensor):
        why = "cudnn_dsa.sparse_attention() works under torch.func.vmap"
        raise UnsupportedError(name, expected, "a batch of torch.func.vmap", why)
    if is_traceable_wrapper_subclass(tensor):
        raise UnsupportedError(name, expected, f"a {type(tensor).__name__}")
