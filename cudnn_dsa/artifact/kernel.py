"""A loaded kernel: from named values to the bytes of its parameters, and the launch.

What depends on the scalars alone (the grid, tensor maps but for their address, everything packed) is kept for the sizes
seen last, so that a launch that repeats its sizes only writes addresses.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from cudnn_dsa.artifact import tensor_map
from cudnn_dsa.artifact.description import MULTIPROCESSORS, Artifact, Pointer, Scalar, Struct, TensorMap, parse_input
from cudnn_dsa.artifact.driver import Configuration, Device
from cudnn_dsa.artifact.expression import parse
from cudnn_dsa.contracts.errors import ContractError

MAX_SIZES = 256  # sets of scalars remembered for a kernel
_FORMATS = {"int32": "<i", "int64": "<q", "float32": "<f"}
_ADDRESS = struct.Struct("<Q")
MAP_ALIGNMENT = 16


class _Packed(NamedTuple):
    """A launch's configuration and parameters for one set of scalars; addresses are still 0."""

    config: Configuration
    block: bytes


class Kernel:
    """An artifact on a device.

    Args:
        artifact: what to load.
        device: what runs it.
    """

    def __init__(self, artifact: Artifact, device: Device) -> None:
        self.artifact = artifact
        self._device = device
        self._handle = device.load(artifact)
        self._offsets = artifact.launch.offsets()
        inputs = {name: parse_input(text) for name, text in artifact.inputs.items()}
        self._scalars = [name for name, kind in inputs.items() if not kind.is_pointer and name != MULTIPROCESSORS]
        # Input -> (alignment its address must have, where the address goes).
        self._pointers: list[tuple[str, int, list[int]]] = []
        for name, kind in inputs.items():
            places, alignment = [], kind.alignment
            for argument, offset in zip(artifact.launch.arguments, self._offsets, strict=False):
                if isinstance(argument, Pointer | TensorMap) and argument.name == name:
                    places.append(offset)
                    if isinstance(argument, TensorMap):
                        alignment = max(alignment, MAP_ALIGNMENT)
            if places:
                self._pointers.append((name, alignment, places))
        self._packed: dict[tuple, _Packed] = {}

    def launch(self, stream: Any, values: Mapping[str, Any]) -> None:
        """Launch on ``stream``.

        Args:
            stream: a torch stream, a raw handle, or None for the default stream.
            values: a tensor or an address, an int or a float for each input by name; None is the null pointer.

        Raises:
            ContractError: an address is not aligned as the kernel assumes.
            DriverError: the driver refuses.
        """
        config, block = self.pack(values)
        self._device.launch(self._handle, config, block, stream, values)

    def pack(self, values: Mapping[str, Any]) -> tuple[Configuration, bytearray]:
        """The launch's configuration, and the bytes of its parameters."""
        scalars = tuple([values[name] for name in self._scalars])
        packed = self._packed.get(scalars)
        if packed is None:
            packed = self._pack_scalars(dict(zip(self._scalars, scalars, strict=True)))
            if len(self._packed) >= MAX_SIZES:
                self._packed.clear()
            self._packed[scalars] = packed
        block = bytearray(packed.block)
        for name, alignment, places in self._pointers:
            value = values[name]
            if value is None:
                continue
            address = value if type(value) is int else value.data_ptr()
            if address % alignment:
                hint = "a view that starts in the middle of an allocation: copy it"
                raise ContractError(name, f"{alignment}-byte alignment", f"address {address:#x}", hint)
            for place in places:
                _ADDRESS.pack_into(block, place, address)
        return packed.config, block

    def _pack_scalars(self, scalars: Mapping[str, Any]) -> _Packed:
        launch = self.artifact.launch
        names = {**scalars, MULTIPROCESSORS: self._device.multiprocessors}

        def size(text: str | int) -> int:
            return parse(text)(names)

        block = bytearray(self._offsets[-1])
        for argument, offset in zip(launch.arguments, self._offsets, strict=False):
            if isinstance(argument, Scalar):
                value = names[argument.value] if argument.dtype == "float32" else size(argument.value)  # type: ignore[index]
                struct.pack_into(_FORMATS[argument.dtype], block, offset, value)
            elif isinstance(argument, Struct):
                form = "<" + _FORMATS[argument.dtype][1] * len(argument.values)
                struct.pack_into(form, block, offset, *map(size, argument.values))
            elif isinstance(argument, TensorMap):
                dims, strides = [size(n) for n in argument.dims], [size(n) for n in argument.strides]
                data = tensor_map.encode(argument.dtype, dims, strides, argument.box, argument.swizzle)
                block[offset : offset + len(data)] = data
        x, y, z = (size(n) for n in launch.grid)
        return _Packed(Configuration((x, y, z), launch.block, launch.cluster, launch.shared), bytes(block))
