"""What the benchmark times, at which sizes, and how."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from cudnn_dsa import interface
from cudnn_dsa.cli import console
from cudnn_dsa.cli.bench.memory import free_bytes, peak_bytes
from cudnn_dsa.cli.bench.plain import plain_bytes, plain_sparse_attention
from cudnn_dsa.cli.shapes import FULL_S_KV, FULL_S_Q, ModelShape, backward_flops, forward_flops

PLAIN = "plain PyTorch"
DIRECTIONS = ("forward", "backward")
# Largest relative L2 error of an output or gradient against float64 on the checked queries, from the tensors as given;
# half precision includes the rounding of out, from which the backward computes delta.
ERROR_BOUNDS = {"bfloat16": 5e-3, "float16": 1e-3, "float32": 1e-5, "float64": 1e-12}
CHECKED_QUERIES = 4
MEMORY_SHARE = 0.5  # of the free memory, the most that the plain formulation may be expected to take


@dataclass(frozen=True)
class Plan:
    """What to measure. ``s_q`` and ``s_kv`` of None are chosen to fit; ``budget`` is in seconds, for everything."""

    shapes: list[ModelShape]
    backends: list[str]
    device: str
    dtype: str
    s_q: int | None
    s_kv: int | None
    rounds: int
    budget: float
    seed: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class Case:
    """A model shape at the sizes that are timed, and why they are not the full ones (empty where they are)."""

    shape: ModelShape
    s_q: int
    s_kv: int
    scaled: str = ""

    @property
    def head_dim_v(self) -> int:
        return 512 if self.shape.head_dim in (512, 576) else self.shape.head_dim

    def flops(self, direction: str) -> int:
        count = forward_flops if direction == "forward" else backward_flops
        return count(self.s_q, self.shape.heads, self.shape.topk, self.shape.head_dim, self.head_dim_v)


@dataclass
class Result:
    """One side (a backend or the plain formulation) of one case.

    Attributes:
        times: direction -> milliseconds of each round.
        peak: bytes in use at the worst moment of one forward and backward beyond the inputs; None if not measurable.
        error: largest relative L2 error of an output or gradient on the checked queries, against float64.
        wrong: whether a backend's error is beyond its bound.
    """

    case: Case
    side: str
    times: dict[str, list[float]] = field(default_factory=lambda: {direction: [] for direction in DIRECTIONS})
    peak: int | None = None
    error: float = 0.0
    wrong: bool = False

    def milliseconds(self, direction: str) -> float:
        return median(self.times[direction])

    def gflops(self, direction: str) -> float:
        """GFLOP/s by the operator's count of FLOPs: what a side computes beyond it does not count."""
        return self.case.flops(direction) / self.milliseconds(direction) / 1e6


@dataclass(frozen=True)
class Inputs:
    """q (S_q, H, D), kv (S_kv, D), topk_idxs (S_q, K) int32, attn_sink (H,) fp32, dout (S_q, H, D_v)."""

    q: torch.Tensor
    kv: torch.Tensor
    topk_idxs: torch.Tensor
    attn_sink: torch.Tensor
    dout: torch.Tensor


class Side:
    """What is timed: ``forward()``, then ``backward()``, then ``results()`` (out, dq, dkv, d_sink by name)."""

    def __init__(self, inputs: Inputs):
        self.inputs = inputs

    def forward(self) -> None:
        raise NotImplementedError

    def backward(self) -> None:
        raise NotImplementedError

    def results(self) -> dict[str, torch.Tensor]:
        raise NotImplementedError


class PlainSide(Side):
    def forward(self) -> None:
        i = self.inputs
        self.leaves = [x.detach().requires_grad_() for x in (i.q, i.kv, i.attn_sink)]
        q, kv, attn_sink = self.leaves
        self.out = plain_sparse_attention(q, kv, i.topk_idxs, attn_sink, i.dout.shape[-1])

    def backward(self) -> None:
        self.gradients = torch.autograd.grad(self.out, self.leaves, self.inputs.dout)

    def results(self) -> dict[str, torch.Tensor]:
        return dict(zip(("out", "dq", "dkv", "d_sink"), (self.out, *self.gradients), strict=True))


