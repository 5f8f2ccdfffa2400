"""Scores of one sample as they come in, in arrays; no Python object a token.

Owns the host memory of logprobs between the core and the caller: `ScoreColumns` keeps them all,
`ScoreTotals` only their sum. The task that receives a sample's deltas is the one writer of both.

    position    0 ... lead ... count ... capacity
                NaN    known    to come
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from seawall.core.params import LogprobSpec
from seawall.core.step import F32, I32, Scores

# A forbidden id has no finite logprob; JSON has no infinity.
_LEAST = np.float32(np.finfo(np.float32).min)
# What stands in place of an id where there is none: beside the first token of a prompt.
NO_ID = -1


class _Arrays(NamedTuple):
    logprobs: F32
    top_ids: I32
    top_logprobs: F32
    token_logprobs: F32


class ScoreColumns:
    """Scores of consecutive positions, in arrays made once, when the first scores come.

    Args:
        capacity: positions there can be.
        lead: positions at the beginning that have no logprob: 1 if token 0 is reported.
        charge: told how many bytes the arrays take when they are made.

    Attributes:
        count: positions known so far, the lead included.
    """

    def __init__(
        self, capacity: int, spec: LogprobSpec, *, lead: int = 0, charge: Callable[[int], None]
    ) -> None:
        self.count = lead
        self._capacity = capacity
        self._spec = spec
        self._lead = lead
        self._charge = charge
        self._arrays: _Arrays | None = None

    def add(self, scores: Scores | None) -> None:
        """Take over a piece, if there is one."""
        if scores is None:
            return
        arrays = self._made()
        start, end = self.count, self.count + len(scores.logprobs)
        assert end <= self._capacity
        np.maximum(scores.logprobs, _LEAST, out=arrays.logprobs[start:end])
        arrays.top_ids[start:end] = scores.top_ids
        np.maximum(scores.top_logprobs, _LEAST, out=arrays.top_logprobs[start:end])
        np.maximum(scores.token_logprobs, _LEAST, out=arrays.token_logprobs[start:end])
        self.count = end

    @property
    def lead(self) -> int:
        """Positions at the beginning that have no logprob."""
        return self._lead

    @property
    def logprobs(self) -> F32:
        """float32 [count] of the token that came; NaN in the lead. A view, like all of these."""
        return self._made().logprobs[: self.count]

    @property
    def top_ids(self) -> I32:
        """int32 [count, k], best first; -1 in the lead."""
        return self._made().top_ids[: self.count]

    @property
    def top_logprobs(self) -> F32:
        """float32 [count, k]."""
        return self._made().top_logprobs[: self.count]

    @property
    def token_logprobs(self) -> F32:
        """float32 [count, m] of the ids that were asked."""
        return self._made().token_logprobs[: self.count]

    def _made(self) -> _Arrays:
        if self._arrays is None:
            n, k, m = self._capacity, self._spec.top_k, len(self._spec.token_ids)
            arrays = _Arrays(
                logprobs=np.empty(n, np.float32),
                top_ids=np.empty((n, k), np.int32),
                top_logprobs=np.empty((n, k), np.float32),
                token_logprobs=np.empty((n, m), np.float32),
            )
            self._charge(sum(array.nbytes for array in arrays))
            for array in arrays:
                array[: self._lead] = NO_ID if array.dtype == np.int32 else np.nan
            self._arrays = arrays
        return self._arrays


class ScoreTotals:
    """The sum of a prompt's logprobs, and whether greedy decoding would have written it.

    Nothing of a token is kept once its piece has been added.

    Args:
        targets: the tokens that are scored, in order.
    """

    def __init__(self, targets: I32) -> None:
        self.logprob = 0.0
        self.count = 0
        self.is_greedy = True
        self._targets = targets

    def add(self, scores: Scores | None) -> None:
        """Add a piece, if there is one; it must have the best id of each position."""
        if scores is None:
            return
        end = self.count + len(scores.logprobs)
        logprobs = np.maximum(scores.logprobs, _LEAST)
        self.logprob += float(logprobs.sum(dtype=np.float64))
        best = scores.top_ids[:, 0]
        self.is_greedy &= bool((best == self._targets[self.count : end]).all())
        self.count = end
