"""The page ledger: every page has exactly one owner at any time.

An owner is free, quarantine, a request or a prefix tree. The ledger owns the owner table and the
free list; it knows nothing of tokens, prefixes or tensors. Written by leases and trees only.

    owner[page]            handle of the one owner; a handle = slot | generation << 24, never reused
    free[0, num_free)      stack of free page ids; the top is handed out first
    held[slot]             pages that the owner in this slot has; sums exactly to num_pages

Misuse is found at the call that commits it, or, where somebody's own list of pages went wrong, by
the audit after each step. In debug mode it raises and changes nothing. Else it is recorded and
logged with the names of both sides, whoever rightfully owns a page keeps it, a page that two
parties may now believe to be theirs goes to quarantine and is never handed out again, and service
goes on.

Cost: O(1) a page for every operation. The free list is put back in ascending order once for every
num_pages pages that were freed, which is O(1) a page as well, so that after churn a request still
tends to get runs of consecutive pages.
"""

import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from seawall.core.errors import PageError

logger = logging.getLogger("seawall.cache")

PageIds = npt.NDArray[np.int32]
ViolationKind = Literal[
    "out_of_range",
    "already_free",
    "quarantined",
    "foreign",
    "duplicate",
    "leaked",
    "lost",
    "stale",
    "unknown",
    "sum",
]

HOST_BYTES_PER_PAGE = 16  # owner 8, free list 4, scratch 4; the debug history is not counted

# Handles that exist from the start; no call takes them as the owner who acts.
FREE = 0
QUARANTINE = 1

