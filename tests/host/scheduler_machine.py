"""An engine core over a runner that computes nothing, and a model that knows what must come out.

The runner keeps, for every KV slot, a hash of the tokens up to that position, and draws a token
from the hash of the sequence, the seed and the changes to logits. So a page that is written twice,
freed too early, matched wrongly or missing from a page table shows as a wrong token or score, and
the model can say from the prompt alone what each request must produce.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from seawall.cache.chunk import ChunkCache
from seawall.cache.eviction import EVICTION_ORDERS
from seawall.cache.lease import LeaseBook
from seawall.cache.no_windows import NoWindows
from seawall.cache.pages import PageLedger
from seawall.cache.radix import RadixCache
from seawall.cache.swa import SwaCache
from seawall.cache.windows import WindowPages
from seawall.core.params import LogprobSpec, SamplingParams
from seawall.core.request import Request
from seawall.core.seeds import mix_seed
from seawall.core.step import LogitAdjust, Scores, StepPlan, StepResult, TokenMasks
from seawall.core.units import ceil_div
from seawall.core.wire import (
    AbortRequest,
    FinishRequest,
    FlushCache,
    FromCore,
    GenerateRequest,
    OutputDelta,
)
from seawall.engine.core import EngineCore
from seawall.memory.ledger import Ledger
from seawall.scheduler.scheduler import Scheduler, SchedulerLimits

VOCAB = 11
EOS = 1
LONGEST = 72
Changes = tuple[tuple[int, float, float], ...]


def chain(before: int, token: int) -> int:
    """Hash of a sequence that goes on by one token."""
    value = (before * 6364136223846793005 + (token + 1) * 1442695040888963407) % 2**64
    return value ^ (value >> 29)


def first_link(extra_key: str | None) -> int:
    """What a sequence's hash starts from: KV depends on the extra key too."""
    return 17 if extra_key is None else 1000 + len(extra_key)


def drawn(link: int, seed: int, changes: Changes) -> int:
    """The token after a sequence; forbidden ids are passed over."""
    value = chain(chain(link, seed % 1009), hash(changes) % 1009)
    forbidden = {token for token, _, add in changes if add == -np.inf}
    return next(t for t in ((value + i) % VOCAB for i in range(VOCAB)) if t not in forbidden)


def score(link: int, token: int) -> float:
    """A logprob that tells sequences and tokens apart."""
    return float(np.float32(-(chain(link, token) % 4093) / 64))


class StepFaultError(RuntimeError):
    """Raised by the runner where a test asks for it."""


class FakeFlight:
    """A step whose hidden states are hashes."""

    def __init__(
        self, runner: "FakeRunner", plan: StepPlan, links: list[int], prompt: dict[int, Scores]
    ) -> None:
        self.plan = plan
        self._runner = runner
        self._links = links
        self._prompt = prompt
        self._result: StepResult | None = None

    def sample(self, adjust: LogitAdjust | None, masks: TokenMasks | None = None) -> None:
        self._runner.maybe_fail("sample", self.plan)
        plan = self.plan
        tokens = np.zeros(plan.num_rows, np.int32)
        outputs = {}
        for row in np.flatnonzero(plan.samples).tolist():
            seat = int(plan.seats[row])
            token = drawn(self._links[row], self._runner.seeds[seat], _changes(adjust, row))
            tokens[row] = self._runner.last_token[seat] = token
            outputs[row] = _scores([score(self._links[row], token)])
        self._result = StepResult(
            step=plan.step,
            tokens=tokens,
            failed=np.zeros(plan.num_rows, np.bool_),
            prompt_scores=self._prompt,
            output_scores=outputs,
        )

    def wait(self) -> StepResult:
        self._runner.maybe_fail("wait", self.plan)
        assert self._result is not None
        return self._result


