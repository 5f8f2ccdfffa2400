"""Window pages: how they hang on full pages, where a match may end, each misuse in both modes."""

from collections.abc import Callable

import numpy as np
import pytest

from seawall.cache.eviction import EVICTION_ORDERS
from seawall.cache.lease import LeaseBook
from seawall.cache.pages import PageIds, PageLedger
from seawall.cache.prefix import PrefixKey
from seawall.cache.radix import RadixCache
from seawall.cache.swa import SwaCache
from seawall.cache.windows import WindowPages
from seawall.core.errors import PageError


def ids(*pages: int) -> PageIds:
    return np.array(pages, np.int32)


class Sea:
    """A book of leases over two classes: pages of 2 tokens, a window of 5."""

    def __init__(
        self,
        *,
        debug: bool = True,
        num_pages: int = 32,
        num_windows: int = 16,
        policy: str = "lru",
    ) -> None:
        order = EVICTION_ORDERS[policy]
        self.full = PageLedger(num_pages, debug=debug)
        self.windows = WindowPages(
            PageLedger(num_windows, debug=debug),
            num_full_pages=num_pages,
            page_size=2,
            window=5,
            order=order,
        )
        self.cache = SwaCache(RadixCache(self.full, 2, order), self.windows)
        self.book = LeaseBook(self.full, self.cache, 2, windows=self.windows)

    def store(self, tokens: np.ndarray, *, slide: bool = True, priority: int = 0) -> PageIds:
        """Compute and store these tokens; returns the full pages."""
        lease = self.book.open("w", tokens, None, max_match_tokens=0)
        assert lease.reserve(len(tokens))
        if slide:
            lease.slide(len(tokens))
        lease.commit(tokens, len(tokens), priority=priority)
        pages = lease.page_ids.copy()
        lease.release(tokens, len(tokens), insert=True, priority=priority)
        return pages

    def found(self, tokens: np.ndarray) -> int:
        lease = self.book.open("f", tokens, None, max_match_tokens=len(tokens))
        lease.confirm()
        lease.release(tokens, 0, insert=False)
        return lease.num_cached_tokens


TOKENS = np.arange(20, dtype=np.int32)


def key_of(tokens: np.ndarray) -> PrefixKey:
    return PrefixKey(tokens=tokens)


def test_window_pages_go_back_as_the_window_moves() -> None:
    sea = Sea()
    lease = sea.book.open("a", TOKENS, None, max_match_tokens=0)
    most = 0
    for end in range(2, 21, 2):
        lease.slide(end - 2)
        assert lease.reserve(end)
        most = max(most, sea.windows.ledger.counts().in_use)
        assert sea.book.check()
    assert most == 4  # a window of five tokens lies in three pages, and one is being written
    assert most <= sea.windows.most_held
    assert sea.full.counts().in_use == 10
    assert lease.reads_from(20)
    assert not lease.reads_from(10)
    lease.release(TOKENS, 0, insert=False)
    assert sea.windows.num_free == 16


def test_a_match_ends_only_where_a_whole_window_survives() -> None:
    sea = Sea()
    pages = sea.store(TOKENS)
    assert sea.found(TOKENS) == 20
    # Shorter prefixes end where windows are gone already, though their full pages are there.
    assert sea.found(TOKENS[:12]) == 0
    assert sea.full.counts().cached == 10
    other = np.concatenate([TOKENS[:12], TOKENS[:8] + 50])
    assert sea.found(other) == 0
    # Whoever computes it again heals the tree: now both branches are there.
    healed = sea.store(other, slide=False)
    assert healed[:6].tolist() == pages[:6].tolist()
    assert sea.found(other) == 20
    assert sea.found(TOKENS) == 20
    assert sea.found(TOKENS[:12]) == 12
    assert sea.book.check()


def test_a_prefix_that_loses_window_pages_is_found_up_to_a_whole_window() -> None:
    # The last positions of a run go first, so that what is left is a shorter prefix.
    for evicted, length in ((0, 20), (1, 18), (3, 14), (6, 8), (9, 2), (10, 0)):
        sea = Sea()
        sea.store(TOKENS, slide=False)
        assert sea.windows.evict(evicted) == evicted
        assert sea.found(TOKENS) == length
        assert sea.book.check()
        assert sea.full.counts().cached == 10
        assert sea.windows.evict(99) == 10 - evicted


