"""The scheduler: plan() says what the next step computes, apply() takes what a step gave.

Owns every Request and every Lease. There is one kind of step; decode rows come first, then chunks
of prompts that are partly computed, then newly admitted requests. A plan may be made while the
previous step is still on the device; what would need that step's tokens (giving pages of a
running request to another) is put off until it has come back, so nothing computed is ever lost.
"""

import bisect
import contextlib
import heapq
import logging
from dataclasses import dataclass, replace

from seawall.cache.lease import Lease, LeaseBook
from seawall.cache.prefix import PrefixKey
from seawall.core.params import LogprobSpec
from seawall.core.request import Request, Status
from seawall.core.seeds import mix_seed
from seawall.core.step import LogitAdjust, Scores, StepPlan, StepResult
from seawall.core.wire import FinishReason, FinishRequest, GenerateRequest, OutputDelta
from seawall.memory.ledger import Ledger
from seawall.scheduler.adjust import adjust_rows
from seawall.scheduler.admission import Admission, Holding, LengthEstimator
from seawall.scheduler.batching import StepBuilder, share_budget
from seawall.scheduler.groups import SampleGroups
from seawall.scheduler.queue import WaitQueue
from seawall.scheduler.recall import Recall
from seawall.scheduler.stop import stop_reason
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

    def __init__(self, limits: SchedulerLimits, leases: LeaseBook, host: Ledger) -> None:
        self._limits = limits
        self._leases = leases
        self._queue = WaitQueue(policy=limits.policy, max_queued=limits.max_queued, ledger=host)
        self._running: list[Request] = []
        self._seats = _Seats(limits.max_running)
        self._requests: dict[str, dict[int, Request]] = {}
        self._groups = SampleGroups()
        self._recall = Recall(leases.companions)
        self._under_way = PrefixesUnderWay(limits.page_size)
        self._estimator = LengthEstimator(limits.conservativeness)
        self._outputs: list[OutputDelta] = []
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
        samples: dict[int, Request] = {}
        for index in range(num_samples):
            request = Request(
                rid=message.rid,
                index=index,
                prompt=message.input_ids,
                sampling=message.sampling,
                logprob=message.logprob if index == 0 else _outputs_only(message),
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
            retractions=self._totals.retractions,
            steps=self._totals.steps,
        )

    def take_outputs(self) -> list[OutputDelta]:
        """What has been produced since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # -- planning ----------------------------------------------------------------------------

    def plan(self, *, in_flight: bool) -> StepPlan | None:
        """The next step, or None if nothing can be computed before the one in flight is back."""
        builder = StepBuilder()
        with contextlib.suppress(NeedsDrainError):
            self._fill(builder, in_flight)
        if len(builder) == 0:
            return None
        self._totals.steps += 1
        return builder.build(self._totals.steps)

    def _fill(self, builder: StepBuilder, in_flight: bool) -> None:
        num_retractions = self._totals.retractions
        if self._limits.mixed:
            self._add_decodes(builder, in_flight)
        left = self._add_chunks(builder, in_flight)
        # What was just sent back must not be let in again before the others have moved on.
        if left > 0 and self._totals.retractions == num_retractions:
            self._admit(builder, left)
        if not self._limits.mixed and len(builder) == 0:
            self._add_decodes(builder, in_flight)

    def _add_decodes(self, builder: StepBuilder, in_flight: bool) -> None:
        for request in list(self._running):
            if request.status is not Status.RUNNING or request.num_left != 1:
                continue
            if request.outstanding > 0 and not request.may_sample:
                continue
            self._add_row(builder, request, request.computed + 1, in_flight)

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
        """Add the row if pages for [0, end) can be had, from the youngest requests if need be."""
        lease = self._seats.lease(request)
        while not lease.reserve(end):
            if in_flight:
                raise NeedsDrainError
            victim = self._running[-1]
            if victim is not request or len(self._running) > 1:
                self._retract(victim)
            elif not self._groups.drop_locks():
                self._finish(request, _no_pages(request))
            if request.status is not Status.RUNNING:
                return
        builder.add(request, end, lease.page_ids)

    def _admit(self, builder: StepBuilder, budget: int) -> None:
        if len(self._queue) == 0 or not self._seats.free:
            return
        admission = self._new_admission()
        num_held = 0
        for request in self._queue.ordered(self._match_length):
            if budget <= 0 or not self._seats.free or num_held == _MAX_HELD:
                return
            if not self._groups.is_ready(request):
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
                    self._finish(request, _no_pages(request))
                    continue
            if used == 0:
                return
            budget -= used

    def _open_lease(self, request: Request) -> Lease:
        return self._leases.open(
            request.name,
            request.tokens[: request.num_tokens],
            self._cache_key(request),
            max_match_tokens=request.num_tokens,
        )

    def _waits_for_prefix(self, request: Request, lease: Lease) -> bool:
        return self._limits.keeps_prefixes and self._under_way.worth_waiting(
            request, request.extra_key, lease.num_cached_tokens
        )

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
        scored = self._recall.scored_after(request, lease)
        first = _first_position(request, lease.num_cached_tokens, scored)
        end = min(request.num_tokens, first + budget)
        fits = admission.fits(request, num_shared, self._leases.available_pages)
        if not fits or not lease.reserve(end):
            lease.release(request.tokens, 0, insert=False)
            return 0
        admission.admit(request, num_shared)
        self._queue.remove(request)
        self._seats.take(request, lease)
        bisect.insort(self._running, request, key=self._queue.rank)
        request.status = Status.RUNNING
        request.computed = request.applied = first
        request.write_from = lease.num_cached_tokens
        request.committed = False
        request.table_columns = 0
        if request.num_retractions == 0:
            request.cached_tokens = first
        self._groups.admitted(request)
        self._under_way.enter(request, request.extra_key, lease.num_cached_tokens)
        if scored > request.scored:
            self._send(request, prompt_scores=self._recall.take(request, lease, scored))
        builder.seat(request)
        builder.add(request, end, lease.page_ids)
        return end - first

    def _new_admission(self) -> Admission:
        leases = [(r, self._seats.lease(r)) for r in self._running]
        holdings = [
            Holding(request=r, num_pages=len(lease.page_ids), num_own=lease.num_own)
            for r, lease in leases
        ]
        return Admission(holdings, self._estimator, self._limits.page_size)

    def _cache_key(self, request: Request) -> str | None:
        if self._limits.keeps_prefixes:
            return request.extra_key
        return None if request.group is None else f"group {request.group}"

    def _match_length(self, request: Request) -> int:
        tokens = request.tokens[: request.num_tokens]
        key = PrefixKey(tokens=tokens, extra_key=self._cache_key(request))
        return self._leases.cache.match(key).num_tokens

    # -- results -----------------------------------------------------------------------------

    def adjust(self, plan: StepPlan) -> LogitAdjust | None:
        """Penalties and bias of the plan's sampled rows, every earlier token counted."""
        rows = [(i, r) for i, r in self._live_rows(plan) if plan.samples[i]]
        return adjust_rows(rows, self._limits.eos_token_ids)

    def apply(self, plan: StepPlan, result: StepResult) -> None:
        """Take a step's results; rows of requests that ended meanwhile die here."""
        for i, request in self._live_rows(plan):
            end = int(plan.starts[i]) + int(plan.lengths[i])
            request.applied = max(request.applied, end)
            token = int(result.tokens[i]) if plan.samples[i] else None
            if token is not None:
                request.outstanding -= 1
            if result.failed[i]:
                # Its KV may be no better than its logits: nobody else must find it.
                self._finish(request, _not_finite(request), keep=False)
                continue
            if not request.committed and request.applied >= request.num_tokens:
                self._commit(request)
            self._recall.keep(request, self._seats.lease(request), plan, i, result)
            self._emit(request, i, token, result)

    def fail(self, plan: StepPlan, message: str) -> None:
        """A step broke: end its requests, keep nothing it may have written, touch no other."""
        reason = FinishReason(type="abort", message=message, status_code=500)
        for _, request in self._live_rows(plan):
            self._finish(request, reason, keep=False)

    def _live_rows(self, plan: StepPlan) -> list[tuple[int, Request]]:
        rows = []
        for i in range(plan.num_rows):
            request = self._seats.holder(int(plan.seats[i]), int(plan.epochs[i]))
            if request is not None:
                rows.append((i, request))
        return rows

    def _emit(self, request: Request, row: int, token: int | None, result: StepResult) -> None:
        reason = None
        if token is not None:
            request.tokens[request.num_tokens] = token
            request.num_tokens += 1
            reason = stop_reason(request, token, self._limits.eos_token_ids)
        elif request.max_new_tokens == 0 and request.applied == request.num_tokens:
            reason = FinishReason(type="length", length=0)
        prompt_scores = result.prompt_scores.get(row)
        if token is None and prompt_scores is None and reason is None:
            return
        self._send(
            request,
            output_ids=() if token is None else (token,),
            prompt_scores=prompt_scores,
            output_scores=result.output_scores.get(row),
            finish=reason,
        )
        if reason is not None:
            self._estimator.record(request)
            self._end(request)

    def _send(
        self,
        request: Request,
        *,
        output_ids: tuple[int, ...] = (),
        prompt_scores: Scores | None = None,
        output_scores: Scores | None = None,
        finish: FinishReason | None = None,
    ) -> None:
        self._outputs.append(
            OutputDelta(
                rid=request.rid,
                index=request.index,
                output_ids=output_ids,
                prompt_scores=prompt_scores,
                output_scores=output_scores,
                finish=finish,
                cached_tokens=request.cached_tokens,
                num_retractions=request.num_retractions,
            )
        )

    def _commit(self, request: Request) -> None:
        """Give the computed whole pages of a prompt to the cache, for others to share."""
        lease = self._seats.lease(request)
        request.committed = True
        self._under_way.leave(request)
        changed = lease.commit(request.tokens, request.applied)
        if changed:
            request.table_columns = min(request.table_columns, changed.start)
        self._groups.prompt_computed(request, lease)

    # -- endings -----------------------------------------------------------------------------

    def _finish(self, request: Request, reason: FinishReason, *, keep: bool = True) -> None:
        if request.status is Status.FINISHED:
            return
        self._send(request, finish=reason)
        self._end(request, keep=keep)

    def _end(self, request: Request, *, keep: bool = True) -> None:
        if request.status is Status.RUNNING:
            self._unseat(request, keep=keep)
        else:
            self._queue.remove(request)
        request.status = Status.FINISHED
        self._queue.leave(request)
        self._groups.gone(request)
        samples = self._requests[request.rid]
        del samples[request.index]
        if not samples:
            del self._requests[request.rid]

    def _retract(self, request: Request) -> None:
        """Send a running request back to the queue; its computed pages stay in the cache."""
        assert request.outstanding == 0
        self._unseat(request, keep=True)
        request.status = Status.WAITING
        request.num_retractions += 1
        self._totals.retractions += 1
        self._queue.push(request)
        logger.info("retracted %s at %d tokens", request.name, request.num_tokens)

    def _unseat(self, request: Request, *, keep: bool) -> None:
        self._under_way.leave(request)
        lease = self._seats.give(request)
        num_valid = min(request.applied, request.num_tokens) if keep else 0
        lease.release(request.tokens, num_valid, insert=keep)
        at = bisect.bisect_left(self._running, self._queue.rank(request), key=self._queue.rank)
        assert self._running[at] is request
        del self._running[at]
        request.outstanding = 0


