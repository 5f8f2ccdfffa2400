"""In which order the cached window pages go: the tree's policy (cache/eviction.py), page by page.

A node is too coarse for that: of a long prompt only the last window is used again and again. So a
window page has its own standing: when a match last ended behind it, how many did, and the highest
priority it was stored with. Owns these standings and the queue; locks and the mapping are the
window class's (cache/windows.py), its only writer.

    queue   runs of pages with one key, in position order, the least key first. A page whose key
            has changed since, or that is locked, is passed over when it is met; one is queued again
            when it is unlocked or its key changes, so it stands in the queue at most once with the
            key that it has. Rebuilt when it has grown to twice the pool, which costs O(1) for each
            page that was queued.
"""

import heapq

import numpy as np
import numpy.typing as npt

from seawall.cache.eviction import EvictionOrder, Key
from seawall.cache.pages import PageIds

_QUEUE_FACTOR = 2
_LOWEST = np.iinfo(np.int64).min

I64 = npt.NDArray[np.int64]


class _Standings:
    """Of some window pages what a tree node has of all its pages."""

    __slots__ = ("last_used", "num_hits", "priority")

    def __init__(self, last_used: I64, num_hits: I64, priority: I64) -> None:
        self.last_used = last_used
        self.num_hits = num_hits
        self.priority = priority


class WindowOrder:
    """Cached window pages by the key under which they go.

    Args:
        order: the tree's.
        locks: of each window page; only read here.
    """

    def __init__(self, order: EvictionOrder, locks: npt.NDArray[np.int32]) -> None:
        num_pages = len(locks)
        self._order = order
        self._locks = locks
        self._all = _Standings(
            np.zeros(num_pages, np.int64),
            np.zeros(num_pages, np.int64),
            np.full(num_pages, _LOWEST, np.int64),
        )
        self._is_queued = np.zeros(num_pages, np.bool_)
        self._heap: list[tuple[Key, int, PageIds]] = []
        self._num_queued = 0
        self._clock = 0

    def __len__(self) -> int:
        return len(self._heap)

    def renew(self, pages: PageIds, *, num_hits: int) -> None:
        """These pages, in position order, are the ones used last."""
        if not len(pages):
            return
        self._clock += 1
        self._all.last_used[pages] = self._clock
        self._all.num_hits[pages] += num_hits
        self._is_queued[pages] = False
        self.offer(pages)

    def raise_priority(self, pages: PageIds, priority: int) -> None:
        """These pages, in position order, have been stored with that priority."""
        pages = pages[self._all.priority[pages] < priority]
        if not len(pages):
            return
        before = self._keys(pages)
        self._all.priority[pages] = priority
        pages = pages[(self._keys(pages) != before).any(axis=0)]
        self._is_queued[pages] = False
        self.offer(pages)

    def offer(self, pages: PageIds) -> None:
        """Queue those of these pages, in position order, that are not locked and not there."""
        pages = pages[(self._locks[pages] == 0) & ~self._is_queued[pages]]
        if not len(pages):
            return
        self._is_queued[pages] = True
        kinds, kind_of = np.unique(self._keys(pages), axis=1, return_inverse=True)
        kind_of = kind_of.reshape(-1)
        for kind, (first, second) in enumerate(kinds.T.tolist()):
            self._clock += 1
            # Of equal keys what was queued last goes first: it is the later in position.
            self._push(((first, second), -self._clock, pages[kind_of == kind]))
        if self._num_queued > _QUEUE_FACTOR * len(self._locks):
            self._rebuild()

    def forget(self, pages: PageIds) -> None:
        """These pages are not cached any more."""
        self._all.last_used[pages] = 0
        self._all.num_hits[pages] = 0
        self._all.priority[pages] = _LOWEST
        self._is_queued[pages] = False

    def take(self, num_pages: int) -> PageIds:
        """Up to so many unlocked pages from the end of the first run; none if it is out of date."""
        key, serial, pages = heapq.heappop(self._heap)
        self._num_queued -= len(pages)
        pages = self._current(key, pages)
        keep = max(len(pages) - num_pages, 0)
        if keep:
            self._push((key, serial, pages[:keep]))
        self._is_queued[pages[keep:]] = False
        return pages[keep:]

    def _keys(self, pages: PageIds) -> I64:
        """The keys of pages, one in a column."""
        standings = self._all
        first, second = self._order(
            _Standings(
                standings.last_used[pages], standings.num_hits[pages], standings.priority[pages]
            )
        )
        keys: I64 = np.stack([first, second])
        return keys

    def _push(self, entry: tuple[Key, int, PageIds]) -> None:
        heapq.heappush(self._heap, entry)
        self._num_queued += len(entry[2])

    def _current(self, key: Key, pages: PageIds) -> PageIds:
        """Of a run the pages that still have its key; a locked one leaves the queue."""
        pages = pages[self._is_queued[pages]]
        if not len(pages):
            return pages
        pages = pages[(self._keys(pages) == np.array(key)[:, None]).all(axis=0)]
        is_locked = self._locks[pages] > 0
        self._is_queued[pages[is_locked]] = False
        return pages[~is_locked]

    def _rebuild(self) -> None:
        current = [(key, serial, self._current(key, pages)) for key, serial, pages in self._heap]
        self._heap = [entry for entry in current if len(entry[2])]
        heapq.heapify(self._heap)
        self._num_queued = sum(len(pages) for _, _, pages in self._heap)
