"""Helpers of the emulator's tests: a kernel around a few PTX lines, and inputs that include the hostile ones."""

from __future__ import annotations

import numpy as np

from cute_emulator import run_ptx

HEADER = ".version 9.0\n.target sm_100a\n.address_size 64\n"


def kernel(body: str, parameters: int, registers: str = "", shared: str = "") -> str:
    """A kernel ``k`` whose parameters p0, p1, ... are 64-bit addresses, held by %q0, %q1, ... plus 8 * tid in %o."""
    loads = "".join(f"  ld.param.u64 %q{i}, [p{i}];\n" for i in range(parameters))
    names = ", ".join(f".param .u64 p{i}" for i in range(parameters))
    return f"""{HEADER}{shared}
.visible .entry k({names})
{{
  .reg .pred %p<16>;
  .reg .b16 %h<32>;
  .reg .b32 %r<64>;
  .reg .f32 %f<64>;
  .reg .b64 %d<64>;
  .reg .f64 %g<32>;
  .reg .b64 %q<16>;
  .reg .b64 %o;
  {registers}
{loads}  mov.u32 %r0, %tid.x;
  mul.wide.u32 %o, %r0, 8;
{body}
  ret;
}}
"""


_REGISTER = {"b16": "%h", "b32": "%r", "f32": "%f", "b64": "%d", "f64": "%g"}


def _storage(type_: str) -> str:
    if type_ in ("f32", "f64"):
        return type_
    bits = int("".join(c for c in type_.split("x")[0] if c.isdigit())) * (2 if type_.endswith("x2") else 1)
    return f"b{max(bits, 16)}"


def apply(
    opcode: str, result: str, types: list[str], *inputs: np.ndarray, tail: str = "", schedule: str = "eager"
) -> np.ndarray:
    """Runs ``opcode d, a, b, ...{tail}`` on every element; inputs and the result are bit patterns as uint64."""
    n = len(inputs[0])
    padded = -(-n // 32) * 32
    arrays = []
    for x in inputs:
        a = np.zeros(padded, np.uint64)
        a[:n] = x
        arrays.append(a)
    out = np.zeros(padded, np.uint64)
    body, names = "", []
    for i, t in enumerate(types):
        s = _storage(t)
        register = f"{_REGISTER[s]}{i + 1}"
        names.append(register)
        body += f"  add.u64 %q15, %q{i + 1}, %o;\n  ld.global.{s} {register}, [%q15];\n"
    s = _storage(result)
    d = f"{_REGISTER[s]}20"
    body += f"  {opcode} {d}, {', '.join(names)}{tail};\n  add.u64 %q15, %q0, %o;\n  st.global.{s} [%q15], {d};\n"
    for first in range(0, padded, 1024):
        part = [np.ascontiguousarray(a[first : first + 1024]) for a in arrays]
        part_out = np.zeros(len(part[0]) if part else 1024, np.uint64)
        run_ptx(kernel(body, 1 + len(arrays)), 1, (len(part_out),), [part_out, *part], schedule=schedule)
        out[first : first + 1024] = part_out
    return out[:n]


def bits32(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)


def bits64(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float64).view(np.uint64)


def bits16(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float16).view(np.uint16).astype(np.uint64)


def f32(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32)


def hostile_f32(rng: np.random.Generator, n: int = 256) -> np.ndarray:
    """Random magnitudes over the whole range, and zeros, subnormals, infinities, NaN, neighbours of powers of two."""
    x = (rng.standard_normal(n) * np.exp2(rng.uniform(-140, 120, n))).astype(np.float32)
    special = np.array(
        [
            0.0,
            -0.0,
            1.0,
            -1.0,
            np.inf,
            -np.inf,
            np.nan,
            2.0**-149,
            -(2.0**-126),
            3.4e38,
            1 + 2.0**-23,
            1 - 2.0**-24,
            0.5,
            1.5,
            2.5,
            -2.5,
        ],
        np.float32,
    )
    x[: len(special)] = special
    return rng.permutation(x)


def integers(rng: np.random.Generator, bits: int, n: int = 256) -> np.ndarray:
    """Bit patterns: random ones, and the ends of the signed and unsigned ranges."""
    x = rng.integers(0, 1 << 63, n, dtype=np.uint64) * np.uint64(2) + rng.integers(0, 2, n, dtype=np.uint64)
    mask = (1 << bits) - 1
    special = [0, 1, 2, mask, mask - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1, 31, 32, 33, 63, 64]
    x[: len(special)] = [s & mask for s in special]
    return rng.permutation(x & np.uint64(mask))
