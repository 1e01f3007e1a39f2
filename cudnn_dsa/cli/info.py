"""Which backends can run on this machine, and if not why and what to install; versions; the kernel cache."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import stat
from pathlib import Path
from typing import Any

import cudnn_dsa
from cudnn_dsa._version import __version__
from cudnn_dsa.artifact import aot, cache, library
from cudnn_dsa.cli import availability, console

# Distributions that decide what runs, as pip names them.
PACKAGES = ("torch", "numpy", "triton", "nvidia-cutlass-dsl", "nvidia-cudnn-frontend")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    facts = collect()
    print(json.dumps(facts, indent=2) if args.json else as_text(facts))
    return 0


def collect() -> dict[str, Any]:
    """Everything this command knows, as plain data."""
    import torch

    from cudnn_dsa import selftest

    directory = cache.directory()
    return {
        "backends": [
            {
                "name": s.backend, "device": s.device, "available": s.available, "reason": s.reason,
                "install": s.install, "runs_on": availability.REQUIREMENTS[s.backend].runs_on,
            }
            for s in availability.states()
        ],
        "versions": {
            "cudnn_dsa": __version__,
            "python": platform.python_version(),
            **{name: availability.version(name) for name in PACKAGES},
        },
        "cuda": {
            "toolkit_of_torch": torch.version.cuda,
            "driver": _cuda_driver(),
            "devices": [_cuda_device(name) for name in availability.cuda_devices()],
        },
        "cpu": {
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
            "extension": extension_file(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        },
        "self_tests": selftest.verdicts(),
        "kernels_built_ahead": [str(folder) for folder in library.directories() if aot.manifest(folder)],
        "kernel_cache": {
            "directory": str(directory), "exists": directory.is_dir(), "bytes": directory_bytes(directory),
        },
    }  # fmt: skip


def as_text(facts: dict[str, Any]) -> str:
    rows = []
    for backend in facts["backends"]:
        verdict = "yes" if backend["available"] else f"no: {backend['reason']}"
        rows.append([backend["name"], backend["device"], verdict, backend["runs_on"]])
    parts = [console.table(["backend", "device", "runs here", "what it is for"], rows)]
    installs = {backend["name"]: backend["install"] for backend in facts["backends"] if backend["install"]}
    parts += [f"to install for {name}: {command}" for name, command in installs.items()]

    kernel_cache, cuda, cpu = facts["kernel_cache"], facts["cuda"], facts["cpu"]
    pairs = [[name, text or "not installed"] for name, text in facts["versions"].items()]
    pairs.append(["CPU", f"{cpu['machine']}, {cpu['threads']} threads, vector instructions {cpu['capability']}"])
    pairs.append(["C++ extension", cpu["extension"] or "not built (`make setup`, or pip install --no-build-isolation)"])
    pairs.append(["CUDA of torch", cuda["toolkit_of_torch"] or "none (a CPU build)"])
    pairs.append(["CUDA driver", cuda["driver"] or "none"])
    for device in cuda["devices"]:
        text = f"{device['name']}, compute capability {device['capability']}, {console.size(device['memory_bytes'])}"
        pairs.append([device["device"], text])
    content = console.size(kernel_cache["bytes"]) if kernel_cache["exists"] else "empty"
    pairs.append(["kernel cache", f"{kernel_cache['directory']} ({content})"])
    pairs.append(["kernels built ahead", ", ".join(facts["kernels_built_ahead"]) or "none"])
    parts += ["", console.table(["what", "version or state"], pairs)]
    if facts["self_tests"]:
        parts += [
            "",
            console.table(["kernels of", "self-tested on", "passed", "failed"], _tallies(facts["self_tests"])),
        ]
        parts += [f"FAILED: {t['kernel']}: {t['report']}" for t in facts["self_tests"] if not t["passed"]]
    return "\n".join(parts)


def _tallies(verdicts: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each backend and kind of device, with the numbers of kernels that passed and that failed."""
    counts: dict[tuple[str, str], list[int]] = {}
    for verdict in verdicts:
        count = counts.setdefault((verdict["backend"], verdict["kind"]), [0, 0])
        count[0 if verdict["passed"] else 1] += 1
    return [[*where, *map(str, count)] for where, count in counts.items()]


def directory_bytes(directory: Path) -> int:
    """Size of the regular files below a directory; 0 where there is none. Links are not followed."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # another process may be replacing the entry
                status = (Path(folder) / name).lstat()
                total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def extension_file() -> str | None:
    """The compiled C++ extension of this installation, or None."""
    found = sorted(Path(cudnn_dsa.__file__).parent.glob("*.so"))
    return str(found[0]) if found else None


def _cuda_driver() -> str | None:
    """The driver's release where the NVIDIA kernel module shows it."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def _cuda_device(name: str) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(name)
    return {
        "device": name,
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
    }
