"""What the DSL's own host code launches, to compare our launches with."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import cutlass.cute as cute

import cute_emulator
from cudnn_dsa.artifact import Source, TensorMap, find, tensor_map
from cudnn_dsa.artifact.build import example
from cudnn_dsa.artifact.description import MULTIPROCESSORS
from cudnn_dsa.artifact.driver import Configuration
from cudnn_dsa.artifact.kernel import Kernel
from cudnn_dsa.artifact.key import identity

_compiled: dict[str, Any] = {}  # by identity: one compilation for all sizes


def dsl_launch(source: Source, values: Mapping[str, Any]) -> tuple[Configuration, list[bytes]]:
    """The configuration and the parameters that the DSL's host code passes to the driver. Nothing runs."""
    seen: list[tuple[Configuration, list[bytes]]] = []

    def record(
        module: Any, name: str, grid: Any, block: Any, parameters: Any, *, cluster: Any, dynamic_shared: int, **_
    ):
        seen.append((Configuration(tuple(grid), tuple(block), tuple(cluster), dynamic_shared), list(parameters)))
        return SimpleNamespace(hazards=[])

    arguments = [example(text, _plain(values[name])) for name, text in source.inputs.items()]
    with patch("cute_emulator.dsl.launch", record), cute_emulator.emulate(source.arch):
        name = identity(source)
        if name not in _compiled:
            _compiled[name] = cute.compile(source.host(), *(example(text) for text in source.inputs.values()))
        _compiled[name](*arguments)
    (launch,) = seen
    return launch


def our_launch(source: Source, values: Mapping[str, Any]) -> tuple[Configuration, list[bytes]]:
    with cute_emulator.device(source.arch, multiprocessors=values.get(MULTIPROCESSORS, 4)) as device:
        kernel = Kernel(find(source), device)
        config, block = kernel.pack(values)
    offsets = source.launch.offsets()
    sizes = [argument.layout[0] for argument in source.launch.arguments]
    return config, [bytes(block[at : at + size]) for at, size in zip(offsets, sizes, strict=False)]


def assert_same_launch(source: Source, values: Mapping[str, Any]) -> None:
    """Fails where our launch is not that of the DSL's host code, byte for byte, and says where.

    Args:
        source: the kernel.
        values: as for ``Kernel.launch``: tensors or addresses, and numbers; ``multiprocessors`` too where it is an
            input.
    """
    theirs, ours = dsl_launch(source, values), our_launch(source, values)
    assert ours[0] == theirs[0]
    assert len(ours[1]) == len(theirs[1])
    for i, (argument, mine, other) in enumerate(zip(source.launch.arguments, ours[1], theirs[1], strict=True)):
        if isinstance(argument, TensorMap):
            mine, other = mine[: tensor_map.DEFINED], other[: tensor_map.DEFINED]
            message = f"parameter {i}, the DSL passes {tensor_map.decode(other)}, we {tensor_map.decode(mine)}"
            assert mine == other, message
        assert mine == other, f"parameter {i}, {argument}: the DSL passes {other.hex()}, we {mine.hex()}"


def _plain(value: Any) -> Any:
    """A tensor's address; numbers as they are."""
    return value.data_ptr() if hasattr(value, "data_ptr") else value