_SLOT_BITS = 24
SLOT_MASK = (1 << _SLOT_BITS) - 1  # of a handle: where its owner's count is in `held`
_MAX_VIOLATIONS = 256
_LOG_EVERY = 1000  # of the violations that come after those that are kept
_HISTORY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCounts:
    """Pages by the kind of their owner: free + cached + in_use + quarantined == total."""

    total: int
    free: int
    cached: int
    in_use: int
    quarantined: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One misuse that service survived. `page` is None when no single page is concerned.

    Attributes:
        caller: name of whoever made the call, or whose list of pages is wrong.
        owner: name of the page's owner in the ledger; without a page, what is wrong in words.
    """

    kind: ViolationKind
    operation: str
    page: int | None
    caller: str
    owner: str

    def __str__(self) -> str:
        """One line, as logs and reports show it."""
        if self.page is None:
            return f"{self.operation} by {self.caller!r}: {self.kind}: {self.owner}"
        said = _SAID.get(self.kind, self.kind)
        return (
            f"{self.operation} by {self.caller!r}: page {self.page} is {said}; "
            f"its owner is {self.owner!r}"
        )


_SAID: dict[ViolationKind, str] = {
    "already_free": "already_free (freed twice, or used after it was freed)",
    "duplicate": "named twice in one call",
    "leaked": "still held",
    "lost": "believed to be its own, but is not",
    "out_of_range": "out of range",
    "stale": "still mapped to a window page",
}


class PageLedger:
    """Owner of every page, as counts that are exact after each call."""

    def __init__(self, num_pages: int, *, debug: bool) -> None:
        if not 0 < num_pages < 2**31:
            raise PageError(f"num_pages is {num_pages}; it must be in [1, 2**31)")
        self.num_pages = num_pages
        self.debug = debug
        self.num_violations = 0
        self._owner = np.full(num_pages, FREE, np.int64)
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._scratch = np.zeros(num_pages, np.int32)
        self._num_unordered = 0  # pages freed since the free list was last in order
        self._owners = _Owners(num_pages)
        self._violations: deque[Violation] = deque(maxlen=_MAX_VIOLATIONS)
        self._history: dict[int, deque[str]] = {}
        self._clock = 0

    @property
    def num_free(self) -> int:
        """Pages that `alloc` can hand out now."""
        return self._owners.held[FREE]

    @property
    def num_owners(self) -> int:
        """Registered owners: requests and trees."""
        return self._owners.num_live

    @property
    def violations(self) -> tuple[Violation, ...]:
        """The most recent violations, oldest first; `num_violations` counts them all."""
        return tuple(self._violations)

    @property
    def held(self) -> Sequence[int]:
        """Pages of each owner, by `handle & SLOT_MASK`; to be read only."""
        return self._owners.held

    def new_owner(self, label: str, *, cached: bool = False) -> int:
        """Register an owner and return its handle.

        Args:
            label: the name that reports and errors use: a request id, "tree".
            cached: whether its pages count as cached (a tree) or as in use (a request).
        """
        return self._owners.add(label, cached=cached)

    def drop_owner(self, owner: int) -> None:
        """Forget an owner that has no pages left."""
        if owner in (FREE, QUARANTINE) or not self._owners.is_live(owner):
            self.report("unknown", "drop_owner", None, self._owners.label(owner), "nobody")
            return
        if self._owners.held[owner & SLOT_MASK]:
            label = self._owners.label(owner)
            leaked = self.pages_of(owner)
            for page in leaked.tolist():
                self.report("leaked", "drop_owner", page, label, label)
            self._give("leak", leaked, owner, QUARANTINE)
        self._owners.remove(owner)

    def drop_others(self, kept: int) -> None:
        """Forget every owner but this one; their pages come free.

        For the end of all requests at once, when nobody is left who could use a page wrongly.
        """
        self._owner[(self._owner != kept) & (self._owner != QUARANTINE)] = FREE
        for owner in self._owners.live():
            if owner != kept:
                self._owners.remove(owner)
        self._recount()

    def alloc(self, num_pages: int, owner: int) -> PageIds:
        """Hand out pages, ascending where the free list allows it.

        Raises:
            PageError: more than `num_free` pages, or an unknown owner; nothing has changed.
        """
        top = self.num_free
        if not 0 <= num_pages <= top:
            raise PageError(
                f"alloc of {num_pages} pages for {self._owners.label(owner)!r}: {top} of "
                f"{self.num_pages} are free; evict or wait first"
            )
        self._require_live("alloc", owner)
        if self._num_unordered >= self.num_pages:
            self._order_free()
        page_ids = self._free[top - num_pages : top][::-1].copy()
        if not self._are_all(page_ids, FREE):
            self._mend_free(page_ids, owner)
            return self.alloc(num_pages, owner)
        self._give("alloc", page_ids, FREE, owner)
        return page_ids

    def transfer(self, page_ids: PageIds, from_owner: int, to_owner: int) -> int:
        """Move pages between owners and return how many moved.

        All of them move, or, when service goes on after a misuse, those before the first offending
        one: a tree must not store what lies behind a page that is not its caller's.
        """
        self._require_live("transfer", to_owner)
        clean = self._vet("transfer", page_ids, from_owner)
        num_moved = len(page_ids) if clean is None else int(clean.argmin())
        self._give("transfer", page_ids[:num_moved], from_owner, to_owner)
        return num_moved

    def free(self, page_ids: PageIds, owner: int) -> int:
        """Give pages back and return how many came free (all, unless a misuse was survived)."""
        clean = self._vet("free", page_ids, owner)
        if clean is not None:
            page_ids = page_ids[clean]
        num_freed = len(page_ids)
        top = self.num_free
        self._free[top : top + num_freed] = page_ids[::-1]
        self._num_unordered += num_freed
        self._give("free", page_ids, owner, FREE)
        return num_freed

    def counts(self) -> PageCounts:
        """Pages by kind of owner."""
        held = self._owners.held
        cached = sum(held[slot] for slot in self._owners.cached_slots)
        return PageCounts(
            total=self.num_pages,
            free=held[FREE],
            cached=cached,
            in_use=self.num_pages - held[FREE] - held[QUARANTINE] - cached,
            quarantined=held[QUARANTINE],
        )

    def check(
        self, holdings: Mapping[int, int] | None = None, *, num_cached: int | None = None
    ) -> bool:
        """Compare every count with the owner table itself; tolerance zero; O(num_pages).

        Args:
            holdings: pages that each owner believes to have, by handle.
            num_cached: pages that the trees believe to have, in all.

        Returns:
            Whether everything agrees. In debug mode a disagreement raises instead.
        """
        problem = self._disagreement(holdings or {}, num_cached)
        if problem is not None:
            self._recount()
            self.report("sum", "check", None, "ledger", problem)
        return problem is None

    def audit(self) -> None:
        """Compare the sum of all counts with the pool; where it is off, count anew. O(owners)."""
        if sum(self._owners.held) != self.num_pages:
            self._report_counts(self._recount())

    def reconcile(self, owner: int, page_ids: PageIds) -> PageIds:
        """Settle a disagreement between an owner's own list of pages and the table; O(num_pages).

        What it has but does not list is leaked, what it lists but does not have is lost. Leaked
        pages go to quarantine, and so do lost ones that nobody has: somebody may still use them.

        Returns:
            The lost pages. In debug mode the first disagreement raises instead.
        """
        listed = np.zeros(self.num_pages, np.bool_)
        listed[page_ids] = True
        has = self._owner == owner
        label = self._owners.label(owner)
        leaked = np.flatnonzero(has & ~listed).astype(np.int32)
        lost = np.flatnonzero(listed & ~has).astype(np.int32)
        for page in leaked.tolist():
            self.report("leaked", "audit", page, label, label)
        for page in lost.tolist():
            self.report("lost", "audit", page, label, self.owner_of(page))
        self._give("quarantine", leaked, owner, QUARANTINE)
        self._give("quarantine", lost[self._owner[lost] == FREE], FREE, QUARANTINE)
        self._report_counts(self._recount())
        return lost

    def quarantine(self, page_ids: PageIds, owner: int) -> None:
        """Withhold pages of an owner for good; the caller reports why."""
        self._require_live("quarantine", owner)
        self._give("quarantine", page_ids[self._owner[page_ids] == owner], owner, QUARANTINE)

    def pages_of(self, owner: int) -> PageIds:
        """All pages of an owner, ascending; O(num_pages), for reports and tests."""
        return np.flatnonzero(self._owner == owner).astype(np.int32)

    def owner_of(self, page_id: int) -> str:
        """Name of the owner of a page."""
        if not 0 <= page_id < self.num_pages:
            raise PageError(f"page {page_id} is outside [0, {self.num_pages})")
        return self._owners.label(int(self._owner[page_id]))

    def owners_of(self, page_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Handle of the owner of each page."""
        owners: npt.NDArray[np.int64] = self._owner[page_ids]
        return owners

    def label_of(self, owner: int) -> str:
        """Name of an owner."""
        return self._owners.label(owner)

    def _give(self, operation: str, page_ids: PageIds, from_owner: int, to_owner: int) -> None:
        if not len(page_ids):
            return
        self._owner[page_ids] = to_owner
        self._owners.held[from_owner & SLOT_MASK] -= len(page_ids)
        self._owners.held[to_owner & SLOT_MASK] += len(page_ids)
        if self.debug:
            self._clock += 1
            names = f"{self._owners.label(from_owner)} -> {self._owners.label(to_owner)}"
            for page in page_ids.tolist():
                ring = self._history.setdefault(page, deque(maxlen=_HISTORY))
                ring.append(f"#{self._clock} {operation} {names}")

    def _order_free(self) -> None:
        ordered = np.flatnonzero(self._owner == FREE)[::-1]
        self._free[: len(ordered)] = ordered
        self._num_unordered = 0

    def _require_live(self, operation: str, owner: int) -> None:
        if owner in (FREE, QUARANTINE) or not self._owners.is_live(owner):
            raise PageError(
                f"{operation}: {owner} is no owner's handle; take one from new_owner and use it "
                "only until drop_owner"
            )

    def _vet(self, operation: str, page_ids: PageIds, owner: int) -> npt.NDArray[np.bool_] | None:
        """Which of the pages the caller may give away; None if all of them (the usual case)."""
        assert page_ids.dtype == np.int32, page_ids.dtype
        assert page_ids.ndim == 1, page_ids.shape
        if owner in (FREE, QUARANTINE):
            self._require_live(operation, owner)
        if not page_ids.size:
            return None
        if self._are_all(page_ids, owner):
            return None
        return self._convict(operation, page_ids, owner)

    def _are_all(self, page_ids: PageIds, owner: int) -> bool:
        """Whether these are pages of that owner, none of them twice."""
        if not page_ids.size:
            return True
        # A negative id is a huge unsigned one, so one comparison covers both ends.
        if int(page_ids.view(np.uint32).max()) >= self.num_pages:
            return False
        order = np.arange(page_ids.size, dtype=np.int32)
        self._scratch[page_ids] = order
        # Of two equal ids one has overwritten the mark of the other.
        unique = bool((self._scratch[page_ids] == order).all())
        return unique and bool((self._owner[page_ids] == owner).all())

    def _mend_free(self, page_ids: PageIds, owner: int) -> None:
        """The top of the free list is not what it should be: rebuild it from the owner table.

        Whoever has a page that was listed keeps it: it has not been handed out.
        """
        pages = Counter(page_ids.tolist())
        wrong: list[tuple[int, ViolationKind]] = []
        for page, times in pages.items():
            kind = self._kind_of_misuse(page, FREE, times)
            if kind == "already_free":  # as it should be here, but once
                kind = "duplicate" if times > 1 else None
            if kind is not None:
                wrong.append((page, kind))
        self._recount()
        caller = self._owners.label(owner)
        for page, kind in wrong:
            holder = self.owner_of(page) if kind != "out_of_range" else "nobody"
            self.report(kind, "alloc", page, caller, holder)

    def _recount(self) -> list[tuple[str, int, int]]:
        """Make all counts and the free list what the owner table says; what was counted wrong.

        Pages of an owner that was dropped go to quarantine: somebody may still use them.
        """
        self._owner[~self._owners.are_live(self._owner)] = QUARANTINE
        held = self._owners.held
        actual = np.bincount(self._owner & SLOT_MASK, minlength=len(held)).tolist()
        pairs = zip(self._owners.labels, held, actual, strict=True)
        wrong = [(label, was, now) for label, was, now in pairs if was != now]
        held[:] = actual
        self._order_free()
        return wrong

    def _report_counts(self, wrong: list[tuple[str, int, int]]) -> None:
        for label, was, now in wrong:
            self.report("sum", "audit", None, label, f"{was} pages were counted, it has {now}")

    def _convict(self, operation: str, page_ids: PageIds, owner: int) -> npt.NDArray[np.bool_]:
        caller = self._owners.label(owner)
        pages = page_ids.tolist()
        convicted: set[int] = set()
        for page, times in Counter(pages).items():
            kind = self._kind_of_misuse(page, owner, times)
            if kind is None:
                continue
            holder = self.owner_of(page) if kind != "out_of_range" else "nobody"
            self.report(kind, operation, page, caller, holder)
            convicted.add(page)
            if kind == "already_free":
                # Somebody still uses it: it must not be handed out.
                self._give("quarantine", np.array([page], np.int32), FREE, QUARANTINE)
            elif kind == "duplicate":
                # Two positions of one request shared it; who else reads it can't be known.
                self._give("quarantine", np.array([page], np.int32), owner, QUARANTINE)
        self._order_free()
        return np.array([page not in convicted for page in pages], np.bool_)

    def _kind_of_misuse(self, page: int, owner: int, times: int) -> ViolationKind | None:
        if not 0 <= page < self.num_pages:
            return "out_of_range"
        holder = int(self._owner[page])
        if holder == FREE:
            return "already_free"
        if holder == QUARANTINE:
            return "quarantined"
        if holder != owner:
            return "foreign"
        return "duplicate" if times > 1 else None

    def report(
        self, kind: ViolationKind, operation: str, page: int | None, caller: str, owner: str
    ) -> None:
        """Raise in debug mode, with the page's history; else record and log.

        Raises:
            PageError: in debug mode.
        """
        violation = Violation(kind=kind, operation=operation, page=page, caller=caller, owner=owner)
        if self.debug:
            raise PageError(f"{violation}{self._past(page)}")
        self.num_violations += 1
        self._violations.append(violation)
        # A fault that repeats must not fill the disk.
        if self.num_violations <= _MAX_VIOLATIONS or self.num_violations % _LOG_EVERY == 0:
            logger.error("page accounting, violation %d: %s", self.num_violations, violation)

    def _past(self, page: int | None) -> str:
        if page is None:
            return ""
        if not 0 <= page < self.num_pages:
            return f"; pages are [0, {self.num_pages})"
        return f"; history: {'; '.join(self._history.get(page, ())) or 'never handed out'}"

    def _disagreement(self, holdings: Mapping[int, int], num_cached: int | None) -> str | None:
        owners, counts = self._owners, self.counts()
        actual = np.bincount(self._owner & SLOT_MASK, minlength=len(owners.held))
        for slot in np.flatnonzero(actual != np.array(owners.held)).tolist():
            return f"{owners.labels[slot]!r} counts {owners.held[slot]} pages, has {actual[slot]}"
        if not bool(owners.are_live(self._owner).all()):
            return "a page belongs to an owner that was dropped"
        stack = self._free[: counts.free]
        if not np.array_equal(np.sort(stack), np.flatnonzero(self._owner == FREE)):
            return "the free list is not the set of free pages"
        if sum(owners.held) != self.num_pages or counts.in_use < 0:
            return f"{counts} does not add up"
        for owner, claimed in holdings.items():
            held = owners.held[owner & SLOT_MASK] if owners.is_live(owner) else 0
            if held != claimed:
                return f"{owners.label(owner)!r} claims {claimed} pages, has {held}"
        if num_cached is not None and num_cached != counts.cached:
            return f"the trees claim {num_cached} pages, have {counts.cached}"
        return None


