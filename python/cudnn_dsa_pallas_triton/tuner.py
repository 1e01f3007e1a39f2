"""Measure legal configurations on the device at hand and remember the fastest, per device kind.

    config = autotune(q, k, v, is_causal=True)      # measures once, then reads the cache
    out = attention(q, k, v, is_causal=True, config=config)

Every kernel is tuned on its own with the caller's arrays. The cache is one JSON file per device kind in
``$CUDNN_DSA_CACHE_DIR`` (default ``~/.cache/cudnn_dsa``); ``attention`` without a ``config`` reads it too.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import os
import pathlib
import re
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from cudnn_dsa_pallas_triton.backward import key_value_gradient, query_gradient, row_terms
from cudnn_dsa_pallas_triton.bias_gradient import bias_gradient
from cudnn_dsa_pallas_triton.config import KERNELS, Config, KernelConfig, candidates, default_config, fit
from cudnn_dsa_pallas_triton.contracts import Problem
from cudnn_dsa_pallas_triton.forward import forward
from cudnn_dsa_pallas_triton.tile import all_finite

Arrays = dict[str, jax.Array]


def run_kernel(
    name: str, problem: Problem, config: KernelConfig, operands: Arrays, interpret: bool
) -> jax.Array | tuple[jax.Array, ...]:
    """One kernel by its name in :class:`Config`. ``operands`` also hold dout and row terms for the backward."""
    operands = dict(operands)
    if name == "forward":
        for row_term in ("dout", "shift", "log2l", "lse2", "delta"):
            operands.pop(row_term, None)
        return forward(problem, config, operands, all_finite(problem, operands, "qkv"), interpret)
    operands.pop("attn_sink", None)
    finite = all_finite(problem, operands, ("q", "k", "v", "dout"))
    if name == "dq":
        return query_gradient(problem, config, operands, finite, interpret)
    if name == "dkv":
        return key_value_gradient(problem, config, operands, finite, interpret)
    return bias_gradient(problem, config, operands, interpret)


def tune(
    problem: Problem,
    floats: Arrays,
    masks: Arrays,
    *,
    interpret: bool = False,
    choose: Callable[[Problem, str], Iterable[KernelConfig]] = candidates,
    repeats: int = 10,
    report: Callable[[str, KernelConfig, float], None] = lambda *_: None,
) -> Config:
    """The fastest configuration of every kernel; ``floats`` and ``masks`` as in ``vjp.attention_core``.

    Args:
        choose: configurations to try for a kernel, by its name.
        repeats: timed runs of each; the median counts.
        report: called with (kernel, configuration, seconds).
    """
    operands = {**floats, **masks}
    default = default_config(problem)
    out, m, l = run_kernel("forward", problem, fit(default.forward, problem), operands, interpret)
    dout = jax.random.normal(jax.random.key(0), out.shape, out.dtype)
    operands |= {"dout": dout, **row_terms(problem, out, m, l, dout, jnp.zeros_like(l))}
    best = {}
    for name in KERNELS:
        if name == "dbias" and "bias" not in operands:
            best[name] = default.dbias
            continue
        configs = list(dict.fromkeys(fit(c, problem) for c in choose(problem, name)))
        best[name] = _fastest(name, problem, configs, operands, interpret, repeats, report)
    return Config(**best)


def _fastest(
    name: str,
    problem: Problem,
    configs: list[KernelConfig],
    operands: Arrays,
    interpret: bool,
    repeats: int,
    report: Callable[[str, KernelConfig, float], None],
) -> KernelConfig:
    def compile_one(config: KernelConfig) -> Any:
        run = jax.jit(lambda operands: run_kernel(name, problem, config, operands, interpret))
        try:
            return run.lower(operands).compile()
        except Exception:  # out of shared memory or registers: which exception says so differs by version
            return None

    # The compiler runs outside the interpreter lock.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = list(pool.map(compile_one, configs))
    times = {}
    for config, run in zip(configs, compiled, strict=True):
        if run is None:
            continue
        try:
            times[config] = _seconds(functools.partial(run, operands), repeats)
        except Exception:  # a kernel that the device refuses to launch
            continue
        report(name, config, times[config])
    if not times:
        raise RuntimeError(f"no configuration of the {name} kernel runs on this device")
    return min(times, key=lambda config: times[config])


def _seconds(run: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a run, each timed to completion after one that is not."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


# The cache


def device_kind() -> str:
    """The kind of the default device, as part of a file name."""
    return re.sub(r"[^A-Za-z0-9]+", "_", jax.devices()[0].device_kind)


def cache_file() -> pathlib.Path:
    root = os.environ.get("CUDNN_DSA_CACHE_DIR") or pathlib.Path.home() / ".cache" / "cudnn_dsa"
    return pathlib.Path(root) / f"pallas_triton_{device_kind()}.json"


def cache_key(problem: Problem) -> str:
    """What the best tiles depend on: every field of the problem."""
    fields = dataclasses.asdict(problem) | {"operands": sorted(problem.operands)}
    return json.dumps(fields, sort_keys=True)


def _entries(file: pathlib.Path) -> dict[str, Any]:
    try:
        entries = json.loads(file.read_text())
    except (OSError, ValueError):  # absent, or cut short
        return {}
    return entries if isinstance(entries, dict) else {}


@functools.cache
def _entries_at(file: pathlib.Path, _: int) -> dict[str, Any]:
    return _entries(file)


def cached_config(problem: Problem) -> Config | None:
    """The remembered configuration of ``problem`` on this kind of device, or None."""
    file = cache_file()
    try:
        stamp = file.stat().st_mtime_ns
    except OSError:
        return None
    entry = _entries_at(file, stamp).get(cache_key(problem))
    return None if entry is None else Config(**{name: KernelConfig(**entry[name]) for name in KERNELS})


def remember(problem: Problem, config: Config) -> None:
    """Write ``config`` to the cache. Readers see the old file or the new one, never a part."""
    file = cache_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    entries = _entries(file) | {cache_key(problem): dataclasses.asdict(config)}
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(entries, indent=1))
    part.replace(file)
