"""Admission by simulation: will the pages suffice until the requests that run now are done?

Each decoding request grows by one token a step until its expected end and then gives its own
pages back; a request that still prefills (and the candidate) is charged with all it may come to
need for the whole time, since the step at which it starts to decode is not known. The pool must
cover the largest sum. The expected end is a quantile of (produced / allowed) seen so far; with
conservativeness 1 it is the end that was asked for, and then no retraction can happen: every
later state is below one that this simulation has already paid for.

Idea of simulating future use instead of a safety factor: LightLLM's future-peak scheduler
(Gong et al., ASPLOS 2025).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from seawall.core.request import Request

_MIN_SEEN = 32
_WINDOW = 512


class LengthEstimator:
    """Expected output length, from what finished requests produced of what they were allowed."""

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._seen: deque[float] = deque(maxlen=_WINDOW)
        self._fraction = 1.0

    def record(self, request: Request) -> None:
        """Note a request that ended by itself."""
        if request.max_new_tokens == 0 or request.sampling.ignore_eos:
            return
        self._seen.append(request.num_output / request.max_new_tokens)
        if len(self._seen) >= _MIN_SEEN and self._quantile < 1:
            self._fraction = float(np.quantile(np.asarray(self._seen), self._quantile))

    def expected_output(self, request: Request) -> int:
        """Tokens the request is expected to write in all; never less than it has written."""
        allowed = request.max_new_tokens
        # One that was sent back once has shown that the expectation was too low.
        if request.sampling.ignore_eos or request.num_retractions > 0:
            return allowed
        expected = int(np.ceil(allowed * self._fraction))
        return allowed if request.num_output >= expected else expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A running request's pages: all it holds, those only it holds, and those of the window class.

    `num_windows` counts what the request gives back by itself as its window moves.
    """

    request: Request
    num_pages: int
    num_own: int
    num_windows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowDemand:
    """What windows cost: pages of a decoding request, and of all prompts that are computed now."""

    most_held: int
    prefill_pages: int


NO_WINDOWS = WindowDemand(most_held=0, prefill_pages=0)


class Admission:
    """Future page use of the running requests, for one planning round.

    Window pages need no simulation: a request that holds a window once holds one until its end.
    Each is charged with the most it can hold, beside the prompts in flight, which are shared by
    all; a request that is alone may take what it needs step by step.

    Written by the scheduler: `admit` adds a request that was let in.
    """

    def __init__(
        self,
        holdings: Sequence[Holding],
        estimator: LengthEstimator,
        page_size: int,
        windows: WindowDemand = NO_WINDOWS,
    ) -> None:
        self._estimator = estimator
        self._page_size = page_size
        self._windows = windows
        self._is_alone = not holdings
        self._windows_reserved = windows.prefill_pages + sum(
            max(self._most_windows(h.request) - h.num_windows, 0) for h in holdings
        )
        self._reserved = 0
        decoding = [h for h in holdings if not h.request.is_prefilling]
        for holding in holdings:
            if holding.request.is_prefilling:
                self._reserved += self._growth(holding.request, holding.num_pages)
        self._peak = self._decode_peak(decoding)

    def fits(
        self, request: Request, num_shared_pages: int, available: int, available_windows: int = 0
    ) -> bool:
        """Whether `request` can run to its expected end beside the others.

        Args:
            request: the candidate.
            num_shared_pages: pages it takes from the cache, already locked.
            available: pages free or evictable now, after that lock.
            available_windows: the same of the window class.
        """
        windows = self._windows_reserved + self._most_windows(request)
        if windows > available_windows and not self._is_alone:
            return False
        need = self._growth(request, num_shared_pages)
        return self._peak + self._reserved + need <= available

    def admit(self, request: Request, num_shared_pages: int) -> None:
        """Count `request` among those that run."""
        self._is_alone = False
        self._windows_reserved += self._most_windows(request)
        self._reserved += self._growth(request, num_shared_pages)

    def _most_windows(self, request: Request) -> int:
        length = request.num_prompt + self._estimator.expected_output(request)
        held = min(_ceil_div(length, self._page_size), self._windows.most_held)
        # The samples of a group keep the prompt's window from the others that use it.
        return held if request.group is None else 2 * held

    def _growth(self, request: Request, num_pages: int) -> int:
        length = request.num_prompt + self._estimator.expected_output(request)
        return max(_ceil_div(length, self._page_size) - num_pages, 0)

    def _decode_peak(self, holdings: Sequence[Holding]) -> int:
        """Most additional pages at any future step, never below zero.

        Sorted by steps left; just before request i ends (after steps_i more tokens) those with at
        least as many steps left are alive. Rounding up to whole pages is bounded by
        (sum of lengths + alive * (steps + page_size - 1)) / page_size, which costs O(n log n).
        """
        if not holdings:
            return 0
        requests = [h.request for h in holdings]
        ends = [r.num_prompt + self._estimator.expected_output(r) for r in requests]
        lengths = np.array([r.num_planned for r in requests], np.int64)
        steps = np.maximum(np.array(ends, np.int64) - lengths, 0)
        held = np.array([h.num_pages for h in holdings], np.int64)
        own = np.array([h.num_own for h in holdings], np.int64)
        order = np.argsort(steps, kind="stable")
        lengths, steps, held, own = lengths[order], steps[order], held[order], own[order]
        alive = np.arange(len(steps), 0, -1)
        size = self._page_size
        alive_lengths = np.cumsum(lengths[::-1])[::-1]
        alive_held = np.cumsum(held[::-1])[::-1]
        released = np.cumsum(own) - own
        pages = (alive_lengths + alive * (steps + size - 1)) // size
        return max(int((pages - alive_held - released).max()), 0)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
