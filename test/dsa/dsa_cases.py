"""Problems of the DSA suite, by name: random, structured and hostile data for every backend, dtype and size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import dsa_oracle
import torch

# Relative L2 against the kernel's oracle (docs/contract.md); LARGE_LOGITS replaces where it differs.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-3, torch.float16: 5e-4}
LARGE_LOGITS = {torch.float32: 5e-5}
STAT_DTYPE = {torch.float64: torch.float64}


@dataclass
class Sizes:
    s_q: int = 6
    s_kv: int = 40
    heads: int = 4
    head_dim: int = 64
    topk: int = 12

    @property
    def head_dim_v(self) -> int:
        return 512 if self.head_dim in (512, 576) else self.head_dim


@dataclass
class Case:
    """Inputs of one call on one device, with out and lse of the float64 forward in the dtypes a caller would have."""

    q: torch.Tensor
    kv: torch.Tensor
    topk_idxs: torch.Tensor
    attn_sink: torch.Tensor | None
    topk_length: torch.Tensor | None
    dout: torch.Tensor
    softmax_scale: float
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None

    @property
    def d_v(self) -> int:
        return self.dout.shape[-1]

    def to(self, device: str) -> Case:
        moved = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        return replace(self, **moved)

    def forward_oracle(self):
        return dsa_oracle.forward(
            self.q, self.kv, self.topk_idxs, self.attn_sink, self.topk_length, self.softmax_scale, self.d_v
        )

    def backward_oracle(self, delta=None, operand_dtype=torch.float64):
        return dsa_oracle.kernel_backward(
            self.q, self.kv, self.out, self.dout, self.lse, self.attn_sink, self.topk_idxs, self.topk_length, delta,
            self.softmax_scale, operand_dtype,
        )  # fmt: skip

    def end_to_end_oracle(self, dlse=None):
        return dsa_oracle.end_to_end(
            self.q, self.kv, self.topk_idxs, self.attn_sink, self.topk_length, self.softmax_scale, self.d_v, self.dout,
            dlse,
        )  # fmt: skip


def make(name: str, dtype: torch.dtype, sizes: Sizes, seed: int = 0, out_dtype: torch.dtype | None = None) -> Case:
    """The case ``name`` of ``CASES``, on the CPU."""
    generator = torch.Generator().manual_seed(seed * 1009 + sum(map(ord, name)))
    case = _random(dtype, sizes, generator)
    CASES[name](case, sizes, generator)
    case.q, case.kv, case.dout = case.q.to(dtype), case.kv.to(dtype), case.dout.to(dtype)
    stat = STAT_DTYPE.get(dtype, torch.float32)
    if case.attn_sink is not None and name != "sink_overflow":
        case.attn_sink = case.attn_sink.to(stat)
    out, lse = case.forward_oracle()
    case.out, case.lse = out.to(out_dtype or dtype), lse.to(stat)
    return case


def _random(dtype: torch.dtype, sizes: Sizes, g: torch.Generator) -> Case:
    s = sizes
    return Case(
        q=torch.randn(s.s_q, s.heads, s.head_dim, generator=g, dtype=torch.float64),
        kv=torch.randn(s.s_kv, s.head_dim, generator=g, dtype=torch.float64),
        topk_idxs=_unique(s, g),
        attn_sink=None,
        topk_length=None,
        dout=torch.randn(s.s_q, s.heads, s.head_dim_v, generator=g, dtype=torch.float64),
        softmax_scale=s.head_dim**-0.5,
    )


def _unique(s: Sizes, g: torch.Generator) -> torch.Tensor:
    """Unique keys a row; -1 where K exceeds S_kv."""
    rows = torch.full((s.s_q, s.topk), -1, dtype=torch.int32)
    for i in range(s.s_q):
        picked = torch.randperm(s.s_kv, generator=g)[: s.topk]
        rows[i, : len(picked)] = picked.int()
    return rows


def _lengths(case: Case, s: Sizes, g: torch.Generator) -> None:
    case.topk_length = torch.randint(1, s.topk + 1, (s.s_q,), generator=g, dtype=torch.int32)


def _sink(case: Case, s: Sizes, g: torch.Generator) -> None:
    case.attn_sink = torch.randn(s.heads, generator=g, dtype=torch.float64)


def _sink_of(value: float) -> Callable[[Case, Sizes, torch.Generator], None]:
    def change(case: Case, s: Sizes, g: torch.Generator) -> None:
        case.attn_sink = torch.full((s.heads,), value, dtype=torch.float64)

    return change


def _sink_overflow(case: Case, s: Sizes, g: torch.Generator) -> None:
    """2.4e38 * log2(e) overflows fp32 to +inf, its negative to -inf; a mix over heads, always fp32."""
    values = torch.tensor([2.4e38, -2.4e38, 0.5])
    case.attn_sink = values.repeat(s.heads)[: s.heads].contiguous()


def _sink_mixed(case: Case, s: Sizes, g: torch.Generator) -> None:
    values = torch.tensor([torch.inf, -torch.inf, 0.0, 30.0, -30.0, 1.5], dtype=torch.float64)
    case.attn_sink = values.repeat(s.heads)[: s.heads].contiguous()


def _sink_and_empty_rows(case: Case, s: Sizes, g: torch.Generator) -> None:
    _sink_mixed(case, s, g)
    case.topk_idxs[::2] = -1


def _logits_200(case: Case, s: Sizes, g: torch.Generator) -> None:
    """Scale q so that the largest |s| of the call is about 200."""
    scores = torch.einsum("ihd,jd->ihj", case.q, case.kv) * case.softmax_scale
    case.q *= 200 / scores.abs().max().clamp(min=1e-9)


def _hot_key(case: Case, s: Sizes, g: torch.Generator) -> None:
    """One key holds about nine tenths of every row."""
    case.kv[0] = 0
    case.kv[0, 0] = 4.0
    case.topk_idxs[case.topk_idxs == 0] = 1
    case.topk_idxs[:, s.topk // 2] = 0
    case.q[..., 0] = (2.2 + torch.tensor(float(max(s.topk, 2))).log()) / (4.0 * case.softmax_scale)


def _one_key_only(case: Case, s: Sizes, g: torch.Generator) -> None:
    """p is 1 to within rounding, dp - delta cancels."""
    _hot_key(case, s, g)
    case.q[..., 0] *= 6


def _equal_logits(case: Case, s: Sizes, g: torch.Generator) -> None:
    case.q.zero_()


def _empty_rows(case: Case, s: Sizes, g: torch.Generator) -> None:
    case.topk_idxs[::3] = -1
    if s.s_q > 1:
        case.topk_length = torch.full((s.s_q,), s.topk, dtype=torch.int32)
        case.topk_length[1] = 0


def _scattered_invalid(case: Case, s: Sizes, g: torch.Generator) -> None:
    """Below 0 and past the end, wherever they stand, to the ends of int32."""
    kinds = torch.tensor([-1, -7, s.s_kv, s.s_kv + 5, 2**31 - 1, -(2**31)], dtype=torch.int32)
    hit = torch.rand(case.topk_idxs.shape, generator=g) < 0.4
    case.topk_idxs = torch.where(
        hit, kinds[torch.randint(0, len(kinds), hit.shape, generator=g)], case.topk_idxs
    ).contiguous()


def _leading_invalid(case: Case, s: Sizes, g: torch.Generator) -> None:
    """Whole tiles of invalid entries before the first valid one."""
    case.topk_idxs[:, : s.topk - 1] = -1


def _duplicates(case: Case, s: Sizes, g: torch.Generator) -> None:
    case.topk_idxs = torch.randint(0, 3, case.topk_idxs.shape, generator=g, dtype=torch.int32)


def _one_row_for_all(case: Case, s: Sizes, g: torch.Generator) -> None:
    case.topk_idxs = torch.full_like(case.topk_idxs, min(1, s.s_kv - 1))


def _odd_lengths(case: Case, s: Sizes, g: torch.Generator) -> None:
    """Lengths below 0 and above K are clamped."""
    values = torch.tensor([-3, 0, 1, s.topk, s.topk + 9, s.topk // 2], dtype=torch.int32)
    case.topk_length = values.repeat(s.s_q)[: s.s_q].contiguous()


def _poisoned_rows(case: Case, s: Sizes, g: torch.Generator) -> None:
    """NaN and inf in rows that nothing selects, row 0 (what invalid entries are clamped to) among them."""
    case.topk_idxs = torch.where(case.topk_idxs % 2 == 0, -1, case.topk_idxs)
    case.kv[0::4] = torch.nan
    case.kv[2::4] = torch.inf


def _cut_off_entries(case: Case, s: Sizes, g: torch.Generator) -> None:
    """Behind topk_length stand valid indices of poisoned rows: they must not be read into anything."""
    case.topk_length = torch.full((s.s_q,), max(1, s.topk // 2), dtype=torch.int32)
    case.topk_idxs[case.topk_idxs == 0] = 1
    case.topk_idxs[:, case.topk_length[0] :] = 0
    case.kv[0] = torch.nan


def _nothing(case: Case, s: Sizes, g: torch.Generator) -> None:
    pass


def _small_gradient(case: Case, s: Sizes, g: torch.Generator) -> None:
    case.dout *= 1e-3


CASES: dict[str, Callable[[Case, Sizes, torch.Generator], None]] = {
    "random": _nothing,
    "topk_length": _lengths,
    "sink": _sink,
    "sink_zero": _sink_of(0.0),
    "sink_large": _sink_of(60.0),
    "sink_huge": _sink_of(1e38),
    "sink_plus_inf": _sink_of(torch.inf),
    "sink_minus_inf": _sink_of(-torch.inf),
    "sink_overflow": _sink_overflow,
    "sink_mixed": _sink_mixed,
    "sink_and_empty_rows": _sink_and_empty_rows,
    "logits_200": _logits_200,
    "hot_key": _hot_key,
    "one_key_only": _one_key_only,
    "equal_logits": _equal_logits,
    "empty_rows": _empty_rows,
    "scattered_invalid": _scattered_invalid,
    "leading_invalid": _leading_invalid,
    "duplicates": _duplicates,
    "one_row_for_all": _one_row_for_all,
    "odd_lengths": _odd_lengths,
    "poisoned_rows": _poisoned_rows,
    "cut_off_entries": _cut_off_entries,
    "small_gradient": _small_gradient,
}


# Where p is 1 or all values are equal, dp - delta cancels to rounding and so does dq: its error is measured against the
# size of the terms.
CANCELLING = ("one_key_only", "leading_invalid", "one_row_for_all")


def gradient_errors(name: str, case: Case, got: tuple, delta: torch.Tensor | None = None) -> dict[str, float]:
    """Relative L2 errors of (dq, dkv, d_sink or None) against the kernel's oracle, by name."""
    dq, dkv, d_sink, terms = case.to("cpu").backward_oracle(None if delta is None else delta.cpu())
    want = {"dq": dq, "dkv": dkv, "d_sink": d_sink}
    assert (got[2] is None) == (d_sink is None)
    return {
        key: dsa_oracle.relative_error(value, want[key], terms[key] if key == "dq" and name in CANCELLING else None)
        for key, value in zip(("dq", "dkv", "d_sink"), got, strict=True)
        if value is not None
    }


