"""The page ledger: order of pages, exact sums, and every misuse in both modes."""

import logging
from collections.abc import Callable

import numpy as np
import pytest

from seawall.cache.pages import FREE, QUARANTINE, PageIds, PageLedger
from seawall.core.errors import PageError


def ids(*pages: int) -> PageIds:
    return np.array(pages, np.int32)


def test_a_fresh_pool_hands_out_consecutive_pages() -> None:
    ledger = PageLedger(10, debug=False)
    a, b = ledger.new_owner("a"), ledger.new_owner("b")
    assert ledger.alloc(3, a).tolist() == [0, 1, 2]
    assert ledger.alloc(4, b).tolist() == [3, 4, 5, 6]
    assert ledger.alloc(1, a).tolist() == [7]
    assert ledger.alloc(0, a).tolist() == []
    assert ledger.pages_of(a).tolist() == [0, 1, 2, 7]
    assert ledger.owner_of(5) == "b"
    assert ledger.owner_of(9) == "free"


def test_freed_pages_come_back_in_their_order() -> None:
    ledger = PageLedger(10, debug=False)
    a = ledger.new_owner("a")
    pages = ledger.alloc(5, a)
    assert ledger.free(pages[1:4], a) == 3
    assert ledger.alloc(4, a).tolist() == [1, 2, 3, 5]


def test_after_churn_the_pool_hands_out_runs_again() -> None:
    ledger = PageLedger(64, debug=False)
    a = ledger.new_owner("a")
    pages = ledger.alloc(64, a)
    shuffled = np.random.default_rng(0).permutation(pages)
    for page in shuffled:
        ledger.free(ids(page), a)
    assert ledger.alloc(64, a).tolist() == list(range(64))
    assert ledger.check()


def test_counts_tell_trees_from_requests() -> None:
    ledger = PageLedger(10, debug=True)
    tree, a = ledger.new_owner("tree", cached=True), ledger.new_owner("a")
    pages = ledger.alloc(6, a)
    assert ledger.transfer(pages[:2], a, tree) == 2
    counts = ledger.counts()
    assert (counts.total, counts.free, counts.cached) == (10, 4, 2)
    assert (counts.in_use, counts.quarantined) == (4, 0)
    assert ledger.check({a: 4, tree: 2}, num_cached=2)
    ledger.free(pages[:2], tree)
    ledger.free(pages[2:], a)
    ledger.drop_owner(a)
    ledger.drop_owner(tree)
    assert ledger.counts().free == 10
    # Whoever comes next is a request, even in the slot that was the tree's.
    for name in "bc":
        ledger.alloc(1, ledger.new_owner(name))
    assert (ledger.counts().cached, ledger.counts().in_use) == (0, 2)


def test_random_operations_agree_with_a_dictionary() -> None:
    rng = np.random.default_rng(1)
    ledger = PageLedger(50, debug=False)
    owners = [ledger.new_owner(name) for name in "abc"]
    model: dict[int, int] = {}
    for _ in range(3000):
        mine, other = rng.choice(owners, 2, replace=False).tolist()
        held = [page for page, owner in model.items() if owner == mine]
        some = rng.permutation(held)[: rng.integers(0, 6)].astype(np.int32)
        kind = int(rng.integers(3))
        if kind == 0:
            pages = ledger.alloc(min(int(rng.integers(0, 6)), ledger.num_free), mine).tolist()
            assert not set(pages) & set(model)
            model.update(dict.fromkeys(pages, mine))
        elif kind == 1:
            assert ledger.free(some, mine) == len(some)
            for page in some.tolist():
                del model[page]
        else:
            assert ledger.transfer(some, mine, other) == len(some)
            model.update(dict.fromkeys(some.tolist(), other))
        for owner in owners:
            assert set(ledger.pages_of(owner).tolist()) == {
                page for page, holder in model.items() if holder == owner
            }
        assert ledger.num_free == 50 - len(model)
    assert ledger.check({owner: list(model.values()).count(owner) for owner in owners})
    assert ledger.num_violations == 0


