"""DSA forward + backward on the CPU beside what a user would write in plain PyTorch.

    python benchmark/dsa_cpu.py [--rounds 7] [--csv FILE] [--heads 64 --head-dim 576 --topk 512 --s-q 128 --s-kv 2048]

The plain form gathers the selected rows (S_q, K, D), scores them with einsum, takes a float32 softmax with the sink in
the denominator, sums with einsum and leaves the backward to autograd. It runs in bfloat16 and in float32, gathering by
indexing and by index_select, which differ in their backward; every comparison is with the faster one of its dtype.

Times are medians over rounds, in each of which every contender runs once. Memory is the peak of resident memory during
one forward + backward over what is resident when the inputs exist, each contender in a process of its own, gradients
included. The last column relates the operator's multiplications to a float32 matmul timed in the same rounds.
"""

from __future__ import annotations

import argparse
import csv
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch

import cudnn_dsa


@dataclass(frozen=True)
class Shape:
    """Sizes of the problem; D_v is 512 for D of 512 or 576."""

    s_q: int = 128
    s_kv: int = 2048
    heads: int = 64
    head_dim: int = 576
    topk: int = 512

    @property
    def head_dim_v(self) -> int:
        return 512 if self.head_dim in (512, 576) else self.head_dim

    @property
    def flops(self) -> int:
        """Forward: q.k and p@v; backward: both again (q.k, dout.v), dq, and dkv of k and of v."""
        return 2 * self.s_q * self.heads * self.topk * (4 * self.head_dim + 3 * self.head_dim_v)


@dataclass
class Inputs:
    q: torch.Tensor
    kv: torch.Tensor
    topk_idxs: torch.Tensor
    attn_sink: torch.Tensor
    dout: torch.Tensor

    @classmethod
    def make(cls, shape: Shape, dtype: torch.dtype) -> Inputs:
        g = torch.Generator().manual_seed(0)
        picked = [torch.randperm(shape.s_kv, generator=g)[: shape.topk] for _ in range(shape.s_q)]
        return cls(
            q=torch.randn(shape.s_q, shape.heads, shape.head_dim, generator=g).to(dtype).requires_grad_(),
            kv=torch.randn(shape.s_kv, shape.head_dim, generator=g).to(dtype).requires_grad_(),
            topk_idxs=torch.stack(picked).int(),
            attn_sink=torch.randn(shape.heads, generator=g).requires_grad_(),
            dout=torch.randn(shape.s_q, shape.heads, shape.head_dim_v, generator=g).to(dtype),
        )

    def leaves(self) -> list[torch.Tensor]:
        return [self.q, self.kv, self.attn_sink]


def by_index(kv: torch.Tensor, topk_idxs: torch.Tensor) -> torch.Tensor:
    return kv[topk_idxs]


def by_index_select(kv: torch.Tensor, topk_idxs: torch.Tensor) -> torch.Tensor:
    return kv.index_select(0, topk_idxs.flatten()).unflatten(0, topk_idxs.shape)


