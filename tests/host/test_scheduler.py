"""The scheduler over a runner of hashes: random operations against the model, then named cases."""

import itertools
import logging
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from seawall.cache.lease import LeaseBook
from seawall.cache.pages import PageLedger
from seawall.cache.radix import RadixCache
from seawall.core.errors import QueueFullError
from seawall.core.params import LogprobSpec, SamplingParams
from seawall.core.request import Request
from seawall.core.units import ceil_div
from seawall.core.wire import CacheFlushed, FinishReason, FlushCache
from seawall.memory.ledger import Ledger
from seawall.scheduler.admission import Admission, Holding, LengthEstimator
from seawall.scheduler.batching import share_budget
from seawall.scheduler.pressure import choose_victim
from seawall.scheduler.queue import WaitQueue
from tests.host.cache_machine import soak_factor
from tests.host.scheduler_machine import (
    STEM,
    VOCAB,
    SchedulerMachine,
    Setup,
    random_sample,
)

WHICH = st.integers(0, 30)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Steps fail by the hundred here; their tracebacks are not news."""
    logger = logging.getLogger("seawall")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(level)


SAMPLING = st.builds(
    SamplingParams,
    n=st.sampled_from([1, 1, 1, 2, 3]),
    min_new_tokens=st.sampled_from([0, 0, 0, 2, 5]),
    stop_token_ids=st.sampled_from([(), (), (3,)]),
    ignore_eos=st.booleans(),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.25]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.5]),
    logit_bias=st.sampled_from([(), (), ((2, 1.5), (5, -2.0))]),
)


class Machine(RuleBasedStateMachine):
    """Whatever happens, each sample gets its tokens and scores, once, and pages stay whole."""

    machine: SchedulerMachine

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 16, 64]),
        spare=st.integers(0, 8),
        longest=st.integers(2, 40),
        max_running=st.integers(1, 4),
        prefill_tokens=st.sampled_from([1, 3, 7, 16, 64]),
        policy=st.sampled_from(["fcfs", "lpm", "priority"]),
        conservativeness=st.sampled_from([1.0, 0.05, 0.5]),
        switches=st.tuples(st.booleans(), st.booleans(), st.booleans()),
        max_queued=st.sampled_from([None, None, 3]),
        window=st.sampled_from([None, 1, 4, 9, 30]),
        spare_windows=st.integers(0, 12),
        policy_of_eviction=st.sampled_from(["lru", "lfu", "priority"]),
    )
    def start(
        self,
        page_size: int,
        spare: int,
        longest: int,
        max_running: int,
        prefill_tokens: int,
        policy: str,
        conservativeness: float,
        switches: tuple[bool, bool, bool],
        max_queued: int | None,
        window: int | None,
        spare_windows: int,
        policy_of_eviction: str,
    ) -> None:
        mixed, radix, overlap = switches
        setup = Setup(
            page_size=page_size,
            num_pages=ceil_div(longest, page_size) + spare,
            max_running=max_running,
            prefill_tokens=prefill_tokens,
            policy=policy,
            conservativeness=conservativeness,
            mixed=mixed,
            radix=radix,
            overlap=overlap,
            max_queued=max_queued,
            window=window,
            spare_windows=spare_windows,
            policy_of_eviction=policy_of_eviction,
        )
        self.machine = SchedulerMachine(setup)

    @rule(
        length=st.integers(1, 40),
        twist=st.integers(0, 3),
        max_new=st.integers(0, 24),
        sampling=SAMPLING,
        start_len=st.sampled_from([None, None, 0, 1, 4, 100]),
        priority=st.integers(0, 2),
        extra_key=st.sampled_from([None, None, None, "lora"]),
    )
    def add(
        self,
        length: int,
        twist: int,
        max_new: int,
        sampling: SamplingParams,
        start_len: int | None,
        priority: int,
        extra_key: str | None,
    ) -> None:
        longest = self.machine.setup.longest
        length = min(length, longest)
        max_new = min(max_new, longest - length)
        if max_new == 0 and sampling.n > 1:
            return
        prompt = [*STEM[:length]]
        prompt[-1] = (prompt[-1] + twist) % VOCAB
        self.machine.add(
            prompt,
            max_new=max_new,
            sampling=sampling,
            logprob=LogprobSpec(
                wanted=True, start_len=None if start_len is None else min(start_len, length)
            ),
            priority=priority,
            extra_key=extra_key,
        )

    @rule(count=st.integers(1, 12))
    def turns(self, count: int) -> None:
        for _ in range(count):
            self.machine.turn()

    @rule(place=st.sampled_from(["launch", "sample", "wait"]))
    def fail(self, place: str) -> None:
        self.machine.turn(fail_at=place)

    @rule(which=WHICH)
    def abort(self, which: int) -> None:
        if self.machine.open:
            self.machine.abort(self.machine.open[which % len(self.machine.open)].message.rid)

    @rule()
    def abort_all(self) -> None:
        self.machine.abort(None)

    @rule(which=WHICH, back=st.integers(0, 3))
    def stop_string(self, which: int, back: int) -> None:
        ready = [sample for sample in self.machine.open if sample.tokens]
        if ready:
            sample = ready[which % len(ready)]
            self.machine.finish(sample, max(len(sample.tokens) - back, 1))

    @rule()
    def flush(self) -> None:
        idle = not self.machine.open
        self.machine.core.intake([FlushCache(ticket=5)])
        self.machine.turn()
        assert self.machine.others.pop() == CacheFlushed(ticket=5, done=idle)
        if idle:
            assert self.machine.ledger.num_free == self.machine.setup.num_pages

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "machine"):
            self.machine.check()

    def teardown(self) -> None:
        if hasattr(self, "machine"):
            self.machine.close()


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=40 * soak_factor(),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("window", [None, 5, 20])
@pytest.mark.parametrize("radix", [True, False])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_conservativeness_1_never_retracts(page_size: int, radix: bool, window: int | None) -> None:
    rng = random.Random(page_size)
    setup = Setup(
        page_size=page_size,
        num_pages=ceil_div(100, page_size),
        radix=radix,
        window=window,
        spare_windows=ceil_div(24, page_size),
    )
    machine = SchedulerMachine(setup)
    for _ in range(30 * soak_factor()):
        random_sample(machine, rng)
        for _ in range(rng.randint(0, 6)):
            machine.turn()
        machine.check()
    machine.close()
    assert machine.scheduler.counts.retractions == 0


@pytest.mark.parametrize("window", [None, 5, 20])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_retraction_loses_nothing(page_size: int, overlap: bool, window: int | None) -> None:
    rng = random.Random(page_size)
    machine = SchedulerMachine(
        Setup(
            page_size=page_size,
            num_pages=ceil_div(70, page_size),
            conservativeness=0.05,
            overlap=overlap,
            window=window,
            spare_windows=ceil_div(400, page_size),
        )
    )
    for _ in range(50):
        random_sample(machine, rng)
    machine.close()
    assert machine.scheduler.counts.retractions > 0
    # Every sample was checked token by token against the model as it came in.
    assert all(sample.tokens == sample.expected for sample in machine.samples.values())


def test_samples_share_the_prompt() -> None:
    """Eight samples of 3 whole pages and a bit: the whole pages are computed once."""
    for radix in (True, False):
        setup = Setup(
            page_size=4, num_pages=64, max_running=8, prefill_tokens=64, radix=radix, overlap=False
        )
        machine = SchedulerMachine(setup)
        samples = machine.add(STEM[:14], max_new=4, sampling=SamplingParams(n=8, ignore_eos=True))
        machine.turn()
        machine.turn()
        assert len(machine.scheduler._running) == 8
        counts = machine.ledger.counts()
        # Each sample has the page with its prompt's tail and at most one more.
        assert counts.cached == 3
        assert counts.in_use <= 2 * 8
        machine.close()
        assert {len(sample.tokens) for sample in samples} == {4}


def test_aborting_the_first_sample_does_not_stop_the_others() -> None:
    machine = SchedulerMachine(Setup(page_size=4, num_pages=32, prefill_tokens=3))
    samples = machine.add(STEM[:14], sampling=SamplingParams(n=3, ignore_eos=True))
    machine.turn()
    leader = machine.scheduler._requests[samples[0].message.rid][0]
    machine.scheduler._finish(leader, FinishReason(type="abort", status_code=499))
    machine._take(machine.scheduler.take_outputs())
    machine.close()
    assert [sample.finish for sample in samples] == ["abort", "length", "length"]


def test_flush_right_after_the_last_answer() -> None:
    """A step of an ended request may still be in flight: it does not keep the cache."""
    machine = SchedulerMachine(Setup(page_size=2, num_pages=32))
    samples = machine.add(STEM[:9], max_new=20, sampling=SamplingParams(stop_token_ids=(3, 4, 5)))
    while samples[0].finish is None:
        machine.turn()
    machine.core.intake([FlushCache(ticket=1)])
    machine.turn()
    assert machine.others == [CacheFlushed(ticket=1, done=True)]


def test_full_queue_refuses_all_samples_or_none() -> None:
    machine = SchedulerMachine(Setup(page_size=2, num_pages=32, max_queued=2))
    first = machine.add(STEM[:3], sampling=SamplingParams(n=2))
    second = machine.add(STEM[:3], sampling=SamplingParams(n=2))
    machine.drain()
    assert {sample.status for sample in first} == {None}
    assert {sample.status for sample in second} == {503}


def test_share_budget() -> None:
    assert share_budget([], 8) == []
    assert share_budget([5, 5], 0) == [0, 0]
    # The oldest gets half at least; the rest goes to the shortest.
    assert share_budget([100, 3, 50], 20) == [10, 3, 7]
    # What the others leave goes back to the oldest.
    assert share_budget([100, 3], 20) == [17, 3]
    assert share_budget([2, 100], 20) == [2, 18]
    assert share_budget([9, 9], 1) == [1, 0]
    rng = random.Random(0)
    for _ in range(500):
        remaining = [rng.randint(1, 30) for _ in range(rng.randint(1, 6))]
        budget = rng.randint(1, 60)
        shares = share_budget(remaining, budget)
        assert sum(shares) == min(budget, sum(remaining))
        assert all(0 <= s <= r for s, r in zip(shares, remaining, strict=True))
        assert shares[0] >= min(remaining[0], max(budget // 2, 1))


def test_queue_order() -> None:
    def ids(policy: str, requests: list[Request]) -> list[int]:
        queue = WaitQueue(policy=policy, max_queued=None, ledger=Ledger({"queue": 1 << 20}))
        for request in requests:
            queue.enter(request)
        return [r.arrival for r in queue.ordered(lambda r: r.num_prompt)]

    requests = [
        make_request(prompt=4, arrival=0),
        make_request(prompt=9, arrival=1, priority=1),
        make_request(prompt=6, arrival=2),
        make_request(prompt=2, arrival=3, priority=1),
    ]
    for order in itertools.permutations(requests):
        assert ids("fcfs", list(order)) == [0, 1, 2, 3]
        assert ids("priority", list(order)) == [1, 3, 0, 2]
        assert ids("lpm", list(order)) == [1, 2, 0, 3]


def test_queue_counts_bytes_until_the_end() -> None:
    ledger = Ledger({"queue": 10_000})
    queue = WaitQueue(policy="fcfs", max_queued=None, ledger=ledger)
    request = make_request(prompt=4, arrival=0)
    queue.check_room(1, 5)
    queue.enter(request)
    queue.remove(request)
    assert ledger.now("queue") > 0
    with pytest.raises(QueueFullError, match=r"queue: \d+ more bytes .* 10000; retry"):
        queue.check_room(2, 5)
    queue.leave(request)
    assert ledger.now("queue") == 0


def make_request(
    *, prompt: int, arrival: int = 0, max_new: int = 8, output: int = 0, priority: int = 0
) -> Request:
    request = Request(
        rid=f"a{arrival}",
        index=0,
        prompt=np.zeros(prompt, np.int32),
        sampling=SamplingParams(),
        logprob=LogprobSpec(),
        max_new_tokens=max_new,
        seed=0,
        priority=priority,
        extra_key=None,
        arrival=arrival,
        group=None,
    )
    request.num_tokens += output
    request.computed = request.num_tokens - 1 if output else 0
    return request


def brute_force_peak(holdings: list[Holding], page_size: int) -> int:
    """Additional pages at the worst step, walked token by token to the end that was asked for."""
    worst, steps = 0, 0
    while True:
        pages, alive = 0, 0
        for holding in holdings:
            r = holding.request
            end = r.num_prompt + r.max_new_tokens
            if r.is_prefilling:
                pages += ceil_div(end, page_size) - holding.num_pages
                continue
            length = r.num_tokens + steps
            if length > end:
                pages -= holding.num_own
            else:
                alive += 1
                pages += max(ceil_div(length, page_size) - holding.num_pages, 0)
        worst = max(worst, pages)
        if not alive:
            return worst
        steps += 1


def random_holding(rng: random.Random, page_size: int) -> Holding:
    prompt, max_new = rng.randint(1, 20), rng.randint(1, 20)
    output = rng.randint(0, max_new - 1)
    request = make_request(prompt=prompt, max_new=max_new, output=output)
    num_pages = ceil_div(request.num_tokens, page_size) if output else 0
    return Holding(request=request, num_pages=num_pages, num_own=rng.randint(0, num_pages))


def test_admission_never_promises_pages_that_are_not_there() -> None:
    rng = random.Random(4)
    refused = admitted = tight = 0
    for _ in range(3000):
        size = rng.choice([1, 2, 4, 16])
        holdings = [random_holding(rng, size) for _ in range(rng.randint(0, 5))]
        admission = Admission(holdings, LengthEstimator(1.0), size)
        candidate = make_request(prompt=rng.randint(1, 20), max_new=rng.randint(0, 20))
        available = rng.randint(0, 60)
        entering = Holding(request=candidate, num_pages=0, num_own=0)
        peak = brute_force_peak([*holdings, entering], size)
        if admission.fits(candidate, 0, available):
            admitted += 1
            assert peak <= available
        else:
            refused += 1
            tight += peak <= available
    # It may be careful by the rounding to whole pages, but not useless.
    assert admitted > 500
    assert tight < refused / 3


def test_admission_with_page_size_1_is_exact() -> None:
    rng = random.Random(5)
    for _ in range(1000):
        holdings = [random_holding(rng, 1) for _ in range(rng.randint(1, 4))]
        holdings = [h for h in holdings if not h.request.is_prefilling]
        candidate = make_request(prompt=rng.randint(2, 20), max_new=rng.randint(0, 20))
        peak = brute_force_peak(holdings, 1) + candidate.num_prompt + candidate.max_new_tokens
        admission = Admission(holdings, LengthEstimator(1.0), 1)
        assert admission.fits(candidate, 0, peak)
        assert not admission.fits(candidate, 0, peak - 1)


def test_estimator_learns_and_never_expects_less_than_written() -> None:
    estimator = LengthEstimator(0.5)
    asked = make_request(prompt=3, max_new=100)
    for _ in range(31):
        estimator.record(make_request(prompt=3, max_new=10, output=2))
    assert estimator.expected_output(asked) == 100
    estimator.record(make_request(prompt=3, max_new=10, output=2))
    assert estimator.expected_output(asked) == 20
    assert estimator.expected_output(make_request(prompt=3, max_new=100, output=20)) == 100
    asked.num_retractions = 1
    assert estimator.expected_output(asked) == 100
    careful = LengthEstimator(1.0)
    for _ in range(64):
        careful.record(make_request(prompt=3, max_new=10, output=2))
    assert careful.expected_output(make_request(prompt=3, max_new=100)) == 100


def test_the_victim_is_the_cheapest_that_frees_enough() -> None:
    ledger = PageLedger(64, debug=True)
    book = LeaseBook(ledger, RadixCache(ledger, 2), 2)
    candidates = []
    for arrival, num_pages in enumerate((6, 2, 4, 2, 3)):
        tokens = np.arange(arrival * 100, arrival * 100 + 2 * num_pages, dtype=np.int32)
        lease = book.open(str(arrival), tokens, None, max_match_tokens=0)
        assert lease.reserve(len(tokens))
        lease.commit(tokens, len(tokens) - 2)  # all but one page are the tree's now
        assert lease.gain() == num_pages
        candidates.append((make_request(prompt=4, arrival=arrival), lease))

    def chosen(num_pages: int) -> int:
        return choose_victim(candidates, num_pages)[0].arrival

    assert [chosen(n) for n in (1, 2, 3, 4, 5, 6, 7)] == [3, 3, 4, 2, 0, 0, 0]
    # What another request has locked too is not freed by this one's end.
    shared = np.arange(600, dtype=np.int32)[:12]
    other = book.open("other", shared, None, max_match_tokens=12)
    assert other.num_shared == 5
    assert candidates[0][1].gain() == 1
    assert chosen(1) == 0


def test_only_the_lowest_priority_gives_way() -> None:
    machine = SchedulerMachine(
        Setup(
            page_size=2,
            num_pages=40,
            max_running=8,
            policy="priority",
            conservativeness=0.05,
            prefill_tokens=64,
        )
    )
    asked = SamplingParams(min_new_tokens=14)
    samples = [
        machine.add([*STEM[at : at + 4]], max_new=14, sampling=asked, priority=at % 2)[0]
        for at in range(8)
    ]
    retracted: dict[str, int] = {}
    while machine.core.has_work:
        machine.turn()
        for request in machine.scheduler._queue:
            retracted[request.rid] = max(retracted.get(request.rid, 0), request.num_retractions)
    assert sum(retracted.values()) > 0
    # The four that come first fit beside each other, so they are never in want.
    first = [retracted.get(sample.message.rid, 0) for sample in samples[1::2]]
    assert sum(first) == 0
    machine.close()