def rounding_errors(name: str, case: Case, got: tuple, delta: torch.Tensor | None = None) -> dict[str, float]:
    """What rounding alone costs: the errors of float64 results that are rounded once to the dtypes of ``got``, with p
    and ds rounded to the case's dtype before the matrix products or not, whichever is worse.

    Over many terms and elements roundings average to half of the contract's bound (1.7e-3 in bf16). Of a result with
    three elements, or of one query with five keys, each may be off by half a unit in the last place, 2**-8 in bf16.
    """
    worst: dict[str, float] = {}
    for operand_dtype in (torch.float64, case.q.dtype):
        exact = case.to("cpu").backward_oracle(None if delta is None else delta.cpu(), operand_dtype)
        rounded = [None if have is None else want.to(have.dtype) for have, want in zip(got, exact[:3], strict=True)]
        for key, error in gradient_errors(name, case, tuple(rounded), delta).items():
            worst[key] = max(error, worst.get(key, 0.0))
    return worst


def assert_gradients(name: str, case: Case, got: tuple, delta: torch.Tensor | None = None, limit: float = 0) -> None:
    """(dq, dkv, d_sink) are as close to the kernel's oracle as the contract asks.

    A larger error passes up to ``limit``, or where rounding alone explains it (to 5%): see :func:`rounding_errors`.
    """
    limit = max(limit, bound(name, case.q.dtype))
    errors = gradient_errors(name, case, got, delta)
    if max(errors.values()) > limit:
        rounding = rounding_errors(name, case, got, delta)
        for key, error in errors.items():
            allowed = max(limit, 1.05 * rounding[key])
            assert error <= allowed, f"{key}: relative error {error:.3g} > {allowed:.3g}"


def bound(name: str, dtype: torch.dtype) -> float:
    return LARGE_LOGITS.get(dtype, BOUNDS[dtype]) if name == "logits_200" else BOUNDS[dtype]