class Scene:
    """Two requests on ten pages: a has 0..3, b has 4 and 5, 6..9 are free."""

    def __init__(self, *, debug: bool) -> None:
        self.ledger = PageLedger(10, debug=debug)
        self.a, self.b = self.ledger.new_owner("req-a"), self.ledger.new_owner("req-b")
        self.ledger.alloc(4, self.a)
        self.ledger.alloc(2, self.b)


def free(*pages: int) -> Callable[[Scene], int]:
    return lambda scene: scene.ledger.free(ids(*pages), scene.a)


def transfer(*pages: int) -> Callable[[Scene], int]:
    return lambda scene: scene.ledger.transfer(ids(*pages), scene.a, scene.b)


# call, kind, named in the message, result without debug, then pages of a, of b, in quarantine
MISUSES = [
    (free(0, 1, 0), "duplicate", ["req-a", "page 0"], 1, [2, 3], [4, 5], [0]),
    (free(0, 7), "already_free", ["req-a", "'free'"], 1, [1, 2, 3], [4, 5], [7]),
    (free(0, 5), "foreign", ["req-a", "req-b", "alloc free -> req-b"], 1, [1, 2, 3], [4, 5], []),
    (free(5, 0, 5), "foreign", ["req-a", "req-b"], 1, [1, 2, 3], [4, 5], []),
    (free(0, 10), "out_of_range", ["req-a", "page 10", "[0, 10)"], 1, [1, 2, 3], [4, 5], []),
    (free(-1), "out_of_range", ["req-a", "page -1"], 0, [0, 1, 2, 3], [4, 5], []),
    (free(-10), "out_of_range", ["req-a", "page -10"], 0, [0, 1, 2, 3], [4, 5], []),
    (transfer(0, 1, 1), "duplicate", ["req-a", "page 1"], 1, [2, 3], [0, 4, 5], [1]),
    (transfer(0, 8, 1), "already_free", ["req-a", "'free'"], 1, [1, 2, 3], [0, 4, 5], [8]),
    (transfer(4, 0), "foreign", ["req-a", "req-b"], 0, [0, 1, 2, 3], [4, 5], []),
    (transfer(0, 99), "out_of_range", ["req-a", "page 99"], 1, [1, 2, 3], [0, 4, 5], []),
]


@pytest.mark.parametrize("misuse", MISUSES)
def test_debug_mode_raises_with_the_owners_and_changes_nothing(misuse: tuple) -> None:
    call, _, named, *_ = misuse
    scene = Scene(debug=True)
    before = scene.ledger.counts()
    with pytest.raises(PageError) as caught:
        call(scene)
    message = str(caught.value)
    assert all(name in message for name in named), message
    assert "\n" not in message
    assert scene.ledger.counts() == before
    assert scene.ledger.pages_of(scene.a).tolist() == [0, 1, 2, 3]
    assert scene.ledger.check()


@pytest.mark.parametrize("misuse", MISUSES)
def test_production_mode_contains_the_damage_and_goes_on(misuse: tuple) -> None:
    call, kind, _, result, of_a, of_b, quarantined = misuse
    scene = Scene(debug=False)
    ledger = scene.ledger
    assert call(scene) == result
    assert ledger.pages_of(scene.a).tolist() == of_a
    assert ledger.pages_of(scene.b).tolist() == of_b
    assert ledger.pages_of(QUARANTINE).tolist() == quarantined
    assert ledger.num_violations == 1
    violation = ledger.violations[0]
    assert violation.kind == kind
    assert violation.caller == "req-a"
    assert ledger.check({scene.a: len(of_a), scene.b: len(of_b)})
    # Service goes on, and what is in quarantine is not handed out.
    rest = ledger.alloc(ledger.num_free, scene.b).tolist()
    assert len(rest) == 10 - len(of_a) - len(of_b) - len(quarantined)
    assert not set(rest) & set(quarantined)
    assert ledger.check()


