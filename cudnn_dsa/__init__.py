"""cudnn_dsa: the backward pass of DeepSeek sparse attention.

Names load on first use (PEP 562): `import cudnn_dsa` and `import cudnn_dsa.contracts` import neither torch nor jax.
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import TYPE_CHECKING, Any

from cudnn_dsa._version import __version__

if TYPE_CHECKING:
    from cudnn_dsa.api import (
        DSA,
        SparseAttentionBackward,
        SparseAttentionForward,
        sparse_attention_backward_wrapper,
        sparse_attention_forward_wrapper,
    )
    from cudnn_dsa.autograd import sparse_attention
    from cudnn_dsa.contracts import ContractError, UnsupportedError
    from cudnn_dsa.lse import lse_from_base2, lse_without_sink
    from cudnn_dsa.packing import local_to_global, sparse_attention_bshd

# Public name -> the module that has it.
_HOMES = {
    "DSA": "api",
    "SparseAttentionBackward": "api",
    "SparseAttentionForward": "api",
    "sparse_attention_backward_wrapper": "api",
    "sparse_attention_forward_wrapper": "api",
    "sparse_attention": "autograd",
    "ContractError": "contracts",
    "UnsupportedError": "contracts",
    "lse_from_base2": "lse",
    "lse_without_sink": "lse",
    "local_to_global": "packing",
    "sparse_attention_bshd": "packing",
}

__all__ = [
    "DSA",
    "ContractError",
    "SparseAttentionBackward",
    "SparseAttentionForward",
    "UnsupportedError",
    "__version__",
    "local_to_global",
    "lse_from_base2",
    "lse_without_sink",
    "sparse_attention",
    "sparse_attention_backward_wrapper",
    "sparse_attention_bshd",
    "sparse_attention_forward_wrapper",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


_LEVELS = ("debug", "info", "warning", "error", "critical")


def _set_up_logging() -> None:
    """CUDNN_DSA_LOG=debug (info, warning, ...; 1 is info) prints this package's log to stderr. Unset or 0, the host
    program decides."""
    wanted = os.environ.get("CUDNN_DSA_LOG", "")
    if wanted in ("", "0"):
        return
    logger = logging.getLogger(__name__)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    known = wanted.lower() in _LEVELS
    logger.setLevel(wanted.upper() if known else logging.INFO)
    if not known and wanted != "1":
        words = f"{', '.join(_LEVELS[:-1])} or {_LEVELS[-1]}"
        logger.warning("CUDNN_DSA_LOG: expected %s, got %r; it is info", words, wanted)


_set_up_logging()
