"""The radix cache: a tree of token prefixes whose edges are whole pages.

Owns the tree, the lock counts and the eviction order; the pages it stores are its own in the page
ledger. It knows nothing of requests. Written by leases only.

    root --"page of tokens" (with the extra key)--> node [tokens, page ids] --> node ... --> leaf

    evictable   pages of nodes without locks. A lock counts on every node up to the root, so below
                an unlocked node nothing is locked and all of them can be evicted, leaves first.
    queue       unlocked leaves in the order in which they are evicted (cache/eviction.py). An
                entry that is no unlocked leaf any more is dropped when it is met, and comes back
                when it is one again.

Cost: a lookup takes one dictionary probe a node and one vectorised comparison of the tokens it
passes; a lock takes its depth; an eviction O(log nodes) a leaf. Time is a counter of calls.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from seawall.cache.eviction import EvictionOrder, EvictionQueue, least_recently_used
from seawall.cache.locks import TreeLocks
from seawall.cache.node import TreeNode
from seawall.cache.pages import SLOT_MASK, PageIds, PageLedger
from seawall.cache.prefix import CacheStats, InsertResult, Match, PrefixKey, common_length
from seawall.core.errors import PageError

_TRIM_PARTS = 16

_NO_PAGES: PageIds = np.empty(0, np.int32)
_NO_PAGES.flags.writeable = False


@dataclass(slots=True)
class _Totals:
    num_nodes: int = 0  # now; the others since the start
    most_nodes: int = 0
    most_pages: int = 0
    lookups: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0
    node_visits: int = 0


class RadixCache:
    """A PrefixCache that keeps what it is given until the pages are needed."""

    def __init__(
        self, ledger: PageLedger, page_size: int, order: EvictionOrder = least_recently_used
    ) -> None:
        assert page_size > 0, page_size
        self.root = TreeNode(tokens=_NO_PAGES, page_ids=_NO_PAGES, edge=b"", parent=None, serial=0)
        self.num_evictable = 0
        self.num_protected = 0
        self._locks = TreeLocks()
        self._ledger = ledger
        self._page_size = page_size
        self.owner = ledger.new_owner("tree", cached=True)
        self._queue = EvictionQueue(order)
        self._num_lost = 0  # pages of its nodes that an accounting fault took from it
        self._clock = 0
        self._serial = 0
        self._totals = _Totals()

    def match(self, key: PrefixKey) -> Match:
        """Find the longest stored prefix, in whole pages; order and totals stay as they are.

        A node that matches in part is split, so that the match ends at a node's end and a lock
        protects the matched pages and no others.
        """
        node, found = self.root, list[PageIds]()
        for child, same in self._steps(key, len(key) // self._page_size):
            node = child if same == len(child.page_ids) else self._split(child, same)
            found.append(node.page_ids)
        page_ids = np.concatenate(found) if found else _NO_PAGES
        num_tokens = len(page_ids) * self._page_size
        return Match(page_ids=page_ids, num_tokens=num_tokens, num_asked=len(key), node=node)

    def measure(self, key: PrefixKey) -> int:
        """Tokens that `match` would find; changes nothing."""
        return len(self.find(key)) * self._page_size

    def find(self, key: PrefixKey) -> PageIds:
        """Pages of the longest stored prefix; changes nothing."""
        steps = self._steps(key, len(key) // self._page_size)
        return np.concatenate([_NO_PAGES, *(child.page_ids[:same] for child, same in steps)])

    def use(self, match: Match) -> None:
        """Somebody goes on from this match, whose node is locked: it counts, and it is renewed."""
        self._totals.lookups += 1
        self._totals.lookup_tokens += match.num_asked
        self._totals.hit_tokens += match.num_tokens
        self._clock += 1
        step: TreeNode | None = match.node
        while step is not None:
            step.last_used = self._clock
            step.num_hits += 1
            step = step.parent

    def lock(self, node: TreeNode) -> None:
        """Protect the prefix that ends in `node` from eviction; O(depth)."""
        if node.parent is None and node is not self.root:
            raise PageError("lock of a node that was evicted; lock right after match or insert")
        step: TreeNode | None = node
        while step is not None:
            self._totals.node_visits += 1
            if self._locks.lock(step):
                self.num_evictable -= len(step.page_ids)
                self.num_protected += len(step.page_ids)
            step = step.parent

    def unlock(self, node: TreeNode) -> None:
        """Undo one lock; O(depth)."""
        if node.num_locks == 0:
            raise PageError("unlock of a node that is not locked; unlock once for each lock")
        step: TreeNode | None = node
        while step is not None:
            self._totals.node_visits += 1
            if self._locks.unlock(step):
                self.num_evictable += len(step.page_ids)
                self.num_protected -= len(step.page_ids)
                self._offer(step)
            step = step.parent

    def insert(
        self, key: PrefixKey, page_ids: PageIds, owner: int, *, priority: int = 0
    ) -> InsertResult:
        """Store the whole pages of a key that both the key and `page_ids` cover.

        Those not yet stored pass from `owner` to the tree and make one new leaf.
        """
        num_pages = min(len(key) // self._page_size, len(page_ids))
        node, found = self._walk(key, num_pages, priority)
        num_existing = sum(map(len, found))
        fresh = page_ids[num_existing:num_pages]
        num_moved = self._ledger.transfer(fresh, owner, self.owner) if len(fresh) else 0
        if num_moved:
            node = self._attach(node, key, num_existing, fresh[:num_moved].copy(), priority)
            found.append(node.page_ids)
        held = np.concatenate(found) if found else _NO_PAGES
        return InsertResult(node=node, page_ids=held, num_existing=num_existing)

    def evict(self, num_pages: int) -> int:
        """Free at least that many unlocked pages, or all there are; returns how many left the tree.

        Of a leaf that has more than is needed only the tail goes, but at least one part in
        _TRIM_PARTS, so that taking page after page from a long leaf copies O(1) pages for each.
        """
        return sum(len(node.page_ids) for node in self.remove_leaves(num_pages))

    def remove_leaves(self, num_pages: int) -> list[TreeNode]:
        """Evict as `evict` does and return the nodes that have left the tree.

        Their pages are free already; the nodes still tell which pages those were.
        """
        removed: list[TreeNode] = []
        num_evicted = 0
        while num_evicted < num_pages:
            leaf = self._next_leaf()
            if leaf is None:
                break
            size = len(leaf.page_ids)
            keep = size - max(num_pages - num_evicted, -(-size // _TRIM_PARTS))
            if keep > 0:
                self._split(leaf, keep)
            self._remove(leaf)
            removed.append(leaf)
            num_evicted += len(leaf.page_ids)
        if removed:
            self._totals.evicted_pages += num_evicted
            pages = np.concatenate([leaf.page_ids for leaf in removed])
            self._num_lost -= len(pages) - self._ledger.free(pages, self.owner)
        return removed

    def reset(self) -> bool:
        """Free everything unlocked; returns whether the tree is now empty."""
        self.evict(self.num_evictable)
        return self._totals.num_nodes == 0

    def audit(self) -> PageIds:
        """Compare the tree's own sum with the ledger; O(1) as long as they agree.

        Returns:
            Pages that the tree has lost since the last audit; usually none.
        """
        believed = self.num_evictable + self.num_protected
        if self._ledger.held[self.owner & SLOT_MASK] == believed - self._num_lost:
            return _NO_PAGES
        pages = [node.page_ids for node in self.nodes()]
        lost = self._ledger.reconcile(self.owner, np.concatenate([_NO_PAGES, *pages]))
        self._num_lost = len(lost)
        self._recount()
        return lost

    def locks_agree(self, num_holders: int) -> bool:
        """Whether the locks are as many as their holders, in sums; O(locked nodes)."""
        return self.root.num_locks == num_holders and self._locks.add_up

    def relock(self, nodes: Sequence[TreeNode], *, report: bool = True) -> list[TreeNode]:
        """Count all locks anew: one on each of these nodes and on all above it.

        Returns:
            The nodes; the root in place of one that has left the tree.
        """
        before = {node: node.num_locks for node in (self.root, *self.nodes())}
        for node in before:
            node.num_locks = 0
        self._locks.clear()
        self._recount(report=report)
        kept = [node if self._has(node) else self.root for node in nodes]
        for node in kept:
            self.lock(node)
        for node in before:
            self._offer(node)
        if report:
            self._report_locks(before, nodes, kept)
        return kept

    def _report_locks(
        self, before: dict[TreeNode, int], nodes: Sequence[TreeNode], kept: Sequence[TreeNode]
    ) -> None:
        for node, now in zip(nodes, kept, strict=True):
            if node is not now:
                said = f"the node of page {node.page_ids[0]} was evicted while it was locked"
                self._ledger.report("sum", "audit", None, "tree", said)
        for node, was in before.items():
            if node.num_locks != was:
                name = "the root" if node is self.root else f"the node of page {node.page_ids[0]}"
                said = f"{name} counted {was} locks, {node.num_locks} leases and holds have it"
                self._ledger.report("sum", "audit", None, "tree", said)

    def stats(self) -> CacheStats:
        """Sizes and totals."""
        totals = self._totals
        return CacheStats(
            evictable_pages=self.num_evictable,
            protected_pages=self.num_protected,
            num_nodes=totals.num_nodes,
            most_nodes=totals.most_nodes,
            most_pages=totals.most_pages,
            num_lookups=totals.lookups,
            lookup_tokens=totals.lookup_tokens,
            hit_tokens=totals.hit_tokens,
            evicted_pages=totals.evicted_pages,
            node_visits=totals.node_visits,
        )

    def nodes(self) -> Iterator[TreeNode]:
        """Every node but the root, parents first; for reports and tests."""
        pending = list(self.root.children.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def _steps(self, key: PrefixKey, num_pages: int) -> Iterator[tuple[TreeNode, int]]:
        """Follow a key down: each node on its way, and how many of its pages the key has.

        Only the last node can have more. The caller may split it.
        """
        size = self._page_size
        node, done = self.root, 0
        while done < num_pages:
            self._totals.node_visits += 1
            child = node.children.get(self._edge(key, done))
            if child is None:
                return
            num_left = len(child.page_ids)
            same = common_length(child.tokens, key.tokens[done * size : num_pages * size]) // size
            yield child, same
            if same < num_left:
                return
            done += same
            node = child

    def _walk(
        self, key: PrefixKey, num_pages: int, priority: int
    ) -> tuple[TreeNode, list[PageIds]]:
        """The node at the end of the stored part of a key to be stored, and the pages up to it."""
        self._clock += 1
        node, found = self.root, list[PageIds]()
        for child, same in self._steps(key, num_pages):
            node = child if same == len(child.page_ids) else self._split(child, same)
            node.last_used = self._clock
            node.priority = max(node.priority, priority)
            found.append(node.page_ids)
        return node, found

    def _edge(self, key: PrefixKey, page: int) -> bytes:
        start = page * self._page_size
        tokens = key.tokens[start : start + self._page_size].tobytes()
        if page or key.extra_key is None:
            return tokens
        # Tokens have a fixed length, so what stands in front of them is unambiguous; the mark tells
        # an empty extra key from none.
        return b"+" + key.extra_key.encode("utf-8", "surrogatepass") + tokens

    def _attach(
        self, parent: TreeNode, key: PrefixKey, start: int, page_ids: PageIds, priority: int
    ) -> TreeNode:
        size = self._page_size
        self._serial += 1
        leaf = TreeNode(
            tokens=key.tokens[start * size : (start + len(page_ids)) * size].copy(),
            page_ids=page_ids,
            edge=self._edge(key, start),
            parent=parent,
            serial=self._serial,
        )
        leaf.last_used = self._clock
        leaf.priority = priority
        parent.children[leaf.edge] = leaf
        self.num_evictable += len(page_ids)
        self._count_node()
        self._offer(leaf)
        return leaf

    def _split(self, node: TreeNode, num_pages: int) -> TreeNode:
        self._serial += 1
        self._count_node()
        upper = node.split(num_pages, self._serial)
        self._locks.split(upper)
        return upper

    def _count_node(self) -> None:
        totals = self._totals
        totals.num_nodes += 1
        totals.most_nodes = max(totals.most_nodes, totals.num_nodes)
        totals.most_pages = max(totals.most_pages, self.num_evictable + self.num_protected)

    def _remove(self, leaf: TreeNode) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.edge]
        leaf.parent = None
        self._totals.num_nodes -= 1
        self.num_evictable -= len(leaf.page_ids)
        self._offer(parent)

    def _has(self, node: TreeNode) -> bool:
        while node.parent is not None:
            node = node.parent
        return node is self.root

    def _recount(self, *, report: bool = True) -> None:
        """Make the sums of pages what the nodes say; in between, a difference is a fault."""
        was = self.num_evictable, self.num_protected
        nodes = list(self.nodes())
        self.num_protected = sum(len(node.page_ids) for node in nodes if node.num_locks)
        self.num_evictable = sum(len(node.page_ids) for node in nodes) - self.num_protected
        if report and sum(was) != self.num_evictable + self.num_protected:
            said = f"{was} evictable and protected pages were counted, its nodes have "
            said += f"{(self.num_evictable, self.num_protected)}"
            self._ledger.report("sum", "audit", None, "tree", said)

    def _offer(self, node: TreeNode) -> None:
        """Queue a node for eviction if it is an unlocked leaf."""
        if not node.children and not node.num_locks and node is not self.root:
            self._queue.offer(node)

    def _next_leaf(self) -> TreeNode | None:
        """Take the unlocked leaf that goes first out of the queue."""
        while (taken := self._queue.take()) is not None:
            node, is_current = taken
            self._totals.node_visits += 1
            if not is_current:
                self._offer(node)
            elif not node.children and not node.num_locks:
                return node
        return None
