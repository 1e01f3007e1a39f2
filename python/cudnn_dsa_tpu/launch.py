"""How every kernel of this package is launched: interpreter or TPU, dimension semantics, memory limit, cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from cudnn_dsa.contracts import ContractError
from cudnn_dsa_tpu.block_sizes import Tiles
from cudnn_dsa_tpu.chips import current_chip
from cudnn_dsa_tpu.contracts import Problem

Interpret = bool | pltpu.InterpretParams

# Operand layouts of a 2-D matrix product: A B, A B^T, A^T B.
NN = (((1,), (0,)), ((), ()))
NT = (((1,), (1,)), ((), ()))
TN = (((0,), (0,)), ((), ()))

# Logits are masked with MASKED; a running maximum starts at NOTHING. Their distance is so large that a masked logit has
# weight 2^(MASKED - m) = 0 for every m >= NOTHING, in a row without any key too: no 0/0, no inf - inf.
MASKED = -2e30
NOTHING = -1e30


def resolve_interpret(interpret: Interpret | None) -> Interpret:
    """None: interpret unless the default backend is a TPU."""
    if interpret is not None and not isinstance(interpret, (bool, pltpu.InterpretParams)):
        raise ContractError("interpret", "None, a bool or InterpretParams", type(interpret).__name__)
    return jax.default_backend() != "tpu" if interpret is None else interpret


def matmul(dtype: str) -> Callable[..., jax.Array]:
    """``dot_general`` of operands of ``dtype`` that accumulates in fp32. For fp32 at full precision: the MXU's default
    would round the operands to bf16 and return gradients that are wrong in the third digit."""
    precision = lax.Precision.HIGHEST if dtype == "float32" else lax.Precision.DEFAULT

    def dot(a: jax.Array, b: jax.Array, dimension_numbers: Any) -> jax.Array:
        if 1 in (*a.shape, *b.shape):
            # A ragged tail of one key. Mosaic lowers a product with a vector by multiplying and reducing, and for bf16
            # generates invalid code there; in fp32 it is right, and exact for bf16 values.
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return lax.dot_general(a, b, dimension_numbers, precision=precision, preferred_element_type=jnp.float32)

    return dot


def pad_to(x: jax.Array, multiple: int, *, axis: int, value: float = 0) -> jax.Array:
    """``x`` padded behind ``axis`` to a multiple; ``x`` itself where nothing is missing."""
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    widths = [(0, missing if n == axis else 0) for n in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value)


def cost(problem: Problem, tiles: Tiles, matmuls: int) -> pl.CostEstimate:
    """What XLA's scheduler needs to know to place communication around a kernel with ``matmuls`` products."""
    pairs = problem.num_heads * problem.valid_q * problem.valid_kv
    tokens = problem.num_heads * tiles.grid(problem)[0] * problem.valid_kv
    item = 2 if problem.dtype == "bfloat16" else 4
    return pl.CostEstimate(
        flops=matmuls * pairs * (problem.head_dim + problem.head_dim_v),
        transcendentals=pairs,
        bytes_accessed=tokens * (problem.head_dim + problem.head_dim_v) * item,
    )


def _vary_alike(operands: Any) -> tuple[Any, jax.sharding.ManualAxisType]:
    """The operands, and the mesh axes they and the results vary over (``shard_map`` with ``check_vma``)."""
    varying = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(operands)))

    def vary(x):
        missing = varying - jax.typeof(x).manual_axis_type.varying
        return lax.pcast(x, tuple(missing), to="varying") if missing else x

    return jax.tree.map(vary, operands), jax.sharding.ManualAxisType(varying=varying)


def launch(
    kernel: Callable[..., None],
    operands: tuple[Any, ...],
    *,
    name: str,
    grid: tuple[int, ...],
    semantics: tuple[Literal["parallel", "arbitrary"], ...],
    in_specs: Sequence[Any],
    out_specs: Any,
    out_shape: Any,
    scratch_shapes: Sequence[Any],
    cost_estimate: pl.CostEstimate,
    interpret: Interpret,
    input_output_aliases: dict[int, int] | None = None,
) -> Any:
    """``pl.pallas_call`` with this package's conventions.

    ``interpret=True`` becomes the TPU interpreter (the generic one mishandles aliased buffers) without dimension
    semantics, because the interpreter refuses them under ``vmap``; an explicit ``InterpretParams`` keeps them, so that
    its seeds and cores exercise them.
    """
    explicit = isinstance(interpret, pltpu.InterpretParams)
    keeps_semantics = explicit or not interpret
    operands, axes = _vary_alike(operands)
    out_shape = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, manual_axis_type=axes), out_shape)
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=scratch_shapes,
        input_output_aliases=input_output_aliases or {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics if keeps_semantics else None,
            vmem_limit_bytes=current_chip().vmem_limit_bytes,
        ),
        cost_estimate=cost_estimate,
        interpret=pltpu.InterpretParams() if interpret is True else interpret,
        name=name,
    )(*operands)
