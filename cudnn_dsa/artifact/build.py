"""From a source to an artifact: the CuTe DSL compiles, for any target and without a GPU or a driver."""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from cudnn_dsa.artifact import key
from cudnn_dsa.artifact.description import Artifact, Launch, Source, parse_input

INSTALL = "pip install 'cudnn-dsa[cuda]'"
# An address that no kernel sees: the DSL compiles from arguments, of which only types and alignments matter.
_SOME_ADDRESS = 1 << 20
_compiler = threading.Lock()  # the DSL keeps its state in the process


def unavailable() -> str | None:
    """Why kernels cannot be compiled here, or None."""
    return None if key.toolchain() else f"the CuTe DSL is not installed ({INSTALL})"


def compile_source(source: Source) -> Artifact:
    """Compile a kernel and check that its parameters are those of the source's description.

    Raises:
        RuntimeError: there is no CuTe DSL here.
        ValueError: the description is not that of the kernel.
    """
    reason = unavailable()
    if reason is not None:
        raise RuntimeError(f"{source.name} has to be compiled for {source.arch}: {reason}")
    with _compiler, tempfile.TemporaryDirectory(prefix="cudnn_dsa_") as folder:
        import cutlass.cute as cute

        options = f"--gpu-arch {source.arch} --keep-ptx --keep-cubin --dump-dir {folder}"
        compiled = cute.compile(source.host(), *(example(text) for text in source.inputs.values()), options=options)
        ptx, cubin = compiled.__ptx__, compiled.__cubin__
    entry, parameters = entry_of(ptx)
    check_parameters(source.launch, parameters, source.name)
    return Artifact(
        source.name, source.arch, source.inputs, source.launch, key.identity(source), entry, ptx, cubin, key.toolchain()
    )


def example(text: str, value: Any = None) -> Any:
    """An argument of a host function: the DSL's number or pointer for an input of type ``text``.

    Args:
        text: the input's type.
        value: the number or the address; None is any, to compile with.
    """
    import cutlass
    import cutlass.cute as cute

    kind = parse_input(text)
    name = {"bfloat16": "BFloat16"}.get(kind.dtype, kind.dtype.replace("uint", "Uint").capitalize())
    numeric = getattr(cutlass, name)
    if not kind.is_pointer:
        return numeric(1 if value is None else value)
    address = _SOME_ADDRESS if value is None else value
    pointer: Callable[..., Any] = cute.runtime.make_ptr
    return pointer(numeric, address, cute.AddressSpace.gmem, assumed_align=kind.alignment)


_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([a-z]+)(\d+)[^,\[\]]*(?:\[(\d+)\])?")


def entry_of(ptx: str) -> tuple[str, list[tuple[int, int]]]:
    """The name of a module's one kernel, and (bytes, alignment) of its parameters."""
    entries = _ENTRY.findall(ptx)
    if len(entries) != 1:
        raise ValueError(f"a source is one kernel, not {len(entries)}: {[name for name, _ in entries]}")
    name, parameters = entries[0]
    found = []
    for alignment, _, bits, count in _PARAMETER.findall(parameters):
        size = int(bits) // 8
        found.append((size * int(count or 1), int(alignment or size)))
    return name, found


def check_parameters(launch: Launch, parameters: list[tuple[int, int]], name: str) -> None:
    """Raise ``ValueError`` where a description has not the parameters of the compiled kernel."""
    described = [argument.layout for argument in launch.arguments]
    if described != parameters:
        rows = "\n".join(f"  {i}: {a}" for i, a in enumerate(launch.arguments))
        message = f"{name}: the kernel's parameters have (bytes, alignment) {parameters}, the description's {described}"
        raise ValueError(f"{message}:\n{rows}")
