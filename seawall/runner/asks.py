"""Which hidden rows of a step are scored, for whom and how: arrays, one entry a plan row or a row.

Owns no tensor. A prompt position is scored for the token that follows it in the prompt; a sampled
row for the token that was drawn, which only the device knows when this is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from seawall.core.step import F32, I64, Bools, StepPlan
from seawall.runner.buffers import SeatNotes

NOBODY = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Asks:
    """Hidden rows whose next tokens are scored, plan row by plan row.

    Attributes:
        plan_rows: int64 [A], ascending.
        counts: int64 [A], hidden rows of each.
        rows: int64 [n], indices into the hidden matrix, ascending.
        targets: int64 [n]; None for the tokens that were drawn for these rows.
        temperature: float32 [A]. top_k: int64 [A]. token_ids: [A] tuples.
    """

    plan_rows: I64
    counts: I64
    rows: I64
    targets: I64 | None
    temperature: F32
    top_k: I64
    token_ids: Sequence[tuple[int, ...]]

    @property
    def rich(self) -> Bools:
        """[A] whether more than the target's logprob is wanted."""
        return (self.top_k > 0) | np.array([bool(ids) for ids in self.token_ids], np.bool_)

    def only(self, chosen: Bools) -> "Asks":
        """The asks that are chosen."""
        if chosen.all():
            return self
        of_row = np.repeat(chosen, self.counts)
        return Asks(
            plan_rows=self.plan_rows[chosen],
            counts=self.counts[chosen],
            rows=self.rows[of_row],
            targets=None if self.targets is None else self.targets[of_row],
            temperature=self.temperature[chosen],
            top_k=self.top_k[chosen],
            token_ids=[self.token_ids[i] for i in np.flatnonzero(chosen).tolist()],
        )

    def flat(self, max_gaps: float) -> "Flat":
        """One entry a hidden row; the rows between are taken along where they are few.

        Args:
            max_gaps: rows that nobody asked for, as a share of those asked for.
        """
        owners = np.repeat(np.arange(len(self.counts)), self.counts)
        num_rows = len(self.rows)
        if num_rows == 0:
            return Flat(rows=self.rows, owners=owners, targets=self.targets, in_one=True)
        first, end = int(self.rows[0]), int(self.rows[-1]) + 1
        gaps = end - first - num_rows
        if gaps == 0:
            return Flat(rows=self.rows, owners=owners, targets=self.targets, in_one=True)
        if gaps > max_gaps * num_rows:
            return Flat(rows=self.rows, owners=owners, targets=self.targets, in_one=False)
        at = self.rows - first
        wide = np.full(end - first, NOBODY, np.int64)
        wide[at] = owners
        targets = None
        if self.targets is not None:
            targets = np.zeros(end - first, np.int64)
            targets[at] = self.targets
        return Flat(rows=np.arange(first, end), owners=wide, targets=targets, in_one=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """Asks by hidden row.

    Attributes:
        rows, targets: int64 [n], as in Asks.
        owners: int64 [n], index of the ask, or NOBODY.
        in_one: whether the rows are consecutive, so that a view holds them.
    """

    rows: I64
    owners: I64
    targets: I64 | None
    in_one: bool


def prompt_asks(plan: StepPlan, offsets: I64, notes: SeatNotes) -> Asks:
    """One ask for each row that has prompt positions to score."""
    rows = np.flatnonzero(plan.score_ends > plan.score_starts)
    counts = (plan.score_ends - plan.score_starts)[rows].astype(np.int64)
    firsts = (offsets + plan.score_starts - plan.starts)[rows]
    ends = np.cumsum(counts)
    seats = plan.seats[rows]
    return Asks(
        plan_rows=rows,
        counts=counts,
        rows=np.arange(int(counts.sum())) + np.repeat(firsts - (ends - counts), counts),
        targets=plan.score_targets.astype(np.int64),
        temperature=notes.prompt_temperature[seats],
        top_k=notes.top_k[seats],
        token_ids=[notes.token_ids[seat] for seat in seats],
    )


def drawn_asks(at: I64, plan_rows: I64, seats: I64, notes: SeatNotes, *, raw: bool) -> Asks:
    """One ask for each of some sampled rows.

    Args:
        at: int64 [A] which of the sampled rows.
        plan_rows: int64 [A].
        seats: int64 [A].
        notes: what the seats asked for.
        raw: at temperature 1, whatever the row was drawn at.
    """
    heat = notes.temperature[seats]
    return Asks(
        plan_rows=plan_rows,
        counts=np.ones(len(at), np.int64),
        rows=at,
        targets=None,
        temperature=np.where((heat == 0.0) | raw, np.float32(1.0), heat),
        top_k=notes.top_k[seats],
        token_ids=[notes.token_ids[seat] for seat in seats],
    )
