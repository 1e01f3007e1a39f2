"""One resolved stream for a whole call: everything a call does on a CUDA device happens inside ``launch_scope``."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch


def stream_or_handle(stream: Any) -> torch.cuda.Stream | int | None:
    """What a caller may pass for a stream, reduced to a torch stream, a raw handle or None.

    Args:
        stream: a ``torch.cuda.Stream``, a raw handle (int), a ``cuda.bindings.driver.CUstream``, anything with
            ``__cuda_stream__`` (cuda.core), or None for the ambient stream.

    Raises:
        TypeError: anything else.
    """
    if stream is None or isinstance(stream, torch.cuda.Stream):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        stream = stream.__cuda_stream__()[1]
    if isinstance(stream, bool | float | str) or not hasattr(stream, "__int__"):
        kinds = "a torch stream, an integer handle, a CUstream or None"
        raise TypeError(f"stream: expected {kinds}, got {type(stream).__name__}")
    # int(), not CUstream.getPtr(): the latter is where the wrapper keeps the handle, not the handle.
    return int(stream)


def resolve_stream(stream: Any, device: torch.device) -> torch.cuda.Stream:
    """The torch stream of ``device`` that ``stream`` stands for: see :func:`stream_or_handle`.

    Raises:
        TypeError: what is no stream.
        ValueError: a torch stream of another device.
    """
    stream = stream_or_handle(stream)
    if stream is None:
        return torch.cuda.current_stream(device)
    if isinstance(stream, int):
        return torch.cuda.default_stream(device) if stream == 0 else torch.cuda.ExternalStream(stream, device)
    if stream.device != device:
        raise ValueError(f"stream: expected a stream of {device}, got one of {stream.device}")
    return stream


class launch_scope:
    """Run the body on ``stream`` with ``device`` current, autocast off and gradients off.

    What is so already is not entered again: a context costs as much host time as a launch.

    Args:
        name: of the NVTX range around the body.
        device: of the call; on anything but CUDA a stream is checked for its type alone, as the work is synchronous.
        stream: see :func:`stream_or_handle`.
        tensors: the caller's tensors, or None for those not given. Where the stream is not the ambient one they are
            recorded on it: the caching allocator must not hand out their memory while the launch is pending, even if
            the caller drops them.

    ``with`` gives the resolved stream, None off CUDA.
    """

    __slots__ = ("_device", "_entered", "_had_grad", "_name", "_stream", "_tensors")

    def __init__(self, name: str, device: torch.device, stream: Any, tensors: Iterable[torch.Tensor | None]):
        self._name = name
        self._device = device
        self._stream = stream
        self._tensors = tensors

    def __enter__(self) -> torch.cuda.Stream | None:
        device = self._device
        on_cuda = device.type == "cuda"
        given = self._stream if self._stream is None else stream_or_handle(self._stream)
        self._entered: ExitStack | None = None
        self._had_grad = torch.is_grad_enabled()
        if self._had_grad:
            torch._C._set_grad_enabled(False)  # what torch.no_grad() does, without the object
        try:
            if torch.is_autocast_enabled(device.type):
                self._enter(torch.autocast(device.type, enabled=False))
            return self._enter_stream(given) if on_cuda else None
        except BaseException:
            self._leave()
            raise

    def _enter_stream(self, given: Any) -> torch.cuda.Stream:
        device = self._device
        if torch.cuda.current_device() != device.index:
            self._enter(torch.cuda.device(device))
        resolved = ambient = torch.cuda.current_stream(device)
        if given is not None:
            resolved = resolve_stream(given, device)
            if resolved != ambient:
                self._enter(torch.cuda.stream(resolved))
                for tensor in self._tensors:
                    if tensor is not None:
                        tensor.record_stream(resolved)
        torch.cuda.nvtx.range_push(self._name)
        return resolved

    def _enter(self, context: Any) -> None:
        if self._entered is None:
            self._entered = ExitStack()
        self._entered.enter_context(context)

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            torch.cuda.nvtx.range_pop()
        self._leave()

    def _leave(self) -> None:
        if self._entered is not None:
            self._entered.close()
        if self._had_grad:
            torch._C._set_grad_enabled(True)
