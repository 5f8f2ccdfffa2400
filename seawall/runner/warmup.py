"""The worst case, run once before the engine accepts anything.

Two steps of the largest planned shape go through the same runner that serves: a step full of
prompt chunks at the end of the context whose every position is scored, with decode rows in the
seats that are left; and a step of one decode row a seat, all of them filtered, adjusted and
scored. They write into the pool's pages, which nothing refers to yet. What they measure is held
against the plan by the caller.
"""

from dataclasses import dataclass

import numpy as np

from seawall.core.step import I32, LogitAdjust, SeatParams, StepPlan, TokenMasks
from seawall.memory.footprint import Limits
from seawall.runner.runner import Runner

_TOP_K = 20
_TOUCHED = 64
# More rows than any kernel's shape for few.
_MANY_ROWS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupShape:
    """The largest shapes a step can have."""

    limits: Limits
    num_pages: int
    num_window_pages: int
    vocab_size: int
    max_top_k: int
    has_masks: bool

    @property
    def longest(self) -> int:
        """Longest sequence that context and pool allow."""
        return min(self.limits.context_length, self.num_pages * self.limits.page_size)


def warm_up(runner: Runner, shape: WarmupShape) -> None:
    """Run the worst-case steps."""
    limits = shape.limits
    prefill = limits.step_tokens - limits.max_running
    lengths: list[int] = []
    while prefill > 0 and len(lengths) < limits.max_running:
        lengths.append(min(prefill, shape.longest))
        prefill -= lengths[-1]
    lengths += [1] * (limits.max_running - len(lengths))
    for step, row_lengths in enumerate((lengths, [1] * limits.max_running)):
        plan = _plan(step, np.array(row_lengths, np.int32), shape)
        runner.launch(plan).sample(_adjust(plan, shape), _masks(plan, shape))


def warm_kernels(runner: Runner, shape: WarmupShape) -> None:
    """Run small steps of each kind, so that no kernel is compiled while requests wait.

    Kernels are compiled apart for a single row, for few rows and for many, and for draws and scores
    that need filters, changes or best ids and those that don't.
    """
    most = min(shape.limits.max_running, _MANY_ROWS)
    # Counts that are multiples of 16 are compiled apart, too.
    counts = sorted({1, min(3, most), min(16, most), max(1, most - 1), most})
    for step, count in enumerate(counts):
        for rich in (True, False):
            plan = _plan(step, np.ones(count, np.int32), shape, rich=rich)
            runner.launch(plan).sample(_adjust(plan, shape) if rich else None, None)
            if shape.has_masks:
                changed = _adjust(plan, shape) if rich else None
                runner.launch(plan).sample(changed, _masks(plan, shape))
    for step, length in enumerate((2, 3, 16, _MANY_ROWS - 1, _MANY_ROWS)):
        room = shape.limits.step_tokens - shape.limits.max_running
        lengths = np.array([min(length, room, shape.longest)], np.int32)
        runner.launch(_plan(step, lengths, shape, rich=False)).sample(None, None)


def _masks(plan: StepPlan, shape: WarmupShape) -> TokenMasks | None:
    """Masks of every row that allow everything."""
    if not shape.has_masks:
        return None
    num_words = -(-shape.vocab_size // 32)
    return TokenMasks(
        rows=np.arange(plan.num_rows, dtype=np.int64),
        words=np.full((plan.num_rows, num_words), -1, np.int32),
        late=np.empty(0, np.int64),
    )


def _plan(step: int, lengths: I32, shape: WarmupShape, *, rich: bool = True) -> StepPlan:
    seats = np.arange(len(lengths), dtype=np.int32)
    starts = (shape.longest - lengths).astype(np.int32)
    columns = np.arange(-(-shape.longest // shape.limits.page_size), dtype=np.int32)
    entries = (seats[:, None] * len(columns) + columns[None, :]).reshape(-1)
    pages = (entries % shape.num_pages).astype(np.int32)
    changed = np.repeat(seats, len(columns)), np.tile(columns, len(seats)), pages
    window_changed = (np.empty(0, np.int32),) * 3
    if shape.num_window_pages:
        window_changed = (*changed[:2], (entries % shape.num_window_pages).astype(np.int32))
    scored = np.where(lengths > 1, lengths, 0)
    num_tokens = int(lengths.sum())
    return StepPlan(
        step=step,
        seats=seats,
        epochs=np.zeros(len(seats), np.int64),
        starts=starts,
        write_starts=starts,
        lengths=lengths,
        token_ids=(np.arange(num_tokens) % shape.vocab_size).astype(np.int32),
        from_last=np.zeros(len(seats), np.bool_),
        samples=np.ones(len(seats), np.bool_),
        score_starts=starts,
        score_ends=(starts + scored).astype(np.int32),
        score_targets=(np.arange(int(scored.sum())) % shape.vocab_size).astype(np.int32),
        table_seats=changed[0],
        table_columns=changed[1],
        table_pages=changed[2],
        window_seats=window_changed[0],
        window_columns=window_changed[1],
        window_pages=window_changed[2],
        admitted=tuple(
            _params(int(seat), shape) if rich else _plain_params(int(seat)) for seat in seats
        ),
    )


def _params(seat: int, shape: WarmupShape) -> SeatParams:
    return SeatParams(
        seat=seat,
        temperature=0.7,
        top_k=-1,
        top_p=0.9,
        min_p=0.01,
        seed=seat,
        logprobs=True,
        logprob_top_k=min(_TOP_K, shape.max_top_k),
        logprob_token_ids=(0, shape.vocab_size - 1),
        raw_logprobs=seat % 2 == 0,
        prompt_temperature=1.0,
    )


def _plain_params(seat: int) -> SeatParams:
    return SeatParams(
        seat=seat,
        temperature=1.0,
        top_k=-1,
        top_p=1.0,
        min_p=0.0,
        seed=seat,
        logprobs=True,
        logprob_top_k=0,
        logprob_token_ids=(),
        raw_logprobs=seat % 2 == 0,
        prompt_temperature=1.0,
    )


def _adjust(plan: StepPlan, shape: WarmupShape) -> LogitAdjust:
    touched = min(_TOUCHED, shape.vocab_size)
    count = plan.num_rows * touched
    return LogitAdjust(
        rows=np.repeat(np.arange(plan.num_rows), touched),
        ids=np.tile(np.arange(touched), plan.num_rows),
        repetition=np.full(count, 1.1, np.float32),
        add=np.full(count, -0.5, np.float32),
    )
