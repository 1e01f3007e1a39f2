"""What a launch needs beside the machine code: the kernel's arguments, the grid, the block, the cluster, shared memory.

A :class:`Source` is a kernel that can be compiled; what comes out is an :class:`Artifact`, which runs without the CuTe
DSL. Both carry the same description. It is data, and is kept as JSON: sizes are expressions (``expression.py``) over
the scalar inputs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from cudnn_dsa.artifact.expression import parse

MULTIPROCESSORS = "multiprocessors"  # an input of this name is the device's to give, not the caller's

Size = str | int
Extent = tuple[Size, Size, Size]

# dtype -> bytes of an element. Scalars are of the first three.
SCALARS = {"int32": 4, "int64": 8, "float32": 4}
ELEMENTS = {**SCALARS, "uint8": 1, "float64": 8, "bfloat16": 2, "float16": 2}


class Input(NamedTuple):
    """One parameter of a kernel's host function: a scalar, or a pointer to elements with an assumed alignment."""

    dtype: str
    alignment: int = 0  # bytes; 0 for a scalar

    @property
    def is_pointer(self) -> bool:
        return self.alignment > 0


_NOTHING = Input("none")


def parse_input(text: str) -> Input:
    """``"int32"`` is a scalar, ``"float32*"`` a pointer aligned as its elements are, ``"bfloat16*16"`` to 16 bytes."""
    match = re.fullmatch(r"(\w+)(\*)?(\d+)?", text)
    if match is None or match[1] not in ELEMENTS or (match[2] is None and (match[3] or match[1] not in SCALARS)):
        raise ValueError(f"not an input: {text!r} (a scalar {', '.join(SCALARS)}, or a pointer 'dtype*', 'dtype*16')")
    if match[2] is None:
        return Input(match[1])
    return Input(match[1], max(int(match[3] or 0), ELEMENTS[match[1]]))


@dataclass(frozen=True)
class Pointer:
    """A device pointer: the address of the input ``name``."""

    name: str

    @property
    def layout(self) -> tuple[int, int]:
        """(bytes, alignment) among the kernel's parameters."""
        return 8, 8


@dataclass(frozen=True)
class Scalar:
    """An integer, the value of an expression; or a float32, the value of an input."""

    dtype: str
    value: Size

    @property
    def layout(self) -> tuple[int, int]:
        return SCALARS[self.dtype], SCALARS[self.dtype]


