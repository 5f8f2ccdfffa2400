"""Logprobs of cached prefixes: what is answered from the companions, and what is kept in them.

Owns the scores that have no page yet; the records are the CompanionStore's, a request's progress is
the request's.

    token      0  1  2 ... | ...      cached ... | not cached ...
    record        y  y  y  n                            y: known, n: not as it is asked for
    scored from companions ->|computed again ...

The hidden row at position p scores token p + 1, so the first row computed is the one before the
first token without a record; where all are known, the one before the first token that is not cached
(the boundary). Scores of output tokens are written some at a time: one write costs as much for many
as for one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from seawall.cache.companions import CompanionStore, Wanted
from seawall.cache.lease import Lease
from seawall.core.request import Request, first_scored_position
from seawall.core.step import Scores, StepPlan, StepResult

_OUTPUTS_A_WRITE = 16
PIECE_BYTES = 1024  # objects and four array headers


class Recall(Protocol):
    """Reads and writes companions for the scheduler."""

    def scored_after(self, request: Request, lease: Lease) -> int:
        """What `request.scored` can be once companions have answered for its cached prefix."""

    def take(self, request: Request, lease: Lease, scored: int) -> Scores:
        """The scores up to `scored`, which `scored_after` gave; the request moves there."""

    def keep(
        self, request: Request, lease: Lease, plan: StepPlan, row: int, result: StepResult
    ) -> None:
        """Keep what a step found out; call it before the row's token is appended."""

    def settle(self, request: Request, lease: Lease) -> None:
        """The lease is about to end: write what waits."""

    def save(self, request: Request, lease: Lease) -> None:
        """The request is about to be retracted: keep what it found out until it is back."""

    def forget(self, request: Request) -> None:
        """The request has ended."""


class NoRecall:
    """Where no prefix outlives its request nothing is kept; see Recall."""

    def scored_after(self, request: Request, lease: Lease) -> int:
        """Nothing is known."""
        del lease
        return request.scored

    def take(self, request: Request, lease: Lease, scored: int) -> Scores:
        """Never called: `scored_after` never moves a request."""
        raise AssertionError((request.name, lease.rid, scored))

    def keep(
        self, request: Request, lease: Lease, plan: StepPlan, row: int, result: StepResult
    ) -> None:
        """Keeps nothing."""

    def settle(self, request: Request, lease: Lease) -> None:
        """Nothing waits."""

    def save(self, request: Request, lease: Lease) -> None:
        """Nothing to save."""

    def forget(self, request: Request) -> None:
        """Nothing to forget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Scores of consecutive tokens that begin at position `start`."""

    start: int
    scores: Scores
    wanted: Wanted

    @property
    def num_bytes(self) -> int:
        scores = self.scores
        arrays = (scores.logprobs, scores.top_ids, scores.top_logprobs, scores.token_logprobs)
        return PIECE_BYTES + sum(array.nbytes for array in arrays)

    @property
    def end(self) -> int:
        return self.start + len(self.scores.logprobs)


