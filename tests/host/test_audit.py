"""The audit of each step: faults planted in counts, locks, maps and lists are found at once."""

from collections.abc import Callable

import numpy as np
import pytest

from seawall.cache.lease import Lease, LeaseBook
from seawall.cache.pages import SLOT_MASK, PageLedger
from seawall.cache.radix import RadixCache
from seawall.cache.swa import SwaCache
from seawall.cache.windows import WindowPages
from seawall.core.errors import PageError

TOKENS = np.arange(20, dtype=np.int32)


class Harbour:
    """A stored prefix that "req-a" reads and goes on from, a hold on it, and "req-b" beside it."""

    def __init__(self, *, debug: bool = False) -> None:
        self.full = PageLedger(64, debug=debug)
        self.windows = WindowPages(
            PageLedger(32, debug=debug), num_full_pages=64, page_size=2, window=5
        )
        self.tree = RadixCache(self.full, 2)
        self.book = LeaseBook(self.full, SwaCache(self.tree, self.windows), 2, windows=self.windows)
        first = self.open("first", TOKENS[:12])
        first.release(TOKENS, 12, insert=True)
        self.a = self.open("req-a", TOKENS)
        self.hold = self.a.hold()
        self.b = self.open("req-b", TOKENS + 50)

    def open(self, rid: str, tokens: np.ndarray) -> Lease:
        lease = self.book.open(rid, tokens, None, max_match_tokens=12)
        assert lease.reserve(len(tokens))
        return lease

    def end_a(self) -> None:
        self.hold.release()
        self.a.release(TOKENS, 0, insert=False)

    def locked_window(self) -> int:
        return int(np.flatnonzero(self.windows._locks)[0])

    def close(self) -> None:
        """End everything: nothing is lost but what is in quarantine."""
        if self.a.rid in self.book.all_pages():
            self.end_a()
        self.b.release(TOKENS, 0, insert=False)
        assert self.book.cache.reset()
        for ledger in (self.full, self.windows.ledger):
            counts = ledger.counts()
            assert counts.free + counts.quarantined == counts.total
        assert self.book.check()


def own_window_unmapped(scene: Harbour) -> None:
    scene.windows._window_of[scene.a.page_ids[-1]] = -1


def own_window_given_back_too_early(scene: Harbour) -> None:
    scene.windows.detach(scene.a.page_ids[-1:].copy(), scene.a.owner)


def two_full_pages_share_a_window_page(scene: Harbour) -> None:
    a, b = scene.a.page_ids[-1], scene.b.page_ids[-1]
    scene.windows._window_of[a] = scene.windows._window_of[b]


def locked_window_of_the_tree_freed(scene: Harbour) -> None:
    page = np.array([scene.locked_window()], np.int32)
    scene.windows.ledger.free(page, scene.windows._owners[scene.tree.owner])


def window_lock_too_many(scene: Harbour) -> None:
    scene.windows._locks[scene.locked_window()] += 1


def window_lock_too_few(scene: Harbour) -> None:
    scene.windows._locks[scene.locked_window()] -= 1


def evictable_windows_drift(scene: Harbour) -> None:
    scene.windows.num_evictable += 3


def evictable_pages_drift(scene: Harbour) -> None:
    scene.tree.num_evictable += 2


def tree_lock_too_few(scene: Harbour) -> None:
    scene.a.node.num_locks -= 1


def tree_lock_too_many(scene: Harbour) -> None:
    scene.a.node.num_locks += 1


def lock_nobody_gives_back(scene: Harbour) -> None:
    scene.tree.lock(scene.a.node)


def count_of_a_request_drifts(scene: Harbour) -> None:
    scene.full._owners.held[scene.a.owner & SLOT_MASK] += 1


def count_of_free_pages_drifts(scene: Harbour) -> None:
    scene.full._owners.held[0] -= 1


def window_count_of_a_request_drifts(scene: Harbour) -> None:
    handle = scene.windows._owners[scene.a.owner]
    scene.windows.ledger._owners.held[handle & SLOT_MASK] += 1


