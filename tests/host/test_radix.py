"""The radix tree: what it finds, what it evicts first, and how much work it does for that."""

import numpy as np
import pytest

from seawall.cache.eviction import (
    EVICTION_ORDERS,
    EvictionOrder,
    least_recently_used,
    lowest_priority,
)
from seawall.cache.pages import PageIds, PageLedger
from seawall.cache.prefix import PrefixKey, common_length
from seawall.cache.radix import RadixCache
from seawall.core.errors import PageError


class Forest:
    """A tree and one owner that feeds it."""

    def __init__(
        self, num_pages: int, page_size: int, order: EvictionOrder = least_recently_used
    ) -> None:
        self.page_size = page_size
        self.ledger = PageLedger(num_pages, debug=True)
        self.tree = RadixCache(self.ledger, page_size, order)
        self.owner = self.ledger.new_owner("feeder")

    def insert(
        self,
        tokens: list[int] | range | np.ndarray,
        extra_key: str | None = None,
        priority: int = 0,
    ) -> PageIds:
        key = key_of(tokens, extra_key)
        pages = self.ledger.alloc(len(key) // self.page_size, self.owner)
        result = self.tree.insert(key, pages, self.owner, priority=priority)
        self.ledger.free(pages[: result.num_existing], self.owner)
        return result.page_ids

    def cached(self, tokens: list[int] | range | np.ndarray, extra_key: str | None = None) -> int:
        """Tokens that the tree holds, without a lookup that would mark them as used."""
        node, done = self.tree.root, 0
        key = key_of(tokens, extra_key)
        while True:
            child = node.children.get(self.tree._edge(key, done // self.page_size))
            if child is None:
                return done
            same = common_length(child.tokens, key.tokens[done:])
            done += same - same % self.page_size
            if same < len(child.tokens) or done + self.page_size > len(key):
                return done
            node = child

    def use(self, tokens: list[int] | range | np.ndarray) -> int:
        """Look up and go on from what is found; returns its length."""
        match = self.tree.match(key_of(tokens))
        self.tree.use(match)
        return match.num_tokens

    def visits(self) -> int:
        return self.tree.stats().node_visits


def key_of(tokens: list[int] | range | np.ndarray, extra_key: str | None = None) -> PrefixKey:
    return PrefixKey(tokens=np.array(tokens, np.int32), extra_key=extra_key)


def test_keys_are_views() -> None:
    tokens = np.arange(8, dtype=np.int32)
    key = PrefixKey(tokens=tokens, extra_key="x").head(3)
    assert len(key) == 3
    assert key.extra_key == "x"
    assert np.shares_memory(key.tokens, tokens)


def test_common_length_over_block_edges() -> None:
    tokens = np.arange(100_000, dtype=np.int32)
    for where in (0, 1, 1023, 1024, 1025, 5119, 5120, 60_000, 99_999):
        other = tokens.copy()
        other[where] = -1
        assert common_length(tokens, other) == where
    assert common_length(tokens, tokens[:77]) == 77
    assert common_length(tokens[:0], tokens) == 0


@pytest.mark.parametrize("page_size", [1, 2, 5, 64])
def test_a_match_is_whole_pages_of_the_longest_prefix(page_size: int) -> None:
    forest = Forest(64, page_size)
    tokens = np.arange(6 * page_size, dtype=np.int32)
    pages = forest.insert(tokens)
    other = tokens.copy()
    other[3 * page_size + page_size // 2] = 999  # parts inside page 3
    branch = forest.insert(other)
    assert branch[:3].tolist() == pages[:3].tolist()
    assert not set(branch[3:].tolist()) & set(pages.tolist())
    for length in range(0, len(tokens) + 1, max(1, page_size // 3)):
        match = forest.tree.match(key_of(tokens[:length]))
        assert match.num_tokens == length - length % page_size
        assert match.page_ids.tolist() == pages[: length // page_size].tolist()
    assert forest.tree.match(key_of(other)).page_ids.tolist() == branch.tolist()
    assert forest.tree.match(key_of(other[page_size:])).num_tokens == 0
    assert forest.ledger.check({forest.owner: 0})


def test_extra_keys_are_worlds_apart() -> None:
    forest = Forest(16, 2)
    tokens = [1, 2, 3, 4]
    worlds = [None, "", "a", "+a", "\udcff"]
    pages = {world: forest.insert(tokens, world).tolist() for world in worlds}
    assert len({page for world in pages.values() for page in world}) == 10
    for world in worlds:
        assert forest.tree.match(key_of(tokens, world)).page_ids.tolist() == pages[world]
    assert forest.tree.match(key_of(tokens, "b")).num_tokens == 0


def test_nodes_do_not_keep_the_callers_tokens_alive() -> None:
    forest = Forest(16, 2)
    tokens = np.arange(8, dtype=np.int32)
    forest.insert(tokens)
    for end in (8, 4):  # the second match splits
        forest.tree.match(PrefixKey(tokens=tokens[:end]))
        for node in forest.tree.nodes():
            assert node.tokens.base is None
            assert node.page_ids.base is None
    tokens[:] = 7
    assert forest.tree.match(key_of(np.arange(8))).num_tokens == 8


def test_insert_takes_over_only_what_is_new() -> None:
    forest = Forest(16, 2)
    first = forest.insert([1, 2, 3, 4])
    pages = forest.ledger.alloc(4, forest.owner)
    result = forest.tree.insert(key_of([1, 2, 3, 4, 5, 6, 7]), pages, forest.owner)
    assert result.num_existing == 2
    assert result.page_ids.tolist() == [*first.tolist(), int(pages[2])]
    assert forest.ledger.pages_of(forest.owner).tolist() == [*pages[:2].tolist(), int(pages[3])]
    assert forest.tree.num_evictable == 3


def test_the_least_recently_used_leaf_goes_first() -> None:
    forest = Forest(16, 1)
    for first in (10, 20, 30):
        forest.insert([first, 1, 2])
    forest.use([10, 1, 2])
    assert forest.tree.evict(3) == 3
    assert [forest.cached([first, 1, 2]) for first in (10, 20, 30)] == [3, 0, 3]
    forest.use([30])  # splits: the head is now newer than its tail
    assert forest.tree.evict(2) == 2
    assert [forest.cached([first, 1, 2]) for first in (10, 30)] == [3, 1]
    assert forest.tree.evict(3) == 3
    assert [forest.cached([first, 1, 2]) for first in (10, 30)] == [0, 1]


def test_the_order_of_eviction_is_that_of_a_sorted_list() -> None:
    rng = np.random.default_rng(3)
    forest = Forest(200, 1)
    last_used: dict[int, int] = {}
    for time in range(2000):
        token = int(rng.integers(100))
        if token in last_used:
            assert forest.use([token]) == 1
        else:
            forest.insert([token])
        last_used[token] = time
        if rng.random() < 0.3:
            oldest = min(last_used, key=last_used.__getitem__)
            assert forest.tree.evict(1) == 1
            assert forest.cached([oldest]) == 0
            del last_used[oldest]
    assert forest.tree.num_evictable == len(last_used)


def test_low_priority_goes_before_old() -> None:
    forest = Forest(16, 1, lowest_priority)
    forest.insert([1], priority=1)
    forest.insert([2])
    forest.insert([3])
    forest.insert([3], priority=2)  # raises what is there
    assert [forest.tree.evict(1), forest.cached([1]), forest.cached([3])] == [1, 1, 1]
    assert [forest.tree.evict(1), forest.cached([1]), forest.cached([3])] == [1, 0, 1]


def test_eviction_takes_the_tail_of_a_long_leaf() -> None:
    forest = Forest(200, 2)
    tokens = np.arange(320)
    forest.insert(tokens)
    assert forest.tree.evict(1) == 10
    assert forest.cached(tokens) == 300
    assert forest.tree.evict(40) == 40
    assert forest.cached(tokens) == 220
    assert forest.tree.evict(1000) == 110
    assert forest.tree.evict(1) == 0
    assert forest.tree.stats().num_nodes == 0
    assert forest.ledger.num_free == 200


def test_what_stays_of_a_trimmed_leaf_keeps_its_place_in_the_order() -> None:
    forest = Forest(64, 1, lowest_priority)
    forest.insert([1])
    forest.insert(range(100, 116))
    forest.insert([2], priority=1)
    forest.insert(range(200, 216), priority=1)
    locked = [node for node in forest.tree.nodes() if len(node.page_ids) == 1]
    for node in locked:
        forest.tree.lock(node)
    assert forest.tree.evict(17) == 17  # one whole leaf, and the tail of the other
    assert forest.cached(range(200, 216)) == 15
    for node in locked:
        forest.tree.unlock(node)
    forest.insert([3])
    order = []
    for _ in range(3):
        assert forest.tree.evict(1) == 1
        order.append([forest.cached([token]) for token in (1, 3, 2, 200)])
    assert order == [[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]]


def test_a_lock_protects_the_path_and_nothing_else() -> None:
    forest = Forest(16, 1)
    forest.insert([1, 2, 3, 4])
    forest.insert([1, 2, 8, 9])
    match = forest.tree.match(key_of([1, 2, 3]))
    forest.tree.lock(match.node)
    assert (forest.tree.num_evictable, forest.tree.num_protected) == (3, 3)
    # A later split leaves the lock on both halves.
    forest.use([1])
    assert (forest.tree.num_evictable, forest.tree.num_protected) == (3, 3)
    assert not forest.tree.reset()
    assert forest.cached([1, 2, 3, 4]) == 3
    assert forest.cached([1, 2, 8, 9]) == 2
    forest.tree.unlock(match.node)
    assert forest.tree.reset()
    assert forest.ledger.num_free == 16


def test_lock_misuse_is_an_error() -> None:
    forest = Forest(16, 1)
    forest.insert([1, 2])
    node = forest.tree.match(key_of([1, 2])).node
    with pytest.raises(PageError, match="not locked"):
        forest.tree.unlock(node)
    forest.tree.reset()
    with pytest.raises(PageError, match="evicted"):
        forest.tree.lock(node)


def test_a_tree_of_great_depth() -> None:
    depth = 5000
    forest = Forest(depth, 1)
    tokens = np.arange(depth, dtype=np.int32)
    pages = forest.ledger.alloc(depth, forest.owner)
    for end in range(500, depth + 1, 500):
        forest.tree.insert(PrefixKey(tokens=tokens[:end]), pages[:end], forest.owner)
    for end in range(3000, 0, -1):
        forest.tree.match(PrefixKey(tokens=tokens[:end]))
    match = forest.tree.match(PrefixKey(tokens=tokens))
    assert match.page_ids.tolist() == pages.tolist()
    assert forest.tree.stats().num_nodes > 3000
    forest.tree.lock(match.node)
    forest.tree.unlock(match.node)
    assert match.node.spells(tokens)
    assert not match.node.spells(tokens[1:])
    assert forest.tree.reset()


def test_stats_count_lookups() -> None:
    forest = Forest(16, 2)
    forest.insert([1, 2, 3, 4])
    forest.use([1, 2, 3, 4, 5])
    forest.use([7, 7])
    stats = forest.tree.stats()
    assert (stats.num_lookups, stats.lookup_tokens, stats.hit_tokens) == (2, 7, 4)
    forest.tree.evict(1)
    assert forest.tree.stats().evicted_pages == 1


def test_a_match_that_nobody_uses_leaves_the_order_alone() -> None:
    for order in EVICTION_ORDERS.values():
        forest = Forest(16, 1, order)
        forest.insert([1, 2])
        forest.insert([3, 4])
        for _ in range(5):
            assert forest.tree.match(key_of([1, 2])).num_tokens == 2
        assert forest.tree.evict(2) == 2
        assert [forest.cached([1, 2]), forest.cached([3, 4])] == [0, 2]


def test_measuring_splits_nothing() -> None:
    forest = Forest(16, 2)
    forest.insert(range(10))
    assert forest.tree.measure(key_of([0, 1, 2, 3, 4, 9])) == 4
    assert forest.tree.measure(key_of([9])) == forest.tree.measure(key_of([9, 9])) == 0
    assert forest.tree.stats().num_nodes == 1
    assert forest.tree.match(key_of([0, 1, 2, 3, 4, 9])).num_tokens == 4
    assert forest.tree.stats().num_nodes == 2


def test_work_follows_the_match_and_not_the_tree() -> None:
    def visits_in(num_strangers: int) -> list[int]:
        """Node visits of a match, an insert, a lock with its unlock, and an eviction."""
        forest = Forest(4 * num_strangers + 100, 1)
        path = [5, 6, 7, 8, 9, 10]
        forest.insert([*path, 1])
        for stranger in range(num_strangers):
            forest.insert([1000 + stranger, 1, 2])
        for end in range(1, len(path)):
            forest.use(path[:end])  # one node a token
        counts = [forest.visits()]
        match = forest.tree.match(key_of(path))
        counts.append(forest.visits())
        forest.insert([*path, 2])
        counts.append(forest.visits())
        forest.tree.lock(match.node)
        forest.tree.unlock(match.node)
        counts.append(forest.visits())
        assert forest.tree.evict(3) == 3
        counts.append(forest.visits())
        return np.diff(counts).tolist()

    small, large = visits_in(20), visits_in(2000)
    assert small == large
    match, insert, locks, evict = large
    assert match <= 7
    assert insert <= 8
    assert locks == 2 * 7  # six nodes and the root, there and back
    assert evict <= 3


def test_eviction_work_is_paid_for_by_what_was_used_before() -> None:
    forest = Forest(3000, 1)
    for token in range(3000):
        forest.insert([token])
    for _ in range(3):
        for token in range(1000):
            forest.use([token])
    start = forest.visits()
    assert forest.tree.evict(3000) == 3000
    # One entry a leaf, and one more for each that was used since it was queued, however often.
    assert forest.visits() - start == 3000 + 1000


def test_the_eviction_queue_never_outgrows_the_tree() -> None:
    forest = Forest(300, 1)
    for token in range(100):
        forest.insert([token, 1, 2])
    for _ in range(20):
        for token in range(100):
            node = forest.tree.match(key_of([token, 1, 2])).node
            forest.tree.lock(node)
            forest.tree.unlock(node)
    assert len(forest.tree._queue) <= forest.tree.stats().num_nodes == 100


def test_orders_of_eviction() -> None:
    """Three prompts, used in different ways: who goes first under each policy."""
    expected = {"lru": [2, 1, 3], "lfu": [3, 1, 2], "priority": [2, 3, 1]}
    for policy, order in expected.items():
        forest = Forest(16, 1, EVICTION_ORDERS[policy])
        forest.insert([1], priority=2)
        forest.insert([2])
        forest.insert([3], priority=1)
        for token in (2, 2, 2, 1, 1, 3):
            forest.use([token])
        gone = []
        while forest.tree.evict(1):
            gone += [t for t in (1, 2, 3) if t not in gone and not forest.cached([t])]
        assert gone == order, policy


@pytest.mark.parametrize("policy", EVICTION_ORDERS)
def test_the_order_is_that_of_a_sorted_list_under_every_policy(policy: str) -> None:
    rng = np.random.default_rng(5)
    forest = Forest(200, 1, EVICTION_ORDERS[policy])
    used: dict[int, list[int]] = {}  # priority, hits, time of the last lookup
    for time in range(1500):
        token = int(rng.integers(60))
        if token in used:
            forest.use([token])
            used[token][1] += 1
            used[token][2] = time
        else:
            used[token] = [int(rng.integers(3)), 0, time]
            forest.insert([token], priority=used[token][0])
        if rng.random() < 0.3:
            rank = {"lru": (2,), "lfu": (1, 2), "priority": (0, 2)}[policy]
            first = min(used, key=lambda t: [used[t][i] for i in rank])
            assert forest.tree.evict(1) == 1
            assert forest.cached([first]) == 0
            del used[first]
    assert forest.tree.num_evictable == len(used)


class CountingKey:
    """A key of the eviction queue that counts how often it is compared."""

    comparisons = 0

    def __init__(self, value: tuple[int, int]) -> None:
        self.value = value

    def __lt__(self, other: "CountingKey") -> bool:
        CountingKey.comparisons += 1
        return self.value < other.value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CountingKey) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("policy", EVICTION_ORDERS)
def test_doubling_the_tree_changes_the_cost_by_less_than_a_tenth(policy: str) -> None:
    """Counted operations: nodes visited, and keys compared in the eviction queue."""
    order = EVICTION_ORDERS[policy]

    def cost(num_prompts: int) -> list[int]:
        forest = Forest(4 * num_prompts, 1, lambda node: CountingKey(order(node)))  # type: ignore[arg-type,return-value]
        rng = np.random.default_rng(1)
        for prompt in rng.permutation(num_prompts).tolist():
            forest.insert([1, 10 + prompt, 2, 3])
        start, compared = forest.visits(), CountingKey.comparisons
        for prompt in rng.permutation(num_prompts)[:400].tolist():
            forest.use([1, 10 + prompt, 2, 3])
        matched = forest.visits() - start
        for _ in range(400):
            assert forest.tree.evict(1) == 1
        return [matched, forest.visits() - start - matched, CountingKey.comparisons - compared]

    for small, large in zip(cost(6000), cost(12000), strict=True):
        assert large < 1.1 * small