def test_a_second_free_of_the_same_pages() -> None:
    scene = Scene(debug=True)
    pages = scene.ledger.pages_of(scene.a)
    scene.ledger.free(pages, scene.a)
    with pytest.raises(PageError, match=r"req-a.*already_free.*alloc free -> req-a.*free req-a"):
        scene.ledger.free(pages, scene.a)

    scene = Scene(debug=False)
    assert scene.ledger.free(pages, scene.a) == 4
    assert scene.ledger.free(pages[:2], scene.a) == 0
    assert scene.ledger.counts().quarantined == 2
    # A third time the page is in quarantine already.
    assert scene.ledger.free(pages[:1], scene.a) == 0
    assert [v.kind for v in scene.ledger.violations] == ["already_free"] * 2 + ["quarantined"]
    assert scene.ledger.check()
    assert scene.ledger.alloc(6, scene.b).tolist() == [2, 3, 6, 7, 8, 9]


@pytest.mark.parametrize("debug", [True, False])
def test_alloc_beyond_free_is_refused_with_numbers(debug: bool) -> None:
    scene = Scene(debug=debug)
    with pytest.raises(PageError, match=r"alloc of 5 pages for 'req-a': 4 of 10 are free"):
        scene.ledger.alloc(5, scene.a)
    with pytest.raises(PageError, match="alloc of -1 pages"):
        scene.ledger.alloc(-1, scene.a)
    assert scene.ledger.counts().in_use == 6
    assert scene.ledger.check()
    assert len(scene.ledger.alloc(4, scene.a)) == 4


@pytest.mark.parametrize("debug", [True, False])
def test_reserved_and_stale_handles_are_refused(debug: bool) -> None:
    scene = Scene(debug=debug)
    ledger = scene.ledger
    stale = ledger.new_owner("gone")
    ledger.drop_owner(stale)
    with pytest.raises(PageError, match="take one from new_owner"):
        ledger.alloc(1, stale)
    assert ledger.new_owner("next") != stale  # though it takes the same slot
    for handle in (FREE, QUARANTINE, stale, 999, -3):
        with pytest.raises(PageError, match="take one from new_owner"):
            ledger.alloc(1, handle)
        with pytest.raises(PageError, match="take one from new_owner"):
            ledger.transfer(ids(0), scene.a, handle)
    for handle in (FREE, QUARANTINE):
        with pytest.raises(PageError, match="take one from new_owner"):
            ledger.free(ids(9), handle)
    if debug:
        with pytest.raises(PageError, match="dropped owner"):
            ledger.free(ids(0), stale)
        with pytest.raises(PageError, match="unknown"):
            ledger.drop_owner(stale)
    else:
        assert ledger.free(ids(0), stale) == ledger.free(ids(0), 999) == 0
        ledger.drop_owner(stale)
        assert [v.kind for v in ledger.violations] == ["foreign", "foreign", "unknown"]
    assert ledger.counts().in_use == 6
    assert ledger.check()


def test_an_owner_can_not_leave_with_pages() -> None:
    scene = Scene(debug=True)
    with pytest.raises(PageError, match=r"drop_owner by 'req-b': page 4 is still held"):
        scene.ledger.drop_owner(scene.b)
    assert scene.ledger.owner_of(4) == "req-b"

    scene = Scene(debug=False)
    scene.ledger.drop_owner(scene.b)
    assert scene.ledger.pages_of(QUARANTINE).tolist() == [4, 5]
    assert [v.kind for v in scene.ledger.violations] == ["leaked", "leaked"]
    assert scene.ledger.check({scene.a: 4})


def test_violations_are_counted_all_and_kept_bounded() -> None:
    scene = Scene(debug=False)
    for _ in range(1000):
        scene.ledger.free(ids(4), scene.a)
    assert scene.ledger.num_violations == 1000
    assert len(scene.ledger.violations) == 256