class _Seats:
    """Who sits where with which pages; an epoch tells an admission from earlier ones."""

    def __init__(self, count: int) -> None:
        self.free = list(range(count))
        self._holders: list[tuple[Request, Lease] | None] = [None] * count
        self._num_taken = 0

    def take(self, request: Request, lease: Lease) -> None:
        """Give the request the lowest free seat."""
        self._num_taken += 1
        request.seat, request.epoch = heapq.heappop(self.free), self._num_taken
        self._holders[request.seat] = (request, lease)

    def give(self, request: Request) -> Lease:
        """Free the request's seat; returns the lease that went with it."""
        lease = self.lease(request)
        self._holders[request.seat] = None
        heapq.heappush(self.free, request.seat)
        return lease

    def lease(self, request: Request) -> Lease:
        """The pages of a seated request."""
        holder = self._holders[request.seat]
        assert holder is not None and holder[0] is request
        return holder[1]

    def holder(self, seat: int, epoch: int) -> Request | None:
        """The request that has sat there since `epoch`, if it still does."""
        holder = self._holders[seat]
        return holder[0] if holder is not None and holder[0].epoch == epoch else None


def _first_position(request: Request, num_cached: int, scored: int) -> int:
    """First position to compute when `num_cached` positions are in shared pages.

    The newest token is computed again even if its page is cached: its hidden state draws the
    next one. So are prompt positions whose next token is still to be scored.
    """
    first = min(num_cached, request.num_tokens - 1)
    if scored < request.last_scored_position:
        first = min(first, scored)
    return first


def _outputs_only(message: GenerateRequest) -> LogprobSpec:
    """Samples after the first don't score the prompt again; the front end copies it."""
    return replace(message.logprob, start_len=None)


def _no_pages(request: Request) -> FinishReason:
    needed = request.num_prompt + request.max_new_tokens
    return FinishReason(
        type="abort",
        message=f"kv: no pages for {needed} tokens although nothing else runs; see memory_report",
        status_code=500,
    )


def _not_finite(request: Request) -> FinishReason:
    return FinishReason(
        type="abort",
        message=f"logits after {request.num_tokens} tokens are not finite; check the weights",
        status_code=500,
    )