class BackendSide(Side):
    def __init__(self, inputs: Inputs, backend: str):
        super().__init__(inputs)
        self.backend = backend

    def forward(self) -> None:
        i = self.inputs
        self.outputs = interface.sparse_attention_forward(i.q, i.kv, i.topk_idxs, i.attn_sink, backend=self.backend)

    def backward(self) -> None:
        i, (out, lse) = self.inputs, self.outputs
        self.gradients = interface.sparse_attention_backward(
            i.q, i.kv, out, i.dout, lse, i.attn_sink, i.topk_idxs, backend=self.backend
        )

    def results(self) -> dict[str, torch.Tensor]:
        dq, dkv, d_sink = self.gradients
        assert d_sink is not None
        return {"out": self.outputs.out, "dq": dq, "dkv": dkv, "d_sink": d_sink}


def measure(plan: Plan) -> list[Result]:
    """Measure every shape of a plan, with a progress bar."""
    sides = 1 + len(plan.backends)
    results: list[Result] = []
    with console.progress(len(plan.shapes) * sides * (plan.rounds + 1), "bench") as bar:
        for shape in plan.shapes:
            bar.set_postfix_str(f"{shape.name}: choosing a size")
            case = choose_case(plan, shape)
            results += measure_case(plan, case, bar)
    return results


def make_inputs(plan: Plan, case: Case) -> Inputs:
    """Random tensors, and for every query K different keys in no order."""
    generator = torch.Generator(plan.device).manual_seed(plan.seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=plan.device)

    shape, keys = case.shape, torch.empty(case.s_q, case.shape.topk, dtype=torch.int32, device=plan.device)
    for row in keys:
        row.copy_(torch.randperm(case.s_kv, generator=generator, device=plan.device)[: shape.topk])
    return Inputs(
        q=normal(case.s_q, shape.heads, shape.head_dim).to(plan.torch_dtype),
        kv=normal(case.s_kv, shape.head_dim).to(plan.torch_dtype),
        topk_idxs=keys,
        attn_sink=normal(shape.heads),
        dout=normal(case.s_q, shape.heads, case.head_dim_v).to(plan.torch_dtype),
    )


def make_sides(plan: Plan, inputs: Inputs) -> dict[str, Side]:
    """By name; the plain formulation first."""
    return {PLAIN: PlainSide(inputs), **{name: BackendSide(inputs, name) for name in plan.backends}}


def choose_case(plan: Plan, shape: ModelShape) -> Case:
    """The sizes to time a shape at: as asked, else the full ones, with S_q scaled down to fit time and memory.

    A query costs the same whatever S_q is, so fewer queries keep every ratio meaningful. S_kv shrinks with S_q, or
    zeroing and writing dkv would be most of the backward, but not below 2 * K, so that a selection is one. H and D are
    never scaled, and K only where so few keys are asked for. S_q doubles until one more doubling would overrun.
    """
    s_q, why = (plan.s_q, "") if plan.s_q else _fitting_queries(plan, shape)
    s_kv = plan.s_kv or _keys(shape, s_q)
    changes = []
    if s_q < FULL_S_Q:
        changes.append(f"S_q {FULL_S_Q} -> {s_q} ({why or 'as asked'})")
    if s_kv < FULL_S_KV:
        changes.append(f"S_kv {FULL_S_KV} -> {s_kv} ({'as asked' if plan.s_kv else 'with S_q, at least 2 K'})")
    if shape.topk > s_kv:
        changes.append(f"K {shape.topk} -> {s_kv} (no more keys)")
    return Case(shape._replace(topk=min(shape.topk, s_kv)), s_q, s_kv, ", ".join(changes))


