"""The rule vocabulary. A rule returns None, or raises a ``ContractError`` that names the argument.

Sizes may be symbolic: a rule relates sizes to each other and leaves them symbolic; only a rule about a size that
changes the generated code (the head dimension) compares with a number.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cudnn_dsa.contracts.errors import ContractError, UnsupportedError
from cudnn_dsa.contracts.spec import Size, TensorSpec, format_shape


def holds(condition: Any) -> bool:
    """Whether a relation between sizes holds.

    A relation that a framework can only evaluate when the program runs (torch's unbacked sizes) counts as holding, and
    is asserted at run time.
    """
    if isinstance(condition, bool):
        return condition
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(condition, torch.SymBool):
        from torch.fx.experimental.symbolic_shapes import guard_or_true

        if not guard_or_true(condition):
            return False
        torch._check(condition)
        return True
    return bool(condition)


class Dims(dict[str, Size]):
    """Sizes by dimension name, bound by the first argument that has the dimension."""

    def render(self, names: Sequence[str | int]) -> str:
        """``(S_q=4, H=2, D=512)``: the expected shape; a dimension without a size yet by its name alone."""
        parts = [f"{n}={self[n]}" if isinstance(n, str) and n in self else str(n) for n in names]
        return "(" + ", ".join(parts) + ("," if len(parts) == 1 else "") + ")"


def check_shape(name: str, spec: TensorSpec, names: Sequence[str | int], dims: Dims) -> None:
    """The shape of ``spec`` matches ``names``; names that ``dims`` does not hold yet are bound to what came.

    An integer in ``names`` is a fixed size.
    """
    ok = len(spec.shape) == len(names)
    fresh: dict[str, Size] = {}
    if ok:
        for size, want in zip(spec.shape, names, strict=True):
            if isinstance(want, int):
                ok = ok and holds(size == want)
            elif want in dims or want in fresh:
                ok = ok and holds(size == (dims[want] if want in dims else fresh[want]))
            else:
                fresh[want] = size
    if not ok:
        raise ContractError(name, f"shape {dims.render(names)}", format_shape(spec.shape))
    dims.update(fresh)


def check_dtype(name: str, spec: TensorSpec, allowed: Iterable[str], hint: str = "") -> None:
    """The dtype of ``spec`` is one of ``allowed``."""
    allowed = tuple(allowed)
    if spec.dtype not in allowed:
        raise ContractError(name, "dtype " + " or ".join(allowed), spec.dtype, hint)


def check_device(name: str, spec: TensorSpec, reference_name: str, reference: TensorSpec) -> None:
    """``spec`` lives where ``reference`` lives."""
    if spec.device != reference.device:
        raise ContractError(name, f"device {reference.device} (that of {reference_name})", spec.device)


def check_layout(name: str, spec: TensorSpec, hint: str = "") -> None:
    """``spec`` is contiguous; anything else is an ``UnsupportedError``."""
    if not spec.is_contiguous:
        got = f"shape {format_shape(spec.shape)} with strides {format_shape(spec.strides or ())}"
        raise UnsupportedError(name, "a contiguous tensor", got, hint)


def check_apart(name: str, spec: TensorSpec) -> None:
    """No two elements of ``spec`` share memory (an expanded tensor, overlapping windows): it can be written."""
    span: Size = 1
    for stride, size in _steps(spec):
        if stride < span and spec.numel:
            got = f"shape {format_shape(spec.shape)} with strides {format_shape(spec.strides or ())}"
            raise ContractError(name, "a tensor whose elements lie apart", got)
        span = stride * (size - 1) + span


def check_range(name: str, value: Any, low: Any = None, high: Any = None, hint: str = "") -> None:
    """``low <= value <= high``, either bound optional; NaN is in no bounded range."""
    if (low is None or holds(value >= low)) and (high is None or holds(value <= high)):  # NaN fails both
        return
    bounds = [f">= {low}"] * (low is not None) + [f"<= {high}"] * (high is not None)
    raise ContractError(name, "a value " + " and ".join(bounds), str(value), hint)


def check_choice(name: str, value: Any, choices: Iterable[Any], hint: str = "") -> None:
    """``value`` is one of ``choices``."""
    choices = tuple(choices)
    if value not in choices:
        raise ContractError(name, "one of " + ", ".join(repr(c) for c in choices), repr(value), hint)


def check_presence(name: str, present: bool, wanted: bool, because: str) -> None:
    """An optional argument is given, or not given, as ``wanted``; ``because`` is the reason in a few words."""
    if present != wanted:
        words = {True: "a tensor", False: "None"}
        raise ContractError(name, words[wanted], words[present], because)


def check_alias(outputs: Mapping[str, TensorSpec], inputs: Mapping[str, TensorSpec]) -> None:
    """No output shares memory with an input or with another output. Arrays without an address are passed over."""
    seen = [(name, spec) for name, spec in inputs.items() if spec.address is not None]
    for name, spec in outputs.items():
        if spec.address is None:
            continue
        for other, other_spec in seen:
            if may_overlap(spec, other_spec):
                raise ContractError(name, f"memory of its own, apart from {other}", f"memory shared with {other}")
        seen.append((name, spec))


def may_overlap(a: TensorSpec, b: TensorSpec) -> bool:
    """Whether two arrays may share a byte. Never False for two that do.

    Two views with disjoint address ranges do not. Neither do two that interleave: with g a common divisor of every
    stride above each view's dense inner run, all addresses of a view fall, modulo g, into one window as long as that
    run; disjoint windows cannot meet. (Column slices of one buffer are the case that matters.) A view that walks
    backwards (NumPy) has the same elements as the one that walks forwards from its lowest address.
    """
    if a.device != b.device or a.address is None or b.address is None or a.numel == 0 or b.numel == 0:
        return False
    start_a, start_b = _lowest_address(a), _lowest_address(b)
    if start_a + reach(a) <= start_b or start_b + reach(b) <= start_a:
        return False
    run_a, pitch_a = _inner_run(a)
    run_b, pitch_b = _inner_run(b)
    pitch = math.gcd(pitch_a, pitch_b)
    if pitch == 0:
        return True
    gap = (start_b - start_a) % pitch
    return gap < run_a or pitch - gap < run_b


def reach(spec: TensorSpec) -> int:
    """Bytes from the lowest element to the end of the highest; 0 for an empty array."""
    if spec.numel == 0:
        return 0
    return (sum((n - 1) * s for s, n in _steps(spec)) + 1) * spec.itemsize


def _lowest_address(spec: TensorSpec) -> int:
    assert spec.address is not None
    back = sum((n - 1) * s for s, n in zip(spec.strides or (), spec.shape, strict=True) if s < 0)
    return spec.address + back * spec.itemsize


def _steps(spec: TensorSpec) -> list[tuple[Size, Size]]:
    """(stride in elements, whichever way it goes; size) of the dimensions longer than 1, shortest stride first."""
    return sorted((abs(s), n) for s, n in zip(spec.strides or (), spec.shape, strict=False) if n != 1)


def _inner_run(spec: TensorSpec) -> tuple[int, int]:
    """(bytes of the dense inner run, greatest common divisor of the remaining strides in bytes; 0 if none remains)."""
    dims = _steps(spec)
    run = 1
    while dims and dims[0][0] == run:
        run *= dims.pop(0)[1]
    return run * spec.itemsize, math.gcd(*(s * spec.itemsize for s, _ in dims)) if dims else 0
