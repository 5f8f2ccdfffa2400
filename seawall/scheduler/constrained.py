"""Requests with a grammar: when they may start, which tokens may come next, when they end.

    waits      its grammar is compiled by somebody else; others pass it
    seated     after each token its constraint moves on and is filled by a thread
    sampled    with the words, if they are there in time; else the row sits out:

        positions  [0, num_tokens)   computed = num_tokens: nothing left to plan
        words come                   computed = num_tokens - 1: a query over KV that is there

Requests without a grammar cost one look at an array a step, and none while no other is seated.
"""

import time

import numpy as np

from seawall.core.errors import RequestError
from seawall.core.grammar import Constraint, Grammars
from seawall.core.params import SamplingParams
from seawall.core.request import Request
from seawall.core.step import I64, StepPlan, TokenMasks
from seawall.core.wire import FinishReason
from seawall.scheduler.stop import banned_ids

# How long a step waits for words; the rows that have none by then sit out.
MASK_SECONDS = 0.020
# How long a row may sit out: what takes longer can't be waited for.
LONGEST_SECONDS = 2.0
_PAUSE_SECONDS = 0.005
_NOTHING = np.empty(0, np.int64)


class ConstrainedRequests:
    """Written by the scheduler alone.

    Args:
        grammars: compiles and fills.
        num_seats: of the engine.
        eos_ids: of the model.
    """

    def __init__(self, grammars: Grammars, num_seats: int, eos_ids: frozenset[int]) -> None:
        self._grammars = grammars
        self._eos_ids = eos_ids
        self._seated: dict[int, Request] = {}
        self._is_seated = np.zeros(num_seats, np.bool_)
        self._sitting_out: list[tuple[Request, int, float]] = []
        self._num_asking = 0
        self.num_late = 0

    def expect(self, sampling: SamplingParams) -> None:
        """A request has come: have its grammar compiled, if it has one."""
        spec = sampling.grammar
        if spec is not None:
            self._grammars.prepare(spec)

    def is_ready(self, request: Request) -> bool:
        """Whether a request may be given a seat, as far as its grammar goes.

        Raises:
            RequestError: the grammar can't be used.
        """
        if request.constraint is not None:
            return True
        spec = request.sampling.grammar
        if spec is None:
            return True
        request.constraint = self._grammars.open(spec)
        if request.constraint is None:
            self._num_asking += 1
            return False
        self._fill(request, request.constraint)
        return True

    def sit(self, request: Request) -> None:
        """A request was given its seat."""
        if request.constraint is not None:
            self._seated[request.seat] = request
            self._is_seated[request.seat] = True

    def rise(self, request: Request) -> None:
        """A request has lost its seat."""
        if request.constraint is not None:
            del self._seated[request.seat]
            self._is_seated[request.seat] = False

    def end(self, request: Request) -> None:
        """A request has ended."""
        if request.constraint is not None:
            self._grammars.close(request.constraint)
            request.constraint = None

    def accept(self, request: Request, constraint: Constraint, token: int) -> FinishReason | None:
        """A token was drawn; returns how it ends the request, if it does."""
        ended = constraint.accept(token)
        if constraint.error is not None:
            return broken(request, constraint)
        if ended:
            return FinishReason(type="stop")
        if request.num_output < request.max_new_tokens:
            self._fill(request, constraint)
        return None

    def masks(self, plan: StepPlan) -> tuple[TokenMasks | None, list[Request]]:
        """The words of the step's rows, and the requests whose grammar has failed."""
        if not self._seated:
            return None, []
        found: list[tuple[int, Request, Constraint]] = []
        for row in np.flatnonzero(self._is_seated[plan.seats] & plan.samples).tolist():
            request = self._seated[int(plan.seats[row])]
            if request.epoch == plan.epochs[row] and request.constraint is not None:
                found.append((row, request, request.constraint))
        if not found:
            return None, []
        self._grammars.wait([constraint for _, _, constraint in found], MASK_SECONDS)
        ready = [(row, c) for row, _, c in found if c.is_ready and c.error is None]
        failed = [r for _, r, c in found if c.is_ready and c.error is not None]
        known = {row for row, _ in ready}
        late = [(row, r) for row, r, _ in found if row not in known and r not in failed]
        for _, request in late:
            self._sit_out(request)
        masks = TokenMasks(
            rows=np.array([row for row, _ in ready], np.int64),
            words=np.stack([c.words for _, c in ready]) if ready else np.empty((0, 0), np.int32),
            late=_rows(late),
        )
        return masks, failed

    def call_in(self) -> list[Request]:
        """Let those that sat out draw in the next step, if their words have come.

        Returns those whose words have not come for so long that they must end.
        """
        self._num_asking = 0
        waiting, self._sitting_out = self._sitting_out, []
        overdue: list[Request] = []
        for request, epoch, since in waiting:
            constraint = request.constraint
            if constraint is None or request.epoch != epoch or request.num_left:
                continue
            if constraint.is_ready:
                request.computed -= 1
                request.write_from = max(request.write_from, request.num_tokens)
            elif time.monotonic() - since > LONGEST_SECONDS:
                overdue.append(request)
            else:
                self._sitting_out.append((request, epoch, since))
        return overdue

    def pause(self) -> None:
        """Nothing can be computed: let the threads work for a while, if any of them does."""
        if self._num_asking or self._sitting_out:
            self._grammars.pause(_PAUSE_SECONDS)

    def _sit_out(self, request: Request) -> None:
        self.num_late += 1
        request.outstanding -= 1
        assert request.num_left == 0
        self._sitting_out.append((request, request.epoch, time.monotonic()))

    def _fill(self, request: Request, constraint: Constraint) -> None:
        self._grammars.fill(constraint, banned_ids(request, self._eos_ids))


def broken(request: Request, constraint: Constraint) -> FinishReason:
    """The end of a request whose grammar can't go on."""
    spec = request.sampling.grammar
    assert spec is not None
    late = f"its mask took longer than {LONGEST_SECONDS:g} s; simplify it"
    return refused(f"{spec.kind}: after {request.num_output} tokens: {constraint.error or late}")


def refused(error: RequestError | str) -> FinishReason:
    """The end of a request whose grammar can't be used."""
    return FinishReason(type="abort", message=str(error), status_code=400)


def _rows(found: list[tuple[int, Request]]) -> I64:
    return np.array([row for row, _ in found], np.int64) if found else _NOTHING