def _fitting_queries(plan: Plan, shape: ModelShape) -> tuple[int, str]:
    """S_q, and why it is not the full one."""
    # Each round runs every side once; so do the measurement of memory and the warm-up before it, and finding out.
    limit = plan.budget / len(plan.shapes) / (plan.rounds + 4)
    memory = MEMORY_SHARE * free_bytes(plan.device)
    s_q = CHECKED_QUERIES
    while s_q < FULL_S_Q:
        s_kv = plan.s_kv or _keys(shape, s_q)
        case = Case(shape._replace(topk=min(shape.topk, s_kv)), s_q, s_kv)
        # Twice, the better counts: the first pass of a run compiles and starts threads, and other programs run too.
        elapsed = min(_one_pass(plan, case) for _ in range(2))
        if 2 * elapsed > limit:
            return s_q, f"time: one pass over all sides takes {elapsed:.2f} s"
        needed = plain_bytes(2 * s_q, shape.heads, case.shape.topk, shape.head_dim, plan.torch_dtype.itemsize)
        if needed > memory:
            return s_q, f"memory: for twice as many, plain PyTorch wants {console.size(needed)}"
        s_q *= 2
    return s_q, ""


def _keys(shape: ModelShape, s_q: int) -> int:
    return min(FULL_S_KV, max(2 * shape.topk, FULL_S_KV // FULL_S_Q * s_q))


def measure_case(plan: Plan, case: Case, bar: Any) -> list[Result]:
    """Check every side, then time them round-robin."""
    sides = make_sides(plan, make_inputs(plan, case))
    results = {name: Result(case, name) for name in sides}
    errors = check_sides(plan, case)
    for name, side in sides.items():
        bar.set_postfix_str(f"{case.shape.name}: memory of {name}")
        results[name].error = errors[name]
        results[name].wrong = name != PLAIN and not errors[name] <= ERROR_BOUNDS[plan.dtype]
        _both(side)  # what is allocated once and kept (thread pools, compiled kernels) is not the call's
        results[name].peak = peak_bytes(plan.device, lambda side=side: _both(side))  # type: ignore[misc]
        bar.update()
    for round_ in range(plan.rounds):
        for name, side in sides.items():
            bar.set_postfix_str(f"{case.shape.name}: round {round_ + 1} of {plan.rounds}, {name}")
            for direction in DIRECTIONS:
                results[name].times[direction].append(milliseconds(plan.device, getattr(side, direction)))
            bar.update()
    return list(results.values())


def check_sides(plan: Plan, case: Case) -> dict[str, float]:
    """By side, the largest relative L2 error of out, dq, dkv and d_sink on a few queries, against float64 autograd."""
    small = make_inputs(plan, Case(case.shape, min(case.s_q, CHECKED_QUERIES), case.s_kv))
    wide = Inputs(small.q.double(), small.kv.double(), small.topk_idxs, small.attn_sink.double(), small.dout.double())
    expected = _both(PlainSide(wide)).results()
    errors = {}
    for name, side in make_sides(plan, small).items():
        found = _both(side).results()
        errors[name] = max(relative_l2(found[key], expected[key]) for key in expected)
    return errors


def relative_l2(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected|, in float64."""
    expected = expected.double()
    return (torch.linalg.vector_norm(found.double() - expected) / torch.linalg.vector_norm(expected)).item()


def milliseconds(device: str, call: Callable[[], object]) -> float:
    """Time of a call: CUDA events on its stream on a GPU, the monotonic clock elsewhere."""
    if not device.startswith("cuda"):
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def _both(side: Side) -> Side:
    side.forward()
    side.backward()
    return side


def _one_pass(plan: Plan, case: Case) -> float:
    """Seconds that one forward and backward of every side take."""
    sides = make_sides(plan, make_inputs(plan, case)).values()
    return sum(milliseconds(plan.device, lambda side=side: _both(side)) for side in sides) / 1e3  # type: ignore[misc]
