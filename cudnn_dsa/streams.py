"""One resolved stream for a whole call: everything a call does on a CUDA device happens inside ``launch_scope``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch


def resolve_stream(stream: Any, device: torch.device) -> torch.cuda.Stream:
    """The torch stream of what a caller may pass.

    Args:
        stream: a ``torch.cuda.Stream``, a raw handle (int), a ``cuda.bindings.driver.CUstream``, anything with
            ``__cuda_stream__`` (cuda.core), or None for the ambient stream of ``device``.
        device: the CUDA device of the call.

    Raises:
        TypeError: anything else.
        ValueError: a torch stream of another device.
    """
    if stream is None:
        return torch.cuda.current_stream(device)
    if isinstance(stream, torch.cuda.Stream):
        if stream.device != device:
            raise ValueError(f"stream: expected a stream of {device}, got one of {stream.device}")
        return stream
    if hasattr(stream, "__cuda_stream__"):
        stream = stream.__cuda_stream__()[1]
    if isinstance(stream, bool) or not hasattr(stream, "__int__"):
        kinds = "a torch stream, an integer handle, a CUstream or None"
        raise TypeError(f"stream: expected {kinds}, got {type(stream).__name__}")
    # int(), not CUstream.getPtr(): the latter is where the wrapper keeps the handle, not the handle.
    handle = int(stream)
    return torch.cuda.default_stream(device) if handle == 0 else torch.cuda.ExternalStream(handle, device)


@contextmanager
def launch_scope(
    name: str, device: torch.device, stream: Any, tensors: Iterable[torch.Tensor | None]
) -> Iterator[torch.cuda.Stream | None]:
    """Run the body on ``stream`` with ``device`` current, autocast off and gradients off.

    Args:
        name: of the NVTX range around the body.
        device: of the call; on anything but CUDA the stream is ignored, since the work is synchronous.
        stream: see :func:`resolve_stream`.
        tensors: the caller's tensors. Where the stream is not the ambient one they are recorded on it: the caching
            allocator must not hand out their memory while the launch is pending, even if the caller drops them.

    Yields:
        The resolved stream, None off CUDA.
    """
    autocast = torch.is_autocast_enabled(device.type)  # asked first: entering the context costs as much as a launch
    with torch.no_grad(), torch.autocast(device.type, enabled=False) if autocast else nullcontext():
        if device.type != "cuda":
            yield None
            return
        ambient = torch.cuda.current_stream(device)
        resolved = resolve_stream(stream, device)
        with torch.cuda.device(device), torch.cuda.stream(resolved):
            if resolved != ambient:
                for tensor in tensors:
                    if tensor is not None:
                        tensor.record_stream(resolved)
            torch.cuda.nvtx.range_push(name)
            try:
                yield resolved
            finally:
                torch.cuda.nvtx.range_pop()
