"""Leases: the pages that one request holds, and the book of all open leases.

A lease is the only caller of `alloc` and `free` besides the trees. The scheduler is the only holder
of leases; the runner sees page ids as data. Half-open intervals, in pages of the request:

    [0, num_shared)          the cache's pages, locked by this lease: never written, maybe read by
                             others; all of their KV is valid
    [num_shared, num_pages)  the lease's own pages: written by this request, seen by nobody else

Pages that a commit or a release gives up may still be read or written by a step that was launched
before; whoever gets them next uses them in a step launched later, and steps run in order.

Models with sliding windows have a second class of pages (cache/windows.py): a window page hangs on
each full page that is still in the window.

    [0, window_from)         no window pages, or none that this request reads any more
    [window_from, num_pages) a window page each; those before num_shared are the cache's and locked

Window pages go back as the window moves (`slide`); as above, a step in flight may still read them.
"""

import numpy as np
import numpy.typing as npt

from seawall.cache.companions import CompanionStore
from seawall.cache.no_windows import NoWindows
from seawall.cache.node import TreeNode
from seawall.cache.pages import SLOT_MASK, PageCounts, PageIds, PageLedger, Violation
from seawall.cache.prefix import Match, PrefixCache, PrefixKey
from seawall.cache.windows import Windows
from seawall.core.errors import PageError

_SPARE_ENTRIES = 16


class PrefixHold:
    """A lock on a prefix that outlives the lease it came from (prompts shared by n samples)."""

    def __init__(self, book: "LeaseBook", node: TreeNode, in_window: PageIds) -> None:
        self._book = book
        self._node: TreeNode | None = node
        self._in_window = in_window
        book.cache.lock(node)
        book.windows.lock(in_window)
        book.holds.add(self)

    @property
    def node(self) -> TreeNode:
        """Where the prefix ends."""
        if self._node is None:
            raise PageError("this hold on a prefix was released before; release it once")
        return self._node

    @property
    def in_window(self) -> PageIds:
        """Full pages whose window pages it has locked."""
        return self._in_window

    def move(self, node: TreeNode) -> None:
        """Called by the book when it has counted locks anew: this node is the one locked now."""
        self._node = node

    def release(self) -> None:
        """Let go; a second time is an error."""
        node = self.node
        self._book.holds.remove(self)
        self._book.windows.unlock(self._in_window)
        self._book.cache.unlock(node)
        self._node = None


