"""The ledger of bytes: caps, peaks, refusals that change nothing, snapshots across threads."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.core.errors import BudgetError, ConfigError, EngineError
from seawall.memory.ledger import AccountUse, Ledger


def test_charge_credit_and_peak() -> None:
    ledger = Ledger({"kv": 100, "weights": 10})
    ledger.charge("kv", 60)
    ledger.charge("kv", 40)
    ledger.credit("kv", 70)
    ledger.charge("weights", 10)
    assert ledger.use("kv") == AccountUse(now=30, peak=100, cap=100)
    assert (ledger.now("weights"), ledger.peak("weights"), ledger.cap("weights")) == (10, 10, 10)
    assert ledger.snapshot() == {
        "kv": AccountUse(now=30, peak=100, cap=100),
        "weights": AccountUse(now=10, peak=10, cap=10),
    }


def test_charge_over_the_cap_names_account_bytes_and_cap_and_changes_nothing() -> None:
    ledger = Ledger({"kv": 100})
    ledger.charge("kv", 99)
    with pytest.raises(BudgetError) as caught:
        ledger.charge("kv", 2)
    message = str(caught.value)
    assert isinstance(caught.value, ConfigError)
    assert "'kv'" in message
    assert "2 bytes" in message
    assert "100" in message
    assert "\n" not in message
    assert ledger.use("kv") == AccountUse(now=99, peak=99, cap=100)
    assert ledger.fits("kv", 1)
    assert not ledger.fits("kv", 2)


@pytest.mark.parametrize("call", ["charge", "credit", "fits", "set_cap", "use"])
def test_unknown_account_lists_the_known(call: str) -> None:
    ledger = Ledger({"kv": 1, "weights": 1})
    operations = {
        "charge": lambda: ledger.charge("kw", 1),
        "credit": lambda: ledger.credit("kw", 1),
        "fits": lambda: ledger.fits("kw", 1),
        "set_cap": lambda: ledger.set_cap("kw", 1),
        "use": lambda: ledger.use("kw"),
    }
    with pytest.raises(EngineError, match=r"'kw'.*kv, weights"):
        operations[call]()
    assert set(ledger.snapshot()) == {"kv", "weights"}


def test_impossible_sizes_are_refused() -> None:
    ledger = Ledger({"kv": 10})
    ledger.charge("kv", 5)
    with pytest.raises(EngineError, match="6 bytes given back, only 5"):
        ledger.credit("kv", 6)
    with pytest.raises(EngineError, match="-1 bytes"):
        ledger.charge("kv", -1)
    with pytest.raises(EngineError, match="negative"):
        Ledger({"kv": -1})
    assert ledger.now("kv") == 5


def test_cap_moves_but_never_below_the_peak() -> None:
    ledger = Ledger({"kv": 10})
    ledger.charge("kv", 8)
    ledger.credit("kv", 8)
    with pytest.raises(EngineError, match="peak of 8"):
        ledger.set_cap("kv", 7)
    ledger.set_cap("kv", 12)
    ledger.charge("kv", 12)
    with pytest.raises(BudgetError):
        ledger.charge("kv", 1)


def test_unbounded_opens_accounts_as_they_come() -> None:
    ledger = Ledger.unbounded()
    ledger.charge("anything", 1 << 50)
    assert ledger.use("anything") == AccountUse(now=1 << 50, peak=1 << 50, cap=None)
    with pytest.raises(EngineError, match="given back"):
        ledger.credit("anything", (1 << 50) + 1)


@given(
    cap=st.integers(0, 50),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=60),
)
def test_now_stays_within_zero_and_cap(cap: int, steps: list[tuple[bool, int]]) -> None:
    ledger = Ledger({"a": cap})
    now = peak = 0
    for is_charge, size in steps:
        if is_charge:
            fits = now + size <= cap
            assert ledger.fits("a", size) == fits
            if fits:
                ledger.charge("a", size)
                now += size
                peak = max(peak, now)
            else:
                with pytest.raises(BudgetError):
                    ledger.charge("a", size)
        elif size <= now:
            ledger.credit("a", size)
            now -= size
        else:
            with pytest.raises(EngineError):
                ledger.credit("a", size)
        assert ledger.use("a") == AccountUse(now=now, peak=peak, cap=cap)


def test_readers_see_whole_states_while_another_thread_writes() -> None:
    ledger = Ledger({"a": 7, "b": 7})
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            ledger.charge("a", 7)
            ledger.charge("b", 7)
            ledger.credit("b", 7)
            ledger.credit("a", 7)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3000):
            snapshot = ledger.snapshot()
            # "b" is charged only while "a" is.
            assert snapshot["b"].now <= snapshot["a"].now <= snapshot["a"].peak
    finally:
        stop.set()
        writer.join()
    assert (ledger.now("a"), ledger.now("b")) == (0, 0)
