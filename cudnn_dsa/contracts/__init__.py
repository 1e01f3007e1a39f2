"""The validation layer: what a call may look like, decided before anything runs.

It is shared by the PyTorch package and the JAX siblings and imports neither framework. A rule is written once, in terms
of :class:`TensorSpec` (shape, dtype, strides, device: never data), and the gate, the runtime interface and the
operators all call the same check. See ``sparse_attention.py`` for the rules of the DSA operator; a sibling's own rules
live in that sibling and are built from the vocabulary here.
"""

from cudnn_dsa.contracts.errors import ContractError, UnsupportedError
from cudnn_dsa.contracts.rules import (
    Dims,
    check_alias,
    check_apart,
    check_choice,
    check_device,
    check_dtype,
    check_layout,
    check_presence,
    check_range,
    check_shape,
)
from cudnn_dsa.contracts.spec import TensorSpec, describe

__all__ = [
    "ContractError",
    "Dims",
    "TensorSpec",
    "UnsupportedError",
    "check_alias",
    "check_apart",
    "check_choice",
    "check_device",
    "check_dtype",
    "check_layout",
    "check_presence",
    "check_range",
    "check_shape",
    "describe",
]
