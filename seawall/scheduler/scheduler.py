"""The scheduler: plan() says what the next step computes, apply() takes what a step gave.

Owns every Request and every Lease. There is one kind of step; decode rows come first, then chunks
of prompts that are partly computed, then newly admitted requests. A plan may be made while the
previous step is still on the device; what would need that step's tokens (giving pages of a
running request to another) is put off until it has come back, so nothing computed is ever lost.
"""

import bisect
import contextlib
import logging
from dataclasses import dataclass, replace

from seawall.cache.lease import Lease, LeaseBook
from seawall.cache.prefix import PrefixKey
from seawall.core.errors import RequestError
from seawall.core.grammar import Grammars, NoGrammars
from seawall.core.request import Request, Status
from seawall.core.seeds import mix_seed
from seawall.core.step import LogitAdjust, StepPlan, StepResult, TokenMasks
from seawall.core.units import ceil_div
from seawall.core.wire import FinishReason, FinishRequest, GenerateRequest, OutputDelta
from seawall.memory.ledger import Ledger
from seawall.scheduler.adjust import adjust_rows
from seawall.scheduler.admission import (
    NO_WINDOWS,
    Admission,
    Holding,
    LengthEstimator,
    WindowDemand,
)
from seawall.scheduler.batching import StepBuilder, share_budget
from seawall.scheduler.constrained import ConstrainedRequests, broken, refused
from seawall.scheduler.groups import SampleGroups
from seawall.scheduler.outbox import Outbox
from seawall.scheduler.pressure import choose_victim
from seawall.scheduler.queue import WaitQueue
from seawall.scheduler.recall import CompanionRecall, NoRecall, Recall
from seawall.scheduler.seats import Seats
from seawall.scheduler.stop import no_pages, not_finite, stop_reason
from seawall.scheduler.underway import PrefixesUnderWay

logger = logging.getLogger("seawall.scheduler")

