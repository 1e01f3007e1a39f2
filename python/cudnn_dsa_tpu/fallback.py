"""How often a fixed m would fall back to the running maximum, from statistics of a model's queries and keys.

``collect`` inside a model gives the statistics of one attention layer: some hundred numbers, however long the sequence.
``save`` and ``load`` keep those of several layers in one .npz file; ``synthetic`` makes up a video transformer's.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cudnn_dsa.contracts import ContractError
from cudnn_dsa_tpu.fixed_m import (
    WIDE_MARGIN,
    FixedMNorms,
    fixed_m_k_mean,
    fixed_m_norms,
    get_fixed_m_constants,
    is_eligible,
    logit_bound,
)

_FIELDS = ("kv_seq_len", "scale_log2e", "q", "mean", "k", "k_centered", "k_mean", "v_max")


@dataclasses.dataclass(frozen=True)
class LayerStatistics:
    """Of one layer, fp32.

    Attributes:
        kv_seq_len: keys of the whole ring.
        scale_log2e: the scale of the logits times log2(e).
        q, mean: [H, q blocks]: the longest query of a block and the smallest q k_mean.
        k, k_centered: [H_kv]: the longest key, as it is and without the mean.
        k_mean: [H_kv, D].
        v_max: [H_kv], max|v|.
    """

    kv_seq_len: int
    scale_log2e: float
    q: Any
    mean: Any
    k: Any
    k_centered: Any
    k_mean: Any
    v_max: Any


def collect(q: jax.Array, k: jax.Array, v: jax.Array, *, block_q: int, scale: float | None = None) -> LayerStatistics:
    """The statistics of q [H, S, D], k [H_kv, T, D], v [H_kv, T, D_v]; ``scale`` None is D**-0.5."""
    k_mean = fixed_m_k_mean(k)
    plain = fixed_m_norms(q, k, block_q=block_q, squared=False)
    centered = fixed_m_norms(q, k, block_q=block_q, k_mean=k_mean, squared=False)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    v_max = jnp.max(jnp.abs(v.astype(jnp.float32)), axis=(1, 2))
    return LayerStatistics(
        k.shape[1], float(scale * np.log2(np.e)), plain.q, plain.mean, plain.k, centered.k, k_mean, v_max
    )


def save(path: str | pathlib.Path, layers: Mapping[str, LayerStatistics]) -> None:
    """One array per layer and field, named ``layer/field``."""
    arrays = {f"{n}/{field}": np.asarray(getattr(x, field)) for n, x in layers.items() for field in _FIELDS}
    np.savez(path, allow_pickle=False, **arrays)


def load(path: str | pathlib.Path) -> dict[str, LayerStatistics]:
    """What :func:`save` wrote."""
    with np.load(path) as arrays:
        names = dict.fromkeys(name.rpartition("/")[0] for name in arrays.files)
        missing = [f"{n}/{field}" for n in names for field in _FIELDS if f"{n}/{field}" not in arrays.files]
        if missing or not names:
            raise ContractError(str(path), f"arrays layer/field for each of {', '.join(_FIELDS)}", f"no {missing}")
        return {
            name: LayerStatistics(
                int(arrays[f"{name}/kv_seq_len"]),
                float(arrays[f"{name}/scale_log2e"]),
                *(arrays[f"{name}/{field}"] for field in _FIELDS[2:]),
            )
            for name in names
        }


def synthetic(layers: int = 6, heads: int = 8, length: int = 4096, seed: int = 0) -> dict[str, LayerStatistics]:
    """Made up to look like a video diffusion transformer: RMS-normalised queries and keys whose gains grow with depth,
    keys with an offset in common, some queries longer than others, and now and then a head with a sink."""
    rng = np.random.default_rng(seed)
    result = {}
    for layer in range(layers):
        gain = rng.uniform(1.0, 1.5, (heads, 1, 1)) * (1.5 + layer)
        q, k = (rng.standard_normal((heads, length, 128), dtype=np.float32) for _ in range(2))
        k += rng.uniform(0, 2, (heads, 1, 1)) * rng.standard_normal((heads, 1, 128))
        k *= np.sqrt(128) / np.linalg.norm(k, axis=-1, keepdims=True)
        q *= np.sqrt(128) / np.linalg.norm(q, axis=-1, keepdims=True) * rng.lognormal(0, 0.2, (heads, length, 1))
        if layer >= layers // 2:
            k[rng.integers(heads), 0] *= 20
        v = rng.standard_normal((heads, length, 128), dtype=np.float32)
        arrays = (jnp.asarray(x, jnp.bfloat16) for x in (q * gain, k, v))
        result[f"layer{layer}"] = collect(*arrays, block_q=512)
    return result


@dataclasses.dataclass(frozen=True)
class HeadReport:
    """One head: its largest bound (of the keys as they are, and centered), the gates, and the shares of its query
    blocks that fall back: strict gate, strict gate with centering, wide gate (which is always with centering)."""

    layer: str
    head: int
    bound: float
    centered_bound: float
    strict_gate: int
    wide_gate: int
    strict: float
    strict_centered: float
    wide: float


def report(layers: Mapping[str, LayerStatistics]) -> list[HeadReport]:
    """The rows of the report."""
    rows = []
    for name, x in layers.items():
        constants = get_fixed_m_constants(x.kv_seq_len)
        group = len(x.q) // len(x.k)
        options: dict[str, Any] = {"scale_log2e": x.scale_log2e, "group": group, "squared": False}
        plain = logit_bound(FixedMNorms(q=x.q, k=x.k, mean=x.mean), **options)
        norms = FixedMNorms(q=x.q, k=x.k_centered, centered=True)
        centered = logit_bound(norms, k_mean=x.k_mean, **options)
        v_max = np.repeat(np.asarray(x.v_max), group)[:, None]
        v_ok = bool((v_max <= 256).all())
        shares = [
            1 - np.asarray(fits & v_ok, np.float64).mean(axis=1)
            for fits in (
                is_eligible(plain, constants),
                is_eligible(centered, constants),
                is_eligible(centered, constants, "wide", v_max),
            )
        ]
        for head in range(len(x.q)):
            uncentered_bound, centered_bound = (float(np.max(b.upper[head])) for b in (plain, centered))
            strict, strict_centered, wide = (float(share[head]) for share in shares)
            gates = (constants.gate, constants.C + WIDE_MARGIN)
            rows.append(HeadReport(name, head, uncentered_bound, centered_bound, *gates, strict, strict_centered, wide))
    return rows


def table(rows: list[HeadReport]) -> str:
    """The report as text."""
    head = f"{'layer':<12}{'head':>5}{'U':>9}{'centered':>10}{'gate':>6}{'wide':>6}"
    lines = [head + f"{'strict':>9}{'+center':>9}{'wide':>9}   (share of query blocks that fall back)"]
    for r in rows:
        line = f"{r.layer:<12}{r.head:>5}{r.bound:>9.1f}{r.centered_bound:>10.1f}{r.strict_gate:>6}{r.wide_gate:>6}"
        lines.append(line + "".join(f"{share:>9.1%}" for share in (r.strict, r.strict_centered, r.wide)))
    means = [float(np.mean([getattr(r, n) for r in rows])) for n in ("strict", "strict_centered", "wide")]
    lines.append(f"{'all':<48}" + "".join(f"{share:>9.1%}" for share in means))
    return "\n".join(lines)


def plot(rows: list[HeadReport], path: str | pathlib.Path) -> None:
    """The report as a picture: bounds against the gates, and mean fallback shares by layer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = list(dict.fromkeys(r.layer for r in rows))
    place = {name: n for n, name in enumerate(names)}
    left.scatter([place[r.layer] - 0.1 for r in rows], [r.bound for r in rows], s=12, label="keys as they are")
    left.scatter([place[r.layer] + 0.1 for r in rows], [r.centered_bound for r in rows], s=12, label="centered")
    left.axhline(rows[0].strict_gate, color="k", linewidth=1, label="strict gate")
    left.axhline(rows[0].wide_gate, color="k", linewidth=1, linestyle=":", label="wide gate")
    left.set(yscale="log", ylabel="largest U of a head", xticks=range(len(names)), xticklabels=names)
    left.legend(fontsize=8)
    for field, label in (("strict", "strict"), ("strict_centered", "strict, centered"), ("wide", "wide")):
        shares = [np.mean([getattr(r, field) for r in rows if r.layer == name]) for name in names]
        right.plot(range(len(names)), shares, marker="o", label=label)
    right.set(ylabel="share of query blocks that fall back", ylim=(0, 1), xticks=range(len(names)), xticklabels=names)
    right.legend(fontsize=8)
    for axis in (left, right):
        axis.tick_params(axis="x", labelrotation=45)
    figure.savefig(path, dpi=120)
