"""Companion records against a model that remembers every write."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seawall.cache.companions import (
    EXTRA_ENTRY_BYTES,
    ID_BYTES,
    KIND_BYTES,
    PLAIN_SLOT_BYTES,
    CompanionStore,
    Wanted,
)
from seawall.core.step import Scores
from seawall.memory.footprint import COMPANION_SLOT_BYTES

NUM_PAGES = 6
WANTED = (
    Wanted(temperature=1.0, top_k=0, token_ids=()),
    Wanted(temperature=1.0, top_k=1, token_ids=()),
    Wanted(temperature=1.0, top_k=5, token_ids=()),
    Wanted(temperature=1.0, top_k=2, token_ids=(7, 3)),
    Wanted(temperature=0.5, top_k=0, token_ids=()),
    Wanted(temperature=0.5, top_k=3, token_ids=(9,)),
)


def truth(contents: list[int], wanted: Wanted) -> Scores:
    """Scores of slots with these contents: any fixed function of content and question."""
    rows = np.array(contents, np.float32)[:, None]
    ranks = np.arange(wanted.top_k, dtype=np.float32)
    logprobs = -rows[:, 0] / np.float32(wanted.temperature)
    return Scores(
        logprobs=logprobs,
        top_ids=(rows * 100 + ranks).astype(np.int64),
        top_logprobs=(rows - ranks) / np.float32(wanted.temperature),
        token_logprobs=-rows
        * np.array(wanted.token_ids, np.float32).reshape(1, -1)
        / np.float32(wanted.temperature),
    )


def assert_equal(found: Scores, expected: Scores) -> None:
    np.testing.assert_array_equal(found.logprobs, expected.logprobs)
    np.testing.assert_array_equal(found.top_ids, expected.top_ids)
    np.testing.assert_array_equal(found.top_logprobs, expected.top_logprobs)
    np.testing.assert_array_equal(found.token_logprobs, expected.token_logprobs)


def covers(written: Wanted, asked: Wanted) -> bool:
    """Whether one write must be enough to answer a question."""
    if asked.is_plain:
        return written.temperature == 1.0 and written.top_k >= asked.top_k
    return (
        written.temperature == asked.temperature
        and written.top_k >= asked.top_k
        and asked.token_ids in ((), written.token_ids)
    )


class Machine:
    """A store and what was written to each slot since its page was cleared."""

    def __init__(self, page_size: int, extra_bytes: int) -> None:
        self.store = CompanionStore(NUM_PAGES, page_size, extra_bytes=extra_bytes)
        self.page_size = page_size
        self.extra_bytes = extra_bytes
        self.contents = [list(range(p * 50, p * 50 + page_size)) for p in range(NUM_PAGES)]
        self.written: dict[tuple[int, int], set[Wanted]] = {}
        self.serial = 1000

    def slots(self, pages: list[int], start: int, end: int) -> list[tuple[int, int]]:
        size = self.page_size
        return [(pages[p // size], p % size) for p in range(start, end)]

    def record(self, pages: list[int], start: int, count: int, wanted: Wanted) -> None:
        slots = self.slots(pages, start, min(start + count, len(pages) * self.page_size))
        contents = [self.contents[page][at] for page, at in slots]
        beyond = [1] * (count - len(slots))
        self.store.record(ids(pages), start, truth(contents + beyond, wanted), wanted)
        for slot in slots:
            self.written.setdefault(slot, set()).add(wanted)

    def clear(self, page: int) -> None:
        self.store.clear(ids([page]))
        self.serial += 50
        self.contents[page] = list(range(self.serial, self.serial + self.page_size))
        for at in range(self.page_size):
            self.written.pop((page, at), None)

    def merge(self, source: int, target: int) -> None:
        """The target holds the same tokens: give it the source's contents first."""
        self.clear(target)
        self.contents[target] = list(self.contents[source])
        self.store.merge(ids([source]), ids([target]))
        for at in range(self.page_size):
            if (source, at) in self.written:
                self.written[target, at] = set(self.written[source, at])

    def check(self, pages: list[int], start: int, end: int, wanted: Wanted) -> None:
        until = self.store.known_until(ids(pages), start, end, wanted)
        assert start <= until <= max(start, end)
        slots = self.slots(pages, start, max(start, end))
        known = [any(covers(w, wanted) for w in self.written.get(s, ())) for s in slots]
        first_missing = known.index(False) if False in known else len(known)
        if self.extra_bytes >= 1 << 20 or wanted.is_plain:
            assert until == start + first_missing
        else:
            assert until <= start + first_missing  # the cap may have cost records, none is made up
        if until > start:
            contents = [self.contents[page][at] for page, at in slots[: until - start]]
            found = self.store.read(ids(pages), start, until, wanted)
            assert_equal(found, truth(contents, wanted))
        most = NUM_PAGES * self.page_size * PLAIN_SLOT_BYTES + self.extra_bytes
        assert self.store.num_bytes <= self.store.peak_bytes <= most


def ids(pages: list[int]) -> np.ndarray:
    return np.array(pages, np.int32)


