"""Logprobs of cached prefixes: what is answered from the companions, and what is kept in them.

Owns no state: the records are the CompanionStore's, a request's progress is the request's.

    token      0  1  2 ... | ...      cached ... | not cached ...
    record        y  y  y  n                            y: known, n: not as it is asked for
    scored from companions ->|computed again ...

The hidden row at position p scores token p + 1, so the first row computed is the one before the
first token without a record; where all are known, the one before the first token that is not cached
(the boundary).
"""

from seawall.cache.companions import CompanionStore, Wanted
from seawall.cache.lease import Lease
from seawall.core.request import Request
from seawall.core.step import Scores, StepPlan, StepResult
from seawall.scheduler.adjust import needs_adjust


class Recall:
    """Reads and writes companions for the scheduler."""

    def __init__(self, store: CompanionStore) -> None:
        self._store = store

    def scored_after(self, request: Request, lease: Lease) -> int:
        """What `request.scored` can be once companions have answered for its cached prefix."""
        if request.scored >= request.last_scored_position:
            return request.scored
        end = min(lease.num_cached_tokens, request.num_prompt)
        until = self._store.known_until(
            lease.page_ids, request.scored + 1, end, Wanted.of_prompt(request.logprob)
        )
        return max(until - 1, request.scored)

    def take(self, request: Request, lease: Lease, scored: int) -> Scores:
        """The scores up to `scored`, which `scored_after` gave; the request moves there."""
        start, request.scored = request.scored + 1, scored
        wanted = Wanted.of_prompt(request.logprob)
        return self._store.read(lease.page_ids, start, scored + 1, wanted)

    def keep(
        self, request: Request, lease: Lease, plan: StepPlan, row: int, result: StepResult
    ) -> None:
        """Keep what a step found out; call it before the row's token is appended."""
        scores = result.prompt_scores.get(row)
        if scores is not None:
            start = int(plan.score_starts[row]) + 1
            self._store.record(lease.page_ids, start, scores, Wanted.of_prompt(request.logprob))
        self._place(request, lease)
        scores = result.output_scores.get(row)
        if scores is not None and self._is_raw(request):
            request.unplaced = (request.num_tokens, scores)
            self._place(request, lease)

    def _place(self, request: Request, lease: Lease) -> None:
        """A token may be drawn before there is a page for it; its record waits till there is."""
        if request.unplaced is None or request.unplaced[0] >= lease.num_tokens:
            return
        position, scores = request.unplaced
        spec = request.logprob
        wanted = Wanted(temperature=1.0, top_k=spec.top_k, token_ids=spec.token_ids)
        self._store.record(lease.page_ids, position, scores, wanted)
        request.unplaced = None

    def _is_raw(self, request: Request) -> bool:
        """Whether the logprob of the next output token is the plain log-softmax."""
        if request.logprob.mode == "raw":
            return True
        unscaled = request.sampling.is_greedy or request.sampling.temperature == 1.0
        return unscaled and not needs_adjust(request)
