"""Seats: which row of the device's tables a running request has, and the lease that goes with it.

Owns who sits where. It knows nothing of when somebody is seated or unseated, which is the matter of
the scheduler, its only writer.
"""

import heapq

from seawall.cache.lease import Lease
from seawall.core.request import Request


class Seats:
    """Who sits where with which pages; an epoch tells an admission from earlier ones."""

    def __init__(self, count: int) -> None:
        self.free = list(range(count))
        self._holders: list[tuple[Request, Lease] | None] = [None] * count
        self._num_taken = 0
        self.most_taken = 0

    def take(self, request: Request, lease: Lease) -> None:
        """Give the request the lowest free seat."""
        self._num_taken += 1
        request.seat, request.epoch = heapq.heappop(self.free), self._num_taken
        self._holders[request.seat] = (request, lease)
        self.most_taken = max(self.most_taken, len(self._holders) - len(self.free))

    def give(self, request: Request) -> Lease:
        """Free the request's seat; returns the lease that went with it."""
        lease = self.lease(request)
        self._holders[request.seat] = None
        heapq.heappush(self.free, request.seat)
        return lease

    def clear(self) -> None:
        """Nobody sits anywhere; epochs go on, so that steps in flight meet nobody."""
        self.free = list(range(len(self._holders)))
        self._holders = [None] * len(self._holders)

    def lease(self, request: Request) -> Lease:
        """The pages of a seated request."""
        holder = self._holders[request.seat]
        assert holder is not None and holder[0] is request
        return holder[1]

    def holder(self, seat: int, epoch: int) -> Request | None:
        """The request that has sat there since `epoch`, if it still does."""
        holder = self._holders[seat]
        return holder[0] if holder is not None and holder[0].epoch == epoch else None
