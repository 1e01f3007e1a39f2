"""The emulator against an H200: the same PTX, the same bytes, and a stated bound for each operation.

Two steps, because the machine with the GPU need not have the CuTe DSL or a compiler:

    python benchmark/emulator_vs_h200.py make FOLDER       # anywhere: records kernels, inputs, the emulator's results
    python benchmark/emulator_vs_h200.py compare FOLDER    # on the H200: NumPy and the CUDA driver are all it needs

``make`` runs every case in the emulator and keeps, for each launch, the PTX, the dimensions and the parameters; places
in the parameters that hold addresses of arrays (in tensor maps too) are found by value and written anew on the device.
``compare`` prints a line a case, the largest deviation and its bound, and fails if one is exceeded.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]


class Bound(NamedTuple):
    """How far the device's result may lie from the emulator's.

    ``bits``: not at all (NaN payloads aside). ``ulp``: in units in the last place. ``relative``: to the larger
    magnitude. ``scaled``: relative to the array's largest magnitude, for sums whose order differs.
    """

    kind: str
    limit: float = 0.0

    def deviation(self, got: np.ndarray, expected: np.ndarray) -> float:
        if self.kind == "bits" and got.dtype.kind != "f":
            return float((got != expected).sum())
        nan = np.isnan(expected)
        if (np.isnan(got) != nan).any():
            return float("inf")
        a, b = got[~nan], expected[~nan]
        if self.kind == "bits":
            return float((a.view(f"u{a.itemsize}") != b.view(f"u{b.itemsize}")).sum())
        same = a == b  # equal infinities too
        a, b = a[~same].astype(np.float64), b[~same].astype(np.float64)
        if not a.size:
            return 0.0
        if not np.isfinite(a - b).all():
            return float("inf")
        if self.kind == "ulp":
            exponent = np.maximum(np.frexp(np.maximum(abs(a), abs(b)))[1] - 1, -126)
            return float((abs(a - b) / np.ldexp(1.0, exponent - 23)).max())
        scale = np.maximum(abs(a), abs(b)) if self.kind == "relative" else np.abs(expected[~nan]).max()
        return float((abs(a - b) / scale).max())


# ------------------------------------------------------------------------------------------------ recording


class Recorder:
    """Collects the launches of one case and the memory they use."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []
        self.regions: dict[int, int] = {}  # base: bytes
        self.before: dict[int, np.ndarray] = {}

    def wrap(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        def recording(module: Any, name: str, grid: Any, block: Any, parameters: Any, **o: Any) -> Any:
            for r in o["regions"]:
                if r.size and self.regions.get(r.base, 0) < r.size:
                    self.regions[r.base] = r.size
                    self.before[r.base] = _bytes(r.base, r.size)
            self.launches.append(
                {
                    "ptx": "\n".join(module.lines),
                    "kernel": name,
                    "grid": list(grid),
                    "block": list(block),
                    "cluster": list(o.get("cluster", (1, 1, 1))),
                    "shared": o.get("dynamic_shared", 0),
                    "parameters": [list(p) for p in parameters],
                    "addresses": [self._addresses(p) for p in parameters],
                }
            )
            return launch(module, name, grid, block, parameters, **o)

        return recording

    def _addresses(self, parameter: bytes) -> list[tuple[int, int, int]]:
        """(place in the parameter, region, offset in the region) of each value that is an address."""
        found = []
        bases = sorted(self.regions)
        for at in range(0, len(parameter) - 7, 8):
            value = int.from_bytes(parameter[at : at + 8], "little")
            for i, base in enumerate(bases):
                if base <= value < base + self.regions[base]:
                    found.append((at, i, value - base))
        return found


def _bytes(base: int, size: int) -> np.ndarray:
    return np.frombuffer(ctypes.string_at(base, size), np.uint8).copy()


@contextmanager
def recorded(folder: Path, name: str, outputs: list[tuple[Any, str, Bound]]) -> Iterator[None]:
    """Records what the block launches as case ``name``; ``outputs``: (array, dtype, bound) of each result."""
    from unittest import mock

    from cute_emulator import dsl, run
    from cute_emulator.run import memory_of

    recorder = Recorder()
    with (
        mock.patch.object(dsl, "launch", recorder.wrap(dsl.launch)),
        mock.patch.object(run, "launch", recorder.wrap(run.launch)),
    ):
        yield
    bases = sorted(recorder.regions)
    results = []
    for array, dtype, bound in outputs:
        memory = memory_of(array)
        assert memory is not None
        region = next(i for i, b in enumerate(bases) if b <= memory[0] < b + recorder.regions[b])
        results.append((region, memory[0] - bases[region], memory[1], dtype, *bound))
    arrays = {f"before{i}": recorder.before[b] for i, b in enumerate(bases)}
    arrays |= {f"after{i}": _bytes(b, recorder.regions[b]) for i, b in enumerate(bases)}
    np.savez_compressed(folder / f"{name}.npz", **arrays)
    (folder / f"{name}.json").write_text(json.dumps({"launches": recorder.launches, "outputs": results}))


# ------------------------------------------------------------------------------------------------ cases

BITS = Bound("bits")
# opcode: bound. The approximations' are the PTX ISA's own, the rest is exactly rounded.
FLOAT = {
    "ex2.approx.f32": Bound("ulp", 2),
    "ex2.approx.ftz.f32": Bound("ulp", 2),
    "lg2.approx.f32": Bound("scaled", 2.0**-22),
    "rcp.approx.f32": Bound("ulp", 1),
    "rcp.approx.ftz.f32": Bound("ulp", 1),
    "rsqrt.approx.f32": Bound("relative", 2.0**-22.4),
    "sqrt.approx.f32": Bound("relative", 2.0**-22),
    "tanh.approx.f32": Bound("relative", 2.0**-10.9),
    "sin.approx.f32": Bound("scaled", 2.0**-20),
    "cos.approx.f32": Bound("scaled", 2.0**-20),
    "rcp.rn.f32": BITS,
    "sqrt.rn.f32": BITS,
    "cvt.rna.tf32.f32": BITS,
    "cvt.rni.f32.f32": BITS,
}
PAIR = {
    "add.rn.f32": BITS,
    "mul.rn.f32": BITS,
    "mul.ftz.f32": BITS,
    "div.rn.f32": BITS,
    "min.f32": BITS,
    "max.NaN.f32": BITS,
    "cvt.rn.bf16x2.f32": BITS,
    "cvt.rz.bf16x2.f32": BITS,
    "cvt.rn.f16x2.f32": BITS,
    "cvt.rn.relu.bf16x2.f32": BITS,
    "cvt.rn.satfinite.e4m3x2.f32": BITS,
    "cvt.rn.satfinite.e5m2x2.f32": BITS,
}
WORDS = {
    "fma.rn.f32": BITS,
    "fma.rn.bf16x2": BITS,
    "fma.rn.f16x2": BITS,
    "prmt.b32": BITS,
    "shf.l.wrap.b32": BITS,
    "mad.hi.s32": BITS,
    "dp4a.s32.s32": BITS,
    "bfe.s32": BITS,
}
REDUCTIONS = {"add.f32": "<f4", "add.noftz.bf16": "<u2", "add.noftz.f16": "<f2", "min.s32": "<i4", "max.u64": "<u8"}


def _inputs(n: int) -> list[np.ndarray]:
    rng = np.random.default_rng(20260101)
    wide = (rng.standard_normal((3, n)) * np.exp2(rng.uniform(-40, 40, (3, n)))).astype(np.float32)
    wide[:, : n // 2] = rng.standard_normal((3, n // 2)) * 4
    special = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 2.0**-149, -(2.0**-126), 3.4e38, 0.5, 1.5, 2.5]
    wide[0, : len(special)] = special
    return list(wide)


def _elementwise(folder: Path, table: dict[str, Bound], operands: int, n: int = 8192) -> None:
    from cute_emulator import run_ptx

    header = ".version 8.6\n.target sm_90a\n.address_size 64\n"
    for opcode, bound in table.items():
        short = opcode.endswith(("e4m3x2.f32", "e5m2x2.f32"))
        integer = opcode.split(".")[0] in ("prmt", "shf", "mad", "dp4a", "bfe", "fma") and not opcode.endswith(".f32")
        kind = "b32" if integer else "f32"
        body = ""
        for i in range(operands):
            body += f"  add.u64 %d2, %q{i + 1}, %d1;\n  ld.global.{kind} %{'r' if integer else 'f'}{i + 1}, [%d2];\n"
        sources = ", ".join(f"%{'r' if integer else 'f'}{i + 1}" for i in range(operands))
        pure = (kind == "f32" and opcode.split(".")[0] != "cvt") or opcode == "cvt.rni.f32.f32"
        target = "%h1" if short else "%f9" if pure else "%r9"
        body += f"  {opcode} {target}, {sources};\n"
        if short:
            body += "  cvt.u32.u16 %r9, %h1;\n"
        body += f"  add.u64 %d2, %q0, %d1;\n  st.global.b32 [%d2], {target if not short else '%r9'};\n"
        text = f"{header}.visible .entry k({', '.join(f'.param .u64 p{i}' for i in range(operands + 1))})\n{{\n"
        text += "  .reg .b16 %h<4>; .reg .b32 %r<16>; .reg .f32 %f<16>; .reg .b64 %d<8>; .reg .b64 %q<8>;\n"
        text += "".join(f"  ld.param.u64 %q{i}, [p{i}];\n" for i in range(operands + 1))
        text += "  mov.u32 %r10, %ctaid.x; mov.u32 %r11, %tid.x; mad.lo.u32 %r12, %r10, 256, %r11;\n"
        text += f"  mul.wide.u32 %d1, %r12, 4;\n{body}  ret;\n}}\n"
        out = np.zeros(n, np.float32 if pure else np.uint32)
        with recorded(folder, opcode, [(out, "<f4" if pure else "<u4", bound)]):
            run_ptx(text, n // 256, 256, [out, *_inputs(n)[:operands]])


def _bulk_reductions(folder: Path) -> None:
    from cute_emulator import run_ptx

    for what, dtype in REDUCTIONS.items():
        text = f""".version 8.6
.target sm_90a
.address_size 64
.shared .align 128 .b8 buffer[1024];
.visible .entry k(.param .u64 p0, .param .u64 p1)
{{
  .reg .pred %p<2>; .reg .b32 %r<8>; .reg .b64 %d<8>;
  ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];
  mov.u32 %r0, %tid.x; mov.u32 %r1, buffer;
  shl.b32 %r2, %r0, 3; add.u32 %r3, %r1, %r2; mul.wide.u32 %d2, %r0, 8; add.u64 %d3, %d1, %d2;
  ld.global.b64 %d4, [%d3]; st.shared.b64 [%r3], %d4;
  fence.proxy.async.shared::cta;
  bar.sync 0;
  setp.ne.u32 %p1, %r0, 0;
  @%p1 bra END;
  cp.reduce.async.bulk.global.shared::cta.bulk_group.{what} [%d0], [%r1], 1024;
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;
END:
  ret;
}}
"""
        rng = np.random.default_rng(3)
        n = 1024 // np.dtype(dtype).itemsize
        if what == "add.noftz.bf16":  # the upper halves of floats
            x, y = ((rng.standard_normal(n).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for _ in "xy")
        elif dtype[1] == "f":
            x, y = (rng.standard_normal(n).astype(dtype) for _ in "xy")
        else:
            x, y = (rng.integers(-1000 if dtype[1] == "i" else 0, 1000, n).astype(dtype) for _ in "xy")
        with recorded(folder, f"cp.reduce.{what}", [(x, dtype, BITS)]):
            run_ptx(text, 1, 128, [x, y])


def _compiled(folder: Path) -> None:
    """CuTe DSL kernels of the tests: wgmma, ldmatrix, mma.sync, stmatrix, cp.async, tensor copies, clusters."""
    sys.path.insert(0, str(ROOT / "test" / "emulator"))
    import cutlass.cute as cute
    import emulator_kernels as plain
    import emulator_mma_kernels as mma
    import torch
    from cutlass.cute.runtime import from_dlpack

    from cute_emulator import AsCuda, emulate

    def case(name: str, f: Any, tensors: list[Any], constants: list[Any], out: Any, dtype: str, bound: Bound) -> None:
        arguments = [from_dlpack(AsCuda(t), assumed_align=16) for t in tensors]
        with emulate("sm_90a"):
            compiled = cute.compile(f, *arguments, *constants)
            with recorded(folder, name, [(out, dtype, bound)]):
                compiled(*arguments)

    g = torch.Generator().manual_seed(1)
    for n in (8, 64, 128, 256):
        for majors in ("kk", "kn", "mk", "mn")[: 4 if n > 8 else 1]:
            for source in ("SS", "RS")[: 2 if majors[0] == "k" else 1]:
                a, b = torch.randn(64, 64, generator=g).bfloat16(), torch.randn(n, 64, generator=g).bfloat16()
                a = a if majors[0] == "k" else a.t().contiguous().t()
                b = b if majors[1] == "k" else b.t().contiguous().t()
                d = torch.zeros(64, n)
                # fp32 sums of 64 products in another order, with the tensor cores' truncation
                bound = Bound("scaled", 64 * 2.0**-23)
                constants = [(64, n, 64), majors, source == "RS"]
                case(f"wgmma.{source}.{majors}.n{n}", mma.wgmma, [a, b, d], constants, d, "<f4", bound)
    for transposed in (False, True):
        a, b = torch.randn(32, 48, generator=g).half(), torch.randn(16, 48, generator=g).half()
        d = torch.zeros(32, 16).half()
        # the result is rounded to f16: one unit in its last place
        case(f"mma.sync.{transposed}", plain.warp_mma, [a, b, d], [transposed], d, "<f2", Bound("scaled", 2.0**-10))
    source, indices = torch.randn(100, 72, generator=g).bfloat16(), torch.randint(-20, 100, (64,), generator=g).int()
    target = torch.zeros(64, 72).bfloat16()
    case("cp.async", plain.gather, [source, indices, target], [64], target, "<u2", BITS)
    source, target = torch.randn(4, 128, generator=g), torch.zeros(4, 128)
    case("cluster", plain.exchange, [source, target], [4], target, "<f4", BITS)
    swizzles = {"none": ((0, 4, 3), 64), "32B": ((1, 4, 3), 16), "64B": ((2, 4, 3), 32), "128B": ((3, 4, 3), 64)}
    for name, (swizzle, width) in swizzles.items():
        for reduce in (False, True):
            source = torch.randn(80, 2 * width - 8, generator=g).half()
            target, copied = torch.randn(source.shape, generator=g).half(), torch.zeros(96, 2 * width).half()
            constants = [(32, width), swizzle, reduce, (3, 2, 1)]
            tensors = [source, target, copied]
            what = "reduce" if reduce else "store"
            case(f"tma.{what}.{name}", plain.tma_copy, tensors, constants, target, "<f2", BITS)
            if not reduce:
                case(f"tma.load.{name}", plain.tma_copy, tensors, constants, copied, "<f2", BITS)


def make(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    for table, operands in ((FLOAT, 1), (PAIR, 2), (WORDS, 3)):
        _elementwise(folder, table, operands)
    _bulk_reductions(folder)
    _compiled(folder)
    print(f"{len(list(folder.glob('*.json')))} cases in {folder}")
    return 0


# ------------------------------------------------------------------------------------------------ replay


class Emulated:
    """Replays a recorded launch in the emulator: what tests the recording."""

    def __init__(self) -> None:
        self.kept: list[np.ndarray] = []

    def upload(self, data: np.ndarray) -> int:
        raw = np.zeros(data.size + 512, np.uint8)
        start = -raw.ctypes.data % 256
        raw[start : start + data.size] = data
        self.kept.append(raw)
        return raw.ctypes.data + start

    def download(self, address: int, size: int) -> np.ndarray:
        return _bytes(address, size)

    def launch(self, ptx: str, launch: dict[str, Any], parameters: list[bytes]) -> None:
        from cute_emulator.launch import launch as run
        from cute_emulator.launch import load

        run(
            load(ptx),
            launch["kernel"],
            launch["grid"],
            launch["block"],
            parameters,
            cluster=launch["cluster"],
            dynamic_shared=launch["shared"],
        )


class Cuda:
    """The first CUDA device, through the driver."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")
        self._check("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._check("cuDeviceGet", ctypes.byref(device), 0)
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._check("cuCtxSetCurrent", context)

    def _check(self, name: str, *arguments: Any) -> None:
        code = getattr(self.lib, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self.lib.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'?').decode()}")

    def upload(self, data: np.ndarray) -> int:
        address = ctypes.c_uint64()
        self._check("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(data.size, 1)))
        self._check("cuMemcpyHtoD_v2", address, ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.size))
        return address.value

    def download(self, address: int, size: int) -> np.ndarray:
        out = np.zeros(size, np.uint8)
        self._check(
            "cuMemcpyDtoH_v2", ctypes.c_void_p(out.ctypes.data), ctypes.c_uint64(address), ctypes.c_size_t(size)
        )
        return out

    def _module(self, ptx: str) -> ctypes.c_void_p:
        """Loads the text; a driver older than the compiler that wrote it takes it under an older version number."""
        module = ctypes.c_void_p()
        older = re.sub(r"\.version\s+\d+\.\d+", ".version 8.6", ptx, count=1)
        if self.lib.cuModuleLoadData(ctypes.byref(module), ptx.encode()):
            self._check("cuModuleLoadData", ctypes.byref(module), older.encode())
        return module

    def launch(self, ptx: str, launch: dict[str, Any], parameters: list[bytes]) -> None:
        function = ctypes.c_void_p()
        self._check("cuModuleGetFunction", ctypes.byref(function), self._module(ptx), launch["kernel"].encode())
        shared = launch["shared"]
        if shared > 48 * 1024:
            self._check("cuFuncSetAttribute", function, 8, shared)  # MAX_DYNAMIC_SHARED_SIZE_BYTES
        attribute = (ctypes.c_uint32 * 18)(4, 0, *launch["cluster"])  # CLUSTER_DIMENSION
        clustered = launch["cluster"] != [1, 1, 1]

        class Config(ctypes.Structure):
            _fields_ = (
                ("dimensions", ctypes.c_uint32 * 7),
                ("stream", ctypes.c_void_p),
                ("attributes", ctypes.c_void_p),
                ("count", ctypes.c_uint32),
            )

        dimensions = (ctypes.c_uint32 * 7)(*launch["grid"], *launch["block"], shared)
        config = Config(dimensions, None, ctypes.addressof(attribute), int(clustered))
        buffers = [_aligned(p) for p in parameters]
        pointers = (ctypes.c_void_p * max(1, len(buffers)))(*[address for _, address in buffers])
        self._check("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)
        self._check("cuCtxSynchronize")


def _aligned(data: bytes) -> tuple[Any, int]:
    buffer = ctypes.create_string_buffer(len(data) + 64)
    address = -(-ctypes.addressof(buffer) // 64) * 64
    ctypes.memmove(address, data, len(data))
    return buffer, address


def replay(path: Path, device: Any) -> list[tuple[float, Bound]]:
    """Runs a recorded case on a device: the deviation and the bound of each output."""
    case, arrays = json.loads(path.read_text()), np.load(path.with_suffix(".npz"))
    n = sum(k.startswith("before") for k in arrays.files)
    addresses = [device.upload(arrays[f"before{i}"]) for i in range(n)]
    for launch in case["launches"]:
        parameters = []
        for data, places in zip(launch["parameters"], launch["addresses"], strict=True):
            changed = bytearray(data)
            for at, region, offset in places:
                changed[at : at + 8] = (addresses[region] + offset).to_bytes(8, "little")
            parameters.append(bytes(changed))
        device.launch(launch["ptx"], launch, parameters)
    results = []
    for region, offset, size, dtype, kind, limit in case["outputs"]:
        got = device.download(addresses[region] + offset, size).view(dtype)
        expected = arrays[f"after{region}"][offset : offset + size].view(dtype)
        bound = Bound(kind, limit)
        results.append((bound.deviation(got, expected), bound))
    return results


def compare(folder: Path, device: Any) -> int:
    begin, failed = time.perf_counter(), 0
    for path in sorted(folder.glob("*.json")):
        try:
            for deviation, bound in replay(path, device):
                good = deviation <= bound.limit
                failed += not good
                word = "ok  " if good else "FAIL"
                print(f"{word} {path.stem:32s} {deviation:.3g} (bound: {bound.limit:.3g} {bound.kind})")
        except RuntimeError as e:
            failed += 1
            print(f"FAIL {path.stem:32s} {e}")
    print(f"{failed} failures in {time.perf_counter() - begin:.1f} s")
    return int(failed > 0)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("step", choices=("make", "compare", "replay"), help="replay: compare, in the emulator")
    p.add_argument("folder", type=Path)
    o = p.parse_args()
    if o.step == "make":
        return make(o.folder)
    return compare(o.folder, Cuda() if o.step == "compare" else Emulated())


if __name__ == "__main__":
    sys.exit(main())
