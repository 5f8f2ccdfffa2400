"""Leases over ledger and caches: random operations against the model, then the named cases."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from seawall.cache.chunk import ChunkCache
from seawall.cache.lease import LeaseBook
from seawall.cache.pages import PageLedger
from seawall.cache.radix import RadixCache
from seawall.core.errors import PageError
from tests.host.cache_machine import CacheMachine, soak_factor

WHICH = st.integers(0, 7)
BLOCKS = st.lists(st.integers(0, 2), min_size=0, max_size=6)


class LeaseMachine(RuleBasedStateMachine):
    """Any order of operations keeps single ownership, exact sums and readable KV."""

    machine: CacheMachine

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 16, 64]),
        num_pages=st.integers(4, 24),
        chunk=st.sampled_from([False, False, True]),
        policy=st.sampled_from(["lru", "lfu", "priority"]),
        window=st.sampled_from([None, 1, 7, 40]),
        num_window_pages=st.integers(4, 20),
    )
    def start(
        self,
        page_size: int,
        num_pages: int,
        chunk: bool,
        policy: str,
        window: int | None,
        num_window_pages: int,
    ) -> None:
        self.machine = CacheMachine(
            num_pages=num_pages,
            page_size=page_size,
            chunk=chunk,
            policy=policy,
            window=window,
            num_window_pages=num_window_pages,
        )

    @rule(
        blocks=BLOCKS,
        tail=st.integers(0, 63),
        twist=st.booleans(),
        extra_key=st.sampled_from([None, None, "", "lora"]),
        all_but=st.sampled_from([0, 1, 1, 5]),
    )
    def open(
        self, blocks: list[int], tail: int, twist: bool, extra_key: str | None, all_but: int
    ) -> None:
        if len(self.machine.running) < 6:
            tokens = self.machine.prompt(blocks, tail, twist=twist)
            self.machine.open(tokens, extra_key, len(tokens) - all_but)

    @rule(which=WHICH, pages=st.integers(0, 5), more=st.integers(0, 3))
    def compute(self, which: int, pages: int, more: int) -> None:
        if self.machine.running:
            self.machine.reserve_and_write(which, pages * self.machine.page_size + more)

    @rule(which=WHICH)
    def slide(self, which: int) -> None:
        if self.machine.running:
            self.machine.slide(which)

    @rule(num_pages=st.integers(0, 6))
    def evict_windows(self, num_pages: int) -> None:
        self.machine.evict_windows(num_pages)

    @rule(which=WHICH)
    def commit(self, which: int) -> None:
        if self.machine.running:
            self.machine.commit(which)

    @rule(which=WHICH, num_tokens=st.integers(0, 200))
    def truncate(self, which: int, num_tokens: int) -> None:
        if self.machine.running:
            self.machine.truncate(which, num_tokens)

    @rule(which=WHICH, insert=st.booleans())
    def release(self, which: int, insert: bool) -> None:
        if self.machine.running:
            self.machine.release(which, insert=insert)

    @rule(which=WHICH)
    def hold(self, which: int) -> None:
        if self.machine.running and len(self.machine.holds) < 3:
            self.machine.hold(which)

    @rule(which=WHICH)
    def release_hold(self, which: int) -> None:
        if self.machine.holds:
            self.machine.release_hold(which)

    @rule(num_pages=st.integers(0, 6))
    def evict(self, num_pages: int) -> None:
        self.machine.evict(num_pages)

    @rule()
    def flush(self) -> None:
        self.machine.flush()

    @invariant()
    def check(self) -> None:
        self.machine.check()

    def teardown(self) -> None:
        if hasattr(self, "machine"):
            self.machine.close()


LeaseMachine.TestCase.settings = settings(
    max_examples=60 * soak_factor(),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestLeaseMachine = LeaseMachine.TestCase


def tokens_of(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def radix_book(num_pages: int, page_size: int, *, debug: bool = True) -> LeaseBook:
    ledger = PageLedger(num_pages, debug=debug)
    return LeaseBook(ledger, RadixCache(ledger, page_size), page_size)


def test_open_takes_whole_pages_up_to_the_limit() -> None:
    book = radix_book(8, 4)
    tokens = np.arange(12, dtype=np.int32)
    first = book.open("a", tokens, None, max_match_tokens=11)
    assert first.num_cached_tokens == 0
    assert first.reserve(12)
    first.release(tokens, 12, insert=True)
    cached = [
        book.open(str(limit), tokens, None, max_match_tokens=limit).num_cached_tokens
        for limit in (-1, 0, 3, 4, 7, 11, 12, 99)
    ]
    assert cached == [0, 0, 0, 4, 4, 8, 12, 12]


def test_commit_of_a_duplicate_takes_the_trees_pages_and_frees_the_copies() -> None:
    book = radix_book(8, 2)
    tokens = tokens_of(1, 2, 3, 4, 5)
    leases = [book.open(rid, tokens, None, max_match_tokens=4) for rid in ("a", "b")]
    for lease in leases:
        assert lease.reserve(5)
    a, b = leases
    assert a.commit(tokens, 5) == range(0)
    assert (a.num_shared, a.num_own) == (2, 1)
    last = int(b.page_ids[2])
    assert book.ledger.num_free == 2
    assert b.commit(tokens, 5) == range(2)
    assert b.page_ids.tolist() == [*a.page_ids[:2].tolist(), last]
    assert book.ledger.num_free == 4
    assert book.check()


def test_commit_refuses_other_tokens_before_anything_changes() -> None:
    book = radix_book(8, 2)
    lease = book.open("a", tokens_of(1, 2, 3, 4), None, max_match_tokens=4)
    assert lease.reserve(4)
    lease.commit(tokens_of(1, 2), 2)
    before = book.ledger.counts()
    with pytest.raises(PageError, match=r"'a'.*not those of"):
        lease.commit(tokens_of(9, 2, 3, 4), 4)
    with pytest.raises(PageError, match="commit only what was computed"):
        lease.commit(tokens_of(1, 2, 3, 4, 5, 6), 6)
    with pytest.raises(PageError, match="commit only what was computed"):
        lease.commit(tokens_of(1, 2, 3), 4)
    assert book.ledger.counts() == before
    assert book.check()
    assert lease.commit(tokens_of(1, 2, 3, 4), 4) == range(0)
    assert lease.num_shared == 2


def test_reserve_says_no_without_side_effects() -> None:
    book = radix_book(4, 2)
    done = book.open("done", tokens_of(1, 2), None, max_match_tokens=0)
    assert done.reserve(2)
    done.release(tokens_of(1, 2), 2, insert=True)
    lease = book.open("a", tokens_of(5, 6), None, max_match_tokens=2)
    assert book.available_pages == 4
    assert not lease.reserve(9)
    assert book.ledger.counts().cached == 1
    assert lease.num_pages == 0
    assert lease.reserve(8)
    assert book.ledger.counts().cached == 0
    assert book.available_pages == 0
    assert not lease.reserve(9)
    assert lease.num_pages == 4


def test_pages_of_a_running_request_are_never_evicted() -> None:
    book = radix_book(4, 1)
    tokens = tokens_of(1, 2, 3)
    lease = book.open("a", tokens, None, max_match_tokens=0)
    assert lease.reserve(3)
    lease.commit(tokens, 3)
    assert book.available_pages == 1
    other = book.open("b", tokens_of(8, 9), None, max_match_tokens=2)
    assert not other.reserve(2)
    assert book.cache.evict(4) == 0
    assert not book.cache.reset()
    lease.release(tokens, 3, insert=False)
    assert book.available_pages == 4
    assert other.reserve(2)


def test_only_a_lease_that_runs_counts_as_a_use_of_the_cache() -> None:
    book = radix_book(32, 2)
    tokens = tokens_of(*range(8))
    lease = book.open("a", tokens, None, max_match_tokens=8)
    assert lease.reserve(8)
    lease.confirm()
    lease.release(tokens, 8, insert=True)
    before = book.cache.stats()
    assert (before.num_lookups, before.lookup_tokens, before.hit_tokens) == (1, 8, 0)
    for _ in range(5):
        waiting = book.open("b", tokens, None, max_match_tokens=7)
        assert waiting.num_cached_tokens == 6
        waiting.release(tokens, 0, insert=False)
    after = book.cache.stats()
    assert (after.num_lookups, after.lookup_tokens, after.hit_tokens) == (1, 8, 0)
    runs = book.open("b", tokens, None, max_match_tokens=7)
    runs.confirm()
    runs.confirm()  # counts once
    after = book.cache.stats()
    assert (after.num_lookups, after.lookup_tokens, after.hit_tokens) == (2, 8 + 7, 6)
    runs.release(tokens, 0, insert=False)
    with pytest.raises(PageError, match="released before"):
        runs.confirm()


def test_truncate_gives_back_own_pages_only() -> None:
    book = radix_book(8, 2)
    tokens = np.arange(12, dtype=np.int32)
    lease = book.open("a", tokens, None, max_match_tokens=0)
    assert lease.reserve(12)
    lease.commit(tokens, 4)
    assert lease.writable_from == 4
    assert lease.truncate(7) == 2
    assert lease.num_pages == 4
    assert lease.truncate(8) == 0
    assert lease.truncate(1) == 2
    assert lease.num_pages == lease.num_shared == 2
    assert book.check()


@pytest.mark.parametrize("debug", [True, False])
def test_a_lease_ends_once(debug: bool) -> None:
    book = radix_book(4, 1, debug=debug)
    tokens = tokens_of(1, 2)
    lease = book.open("a", tokens, None, max_match_tokens=0)
    assert lease.reserve(2)
    hold = lease.hold()
    lease.release(tokens, 2, insert=False)
    for again in (
        lambda: lease.release(tokens, 2, insert=False),
        lambda: lease.reserve(3),
        lambda: lease.commit(tokens, 2),
        lambda: lease.truncate(0),
        lease.hold,
    ):
        with pytest.raises(PageError, match=r"'a', which was released before"):
            again()
    hold.release()
    with pytest.raises(PageError, match="released before"):
        hold.release()
    assert book.ledger.num_free == 4
    assert book.num_open == 0
    assert book.check()


def test_page_ids_are_read_only() -> None:
    book = radix_book(4, 1)
    lease = book.open("a", tokens_of(1), None, max_match_tokens=0)
    assert lease.reserve(1)
    with pytest.raises(ValueError, match="read-only"):
        lease.page_ids[0] = 3
    assert lease.reserve(2)
    assert lease.page_ids.tolist() == [0, 1]


def chunk_book(num_pages: int, page_size: int) -> LeaseBook:
    ledger = PageLedger(num_pages, debug=True)
    return LeaseBook(ledger, ChunkCache(RadixCache(ledger, page_size)), page_size)


def test_chunk_cache_keeps_nothing_between_requests() -> None:
    book = chunk_book(8, 2)
    tokens = tokens_of(1, 2, 3, 4)
    for extra_key in (None, "group"):
        lease = book.open("a", tokens, extra_key, max_match_tokens=4)
        assert lease.num_cached_tokens == 0
        assert lease.reserve(4)
        assert lease.commit(tokens, 4) == range(0)
        assert lease.num_own == (2 if extra_key is None else 0)
        lease.release(tokens, 4, insert=True)
        assert book.ledger.num_free == 8
    assert book.cache.stats().num_nodes == 0


def test_chunk_cache_shares_the_prompt_among_the_samples_of_a_request() -> None:
    book = chunk_book(16, 2)
    prompt = tokens_of(1, 2, 3, 4, 5)
    first = book.open("g-0", prompt, "g", max_match_tokens=4)
    assert first.reserve(5)
    first.commit(prompt, 5)
    hold = first.hold()
    output = np.concatenate([prompt, tokens_of(6, 7, 8)])
    assert first.reserve(8)
    first.commit(output, 8)
    assert book.cache.stats().protected_pages == 4
    first.release(output, 8, insert=True)
    assert book.ledger.num_free == 14
    second = book.open("g-1", prompt, "g", max_match_tokens=4)
    stranger = book.open("h", prompt, "h", max_match_tokens=4)
    assert (second.num_cached_tokens, stranger.num_cached_tokens) == (4, 0)
    hold.release()
    assert book.ledger.num_free == 14
    second.release(prompt, 4, insert=True)
    stranger.release(prompt, 0, insert=False)
    assert book.ledger.num_free == 16
    assert book.check()


def test_without_debug_a_page_lost_to_a_bug_never_reaches_the_tree() -> None:
    book = radix_book(8, 2, debug=False)
    tokens = np.arange(8, dtype=np.int32)
    lease = book.open("a", tokens, None, max_match_tokens=0)
    assert lease.reserve(8)
    stolen = lease.page_ids[1:2].copy()
    book.ledger.free(stolen, lease.owner)
    assert lease.commit(tokens, 8) == range(0)
    assert lease.num_shared == 1
    assert book.ledger.violations[0].kind == "already_free"
    lease.release(tokens, 8, insert=True)
    counts = book.ledger.counts()
    assert (counts.free, counts.cached, counts.quarantined) == (6, 1, 1)
    assert book.check()
    other = book.open("b", tokens, None, max_match_tokens=8)
    assert other.num_cached_tokens == 2
    assert not other.reserve(16 + 1)
    assert other.reserve(14)
    assert int(stolen[0]) not in other.page_ids.tolist()


def test_without_debug_reserve_says_no_when_evicted_pages_turn_out_to_be_lost() -> None:
    book = radix_book(2, 1, debug=False)
    for token in (1, 2):
        lease = book.open("a", tokens_of(token), None, max_match_tokens=1)
        assert lease.reserve(1)
        lease.release(tokens_of(token), 1, insert=True)
    tree_handle = int(book.ledger._owner[0])
    book.ledger.free(np.array([0], np.int32), tree_handle)  # the tree still lists it
    lease = book.open("b", tokens_of(5, 6), None, max_match_tokens=0)
    assert not lease.reserve(2)
    assert lease.num_pages == 0
    assert [v.kind for v in book.ledger.violations] == ["already_free"]
    assert lease.reserve(1)
    counts = book.ledger.counts()
    assert (counts.in_use, counts.quarantined) == (1, 1)
    assert book.check()


def stored_pair(*, debug: bool) -> tuple[LeaseBook, np.ndarray]:
    """Two requests on one cached prefix of two pages, each with a page of its own."""
    book = radix_book(16, 2, debug=debug)
    tokens = np.arange(6, dtype=np.int32)
    for rid in ("first", "second"):
        lease = book.open(rid, tokens, None, max_match_tokens=4)
        assert lease.reserve(6)
        lease.commit(tokens, 4)
    return book, tokens


@pytest.mark.parametrize("debug", [True, False])
def test_a_page_that_a_lease_has_lost_is_found_by_the_audit(debug: bool) -> None:
    book, _ = stored_pair(debug=debug)
    assert book.audit() == []
    page = book.pages_of("second")["own"]
    owner = next(o for o, lease in book._open.items() if lease.rid == "second")
    book.ledger.free(np.array(page, np.int32), owner)
    if debug:
        with pytest.raises(PageError, match=r"audit by 'second'.*history: #"):
            book.audit()
        return
    assert book.audit() == ["second"]
    [violation] = book.violations
    assert (violation.kind, violation.page, violation.caller) == ("lost", page[0], "second")
    # It is withheld: nobody gets it while somebody may still write to it.
    assert book.ledger.owner_of(page[0]) == "quarantine"


def test_a_page_that_the_tree_has_lost_ends_those_who_read_it() -> None:
    book, tokens = stored_pair(debug=False)
    page = book.pages_of("first")["shared"][1]
    tree = book.ledger.owners_of(np.array([page])).item()
    book.ledger.free(np.array([page], np.int32), tree)
    assert book.audit() == ["first", "second"]
    assert book.violations[0].caller == "tree"
    assert book.audit() == []  # it is said once
    assert book.ledger.num_violations == 1
    for lease in list(book._open.values()):
        lease.release(tokens, 0, insert=False)
    assert book.cache.reset()
    assert book.ledger.counts().free == 15
    assert book.audit() == []
    assert book.check()


def test_a_prefix_that_nobody_reads_is_dropped_when_it_has_lost_a_page() -> None:
    book, tokens = stored_pair(debug=False)
    for lease in list(book._open.values()):
        lease.release(tokens, 0, insert=False)
    tree = book.cache.root.children  # type: ignore[attr-defined]
    page = next(iter(tree.values())).page_ids[1:2]
    book.ledger.free(page, book.ledger.owners_of(page).item())
    assert book.audit() == []
    assert book.open("next", tokens, None, max_match_tokens=6).num_cached_tokens == 0
    assert book.ledger.counts().quarantined == 1


def test_a_page_is_not_freed_while_its_node_is_locked() -> None:
    """Freeing a locked node's page: the lease is not its owner, and eviction passes it over."""
    for debug in (True, False):
        book, _ = stored_pair(debug=debug)
        shared = np.array(book.pages_of("first")["shared"], np.int32)
        owner = next(o for o, lease in book._open.items() if lease.rid == "first")
        assert book.cache.evict(99) == 0
        if debug:
            with pytest.raises(PageError, match=r"free by 'first': page \d is foreign.*'tree'"):
                book.ledger.free(shared, owner)
        else:
            assert book.ledger.free(shared, owner) == 0
            assert {v.owner for v in book.violations} == {"tree"}
        assert book.ledger.counts().cached == 2
        assert book.check()
        assert book.audit() == []


def test_pages_of_a_request_are_listed_by_id() -> None:
    book, _ = stored_pair(debug=False)
    first, second = book.pages_of("first"), book.pages_of("second")
    assert first["shared"] == second["shared"]
    assert not set(first["own"]) & set(second["own"])
    assert [len(first["shared"]), len(first["own"])] == [2, 1]
    assert book.all_pages() == {"first": first, "second": second}
    assert book.pages_of("nobody") == {}
