"""The chunk cache: no reuse between requests, sharing within one.

Used when the radix cache is disabled. The samples of one request still share its whole prompt
pages: their keys carry an `extra_key` that is unique to the group, and what is stored under it
lives only while it is locked. A key without `extra_key` is never stored and never matched. The tree
inside, of one or two classes of pages, does the work; this module owns nothing else.
"""

from collections.abc import Sequence

import numpy as np

from seawall.cache.node import TreeNode
from seawall.cache.pages import PageIds
from seawall.cache.prefix import CacheStats, InsertResult, Match, PrefixKey
from seawall.cache.radix import RadixCache
from seawall.cache.swa import SwaCache


class ChunkCache:
    """A PrefixCache that forgets a prefix with its last lock."""

    def __init__(self, tree: RadixCache | SwaCache) -> None:
        self._tree = tree

    @property
    def owner(self) -> int:
        """Who the cached pages belong to in the ledger."""
        return self._tree.owner

    @property
    def num_evictable(self) -> int:
        """Pages inserted and not locked yet; none between the calls of a lease."""
        return self._tree.num_evictable

    def match(self, key: PrefixKey) -> Match:
        """Find what the samples of the same group have stored (never without an extra key)."""
        return self._tree.match(key)

    def measure(self, key: PrefixKey) -> int:
        """Tokens that `match` would find."""
        return self._tree.measure(key)

    def use(self, match: Match) -> None:
        """Count a match that somebody goes on from."""
        self._tree.use(match)

    def lock(self, node: TreeNode) -> None:
        """Keep the prefix that ends in `node`."""
        self._tree.lock(node)

    def unlock(self, node: TreeNode) -> None:
        """Undo one lock; what nobody has locked any more is freed."""
        self._tree.unlock(node)
        self._tree.evict(self._tree.num_evictable)

    def insert(
        self, key: PrefixKey, page_ids: PageIds, owner: int, *, priority: int = 0
    ) -> InsertResult:
        """Store the pages of a key that has an extra key; else nothing, and `owner` keeps them."""
        if key.extra_key is None:
            none = np.empty(0, np.int32)
            return InsertResult(node=self._tree.root, page_ids=none, num_existing=0)
        return self._tree.insert(key, page_ids, owner, priority=priority)

    def evict(self, num_pages: int) -> int:
        """Free unlocked pages; between the calls of a lease there are none."""
        return self._tree.evict(num_pages)

    def reset(self) -> bool:
        """Free everything unlocked; returns whether the cache is now empty."""
        return self._tree.reset()

    def audit(self) -> PageIds:
        """Pages that the tree inside has lost since the last audit."""
        return self._tree.audit()

    def locks_agree(self, num_holders: int) -> bool:
        """Whether the locks are as many as their holders, in sums."""
        return self._tree.locks_agree(num_holders)

    def relock(self, nodes: Sequence[TreeNode], *, report: bool = True) -> list[TreeNode]:
        """Count all locks anew."""
        return self._tree.relock(nodes, report=report)

    def stats(self) -> CacheStats:
        """Sizes and totals of the tree inside."""
        return self._tree.stats()