class FakeRunner:
    """Device memory as dictionaries; checks every access that a plan asks for."""

    def __init__(self, page_size: int, max_running: int, window: int | None = None) -> None:
        self.page_size = page_size
        self.window = window
        self.slots: dict[int, tuple[int, int]] = {}
        self.window_slots: dict[int, int] = {}
        self.table: list[dict[int, int]] = [{} for _ in range(max_running)]
        self.window_table: list[dict[int, int]] = [{} for _ in range(max_running)]
        self.last_token = [0] * max_running
        self.seeds = [0] * max_running
        self.fail_at: str | None = None
        self.failed_names: set[str] = set()
        self.num_launched = 0
        self.problem: AssertionError | None = None
        self.scheduler: Scheduler | None = None

    def maybe_fail(self, place: str, plan: StepPlan) -> None:
        if self.fail_at == place:
            self.fail_at = None
            self.failed_names = {r.name for r in self._requests(plan) if r is not None}
            raise StepFaultError(place)

    def launch(self, plan: StepPlan) -> FakeFlight:
        try:
            return self._launch(plan)
        except AssertionError as error:
            # The core would make a failed step of it.
            self.problem = error
            raise

    def _launch(self, plan: StepPlan) -> FakeFlight:
        self.num_launched += 1
        self.maybe_fail("launch", plan)
        for params in plan.admitted:
            self.table[params.seat].clear()
            self.window_table[params.seat].clear()
            self.seeds[params.seat] = params.seed
        changed = (plan.table_seats, plan.table_columns, plan.table_pages)
        for seat, column, page in zip(*(a.tolist() for a in changed), strict=True):
            self.table[seat][column] = page
        changed = (plan.window_seats, plan.window_columns, plan.window_pages)
        for seat, column, page in zip(*(a.tolist() for a in changed), strict=True):
            self.window_table[seat][column] = page
        assert len(set(plan.seats.tolist())) == plan.num_rows
        links: list[int] = []
        prompt: dict[int, Scores] = {}
        used = scored = 0
        for row, request in enumerate(self._requests(plan)):
            assert request is not None
            self._check_table(plan, row, request)
            length = int(plan.lengths[row])
            tokens = plan.token_ids[used : used + length].tolist()
            used += length
            if plan.from_last[row]:
                assert length == 1
                tokens = [self.last_token[int(plan.seats[row])]]
            along = self._compute(plan, row, request, tokens)
            links.append(along[-1])
            start, end = int(plan.score_starts[row]), int(plan.score_ends[row])
            if end > start:
                targets = plan.score_targets[scored : scored + end - start].tolist()
                scored += end - start
                first = start - int(plan.starts[row])
                wanted = along[first : first + len(targets)]
                prompt[row] = _scores([score(a, t) for a, t in zip(wanted, targets, strict=True)])
        assert used == plan.num_tokens
        assert scored == len(plan.score_targets)
        return FakeFlight(self, plan, links, prompt)

    def _requests(self, plan: StepPlan) -> list[Request | None]:
        assert self.scheduler is not None
        pairs = zip(plan.seats.tolist(), plan.epochs.tolist(), strict=True)
        return [self.scheduler._seats.holder(seat, epoch) for seat, epoch in pairs]

    def _check_table(self, plan: StepPlan, row: int, request: Request) -> None:
        """The replayed page table covers the row and says what the lease says."""
        assert self.scheduler is not None
        end = int(plan.starts[row] + plan.lengths[row])
        pages = self.scheduler._seats.lease(request).page_ids.tolist()
        count = ceil_div(end, self.page_size)
        assert len(pages) >= count
        assert [self.table[request.seat].get(column) for column in range(count)] == pages[:count]

    def _compute(self, plan: StepPlan, row: int, request: Request, tokens: list[int]) -> list[int]:
        """Hashes of the row's positions; reads all earlier ones, writes those the plan says."""
        assert self.scheduler is not None
        ledger = self.scheduler._leases.ledger
        link, along = first_link(request.extra_key), []
        start, write_start = int(plan.starts[row]), int(plan.write_starts[row])
        for position in range(start + len(tokens)):
            page = self.table[request.seat][position // self.page_size]
            slot = page * self.page_size + position % self.page_size
            if position < start:
                stored, token = self.slots[slot]
                link = chain(link, token)
                assert stored == link
                continue
            link = chain(link, tokens[position - start])
            along.append(link)
            if position < write_start:
                assert self.slots[slot][0] == link
            else:
                assert ledger.owner_of(page) == request.name
                self.slots[slot] = (link, tokens[position - start])
        if self.window is not None:
            self._compute_window(request, start, write_start, along)
        return along

    def _compute_window(
        self, request: Request, start: int, write_start: int, along: list[int]
    ) -> None:
        """The same in the window class: reads the window of the first query, writes the rest."""
        assert self.scheduler is not None and self.window is not None
        windows = self.scheduler._leases.windows
        assert isinstance(windows, WindowPages)
        for position in range(max(start + 1 - self.window, 0), start + len(along)):
            full = self.table[request.seat][position // self.page_size]
            page = self.window_table[request.seat][position // self.page_size]
            slot = page * self.page_size + position % self.page_size
            if position < start:
                assert self.window_slots[slot] == self._link_at(full, position)
            elif position < write_start:
                assert self.window_slots[slot] == along[position - start]
            else:
                assert windows.ledger.owner_of(page) == request.name
                self.window_slots[slot] = along[position - start]

    def _link_at(self, full_page: int, position: int) -> int:
        return self.slots[full_page * self.page_size + position % self.page_size][0]


@dataclass
class Sample:
    """What one sample must produce, and what it has produced so far."""

    prompt: list[int]
    message: GenerateRequest
    index: int
    expected: list[int] = field(default_factory=list)
    expected_scores: list[float] = field(default_factory=list)
    expected_prompt: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    prompt_scores: list[float] = field(default_factory=list)
    finish: str | None = None
    status: int | None = None

    def __post_init__(self) -> None:
        sampling, message = self.message.sampling, self.message
        links = [first_link(message.extra_key)]
        for token in self.prompt:
            links.append(chain(links[-1], token))
        spec = message.logprob
        if self.index == 0 and spec.wanted and spec.start_len is not None:
            first = max(spec.start_len, 1)
            self.expected_prompt = [
                score(links[i], self.prompt[i]) for i in range(first, len(self.prompt))
            ]
        link, seed = links[-1], mix_seed(message.seed, self.index)
        while len(self.expected) < message.max_new_tokens:
            token = drawn(link, seed, expected_changes(self.prompt, self.expected, sampling))
            self.expected_scores.append(score(link, token))
            self.expected.append(token)
            link = chain(link, token)
            if len(self.expected) >= sampling.min_new_tokens and (
                token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos)
            ):
                return

    @property
    def name(self) -> str:
        return f"{self.message.rid}#{self.index}"

    def take(self, delta: OutputDelta) -> None:
        assert self.finish is None, f"{self.name} has ended already"
        self.tokens.extend(delta.output_ids)
        if delta.output_scores is not None:
            self.scores.extend(delta.output_scores.logprobs.tolist())
        if delta.prompt_scores is not None:
            self.prompt_scores.extend(delta.prompt_scores.logprobs.tolist())
        assert self.tokens == self.expected[: len(self.tokens)]
        assert self.scores == self.expected_scores[: len(self.scores)]
        assert self.prompt_scores == self.expected_prompt[: len(self.prompt_scores)]
        assert delta.cached_tokens < len(self.prompt)
        if delta.finish is not None:
            self.finish, self.status = delta.finish.type, delta.finish.status_code

    def check_whole(self) -> None:
        """Ended by itself: everything is there."""
        assert self.tokens == self.expected
        assert self.scores == self.expected_scores
        assert self.prompt_scores == self.expected_prompt
        reason = "length" if len(self.tokens) == self.message.max_new_tokens else "stop"
        assert self.finish in (reason, "stop")


def expected_changes(prompt: Sequence[int], output: Sequence[int], p: SamplingParams) -> Changes:
    """Changes to logits, computed the plain way."""
    found: dict[int, list[float]] = {}
    if p.has_penalty:
        for token in {*prompt, *output}:
            found.setdefault(token, [1.0, 0.0])[0] = p.repetition_penalty
        for token in set(output):
            count = list(output).count(token)
            found[token][1] -= p.frequency_penalty * count + p.presence_penalty
    for token, value in p.logit_bias:
        found.setdefault(token, [1.0, 0.0])[1] += value
    if len(output) + 1 < p.min_new_tokens:
        for token in {*p.stop_token_ids, *(() if p.ignore_eos else (EOS,))}:
            found.setdefault(token, [1.0, 0.0])[1] = -np.inf
    return tuple((token, float(np.float32(r)), a) for token, (r, a) in sorted(found.items()))


def _changes(adjust: LogitAdjust | None, row: int) -> Changes:
    if adjust is None:
        return ()
    assert bool((np.diff(adjust.rows) >= 0).all())
    at = np.flatnonzero(adjust.rows == row)
    columns = (adjust.ids[at], adjust.repetition[at], adjust.add[at])
    return tuple(zip(*(column.tolist() for column in columns), strict=True))


def _scores(logprobs: list[float]) -> Scores:
    count = len(logprobs)
    return Scores(
        logprobs=np.array(logprobs, np.float32),
        top_ids=np.empty((count, 0), np.int64),
        top_logprobs=np.empty((count, 0), np.float32),
        token_logprobs=np.empty((count, 0), np.float32),
    )


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One engine's shape."""

    page_size: int
    num_pages: int
    max_running: int = 4
    prefill_tokens: int = 16
    policy: str = "fcfs"
    conservativeness: float = 1.0
    mixed: bool = True
    radix: bool = True
    overlap: bool = True
    max_queued: int | None = None
    window: int | None = None
    spare_windows: int = 0
    policy_of_eviction: str = "lru"

    @property
    def num_window_pages(self) -> int:
        """The least that one request needs when it is alone, and what is to spare."""
        assert self.window is not None
        alone = ceil_div(self.window + self.prefill_tokens + 3 * self.page_size, self.page_size)
        return min(alone, self.num_pages) + self.spare_windows

    @property
    def longest(self) -> int:
        """Longest request that this pool holds."""
        return min(LONGEST, self.num_pages * self.page_size)


class SchedulerMachine:
    """The core with the fake runner, and every sample that was ever asked for."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.ledger = PageLedger(setup.num_pages, debug=True)
        order = EVICTION_ORDERS[setup.policy_of_eviction]
        tree: RadixCache | SwaCache = RadixCache(self.ledger, setup.page_size, order)
        self.windows: NoWindows | WindowPages = NoWindows()
        if setup.window is not None:
            self.windows = WindowPages(
                PageLedger(setup.num_window_pages, debug=True),
                num_full_pages=setup.num_pages,
                page_size=setup.page_size,
                window=setup.window,
                order=order,
            )
            tree = SwaCache(tree, self.windows)
        cache = tree if setup.radix else ChunkCache(tree)
        self.leases = LeaseBook(self.ledger, cache, setup.page_size, windows=self.windows)
        self.host = Ledger({"queue": 1 << 20})
        self.scheduler = Scheduler(
            SchedulerLimits(
                max_running=setup.max_running,
                prefill_tokens=setup.prefill_tokens,
                page_size=setup.page_size,
                policy=setup.policy,
                conservativeness=setup.conservativeness,
                mixed=setup.mixed,
                keeps_prefixes=setup.radix,
                max_queued=setup.max_queued,
                eos_token_ids=frozenset({EOS}),
            ),
            self.leases,
            self.host,
        )
        if setup.conservativeness < 1:
            # As after many short answers: admission then lets in more than can fit.
            self.scheduler._estimator._fraction = setup.conservativeness
        self.runner = FakeRunner(setup.page_size, setup.max_running, setup.window)
        self.runner.scheduler = self.scheduler
        self.core = EngineCore(
            self.scheduler, self.runner, self.leases, overlap=setup.overlap, check_pages=True
        )
        self.samples: dict[tuple[str, int], Sample] = {}
        self.others: list[FromCore] = []
        self.num_idle = 0
        self.num_operations = 0

    @property
    def open(self) -> list[Sample]:
        return [sample for sample in self.samples.values() if sample.finish is None]

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_new: int = 8,
        sampling: SamplingParams | None = None,
        logprob: LogprobSpec | None = None,
        priority: int = 0,
        extra_key: str | None = None,
    ) -> list[Sample]:
        rid = f"r{len(self.samples)}"
        message = GenerateRequest(
            rid=rid,
            input_ids=np.array(prompt, np.int32),
            sampling=sampling or SamplingParams(),
            logprob=logprob or LogprobSpec(),
            max_new_tokens=max_new,
            seed=len(self.samples) % 3,
            priority=priority,
            extra_key=extra_key,
        )
        added = [Sample(list(prompt), message, i) for i in range(message.sampling.n)]
        self.samples |= {(rid, sample.index): sample for sample in added}
        self.core.intake([message])
        # A refusal is an answer of the core, not of the scheduler.
        refused, self.core._answers = self.core._answers, []
        self._take(refused)
        return added

    def abort(self, rid: str | None) -> None:
        expected = {s.name for s in self.open if rid in (None, s.message.rid)}
        self.core.intake([AbortRequest(rid=rid)])
        self._take(self.scheduler.take_outputs())
        assert not expected & {s.name for s in self.open}

    def finish(self, sample: Sample, num_output: int) -> None:
        """A stop string ended at output `num_output`, which the front end had been given."""
        message = FinishRequest(rid=sample.message.rid, index=sample.index, num_output=num_output)
        self.core.intake([message])
        self._take(self.scheduler.take_outputs())
        assert sample.finish == "stop"

    def turn(self, fail_at: str | None = None) -> None:
        """One turn of the loop, in which the step may fail at a place."""
        self.runner.fail_at, self.runner.failed_names = fail_at, set()
        had_work, launched = self.core.has_work, self.runner.num_launched
        in_flight = self.core._in_flight is not None
        answers = self.core.turn()
        if self.runner.problem is not None:
            raise self.runner.problem
        self._take(answers)
        self.runner.fail_at = None
        assert not self.runner.failed_names & {s.name for s in self.open}
        idle = had_work and not in_flight and self.runner.num_launched == launched
        self.num_idle = self.num_idle + 1 if idle else 0
        assert self.num_idle < 2, "work is left, but nothing is computed"

    def drain(self) -> None:
        """Run until nothing is left, within a bound."""
        left = sum(len(s.prompt) + s.message.max_new_tokens for s in self.open)
        bound = 50 + 20 * left
        while self.core.has_work:
            self.turn()
            bound -= 1
            assert bound > 0, "no end in sight"
        assert not self.open

    def close(self) -> None:
        """Drain; every page, seat and byte must be back."""
        self.drain()
        self.check()
        counts = self.ledger.counts()
        assert counts.free + counts.cached == counts.total
        assert self.leases.num_open == 0
        assert sorted(self.scheduler._seats.free) == list(range(self.setup.max_running))
        assert self.host.now("queue") == 0
        assert not self.scheduler._requests
        assert not self.scheduler._groups._groups
        if not self.setup.radix:
            assert counts.cached == 0
        assert self.leases.cache.reset()
        assert self.ledger.num_free == self.setup.num_pages
        if isinstance(self.windows, WindowPages):
            assert self.windows.num_free == self.setup.num_window_pages

    def check(self) -> None:
        """Holds between any two turns."""
        self.num_operations += 1
        assert self.leases.check()
        assert self.leases.audit() == []
        running = self.scheduler._running
        assert self.leases.num_open == len(running)
        # A request counts as a use of the cache when it is seated, however long it waited.
        assert self.leases.cache.stats().num_lookups == self.scheduler._seats._num_taken
        ranks = [self.scheduler._queue.rank(request) for request in running]
        assert ranks == sorted(ranks)
        if self.setup.conservativeness >= 1:
            assert self.scheduler.counts.retractions == 0
        for request in running:
            assert request.applied <= request.computed <= request.num_planned
            assert 0 <= request.outstanding <= (1 if self.setup.overlap else 0)

    def _take(self, answers: Sequence[FromCore]) -> None:
        for answer in answers:
            if not isinstance(answer, OutputDelta):
                self.others.append(answer)
                continue
            sample = self.samples[answer.rid, answer.index]
            sample.take(answer)
            if answer.finish is None:
                continue
            if sample.finish == "abort":
                failed = sample.name in self.runner.failed_names
                assert failed == (sample.status == 500), answer.finish
            elif answer.output_ids or not sample.message.max_new_tokens:
                sample.check_whole()


# Prompts begin alike, so that prefixes are shared, and part at a few places.
STEM = [(7 * i * i + 3 * i) % VOCAB for i in range(96)]


def random_setup(rng: random.Random) -> Setup:
    """An engine of any shape: page sizes 1 to 64, one or two classes, tight or roomy."""
    page_size = rng.choice([1, 2, 3, 16, 64])
    if rng.random() < 0.3:
        # Where pages run short most: room for a few requests at their expected length only.
        return Setup(
            page_size=min(page_size, 16),
            num_pages=ceil_div(70, min(page_size, 16)),
            conservativeness=0.05,
            overlap=rng.random() < 0.5,
            window=rng.choice([None, 6]),
            spare_windows=70,
        )
    return Setup(
        page_size=page_size,
        num_pages=ceil_div(rng.randint(6, 72), page_size) + rng.randint(0, 2),
        max_running=rng.randint(2, 8),
        prefill_tokens=rng.choice([1, 3, 7, 16, 64]),
        policy=rng.choice(["fcfs", "lpm", "priority"]),
        conservativeness=rng.choice([1.0, 0.05, 0.05]),
        mixed=rng.random() < 0.7,
        radix=rng.random() < 0.75,
        overlap=rng.random() < 0.7,
        max_queued=rng.choice([None, None, 3]),
        window=rng.choice([None, None, 1, 4, 9, 30]),
        spare_windows=rng.randint(0, 12),
        policy_of_eviction=rng.choice(list(EVICTION_ORDERS)),
    )


def random_sample(machine: SchedulerMachine, rng: random.Random) -> list[Sample]:
    """A request that the pool can hold."""
    longest = max(machine.setup.longest // rng.choice([1, 2, 3]), 2)
    length = rng.randint(1, longest - 1)
    prompt = [*STEM[: length - 1], rng.randrange(VOCAB)]
    max_new = rng.randint(0, longest - length)
    return machine.add(
        prompt,
        max_new=max_new,
        sampling=SamplingParams(
            n=rng.choice([1, 1, 1, 3]) if max_new else 1,
            ignore_eos=rng.random() < 0.3,
            # Answers that turn out longer than expected are what makes pages run short.
            min_new_tokens=min(rng.choice([0, 4, 30]), max_new),
        ),
        logprob=LogprobSpec(wanted=True, start_len=rng.choice([None, 0])),
        priority=rng.randrange(3),
        extra_key=rng.choice([None, None, None, "lora"]),
    )


def random_turn(machine: SchedulerMachine, rng: random.Random) -> None:
    """One operation: mostly turns of the loop, sometimes what users and faults do to it."""
    kind = rng.random()
    if len(machine.open) < 6 or (kind < 0.15 and len(machine.open) < 12):
        random_sample(machine, rng)
    elif kind < 0.9:
        machine.turn()
    elif kind < 0.93:
        machine.turn(fail_at=rng.choice(["launch", "sample", "wait"]))
    elif kind < 0.96:
        machine.abort(rng.choice(machine.open).message.rid)
    elif kind < 0.99:
        ready = [sample for sample in machine.open if sample.tokens]
        if ready:
            sample = rng.choice(ready)
            machine.finish(sample, max(len(sample.tokens) - rng.randrange(3), 1))
    else:
        machine.core.intake([FlushCache(ticket=5)])
        machine.turn()


def run_random(seed: int, num_operations: int) -> SchedulerMachine:
    """A machine of random shape after so many random operations, checked and closed."""
    rng = random.Random(seed)
    machine = SchedulerMachine(random_setup(rng))
    for _ in range(num_operations):
        random_turn(machine, rng)
        machine.check()
    machine.close()
    return machine
