"""A reference model of ledger, tree and leases, driven by random operations.

The model writes down, for every KV slot, which prefix its content was computed from. After each
operation it looks at the real owner table, tree and leases: every page has one owner, the sums are
exact, and each open lease still reads, at each of its positions, the KV of its own tokens. The last
is what fails when a locked page is evicted, a page is handed out twice or a wrong page is matched.
"""

import os
from collections.abc import Sequence

import numpy as np

from seawall.cache.chunk import ChunkCache
from seawall.cache.lease import Lease, LeaseBook, PrefixHold
from seawall.cache.pages import FREE, QUARANTINE, PageLedger
from seawall.cache.radix import RadixCache


def contents_of(tokens: np.ndarray, extra_key: str | None) -> np.ndarray:
    """What each position's KV is computed from: the extra key and all tokens up to it, hashed."""
    state, contents = hash(("extra", extra_key)), []
    for token in tokens.tolist():
        state = hash((state, token))
        contents.append(state)
    return np.array(contents, np.int64)


def soak_factor() -> int:
    """How many times the ordinary counts to run."""
    return 20 if os.environ.get("SEAWALL_SOAK") == "1" else 1


class Running:
    """What the model knows of one request: [0, computed) is written, [0, len(tokens)) is wanted."""

    def __init__(self, lease: Lease, tokens: np.ndarray, extra_key: str | None) -> None:
        self.lease = lease
        self.tokens = tokens
        self.extra_key = extra_key
        self.computed = lease.num_cached_tokens
        self.contents = contents_of(tokens, extra_key)

    def set_tokens(self, tokens: np.ndarray) -> None:
        self.tokens = tokens
        self.contents = contents_of(tokens, self.extra_key)


