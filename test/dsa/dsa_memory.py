"""Memory as torch counts it: the same number on every run, whatever else the machine does."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def allocated_peak(call: Callable[[], object]) -> int:
    """The most bytes that ``call`` holds at once beyond what was held before, of those torch's CPU allocator hands out.

    What a library inside of torch allocates on its own (oneDNN's scratch) is not among them.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
