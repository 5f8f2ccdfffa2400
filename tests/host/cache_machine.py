"""A reference model of ledgers, tree, windows and leases, driven by random operations.

The model writes down, for every KV slot of each class, which prefix its content was computed from.
After each operation it looks at the real owner tables, tree and leases: every page has one owner,
the sums are exact, and each open lease still reads, at each position that its next query sees, the
KV of its own tokens. The last is what fails when a locked page is evicted, a page is handed out
twice, a wrong page is matched or a window page is given back too early.
"""

import os
from collections.abc import Sequence

import numpy as np

from seawall.cache.chunk import ChunkCache
from seawall.cache.eviction import EVICTION_ORDERS
from seawall.cache.lease import Lease, LeaseBook, PrefixHold
from seawall.cache.no_windows import NoWindows
from seawall.cache.pages import FREE, QUARANTINE, PageLedger
from seawall.cache.radix import RadixCache
from seawall.cache.swa import SwaCache
from seawall.cache.windows import WindowPages


def contents_of(tokens: np.ndarray, extra_key: str | None) -> np.ndarray:
    """What each position's KV is computed from: the extra key and all tokens up to it, hashed."""
    start = -1 if extra_key is None else sum(extra_key.encode()) + 1
    places = np.arange(1, len(tokens) + 1, dtype=np.uint64)
    mixed = tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + places
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
    return np.cumsum(mixed, dtype=np.uint64).astype(np.int64) + start


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

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        chunk: bool = False,
        policy: str = "lru",
        window: int | None = None,
        num_window_pages: int = 0,
    ) -> None:
        self.page_size = page_size
        self.window = window
        self.ledger = PageLedger(num_pages, debug=True)
        self.tree = RadixCache(self.ledger, page_size, EVICTION_ORDERS[policy])
        self.windows: WindowPages | NoWindows = NoWindows()
        cache: RadixCache | SwaCache = self.tree
        if window is not None:
            self.windows = WindowPages(
                PageLedger(num_window_pages, debug=True),
                num_full_pages=num_pages,
                page_size=page_size,
                window=window,
                order=EVICTION_ORDERS[policy],
            )
            cache = SwaCache(self.tree, self.windows)
        self.cache = cache
        self.chunk = chunk
        self.book = LeaseBook(
            self.ledger, ChunkCache(cache) if chunk else cache, page_size, windows=self.windows
        )
        self.running: list[Running] = []
        self.holds: list[PrefixHold] = []
        self.slots = np.zeros(num_pages * page_size, np.int64)
        self.window_slots = np.zeros(max(num_window_pages, 1) * page_size, np.int64)
        self.num_opened = 0
        self.num_window_evictions = 0
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
        expected = self._longest_valid(tokens[: max(0, max_match)], extra_key)
        if self.chunk and extra_key is None:
            expected = 0
        rid = f"r{self.num_opened}"
        self.num_opened += 1
        lease = self.book.open(rid, tokens, extra_key, max_match_tokens=max_match)
        assert lease.num_cached_tokens == expected
        assert lease.num_tokens == lease.writable_from == expected
        assert lease.num_own == 0
        assert lease.reads_from(max(expected - 1, 0))
        if self.num_opened % 4:
            lease.confirm()
        self.running.append(Running(lease, tokens, extra_key))

    def reserve_and_write(self, which: int, num_new: int) -> None:
        """Compute up to `num_new` more positions, sampling tokens beyond the prompt."""
        run = self.running[which % len(self.running)]
        lease = run.lease
        end = run.computed + num_new
        before = lease.page_ids.copy()
        available = min(self.book.available_pages, self.book.available_windows)
        counts = self.counts()
        need = -(-end // self.page_size) - len(before)
        granted = lease.reserve(end)
        assert granted == (need <= available)
        if not granted:
            assert np.array_equal(lease.page_ids, before)
            assert self.counts() == counts
            return
        assert lease.num_tokens >= end
        assert np.array_equal(lease.page_ids[: len(before)], before)
        self._scribble(lease.page_ids[len(before) :])
        if end > len(run.tokens):
            sampled = np.full(end - len(run.tokens), self.num_operations % 2, np.int32)
            run.set_tokens(np.concatenate([run.tokens, sampled]))
        assert run.computed >= lease.writable_from
        positions = np.arange(run.computed, end)
        self.slots[self._slots(lease.page_ids, positions)] = run.contents[run.computed : end]
        if isinstance(self.windows, WindowPages):
            into = self._slots(self.windows.of(lease.page_ids), positions)
            self.window_slots[into] = run.contents[run.computed : end]
        run.computed = end

    def slide(self, which: int) -> None:
        """Give back the window pages that the next query does not read."""
        run = self.running[which % len(self.running)]
        before, held = run.lease.window_from, self.windows.num_held(run.lease.owner)
        run.lease.slide(run.computed)
        assert run.lease.window_from == max(
            before, min(self.windows.first_kept(run.computed), run.lease.num_pages)
        )
        assert self.windows.num_held(run.lease.owner) <= held

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
        if not lease.reads_from(min(run.computed, max(num_tokens, lease.writable_from))):
            return
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

    def evict_windows(self, num_pages: int) -> None:
        free, evictable = self.windows.num_free, self.windows.num_evictable
        freed = self.windows.evict(num_pages)
        self.num_window_evictions += freed
        assert freed == min(num_pages, evictable)
        if isinstance(self.windows, WindowPages):
            assert self.windows.num_free == free + freed

    def evict(self, num_pages: int) -> None:
        free, evictable = self.ledger.num_free, self.tree.num_evictable
        freed = self.cache.evict(num_pages)
        assert self.ledger.num_free == free + freed
        assert min(num_pages, evictable) <= freed <= evictable

    def flush(self) -> None:
        emptied = self.cache.reset()
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
        if isinstance(self.windows, WindowPages):
            assert self.windows.ledger.num_free == self.windows.ledger.num_pages
            assert not self.windows._locks.any()
        assert self.book.num_open == 0

    def check_owners(self) -> None:
        """Each page of each class has the one owner that lists it, and the sums are exact."""
        self.num_operations += 1
        assert self.book.audit() == []
        leases = [run.lease for run in self.running]
        owners = [self.tree.owner] * self.tree.stats().num_nodes + [x.owner for x in leases]
        lists = [node.page_ids for node in self.tree.nodes()]
        lists += [lease.page_ids[lease.num_shared :] for lease in leases]
        sizes = [len(page_ids) for page_ids in lists]
        pages = np.concatenate([np.empty(0, np.int32), *lists])
        self._check_one_owner(self.ledger, pages, np.repeat(np.array(owners, np.int64), sizes))
        if isinstance(self.windows, WindowPages):
            handles = np.array([self.windows._owners[owner] for owner in owners], np.int64)
            window_pages = self.windows.of(pages)
            has = window_pages >= 0
            owners_of_windows = np.repeat(handles, sizes)[has]
            self._check_one_owner(self.windows.ledger, window_pages[has], owners_of_windows)

    def _check_one_owner(self, ledger: PageLedger, pages: np.ndarray, owners: np.ndarray) -> None:
        expected = np.full(ledger.num_pages, FREE, np.int64)
        expected[pages] = owners
        assert np.array_equal(ledger._owner, expected)
        assert ledger.num_free == ledger.num_pages - len(pages)

    def check(self) -> None:
        """Everything that must hold between two operations."""
        self.check_owners()
        assert self.book.check()
        self._check_counts()
        self._check_tree()
        for run in self.running:
            lease = run.lease
            assert np.array_equal(np.sort(lease.page_ids[lease.num_shared :]), self._own(lease))
            read = self.slots[self._slots(lease.page_ids, np.arange(run.computed))]
            assert np.array_equal(read, run.contents[: run.computed])
            if self.window is not None:
                self._check_window(run)
        if isinstance(self.windows, WindowPages):
            self._check_window_locks(self.windows)

    def counts(self) -> tuple[object, ...]:
        """Everything that an operation which says no must leave alone."""
        windows = self.windows
        other = windows.ledger.counts() if isinstance(windows, WindowPages) else None
        return self.ledger.counts(), other

    def _check_window_locks(self, windows: WindowPages) -> None:
        """One lock for each lease and hold that reads a cached window page, and no other."""
        expected = np.zeros(windows.ledger.num_pages, np.int32)
        locked = [r.lease.page_ids[r.lease.window_from : r.lease.num_shared] for r in self.running]
        for page_ids in (*locked, *(hold._in_window for hold in self.holds)):
            expected[windows.of(page_ids)] += 1
        assert np.array_equal(windows._locks, expected)

    def _check_window(self, run: Running) -> None:
        """The next query sees its window, and no page more is held than must be."""
        assert isinstance(self.windows, WindowPages) and self.window is not None
        lease = run.lease
        assert lease.reads_from(run.computed)
        seen = np.arange(max(run.computed + 1 - self.window, 0), run.computed)
        read = self.window_slots[self._slots(self.windows.of(lease.page_ids), seen)]
        assert np.array_equal(read, run.contents[seen])
        assert self.windows.num_held(lease.owner) == max(lease.num_own_windows, 0)
        own = self.windows.of(lease.page_ids[lease.num_shared :])
        assert (own >= 0).sum() == lease.num_own_windows

    def _check_counts(self) -> None:
        counts = self.ledger.counts()
        cached = sum(len(node.page_ids) for node in self.tree.nodes())
        in_use = sum(run.lease.num_own for run in self.running)
        assert (counts.cached, counts.in_use) == (cached, in_use)
        assert counts.free == len(self.ledger.pages_of(FREE))
        assert counts.quarantined == 0 == len(self.ledger.pages_of(QUARANTINE))

    def _check_tree(self) -> None:
        evictable = protected = num_nodes = 0
        queued = [entry[-1] for entry in self.tree._queue._heap]
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
                assert node.children or node in self.tree._queue
        stats = self.tree.stats()
        assert (stats.evictable_pages, stats.protected_pages) == (evictable, protected)
        assert stats.num_nodes == num_nodes
        if self.chunk:
            assert evictable == 0

    def _chain(self, tokens: np.ndarray, extra_key: str | None) -> np.ndarray:
        """The tree's pages of the longest stored prefix, found by looking at pages' contents."""
        size = self.page_size
        pages = self.ledger.pages_of(self.tree.owner)
        last = self.slots[(pages + 1) * size - 1]
        wanted = contents_of(tokens, extra_key)[size - 1 :: size]
        order = np.argsort(last)
        at = np.minimum(np.searchsorted(last, wanted, sorter=order), max(len(pages) - 1, 0))
        if not len(pages):
            return pages
        found = pages[order[at]]
        differs = np.flatnonzero(last[order[at]] != wanted)
        return found[: int(differs[0])] if len(differs) else found

    def _longest_stored(self, tokens: np.ndarray, extra_key: str | None) -> int:
        return len(self._chain(tokens, extra_key)) * self.page_size

    def _longest_valid(self, tokens: np.ndarray, extra_key: str | None) -> int:
        """The longest stored prefix behind which the next query sees its whole window."""
        chain, size = self._chain(tokens, extra_key), self.page_size
        if not isinstance(self.windows, WindowPages) or self.window is None:
            return len(chain) * size
        has = (self.windows.of(chain) >= 0).tolist()
        for end in range(len(chain) * size, 0, -size):
            if all(has[max(end - self.window, 0) // size : end // size]):
                return end
        return 0

    def _scribble(self, page_ids: np.ndarray) -> None:
        self.slots.reshape(-1, self.page_size)[page_ids] = 0
        if isinstance(self.windows, WindowPages):
            self.window_slots.reshape(-1, self.page_size)[self.windows.of(page_ids)] = 0

    def _slots(self, page_ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Slot of each position."""
        size = self.page_size
        return page_ids[positions // size].astype(np.int64) * size + positions % size

    def _own(self, lease: Lease) -> np.ndarray:
        return self.ledger.pages_of(lease.owner)


def random_operation(machine: CacheMachine, rng: np.random.Generator) -> None:
    """One operation, chosen and sized at random."""
    kind = float(rng.random())
    if len(machine.running) < 2 or (kind < 0.2 and len(machine.running) < 6):
        blocks = rng.integers(0, 2, rng.integers(0, 8)).tolist()
        tokens = machine.prompt(blocks, int(rng.integers(64)), twist=bool(rng.random() < 0.2))
        extra_key = [None, "lora"][int(rng.random() < (0.8 if machine.chunk else 0.2))]
        machine.open(tokens, extra_key, len(tokens) - 1)
    elif kind < 0.93:
        _operation_on_a_lease(machine, rng, kind)
    elif kind < 0.95 and len(machine.holds) < 3:
        machine.hold(int(rng.integers(8)))
    elif kind < 0.97 and machine.holds:
        machine.release_hold(int(rng.integers(8)))
    elif kind < 0.98:
        machine.evict_windows(int(rng.integers(1, 4)))
    elif kind < 0.997:
        machine.evict(int(rng.integers(1, 4)))
    else:
        machine.flush()


def _operation_on_a_lease(machine: CacheMachine, rng: np.random.Generator, kind: float) -> None:
    size, which = machine.page_size, int(rng.integers(8))
    if kind < 0.5:
        machine.reserve_and_write(which, int(rng.integers(0, 4 * size + 1)))
    elif kind < 0.6:
        machine.slide(which)
    elif kind < 0.75:
        machine.commit(which)
    elif kind < 0.79:
        machine.truncate(which, int(rng.integers(0, 8 * size)))
    else:
        machine.release(which, insert=bool(rng.random() < 0.7))


def random_machine(rng: np.random.Generator) -> CacheMachine:
    """A small machine of any shape: page sizes 1 to 64, one or two classes, either cache."""
    page_size = int(rng.choice([1, 2, 3, 5, 16, 64]))
    window = None if rng.random() < 0.5 else int(rng.integers(1, 5 * page_size + 2))
    return CacheMachine(
        num_pages=int(rng.integers(6, 24)),
        page_size=page_size,
        chunk=bool(rng.random() < 0.25),
        policy=str(rng.choice(list(EVICTION_ORDERS))),
        window=window,
        num_window_pages=int(rng.integers(4, 20)),
    )


# Contents and tree are looked at this often; owners and sums after every operation.
_FULL_CHECK_EVERY = 12


def run_random(seed: int, num_operations: int) -> CacheMachine:
    """A machine of random shape after so many random operations, checked and closed."""
    rng = np.random.default_rng(seed)
    machine = random_machine(rng)
    for at in range(num_operations):
        random_operation(machine, rng)
        if at % _FULL_CHECK_EVERY:
            machine.check_owners()
        else:
            machine.check()
    machine.close()
    return machine
