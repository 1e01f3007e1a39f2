"""The contract of ``attention``: what a call may look like, decided before anything runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from cudnn_dsa.contracts import (
    ContractError,
    Dims,
    TensorSpec,
    UnsupportedError,
    check_choice,
    check_dtype,
    check_presence,
    check_range,
    check_shape,
    describe,
)

FLOATS = ("float32", "bfloat16", "float16")
PRECISIONS = ("default", "high", "highest")
MAX_HEAD_DIM = 512
# The Triton lowering counts elements in 32 bits until an array has 4 GiB: arrays of bytes overflow before.
_MAX_BYTE_ELEMENTS = 2**31

# Optional operands: dtypes, and the dimensions behind the batch dimensions that each broadcasts to.
_PAIR = ("H", "T", "t")
OPERANDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "bias": (FLOATS, _PAIR),
    "mask": (("bool",), _PAIR),
    "dropout_mask": (("bool",), _PAIR),
    "k_start": (("int32",), ("H", "T")),
    "k_end": (("int32",), ("H", "T")),
    "q_indices": (("int32",), ("H", "T")),
    "q_start": (("int32",), ("H", "t")),
    "q_end": (("int32",), ("H", "t")),
    "k_indices": (("int32",), ("H", "t")),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of ``attention`` that are not arrays, as given."""

    is_causal: bool = False
    logits_soft_cap: float | None = None
    logits_scale: float | None = None
    dropout_rate: float = 0.0
    local_window_size: Any = None
    logits_dtype: Any = None
    precision: Any = None
    normalize_output: bool = True


@dataclasses.dataclass(frozen=True)
class Problem:
    """A checked call: everything static that changes the generated code. Hashable.

    ``band`` is (before, after): a key at position k is allowed for a query at position q when
    q - before <= k <= q + after; None on a side is no limit. Causality and the local window are both in it.
    ``operands`` are the names of the optional arrays that are present.
    """

    batch: tuple[int, ...]
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    scale: float
    soft_cap: float | None
    band: tuple[int | None, int | None]
    logits_dtype: str | None
    dropout_rate: float
    precision: str
    normalize: bool
    operands: frozenset[str]

    @property
    def batch_size(self) -> int:
        """The batch dimensions as one."""
        return math.prod(self.batch)

    @property
    def group(self) -> int:
        """Query heads of one key head."""
        return self.q_heads // self.kv_heads


def check(arrays: Mapping[str, Any], options: Options) -> Problem:
    """Apply every rule and return the :class:`Problem`.

    Args:
        arrays: by argument name; absent or None where not given. ``segment_ids`` is a pair.
        options: the other arguments.

    Raises:
        ContractError: naming the argument, what was expected and what came.
    """
    given = {name: x for name, x in arrays.items() if x is not None}
    specs = {name: _describe(name, x) for name, x in given.items() if name != "segment_ids"}
    dims = Dims()
    batch = specs["q"].shape[:-3]
    for axis, size in enumerate(batch):
        dims[f"B{axis}"] = size
    lead = tuple(f"B{axis}" for axis in range(len(batch)))
    for name, names in (("q", "THD"), ("k", "thD"), ("v", "thd")):
        check_dtype(name, specs[name], FLOATS if name == "q" else (specs["q"].dtype,))
        check_shape(name, specs[name], (*lead, *names), dims)
    for name in ("D", "d"):
        check_range("q" if name == "D" else "v", dims[name], 8, MAX_HEAD_DIM, "the head dimension")
    for name in ("T", "t", "H", "h", *lead):
        check_range("k" if name in "th" else "q", dims[name], 1, None, f"the size of dimension {name}")
    if dims["H"] % dims["h"]:
        raise ContractError("k", f"a number of heads that divides the {dims['H']} query heads", str(dims["h"]))

    for name in OPERANDS.keys() & specs.keys():
        dtypes, tail = OPERANDS[name]
        check_dtype(name, specs[name], dtypes)
        _check_broadcasts(name, specs[name], (*lead, *tail), dims)
        if dtypes == ("bool",) and specs[name].numel >= _MAX_BYTE_ELEMENTS:
            raise UnsupportedError(name, f"fewer than {_MAX_BYTE_ELEMENTS} elements", str(specs[name].numel))
    if "attn_sink" in specs:
        check_dtype("attn_sink", specs["attn_sink"], FLOATS)
        check_shape("attn_sink", specs["attn_sink"], ("H",), dims)
    operands = set(specs) - {"q", "k", "v"}
    if "segment_ids" in given:
        _check_segment_ids(given["segment_ids"], lead, dims)
        operands |= {"q_segment_ids", "k_segment_ids"}

    return Problem(
        batch=tuple(batch),
        q_len=dims["T"],
        kv_len=dims["t"],
        q_heads=dims["H"],
        kv_heads=dims["h"],
        head_dim=dims["D"],
        v_head_dim=dims["d"],
        dtype=specs["q"].dtype,
        operands=frozenset(operands),
        **_check_options(options, dims, "dropout_mask" in specs),
    )


