"""One call on a machine with a GPU: the suite, the fuzz, the sanitizer, the table beside cuDNN, and host time.

    PYTHONPATH=.:python python benchmark/gpu_day.py [--backend triton] [--stage suite fuzz ...] [--minutes 9]

Every stage is a process of its own with a time limit; what does not fit into the minutes that are left is said not to
have run. A stage prints the end of its output only if it fails; the last table has a line a stage. The exit code is the
number of stages that failed or were cut short.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-o", "timeout=0"]
# A backward and a forward at sizes that the sanitizer, some hundred times slower, gets through.
SMALL_CALLS = """
import sys, torch
sys.path[:0] = ["test/dsa"]
from dsa_cases import Sizes, assert_gradients, make
from cudnn_dsa import interface
for name in ("sink", "scattered_invalid", "duplicates", "empty_rows"):
    for dtype, head_dim in ((torch.bfloat16, 576), (torch.float16, 512)):
        case = make(name, dtype, Sizes(s_q=3, s_kv=70, heads=24, head_dim=head_dim, topk=40)).to("cuda")
        for deterministic in (False, True):
            got = interface.sparse_attention_backward(
                case.q, case.kv, case.out, case.dout, case.lse, case.attn_sink, case.topk_idxs, case.softmax_scale,
                case.topk_length, backend=BACKEND, deterministic=deterministic,
            )
            assert_gradients(name, case, got)
        interface.sparse_attention_forward(
            case.q, case.kv, case.topk_idxs, case.attn_sink, case.topk_length, case.softmax_scale, backend=BACKEND
        )
torch.cuda.synchronize()
"""
HOST_TIME = """
import statistics, sys, time, torch
sys.path[:0] = ["test/dsa"]
from dsa_cases import Sizes, make
from cudnn_dsa import SparseAttentionBackward
case = make("sink", torch.bfloat16, Sizes(s_q=16, s_kv=80, heads=8, head_dim=576, topk=64)).to("cuda")
call = {n: getattr(case, n) for n in ("q", "kv", "out", "dout", "lse", "attn_sink", "topk_idxs")}
plan = SparseAttentionBackward(**{"sample_" + n: x for n, x in call.items()}, backend=BACKEND)
plan.compile()
call |= {"dq": torch.empty_like(case.q), "dkv": torch.empty_like(case.kv), "d_sink": torch.empty_like(case.attn_sink)}
call["workspace"] = torch.empty(plan.scratch_workspace_bytes(), dtype=torch.uint8, device="cuda")
times = []
for _ in range(300):
    torch.cuda.synchronize()
    start = time.perf_counter()
    plan.execute(**call)
    times.append((time.perf_counter() - start) * 1e6)
print(f"host time of execute(): median {statistics.median(times[50:]):.0f} us, least {min(times):.0f} us")
"""


@dataclass(frozen=True)
class Stage:
    """A command, the seconds it may take, and what it needs that may not be there."""

    command: list[str]
    seconds: int
    missing: str | None = None
    show: int = 4  # lines of the end of its output that are printed where it passes


def stages(backend: str, tools: Path) -> dict[str, Stage]:
    """By name, in the order they run."""
    small = tools / "small_calls.py"
    small.write_text(f"BACKEND = {backend!r}\n{SMALL_CALLS}")
    host = tools / "host_time.py"
    host.write_text(f"BACKEND = {backend!r}\n{HOST_TIME}")
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    no_sanitizer = None if Path(sanitizer).exists() else "compute-sanitizer is not installed"
    no_cudnn = None if importlib.util.find_spec("cudnn") else "the cuDNN frontend is not installed"
    checked = [sanitizer, "--error-exitcode", "9", "--print-limit", "5"]
    wide = ["--s-q", "4096", "--s-kv", "8192", "--heads", "64", "--topk", "2048", "--rounds", "10"]
    return {
        "small": Stage([sys.executable, str(small)], 40),
        "suite": Stage([*PYTEST, "-m", "gpu and not slow", "test/dsa"], 150),
        "fuzz": Stage([*PYTEST, "-m", "gpu and slow", "test/dsa/test_fuzz.py"], 130),
        "memcheck": Stage([*checked, "--tool", "memcheck", sys.executable, str(small)], 60, no_sanitizer),
        "racecheck": Stage([*checked, "--tool", "racecheck", sys.executable, str(small)], 60, no_sanitizer),
        "table": Stage([sys.executable, "benchmark/dsa_backward.py", *wide], 45, no_cudnn, 20),
        "forward table": Stage([sys.executable, "benchmark/dsa_forward.py", *wide], 30, None, 20),
        "host time": Stage([sys.executable, str(host)], 25, None, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--stage", nargs="+", help="only these")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all stages together")
    parser.add_argument("--list", action="store_true", help="print the commands and stop")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    paths = [str(ROOT), str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "CI": "1"}
    env["CUDNN_DSA_TEST_BACKENDS"] = args.backend
    rows = []
    with tempfile.TemporaryDirectory() as tools:
        every = stages(args.backend, Path(tools))
        unknown = set(args.stage or ()) - set(every)
        if unknown:
            parser.error(f"no stage {', '.join(sorted(unknown))}: there are {', '.join(every)}")
        for name in args.stage or every:
            stage = every[name]
            if args.list:
                print(f"{name}: {' '.join(stage.command)}" + (f"  ({stage.missing})" if stage.missing else ""))
                continue
            rows.append((name, *run(name, stage, deadline, env)))
    for name, state, seconds in rows:
        print(f"{name:15} {seconds:6.0f} s  {state}")
    return sum(state != "passed" and not state.startswith("skipped") for _, state, _ in rows)


def run(name: str, stage: Stage, deadline: float, env: dict[str, str]) -> tuple[str, float]:
    """(passed, or what happened instead; seconds)."""
    limit = min(stage.seconds, deadline - time.monotonic())
    if stage.missing:
        return f"skipped: {stage.missing}", 0.0
    if limit < 10:
        return "did not run: no time left", 0.0
    start = time.monotonic()
    try:
        done = subprocess.run(
            stage.command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=limit, check=False,
        )  # fmt: skip
        output, state = done.stdout, "passed" if done.returncode == 0 else f"FAILED (exit code {done.returncode})"
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
        state = f"cut short after {limit:.0f} s"
    lines = output.splitlines()[-(stage.show if state == "passed" else 40) :]
    print(f"== {name}: {state}", *lines, sep="\n", flush=True)
    return state, time.monotonic() - start


if __name__ == "__main__":
    sys.exit(main())
