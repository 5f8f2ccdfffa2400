"""In which order a prefix tree gives pages up: the orders, and the queue that keeps them.

An order maps a node to a key; the unlocked leaf with the least key goes first. The same orders
serve window pages (cache/window_order.py). Keys of a node only ever grow, so an entry of the queue
is never late: one that is out of date is put back with today's key. Each node is in the queue at
most once, so the queue never outgrows the tree, and each take costs O(log nodes).
"""

import heapq
from typing import Protocol, TypeVar

from seawall.cache.node import TreeNode

Key = tuple[int, int]
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Standing(Protocol[T_co]):
    """What a key is made of: of a node, or as arrays of many window pages."""

    @property
    def last_used(self) -> T_co:
        """Logical time of the last use."""

    @property
    def num_hits(self) -> T_co:
        """How many uses there were."""

    @property
    def priority(self) -> T_co:
        """The highest that it was stored with."""


class EvictionOrder(Protocol):
    """Maps a standing to a key; the least goes first."""

    def __call__(self, standing: Standing[T], /) -> tuple[T, T]:
        """The key."""


def least_recently_used(standing: Standing[T]) -> tuple[T, T]:
    """What was last used longest ago goes first."""
    return standing.last_used, standing.last_used


def least_frequently_used(standing: Standing[T]) -> tuple[T, T]:
    """What was used least often goes first, then the least recently used."""
    return standing.num_hits, standing.last_used


def lowest_priority(standing: Standing[T]) -> tuple[T, T]:
    """What has the lowest priority goes first, then the least recently used."""
    return standing.priority, standing.last_used


EVICTION_ORDERS: dict[str, EvictionOrder] = {
    "lru": least_recently_used,
    "lfu": least_frequently_used,
    "priority": lowest_priority,
}


class EvictionQueue:
    """Nodes by their key. Written by one tree."""

    def __init__(self, order: EvictionOrder) -> None:
        self._order = order
        self._heap: list[tuple[Key, int, TreeNode]] = []
        self._queued: set[int] = set()

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, node: TreeNode) -> bool:
        return node.serial in self._queued

    def offer(self, node: TreeNode) -> None:
        """Add a node unless it is there."""
        if node.serial in self._queued:
            return
        self._queued.add(node.serial)
        heapq.heappush(self._heap, (self._order(node), node.serial, node))

    def take(self) -> tuple[TreeNode, bool] | None:
        """Take the first node out; also whether its key is still the one it was queued with."""
        if not self._heap:
            return None
        key, serial, node = heapq.heappop(self._heap)
        self._queued.discard(serial)
        return node, key == self._order(node)
