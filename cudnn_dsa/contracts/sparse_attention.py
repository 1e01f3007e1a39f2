"""The rules of the DSA operator, and ``check``, which applies them all.

Notation: S_q queries, S_kv keys, H heads, D head_dim, D_v head_dim_v, K selected keys a query. K and V are one tensor:
the value of a key is its first D_v columns. ``check`` is the only place where a rule of the operator exists; the gate
(``check_support``), the runtime interface and the torch operators all call it.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import NamedTuple

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
from cudnn_dsa.contracts.spec import Size, TensorSpec

CUDA_HEAD_DIMS = (512, 576)  # the absorbed MLA latent, without and with the 64 rotary columns
CUDA_HEAD_DIM_V = 512
CUDA_DTYPES = ("bfloat16", "float16")
WIDE_DTYPES = ("bfloat16", "float16", "float32", "float64")
# Backends that run any head_dim, also in fp32 and fp64.
WIDE_BACKENDS = ("cpu", "reference")
CUDA_BACKENDS = ("sm100", "sm90", "triton", "cudnn")
BACKENDS = ("auto", *CUDA_BACKENDS, *WIDE_BACKENDS)
BLOCK_TILES = (64, 128)
Q_CLUSTER_MODES = ("off", "adaptive_pair")
# Who calls -> (takes strided inputs, takes strided outputs). A plan's layout is fixed when it is made; the interface
# copies strided inputs; the wrappers and the operators also stage outputs.
LAYOUTS = {"plan": (False, False), "interface": (True, False), "wrapper": (True, True)}
WORKSPACE_ALIGNMENT = 256
INT32_MAX = 2**31 - 1


class Argument(NamedTuple):
    """One row of the operator's table of arguments.

    ``dtype`` is a class of dtypes: ``element`` (that of q), ``element_or_float32``, ``statistic`` (float32; a float64
    problem may also use float64) or ``index`` (int32).
    """

    name: str
    shape: tuple[str, ...]
    dtype: str
    output: bool = False
    optional: bool = False


_Q = Argument("q", ("S_q", "H", "D"), "element")
_KV = Argument("kv", ("S_kv", "D"), "element")
_INDICES = Argument("topk_idxs", ("S_q", "K"), "index")
_SINK = Argument("attn_sink", ("H",), "statistic", optional=True)
_LENGTH = Argument("topk_length", ("S_q",), "index", optional=True)
# q and kv come first: they bind the dimensions that the others are compared with.
ARGUMENTS: dict[str, tuple[Argument, ...]] = {
    "forward": (
        _Q,
        _KV,
        _INDICES,
        _SINK,
        _LENGTH,
        Argument("out", ("S_q", "H", "D_v"), "element_or_float32", output=True, optional=True),
        Argument("lse", ("S_q", "H"), "statistic", output=True, optional=True),
    ),
    "backward": (
        _Q,
        _KV,
        Argument("out", ("S_q", "H", "D_v"), "element_or_float32"),
        Argument("dout", ("S_q", "H", "D_v"), "element"),
        Argument("lse", ("S_q", "H"), "statistic"),
        _SINK,
        _INDICES,
        _LENGTH,
        Argument("delta", ("S_q", "H"), "statistic", optional=True),
        Argument("dq", ("S_q", "H", "D"), "element", output=True, optional=True),
        Argument("dkv", ("S_kv", "D"), "element_or_float32", output=True, optional=True),
        Argument("d_sink", ("H",), "statistic", output=True, optional=True),
    ),
}


class _HashedOnce:
    """A frozen dataclass that is a key in look-ups of every call: its hash is computed once. It is not pickled, since
    the hash of a string differs from process to process."""

    def _hash_once(self) -> int:
        known = self.__dict__.get("_hash")
        if known is None:
            known = hash(tuple(getattr(self, field.name) for field in fields(self)))  # type: ignore[arg-type]
            object.__setattr__(self, "_hash", known)
        return known

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}


@dataclass(frozen=True)
class Options(_HashedOnce):
    """Everything about a call that is not a tensor and that a rule may depend on.

    Attributes:
        direction: ``"forward"`` or ``"backward"``.
        backend: a name of ``BACKENDS``; ``"auto"`` is the CUDA gate.
        head_dim_v: D_v, or None for 512 where D is 512 or 576, and D elsewhere.
        softmax_scale: the multiplier of q.k, or None for D**-0.5.
        deterministic: resolved; None (follow the framework's setting) is the caller's to resolve.
        accumulate: add into the given dkv.
        block_tile: tile hint, 64 or 128.
        q_cluster_mode: how neighbouring queries share keys.
        out_dtype, dkv_dtype: what to write where the caller gives no such output; None is the dtype of q.
        layout: who calls, a name of ``LAYOUTS``: which tensors may be strided.
    """

    direction: str = "backward"
    backend: str = "auto"
    head_dim_v: int | None = None
    softmax_scale: float | None = None
    deterministic: bool = False
    accumulate: bool = False
    block_tile: int = 64
    q_cluster_mode: str = "off"
    out_dtype: str | None = None
    dkv_dtype: str | None = None
    layout: str = "plan"

    __hash__ = _HashedOnce._hash_once

    def __post_init__(self) -> None:
        """Types first: an option is part of keys that compare by ==, in which 16.0 would stand for 16."""
        for name, wanted in _OPTION_TYPES.items():
            value = getattr(self, name)
            if type(value) is wanted or (value is None and name in _OPTIONAL) or _is_symbolic(value):
                continue
            if wanted is not str and isinstance(value, _CONVERTIBLE[wanted]) and not isinstance(value, bool):
                try:
                    object.__setattr__(self, name, wanted(value))
                    continue
                except OverflowError:
                    pass
            raise ContractError(name, f"{_OPTION_WORDS[wanted]}", f"{value!r} ({type(value).__name__})")


_OPTION_TYPES: dict[str, type] = {
    "direction": str, "backend": str, "head_dim_v": int, "softmax_scale": float, "deterministic": bool,
    "accumulate": bool, "block_tile": int, "q_cluster_mode": str, "layout": str,
}  # fmt: skip
_OPTIONAL = ("head_dim_v", "softmax_scale")
_OPTION_WORDS = {str: "a string", int: "an integer", float: "a number", bool: "True or False"}
# NumPy's scalars are numbers in this sense, tensors and arrays are not.
_CONVERTIBLE: dict[type, type | tuple] = {int: numbers.Integral, float: numbers.Real, bool: ()}


def _is_symbolic(value: object) -> bool:
    return type(value).__name__ in ("SymInt", "SymFloat", "SymBool")


@dataclass(frozen=True)
class Problem(_HashedOnce):
    """A call that passed every rule: sizes, dtypes and flags, without tensors.

    Sizes (``s_q``, ``s_kv``) may be symbolic. ``stat_dtype`` is the dtype of lse, ``sink_dtype`` that of attn_sink and
    d_sink; ``dkv_dtype`` is what the backward writes.
    """

    direction: str
    s_q: Size
    s_kv: Size
    heads: Size
    head_dim: Size
    head_dim_v: Size
    topk: Size
    dtype: str
    out_dtype: str
    stat_dtype: str
    sink_dtype: str | None
    delta_dtype: str | None
    dkv_dtype: str
    has_topk_length: bool
    deterministic: bool
    accumulate: bool
    block_tile: int
    q_cluster_mode: str
    backend: str
    device: str

    __hash__ = _HashedOnce._hash_once

    @property
    def has_sink(self) -> bool:
        return self.sink_dtype is not None

    @property
    def has_delta(self) -> bool:
        return self.delta_dtype is not None

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]

    @property
    def wide_address(self) -> bool:
        """Whether an element offset into q, out or kv can pass 2**31 - 1."""
        return bool(self.s_kv * self.head_dim > INT32_MAX or self.s_q * self.heads * self.head_dim > INT32_MAX)

    def kernel_key(self, arch: str) -> tuple:
        """What changes the generated code on ``arch``, and nothing else: the one key of every compilation cache.

        Sequence lengths and K are not in it: they are arguments of the kernels.
        """
        return (
            arch, self.direction, self.heads, self.head_dim, self.head_dim_v, self.dtype, self.out_dtype,
            self.stat_dtype, self.sink_dtype, self.delta_dtype, self.dkv_dtype, self.has_topk_length,
            self.deterministic, self.accumulate, self.block_tile, self.q_cluster_mode, self.wide_address,
        )  # fmt: skip

    def check_same_plan(self, planned: Problem) -> None:
        """Raise ``ContractError`` where this call differs from ``planned`` in more than S_q and S_kv.

        ``accumulate`` is an argument of the execution. So is the dtype of a forward's outputs, which have no samples.
        """
        if _plan_values(self) == _plan_values(planned):
            return
        for field, (argument, meaning) in _PLAN_FIELDS.items():
            if self.direction == "forward" and argument in ("out", "lse") and meaning == "dtype":
                continue
            want, got = getattr(planned, field), getattr(self, field)
            if want != got:
                raise ContractError(argument, f"{meaning} as in the plan's samples ({want})", str(got))


# Field of Problem: (argument to name, what of it).
_PLAN_FIELDS = {
    "heads": ("q", "H"),
    "head_dim": ("q", "D"),
    "head_dim_v": ("out", "D_v"),
    "topk": ("topk_idxs", "K"),
    "dtype": ("q", "dtype"),
    "out_dtype": ("out", "dtype"),
    "stat_dtype": ("lse", "dtype"),
    "sink_dtype": ("attn_sink", "dtype"),
    "delta_dtype": ("delta", "dtype"),
    "dkv_dtype": ("dkv", "dtype"),
    "has_topk_length": ("topk_length", "presence"),
    "device": ("q", "device"),
}
_plan_values = attrgetter(*_PLAN_FIELDS)


def default_head_dim_v(head_dim: Size) -> Size:
    """D_v where the caller does not say: 512 for D in (512, 576), else D."""
    return CUDA_HEAD_DIM_V if head_dim in CUDA_HEAD_DIMS else head_dim


def check(specs: Mapping[str, TensorSpec | None], options: Options) -> Problem:
    """Apply every rule of the operator once.

    Args:
        specs: a spec, or None for what is not given, by argument name (``ARGUMENTS[options.direction]``).
        options: the rest of the call.

    Returns:
        The :class:`Problem`.

    Raises:
        ContractError: shape, dtype, device, head_dim, range or alias.
        UnsupportedError: a layout that this caller does not normalise; it is also a ``NotImplementedError``.
    """
    problem = check_properties(specs, options)
    check_aliases(specs, options.direction)
    return problem


def check_properties(specs: Mapping[str, TensorSpec | None], options: Options) -> Problem:
    """The rules that do not depend on where tensors lie in memory: same specs, same verdict."""
    _check_options(options)
    table = ARGUMENTS[options.direction]
    given: dict[str, TensorSpec] = {}
    for argument in table:
        spec = specs.get(argument.name)
        if spec is not None:
            given[argument.name] = spec
        elif not argument.optional:
            raise ContractError(argument.name, "a tensor", "None")

    q, dims = given["q"], Dims()
    wide = options.backend in WIDE_BACKENDS
    _check_q_device(q, options.backend)
    check_shape("q", q, _Q.shape, dims)
    check_dtype("q", q, WIDE_DTYPES if wide else CUDA_DTYPES, "" if wide else f"backend {options.backend!r}")
    _bind_head_dims(dims, options, wide)
    strided_inputs, strided_outputs = LAYOUTS[options.layout]
    for argument in table:
        if argument.name in given:
            spec = given[argument.name]
            check_shape(argument.name, spec, argument.shape, dims)
            check_dtype(argument.name, spec, _allowed_dtypes(argument.dtype, q.dtype))
            check_device(argument.name, spec, "q", q)
            if not (strided_outputs if argument.output else strided_inputs):
                check_layout(argument.name, spec)
            elif argument.output and not spec.is_contiguous:
                check_apart(argument.name, spec)
    if isinstance(dims["S_kv"], int):  # a symbolic size is left as free as it is, and checked when it is known
        check_range("kv", dims["S_kv"], high=INT32_MAX, hint="S_kv: topk_idxs is int32")
    _check_companions(given, options)
    return _problem(given, dims, options)


def check_aliases(specs: Mapping[str, TensorSpec | None], direction: str) -> None:
    """No output shares memory with an input or with another output."""
    outputs: dict[str, TensorSpec] = {}
    inputs: dict[str, TensorSpec] = {}
    for argument in ARGUMENTS[direction]:
        spec = specs.get(argument.name)
        if spec is not None:
            (outputs if argument.output else inputs)[argument.name] = spec
    check_alias(outputs, inputs)


def check_workspace(spec: TensorSpec, needed: int, q: TensorSpec, others: Mapping[str, TensorSpec]) -> None:
    """A caller's workspace: uint8, one dimension, contiguous, 256-byte aligned, at least ``needed`` bytes, q's device,
    and apart from every other tensor of the call."""
    check_dtype("workspace", spec, ("uint8",))
    check_shape("workspace", spec, ("bytes",), Dims())
    check_device("workspace", spec, "q", q)
    check_layout("workspace", spec)
    if spec.shape[0] < needed:
        raise ContractError("workspace", f"at least {needed} bytes", f"{spec.shape[0]} bytes")
    if spec.address is not None and spec.address % WORKSPACE_ALIGNMENT:
        raise ContractError("workspace", f"{WORKSPACE_ALIGNMENT}-byte alignment", f"address {spec.address:#x}")
    check_alias({"workspace": spec}, others)


def _check_options(options: Options) -> None:
    check_choice("layout", options.layout, LAYOUTS)
    check_choice("direction", options.direction, tuple(ARGUMENTS))
    check_choice("backend", options.backend, BACKENDS)
    check_choice("block_tile", options.block_tile, BLOCK_TILES)
    if options.q_cluster_mode not in Q_CLUSTER_MODES:
        modes = " or ".join(repr(mode) for mode in Q_CLUSTER_MODES)
        raise UnsupportedError("q_cluster_mode", modes, repr(options.q_cluster_mode))
    if options.softmax_scale is not None and not math.isfinite(options.softmax_scale):
        raise ContractError("softmax_scale", "a finite number", str(options.softmax_scale))


def _check_q_device(q: TensorSpec, backend: str) -> None:
    if backend == "reference":
        return
    if q.device_type == "meta":  # shapes without data, for tracing: fine to check, and nothing selects a backend for it
        return
    if backend == "cpu" and q.device_type != "cpu":
        raise ContractError("q", "device cpu (backend 'cpu')", q.device)
    if backend not in WIDE_BACKENDS and q.device_type != "cuda":
        hint = "backend='cpu' or cudnn_dsa.sparse_attention() run on the CPU"
        raise ContractError("q", f"a CUDA device (backend {backend!r})", q.device, hint)


def _bind_head_dims(dims: Dims, options: Options, wide: bool) -> None:
    head_dim = dims["D"]
    if not wide and head_dim not in CUDA_HEAD_DIMS:
        raise ContractError("q", "head_dim 512 or 576", str(head_dim), f"backend {options.backend!r}")
    check_range("q", dims["H"], low=1, hint="H, the number of heads")
    check_range("q", head_dim, low=1, hint="D, the head_dim")
    head_dim_v = default_head_dim_v(head_dim) if options.head_dim_v is None else options.head_dim_v
    check_range("head_dim_v", head_dim_v, low=1, high=head_dim)
    if not wide and head_dim_v != CUDA_HEAD_DIM_V:
        raise ContractError("head_dim_v", str(CUDA_HEAD_DIM_V), str(head_dim_v), f"backend {options.backend!r}")
    dims["D_v"] = head_dim_v


def _allowed_dtypes(kind: str, element: str) -> tuple[str, ...]:
    return {
        "element": (element,),
        "element_or_float32": (element,) if element == "float32" else (element, "float32"),
        "statistic": ("float32", "float64") if element == "float64" else ("float32",),
        "index": ("int32",),
    }[kind]


def _check_companions(given: Mapping[str, TensorSpec], options: Options) -> None:
    """Rules that relate optional arguments to each other."""
    sink, d_sink = given.get("attn_sink"), given.get("d_sink")
    if d_sink is not None:
        check_presence("d_sink", True, sink is not None, "attn_sink is None, so there is no gradient for it")
        assert sink is not None
        check_dtype("d_sink", d_sink, (sink.dtype,), "the dtype of attn_sink")
    if options.accumulate:
        check_presence("dkv", "dkv" in given, True, "accumulate=True adds into it")
        check_dtype("dkv", given["dkv"], ("float32", "float64"), "accumulate=True")


def _problem(given: Mapping[str, TensorSpec], dims: Dims, options: Options) -> Problem:
    def dtype_of(name: str) -> str | None:
        return given[name].dtype if name in given else None

    element = given["q"].dtype
    return Problem(
        direction=options.direction,
        s_q=dims["S_q"],
        s_kv=dims["S_kv"],
        heads=dims["H"],
        head_dim=dims["D"],
        head_dim_v=dims["D_v"],
        topk=dims["K"],
        dtype=element,
        out_dtype=dtype_of("out") or options.out_dtype or element,
        stat_dtype=dtype_of("lse") or ("float64" if element == "float64" else "float32"),
        sink_dtype=dtype_of("attn_sink"),
        delta_dtype=dtype_of("delta"),
        dkv_dtype=dtype_of("dkv") or options.dkv_dtype or element,
        has_topk_length="topk_length" in given,
        deterministic=options.deterministic,
        accumulate=options.accumulate,
        block_tile=options.block_tile,
        q_cluster_mode=options.q_cluster_mode,
        backend=options.backend,
        device=given["q"].device,
    )


__all__ = [
    "ARGUMENTS",
    "BACKENDS",
    "CUDA_BACKENDS",
    "WIDE_BACKENDS",
    "Argument",
    "Options",
    "Problem",
    "check",
    "check_aliases",
    "check_properties",
    "check_workspace",
    "default_head_dim_v",
]
