"""How the bytes that are left for KV become pages of two classes.

    full     pages of the layers that see everything: a request holds one a page of its positions
    window   pages of the layers with a window W: a request holds those of its last W positions
             and of the chunk that is computed, m at most

Requests no longer than m pages need as many of the one as of the other; the longest needs S of the
first and m of the second. The division is that of a request between them, sqrt(m S) pages long:
so neither short nor long requests find one class empty while the other is far from full. Owns the
rule; docs/memory.md gives the reasons. Whole numbers only.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass

from seawall.core.units import ceil_div
from seawall.memory.footprint import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowClass:
    """The window class, as the plan sees it.

    Attributes:
        page_bytes: bytes of one page in all layers with a window.
        tokens: the window, W.
        pages_per_seq: most pages that one request holds, m.
    """

    page_bytes: int
    tokens: int
    pages_per_seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OneClass:
    """All bytes go to pages of one class, at most `most` of them."""

    page_bytes: int
    most: int

    def least_bytes(self, num_pages: int) -> int:
        """What one request of so many pages takes."""
        return num_pages * self.page_bytes

    def longest_fit(self, num_bytes: int) -> int:
        """Pages of the longest request that so many bytes hold."""
        return num_bytes // self.page_bytes

    def solve(self, num_bytes: int, least: int) -> tuple[int, int]:
        """Pages, at least `least`, which must fit; and no window pages."""
        assert num_bytes >= self.least_bytes(least)
        return min(num_bytes // self.page_bytes, self.most), 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoClasses:
    """Divides bytes between the classes.

    Attributes:
        page_bytes: of the full class; 0 if every layer has a window.
        window: the other class.
        limits: R, S and the page size.
        most: bound on the pages of the full class.
    """

    page_bytes: int
    window: WindowClass
    limits: Limits
    most: int

    def least_bytes(self, num_pages: int) -> int:
        """What one request of so many pages takes."""
        held = min(num_pages, self.window.pages_per_seq)
        return num_pages * self.page_bytes + held * self.window.page_bytes

    def longest_fit(self, num_bytes: int) -> int:
        """Pages of the longest request that so many bytes hold, at most S."""
        sizes = range(1, self.limits.pages_per_seq + 1)
        return bisect_right(sizes, num_bytes, key=self.least_bytes)

    def solve(self, num_bytes: int, least: int) -> tuple[int, int]:
        """Pages of both classes, for bytes that hold one request of `least` pages.

        More bytes never mean fewer pages of either class.
        """
        window_bytes = self.window.page_bytes
        if self.page_bytes == 0:
            num_window = min(num_bytes // window_bytes, self._most_window)
            return min(self.most, max(least, self._reach(num_window))), num_window
        counts = range(least, self.most + 1)
        num_fit = bisect_right(counts, num_bytes, key=lambda count: self._bytes(count, least))
        num_pages = least + max(num_fit - 1, 0)
        left = (num_bytes - num_pages * self.page_bytes) // window_bytes
        if num_pages == self.most:
            return num_pages, min(left, self._most_window)
        return num_pages, min(left, self._beside(num_pages, least))

    @property
    def _most_window(self) -> int:
        """More can't be in use: R times m, and never more than pages of the full class."""
        return min(self.limits.max_running * self.window.pages_per_seq, self.most)

    def _beside(self, num_pages: int, least: int) -> int:
        """Window pages that go with so many pages of the full class."""
        held = self.window.pages_per_seq
        typical = max(held, math.isqrt(held * self.limits.pages_per_seq))
        shared = min(ceil_div(num_pages * held, typical), self._most_window)
        return max(shared, min(least, held))

    def _bytes(self, num_pages: int, least: int) -> int:
        window_pages = self._beside(num_pages, least)
        return num_pages * self.page_bytes + window_pages * self.window.page_bytes

    def _reach(self, num_window: int) -> int:
        """Positions that cost nothing, in pages: as many as the window pages can ever serve.

        A request of full length holds W / P window pages at least.
        """
        held = max(1, min(self.window.tokens // self.limits.page_size, self.limits.pages_per_seq))
        return ceil_div(num_window * self.limits.pages_per_seq, held)