@settings(max_examples=150, deadline=None)
@given(
    page_size=st.sampled_from([1, 3, 16]),
    extra_bytes=st.sampled_from([0, EXTRA_ENTRY_BYTES + KIND_BYTES + 300, 1 << 20]),
    data=st.data(),
)
def test_store_tells_what_was_recorded_and_nothing_else(
    page_size: int, extra_bytes: int, data: st.DataObject
) -> None:
    machine = Machine(page_size, extra_bytes)
    pages_of = st.lists(st.integers(0, NUM_PAGES - 1), min_size=1, max_size=4, unique=True)
    for _ in range(data.draw(st.integers(1, 25))):
        pages = data.draw(pages_of)
        end = len(pages) * page_size
        start = data.draw(st.integers(0, end))
        wanted = data.draw(st.sampled_from(WANTED))
        action = data.draw(st.sampled_from(["record", "record", "record", "clear", "merge"]))
        if action == "record":
            machine.record(pages, start, data.draw(st.integers(0, end - start + 3)), wanted)
        elif action == "clear":
            machine.clear(pages[0])
        elif len(pages) > 1:
            machine.merge(pages[0], pages[1])
        asked = data.draw(st.sampled_from(WANTED))
        machine.check(pages, start, data.draw(st.integers(0, end)), asked)


def test_first_record_stays() -> None:
    store = CompanionStore(1, 4, extra_bytes=1 << 20)
    wanted = WANTED[2]
    store.record(ids([0]), 0, truth([1, 2, 3, 4], wanted), wanted)
    store.record(ids([0]), 0, truth([9, 9, 9, 9], wanted), wanted)
    assert_equal(store.read(ids([0]), 0, 4, wanted), truth([1, 2, 3, 4], wanted))
    assert_equal(store.read(ids([0]), 0, 4, WANTED[1]), truth([1, 2, 3, 4], WANTED[1]))


def test_oldest_pages_lose_their_extras_first() -> None:
    wanted = WANTED[2]
    entry = EXTRA_ENTRY_BYTES + 4 * (4 + 8 * 5)
    store = CompanionStore(3, 4, extra_bytes=2 * entry + KIND_BYTES)
    for page in (0, 1):
        store.record(ids([page]), 0, truth([1, 2, 3, 4], wanted), wanted)
    store.read(ids([0]), 0, 4, wanted)
    store.record(ids([2]), 0, truth([1, 2, 3, 4], wanted), wanted)
    known = [store.known_until(ids([page]), 0, 4, wanted) for page in range(3)]
    assert known == [4, 0, 4]
    # The plain record of a page outlives its extras.
    assert store.known_until(ids([1]), 0, 4, WANTED[1]) == 4
    assert store.num_bytes == 3 * 4 * PLAIN_SLOT_BYTES + 2 * entry + KIND_BYTES
    store.reset()
    assert store.num_bytes == 3 * 4 * PLAIN_SLOT_BYTES


def test_long_lists_of_ids_are_counted_once_each() -> None:
    store = CompanionStore(8, 1, extra_bytes=1 << 20)
    plain = 8 * PLAIN_SLOT_BYTES
    lists = [tuple(range(n, n + 1000)) for n in range(3)]
    for number, token_ids in enumerate(lists):
        wanted = Wanted(temperature=1.0, top_k=0, token_ids=token_ids)
        for page in (2 * number, 2 * number + 1):
            store.record(ids([page]), 0, truth([5], wanted), wanted)
    kind = KIND_BYTES + 1000 * ID_BYTES
    assert store.num_bytes - plain == 3 * kind + 6 * (EXTRA_ENTRY_BYTES + 4 * 1001)
    store.clear(ids([0, 1, 2]))
    assert store.num_bytes - plain == 2 * kind + 3 * (EXTRA_ENTRY_BYTES + 4 * 1001)


def test_an_entry_beyond_the_cap_is_not_kept() -> None:
    wanted = Wanted(temperature=1.0, top_k=0, token_ids=tuple(range(100)))
    store = CompanionStore(2, 4, extra_bytes=EXTRA_ENTRY_BYTES + 4 * 4 * 101)
    store.record(ids([0]), 0, truth([1, 2, 3, 4], wanted), wanted)
    assert store.num_bytes == 2 * 4 * PLAIN_SLOT_BYTES
    assert store.known_until(ids([0]), 0, 4, wanted) == 0


def test_plan_and_store_agree_on_bytes() -> None:
    assert COMPANION_SLOT_BYTES == PLAIN_SLOT_BYTES
    store = CompanionStore(5, 7, extra_bytes=0)
    arrays = (store._logprobs, store._best_ids, store._best_logprobs)
    assert sum(array.nbytes for array in arrays) == 5 * 7 * PLAIN_SLOT_BYTES == store.num_bytes


@pytest.mark.parametrize("wanted", WANTED)
def test_nothing_is_known_of_a_fresh_store(wanted: Wanted) -> None:
    store = CompanionStore(2, 4, extra_bytes=1 << 20)
    assert store.known_until(ids([0, 1]), 1, 7, wanted) == 1
    assert store.known_until(ids([0, 1]), 7, 3, wanted) == 7
