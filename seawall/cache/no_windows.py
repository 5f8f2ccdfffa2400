"""The window class of a model without sliding windows: no pages, no state, nothing to go wrong.

It answers as cache/windows.py does where there is nothing, so that leases need not ask which it is.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from seawall.cache.pages import PageIds, PageLedger

_NO_PAGES: PageIds = np.empty(0, np.int32)


class NoWindows:
    """The window class of a model that has no windows: nothing to hold, nothing in short supply."""

    most_held = 0
    num_evictable = 0
    num_free = 2**31
    violations = ()

    def counts(self) -> None:
        """See Windows."""

    def open(self, owner: int, label: str) -> None:
        """See Windows."""

    def close(self, owner: int) -> None:
        """See Windows."""

    def attach(self, page_ids: PageIds, owner: int) -> None:
        """See Windows."""

    def detach(self, page_ids: PageIds, owner: int) -> None:
        """See Windows."""

    def lock(self, page_ids: PageIds) -> None:
        """See Windows."""

    def unlock(self, page_ids: PageIds) -> None:
        """See Windows."""

    def num_sole(self, page_ids: PageIds) -> int:
        """See Windows."""
        return 0

    def evict(self, num_pages: int) -> int:
        """See Windows."""
        return 0

    def table(self, page_ids: PageIds) -> tuple[PageIds, PageIds]:
        """See Windows."""
        return _NO_PAGES, _NO_PAGES

    def first_kept(self, position: int) -> int:
        """See Windows."""
        return 0

    def first_read(self, position: int) -> int:
        """See Windows."""
        return 0

    def run_start(self, page_ids: PageIds) -> int:
        """See Windows."""
        return 0

    def num_held(self, owner: int) -> int:
        """See Windows."""
        return 0

    def differing(self, claims: Mapping[int, int]) -> set[int]:
        """See Windows."""
        return set()

    def audit(self, owner: int, page_ids: PageIds) -> PageIds:
        """See Windows."""
        return _NO_PAGES

    def is_sound(self) -> bool:
        """See Windows."""
        return True

    def has_all(self, owner: int, page_ids: PageIds) -> bool:
        """See Windows."""
        return True

    def drop_others(self, cached: PageIds) -> None:
        """See Windows."""

    def settle(self, cached: PageIds, readers: Sequence[PageIds]) -> PageIds:
        """See Windows."""
        return _NO_PAGES

    def check(self, full: PageLedger) -> bool:
        """See Windows."""
        return True