def test_history_is_bounded() -> None:
    ledger = PageLedger(1, debug=True)
    a = ledger.new_owner("a")
    for _ in range(100):
        ledger.free(ledger.alloc(1, a), a)
    with pytest.raises(PageError) as caught:
        ledger.free(ids(0), a)
    assert str(caught.value).count("#") == 8
    assert "#200 free" in str(caught.value)


@pytest.mark.parametrize("debug", [True, False])
def test_check_finds_each_kind_of_wrong_sum(debug: bool) -> None:
    def damage_owner(ledger: PageLedger) -> None:
        ledger._owner[0] = FREE

    def damage_count(ledger: PageLedger) -> None:
        ledger._owners.held[FREE] -= 1

    def damage_stack(ledger: PageLedger) -> None:
        ledger._free[0] = ledger._free[1]

    def stale_owner(ledger: PageLedger) -> None:
        ledger._owner[0] += 1 << 24

    for damage in (damage_owner, damage_count, damage_stack, stale_owner):
        ledger = Scene(debug=debug).ledger
        assert ledger.check()
        damage(ledger)
        if debug:
            with pytest.raises(PageError, match="sum"):
                ledger.check()
        else:
            assert not ledger.check()
            assert ledger.violations[-1].kind == "sum"


def test_check_compares_what_the_holders_believe() -> None:
    scene = Scene(debug=False)
    assert scene.ledger.check({scene.a: 4, scene.b: 2}, num_cached=0)
    assert not scene.ledger.check({scene.a: 3})
    assert "'req-a' claims 3 pages, has 4" in scene.ledger.violations[-1].owner
    assert not scene.ledger.check(num_cached=1)


def test_size_is_checked() -> None:
    with pytest.raises(PageError, match="num_pages is 0"):
        PageLedger(0, debug=False)
    with pytest.raises(PageError, match="page 4 is outside"):
        PageLedger(4, debug=False).owner_of(4)


def test_what_is_wrong_is_logged_with_both_names(caplog: pytest.LogCaptureFixture) -> None:
    # Engines of other tests set the level of all of the package's loggers.
    caplog.set_level(logging.ERROR, logger="seawall")
    scene = Scene(debug=False)
    scene.ledger.free(ids(5), scene.a)
    [record] = caplog.records
    assert record.levelname == "ERROR"
    assert "free by 'req-a': page 5 is foreign; its owner is 'req-b'" in record.getMessage()
    assert str(scene.ledger.violations[0]) in record.getMessage()
    for _ in range(1999):
        scene.ledger.free(ids(5), scene.a)
    # A fault that repeats does not fill the disk.
    assert len(caplog.records) == 256 + 2


def test_reconcile_names_what_was_leaked_and_what_was_lost() -> None:
    scene = Scene(debug=False)
    ledger = scene.ledger
    ledger.free(ids(1), scene.a)  # behind the back of a, which believes in 0, 1, 2 and in 4
    assert ledger.reconcile(scene.a, ids(0, 1, 2, 4)).tolist() == [1, 4]
    found = [(v.kind, v.page, v.caller, v.owner) for v in ledger.violations]
    assert found == [
        ("leaked", 3, "req-a", "req-a"),
        ("lost", 1, "req-a", "free"),
        ("lost", 4, "req-a", "req-b"),
    ]
    assert ledger.pages_of(scene.a).tolist() == [0, 2]
    assert ledger.pages_of(scene.b).tolist() == [4, 5]
    assert ledger.pages_of(QUARANTINE).tolist() == [1, 3]
    assert ledger.check({scene.a: 2, scene.b: 2})

    scene = Scene(debug=True)
    with pytest.raises(PageError, match=r"audit by 'req-a': page 3 is still held.*history: #"):
        scene.ledger.reconcile(scene.a, ids(0, 1, 2))