# fault, who is named, and who is ended
FAULTS: list[tuple[Callable[[Harbour], None], str, list[str]]] = [
    (own_window_unmapped, "req-a", ["req-a"]),
    (own_window_given_back_too_early, "req-a", ["req-a"]),
    (two_full_pages_share_a_window_page, "req-a", ["req-a"]),
    (locked_window_of_the_tree_freed, "tree", ["req-a"]),
    (window_lock_too_many, "tree", []),
    (window_lock_too_few, "tree", []),
    (evictable_windows_drift, "tree", []),
    (evictable_pages_drift, "tree", []),
    (tree_lock_too_few, "tree", []),
    (tree_lock_too_many, "tree", []),
    (lock_nobody_gives_back, "tree", []),
    (count_of_a_request_drifts, "req-a", []),
    (count_of_free_pages_drifts, "free", []),
    (window_count_of_a_request_drifts, "req-a", []),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[0].__name__)
def test_the_next_audit_finds_names_and_mends(
    fault: tuple[Callable[[Harbour], None], str, list[str]],
) -> None:
    plant, named, ended = fault
    scene = Harbour()
    assert scene.book.audit() == []
    assert not scene.book.violations
    plant(scene)
    assert scene.book.audit() == ended
    found = [str(violation) for violation in scene.book.violations]
    assert any(repr(named) in violation for violation in found), found
    # Once; when those are gone who must not go on, service does.
    if ended:
        scene.end_a()
    assert scene.book.audit() == []
    assert [str(violation) for violation in scene.book.violations] == found
    scene.close()
    assert [str(violation) for violation in scene.book.violations] == found


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[0].__name__)
def test_in_debug_mode_the_audit_raises(
    fault: tuple[Callable[[Harbour], None], str, list[str]],
) -> None:
    plant, named, _ = fault
    scene = Harbour(debug=True)
    plant(scene)
    with pytest.raises(PageError, match=named):
        scene.book.audit()


def test_a_prefix_evicted_under_its_readers_ends_them() -> None:
    scene = Harbour()
    node = scene.a.node
    while node.parent is not None:
        node.num_locks, node = 0, node.parent
    scene.tree._queue.offer(scene.a.node)
    scene.tree.num_evictable, scene.tree.num_protected = 6, 0
    assert scene.tree.evict(6) == 6
    assert scene.book.audit() == ["req-a"]
    assert scene.book.audit() == []
    assert scene.book.violations
    scene.end_a()
    assert scene.book.audit() == []


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[0].__name__)
def test_all_can_be_given_up_whatever_is_wrong(
    fault: tuple[Callable[[Harbour], None], str, list[str]], debug: bool
) -> None:
    scene = Harbour(debug=debug)
    fault[0](scene)
    del scene.book._open[scene.b.owner]
    scene.book.abandon()
    assert not scene.book.violations
    assert scene.book.num_open == 0
    assert scene.book.audit() == []
    assert scene.book.check()
    assert scene.full.num_free == 64
    assert scene.windows.num_free == 32
    scene.open("next", TOKENS).release(TOKENS, 20, insert=True)
    assert scene.book.check()


def test_a_page_that_somebody_has_is_not_handed_out_again() -> None:
    for listed in ("another's", "twice"):
        ledger = PageLedger(8, debug=False)
        a, b = ledger.new_owner("a"), ledger.new_owner("b")
        mine = ledger.alloc(2, a)
        top = ledger.num_free - 1
        ledger._free[top] = mine[0] if listed == "another's" else ledger._free[top - 1]
        taken = ledger.alloc(3, b)
        assert len({*mine.tolist(), *taken.tolist()}) == 5
        assert ledger.pages_of(a).tolist() == mine.tolist()
        assert ledger.num_violations == 1
        violation = ledger.violations[0]
        assert (violation.operation, violation.caller) == ("alloc", "b")
        assert violation.owner == ("a" if listed == "another's" else "free")
        assert len(ledger.alloc(3, b)) == 3  # none was lost from the list
        assert ledger.check()


def test_a_check_reports_a_wrong_count_once() -> None:
    ledger = PageLedger(8, debug=False)
    a = ledger.new_owner("a")
    ledger.alloc(2, a)
    ledger._owners.held[a & SLOT_MASK] += 1
    assert not ledger.check()
    assert "'a' counts 3 pages, has 2" in str(ledger.violations[0])
    assert ledger.check()
    assert ledger.num_violations == 1


def test_a_lease_missing_from_the_book_keeps_its_locks() -> None:
    scene = Harbour()
    del scene.book._open[scene.a.owner]
    scene.book.audit()
    assert scene.a.node.num_locks == 2
    assert int(scene.windows._locks.max()) == 2