class CacheMachine:
    """The real parts, the model beside them, and one method for each operation."""

    def __init__(self, *, num_pages: int, page_size: int, chunk: bool = False) -> None:
        self.page_size = page_size
        self.ledger = PageLedger(num_pages, debug=True)
        chunk_cache = ChunkCache(self.ledger, page_size)
        self.tree = chunk_cache._tree if chunk else RadixCache(self.ledger, page_size)
        self.chunk = chunk
        self.book = LeaseBook(self.ledger, chunk_cache if chunk else self.tree, page_size)
        self.running: list[Running] = []
        self.holds: list[PrefixHold] = []
        self.slots = np.zeros(num_pages * page_size, np.int64)
        self.num_opened = 0
        self.num_operations = 0

    def prompt(self, blocks: Sequence[int], tail: int, *, twist: bool) -> np.ndarray:
        """Tokens of whole blocks (so that prefixes are shared) and a part of a block.

        A twist changes the last token of the last block: prompts that part inside a page.
        """
        size = self.page_size
        tokens = np.repeat(np.array(blocks, np.int32), size)
        tokens = np.concatenate([tokens, np.full(tail % size, 7, np.int32)])
        if twist and len(tokens):
            tokens[-1] += 100
        return tokens

    def open(self, tokens: np.ndarray, extra_key: str | None, max_match: int) -> None:
        expected = self._longest_stored(tokens[: max(0, max_match)], extra_key)
        if self.chunk and extra_key is None:
            expected = 0
        rid = f"r{self.num_opened}"
        self.num_opened += 1
        lease = self.book.open(rid, tokens, extra_key, max_match_tokens=max_match)
        assert lease.num_cached_tokens == expected
        assert lease.num_tokens == lease.writable_from == expected
        assert lease.num_own == 0
        self.running.append(Running(lease, tokens, extra_key))

    def reserve_and_write(self, which: int, num_new: int) -> None:
        """Compute up to `num_new` more positions, sampling tokens beyond the prompt."""
        run = self.running[which % len(self.running)]
        lease = run.lease
        end = run.computed + num_new
        before, available = lease.page_ids.copy(), self.book.available_pages
        counts = self.ledger.counts()
        need = -(-end // self.page_size) - len(before)
        granted = lease.reserve(end)
        assert granted == (need <= available)
        if not granted:
            assert np.array_equal(lease.page_ids, before)
            assert self.ledger.counts() == counts
            return
        assert lease.num_tokens >= end
        assert np.array_equal(lease.page_ids[: len(before)], before)
        self._scribble(lease.page_ids[len(before) :])
        if end > len(run.tokens):
            sampled = np.full(end - len(run.tokens), self.num_operations % 2, np.int32)
            run.set_tokens(np.concatenate([run.tokens, sampled]))
        assert run.computed >= lease.writable_from
        self.slots[self._slots(lease)[run.computed : end]] = run.contents[run.computed : end]
        run.computed = end

    def commit(self, which: int) -> None:
        run = self.running[which % len(self.running)]
        lease = run.lease
        before, shared = lease.page_ids.copy(), lease.num_shared
        stored = self._longest_stored(run.tokens[: run.computed], run.extra_key)
        changed = lease.commit(run.tokens, run.computed)
        differs = np.flatnonzero(lease.page_ids != before).tolist()
        assert differs == list(changed)
        whole = run.computed // self.page_size
        if self.chunk and run.extra_key is None:
            assert lease.num_shared == 0
        else:
            assert lease.num_shared == max(shared, whole)
            assert len(changed) == max(0, stored // self.page_size - shared)

    def truncate(self, which: int, num_tokens: int) -> None:
        run = self.running[which % len(self.running)]
        lease = run.lease
        before = lease.page_ids.copy()
        freed = lease.truncate(num_tokens)
        keep = max(-(-num_tokens // self.page_size), lease.num_shared)
        assert lease.num_pages == min(keep, len(before)) == len(before) - freed
        run.computed = min(run.computed, max(num_tokens, lease.writable_from))
        run.set_tokens(run.tokens[: max(run.computed, 1)])

    def hold(self, which: int) -> None:
        self.holds.append(self.running[which % len(self.running)].lease.hold())

    def release_hold(self, which: int) -> None:
        self.holds.pop(which % len(self.holds)).release()

    def release(self, which: int, *, insert: bool) -> None:
        run = self.running.pop(which % len(self.running))
        run.lease.release(run.tokens, run.computed, insert=insert)
        if insert and not self.chunk:
            whole = run.computed - run.computed % self.page_size
            assert self._longest_stored(run.tokens[: run.computed], run.extra_key) == whole

    def evict(self, num_pages: int) -> None:
        free, evictable = self.ledger.num_free, self.tree.num_evictable
        freed = self.tree.evict(num_pages)
        assert self.ledger.num_free == free + freed
        assert min(num_pages, evictable) <= freed <= evictable

    def flush(self) -> None:
        emptied = self.tree.reset()
        assert self.tree.num_evictable == 0
        assert emptied == (self.tree.num_protected == 0) == (not list(self.tree.nodes()))

    def close(self) -> None:
        """End everything; every page must be back."""
        while self.running:
            self.release(len(self.running), insert=len(self.running) % 2 == 0)
        while self.holds:
            self.release_hold(0)
        self.check()
        if self.chunk:
            assert self.ledger.num_free == self.ledger.num_pages
        self.flush()
        self.check()
        assert self.ledger.num_free == self.ledger.num_pages
        assert self.book.num_open == 0

    def check(self) -> None:
        """Everything that must hold between two operations."""
        self.num_operations += 1
        assert self.book.check()
        self._check_owners()
        self._check_tree()
        for run in self.running:
            lease = run.lease
            assert np.array_equal(np.sort(lease.page_ids[lease.num_shared :]), self._own(lease))
            read = self.slots[self._slots(lease)[: run.computed]]
            assert np.array_equal(read, run.contents[: run.computed])

    def _check_owners(self) -> None:
        tree_pages = [page for node in self.tree.nodes() for page in node.page_ids.tolist()]
        lease_pages = [page for run in self.running for page in self._own(run.lease).tolist()]
        free = self.ledger.pages_of(FREE).tolist()
        counts = self.ledger.counts()
        assert sorted(tree_pages + lease_pages + free) == list(range(self.ledger.num_pages))
        assert (counts.free, counts.cached, counts.in_use) == (
            len(free),
            len(tree_pages),
            len(lease_pages),
        )
        assert counts.quarantined == 0 == len(self.ledger.pages_of(QUARANTINE))
        assert set(map(self.ledger.owner_of, tree_pages)) <= {"tree"}

    def _check_tree(self) -> None:
        evictable = protected = num_nodes = 0
        queued = [entry[-1] for entry in self.tree._queue]
        assert len(set(map(id, queued))) == len(queued)
        locks = {id(node): 0 for node in self.tree.nodes()} | {id(self.tree.root): 0}
        held = [run.lease._node for run in self.running] + [hold._node for hold in self.holds]
        for node in held:
            while node is not None:
                locks[id(node)] += 1
                node = node.parent
        assert self.tree.root.num_locks == locks[id(self.tree.root)]
        for node in self.tree.nodes():
            num_nodes += 1
            assert node.parent is not None
            assert node.parent.children[node.edge] is node
            assert len(node.tokens) == len(node.page_ids) * self.page_size > 0
            assert node.num_locks == locks[id(node)]
            assert node.parent is self.tree.root or node.parent.last_used >= node.last_used
            if node.num_locks:
                protected += len(node.page_ids)
            else:
                evictable += len(node.page_ids)
                assert node.children or node.queued
        stats = self.tree.stats()
        assert (stats.evictable_pages, stats.protected_pages) == (evictable, protected)
        assert stats.num_nodes == num_nodes
        if self.chunk:
            assert evictable == 0

    def _longest_stored(self, tokens: np.ndarray, extra_key: str | None) -> int:
        """Whole-page tokens that the tree holds, found by looking at all of its pages' contents."""
        size = self.page_size
        stored = {
            int(self.slots[(page + 1) * size - 1])
            for node in self.tree.nodes()
            for page in node.page_ids.tolist()
        }
        whole = 0
        for content in contents_of(tokens, extra_key)[size - 1 :: size].tolist():
            if content not in stored:
                break
            whole += size
        return whole

    def _scribble(self, page_ids: np.ndarray) -> None:
        self.slots.reshape(-1, self.page_size)[page_ids] = 0

    def _slots(self, lease: Lease) -> np.ndarray:
        """Slot of each position that the lease has a page for."""
        first = lease.page_ids.astype(np.int64) * self.page_size
        return (first[:, None] + np.arange(self.page_size)).ravel()

    def _own(self, lease: Lease) -> np.ndarray:
        return self.ledger.pages_of(lease.owner)
