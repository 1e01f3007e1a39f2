"""Flash attention in JAX, side by side: this package, tokamax (Pallas-Triton, Mosaic GPU, XLA) and jax.nn (cuDNN, XLA).

    PYTHONPATH=.:python python benchmark/pallas_triton.py [--cases NAME ...] [--peers NAME ...] [--output DIR]

One process, one run: every ratio in the table compares numbers of the same run. A peer that is not installed, or that
refuses a case, is left out with its reason. tokamax ships no configuration for many GPUs, so its Pallas-Triton kernels
are measured with each configuration of a small list and the fastest whose gradients are right counts.

Times are medians of the wall clock over batches of five launches, in ms; memory is what XLA reserves for one forward
and backward (arguments, results and temporaries). Writes a CSV file and a plot (with matplotlib) to --output.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from cudnn_dsa_pallas_triton import attention

Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: shapes, and the arguments that are not q, k, v."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    is_causal: bool = False
    soft_cap: float | None = None
    bias: bool = False
    mask: str | None = None  # "key" [B, 1, 1, t] or "dense" [B, 1, T, t]
    segment: int = 0  # packed segments of this length; "segments as mask" gives them densely

    def arrays(self, dtype: Any = jnp.bfloat16) -> Arrays:
        keys = iter(jax.random.split(jax.random.key(0), 6))
        b, t = self.batch, self.length

        def normal(*shape: int) -> jax.Array:
            return jax.random.normal(next(keys), shape, dtype)

        arrays = {
            "q": normal(b, t, self.heads, self.head_dim),
            "k": normal(b, t, self.kv_heads, self.head_dim),
            "v": normal(b, t, self.kv_heads, self.head_dim),
        }
        if self.bias:
            arrays["bias"] = normal(1, self.heads, t, t)
        lengths = jax.random.randint(next(keys), (b, 1, 1, 1), t // 2, t + 1)
        if self.mask == "key":
            arrays["mask"] = jnp.arange(t)[None, None, None, :] < lengths
        elif self.mask == "dense":
            keys_mask = jnp.arange(t)[None, None, None, :] < lengths
            arrays["mask"] = keys_mask & jnp.ones((1, 1, t, 1), bool)
        elif self.mask == "segments":
            ids = jnp.arange(t) // self.segment
            arrays["mask"] = (ids[:, None] == ids[None, :])[None, None]
        elif self.segment:
            arrays["segment_ids"] = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32) // self.segment, (b, t))
        return arrays


CASES = {
    "causal": Case(2, 8192, 16, 16, 128, is_causal=True),
    "full": Case(2, 8192, 16, 16, 128),
    "gqa": Case(32, 4096, 32, 8, 128, is_causal=True),
    "d256": Case(2, 8192, 8, 8, 256, is_causal=True),
    "d64": Case(1, 16384, 32, 32, 64, is_causal=True),
    "bias+key mask": Case(768, 768, 4, 4, 64, bias=True, mask="key"),
    "bias+dense mask": Case(768, 768, 4, 4, 64, bias=True, mask="dense"),
    "soft cap": Case(2, 8192, 16, 16, 128, is_causal=True, soft_cap=30.0),
    "segments": Case(2, 8192, 16, 16, 128, segment=512),
    "segments as mask": Case(2, 8192, 16, 16, 128, segment=512, mask="segments"),
    "small": Case(2, 256, 4, 2, 64, is_causal=True),
}

# A peer gives the functions to measure for a case: (label, f(arrays) -> out). It raises what it cannot do.
Candidates = Iterator[tuple[str, Callable[[Arrays], jax.Array]]]


def this_package(case: Case) -> Candidates:
    def f(arrays: Arrays) -> jax.Array:
        arrays = dict(arrays)
        ids = arrays.pop("segment_ids", None)
        segment_ids = None if ids is None else (ids, ids)
        return attention(
            **arrays, segment_ids=segment_ids, is_causal=case.is_causal, logits_soft_cap=case.soft_cap, interpret=None
        )

    yield "", f


def jax_nn(implementation: str) -> Callable[[Case], Candidates]:
    def peer(case: Case) -> Candidates:
        if case.soft_cap is not None or (case.segment and case.mask is None):
            raise NotImplementedError("no soft cap, no segment ids")

        def f(arrays: Arrays) -> jax.Array:
            q, k, v, bias, mask = (arrays.get(n) for n in ("q", "k", "v", "bias", "mask"))
            return jax.nn.dot_product_attention(
                q, k, v, bias, mask, is_causal=case.is_causal, implementation=implementation
            )

        yield "", f

    return peer


def _tokamax_call(case: Case, implementation: Any) -> Callable[[Arrays], jax.Array]:
    import tokamax

    if case.segment and case.mask is None:
        raise NotImplementedError("no segment ids")

    def f(arrays: Arrays) -> jax.Array:
        return tokamax.dot_product_attention(
            **{{"q": "query", "k": "key", "v": "value"}.get(n, n): x for n, x in arrays.items()},
            is_causal=case.is_causal,
            logits_soft_cap=case.soft_cap,
            implementation=implementation,
        )

    return f


def tokamax_named(implementation: str) -> Callable[[Case], Candidates]:
    def peer(case: Case) -> Candidates:
        yield "", _tokamax_call(case, implementation)

    return peer


# (block_q, block_k) forward, (m1, n1, m2, n2) backward, stages, warps; n1 % m1 == 0 and m2 % n2 == 0.
TOKAMAX_TILES = [
    ((128, 64), (64, 64, 64, 64), 2, 4),
    ((128, 64), (32, 128, 128, 32), 2, 4),
    ((128, 64), (32, 64, 64, 32), 3, 4),
    ((128, 64), (64, 128, 128, 64), 2, 8),
    ((128, 64), (64, 128, 128, 64), 3, 8),
    ((64, 64), (32, 64, 64, 32), 2, 8),
]


def tokamax_triton(case: Case) -> Candidates:
    from tokamax._src.ops.attention import pallas_triton, pallas_triton_vjp

    for (block_q, block_k), (m1, n1, m2, n2), stages, warps in TOKAMAX_TILES:
        backward = pallas_triton_vjp.Config(
            block_m1=m1, block_n1=n1, block_m2=m2, block_n2=n2, num_stages=stages, num_warps=warps
        )
        forward = pallas_triton.Config(block_q=block_q, block_k=block_k, num_stages=stages, num_warps=warps)
        op = pallas_triton.PallasTritonFlashAttention(
            config=forward, vjp=pallas_triton_vjp.PallasTritonFlashAttentionVjp(config=backward)
        )
        yield f"{m1},{n1},{m2},{n2},{stages},{warps}", _tokamax_call(case, [op])


PEERS: dict[str, Callable[[Case], Candidates]] = {
    "this package": this_package,
    "tokamax triton": tokamax_triton,
    "tokamax mosaic": tokamax_named("mosaic"),
    "tokamax xla": tokamax_named("xla_chunked"),
    "jax cudnn": jax_nn("cudnn"),
    "jax xla": jax_nn("xla"),
}


@dataclasses.dataclass
class Result:
    case: str
    peer: str
    label: str
    forward_ms: float = float("nan")
    backward_ms: float = float("nan")
    peak_mb: float = float("nan")
    note: str = ""


def milliseconds(run: Callable[[], Any], repeats: int) -> float:
    """Median over batches of five launches, each batch timed to completion: the host's share is hidden."""
    batch = 5
    jax.block_until_ready(run())
    times = []
    for _ in range(-(-repeats // batch)):
        start = time.perf_counter()
        for _ in range(batch):
            results = run()
        jax.block_until_ready(results)
        times.append((time.perf_counter() - start) / batch)
    return statistics.median(times) * 1e3


def measure(f: Callable[[Arrays], jax.Array], arrays: Arrays, repeats: int) -> tuple[float, float, float, Arrays]:
    """(forward ms, backward ms, MB of both, gradients)."""
    floats = {n: x for n, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    masks = {n: x for n, x in arrays.items() if n not in floats}
    forward = jax.jit(lambda floats, masks: f({**floats, **masks}))
    dout = jax.random.normal(jax.random.key(7), forward(floats, masks).shape, floats["q"].dtype)
    _, pullback = jax.jit(lambda floats, masks: jax.vjp(lambda x: f({**x, **masks}), floats))(floats, masks)
    backward = jax.jit(lambda pullback, dout: pullback(dout)[0])
    both = jax.jit(lambda x, m, dout: jax.vjp(lambda y: f({**y, **m}), x)[1](dout)).lower(floats, masks, dout)
    memory = both.compile().memory_analysis()
    peak = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    forward_ms = milliseconds(lambda: forward(floats, masks), repeats)
    return forward_ms, milliseconds(lambda: backward(pullback, dout), repeats), peak / 2**20, backward(pullback, dout)


def worst_error(grads: Arrays, reference: Arrays) -> float:
    """The largest relative error, in norm, of any gradient."""
    errors = []
    for name, want in reference.items():
        difference = grads[name].astype(jnp.float32) - want.astype(jnp.float32)
        errors.append(float(jnp.linalg.norm(difference.ravel()) / jnp.linalg.norm(want.astype(jnp.float32).ravel())))
    return max(errors)


def run_case(name: str, case: Case, peers: list[str], repeats: int) -> list[Result]:
    arrays = case.arrays()
    results: list[Result] = []
    reference: Arrays | None = None
    for peer in peers:
        best = Result(case=name, peer=peer, label="")
        try:
            for label, f in PEERS[peer](case):
                try:
                    forward_ms, backward_ms, peak, grads = measure(f, arrays, repeats)
                except Exception as e:
                    best.note = best.note or f"{type(e).__name__}: {str(e).splitlines()[0][:80] if str(e) else ''}"
                    continue
                reference = reference or grads
                error = worst_error(grads, reference)
                if not error < 0.03:
                    best.note = f"gradients differ by {error:.2g} with {label}"
                elif not backward_ms > best.backward_ms:  # also where nothing was measured yet
                    note = f"differs by {error:.1e}"
                    best = Result(name, peer, label, forward_ms, backward_ms, peak, note)
                del grads
        except Exception as e:  # not installed, or the case is not expressible: part of the result
            best.note = f"{type(e).__name__}: {str(e)[:80]}"
        results.append(best)
        print(
            f"{name:16} {peer:15} fwd {best.forward_ms:8.3f}  bwd {best.backward_ms:8.3f} ms  {best.peak_mb:8.0f} MB"
            f"  {best.label} {best.note}",
            flush=True,
        )
    return results


def plot(results: list[Result], file: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = list(dict.fromkeys(r.case for r in results))
    peers = list(dict.fromkeys(r.peer for r in results))
    figure, axes = plt.subplots(figsize=(1.6 * len(cases) + 3, 4))
    for n, peer in enumerate(peers):
        times = {r.case: r.backward_ms for r in results if r.peer == peer}
        axes.bar([i + n / (len(peers) + 1) for i in range(len(cases))], [times[c] for c in cases],
                 1 / (len(peers) + 1), label=peer)  # fmt: skip
    axes.set_xticks([i + 0.4 for i in range(len(cases))], cases, rotation=20)
    axes.set_ylabel("backward, ms")
    axes.set_yscale("log")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=[n for n in CASES if n != "small"])
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("benchmark_results"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}")
    results: list[Result] = []
    for name in args.cases:
        results += run_case(name, CASES[name], args.peers, args.repeats)
        with open(args.output / "pallas_triton.csv", "w", newline="") as f:
            writer = csv.writer(f)
            writer.writerow([field.name for field in dataclasses.fields(Result)])
            writer.writerows(dataclasses.astuple(r) for r in results)
    try:
        plot(results, args.output / "pallas_triton.png")
    except ImportError as e:
        print(f"no plot: {e}", file=sys.stderr)


if __name__ == "__main__":
    main()
