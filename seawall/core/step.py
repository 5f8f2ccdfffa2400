"""The only data between scheduler and runner: what one step computes, and what came of it.

A step is rows; a row is one request's share: positions [start, start + length). There is no
phase: a decode is a row of length 1. Tokens of all rows are packed one after another:

    row          0            1       2
    length       5            1       3
    packed   [t t t t t]     [t]   [t t t]

Everything is numpy, one entry a row, so that a step of thousands of rows costs no Python object
a row. `Row` is a view for tests and printing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatParams:
    """What the sampler must know of a request that was just given a seat."""

    seat: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    logprobs: bool
    logprob_top_k: int
    logprob_token_ids: tuple[int, ...]
    raw_logprobs: bool
    prompt_temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row, for tests and printing."""

    seat: int
    start: int
    write_start: int
    length: int
    samples: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step, as the scheduler decided it.

    Attributes:
        seats: int32 [R] seat of each row.
        epochs: int64 [R] which admission of the request the row belongs to.
        starts: int32 [R] first position computed.
        write_starts: int32 [R] positions [start, write_start) are queries only: their KV is in a
            shared page already and is not stored again.
        lengths: int32 [R].
        token_ids: int32 [sum(lengths)] packed; where `from_last` it is 0 and not read.
        from_last: bool [R] the row's one token is the seat's last sampled token, on the device.
        samples: bool [R] a token is drawn after the row's last position.
        score_starts, score_ends: int32 [R] positions whose next token is scored, half open.
        score_targets: int32 [sum(score_ends - score_starts)] the next tokens, packed.
        table_seats, table_columns, table_pages: int32 [P] page table entries that changed.
        window_seats, window_columns, window_pages: int32 [P2] the same for the window pages of
            models with sliding windows, else empty. Entries of columns that have left the window
            are stale and not read.
        admitted: sampling parameters of requests that were given a seat in this step.
    """

    step: int
    seats: I32
    epochs: I64
    starts: I32
    write_starts: I32
    lengths: I32
    token_ids: I32
    from_last: Bools
    samples: Bools
    score_starts: I32
    score_ends: I32
    score_targets: I32
    table_seats: I32
    table_columns: I32
    table_pages: I32
    window_seats: I32
    window_columns: I32
    window_pages: I32
    admitted: tuple[SeatParams, ...]

    @property
    def num_rows(self) -> int:
        """Rows in the step."""
        return int(self.seats.shape[0])

    @property
    def num_tokens(self) -> int:
        """Positions computed, over all rows."""
        return int(self.token_ids.shape[0])

    def without_draws(self, rows: I64) -> "StepPlan":
        """The plan with some rows drawing nothing."""
        samples = self.samples.copy()
        samples[rows] = False
        return replace(self, samples=samples)

    def rows(self) -> Iterator[Row]:
        """Each row as an object; for tests and printing, not for the step path."""
        for i in range(self.num_rows):
            yield Row(
                seat=int(self.seats[i]),
                start=int(self.starts[i]),
                write_start=int(self.write_starts[i]),
                length=int(self.lengths[i]),
                samples=bool(self.samples[i]),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitAdjust:
    """Sparse changes to the logits of some sampled rows: penalties, bias, forbidden ids.

    logit' = (logit / repetition if logit > 0 else logit * repetition) + add

    Attributes:
        rows: int64 [nnz] index into the plan's rows, ascending.
        ids: int64 [nnz] token ids, unique within a row.
        repetition: float32 [nnz], 1 where none.
        add: float32 [nnz], -inf forbids the id.
    """

    rows: I64
    ids: I64
    repetition: F32
    add: F32


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMasks:
    """Which tokens may come next in rows with a grammar.

    Attributes:
        rows: int64 [n] index into the plan's rows, ascending.
        words: int32 [n, ceil(V / 32)]; bit i of word w set = token 32 w + i may come.
        late: int64 rows whose words are not there yet: they draw nothing in this step.
    """

    rows: I64
    words: I32
    late: I64


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Logprobs of consecutive positions of one request.

    Attributes:
        logprobs: float32 [n] of the token that came.
        top_ids, top_logprobs: [n, k] best first.
        token_logprobs: float32 [n, m] of the ids that were asked.
    """

    logprobs: F32
    top_ids: I64
    top_logprobs: F32
    token_logprobs: F32


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step gave, on the host.

    Attributes:
        tokens: int32 [R], valid where the plan's `samples` is set.
        failed: bool [R] rows whose logits were not finite: no token or score can be had.
        prompt_scores: row index to the scores of its [score_start, score_end).
        output_scores: row index to the scores of its sampled token.
    """

    step: int
    tokens: I32
    failed: Bools
    prompt_scores: dict[int, Scores]
    output_scores: dict[int, Scores]
