"""Threads that fill the words of constraints, in native code without the interpreter's lock.

A constraint is the core's until it is handed over by `submit`, then a thread's until it is ready.
A place that takes long holds one thread, and nobody but its own row waits for it.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from seawall.grammar.base import GrammarError, Matcher

if TYPE_CHECKING:
    from seawall.core.step import I32

logger = logging.getLogger("seawall.grammar")

_MOST_THREADS = 8
# Native code that never comes back must not keep the engine from ending.
_LAST_SECONDS = 5.0


class MatcherConstraint:
    """See `core.grammar.Constraint`."""

    __slots__ = ("error", "is_ready", "matcher", "words")

    def __init__(self, matcher: Matcher, num_words: int) -> None:
        self.matcher = matcher
        self.words: I32 = np.zeros(num_words, np.int32)
        self.is_ready = False
        self.error: str | None = None

    def accept(self, token: int) -> bool:
        """Move past a token; an error is left in `error`."""
        assert self.is_ready
        try:
            return self.matcher.accept(token)
        except GrammarError as error:
            self.error = str(error)
            return False

    def fill(self, banned: Sequence[int]) -> None:
        """Fill the words; on a thread."""
        try:
            self.matcher.fill(self.words)
        except GrammarError as error:
            self.error = str(error)
        except Exception as error:  # a thread's boundary: the request gets the answer
            logger.exception("filling a mask failed")
            self.error = f"engine fault: {type(error).__name__}: {error}"
        if banned:
            self._leave_out(banned)
        self.is_ready = True

    def _leave_out(self, banned: Sequence[int]) -> None:
        left = self.words.copy()
        for token in banned:
            left.view(np.uint32)[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
        if left.any():
            self.words[:] = left


class Filler:
    """Owns the threads, which are started when first needed; one caller."""

    def __init__(self, wake: threading.Event) -> None:
        self._wake = wake
        self._jobs: queue.SimpleQueue[tuple[MatcherConstraint, Sequence[int]] | None] = (
            queue.SimpleQueue()
        )
        self._threads: list[threading.Thread] = []

    def submit(self, constraint: MatcherConstraint, banned: Sequence[int]) -> None:
        """Hand a constraint over until it is ready."""
        if not self._threads:
            self._start()
        constraint.is_ready = False
        self._jobs.put((constraint, banned))

    def wait(self, constraints: Sequence[MatcherConstraint], seconds: float) -> None:
        """Return when all are ready, at the latest after so long."""
        end = time.monotonic() + seconds
        for constraint in constraints:
            while not constraint.is_ready:
                left = end - time.monotonic()
                if left <= 0:
                    return
                self._wait_for(constraint, left)

    def _wait_for(self, constraint: MatcherConstraint, seconds: float) -> None:
        """Return when any was filled; one that is ready by the time the event is clear, at once."""
        self._wake.clear()
        if not constraint.is_ready:
            self._wake.wait(seconds)

    def close(self) -> None:
        """End the threads, each after what it has in hand if that ends at all."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(_LAST_SECONDS)
        self._threads.clear()

    def _start(self) -> None:
        for i in range(max(2, min(os.cpu_count() or 1, _MOST_THREADS))):
            thread = threading.Thread(target=self._run, name=f"seawall-mask-{i}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        while self._fill_next():
            self._wake.set()

    def _fill_next(self) -> bool:
        """Fill the next constraint, and hold nothing of it afterwards; False at the end."""
        job = self._jobs.get()
        if job is None:
            return False
        constraint, banned = job
        constraint.fill(banned)
        return True
