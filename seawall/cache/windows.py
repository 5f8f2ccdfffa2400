"""Window pages: the second class of pages, for layers that see only the newest positions.

Each position has a place in a full page; while it is inside somebody's window, it has one in a
window page too. The window page hangs on the full page of the same positions:

    window_of[full page]   its window page, or -1 once that was given back
    full_of[window page]   the other way; -1 for a free page

    position   0 ............ p - W + 1 .......... p
    full       [page][page][page][page][page][page]      kept until the request ends
    window       -1    -1  [page][page][page][page]      given back as the window moves

Owns this one mapping, the ledger of the window class and the locks of cached window pages; in which
order these are evicted is the matter of cache/window_order.py. Knows nothing of tokens; a full page
and its window page always have the same owner. A window page of the tree that nobody has locked can
be evicted without its full page: the prefix stays, but a match may end only where a whole window
survives (cache/swa.py).
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from seawall.cache.eviction import EvictionOrder, least_recently_used
from seawall.cache.pages import (
    FREE,
    QUARANTINE,
    SLOT_MASK,
    PageCounts,
    PageIds,
    PageLedger,
    Violation,
)
from seawall.cache.window_order import WindowOrder

_NONE = -1


class Windows(Protocol):
    """What leases need of the window class; every argument is full pages."""

    @property
    def most_held(self) -> int:
        """Window pages that a decoding request holds at most; 0 if there are no windows."""

    @property
    def violations(self) -> tuple[Violation, ...]:
        """The most recent misuse of window pages that service survived."""

    def counts(self) -> PageCounts | None:
        """Window pages by kind of owner; None if there are no windows."""

    @property
    def num_evictable(self) -> int:
        """Window pages that could be evicted now; O(1)."""

    @property
    def num_free(self) -> int:
        """Window pages that could be handed out now."""

    def open(self, owner: int, label: str) -> None:
        """Register an owner of full pages."""

    def close(self, owner: int) -> None:
        """Forget an owner that has no pages left."""

    def attach(self, page_ids: PageIds, owner: int) -> None:
        """Give each of these full pages of `owner` a window page."""

    def detach(self, page_ids: PageIds, owner: int) -> None:
        """Free the window pages that these full pages of `owner` have."""

    def lock(self, page_ids: PageIds) -> None:
        """Keep the window pages of these cached pages from eviction, until as many unlocks."""

    def unlock(self, page_ids: PageIds) -> None:
        """Undo one lock."""

    def num_sole(self, page_ids: PageIds) -> int:
        """How many of these cached pages have a window page that is locked once."""

    def evict(self, num_pages: int) -> int:
        """Free at least that many cached window pages, or all there are; returns how many."""

    def table(self, page_ids: PageIds) -> tuple[PageIds, PageIds]:
        """Which of these full pages have window pages, by index, and those window pages."""

    def first_kept(self, position: int) -> int:
        """First column that a request keeps whose positions before `position` are computed."""

    def first_read(self, position: int) -> int:
        """First column that a query at `position` reads."""

    def run_start(self, page_ids: PageIds) -> int:
        """Of pages in position order, the first of the last ones that all have window pages."""

    def num_held(self, owner: int) -> int:
        """Window pages of an owner."""

    def differing(self, claims: Mapping[int, int]) -> set[int]:
        """Of owners with the number of window pages that they claim those that have another."""

    def audit(self, owner: int, page_ids: PageIds) -> PageIds:
        """Settle what an owner holds that should have a window page for each of these full pages.

        Returns those of them that have none, or not their own.
        """

    def is_sound(self) -> bool:
        """Whether mapping, locks and counts agree in their sums; cheap enough for every step."""

    def has_all(self, owner: int, page_ids: PageIds) -> bool:
        """Whether each of these full pages of `owner` has a window page, which is its own."""

    def drop_others(self, cached: PageIds) -> None:
        """Forget all owners but the tree, which has these full pages, and all locks."""

    def settle(self, cached: PageIds, readers: Sequence[PageIds]) -> PageIds:
        """Mend the mapping, settle what the tree holds and count all locks anew.

        Args:
            cached: all full pages of the tree.
            readers: full pages that leases and holds have locked, once for each of them.

        Returns:
            Those of the tree's full pages whose window page was lost.
        """

    def check(self, full: PageLedger) -> bool:
        """Whether mapping, owners and sums agree with each other and with the full pages."""


class WindowPages:
    """The Windows of a model with sliding windows. Written by leases and one tree."""

    def __init__(
        self,
        ledger: PageLedger,
        *,
        num_full_pages: int,
        page_size: int,
        window: int,
        order: EvictionOrder = least_recently_used,
    ) -> None:
        assert window > 0, window
        self.ledger = ledger
        self.page_size = page_size
        self.window = window
        self.num_evictable = 0
        self._window_of: PageIds = np.full(num_full_pages, _NONE, np.int32)
        self._full_of: PageIds = np.full(ledger.num_pages, _NONE, np.int32)
        self._locks = np.zeros(ledger.num_pages, np.int32)
        self._num_locks = 0
        self._queue = WindowOrder(order, self._locks)
        self._owners: dict[int, int] = {}
        self._tree = 0

    @property
    def violations(self) -> tuple[Violation, ...]:
        """The most recent misuse of window pages that service survived."""
        return self.ledger.violations

    def counts(self) -> PageCounts:
        """Window pages by kind of owner."""
        return self.ledger.counts()

    @property
    def most_held(self) -> int:
        """Window pages that a decoding request holds at most.

        From `first_kept` to the end of a token that is planned behind one in flight, both rounded
        to whole pages.
        """
        return (self.window + 3 * self.page_size - 1) // self.page_size

    @property
    def num_free(self) -> int:
        """Window pages that `attach` can hand out now."""
        return self.ledger.num_free

    def open(self, owner: int, label: str, *, tree: bool = False) -> None:
        """Register an owner of full pages; one of them is the tree."""
        self._owners[owner] = self.ledger.new_owner(label, cached=tree)
        if tree:
            self._tree = owner

    def close(self, owner: int) -> None:
        """Forget an owner that has no pages left."""
        self.ledger.drop_owner(self._owners.pop(owner))

    def of(self, page_ids: PageIds) -> PageIds:
        """The window page of each full page, -1 where there is none."""
        return self._window_of[page_ids]

    def table(self, page_ids: PageIds) -> tuple[PageIds, PageIds]:
        """Which of these full pages have window pages, by index, and those window pages."""
        pages = self._window_of[page_ids]
        has = np.flatnonzero(pages != _NONE).astype(np.int32)
        return has, pages[has]

    def num_held(self, owner: int) -> int:
        """Window pages of an owner."""
        return self.ledger.held[self._owners[owner] & SLOT_MASK]

    def differing(self, claims: Mapping[int, int]) -> set[int]:
        """Of owners with the number of window pages that they claim those that have another."""
        held, owners = self.ledger.held, self._owners
        return {o for o, claimed in claims.items() if held[owners[o] & SLOT_MASK] != claimed}

    def attach(self, page_ids: PageIds, owner: int) -> None:
        """Give each of these full pages of `owner` a window page.

        A full page that still has one was freed without it: the mapping is stale, and whoever it
        belonged to may still read that window page.
        """
        stale = page_ids[self._window_of[page_ids] != _NONE]
        if len(stale):
            self._drop_stale(stale, owner)
        fresh = self.ledger.alloc(len(page_ids), self._owners[owner])
        if bool((self._full_of[fresh] != _NONE).any()):
            fresh = self._replace_stale(fresh, owner)
            page_ids = page_ids[: len(fresh)]
        self._window_of[page_ids] = fresh
        self._full_of[fresh] = page_ids

    def detach(self, page_ids: PageIds, owner: int) -> None:
        """Free the window pages that these full pages of `owner` have."""
        mapped, pages = self._mapped(page_ids)
        if not len(pages):
            return
        handle = self._owners[owner]
        mine = self.ledger.owners_of(pages) == handle  # all of them, unless something went wrong
        if owner == self._tree:
            self.num_evictable -= int((self._locks[pages[mine]] == 0).sum())
        self.ledger.free(pages, handle)
        self._unmap(mapped[mine], pages[mine])

    def give_to_tree(self, page_ids: PageIds, owner: int) -> None:
        """These full pages have passed from `owner` to the tree, and theirs follow."""
        _, pages = self._mapped(page_ids)
        self._move(pages, owner)

    def stored(self, page_ids: PageIds, num_existing: int, priority: int) -> None:
        """These cached pages, in position order from 0, have just been stored.

        Those before `num_existing` were there: of them the last window is renewed.
        """
        _, pages = self._mapped(page_ids)
        self._queue.raise_priority(pages, priority)
        self._renew(page_ids[:num_existing], len(page_ids), num_hits=0)

    def heal(self, copies: PageIds, kept: PageIds, owner: int) -> None:
        """Where the tree's page has lost its window page, it takes that of the owner's copy.

        Args:
            copies: full pages of `owner`, or the tree's own.
            kept: the tree's full pages of the same positions.
            owner: whose the copies are.
        """
        into = np.flatnonzero((self._window_of[kept] == _NONE) & (self._window_of[copies] != _NONE))
        if not len(into):
            return
        pages = self._window_of[copies[into]]
        self._window_of[copies[into]] = _NONE
        self._window_of[kept[into]] = pages
        self._full_of[pages] = kept[into]
        self._move(pages, owner)

    def lock(self, page_ids: PageIds) -> None:
        """Keep the window pages of these cached pages from eviction, until as many unlocks."""
        _, pages = self._mapped(page_ids)
        self.num_evictable -= int((self._locks[pages] == 0).sum())
        self._locks[pages] += 1
        self._num_locks += len(pages)

    def unlock(self, page_ids: PageIds) -> None:
        """Undo one lock."""
        _, pages = self._mapped(page_ids)
        if bool((self._locks[pages] == 0).any()):
            self.ledger.report("sum", "unlock", None, "window pages", "one of them is not locked")
            pages = pages[self._locks[pages] > 0]
        self._locks[pages] -= 1
        self._num_locks -= len(pages)
        unlocked = pages[self._locks[pages] == 0]
        self.num_evictable += len(unlocked)
        self._queue.offer(unlocked)

    def num_sole(self, page_ids: PageIds) -> int:
        """How many of these cached pages have a window page that is locked once."""
        _, pages = self._mapped(page_ids)
        return int((self._locks[pages] == 1).sum())

    def use(self, page_ids: PageIds) -> None:
        """Somebody goes on behind these cached pages, in position order from 0."""
        self._renew(page_ids, len(page_ids), num_hits=1)

    def evict(self, num_pages: int) -> int:
        """Free at least that many cached window pages, or all there are; returns how many.

        Runs go in the tree's order, and of a run its last positions first: what is in front of them
        may still be the whole window of a shorter prefix.
        """
        num_left = num_pages
        while num_left > 0 and self._queue:
            pages = self._queue.take(num_left)
            num_left -= len(pages)
            self.detach(self._full_of[pages], self._tree)
        return num_pages - num_left

    def first_kept(self, position: int) -> int:
        """First column that a request keeps whose positions before `position` are computed.

        A page and a token more than the next query reads: the cache keeps whole pages, so what is
        found again ends up to a page earlier, and there the newest token is computed once more.
        """
        return max(position + 1 - self.window - self.page_size, 0) // self.page_size

    def first_read(self, position: int) -> int:
        """First column that a query at `position` reads."""
        return max(position + 1 - self.window, 0) // self.page_size

    def run_start(self, page_ids: PageIds) -> int:
        """Of pages in position order, the first of the last ones that all have window pages.

        Looks no further back than `first_kept`.
        """
        first = self.first_kept(len(page_ids) * self.page_size)
        missing = np.flatnonzero(self._window_of[page_ids[first:]] == _NONE)
        return first + int(missing[-1]) + 1 if len(missing) else first

    def num_valid(self, page_ids: PageIds) -> int:
        """How many of these pages a match may have, given in order from position 0.

        The first query after a match of e positions is at e - 1 (the newest token, or a boundary)
        or at e, so all pages from first_read(e - 1) on must have their window pages.
        """
        num_pages = len(page_ids)
        last = self._window_of[page_ids[self.first_read(num_pages * self.page_size - 1) :]]
        if bool((last != _NONE).all()):
            return num_pages
        columns = np.arange(1, num_pages + 1)
        # For an end behind each page: where the unbroken run up to it starts.
        runs = np.maximum.accumulate(np.where(self._window_of[page_ids] == _NONE, columns, 0))
        reads = np.maximum(columns * self.page_size - self.window, 0) // self.page_size
        valid = np.flatnonzero(runs <= reads)
        return int(valid[-1]) + 1 if len(valid) else 0

    def audit(self, owner: int, page_ids: PageIds) -> PageIds:
        """Settle what an owner of these full pages holds; returns full pages without theirs."""
        mapped, pages = self._mapped(page_ids)
        missing = page_ids[self._window_of[page_ids] == _NONE]
        lost = self.ledger.reconcile(self._owners[owner], pages)
        withheld = self.ledger.pages_of(QUARANTINE)
        withheld = withheld[self._full_of[withheld] != _NONE]
        self._unmap(self._full_of[withheld], withheld)
        label = self.ledger.label_of(self._owners[owner])
        for page in missing.tolist():
            self.ledger.report("lost", "audit", None, label, f"the window page of page {page}")
        return np.concatenate([missing, mapped[np.isin(pages, lost)]])

    def is_sound(self) -> bool:
        """Whether mapping, locks and counts agree in their sums; a few passes over arrays."""
        self.ledger.audit()
        held = self.ledger.held
        num_held = self.ledger.num_pages - held[FREE] - held[QUARANTINE]
        num_cached = held[self._owners[self._tree] & SLOT_MASK]
        used = np.flatnonzero(self._full_of != _NONE)
        return (
            int(np.count_nonzero(self._window_of != _NONE)) == num_held == len(used)
            and bool((self._window_of[self._full_of[used]] == used).all())
            and int(np.count_nonzero(self._locks)) + self.num_evictable == num_cached
            and int(self._locks.sum()) == self._num_locks
        )

    def has_all(self, owner: int, page_ids: PageIds) -> bool:
        """Whether each of these full pages of `owner` has a window page, which is its own."""
        pages = self._window_of[page_ids]
        if bool((pages == _NONE).any()):
            return False
        return bool((self.ledger.owners_of(pages) == self._owners[owner]).all())

    def drop_others(self, cached: PageIds) -> None:
        """Forget all owners but the tree, which has these full pages, and all locks."""
        handle = self._owners[self._tree]
        self._owners = {self._tree: handle}
        self.ledger.drop_others(handle)
        others = np.flatnonzero(self.ledger.owners_of(np.arange(self.ledger.num_pages)) != handle)
        self._window_of[np.setdiff1d(np.arange(len(self._window_of)), cached)] = _NONE
        self._full_of[others] = _NONE
        self._mend()
        self._queue.forget(others.astype(np.int32))
        self._recount((), report=False)

    def settle(self, cached: PageIds, readers: Sequence[PageIds]) -> PageIds:
        """Mend the mapping, settle what the tree holds and count all locks anew; see Windows."""
        torn = self._mend()
        lost = self.audit(self._tree, cached[self._window_of[cached] != _NONE])
        lost = np.union1d(lost, np.intersect1d(torn, cached)).astype(np.int32)
        self._recount(readers, report=not len(lost))
        return lost

    def _mend(self) -> PageIds:
        """Drop what is mapped one way only; returns the full pages that have lost by it."""
        mapped = np.flatnonzero(self._window_of != _NONE).astype(np.int32)
        torn: PageIds = mapped[self._full_of[self._window_of[mapped]] != mapped]
        self._window_of[torn] = _NONE
        back = np.flatnonzero(self._full_of != _NONE)
        self._full_of[back[self._window_of[self._full_of[back]] != back]] = _NONE
        return torn

    def _recount(self, readers: Sequence[PageIds], *, report: bool) -> None:
        """Make locks and sums what the readers and the ledger say."""
        locks = np.zeros_like(self._locks)
        for page_ids in readers:
            locks[self._mapped(page_ids)[1]] += 1
        wrong = np.flatnonzero(self._locks != locks)
        was, self._locks[:] = self._locks[wrong], locks
        self._num_locks = int(locks.sum())
        pages = self.ledger.pages_of(self._owners[self._tree])
        unlocked = pages[locks[pages] == 0]
        counted, self.num_evictable = self.num_evictable, len(unlocked)
        self._queue.offer(unlocked)
        if not report:
            return
        for page, number in zip(wrong.tolist(), was.tolist(), strict=True):
            said = f"window page {page} counted {number} locks, {locks[page]} readers have it"
            self.ledger.report("sum", "audit", None, "tree", said)
        if not len(wrong) and counted != len(unlocked):
            said = f"{counted} window pages were counted as evictable, {len(unlocked)} are"
            self.ledger.report("sum", "audit", None, "tree", said)

    def check(self, full: PageLedger) -> bool:
        """Compare mapping, owners and sums with both ledgers; tolerance zero; O(pages).

        Returns:
            Whether everything agrees. In debug mode a disagreement raises instead.
        """
        problem = self._disagreement(full)
        if problem is not None:
            self.ledger.report("sum", "check", None, "window pages", problem)
        return problem is None and self.ledger.check()

    def _disagreement(self, full: PageLedger) -> str | None:
        mapped = np.flatnonzero(self._window_of != _NONE)
        pages = self._window_of[mapped]
        back = np.flatnonzero(self._full_of != _NONE)
        if not np.array_equal(np.sort(pages), back) or bool((self._full_of[pages] != mapped).any()):
            return "the mapping from full to window pages is not one to one"
        counts = self.ledger.counts()
        if len(pages) != counts.cached + counts.in_use:
            return f"{len(pages)} window pages are mapped, {counts} are somebody's"
        owners = full.owners_of(mapped)
        expected = [self._owners.get(owner, _NONE) for owner in owners.tolist()]
        if not np.array_equal(self.ledger.owners_of(pages), np.array(expected, np.int64)):
            return "a window page has another owner than its full page"
        cached = owners == self._tree
        unlocked = int((self._locks[pages[cached]] == 0).sum())
        if unlocked != self.num_evictable:
            return f"{self.num_evictable} are counted as evictable, {unlocked} are"
        locked = np.flatnonzero(self._locks)
        if not bool(np.isin(locked, pages[cached]).all()):
            return "a lock is on a window page that is not the tree's"
        return None

    def _mapped(self, page_ids: PageIds) -> tuple[PageIds, PageIds]:
        """Of full pages those that have a window page, and the window pages."""
        pages = self._window_of[page_ids]
        has = pages != _NONE
        return page_ids[has], pages[has]

    def _unmap(self, page_ids: PageIds, pages: PageIds) -> None:
        self._window_of[page_ids] = _NONE
        self._full_of[pages] = _NONE
        self._queue.forget(pages)
        self._num_locks -= int(self._locks[pages].sum())
        self._locks[pages] = 0

    def _renew(self, page_ids: PageIds, end: int, *, num_hits: int) -> None:
        """Those of these pages that are in the window in front of column `end` are in use."""
        _, pages = self._mapped(page_ids[self.first_kept(end * self.page_size) :])
        self._queue.renew(pages, num_hits=num_hits)

    def _move(self, pages: PageIds, owner: int) -> None:
        num_moved = self.ledger.transfer(pages, self._owners[owner], self._owners[self._tree])
        rest = pages[num_moved:]
        if len(rest):  # after a misuse that was survived: nobody must read them through the tree
            self._unmap(self._full_of[rest], rest)
        self.num_evictable += num_moved
        self._queue.renew(pages[:num_moved], num_hits=0)

    def _drop_stale(self, page_ids: PageIds, owner: int) -> None:
        pages = self._window_of[page_ids]
        label = self.ledger.label_of(self._owners[owner])
        holders = self.ledger.owners_of(pages)
        for page, holder in zip(pages.tolist(), holders.tolist(), strict=True):
            self.ledger.report("stale", "attach", page, label, self.ledger.label_of(holder))
        for holder in np.unique(holders).tolist():
            self.ledger.quarantine(pages[holders == holder], holder)
        cached = holders == self._owners[self._tree]
        self.num_evictable -= int((self._locks[pages[cached]] == 0).sum())
        self._unmap(page_ids, pages)

    def _replace_stale(self, fresh: PageIds, owner: int) -> PageIds:
        """Of pages just handed out withhold those that a full page is still mapped to.

        They were freed behind its back. Nothing has been written to them, so who still reads them
        reads what it should.
        """
        handle = self._owners[owner]
        while len(stale := fresh[self._full_of[fresh] != _NONE]):
            label = self.ledger.label_of(handle)
            for page in stale.tolist():
                self.ledger.report("stale", "attach", page, "free", label)
            self.ledger.quarantine(stale, handle)
            self._unmap(self._full_of[stale], stale)
            more = min(len(stale), self.ledger.num_free)
            good = np.setdiff1d(fresh, stale)
            fresh = np.concatenate([good, self.ledger.alloc(more, handle)])
        return fresh
