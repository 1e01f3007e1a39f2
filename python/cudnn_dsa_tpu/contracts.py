"""What a call of this package's operators may look like, decided before anything is traced into a kernel."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from cudnn_dsa.contracts import (
    ContractError,
    Dims,
    TensorSpec,
    check_choice,
    check_dtype,
    check_range,
    check_shape,
    describe,
)

DTYPES = ("bfloat16", "float32")
HEAD_DIM_RANGE = (64, 256)
DQ_REDUCTION_STEPS = (3, None)


class SegmentIds(NamedTuple):
    """Which packed sequence each token belongs to; a query attends to the keys with its own id.

    Attributes:
        q: ids of the queries, [S], int32.
        kv: ids of the keys, [T], int32.
    """

    q: Any
    kv: Any


@dataclasses.dataclass(frozen=True)
class Problem:
    """The sizes and options of one call, checked.

    Attributes:
        num_heads, num_kv_heads: H and H_kv; H is a multiple of H_kv.
        q_len, kv_len: S and T, the lengths of the arrays.
        valid_q, valid_kv: how many of those tokens exist; what lies beyond is never read.
        head_dim, head_dim_v: D of queries and keys, D_v of values.
        dtype: of q, k and v.
        scale: of the logits.
        fixed_m: a kernel with a fixed m may run.
    """

    num_heads: int
    num_kv_heads: int
    q_len: int
    kv_len: int
    valid_q: int
    valid_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    scale: float
    fixed_m: bool = False

    @property
    def scale_log2e(self) -> float:
        """What a kernel multiplies q k^T with to get logits in base 2. In fp32, on the product: folded into a bf16 q it
        would round q a second time, an error in the logits that grows with them."""
        return self.scale * math.log2(math.e)

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads


def check_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None,
    orig_q_seq_len: int | None,
    orig_kv_seq_len: int | None,
    segment_ids: SegmentIds | None = None,
    attn_sink: Any = None,
    dq_reduction_steps: int | None = 3,
    dtypes: tuple[str, ...] = DTYPES,
) -> Problem:
    """The rules that splash and ring attention share; see :func:`cudnn_dsa_tpu.splash_attention` for the arguments.

    Raises:
        ContractError: naming the argument, what was expected and what came.
    """
    dims = Dims()
    specs = {name: _spec(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    check_shape("q", specs["q"], ("H", "S", "D"), dims)
    check_shape("k", specs["k"], ("H_kv", "T", "D"), dims)
    check_shape("v", specs["v"], ("H_kv", "T", "D_v"), dims)
    for name in ("H", "H_kv", "S", "T"):
        check_range(f"{name} (a size of q, k, v)", dims[name], 1)
    for name in ("D", "D_v"):
        check_range(f"head dimension {name}", dims[name], *HEAD_DIM_RANGE)
        if dims[name] % 8:
            raise ContractError(f"head dimension {name}", "a multiple of 8", str(dims[name]))
    check_dtype("q", specs["q"], dtypes)
    for name in ("k", "v"):
        check_dtype(name, specs[name], (specs["q"].dtype,), hint="the dtype of q")
    if dims["H"] % dims["H_kv"]:
        raise ContractError("q", f"a number of heads that is a multiple of H_kv={dims['H_kv']}", f"H={dims['H']}")
    check_choice("dq_reduction_steps", dq_reduction_steps, DQ_REDUCTION_STEPS)

    if segment_ids is not None:
        if not isinstance(segment_ids, tuple) or len(segment_ids) != 2:
            raise ContractError("segment_ids", "SegmentIds(q, kv)", type(segment_ids).__name__)
        for name, ids, size in zip(("q", "kv"), segment_ids, ("S", "T"), strict=True):
            spec = _spec(f"segment_ids.{name}", ids)
            check_shape(f"segment_ids.{name}", spec, (size,), dims)
            check_dtype(f"segment_ids.{name}", spec, ("int32",))
    if attn_sink is not None:
        spec = _spec("attn_sink", attn_sink)
        check_shape("attn_sink", spec, ("H",), dims)
        check_dtype("attn_sink", spec, DTYPES)

    return Problem(
        num_heads=dims["H"],
        num_kv_heads=dims["H_kv"],
        q_len=dims["S"],
        kv_len=dims["T"],
        valid_q=_valid_length("orig_q_seq_len", orig_q_seq_len, dims["S"]),
        valid_kv=_valid_length("orig_kv_seq_len", orig_kv_seq_len, dims["T"]),
        head_dim=dims["D"],
        head_dim_v=dims["D_v"],
        dtype=specs["q"].dtype,
        scale=_scale(scale, dims["D"]),
    )


def check_metadata(metadata: Any, num_heads: int, q_tiles: int) -> None:
    """The kernel's table for a fixed m is [2, H, q tiles], fp32; of a 2-D array it would read m at the wrong place."""
    spec = _spec("metadata", metadata)
    check_shape("metadata", spec, (2, "H", "q_tiles"), Dims(H=num_heads, q_tiles=q_tiles))
    check_dtype("metadata", spec, ("float32",))


def _spec(name: str, x: Any) -> TensorSpec:
    try:
        return describe(x)
    except TypeError:
        raise ContractError(name, "an array", type(x).__name__) from None


def _valid_length(name: str, value: int | None, size: int) -> int:
    if value is None:
        return size
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ContractError(name, "an int or None", type(value).__name__, "lengths shape the kernel and are static")
    check_range(name, value.__index__(), 1, size)
    return value.__index__()


def _scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return head_dim**-0.5
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise ContractError("scale", "a number or None", type(scale).__name__, "the scale is static")
    if not math.isfinite(scale):
        raise ContractError("scale", "a finite number", str(scale))
    return float(scale)