class CompanionRecall:
    """Recall over a store; see the module's docstring."""

    def __init__(self, store: CompanionStore) -> None:
        self._store = store
        # By arrival, which names a sample for good.
        self._waiting: dict[int, list[_Piece]] = {}

    def scored_after(self, request: Request, lease: Lease) -> int:
        """See Recall."""
        if request.scored >= request.last_scored_position:
            return request.scored
        end = min(lease.num_cached_tokens, request.num_prompt)
        until = self._store.known_until(
            lease.page_ids, request.scored + 1, end, Wanted.of_prompt(request.logprob)
        )
        return max(until - 1, request.scored)

    def take(self, request: Request, lease: Lease, scored: int) -> Scores:
        """See Recall."""
        start, request.scored = request.scored + 1, scored
        wanted = Wanted.of_prompt(request.logprob)
        return self._store.read(lease.page_ids, start, scored + 1, wanted)

    def keep(
        self, request: Request, lease: Lease, plan: StepPlan, row: int, result: StepResult
    ) -> None:
        """See Recall."""
        scores = result.prompt_scores.get(row)
        if scores is not None:
            wanted = Wanted.of_prompt(request.logprob)
            start = int(plan.score_starts[row]) + 1
            self.settle(request, lease)
            self._place(request, lease, _Piece(start=start, scores=scores, wanted=wanted))
        scores = result.output_scores.get(row)
        if scores is not None and _keeps_outputs(request):
            wanted = _wanted_of_output(request)
            piece = _Piece(start=request.num_tokens, scores=scores, wanted=wanted)
            num_waiting = self._wait(request, piece)
            if num_waiting == 0:
                self._place(request, lease, piece)
            elif num_waiting >= _OUTPUTS_A_WRITE:
                self.settle(request, lease)

    def settle(self, request: Request, lease: Lease) -> None:
        """Write what has pages; a token may be scored before there is a page for it."""
        for piece in _joined(self._taken(request)):
            self._place(request, lease, piece)

    def save(self, request: Request, lease: Lease) -> None:
        """See Recall; pages may be evicted before the request comes back, so all is kept."""
        self.settle(request, lease)
        end = min(request.num_tokens, lease.num_tokens)
        spec, parts = request.logprob, []
        if spec.wants_prompt:
            start = first_scored_position(spec, request.num_prompt) + 1
            parts.append((start, request.num_prompt, Wanted.of_prompt(spec)))
        if spec.wanted and _keeps_outputs(request):
            parts.append((request.num_prompt, end, _wanted_of_output(request)))
        for start, stop, wanted in parts:
            until = self._store.known_until(lease.page_ids, start, min(stop, end), wanted)
            if until > start:
                scores = self._store.read(lease.page_ids, start, until, wanted)
                self._wait(request, _Piece(start=start, scores=scores, wanted=wanted))

    def forget(self, request: Request) -> None:
        """See Recall."""
        self._taken(request)

    def _place(self, request: Request, lease: Lease, piece: _Piece) -> None:
        self._store.record(lease.page_ids, piece.start, piece.scores, piece.wanted)
        rest = _after(piece, lease.num_tokens)
        if rest is not None:
            self._wait(request, rest)

    def _wait(self, request: Request, piece: _Piece) -> int:
        """Keep a piece until it has a page; how many wait, 0 if the account has no room for it."""
        if not self._store.borrow(piece.num_bytes):
            return 0
        pieces = self._waiting.setdefault(request.arrival, [])
        pieces.append(piece)
        return len(pieces)

    def _taken(self, request: Request) -> list[_Piece]:
        pieces = self._waiting.pop(request.arrival, [])
        self._store.give_back(sum(piece.num_bytes for piece in pieces))
        return pieces


def _keeps_outputs(request: Request) -> bool:
    """Whether an output's logprob is that of the same token in a prompt, but for a temperature."""
    sampling = request.sampling
    changed = sampling.has_penalty or sampling.logit_bias or sampling.min_new_tokens
    return request.logprob.mode == "raw" or not changed


def _wanted_of_output(request: Request) -> Wanted:
    spec, sampling = request.logprob, request.sampling
    unscaled = spec.mode == "raw" or sampling.is_greedy
    return Wanted(
        temperature=1.0 if unscaled else sampling.temperature,
        top_k=spec.top_k,
        token_ids=spec.token_ids,
    )


def _after(piece: _Piece, position: int) -> _Piece | None:
    """The part of a piece from `position` on."""
    if piece.end <= position:
        return None
    skip = max(position - piece.start, 0)
    scores = piece.scores
    return _Piece(
        start=piece.start + skip,
        scores=Scores(
            logprobs=scores.logprobs[skip:],
            top_ids=scores.top_ids[skip:],
            top_logprobs=scores.top_logprobs[skip:],
            token_logprobs=scores.token_logprobs[skip:],
        ),
        wanted=piece.wanted,
    )


def _joined(pieces: Sequence[_Piece]) -> list[_Piece]:
    """Pieces that follow one another, as one."""
    runs: list[list[_Piece]] = []
    for piece in pieces:
        last = runs[-1][-1] if runs else None
        if last is not None and last.end == piece.start and last.wanted == piece.wanted:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [_join(run) for run in runs]


def _join(run: Sequence[_Piece]) -> _Piece:
    if len(run) == 1:
        return run[0]
    scores = [piece.scores for piece in run]
    return _Piece(
        start=run[0].start,
        scores=Scores(
            logprobs=np.concatenate([s.logprobs for s in scores]),
            top_ids=np.concatenate([s.top_ids for s in scores]),
            top_logprobs=np.concatenate([s.top_logprobs for s in scores]),
            token_logprobs=np.concatenate([s.token_logprobs for s in scores]),
        ),
        wanted=run[0].wanted,
    )