class _Owners:
    """Names and counts by slot. A slot is reused, a handle is not: its generation differs."""

    def __init__(self, num_pages: int) -> None:
        self.labels = ["free", "quarantine"]
        self.held = [num_pages, 0]
        self.cached_slots: set[int] = set()
        self._handles = [FREE, QUARANTINE]
        self._unused: list[int] = []

    def add(self, label: str, *, cached: bool) -> int:
        if self._unused:
            slot = self._unused.pop()
            self._handles[slot] += 1 << _SLOT_BITS
            self.labels[slot] = label
        else:
            slot = len(self.labels)
            assert slot <= SLOT_MASK, slot
            self._handles.append(slot)
            self.labels.append(label)
            self.held.append(0)
        if cached:
            self.cached_slots.add(slot)
        return self._handles[slot]

    def live(self) -> list[int]:
        unused = set(self._unused)
        return [
            h for slot, h in enumerate(self._handles) if slot > QUARANTINE and slot not in unused
        ]

    @property
    def num_live(self) -> int:
        return len(self.labels) - len(self._unused) - 2

    def remove(self, owner: int) -> None:
        slot = owner & SLOT_MASK
        # The dropped handle must not pass for live until the slot is used again.
        self._handles[slot] += 1 << _SLOT_BITS
        self.labels[slot] = "nobody"
        self.cached_slots.discard(slot)
        self._unused.append(slot)

    def is_live(self, owner: int) -> bool:
        slot = owner & SLOT_MASK
        return owner >= 0 and slot < len(self._handles) and self._handles[slot] == owner

    def are_live(self, owners: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        live: npt.NDArray[np.bool_] = np.array(self._handles)[owners & SLOT_MASK] == owners
        return live

    def label(self, owner: int) -> str:
        return self.labels[owner & SLOT_MASK] if self.is_live(owner) else f"dropped owner {owner}"