def test_what_was_matched_keeps_its_window_longest() -> None:
    sea = Sea()
    sea.store(TOKENS, slide=False)
    assert sea.found(TOKENS) == 20
    assert sea.windows.evict(7) == 7
    assert sea.found(TOKENS) == 20
    assert sea.windows.evict(1) == 1
    assert sea.found(TOKENS) == 0


def test_window_pages_are_evicted_least_recently_used_first_and_never_locked() -> None:
    sea = Sea()
    first, second, third = TOKENS, TOKENS + 100, TOKENS + 200
    for tokens in (first, second, third):
        sea.store(tokens)
    held = sea.windows.ledger.counts().cached // 3
    assert sea.found(first) == 20
    lease = sea.book.open("a", second, None, max_match_tokens=20)
    assert sea.windows.evict(held) == held
    assert [sea.found(first), sea.found(third)] == [20, 0]
    assert sea.windows.evict(99) == held
    assert sea.found(first) == 0
    lease.release(second, 20, insert=True)
    assert sea.found(second) == 20
    assert sea.book.check()


@pytest.mark.parametrize(("policy", "survives"), [("lru", 0), ("lfu", 20), ("priority", 20)])
def test_window_pages_go_in_the_order_of_the_tree(policy: str, survives: int) -> None:
    sea = Sea(num_pages=400, num_windows=24, policy=policy)
    sea.store(TOKENS, priority=10)
    for _ in range(3):
        assert sea.found(TOKENS) == 20
    for other in range(1, 12):
        sea.store(TOKENS + 50 * other)
    assert sea.full.counts().cached == 12 * 10  # none of them was short of full pages
    assert sea.cache.measure(key_of(TOKENS)) == survives
    assert sea.book.check()


def test_a_priority_raised_later_counts_for_windows_too() -> None:
    sea = Sea(policy="priority")
    sea.store(TOKENS, priority=1)
    sea.store(TOKENS + 50, priority=2)
    sea.store(TOKENS, priority=3)
    held = sea.windows.ledger.counts().cached // 2
    assert sea.windows.evict(held) == held
    assert [sea.found(TOKENS), sea.found(TOKENS + 50)] == [20, 0]


def test_a_lease_that_never_ran_renews_no_window() -> None:
    sea = Sea()
    sea.store(TOKENS)
    sea.store(TOKENS + 50)
    for _ in range(5):
        waiting = sea.book.open("w", TOKENS, None, max_match_tokens=20)
        assert waiting.num_cached_tokens == 20
        waiting.release(TOKENS, 0, insert=False)
    held = sea.windows.ledger.counts().cached // 2
    assert sea.windows.evict(held) == held
    assert [sea.found(TOKENS), sea.found(TOKENS + 50)] == [0, 20]


def test_the_queue_of_windows_is_bounded_whatever_is_locked_and_used() -> None:
    sea = Sea(policy="lfu")
    rng = np.random.default_rng(2)
    sea.store(TOKENS)
    sea.store(TOKENS + 50)
    for _ in range(300):
        tokens = TOKENS + 50 * int(rng.integers(2))
        lease = sea.book.open("a", tokens, None, max_match_tokens=20)
        if rng.random() < 0.5:
            lease.confirm()
        lease.release(tokens, 0, insert=False)
        queued = [page for _, _, pages in sea.windows._queue._heap for page in pages.tolist()]
        assert sea.windows._queue._num_queued == len(queued) <= 2 * 16
    cached = sea.windows.ledger.counts().cached
    assert sea.windows.evict(99) == cached


def test_full_pages_take_their_window_pages_with_them() -> None:
    sea = Sea()
    sea.store(TOKENS)
    assert sea.cache.evict(1) > 0
    assert sea.book.check()
    assert sea.cache.reset()
    assert sea.windows.num_free == 16
    assert sea.full.num_free == 32


def test_a_lease_that_slides_past_a_shared_prefix_unlocks_its_window() -> None:
    sea = Sea()
    sea.store(TOKENS)
    longer = np.concatenate([TOKENS, TOKENS + 30])
    lease = sea.book.open("a", longer, None, max_match_tokens=20)
    locked = sea.windows.num_evictable
    assert lease.num_returning_windows == sea.windows.ledger.counts().cached
    for end in range(22, 31, 2):
        lease.slide(end - 2)
        assert lease.reserve(end)
    lease.slide(30)
    assert sea.windows.num_evictable > locked == 0
    assert lease.num_returning_windows == lease.num_own_windows <= sea.windows.most_held
    lease.release(longer, 30, insert=True)
    assert sea.found(longer[:30]) == 30