def plain(x: Inputs, gather: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    k = gather(x.kv, x.topk_idxs)
    s = torch.einsum("ihd,ikd->ihk", x.q, k).float() * x.q.shape[-1] ** -0.5
    z = torch.logaddexp(torch.logsumexp(s, dim=-1), x.attn_sink)
    p = torch.exp(s - z[..., None]).to(x.q.dtype)
    return torch.einsum("ihk,ikd->ihd", p, k[..., : x.dout.shape[-1]])


def operator(x: Inputs) -> torch.Tensor:
    return cudnn_dsa.sparse_attention(x.q, x.kv, x.topk_idxs, attn_sink=x.attn_sink, backend="cpu")


@dataclass(frozen=True)
class Contender:
    name: str
    dtype: torch.dtype
    forward: Callable[[Inputs], torch.Tensor]

    def step(self, x: Inputs) -> None:
        """One forward + backward; the gradients live until the next."""
        for leaf in x.leaves():
            leaf.grad = None
        self.forward(x).backward(x.dout)


CONTENDERS = [
    Contender("cudnn_dsa bf16", torch.bfloat16, operator),
    Contender("plain bf16, index", torch.bfloat16, lambda x: plain(x, by_index)),
    Contender("plain bf16, index_select", torch.bfloat16, lambda x: plain(x, by_index_select)),
    Contender("plain fp32, index", torch.float32, lambda x: plain(x, by_index)),
    Contender("plain fp32, index_select", torch.float32, lambda x: plain(x, by_index_select)),
]


def resident_peak() -> int:
    """Peak of resident memory of this process, in bytes, since the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_memory(contender: Contender, shape: Shape) -> int:
    """Peak over what is resident when the inputs exist. A tiny step first loads libraries and starts threads."""
    contender.step(Inputs.make(Shape(2, 8, 2, 64, 4), contender.dtype))
    inputs = Inputs.make(shape, contender.dtype)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = resident_peak()
    contender.step(inputs)
    return resident_peak() - before


def measure_times(shape: Shape, rounds: int) -> tuple[list[list[float]], list[float]]:
    """Seconds of every contender by round, and of a float32 matmul of 2 * 1024**3 operations."""
    inputs = {dtype: Inputs.make(shape, dtype) for dtype in {c.dtype for c in CONTENDERS}}
    square = torch.randn(1024, 1024)
    times: list[list[float]] = [[] for _ in CONTENDERS]
    matmul: list[float] = []
    for number in range(rounds + 1):  # the first is a warm-up
        for i, contender in enumerate(CONTENDERS):
            start = time.perf_counter()
            contender.step(inputs[contender.dtype])
            if number:
                times[i].append(time.perf_counter() - start)
        for _ in range(3):
            start = time.perf_counter()
            square @ square
            if number:
                matmul.append(time.perf_counter() - start)
    return times, matmul


def memory_in_process(name: str, arguments: list[str]) -> int:
    command = [sys.executable, __file__, "--memory-of", name, *arguments]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def parse(arguments: list[str]) -> tuple[argparse.Namespace, Shape]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--memory-of", choices=[c.name for c in CONTENDERS], help=argparse.SUPPRESS)
    for field in fields(Shape):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    options = parser.parse_args(arguments)
    return options, Shape(*(getattr(options, field.name) for field in fields(Shape)))


def main(arguments: list[str]) -> None:
    options, shape = parse(arguments)
    if options.memory_of:
        print(measure_memory(next(c for c in CONTENDERS if c.name == options.memory_of), shape))
        return
    print(f"{shape}, {torch.get_num_threads()} threads, medians of {options.rounds} rounds")
    sizes = [f"--{field.name.replace('_', '-')}={getattr(shape, field.name)}" for field in fields(Shape)]
    memory = [memory_in_process(c.name, sizes) for c in CONTENDERS]
    times, matmul = measure_times(shape, options.rounds)
    medians = [statistics.median(t) for t in times]
    rate = 2 * 1024**3 / statistics.median(matmul)
    rows = [("contender", "ms", "fastest ms", "time ratio", "peak MB", "memory ratio")]
    for contender, median, all_times, peak in zip(CONTENDERS, medians, times, memory, strict=True):
        ratios = (f"{median / medians[0]:.2f}", f"{peak / memory[0]:.1f}")
        rows.append(
            (
                contender.name,
                f"{median * 1e3:.0f}",
                f"{min(all_times) * 1e3:.0f}",
                ratios[0],
                f"{peak / 1e6:.0f}",
                ratios[1],
            )
        )
    for row in rows:
        print(f"{row[0]:<26}" + "".join(f"{cell:>14}" for cell in row[1:]))
    print(
        f"{rows[1][0]}: {shape.flops / medians[0] * 1e-9:.0f} GFLOP/s, "
        f"{shape.flops / medians[0] / rate:.2f} of a float32 matmul's {rate * 1e-9:.0f}"
    )
    if options.csv:
        with options.csv.open("w", newline="") as file:
            csv.writer(file).writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