class Lease:
    """The pages of one request, in position order. Made by LeaseBook.open; ends with release.

    Attributes:
        rid: the request's name in reports.
        num_cached_tokens: positions whose KV was found in the cache when the lease was opened.
        num_pages: pages held, shared and own.
        num_shared: how many of them, from the front, are the cache's.
        window_from: pages in front of this one have no window pages for this request.
    """

    def __init__(self, book: "LeaseBook", rid: str, key: PrefixKey) -> None:
        match = book.cache.match(key)
        book.cache.lock(match.node)
        self.rid = rid
        self.num_cached_tokens = match.num_tokens
        self.num_pages = len(match.page_ids)
        self.num_shared = len(match.page_ids)
        self.window_from = book.windows.run_start(match.page_ids)
        self.owner = book.ledger.new_owner(rid)
        book.windows.open(self.owner, rid)
        book.windows.lock(match.page_ids[self.window_from :])
        self._book = book
        self._extra_key = key.extra_key
        self._match: Match | None = match
        self._node: TreeNode | None = match.node
        self._pages: PageIds = np.empty(self.num_pages + _SPARE_ENTRIES, np.int32)
        self._pages[: self.num_pages] = match.page_ids

    @property
    def page_ids(self) -> PageIds:
        """All pages, in position order; a read-only view that is valid until the next call."""
        view = self._pages[: self.num_pages]
        view.flags.writeable = False
        return view

    @property
    def num_own(self) -> int:
        """Pages that only this request uses."""
        return self.num_pages - self.num_shared

    @property
    def num_tokens(self) -> int:
        """Positions [0, num_tokens) have pages."""
        return self.num_pages * self._book.page_size

    @property
    def writable_from(self) -> int:
        """Positions before this one are the cache's and must not be written."""
        return self.num_shared * self._book.page_size

    @property
    def num_own_windows(self) -> int:
        """Window pages that only this request uses; meaningless for a model without windows."""
        start, other = self.window_from, self.num_shared  # compared for each lease in each step
        return self.num_pages - (start if start > other else other)

    @property
    def num_returning_windows(self) -> int:
        """Window pages that come back as this request's window moves: nobody else has them."""
        if not self._book.has_windows:
            return 0
        shared = self._pages[self.window_from : self.num_shared]
        return self.num_own_windows + self._book.windows.num_sole(shared)

    @property
    def node(self) -> TreeNode:
        """Where the shared prefix ends; locked by this lease."""
        return self._require_open("node")

    @property
    def in_window(self) -> PageIds:
        """Shared pages whose window pages this lease has locked."""
        return self._pages[self.window_from : self.num_shared]

    def move(self, node: TreeNode) -> None:
        """Called by the book when it has counted locks anew: this node is the one locked now."""
        self._node = node

    def reads_from(self, position: int) -> bool:
        """Whether all window pages are here that a query at `position`, or a later one, reads."""
        return self.window_from <= self._book.windows.first_read(position)

    def confirm(self) -> None:
        """The request runs with what was found in the cache: that counts as one use of it.

        A lease that ends without has left order and totals of the cache as they were, so that a
        request that waits does not pass for many.
        """
        self._require_open("confirm")
        if self._match is not None:
            self._book.cache.use(self._match)
            self._match = None

    def reserve(self, num_tokens: int) -> bool:
        """Make sure that positions [0, num_tokens) have pages, evicting if free ones run short.

        Returns:
            False if not even eviction could give enough; then this lease is as it was, and nothing
            was evicted.
        """
        self._require_open("reserve")
        book = self._book
        need = -(-num_tokens // book.page_size) - self.num_pages
        if need <= 0:
            return True
        if not book.make_room(need):
            return False
        end = self.num_pages + need
        if end > len(self._pages):
            grown: PageIds = np.empty(2 * end, np.int32)
            grown[: self.num_pages] = self._pages[: self.num_pages]
            self._pages = grown
        fresh = book.ledger.alloc(need, self.owner)
        book.windows.attach(fresh, self.owner)
        book.companions.clear(fresh)
        self._pages[self.num_pages : end] = fresh
        self.num_pages = end
        return True

    def commit(self, tokens: npt.NDArray[np.int32], num_valid: int, *, priority: int = 0) -> range:
        """Give the whole pages of positions [0, num_valid) to the cache and share them from now on.

        Where the cache already has the same prefix, its pages take the place of this lease's copies
        (the KV is equivalent) and the copies are freed.

        Args:
            tokens: the request's tokens from position 0, at least num_valid of them.
            num_valid: positions whose KV has been written, or will be by a step launched already.
            priority: of the prefix when pages are evicted; the lowest goes first.

        Returns:
            Indices into page_ids whose page has changed, half-open; the device's page table is to
            be updated there before the next step.
        """
        node = self._require_open("commit")
        book = self._book
        num_whole = num_valid // book.page_size
        if num_valid > len(tokens) or num_whole > self.num_pages:
            raise PageError(
                f"commit of {num_valid} positions by {self.rid!r}: it has {len(tokens)} tokens and "
                f"pages for {self.num_tokens}; commit only what was computed"
            )
        if num_whole <= self.num_shared:
            return range(0)
        if not node.spells(tokens[: self.writable_from]):
            raise PageError(
                f"commit by {self.rid!r}: its first {self.writable_from} tokens are not those of "
                "the pages it shares; pass the request's own tokens, from position 0"
            )
        key = PrefixKey(tokens=tokens[: num_whole * book.page_size], extra_key=self._extra_key)
        result = book.cache.insert(key, self._pages[:num_whole], self.owner, priority=priority)
        return self._adopt(result.node, result.page_ids, result.num_existing)

    def truncate(self, num_tokens: int) -> int:
        """Give back own pages beyond positions [0, num_tokens); returns how many.

        Shared pages stay until release: others may use them, and nothing is gained.
        """
        self._require_open("truncate")
        keep = max(-(-num_tokens // self._book.page_size), self.num_shared)
        dropped = self._pages[keep : self.num_pages].copy()
        if not len(dropped):
            return 0
        self.num_pages = keep
        self.window_from = min(self.window_from, keep)
        self._free(dropped)
        return len(dropped)

    def slide(self, position: int) -> None:
        """Give back the window pages that queries from `position` on do not read.

        The cache's are unlocked, and may serve others until they are evicted.
        """
        self._require_open("slide")
        start, end = self.window_from, min(self._book.windows.first_kept(position), self.num_pages)
        if end <= start:
            return
        self.window_from = end
        shared = min(end, self.num_shared)
        self._book.windows.unlock(self._pages[start:shared])
        self._book.windows.detach(self._pages[max(start, self.num_shared) : end], self.owner)

    def hold(self) -> PrefixHold:
        """Lock the prefix shared so far, for as long as the hold lives."""
        node = self._require_open("hold")
        return PrefixHold(self._book, node, self._pages[self.window_from : self.num_shared].copy())

    def gain(self) -> int:
        """Full pages that the others could have if this lease ended.

        Its own, and cached ones that nobody else has locked: as many would have to be computed
        again if they were evicted meanwhile.
        """
        num_pages, node = self.num_own, self._require_open("gain")
        while node.parent is not None:
            if node.num_locks == 1:
                num_pages += len(node.page_ids)
            node = node.parent
        return num_pages

    def release(
        self, tokens: npt.NDArray[np.int32], num_valid: int, *, insert: bool, priority: int = 0
    ) -> None:
        """End the lease (finish, abort, retract); a second time is an error.

        Args:
            tokens: as for commit.
            num_valid: as for commit.
            insert: commit the whole valid pages first, so that the next request finds them.
            priority: as for commit.
        """
        node = self._require_open("release")
        if insert:
            self.commit(tokens, num_valid, priority=priority)
            node = self._require_open("release")
        book = self._book
        self.truncate(0)
        self._node = None
        book.windows.unlock(self._pages[self.window_from : self.num_shared])
        book.cache.unlock(node)
        book.windows.close(self.owner)
        book.ledger.drop_owner(self.owner)
        book.forget(self)

    def _adopt(self, node: TreeNode, page_ids: PageIds, num_existing: int) -> range:
        """Take over the cache's pages [0, len(page_ids)) and move the lock to their node."""
        old = self._require_open("commit")
        first = self.num_shared
        if len(page_ids) <= first:
            return range(0)  # the cache stored nothing
        assert first <= num_existing, (first, num_existing)  # what is locked can't have gone
        changed = range(first, num_existing)
        copies = self._pages[changed.start : changed.stop].copy()
        self._book.companions.merge(copies, page_ids[changed.start : changed.stop])
        self._pages[: len(page_ids)] = page_ids
        self.num_shared = len(page_ids)
        self._node = node
        # First the new lock: an unlocked prefix may be gone at once.
        self._book.cache.lock(node)
        self._book.windows.lock(page_ids[max(first, self.window_from) :])
        self._book.cache.unlock(old)
        self._free(copies)
        return changed

    def _free(self, page_ids: PageIds) -> None:
        self._book.windows.detach(page_ids, self.owner)
        self._book.ledger.free(page_ids, self.owner)

    def _require_open(self, operation: str) -> TreeNode:
        if self._node is None:
            raise PageError(f"{operation} on the lease of {self.rid!r}, which was released before")
        return self._node


class LeaseBook:
    """Opens leases and knows the open ones. Written by the scheduler only."""

    def __init__(
        self,
        ledger: PageLedger,
        cache: PrefixCache,
        page_size: int,
        companions: CompanionStore | None = None,
        windows: Windows | None = None,
    ) -> None:
        self.ledger = ledger
        self.cache = cache
        self.page_size = page_size
        self.companions = companions or CompanionStore(ledger.num_pages, page_size, extra_bytes=0)
        self.windows: Windows = windows or NoWindows()
        self.holds: set[PrefixHold] = set()
        self._open: dict[int, Lease] = {}

    @property
    def available_pages(self) -> int:
        """Pages that `reserve` could get now, free or by eviction; O(1)."""
        return self.ledger.num_free + self.cache.num_evictable

    @property
    def has_windows(self) -> bool:
        """Whether there is a second class of pages."""
        return self.windows.most_held > 0

    @property
    def available_windows(self) -> int:
        """Window pages that `reserve` could get now; O(1)."""
        return self.windows.num_free + self.windows.num_evictable

    @property
    def violations(self) -> tuple[Violation, ...]:
        """The most recent misuse of pages of either class that service survived."""
        return (*self.ledger.violations, *self.windows.violations)

    def window_counts(self) -> PageCounts | None:
        """Window pages by kind of owner; None for a model without windows."""
        return self.windows.counts()

    @property
    def num_open(self) -> int:
        """Leases not released yet."""
        return len(self._open)

    def open(
        self,
        rid: str,
        key_tokens: npt.NDArray[np.int32],
        extra_key: str | None,
        *,
        max_match_tokens: int,
    ) -> Lease:
        """Open a lease that shares the longest cached prefix, in whole pages.

        Args:
            rid: the request's name in reports and errors.
            key_tokens: its tokens so far, from position 0.
            extra_key: what else its KV depends on.
            max_match_tokens: take at most this many from the cache; what a logprob request or the
                sampling of the next token must compute lies beyond.
        """
        num_tokens = max(0, min(max_match_tokens, len(key_tokens)))
        key = PrefixKey(tokens=key_tokens[:num_tokens], extra_key=extra_key)
        lease = Lease(self, rid, key)
        self._open[lease.owner] = lease
        return lease

    def flush(self) -> bool:
        """Free every cached page that nobody holds; whether all are gone, and their records."""
        done = self.cache.reset()
        if done:
            self.companions.reset()
        return done

    def forget(self, lease: Lease) -> None:
        """Called by a lease that ends."""
        del self._open[lease.owner]

    def make_room(self, num_pages: int) -> bool:
        """Evict until so many pages of each class are free.

        Returns:
            False if not even that would give enough; then nothing was evicted, unless pages that
            were to come free turned out to be in quarantine.
        """
        short = num_pages - self.ledger.num_free
        if short <= 0 and num_pages <= self.windows.num_free:
            return True
        if short > self.cache.num_evictable or num_pages > self.available_windows:
            return False
        if short > 0:
            self.cache.evict(short)
        if num_pages > self.windows.num_free:
            self.windows.evict(num_pages - self.windows.num_free)
        return num_pages <= min(self.ledger.num_free, self.windows.num_free)

    def abandon(self) -> None:
        """Give up all leases and holds, whatever their state, and empty the cache.

        For the end of all requests at once. A step in flight may still use their pages; whoever
        gets them next uses them in a later one.
        """
        self._open.clear()
        self.holds.clear()
        self.ledger.drop_others(self.cache.owner)
        self.cache.relock((), report=False)
        self.windows.drop_others(self.ledger.pages_of(self.cache.owner))
        self.cache.reset()

    def pages_of(self, rid: str) -> dict[str, list[int]]:
        """Pages of one request by id, in position order: "shared" and its "own"; else empty."""
        return next((_listed(lease) for lease in self._open.values() if lease.rid == rid), {})

    def all_pages(self) -> dict[str, dict[str, list[int]]]:
        """The same for every open lease, by the request's name; for reports."""
        return {lease.rid: _listed(lease) for lease in self._open.values()}

    def audit(self) -> list[str]:
        """Compare each holder's own count with the ledger's; cheap enough for every step.

        What disagrees is settled page by page, recorded with its owner's name and contained; in
        debug mode it raises.

        Returns:
            Names of the requests that read or write pages which are not theirs any more: their
            results can't be trusted, nor what they have left in the cache. Usually none.
        """
        self.ledger.audit()
        held = self.ledger.held
        wrong = [
            lease
            for owner, lease in self._open.items()
            if held[owner & SLOT_MASK] != lease.num_pages - lease.num_shared
        ]
        lost = [self.ledger.reconcile(x.owner, x.page_ids[x.num_shared :]) for x in wrong]
        lost.append(self.cache.audit())
        if len(lost[-1]):
            self.cache.evict(self.cache.num_evictable)  # no new reader for what may be wrong
        lost += self._audit_locks()
        lost += self._audit_windows()
        pages = np.concatenate(lost)
        if not len(pages):
            return []
        leases = self._open.values()
        return [lease.rid for lease in leases if bool(np.isin(lease.page_ids, pages).any())]

    def check(self) -> bool:
        """Compare leases, cache, window pages and ledger, all of them; see PageLedger.check."""
        stats = self.cache.stats()
        agrees = self.ledger.check(
            {lease.owner: lease.num_own for lease in self._open.values()},
            num_cached=stats.evictable_pages + stats.protected_pages,
        )
        return self.windows.check(self.ledger) and agrees

    def _audit_windows(self) -> list[PageIds]:
        """Full pages whose window pages leases have lost."""
        windows = self.windows
        if not self.has_windows:
            return []
        lost = []
        is_sound = windows.is_sound()
        if not is_sound and self._knows_all:
            readers = [holder.in_window for holder in self._holders()]
            lost.append(windows.settle(self.ledger.pages_of(self.cache.owner), readers))
        differing = windows.differing({o: lease.num_own_windows for o, lease in self._open.items()})
        for owner in differing if is_sound else list(self._open):
            lease = self._open[owner]
            own = lease.page_ids[max(lease.window_from, lease.num_shared) :]
            if owner in differing or not windows.has_all(owner, own):
                lost.append(windows.audit(owner, own))
        return lost

    def _holders(self) -> "list[Lease | PrefixHold]":
        return [*self._open.values(), *self.holds]

    def _audit_locks(self) -> list[PageIds]:
        """Pages of leases whose shared prefix has left the tree although they had locked it."""
        if self.cache.locks_agree(len(self._open) + len(self.holds)) or not self._knows_all:
            return []
        holders = self._holders()
        before = [holder.node for holder in holders]
        after = self.cache.relock(before)
        for holder, node in zip(holders, after, strict=True):
            holder.move(node)
        moved = {id(old) for old, new in zip(before, after, strict=True) if old is not new}
        pairs = zip(holders, before, strict=True)
        return [h.page_ids for h, node in pairs if isinstance(h, Lease) and id(node) in moved]

    @property
    def _knows_all(self) -> bool:
        """Whether every owner of pages is an open lease, besides the tree.

        What a lease reads that is missing here can't be known, so all locks stay as they are.
        """
        return self.ledger.num_owners == len(self._open) + 1


def _listed(lease: Lease) -> dict[str, list[int]]:
    pages = lease.page_ids.tolist()
    return {"shared": pages[: lease.num_shared], "own": pages[lease.num_shared :]}