def test_reserve_needs_both_classes() -> None:
    sea = Sea(num_windows=6)
    lease = sea.book.open("a", TOKENS, None, max_match_tokens=0)
    assert lease.reserve(12)
    before = sea.full.counts(), sea.windows.ledger.counts()
    assert not lease.reserve(14)
    assert (sea.full.counts(), sea.windows.ledger.counts()) == before
    lease.slide(12)
    assert lease.reserve(14)
    lease.release(TOKENS, 14, insert=True)
    other = sea.book.open("b", TOKENS + 50, None, max_match_tokens=0)
    assert other.reserve(12)  # evicts window pages, and no full ones
    assert sea.full.counts().cached == 7
    assert sea.book.check()


class Misuse:
    """A request "req-a" with pages 0 and 1, and "req-b" with 2."""

    def __init__(self, *, debug: bool) -> None:
        self.sea = Sea(debug=debug)
        self.a = self.sea.book.open("req-a", TOKENS, None, max_match_tokens=0)
        self.b = self.sea.book.open("req-b", TOKENS + 9, None, max_match_tokens=0)
        assert self.a.reserve(4)
        assert self.b.reserve(2)


def full_freed_without_its_window(scene: Misuse) -> None:
    """The next owner of the full page finds it mapped: the mapping is stale."""
    page = scene.a.page_ids[1:].copy()
    scene.sea.full.free(page, scene.a.owner)
    assert scene.b.reserve(4)


def window_freed_behind_the_map(scene: Misuse) -> None:
    """The next owner of the window page finds a full page that points to it."""
    windows = scene.sea.windows
    page = windows.of(scene.a.page_ids[1:])
    windows.ledger.free(page, windows._owners[scene.a.owner])
    assert scene.b.reserve(4)


# call, who is named, and who is ended by the audit
MISUSES = [
    (full_freed_without_its_window, ["req-a", "req-b"], ["req-a", "req-b"]),
    (window_freed_behind_the_map, ["req-b"], ["req-a"]),
]
Case = tuple[Callable[[Misuse], None], list[str], list[str]]


@pytest.mark.parametrize("misuse", MISUSES)
def test_a_stale_mapping_raises_in_debug_mode(misuse: Case) -> None:
    call, named, _ = misuse
    scene = Misuse(debug=True)
    with pytest.raises(PageError) as caught:
        call(scene)
    message = str(caught.value)
    assert "history: #" in message
    assert "still mapped to a window page" in message
    assert all(name in message for name in named), message


@pytest.mark.parametrize("misuse", MISUSES)
def test_a_stale_mapping_is_contained_in_production(misuse: Case) -> None:
    call, named, ended = misuse
    scene = Misuse(debug=False)
    sea = scene.sea
    call(scene)
    violation = next(v for v in sea.book.violations if v.kind == "stale")
    assert all(name in str(violation) for name in named)
    assert sea.windows.ledger.counts().quarantined == 1
    # Both pages of b are its own in both classes, whatever happened to a.
    assert len(set(sea.windows.of(scene.b.page_ids).tolist())) == 2
    assert sea.windows.num_held(scene.b.owner) == 2
    assert sea.book.audit() == ended
    scene.a.release(TOKENS, 0, insert=False)
    scene.b.release(TOKENS, 0, insert=False)
    # Service goes on with what is left, and nothing else is lost.
    assert sea.windows.num_free == 15
    assert sea.book.check()
    other = sea.book.open("c", TOKENS, None, max_match_tokens=0)
    assert other.reserve(20)
    assert other.num_own_windows == 10
    assert sea.book.audit() == []


def test_the_check_finds_a_mapping_that_is_not_one_to_one() -> None:
    for damage in ("twice", "other owner", "count"):
        sea = Sea(debug=False)
        lease = sea.book.open("a", TOKENS, None, max_match_tokens=0)
        assert lease.reserve(8)
        assert sea.book.check()
        if damage == "twice":
            sea.windows._window_of[0] = sea.windows._window_of[1]
        elif damage == "other owner":
            other = sea.windows.ledger.new_owner("x")
            sea.windows.ledger.transfer(ids(0), sea.windows._owners[lease.owner], other)
        else:
            sea.windows.num_evictable += 1
        assert not sea.book.check()
        assert sea.book.violations[-1].kind == "sum"
