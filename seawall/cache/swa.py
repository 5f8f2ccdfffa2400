"""The window-aware radix cache: a radix tree whose pages may have lost their window pages.

    path       [page 0][page 1][page 2][page 3][page 4]
    window       -1       -1      w7      w2      w9       -> a match may end behind page 4 only if
                                                             the query there reads w7 on

Owns nothing of its own: the tree has the full pages and the order in which they are evicted, the
window class (cache/windows.py) has the mapping, the locks and the order of the window pages. This
module keeps the two together: what enters the tree enters it in both classes, what leaves it leaves
both, and what is matched has a whole window at its end. Written by leases only.
"""

from collections.abc import Sequence
from dataclasses import replace

from seawall.cache.node import TreeNode
from seawall.cache.pages import PageIds
from seawall.cache.prefix import CacheStats, InsertResult, Match, PrefixKey
from seawall.cache.radix import RadixCache
from seawall.cache.windows import WindowPages


class SwaCache:
    """A PrefixCache over two classes of pages."""

    def __init__(self, tree: RadixCache, windows: WindowPages) -> None:
        self._tree = tree
        self._windows = windows
        windows.open(tree.owner, "tree", tree=True)

    @property
    def root(self) -> TreeNode:
        """Where the prefix of no tokens ends."""
        return self._tree.root

    @property
    def owner(self) -> int:
        """Who the cached pages belong to in the ledger."""
        return self._tree.owner

    @property
    def num_evictable(self) -> int:
        """Full pages that `evict` could free now."""
        return self._tree.num_evictable

    def match(self, key: PrefixKey) -> Match:
        """Find the longest stored prefix behind which a whole window survives."""
        match = self._tree.match(key.head(self.measure(key)))
        return replace(match, num_asked=len(key))

    def measure(self, key: PrefixKey) -> int:
        """Tokens that `match` would find."""
        return self._windows.num_valid(self._tree.find(key)) * self._windows.page_size

    def use(self, match: Match) -> None:
        """Count a match that somebody goes on from, and renew it in both classes."""
        self._tree.use(match)
        self._windows.use(match.page_ids)

    def lock(self, node: TreeNode) -> None:
        """Protect the full pages of the prefix that ends in `node`; window pages have own locks."""
        self._tree.lock(node)

    def unlock(self, node: TreeNode) -> None:
        """Undo one lock."""
        self._tree.unlock(node)

    def insert(
        self, key: PrefixKey, page_ids: PageIds, owner: int, *, priority: int = 0
    ) -> InsertResult:
        """Store the whole pages of a key, with the window pages that they have.

        Where the tree has lost a window page it takes that of the caller's copy.
        """
        result = self._tree.insert(key, page_ids, owner, priority=priority)
        same = result.num_existing
        self._windows.heal(page_ids[:same], result.page_ids[:same], owner)
        self._windows.give_to_tree(result.page_ids[same:], owner)
        self._windows.stored(result.page_ids, same, priority)
        return result

    def evict(self, num_pages: int) -> int:
        """Free at least that many unlocked full pages, and the window pages on them."""
        num_evicted = 0
        for node in self._tree.remove_leaves(num_pages):
            self._windows.detach(node.page_ids, self._tree.owner)
            num_evicted += len(node.page_ids)
        return num_evicted

    def reset(self) -> bool:
        """Free everything unlocked; returns whether the tree is now empty."""
        self.evict(self._tree.num_evictable)
        return self._tree.reset()

    def audit(self) -> PageIds:
        """Pages that the tree has lost since the last audit."""
        return self._tree.audit()

    def locks_agree(self, num_holders: int) -> bool:
        """Whether the locks on full pages are as many as their holders, in sums."""
        return self._tree.locks_agree(num_holders)

    def relock(self, nodes: Sequence[TreeNode], *, report: bool = True) -> list[TreeNode]:
        """Count the locks on full pages anew."""
        return self._tree.relock(nodes, report=report)

    def stats(self) -> CacheStats:
        """Sizes and totals."""
        return self._tree.stats()
