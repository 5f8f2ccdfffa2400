"""The engine core: one loop over intake, plan, launch, take the previous result, sample.

    intake()                     messages from the front end
    plan = scheduler.plan()      while the previous step may still be on the device
    flight = runner.launch(plan)
    finish(previous)             results to the scheduler, deltas to the front end
    flight.sample(adjust, masks) every earlier token is known by now

This is one of the two places that catch every exception: a fault ends the requests of its step
with an error, their pages come back, and the next step runs.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from seawall.cache.lease import LeaseBook
from seawall.core.errors import QueueFullError
from seawall.core.step import LogitAdjust, StepPlan, StepResult, TokenMasks
from seawall.core.wire import (
    AbortRequest,
    CacheFlushed,
    FinishReason,
    FinishRequest,
    FlushCache,
    FromCore,
    GenerateRequest,
    OutputDelta,
    ToCore,
)
from seawall.scheduler.scheduler import Scheduler

logger = logging.getLogger("seawall.engine")


class Flight(Protocol):
    """A launched step."""

    @property
    def plan(self) -> StepPlan:
        """What was launched."""

    def sample(self, adjust: LogitAdjust | None, masks: TokenMasks | None) -> None:
        """Draw its tokens."""

    def wait(self) -> StepResult:
        """Its result, on the host."""


class Runner(Protocol):
    """What the loop needs of a runner; tests drive the loop with one that computes nothing."""

    def launch(self, plan: StepPlan) -> Flight:
        """Start a step."""


def _nothing() -> None:
    """The host has nothing else to do."""


class EngineCore:
    """The loop's state: the step in flight. One thread calls it."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        leases: LeaseBook,
        *,
        overlap: bool,
        check_pages: bool,
    ) -> None:
        self.scheduler = scheduler
        self.leases = leases
        self._runner = runner
        self._overlap = overlap
        self._check_pages = check_pages
        self._in_flight: Flight | None = None
        self._answers: list[FromCore] = []
        self._refusal: str | None = None

    @property
    def has_work(self) -> bool:
        """Whether another turn would do anything."""
        return self.scheduler.has_work or self._in_flight is not None

    @property
    def refusal(self) -> str | None:
        """Why no request can be served at present; None if they can. Any thread may read it."""
        return self._refusal

    def refuse(self, reason: str | None) -> None:
        """Refuse every request from here on for that reason, or for None serve them again."""
        self._refusal = reason
        if reason is not None:
            # Only requests that were held wait here: they came while it could not be known.
            self.scheduler.abort(None, reason, status_code=503)

    def settle(self) -> bool:
        """Whether nothing waits or runs besides requests that are held.

        A step of ended requests that is still in flight is taken back first.
        """
        if not self.scheduler.is_idle:
            return False
        previous, self._in_flight = self._in_flight, None
        if previous is not None:
            self._finish(previous)
        return True

    def intake(self, messages: Sequence[ToCore]) -> None:
        """Take messages from the front end."""
        for message in messages:
            if isinstance(message, GenerateRequest):
                self._add(message)
            elif isinstance(message, FlushCache):
                self._flush(message)
            else:
                self._end_one(message)

    def turn(self, before_wait: Callable[[], None] = _nothing) -> list[FromCore]:
        """One turn of the loop; returns what is to be delivered.

        Args:
            before_wait: called when a step has been launched, before the result of the one before
                it is waited for: what else there is to do on the host hides there.
        """
        plan = self._plan()
        flight = self._launch(plan)
        before_wait()
        previous, self._in_flight = self._in_flight, None
        if previous is not None:
            self._finish(previous)
        elif flight is None:
            self.scheduler.constrained.pause()
        if flight is not None and self._sample(flight):
            if self._overlap:
                self._in_flight = flight
            else:
                self._finish(flight)
        self._audit()
        answers, self._answers = self._answers, []
        return [*answers, *self.scheduler.take_outputs()]

    def _audit(self) -> None:
        """Find what went wrong with pages in this step, and end the requests that it reaches.

        The audit compares counts and is made always; the check compares every page.
        """
        try:
            names = self.leases.audit()
            for name in names:
                reason = f"kv: {name} lost a page to an accounting fault; see memory_report"
                self.scheduler.end_untrusted(name, reason)
            if names:
                self.leases.cache.reset()
            if self._check_pages or not self.has_work:
                self.leases.check()
        except Exception as error:  # process boundary: see the module's docstring
            logger.exception("the audit of pages failed")
            self._end_all(f"engine fault in the audit: {type(error).__name__}: {error}")

    def _plan(self) -> StepPlan | None:
        try:
            return self.scheduler.plan(in_flight=self._in_flight is not None)
        except Exception as error:  # process boundary: see the module's docstring
            logger.exception("planning failed")
            self._end_all(f"engine fault while planning: {type(error).__name__}: {error}")
            return None

    def _launch(self, plan: StepPlan | None) -> Flight | None:
        if plan is None:
            return None
        try:
            return self._runner.launch(plan)
        except Exception as error:  # process boundary: see the module's docstring
            self._fail(plan, error)
            return None

    def _sample(self, flight: Flight) -> bool:
        try:
            plan = flight.plan
            flight.sample(self.scheduler.adjust(plan), self.scheduler.masks(plan))
        except Exception as error:  # process boundary: see the module's docstring
            self._fail(flight.plan, error)
            return False
        return True

    def _finish(self, flight: Flight) -> None:
        try:
            self.scheduler.apply(flight.plan, flight.wait())
        except Exception as error:  # process boundary: see the module's docstring
            self._fail(flight.plan, error)

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        logger.error("step %d failed", plan.step, exc_info=error)
        reason = f"engine fault: {type(error).__name__}: {error}"
        try:
            self.scheduler.fail(plan, reason)
        except Exception:  # process boundary: see the module's docstring
            self._drop(reason)

    def _end_one(self, message: AbortRequest | FinishRequest) -> None:
        try:
            if isinstance(message, AbortRequest):
                self.scheduler.abort(message.rid)
            else:
                self.scheduler.finish(message)
        except Exception as error:  # process boundary: see the module's docstring
            self._drop(f"engine fault: {type(error).__name__}: {error}")

    def _end_all(self, reason: str) -> None:
        try:
            self.scheduler.abort(None, reason, status_code=500)
        except Exception:  # process boundary: see the module's docstring
            self._drop(reason)

    def _drop(self, reason: str) -> None:
        """Requests could not be ended in order: end all of them without."""
        logger.exception("ending requests failed, all are dropped")
        try:
            self.scheduler.drop(reason)
        except Exception:  # process boundary: see the module's docstring
            logger.exception("dropping requests failed")

    def _add(self, message: GenerateRequest) -> None:
        if self._refusal is not None:
            self._turn_away(message, self._refusal)
            return
        try:
            self.scheduler.add(message)
        except QueueFullError as error:
            self._turn_away(message, str(error))

    def _turn_away(self, message: GenerateRequest, reason: str) -> None:
        finish = FinishReason(type="abort", message=reason, status_code=503)
        version = self.scheduler.outbox.weight_version
        for index in range(message.sampling.n):
            self._answers.append(
                OutputDelta(rid=message.rid, index=index, finish=finish, weight_version=version)
            )

    def _flush(self, message: FlushCache) -> None:
        # A step of ended requests may still be in flight: what it reads is freed, but written
        # again by later steps only.
        try:
            done = not self.scheduler.has_work and self.leases.flush()
        except Exception as error:  # process boundary: see the module's docstring
            self._drop(f"engine fault: {type(error).__name__}: {error}")
            done = False
        self._answers.append(CacheFlushed(ticket=message.ticket, done=done))
