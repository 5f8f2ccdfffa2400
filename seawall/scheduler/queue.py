"""The waiting queue: bounded, ordered by policy, retracted requests keep their place."""

import bisect
from collections.abc import Callable, Iterator

from seawall.core.errors import QueueFullError
from seawall.core.request import Request
from seawall.memory.footprint import request_bytes
from seawall.memory.ledger import Ledger
from seawall.memory.plan import QUEUE

# Matching every waiting prompt against the tree at each step pays only for short queues.
_LONGEST_MATCHED_QUEUE = 128


class WaitQueue:
    """Requests that have no seat, in order of arrival (or priority first, then arrival).

    Written by the scheduler alone.
    """

    def __init__(self, *, policy: str, max_queued: int | None, ledger: Ledger) -> None:
        self._policy = policy
        self._max_queued = max_queued
        self._ledger = ledger
        self._items: list[tuple[tuple[int, int], Request]] = []
        # Requests that arrived at this number or later are not to be admitted.
        self._held_from: int | None = None

    def __len__(self) -> int:
        return len(self._items)

    def check_room(self, count: int, num_tokens: int) -> None:
        """Refuse `count` new samples of up to `num_tokens` tokens when they don't fit.

        Raises:
            QueueFullError: with the limit.
        """
        needed = count * request_bytes(num_tokens)
        if not self._ledger.fits(QUEUE, needed):
            raise QueueFullError(
                f"queue: {needed} more bytes of waiting requests don't fit the host plan's "
                f"{self._ledger.cap(QUEUE)}; retry later or raise host_memory_budget"
            )
        if self._max_queued is not None and len(self._items) + count > self._max_queued:
            raise QueueFullError(
                f"queue: {len(self._items)} requests wait, max_queued_requests is "
                f"{self._max_queued}; retry later or raise it"
            )

    def enter(self, request: Request) -> None:
        """Queue a new request; its bytes are charged until `leave`."""
        self._ledger.charge(QUEUE, request_bytes(len(request.tokens)))
        self.push(request)

    def leave(self, request: Request) -> None:
        """A request has ended, wherever it was."""
        self._ledger.credit(QUEUE, request_bytes(len(request.tokens)))

    def push(self, request: Request) -> None:
        """Add by arrival number: one that was retracted comes before later arrivals."""
        bisect.insort(self._items, (self.rank(request), request), key=_rank_of_item)

    def remove(self, request: Request) -> None:
        """Take one out."""
        at = bisect.bisect_left(self._items, self.rank(request), key=_rank_of_item)
        assert at < len(self._items) and self._items[at][1] is request
        del self._items[at]

    def clear(self) -> None:
        """Take all out."""
        self._items.clear()

    def rank(self, request: Request) -> tuple[int, int]:
        """Order among waiting and running requests: the least is served first."""
        first = -request.priority if self._policy == "priority" else 0
        return (first, request.arrival)

    def ordered(self, match_length: Callable[[Request], int]) -> list[Request]:
        """The waiting requests that are not held, in the order they should be admitted in."""
        requests = [request for _, request in self._items]
        if self._held_from is not None:
            requests = [request for request in requests if request.arrival < self._held_from]
        if self._policy == "lpm" and len(requests) <= _LONGEST_MATCHED_QUEUE:
            requests.sort(key=match_length, reverse=True)
        return requests

    def hold_from(self, arrival: int | None) -> None:
        """Keep requests from that arrival number on waiting; None keeps none."""
        if arrival is None or self._held_from is None:
            self._held_from = arrival

    @property
    def has_eligible(self) -> bool:
        """Whether any waiting request is not held."""
        held_from = self._held_from
        if held_from is None:
            return bool(self._items)
        return any(request.arrival < held_from for _, request in self._items)

    def __iter__(self) -> Iterator[Request]:
        return iter([request for _, request in self._items])


def _rank_of_item(item: tuple[tuple[int, int], Request]) -> tuple[int, int]:
    return item[0]
