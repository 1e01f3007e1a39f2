"""The only module that knows Pallas and its Triton lowering.

JAX deprecates the Triton lowering of Pallas. The kernels of this package are written against the few functions here
(load, store, dot, loop, call), so that another lowering (Mosaic GPU, jax-triton) replaces this file and nothing else.

What the Triton lowering asks of a kernel, and interpret mode does not check: every array has a power-of-two size; dot
operands are two-dimensional with every size at least 16; an index is a scalar or a slice of static size; there is no
scratch memory and no dynamic grid.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas import triton as pallas_triton

program_id = pl.program_id
ds = pl.ds
cdiv = pl.cdiv
# The dot of tensor cores and Triton's IEEE dot alike refuse smaller operands.
MIN_DOT = 16


@dataclasses.dataclass(frozen=True)
class Ref:
    """An array in memory as the kernels see it."""

    ref: Any
    # 0 as a value of the run. Interpret mode cannot index with a literal integer, so ``index`` adds this to it, which
    # the compiler folds away.
    zero: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.ref.shape

    @property
    def dtype(self) -> Any:
        return self.ref.dtype

    def at(self, index: tuple[Any, ...]) -> Any:
        return self.ref.at[tuple(self.zero + i if isinstance(i, int) else i for i in index)]


def load(ref: Ref, index: tuple[Any, ...], mask: jax.Array | None = None, other: float | int | bool = 0) -> jax.Array:
    """``ref[index]``; elements where ``mask`` is False are ``other`` and their memory is not touched."""
    if mask is None:
        return pallas_triton.load(ref.at(index))
    shape = tuple(i.size for i in index if isinstance(i, pl.Slice))
    return pallas_triton.load(ref.at(index), mask=jnp.broadcast_to(mask, shape), other=other)


def store(ref: Ref, index: tuple[Any, ...], value: jax.Array, mask: jax.Array | None = None) -> None:
    """``ref[index] = value`` where ``mask`` is True."""
    if mask is not None:
        mask = jnp.broadcast_to(mask, value.shape)
    pallas_triton.store(ref.at(index), value.astype(ref.dtype), mask=mask)


def dot(a: jax.Array, b: jax.Array, precision: Any, *, transpose_b: bool = False) -> jax.Array:
    """``a @ b`` (or ``a @ b.T``) accumulated in fp32. ``precision`` HIGHEST is IEEE fp32 for fp32 operands."""
    contract = (((1,), (1 if transpose_b else 0,)), ((), ()))
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)


# Whether the kernel that is being traced will be interpreted: inline assembly has no interpreter.
_interpreted: contextvars.ContextVar[bool] = contextvars.ContextVar("interpreted", default=True)


def _special_function(instruction: str, x: jax.Array) -> jax.Array:
    [y] = pallas_triton.elementwise_inline_asm(
        f"{instruction} $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return y


def exp2(x: jax.Array) -> jax.Array:
    """2**x of fp32, relative error at most 2**-22; results below 2**-126 are 0.

    One instruction on a GPU. The library function scales arguments of denormal results around it, which cost a tenth of
    the dk/dv kernel at head dimension 128 (2.76 against 2.44 ms on an H200).
    """
    return jnp.exp2(x) if _interpreted.get() else _special_function("ex2.approx.ftz.f32", x)


def reciprocal(x: jax.Array) -> jax.Array:
    """1 / x of fp32 within 1 ulp, for x whose reciprocal is a normal number."""
    return 1.0 / x if _interpreted.get() else _special_function("rcp.approx.ftz.f32", x)


def loop(lower: Any, upper: Any, body: Callable[[Any, Any], Any], init: Any) -> Any:
    """``for i in range(lower, upper): init = body(i, init)``, as one ``scf.for`` that Triton can pipeline."""
    return lax.fori_loop(jnp.int32(lower), jnp.int32(upper), body, init)


def _varying_axes(arrays: Iterable[jax.Array]) -> frozenset[Any]:
    """The mesh axes of an enclosing shard_map over which any of ``arrays`` varies."""
    types = [getattr(jax.typeof(x), "manual_axis_type", None) for x in arrays]
    return frozenset().union(*(t.varying for t in types if t is not None))


def vary_alike(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """``arrays``, each varying over every mesh axis that one of them varies over.

    Under shard_map an operand that is shared by the shards of an axis (a bias without that batch dimension) gets its
    gradient summed over the axis: the transpose of this cast.
    """
    axes = _varying_axes(arrays.values())

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - _varying_axes([x])))
        return lax.pcast(x, missing, to="varying") if missing else x

    return {name: cast(x) for name, x in arrays.items()}


def _whole(shape: Sequence[int], last: int | None) -> pl.BlockSpec:
    """The whole array, its last dimension rounded up to ``last`` (reads past the array are masked by the kernel)."""
    block = (*shape[:-1], last or shape[-1]) if shape else ()
    return pl.BlockSpec(block, lambda *_: (0,) * len(block))


def call(
    kernel: Callable[[dict[str, Ref], dict[str, Ref]], None],
    *,
    name: str,
    grid: tuple[int, ...],
    inputs: Mapping[str, jax.Array],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    padded_last: Mapping[str, int],
    num_warps: int,
    num_stages: int,
    interpret: bool,
) -> dict[str, jax.Array]:
    """Run ``kernel(input refs, output refs)`` on every point of ``grid``.

    Refs are whole arrays that the kernel indexes by itself; ``padded_last`` gives the size to which the last dimension
    of a ref is rounded up so that a static slice past the end is legal (its elements are to be masked).
    """
    inputs = {key: jnp.asarray(x) for key, x in inputs.items()}
    varying = _varying_axes(inputs.values())
    if varying:
        axes = jax.sharding.ManualAxisType(varying=varying)
        outputs = {key: jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=axes) for key, x in outputs.items()}

    @functools.wraps(kernel)
    def flat(*arrays: Any) -> None:
        zero = program_id(0) * 0
        refs = [Ref(x, zero) for x in arrays]
        ins, outs = refs[: len(inputs)], refs[len(inputs) :]
        token = _interpreted.set(interpret)
        try:
            kernel(dict(zip(inputs, ins, strict=True)), dict(zip(outputs, outs, strict=True)))
        finally:
            _interpreted.reset(token)

    results = pl.pallas_call(
        flat,
        grid=grid,
        in_specs=[_whole(x.shape, padded_last.get(key)) for key, x in inputs.items()],
        out_specs=[_whole(x.shape, padded_last.get(key)) for key, x in outputs.items()],
        out_shape=list(outputs.values()),
        compiler_params=pallas_triton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )(*inputs.values())
    return dict(zip(outputs, results, strict=True))
