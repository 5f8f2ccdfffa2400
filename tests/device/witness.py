"""The allocator's own word on how many bytes a piece of work takes, to hold the tracker against.

PyTorch's profiler records every allocation and release of its CPU allocator, kernels' scratch
included, in the order in which they happen.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class AllocatorUse:
    """Bytes above what was allocated before the work began."""

    peak: int
    end: int


def allocator_use(work: Callable[[], object]) -> AllocatorUse:
    """Runs the work, drops what it returns, and tells what the allocator did."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    session = recorded.profiler
    assert session is not None
    events = [e for e in session.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return AllocatorUse(peak=peak, end=now)