@dataclass(frozen=True, init=False)
class Struct:
    """Integers of one type that the kernel takes as one parameter.

    It is how the DSL passes the sizes, known only at run time, of a tensor map's coordinate tensor, in the order of
    its modes.
    """

    dtype: str
    values: tuple[Size, ...]

    def __init__(self, dtype: str, *values: Size) -> None:
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "values", values)

    @property
    def layout(self) -> tuple[int, int]:
        return SCALARS[self.dtype] * len(self.values), SCALARS[self.dtype]


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor of the input ``name``: see ``tensor_map.encode``. ``dims`` fastest first."""

    name: str
    dtype: str
    dims: tuple[Size, ...]
    strides: tuple[Size, ...]
    box: tuple[int, ...]
    swizzle: int

    @property
    def layout(self) -> tuple[int, int]:
        return 128, 64


Argument = Pointer | Scalar | Struct | TensorMap
_ARGUMENTS: dict[str, type] = {kind.__name__: kind for kind in (Pointer, Scalar, Struct, TensorMap)}


@dataclass(frozen=True)
class Launch:
    """A kernel's parameters in order, and its launch configuration; ``shared`` is dynamic shared memory in bytes."""

    arguments: tuple[Argument, ...]
    grid: Extent
    block: tuple[int, int, int]
    shared: int
    cluster: tuple[int, int, int] = (1, 1, 1)

    def check(self, inputs: Mapping[str, Input]) -> None:
        """Raise ``ValueError`` where an argument or a size uses what is no input, or not as one."""
        integers = {n for n, i in inputs.items() if not i.is_pointer and i.dtype != "float32"}
        sizes: list[Size] = [*self.grid]
        for argument in self.arguments:
            if isinstance(argument, Pointer | TensorMap) and not inputs.get(argument.name, _NOTHING).is_pointer:
                raise ValueError(f"{argument.name!r} is not a pointer among the inputs {', '.join(inputs)}")
            if isinstance(argument, TensorMap):
                sizes += [*argument.dims, *argument.strides]
            elif isinstance(argument, Struct):
                sizes += argument.values
            elif isinstance(argument, Scalar) and argument.dtype == "float32":
                if inputs.get(str(argument.value)) != Input("float32"):
                    raise ValueError(f"{argument.value!r} is not a float32 among the inputs {', '.join(inputs)}")
            elif isinstance(argument, Scalar):
                sizes.append(argument.value)
        for size in sizes:
            unknown = parse(size).names - integers
            if unknown:
                raise ValueError(f"{', '.join(sorted(unknown))} in {size!r}: not an integer among the inputs")

    def offsets(self) -> tuple[int, ...]:
        """Where each parameter lies among the kernel's parameters, and last how many bytes they take in all."""
        found, end = [], 0
        for argument in self.arguments:
            size, alignment = argument.layout
            start = -(-end // alignment) * alignment
            found.append(start)
            end = start + size
        return (*found, end)

    def to_json(self) -> dict[str, Any]:
        return {
            "arguments": [{"kind": type(a).__name__, **vars(a)} for a in self.arguments],
            "grid": self.grid, "block": self.block, "cluster": self.cluster, "shared": self.shared,
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Launch:
        return cls(
            tuple(_argument_from_json(a) for a in data["arguments"]),
            tuple(data["grid"]), tuple(data["block"]), data["shared"], tuple(data["cluster"]),
        )  # fmt: skip


def _argument_from_json(data: Mapping[str, Any]) -> Argument:
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items() if key != "kind"}
    if data["kind"] == "Struct":
        return Struct(data["dtype"], *data["values"])
    return _ARGUMENTS[data["kind"]](**fields)


@dataclass(frozen=True)
class Source:
    """A kernel that can be compiled.

    Attributes:
        name: of the kernel, unique among those that a problem launches.
        arch: the target, ``"sm_90a"``, ``"sm_100a"``, ``"sm_103a"``, ``"sm_100f"``.
        key: all that the machine code depends on beside the program text: ``Problem.kernel_key(arch)``, tile sizes.
            Nested tuples of strings, numbers, booleans and None.
        host: called when it is compiled, and only then imports the CuTe DSL; returns the ``cute.jit`` callable, which
            takes the inputs in order and launches one kernel.
        inputs: name -> type (:func:`parse_input`) of the host function's parameters, in order.
        launch: what that host function does, as data.
    """

    name: str
    arch: str
    key: tuple
    host: Callable[[], Any]
    inputs: Mapping[str, str]
    launch: Launch

    def __post_init__(self) -> None:
        self.launch.check({name: parse_input(text) for name, text in self.inputs.items()})


@dataclass(frozen=True)
class Artifact:
    """A compiled kernel and all that its launch needs.

    Attributes:
        name, arch, inputs, launch: those of its source.
        identity: digest of the source: name, arch, key, description and program text (``key.py``).
        entry: the kernel's name in the PTX and in the cubin.
        ptx, cubin: program text for the emulator, machine code for a GPU.
        toolchain: the versions that compiled it.
    """

    name: str
    arch: str
    inputs: Mapping[str, str]
    launch: Launch
    identity: str
    entry: str
    ptx: str
    cubin: bytes
    toolchain: Mapping[str, str]

    def to_files(self) -> dict[str, bytes]:
        """``launch.json``, ``kernel.ptx``, ``kernel.cubin``."""
        description = {
            "name": self.name, "arch": self.arch, "identity": self.identity, "entry": self.entry,
            "toolchain": dict(self.toolchain), "inputs": dict(self.inputs), "launch": self.launch.to_json(),
        }  # fmt: skip
        text = json.dumps(description, indent=1).encode()
        return {"launch.json": text, "kernel.ptx": self.ptx.encode(), "kernel.cubin": self.cubin}

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Artifact:
        """The artifact of :meth:`to_files`. Raises ``ValueError`` or ``KeyError`` where something is missing or odd."""
        data = json.loads(files["launch.json"])
        launch = Launch.from_json(data.pop("launch"))
        launch.check({name: parse_input(text) for name, text in data["inputs"].items()})
        return cls(launch=launch, ptx=files["kernel.ptx"].decode(), cubin=files["kernel.cubin"], **data)
