"""Softmax without a running maximum: when a maximum known beforehand is exact, and the numbers that decide it.

Instead of m = max_j s_j the kernel subtracts a number that is known before the first key is read. In base 2, with
s_j = scale log2(e) q k_j and the bound |s_j| <= U (Cauchy-Schwarz: U = scale log2(e) |q| max_j |k_j|),

    m = ceil(U) - C        P_j = 2^(s_j - m)        out = sum_j P_j v_j / sum_j P_j

which is softmax as long as fp32 neither overflows nor flushes anything that counts. Three proofs, for N keys and
|v| <= 256; the kernel's fp32 logits may differ from s_j by rounding, for which U is taken a little larger.

**No overflow.** s_j <= U <= ceil(U), so P_j <= 2^C, and every partial sum is at most N 2^C 256 <= 2^127 with
C(N) = 127 - 8 - ceil(log2 N).

**No weight is flushed (strict gate).** s_j - m >= -U - ceil(U) + C. With W = C + 125, U <= floor(W/2) gives
U + ceil(U) <= W and exponents of at least -125. Centering the keys does not widen this: m follows from the bound U, not
from the largest logit that occurs. (N = 4096, U = 231.01, so m = 125: of keys half at a = log2(7.5)/2 and half at -a,
the latter have exponents of -126.45, vanish, and take 2 of 17 parts of the mass with them, if all of W is used as the
gate.)

**No product is flushed that counts.** A weight that survives may still vanish when it is multiplied with a value: at
the gate a query whose logits all are -U has weights of 2^-125, and half of the values of a standard normal v would give
products below 2^-126. What the weights sum up to decides: by Jensen's inequality sum_j 2^s_j >= N 2^mean(s), and
mean(s) = scale log2(e) q k_mean is cheap. 2 N flushed products and sums, relative to it, move out by at most 2^(m - 125
- mean(s)). A fixed m is used where that is at most 2^-40.

**One-sided bound (wide gate).** For centered keys mean(s) = 0 and sum_j 2^s_j >= N. Weights that are flushed are below
2^-126 each, so their share is at most 2^(m - 126) = 2^(ceil(U) - C - 126): with U <= C + 116 less than 2^-10 of the
mass is lost. Flushed products, 2^(m - 125), are held to 2^-10 max|v| by the same rule as above. Altogether out is off
by at most 2^-8 max|v|: an option for bf16, never the default.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cudnn_dsa.contracts import (
    ContractError,
    Dims,
    check_choice,
    check_dtype,
    check_presence,
    check_range,
    check_shape,
    describe,
)
from cudnn_dsa_tpu.contracts import Problem
from cudnn_dsa_tpu.launch import pad_to

V_MAX = 256.0
GATES = ("strict", "wide")
Gate = Literal["strict", "wide"]

# Dtypes of q, k and v. P is cast to the dtype of v: it spans 2^-125 to 2^118, which these hold as well as fp32 does...
SAFE_DTYPES = ("bfloat16", "float32")
# ... and these do not. Calls with them always take the running maximum.
UNSAFE_DTYPES = ("float16", "float8_e4m3fn", "float8_e5m2")

# The wide gate is U <= C + this.
WIDE_MARGIN = 116
# Flushed products may move out by 2 to this power (strict gate).
PRODUCT_FLUSH = -40
# What U and the mean logit are widened by, relative to |q| (|k| + |k_mean|): norms, logits and mean logits are sums of
# at most 256 fp32 products, off by 2^-16 each. Where the allowance exceeds 1, m would no longer be known to within a
# factor of two (keys with an enormous offset), and no fixed m is used.
ROUNDING = 2.0**-12


class FixedMConstants(NamedTuple):
    """See the module's proofs.

    Attributes:
        C: m = ceil(U) - C.
        W: the width of the exponents' window, C + 125.
        gate: a fixed m is exact for U <= gate.
    """

    C: int
    W: int
    gate: int


def get_fixed_m_constants(kv_seq_len: int) -> FixedMConstants:
    """The constants for ``kv_seq_len`` keys, those of the whole ring."""
    if isinstance(kv_seq_len, bool) or not isinstance(kv_seq_len, int):
        raise ContractError("kv_seq_len", "an int", type(kv_seq_len).__name__)
    check_range("kv_seq_len", kv_seq_len, 1)
    c = 127 - 8 - (kv_seq_len - 1).bit_length()
    return FixedMConstants(c, c + 125, (c + 125) // 2)


def fixed_m_dtype_is_safe(dtype: Any) -> bool:
    """Whether P can be cast to ``dtype`` without overflow or flush: bfloat16 and float32."""
    return jnp.dtype(dtype).name in SAFE_DTYPES


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedMNorms:
    """What the bound is made of; of q and k as they are passed to the operator (it applies the scale).

    Attributes:
        q: [H] or [H, q blocks], fp32: the largest norm, or squared norm, of the queries of a head (of its block).
        k: [H_kv], fp32: the largest norm, or squared norm, of a head's keys, of all devices.
        mean: like q: the smallest q k_mean among the queries, or None if unknown (then -U is assumed, and the proof for
            products only admits smaller U). Not used for centered norms, where it is zero.
        centered: ``k`` is of k - k_mean.
    """

    q: Any
    k: Any
    mean: Any = None
    centered: bool = dataclasses.field(default=False, metadata={"static": True})


def fixed_m_k_mean(k: jax.Array, *, axis_names: Any = ()) -> jax.Array:
    """[H_kv, D], fp32: the mean of the keys k [H_kv, T, D]; under shard_map over all shards of ``axis_names``. Pass
    keys that exist only: padding would move the mean."""
    mean = jnp.mean(lax.stop_gradient(k).astype(jnp.float32), axis=1)
    return lax.pmean(mean, axis_names) if axis_names else mean


def fixed_m_norms(
    q: jax.Array,
    k: jax.Array,
    *,
    block_q: int | None = None,
    k_mean: jax.Array | None = None,
    squared: bool = True,
    axis_names: Any = (),
) -> FixedMNorms:
    """The statistics of q [H, S, D] and k [H_kv, T, D], in one pass over each. They have no gradient, nor need one: the
    result of attention does not depend on them.

    Args:
        block_q: queries per block (``BlockSizes.block_q`` of the call); None: one block per head.
        k_mean: [H_kv, D]: norms are those of k - k_mean, which is not written anywhere.
        squared: leave the square root out.
        axis_names: mesh axes that shard the keys; the maximum and the mean are taken over them.
    """
    q, k, k_mean = lax.stop_gradient((q, k, k_mean))
    centered = k_mean is not None
    mean = fixed_m_k_mean(k, axis_names=axis_names) if k_mean is None else k_mean
    kf = k.astype(jnp.float32) - (mean[:, None, :] if centered else 0.0)
    longest_k = jnp.max(jnp.sum(kf * kf, axis=-1), axis=-1)
    longest_k = lax.pmax(longest_k, axis_names) if axis_names else longest_k
    qf = q.astype(jnp.float32)
    group = q.shape[0] // k.shape[0]
    rows = jnp.sum(qf * qf, axis=-1), jnp.sum(qf * jnp.repeat(mean, group, axis=0)[:, None, :], axis=-1)
    # Queries added by padding are zero: they can only lower the smallest mean.
    if block_q is None:
        longest_q, lowest = rows[0].max(axis=-1), rows[1].min(axis=-1)
    else:
        squares, means = (pad_to(x, block_q, axis=1).reshape(len(x), -1, block_q) for x in rows)
        longest_q, lowest = squares.max(axis=-1), means.min(axis=-1)
    if not squared:
        longest_q, longest_k = jnp.sqrt(longest_q), jnp.sqrt(longest_k)
    return FixedMNorms(q=longest_q, k=longest_k, mean=None if centered else lowest, centered=centered)


class LogitBound(NamedTuple):
    """Of a head's block of queries, in base 2; any shape.

    Attributes:
        upper: U, with the allowance for rounding.
        mean: a lower bound of the mean logit.
        rounding: the allowance.
    """

    upper: Any
    mean: Any
    rounding: Any


def logit_bound(
    norms: FixedMNorms, *, scale_log2e: float, group: int, k_mean: Any = None, squared: bool = True
) -> LogitBound:
    """The bound of every head and block, shaped like ``norms.q``."""
    q, k = (jnp.asarray(x, jnp.float32) for x in (norms.q, norms.k))
    if squared:
        q, k = jnp.sqrt(q), jnp.sqrt(k)
    offset = jnp.zeros_like(k) if k_mean is None else jnp.linalg.norm(jnp.asarray(k_mean, jnp.float32), axis=-1)

    def per_query_head(x):
        x = jnp.repeat(x, group, axis=0)
        return x if q.ndim == 1 else x[:, None]

    length = abs(scale_log2e) * q
    rounding = ROUNDING * length * per_query_head(k + offset)
    upper = length * per_query_head(k) + rounding
    if norms.centered:
        mean = -rounding
    elif norms.mean is None or scale_log2e < 0:
        mean = -upper
    else:
        mean = scale_log2e * norms.mean - rounding
    return LogitBound(upper, mean, rounding)


def shift(upper: Any, constants: FixedMConstants) -> Any:
    """m of the bound U."""
    return jnp.ceil(upper) - constants.C


def is_eligible(bound: LogitBound, constants: FixedMConstants, gate: Gate = "strict", v_max: Any = None) -> Any:
    """Whether a fixed m is exact (strict) or loses at most 2^-8 max|v| (wide, for centered keys). False for NaN.

    Args:
        v_max: for the wide gate, max|v| of the bound's heads, broadcastable.
    """
    flushed = shift(bound.upper, constants) - 125 - bound.mean  # log2 of what flushed products move out by
    if gate == "strict":
        fits = (bound.upper <= constants.gate) & (flushed <= PRODUCT_FLUSH)
    else:
        fits = (bound.upper <= constants.C + WIDE_MARGIN) & (flushed <= jnp.log2(v_max) - 9)
    return fits & (bound.rounding <= 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedM:
    """Options of attention with a fixed m; see :func:`cudnn_dsa_tpu.fixed_m_attention`.

    Attributes:
        v_ok: required. Whether the dtype of v is safe and max|v| <= 256 on every device: a bool, or this device's
            verdict as a boolean array (the ring takes the minimum over devices). Never assumed: computing it reads v.
        per_q_block: decide per head and block of queries, or per head.
        k_mean: [H_kv, D], fp32, the mean of all keys of the ring: center them. Needs ``norms`` of centered keys.
        norms: :class:`FixedMNorms`; None: computed.
        fixed_m_norms_squared: ``norms`` holds squared norms.
        gate: "strict" is exact; "wide" needs centered keys.
        uniform: one kernel body, used if all heads and blocks of all devices are eligible, the running maximum
            otherwise; False: decided per head and block.
    """

    v_ok: Any = None
    per_q_block: bool = True
    k_mean: Any = None
    norms: FixedMNorms | None = None
    fixed_m_norms_squared: bool = True
    gate: str = "strict"
    uniform: bool = False

    def check(self, problem: Problem, q_blocks: int) -> None:
        """Raises a ``ContractError`` for options that contradict each other or the shapes of the call."""
        check_presence("v_ok", self.v_ok is not None, True, "a verdict on dtype and max|v| <= 256 is never assumed")
        if not fixed_m_dtype_is_safe(problem.dtype) and _is_true(self.v_ok):
            raise ContractError("v_ok", f"False: {problem.dtype} cannot hold the weights", "True")
        for name in ("per_q_block", "fixed_m_norms_squared", "uniform"):
            if not isinstance(getattr(self, name), bool):
                raise ContractError(name, "a bool", type(getattr(self, name)).__name__)
        check_choice("gate", self.gate, GATES, "no other gate is proven")
        dims = Dims(H=problem.num_heads, H_kv=problem.num_kv_heads, D=problem.head_dim, q_blocks=q_blocks)
        if self.k_mean is not None:
            spec = describe(self.k_mean)
            check_shape("k_mean", spec, ("H_kv", "D"), dims)
            check_dtype("k_mean", spec, ("float32",))
            if self.norms is None or not self.norms.centered:
                got = "None" if self.norms is None else "norms of the keys as they are"
                raise ContractError("norms", "norms of centered keys, since k_mean is given", got)
        if self.gate == "wide":
            check_presence("k_mean", self.k_mean is not None, True, "the wide gate is proven for centered keys only")
        if self.norms is not None:
            self._check_norms(self.norms, dims)

    def _check_norms(self, norms: FixedMNorms, dims: Dims) -> None:
        if not isinstance(norms, FixedMNorms):
            raise ContractError("norms", "FixedMNorms", type(norms).__name__)
        if norms.centered and self.k_mean is None:
            raise ContractError("k_mean", "the mean that the centered norms belong to", "None")
        # A [H] where [H, blocks] belongs would broadcast to [H, H] without a word.
        queries = ("H", "q_blocks") if self.per_q_block else ("H",)
        hint = {True: "per_q_block=True", False: "per_q_block=False"}[self.per_q_block]
        for name, value, names in (("q", norms.q, queries), ("k", norms.k, ("H_kv",)), ("mean", norms.mean, queries)):
            if value is None and name == "mean":
                continue
            spec = describe(value)
            check_shape(f"norms.{name} ({hint})", spec, names, dims)
            check_dtype(f"norms.{name}", spec, ("float32",))

    def metadata(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        problem: Problem,
        *,
        block_q: int,
        ring_kv_len: int,
        axes: Any = (),
    ) -> jax.Array:
        """The kernel's table [2, H, q blocks], fp32: m, then whether it may be used; ``check`` came before.

        Args:
            q, k, v: of this device, tokens that exist only.
            block_q: queries of a block.
            ring_kv_len: keys of the whole ring.
            axes: mesh axes that shard the keys.
        """
        norms = self.norms
        squared = self.fixed_m_norms_squared or norms is None
        if norms is None:
            norms = fixed_m_norms(q, k, block_q=block_q if self.per_q_block else None, axis_names=axes)
        bound = logit_bound(
            norms, scale_log2e=problem.scale_log2e, group=problem.group, k_mean=self.k_mean, squared=squared
        )
        v_max = None
        if self.gate == "wide":
            v_max = jnp.repeat(largest_value(v, axes), problem.group)
            v_max = v_max[:, None] if self.per_q_block else v_max
        constants = get_fixed_m_constants(ring_kv_len)
        eligible = is_eligible(bound, constants, self.gate, v_max)  # type: ignore[arg-type]
        eligible = eligible & jnp.asarray(self.v_ok, bool).reshape(())
        m = jnp.where(eligible, shift(bound.upper, constants), 0.0)  # finite, whatever the norms were
        table = jnp.stack([m, eligible.astype(jnp.float32)])
        blocks = -(-problem.valid_q // block_q)
        return lax.stop_gradient(table if self.per_q_block else jnp.repeat(table[..., None], blocks, axis=-1))


def largest_value(v: jax.Array, axes: Any = ()) -> jax.Array:
    """[H_kv], fp32: max|v| of v [H_kv, T, D_v], over all shards of ``axes``."""
    largest = jnp.max(jnp.abs(v.astype(jnp.float32)), axis=(1, 2))
    return lax.pmax(largest, axes) if axes else largest


def _is_true(verdict: Any) -> bool:
    """Whether a verdict is known to be True now; one that is traced is not known."""
    return not isinstance(verdict, jax.core.Tracer) and bool(verdict)
