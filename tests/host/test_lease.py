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
    )
    def start(self, page_size: int, num_pages: int, chunk: bool) -> None:
        self.machine = CacheMachine(num_pages=num_pages, page_size=page_size, chunk=chunk)

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
    max_examples=300 * soak_factor(),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestLeaseMachine = LeaseMachine.TestCase


@pytest.mark.parametrize("chunk", [False, True])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_a_long_random_run_keeps_every_page(page_size: int, chunk: bool) -> None:
    rng = np.random.default_rng(page_size)
    machine = CacheMachine(num_pages=20, page_size=page_size, chunk=chunk)
    for _ in range(2500 * soak_factor()):
        which, kind = int(rng.integers(8)), float(rng.random())
        if len(machine.running) < 2 or (kind < 0.2 and len(machine.running) < 6):
            blocks = rng.integers(0, 2, rng.integers(0, 8)).tolist()
            tokens = machine.prompt(blocks, int(rng.integers(64)), twist=bool(rng.random() < 0.2))
            extra_key = [None, "lora"][int(rng.random() < (0.8 if chunk else 0.2))]
            machine.open(tokens, extra_key, len(tokens) - 1)
        elif kind < 0.6:
            machine.reserve_and_write(which, int(rng.integers(0, 4 * page_size + 1)))
        elif kind < 0.75:
            machine.commit(which)
        elif kind < 0.8:
            machine.truncate(which, int(rng.integers(0, 8 * page_size)))
        elif kind < 0.97:
            machine.release(which, insert=bool(rng.random() < 0.7))
        else:
            machine.evict(int(rng.integers(1, 4)))
        machine.check()
    evicted, hits = machine.tree.stats().evicted_pages, machine.tree.stats().hit_tokens
    machine.close()
    assert evicted > 20
    assert hits > 20 * page_size  # else the run has met nothing worth checking


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
    return LeaseBook(ledger, ChunkCache(ledger, page_size), page_size)


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
