"""The self-test: a kernel that has not run on a kind of device yet is compared with the reference first.

A kernel that was only ever compiled for a device, or that another assembler changed, must not train anybody's model on
wrong gradients. So before a kernel's first use on a device kind a tiny problem of the same kernel key runs on it and,
in float64 on the CPU, through the reference backend. The verdict is kept in the cache, by device kind and the kernel's
fingerprint; a failure refuses the problem with a report (and is tested again in the next process).
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from cudnn_dsa.artifact import driver
from cudnn_dsa.artifact.cache import CACHE
from cudnn_dsa.artifact.key import digest
from cudnn_dsa.backends import Backend, BackwardTensors, ForwardTensors, reference
from cudnn_dsa.contracts.errors import UnsupportedError
from cudnn_dsa.contracts.sparse_attention import Problem

logger = logging.getLogger(__name__)

FORMAT = 2  # of a verdict
S_Q, S_KV = 3, 67
SELECTED = 100  # entries of a row that hold keys at its start; a few more stand at its end
AT_END = 12
# Relative L2 error of an output: a few times what the contract allows, far below what any wrong tile makes.
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3}
STATISTIC_TOLERANCE = 1e-3  # of lse and d_sink, which are fp32
SMALL = 1e-3  # root mean square of an output that is too small for a relative error; others are 0.05 and up
MAX_REMEMBERED = 1024

_lock = threading.RLock()
_passed: set[tuple] = set()


def ensure(backend: Backend, problem: Problem) -> bool:
    """Return once the problem's kernels are known to be right on its device: whether that stays so.

    The first call for a kernel and a device kind runs the test, which synchronises; later processes read its verdict,
    later calls look it up in a set. While a graph is captured nothing can be tested, and nothing is.

    Raises:
        UnsupportedError: they are not right; its message says what differed.
    """
    if problem.topk == 0:  # nothing is launched
        return True
    # Triton's tiles depend on K, though not on more of it than this.
    entry = (backend, problem.device, problem.kernel_key(""), (problem.topk - 1).bit_length())
    silicon = driver.installed() is None  # what stands in for it may change from call to call
    if _capturing(problem.device):
        return False
    if entry in _passed and silicon:
        return True
    with _lock:
        if entry not in _passed or not silicon:
            _verify(backend, problem)
            if silicon:
                if len(_passed) >= MAX_REMEMBERED:
                    _passed.clear()
                _passed.add(entry)
    return silicon


def verdicts() -> list[dict[str, Any]]:
    """What the cache remembers: ``backend``, ``kind`` of device, ``kernel`` (its key), ``passed``, ``report``."""
    found = [value["self_test"] for value in CACHE.values() if isinstance(value, dict) and "self_test" in value]
    return sorted(found, key=lambda verdict: (verdict["backend"], verdict["kind"], verdict["kernel"]))


def _verify(backend: Backend, problem: Problem) -> None:
    fingerprint = backend.fingerprint(problem)
    if fingerprint is None:
        return
    device = driver.current(problem.device)
    kind = device.kind
    name = digest({"self_test": FORMAT, "kind": kind, "fingerprint": fingerprint})
    known = CACHE.get_value(name)
    if isinstance(known, dict) and known.get("self_test", {}).get("passed") is True:
        return
    start = time.perf_counter()
    errors = compare(backend, problem, _repeats(device.multiprocessors))
    failed = {name: error for name, error in errors.items() if not error <= _tolerance(name, problem)}
    report = ", ".join(f"{output} {error:.1e}" for output, error in errors.items())
    short = backend.__name__.rpartition(".")[2]  # type: ignore[attr-defined]
    verdict = {
        "backend": short, "kind": kind, "kernel": repr(problem.kernel_key(kind)), "passed": not failed,
        "report": report,
    }  # fmt: skip
    CACHE.put_value(name, {"self_test": verdict})
    logger.info("self-test of %s on %s: %s (%.2f s)", short, kind, report, time.perf_counter() - start)
    if failed:
        allowed = ", ".join(f"{name} {_tolerance(name, problem):.0e}" for name in failed)
        hint = f"relative errors: {report}; allowed: {allowed}. Please report it"
        raise UnsupportedError("backend", f"kernels that compute what the reference does on {kind}", short, hint)


def _repeats(multiprocessors: int) -> int:
    """How often the queries come, such that every CTA of a persistent kernel has two of them at least and some three:
    barriers that change phase, and tiles that are used again, are wrong from the second on."""
    return -(-(2 * multiprocessors + 1) // S_Q)


def compare(backend: Backend, problem: Problem, repeats: int = 1) -> dict[str, float]:
    """Relative L2 error of each output of a tiny problem with the kernel key of ``problem``; inf if not finite.

    ``repeats``: how often its queries come, one set after the other; the reference computes them once.
    """
    sample = _Sample(_tiny(problem), repeats)
    with sample.scope():
        written = sample.run(backend)
    expected = sample.expected()
    return {name: _error(written[name].cpu().double(), expected[name]) for name in expected}


def _tolerance(output: str, problem: Problem) -> float:
    return STATISTIC_TOLERANCE if output in ("lse", "d_sink") else TOLERANCE[problem.dtype]


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    finite = torch.isfinite(expected)
    if not torch.equal(torch.isfinite(got), finite) or not torch.equal(got[~finite], expected[~finite]):
        return math.inf
    got, expected = got[finite], expected[finite]
    # Of one key a row, dq is exactly 0 in theory and rounding noise in practice: such an output is compared absolutely.
    size = max(float(expected.norm()), SMALL * math.sqrt(expected.numel()))
    return float((got - expected).norm()) / size if size else 0.0


class _Wide(Problem):
    """A small problem that takes the kernels of a large one."""

    wide_address = True


def _tiny(problem: Problem) -> Problem:
    tiny = replace(problem, s_q=S_Q, s_kv=S_KV)
    return _Wide(**vars(tiny)) if problem.wide_address else tiny


def _capturing(device: str) -> bool:
    return device.startswith("cuda") and torch.cuda.is_current_stream_capturing()


@dataclass
class _Sample:
    """Random tensors of a tiny problem, and the same problem in float64.

    The three queries have an empty row, a full one and, if there are lengths, a cut one. Keys stand at the start and
    the end of a row, some of them invalid, some twice. Outputs and workspace start as NaN: what is not written is
    found.
    """

    problem: Problem
    repeats: int = 1

    def scope(self) -> Any:
        device = torch.device(self.problem.device)
        return torch.cuda.device(device) if device.type == "cuda" else torch.no_grad()

    def run(self, backend: Backend) -> dict[str, torch.Tensor]:
        device = torch.device(self.problem.device)
        p = replace(self.problem, s_q=S_Q * self.repeats)
        tensors = {name: None if x is None else self._repeated(name, x.to(device)) for name, x in self._inputs.items()}
        outputs = self._outputs(p.dtype, p.out_dtype, p.dkv_dtype)
        outputs = {name: self._repeated(name, x.to(device)) for name, x in outputs.items()}
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        memory = torch.full((backend.workspace_bytes(p),), 255, dtype=torch.uint8, device=device)
        self._call(backend, p, tensors, outputs, memory, stream)
        return outputs

    def expected(self) -> dict[str, torch.Tensor]:
        """The reference on the CPU in float64, from the tensors as the kernel was given them."""
        wide = {name: x.double() if x is not None and x.is_floating_point() else x for name, x in self._inputs.items()}
        # Entries that hold no key in any row are left out: a long row would take longer than the kernel's compilation.
        idxs, length = self._inputs["topk_idxs"], self._inputs["topk_length"]
        assert idxs is not None
        wide["topk_idxs"] = idxs[:, self._places]
        if length is not None:
            wide["topk_length"] = (self._places < length[:, None]).sum(1).int()
        p = replace(self.problem, device="cpu", topk=len(self._places), dtype="float64")
        outputs = self._outputs("float64", "float64", "float64", "float64")
        self._call(reference, p, wide, outputs, None, None)
        # What is summed over queries, on top of what was there.
        before = {"dkv": float(p.accumulate), "d_sink": 0.0}
        return {
            name: before[name] + self.repeats * (x - before[name]) if name in before else self._repeated(name, x)
            for name, x in outputs.items()
        }

    def _repeated(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """``x`` for each set of queries, if it has a row a query."""
        return x if name in ("kv", "attn_sink", "dkv", "d_sink") else x.repeat(self.repeats, *[1] * (x.dim() - 1))

    def _call(self, backend: Any, p: Problem, tensors: Any, outputs: Any, memory: Any, stream: Any) -> None:
        if p.direction == "forward":
            names = ("q", "kv", "topk_idxs", "attn_sink", "topk_length")
            given = {name: tensors[name] for name in names}
            backend.forward(p, ForwardTensors(**given, softmax_scale=self._scale, **outputs), memory, stream)
        else:
            outputs = {"d_sink": None, **outputs}
            backend.backward(p, BackwardTensors(**tensors, softmax_scale=self._scale, **outputs), memory, stream)

    @property
    def _scale(self) -> float:
        return float(self.problem.head_dim**-0.5)

    @functools.cached_property
    def _places(self) -> torch.Tensor:
        """The entries of a row that may hold a key."""
        topk = int(self.problem.topk)
        return torch.tensor([i for i in range(topk) if i < SELECTED or i >= topk - AT_END], device="cpu")

    @functools.cached_property
    def _inputs(self) -> dict[str, torch.Tensor | None]:
        p = self.problem
        # Of the caller's, the random state is left alone, and a default device or dtype changes nothing.
        generator = torch.Generator("cpu").manual_seed(0)

        def normal(*shape: int, dtype: str = p.dtype) -> torch.Tensor:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
            return drawn.to(getattr(torch, dtype))

        idxs = torch.full((p.s_q, p.topk), -1, dtype=torch.int32, device="cpu")
        # -2 to S_KV + 1: valid rows, invalid ones on both sides, and more entries than rows, so that some come twice.
        entries = p.s_q, len(self._places)
        drawn = torch.randint(-2, S_KV + 2, entries, generator=generator, dtype=torch.int32, device="cpu")
        idxs[:, self._places] = drawn
        idxs[0] = -1
        lengths = [p.topk, p.topk, (p.topk + 1) // 2]
        length = torch.tensor(lengths, dtype=torch.int32, device="cpu") if p.has_topk_length else None
        tensors: dict[str, torch.Tensor | None] = {
            "q": normal(p.s_q, p.heads, p.head_dim), "kv": normal(p.s_kv, p.head_dim), "topk_idxs": idxs,
            "attn_sink": normal(p.heads, dtype="float32") if p.has_sink else None, "topk_length": length,
        }  # fmt: skip
        if p.direction == "backward":
            out, lse = self._forward(tensors)
            dout = normal(p.s_q, p.heads, p.head_dim_v)
            delta = (out.float() * dout.float()).sum(-1) if p.has_delta else None
            tensors |= {"out": out, "lse": lse, "dout": dout, "delta": delta}
        return tensors

    def _forward(self, tensors: Any) -> tuple[torch.Tensor, torch.Tensor]:
        p = replace(self.problem, direction="forward", device="cpu")
        out = torch.empty(p.s_q, p.heads, p.head_dim_v, dtype=getattr(torch, p.out_dtype), device="cpu")
        lse = torch.empty(p.s_q, p.heads, dtype=torch.float32, device="cpu")
        reference.forward(p, ForwardTensors(**tensors, softmax_scale=self._scale, out=out, lse=lse), None, None)
        return out, lse

    def _outputs(self, element: str, out: str, dkv: str, stat: str = "float32") -> dict[str, torch.Tensor]:
        p = self.problem

        def unwritten(*shape: int, dtype: str) -> torch.Tensor:
            return torch.full(shape, math.nan, dtype=getattr(torch, dtype), device="cpu")

        if p.direction == "forward":
            lse = unwritten(p.s_q, p.heads, dtype=stat)
            return {"out": unwritten(p.s_q, p.heads, p.head_dim_v, dtype=out), "lse": lse}
        outputs = {"dq": unwritten(p.s_q, p.heads, p.head_dim, dtype=element)}
        shape = p.s_kv, p.head_dim
        outputs["dkv"] = unwritten(*shape, dtype=dkv)
        if p.accumulate:
            outputs["dkv"].fill_(1)
        return outputs | ({"d_sink": unwritten(p.heads, dtype=stat)} if p.has_sink else {})