# Requests passed over in one step because others compute their prefix: bounds a step's cost.
_MAX_HELD = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What a step may hold, and how waiting requests are chosen."""

    max_running: int
    prefill_tokens: int
    page_size: int
    policy: str
    conservativeness: float
    mixed: bool
    keeps_prefixes: bool
    max_queued: int | None
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerCounts:
    """How many requests wait and run, and what pressure did so far."""

    waiting: int
    running: int
    most_running: int
    retractions: int
    steps: int


@dataclass(slots=True)
class _Totals:
    """Counts since the start."""

    arrived: int = 0
    retractions: int = 0
    steps: int = 0


class NeedsDrainError(Exception):
    """Pages must be taken from a running request while its step is still on the device."""


class Scheduler:
    """See the module's docstring. Not thread-safe: the core thread is its only caller."""

    def __init__(
        self,
        limits: SchedulerLimits,
        leases: LeaseBook,
        host: Ledger,
        grammars: Grammars | None = None,
    ) -> None:
        self._limits = limits
        self._leases = leases
        self._queue = WaitQueue(policy=limits.policy, max_queued=limits.max_queued, ledger=host)
        self._running: list[Request] = []
        self._seats = Seats(limits.max_running)
        self._requests: dict[str, dict[int, Request]] = {}
        self._groups = SampleGroups()
        self._recall: Recall = (
            CompanionRecall(leases.companions) if limits.keeps_prefixes else NoRecall()
        )
        self._under_way = PrefixesUnderWay(limits.page_size)
        self.constrained = ConstrainedRequests(
            grammars or NoGrammars(), limits.max_running, limits.eos_token_ids
        )
        self._estimator = LengthEstimator(limits.conservativeness)
        self.outbox = Outbox()
        self._totals = _Totals()

    # -- intake ------------------------------------------------------------------------------

    def add(self, message: GenerateRequest) -> None:
        """Queue all samples of a request.

        Raises:
            QueueFullError: the queue's limit would be passed; nothing was queued.
        """
        num_samples = message.sampling.n
        num_tokens = len(message.input_ids) + message.max_new_tokens
        self._queue.check_room(num_samples, num_tokens)
        has_whole_page = len(message.input_ids) >= self._limits.page_size
        group = message.rid if num_samples > 1 and has_whole_page else None
        if group is not None:
            self._groups.open(group, num_samples)
        self.constrained.expect(message.sampling)
        # Samples after the first don't score the prompt again; the front end copies it.
        unscored = replace(message.logprob, start_len=None)
        samples: dict[int, Request] = {}
        for index in range(num_samples):
            request = Request(
                rid=message.rid,
                index=index,
                prompt=message.input_ids,
                sampling=message.sampling,
                logprob=message.logprob if index == 0 else unscored,
                max_new_tokens=message.max_new_tokens,
                seed=mix_seed(message.seed, index),
                priority=message.priority,
                extra_key=message.extra_key,
                arrival=self._totals.arrived,
                group=group,
            )
            self._totals.arrived += 1
            samples[index] = request
            self._queue.enter(request)
        self._requests[message.rid] = samples

    def abort(
        self, rid: str | None, message: str = "aborted by the caller", *, status_code: int = 499
    ) -> None:
        """End a request (or all of them), wherever it is; pages come back at once."""
        names = list(self._requests) if rid is None else [rid]
        reason = FinishReason(type="abort", message=message, status_code=status_code)
        for name in names:
            for request in list(self._requests.get(name, {}).values()):
                self._finish(request, reason)

    def finish(self, message: FinishRequest) -> None:
        """A stop string ended a sample at output token `num_output`; later tokens are void."""
        request = self._requests.get(message.rid, {}).get(message.index)
        if request is None:
            return
        request.num_tokens = min(request.num_tokens, request.num_prompt + message.num_output)
        self._estimator.record(request)
        self._finish(request, FinishReason(type="stop"))

    def end_untrusted(self, name: str, message: str) -> None:
        """End the running request of that name, and keep nothing of what it computed."""
        for request in [r for r in self._running if r.name == name]:
            reason = FinishReason(type="abort", message=message, status_code=500)
            self._finish(request, reason, keep=False)
            self._groups.drop_locks()

    def drop(self, message: str) -> None:
        """End everything when it can't be ended in order: after a fault in the state itself.

        All leases are given up as they are, and the cache is emptied.
        """
        reason = FinishReason(type="abort", message=message, status_code=500)
        left = [r for samples in self._requests.values() for r in samples.values()]
        for request in [r for r in left if r.status is not Status.FINISHED]:
            request.status = Status.FINISHED
            self._recall.forget(request)
            self._queue.leave(request)
            self.outbox.send(request, finish=reason)
        self._requests.clear()
        self._running.clear()
        self._queue.clear()
        self._seats.clear()
        self._groups = SampleGroups()
        self._under_way = PrefixesUnderWay(self._limits.page_size)
        self._leases.abandon()

    def hold(self) -> None:
        """Let requests that arrive from here on wait; earlier ones run to their end."""
        self._queue.hold_from(self._totals.arrived)

    def let_go(self) -> None:
        """Undo `hold`."""
        self._queue.hold_from(None)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs besides requests that are held."""
        return not self._running and not self._queue.has_eligible

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._running) or len(self._queue) > 0

    @property
    def counts(self) -> SchedulerCounts:
        """Figures for reports."""
        return SchedulerCounts(
            waiting=len(self._queue),
            running=len(self._running),
            most_running=self._seats.most_taken,
            retractions=self._totals.retractions,
            steps=self._totals.steps,
        )

    def take_outputs(self) -> list[OutputDelta]:
        """What has been produced since the last call."""
        return self.outbox.take()

    # -- planning ----------------------------------------------------------------------------

    def plan(self, *, in_flight: bool) -> StepPlan | None:
        """The next step, or None if nothing can be computed before the one in flight is back."""
        builder = StepBuilder(self._leases.windows)
        with contextlib.suppress(NeedsDrainError):
            self._fill(builder, in_flight)
        if len(builder) == 0:
            return None
        self._totals.steps += 1
        return builder.build(self._totals.steps)

    def _fill(self, builder: StepBuilder, in_flight: bool) -> None:
        num_retractions = self._totals.retractions
        self._end_broken(self.constrained.call_in())
        if self._leases.has_windows:
            for request in self._running:
                self._seats.lease(request).slide(min(request.applied, request.num_tokens - 1))
        if self._limits.mixed:
            self._add_decodes(builder, in_flight)
        left = self._add_chunks(builder, in_flight)
        # What was just sent back must not be let in again before the others have moved on.
        if left > 0 and self._totals.retractions == num_retractions:
            self._admit(builder, left)
        if not self._limits.mixed and len(builder) == 0:
            self._add_decodes(builder, in_flight)

    def _add_decodes(self, builder: StepBuilder, in_flight: bool) -> None:
        decoding = [r for r in self._running if r.is_decoding]
        growing = [r for r in decoding if self._grows(r)]
        # When pages run short, who has a row already and who hasn't decides who gives way.
        if not self._leases.has_windows and len(growing) <= self._leases.available_pages:
            held = set(growing)
            builder.add_decodes([r for r in decoding if r not in held])
            decoding = growing
        for request in decoding:
            if request.status is Status.RUNNING:
                self._add_row(builder, request, request.computed + 1, in_flight)

    def _grows(self, request: Request) -> bool:
        """Whether its next position needs a page, or the device does not know its pages yet."""
        lease = self._seats.lease(request)
        return request.computed >= lease.num_tokens or request.table_columns < lease.num_pages

    def _add_chunks(self, builder: StepBuilder, in_flight: bool) -> int:
        """Go on with partly computed prompts; returns what is left of the step's budget."""
        partial = [r for r in self._running if r.is_prefilling]
        left = self._limits.prefill_tokens
        shares = share_budget([r.num_left for r in partial], left)
        for request, share in zip(partial, shares, strict=True):
            if share == 0 or request.status is not Status.RUNNING:
                continue
            end = request.computed + share
            # Only a step that would else be empty takes pages from others for a prompt.
            if len(builder) == 0:
                self._add_row(builder, request, end, in_flight)
            elif self._seats.lease(request).reserve(end):
                builder.add(request, end, self._seats.lease(request).page_ids)
            left -= share
        return left

    def _add_row(self, builder: StepBuilder, request: Request, end: int, in_flight: bool) -> None:
        """Add the row if pages for [0, end) can be had, from other requests if need be."""
        lease = self._seats.lease(request)
        while not lease.reserve(end):
            if in_flight:
                raise NeedsDrainError
            if len(self._running) > 1:
                self._retract(self._victim(builder))
            elif not self._groups.drop_locks():
                self._finish(request, no_pages(request))
            if request.status is not Status.RUNNING:
                return
        builder.add(request, end, lease.page_ids)

    def _victim(self, builder: StepBuilder) -> Request:
        """Who goes back to the queue: nobody who has a row already, and not the first of all."""
        candidates = [r for r in self._running[1:] if not builder.has_row(r)]
        last = self._queue.rank(candidates[-1])[0]
        # Of several priorities only the lowest gives way.
        same = [(r, self._seats.lease(r)) for r in candidates if self._queue.rank(r)[0] == last]
        # A page for each that grows into a new one in this step and the next few.
        return choose_victim(same, 1 + len(self._running) // self._limits.page_size)[0]

    def _admit(self, builder: StepBuilder, budget: int) -> None:
        if len(self._queue) == 0 or not self._seats.free:
            return
        admission = self._new_admission()
        num_held = 0
        for request in self._queue.ordered(self._match_length):
            if budget <= 0 or not self._seats.free or num_held == _MAX_HELD:
                return
            if not self._groups.is_ready(request) or not self._has_grammar(request):
                continue
            lease = self._open_lease(request)
            if self._waits_for_prefix(request, lease):
                lease.release(request.tokens, 0, insert=False)
                num_held += 1
                continue
            used = self._admit_one(builder, request, lease, admission, budget)
            if used == 0 and not self._running:
                # Only shared pages that wait for their samples can stand in the way.
                if self._groups.drop_locks():
                    lease = self._open_lease(request)
                    used = self._admit_one(builder, request, lease, admission, budget)
                if used == 0:
                    self._finish(request, no_pages(request))
                    continue
            if used == 0:
                return
            budget -= used

    def _has_grammar(self, request: Request) -> bool:
        """Whether a waiting request's grammar is ready, if it has one; ends it if it can't be."""
        try:
            return self.constrained.is_ready(request)
        except RequestError as error:
            self._finish(request, refused(error))
            return False

    def _open_lease(self, request: Request) -> Lease:
        """Share the longest cached prefix from which the request can go on.

        A prompt that is scored from an early position needs the window in front of that one; where
        it is gone, the prefix counts up to there only.
        """
        lease = self._open_up_to(request, request.num_tokens)
        while not lease.reads_from(0):
            scored = self._recall.scored_after(request, lease)
            first = _first_position(request, lease.num_cached_tokens, scored)
            if lease.reads_from(first):
                break
            lease.release(request.tokens, 0, insert=False)
            lease = self._open_up_to(request, min(first, lease.num_cached_tokens - 1))
        return lease

    def _open_up_to(self, request: Request, max_match_tokens: int) -> Lease:
        return self._leases.open(
            request.name,
            request.tokens[: request.num_tokens],
            self._cache_key(request),
            max_match_tokens=max_match_tokens,
        )

    def _waits_for_prefix(self, request: Request, lease: Lease) -> bool:
        if not (self._limits.keeps_prefixes and self._under_way.has_leader(request)):
            return False
        scored = self._recall.scored_after(request, lease)
        first = _first_position(request, lease.num_cached_tokens, scored)
        return self._under_way.worth_waiting(request, first)

    def _admit_one(
        self,
        builder: StepBuilder,
        request: Request,
        lease: Lease,
        admission: Admission,
        budget: int,
    ) -> int:
        """Seat one request and add its first row; returns its length, 0 if it doesn't fit."""
        num_shared = len(lease.page_ids)
        pages, windows = self._leases.available_pages, self._leases.available_windows
        if not admission.fits(request, num_shared, pages, windows):
            lease.release(request.tokens, 0, insert=False)
            return 0
        scored = self._recall.scored_after(request, lease)
        first = _first_position(request, lease.num_cached_tokens, scored)
        end = min(request.num_tokens, first + budget)
        if not lease.reserve(end):
            lease.release(request.tokens, 0, insert=False)
            return 0
        lease.confirm()
        admission.admit(request, num_shared)
        self._queue.remove(request)
        self._seats.take(request, lease)
        self.constrained.sit(request)
        bisect.insort(self._running, request, key=self._queue.rank)
        request.status = Status.RUNNING
        request.computed = request.applied = first
        request.write_from = lease.num_cached_tokens
        request.committed = False
        request.table_columns = 0
        if request.num_retractions == 0:
            request.cached_tokens = first
        self._groups.admitted(request)
        self._under_way.enter(request)
        if scored > request.scored:
            self.outbox.send(request, prompt_scores=self._recall.take(request, lease, scored))
        builder.seat(request)
        builder.add(request, end, lease.page_ids)
        return end - first

    def _new_admission(self) -> Admission:
        leases = [(r, self._seats.lease(r)) for r in self._running]
        holdings = [
            Holding(
                request=r,
                num_pages=lease.num_pages,
                num_own=lease.num_own,
                num_windows=lease.num_returning_windows,
            )
            for r, lease in leases
        ]
        windows = _window_demand(self._limits, self._leases)
        return Admission(holdings, self._estimator, self._limits.page_size, windows)

    def _cache_key(self, request: Request) -> str | None:
        if self._limits.keeps_prefixes:
            return request.extra_key
        return None if request.group is None else f"group {request.group}"

    def _match_length(self, request: Request) -> int:
        tokens = request.tokens[: request.num_tokens]
        key = PrefixKey(tokens=tokens, extra_key=self._cache_key(request))
        return self._leases.cache.measure(key)

    # -- results -----------------------------------------------------------------------------

    def adjust(self, plan: StepPlan) -> LogitAdjust | None:
        """Penalties and bias of the plan's sampled rows, every earlier token counted."""
        samples = plan.samples.tolist()
        rows = [(i, r) for i, r in self._live_rows(plan) if samples[i]]
        return adjust_rows(rows, self._limits.eos_token_ids)

    def masks(self, plan: StepPlan) -> TokenMasks | None:
        """Which tokens may come next in rows with a grammar, every earlier token counted."""
        masks, failed = self.constrained.masks(plan)
        self._end_broken(failed)
        return masks

    def _end_broken(self, requests: list[Request]) -> None:
        """End requests whose grammar can't go on."""
        for request in requests:
            assert request.constraint is not None
            self._finish(request, broken(request, request.constraint))

    def apply(self, plan: StepPlan, result: StepResult) -> None:
        """Take a step's results; rows of requests that ended meanwhile die here."""
        ends, samples = (plan.starts + plan.lengths).tolist(), plan.samples.tolist()
        tokens, failed = result.tokens.tolist(), result.failed.tolist()
        for i, request in self._live_rows(plan):
            request.applied = max(request.applied, ends[i])
            token = tokens[i] if samples[i] else None
            if token is not None:
                request.outstanding -= 1
            if failed[i]:
                # Its KV may be no better than its logits: nobody else must find it.
                self._finish(request, not_finite(request), keep=False)
                continue
            if not request.committed and request.applied >= request.num_tokens:
                self._commit(request)
            if i in result.prompt_scores or i in result.output_scores:
                self._recall.keep(request, self._seats.lease(request), plan, i, result)
            self._emit(request, i, token, result)

    def fail(self, plan: StepPlan, message: str) -> None:
        """A step broke: end its requests, keep nothing it may have written, touch no other."""
        reason = FinishReason(type="abort", message=message, status_code=500)
        for _, request in self._live_rows(plan):
            self._finish(request, reason, keep=False)

    def _live_rows(self, plan: StepPlan) -> list[tuple[int, Request]]:
        pairs = zip(plan.seats.tolist(), plan.epochs.tolist(), strict=True)
        rows = [(i, self._seats.holder(seat, epoch)) for i, (seat, epoch) in enumerate(pairs)]
        return [(i, request) for i, request in rows if request is not None]

    def _emit(self, request: Request, row: int, token: int | None, result: StepResult) -> None:
        reason = None
        if token is not None:
            request.tokens[request.num_tokens] = token
            request.num_tokens += 1
            reason = stop_reason(request, token, self._limits.eos_token_ids)
            if request.constraint is not None and (reason is None or reason.type == "length"):
                reason = self.constrained.accept(request, request.constraint, token) or reason
        elif request.max_new_tokens == 0 and request.applied == request.num_tokens:
            reason = FinishReason(type="length", length=0)
        prompt_scores = result.prompt_scores.get(row)
        if token is None and prompt_scores is None and reason is None:
            return
        if reason is not None:
            self._estimator.record(request)
            self._end(request)
        self.outbox.send(
            request,
            output_ids=() if token is None else (token,),
            prompt_scores=prompt_scores,
            output_scores=result.output_scores.get(row),
            finish=reason,
        )

    def _commit(self, request: Request) -> None:
        """Give the computed whole pages of a prompt to the cache, for others to share."""
        lease = self._seats.lease(request)
        request.committed = True
        self._under_way.leave(request)
        changed = lease.commit(request.tokens, request.applied, priority=request.priority)
        if changed:
            request.table_columns = min(request.table_columns, changed.start)
        self._groups.prompt_computed(request, lease)

    # -- endings -----------------------------------------------------------------------------

    def _finish(self, request: Request, reason: FinishReason, *, keep: bool = True) -> None:
        if request.status is Status.FINISHED:
            return
        self._end(request, keep=keep)
        self.outbox.send(request, finish=reason)

    def _end(self, request: Request, *, keep: bool = True) -> None:
        if request.status is Status.RUNNING:
            if keep:
                self._recall.settle(request, self._seats.lease(request))
            self._unseat(request, keep=keep)
        else:
            self._queue.remove(request)
        request.status = Status.FINISHED
        self.constrained.end(request)
        self._recall.forget(request)
        self._queue.leave(request)
        self._groups.gone(request)
        samples = self._requests[request.rid]
        del samples[request.index]
        if not samples:
            del self._requests[request.rid]

    def _retract(self, request: Request) -> None:
        """Send a running request back to the queue; its computed pages stay in the cache."""
        assert request.outstanding == 0
        self._recall.save(request, self._seats.lease(request))
        self._unseat(request, keep=True)
        request.status = Status.WAITING
        request.num_retractions += 1
        self._totals.retractions += 1
        self._queue.push(request)
        logger.info("retracted %s at %d tokens", request.name, request.num_tokens)

    def _unseat(self, request: Request, *, keep: bool) -> None:
        self._under_way.leave(request)
        self.constrained.rise(request)
        lease = self._seats.give(request)
        num_valid = min(request.applied, request.num_tokens) if keep else 0
        lease.release(request.tokens, num_valid, insert=keep, priority=request.priority)
        at = bisect.bisect_left(self._running, self._queue.rank(request), key=self._queue.rank)
        assert self._running[at] is request
        del self._running[at]
        request.outstanding = 0


def _window_demand(limits: SchedulerLimits, leases: LeaseBook) -> WindowDemand:
    if not leases.has_windows:
        return NO_WINDOWS
    # One chunk in flight and one planned behind it.
    return WindowDemand(
        most_held=leases.windows.most_held,
        prefill_pages=ceil_div(2 * limits.prefill_tokens, limits.page_size),
    )


def _first_position(request: Request, num_cached: int, scored: int) -> int:
    """First position to compute when `num_cached` positions are in shared pages.

    The newest token is computed again even if its page is cached: its hidden state draws the
    next one. So are prompt positions whose next token is still to be scored.
    """
    first = min(num_cached, request.num_tokens - 1)
    if scored < request.last_scored_position:
        first = min(first, scored)
    return first