def _describe(name: str, x: Any) -> TensorSpec:
    try:
        spec = describe(x)
    except TypeError as e:
        raise ContractError(name, "an array", type(x).__name__) from e
    if name in "qkv" and spec.ndim < 3:
        raise ContractError(name, "at least 3 dimensions (length, heads, head dimension)", f"{spec.ndim}")
    return spec


def _check_broadcasts(name: str, spec: TensorSpec, names: tuple[str, ...], dims: Dims) -> None:
    """The shape broadcasts to ``names`` from any lower rank or from sizes of 1."""
    tail = names[len(names) - spec.ndim :] if spec.ndim <= len(names) else None
    if tail is None or any(size not in (1, dims[n]) for size, n in zip(spec.shape, tail, strict=True)):
        raise ContractError(name, f"a shape that broadcasts to {dims.render(names)}", str(tuple(spec.shape)))


def _check_segment_ids(segment_ids: Any, lead: tuple[str, ...], dims: Dims) -> None:
    if not isinstance(segment_ids, (tuple, list)) or len(segment_ids) != 2:
        raise ContractError("segment_ids", "a pair (q [*B, T], kv [*B, t])", type(segment_ids).__name__)
    for axis, x in zip("Tt", segment_ids, strict=True):
        spec = _describe("segment_ids", x)
        check_dtype("segment_ids", spec, ("int32",))
        check_shape("segment_ids", spec, (*lead, axis), dims)


def _check_options(options: Options, dims: Dims, has_dropout_mask: bool) -> dict[str, Any]:
    cap = options.logits_soft_cap
    if cap is not None and not 0.0 < cap < math.inf:
        raise ContractError("logits_soft_cap", "None or a finite value > 0", str(cap))
    scale = dims["D"] ** -0.5 if options.logits_scale is None else float(options.logits_scale)
    if not math.isfinite(scale):
        raise ContractError("logits_scale", "a finite value", str(scale))
    check_range("dropout_rate", options.dropout_rate, 0.0, math.nextafter(1.0, 0.0))
    if options.dropout_rate > 0.0:
        check_presence("dropout_mask", has_dropout_mask, True, "dropout_rate is greater than 0")
    before, after = _window(options.local_window_size)
    if options.is_causal:
        after = 0 if after is None else min(after, 0)
    logits_dtype = None
    if options.logits_dtype is not None:
        logits_dtype = getattr(options.logits_dtype, "__name__", None) or str(options.logits_dtype)
        check_choice("logits_dtype", logits_dtype, FLOATS)
    precision = getattr(options.precision, "name", options.precision)
    if precision is not None:
        precision = str(precision).lower()
        check_choice("precision", precision, PRECISIONS)
    return {
        "scale": scale,
        "soft_cap": None if cap is None else float(cap),
        "band": (before, after),
        "logits_dtype": None if logits_dtype == "float32" else logits_dtype,
        "dropout_rate": float(options.dropout_rate),
        # IEEE fp32 unless asked otherwise; nothing changes for 16-bit operands.
        "precision": precision or "highest",
        "normalize": bool(options.normalize_output),
    }


def _window(size: Any) -> tuple[int | None, int | None]:
    if size is None:
        return None, None
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or not all(isinstance(n, int) for n in pair):
        raise ContractError("local_window_size", "a pair of integers (left, right)", repr(size))
    for n in pair:
        check_range("local_window_size", n, 0)
    return pair
