"""Scores and draws for chosen hidden rows, inside the logits account.

Everything here runs in the scope "logits". The account is split in two: most is the workspace of
the numeric functions, whose own bound it is; the rest holds what goes in and comes out (gathered
rows, sparse changes, results), and rows are taken in blocks that fit it. Nothing here waits for
the device: results are host arrays whose content is there when the step's transfer has been waited
for, and only then they are read.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch import Tensor

from seawall.core.errors import ModelError
from seawall.core.step import F32, I64, LogitAdjust, Scores
from seawall.device.runtime import Transfer
from seawall.memory.footprint_step import ADJUST_BYTES, logits_split, row_bytes
from seawall.models.base import HeadWeights
from seawall.runner.asks import NOBODY, Asks, Flat
from seawall.runner.buffers import SeatTables
from seawall.sampling import entry, logprobs
from seawall.sampling.adjust import SparseAdjust
from seawall.sampling.sampler import DrawInput
from seawall.sampling.tiles import LogitsInput

_NO_IDS = np.empty((1, 0), np.int64)
_NO_SCORES = np.empty((1, 0), np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The rows of a step that draw a token.

    Attributes:
        rows: int64 [n] plan row of each, ascending.
        seats: int64 [n].
        device_seats, device_positions: int64 [n] on the device; the position is the drawn token's.
    """

    rows: I64
    seats: I64
    device_seats: Tensor
    device_positions: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What becomes of logits before they are processed ones.

    Attributes:
        adjust: its rows are plan rows.
        mask: int32 [n, ceil(V / 32)] on the device, a row for each of the sampled ones.
    """

    adjust: LogitAdjust | None = None
    mask: Tensor | None = None

    @property
    def mask_bytes(self) -> int:
        """Bytes of a gathered row's mask."""
        return 0 if self.mask is None else self.mask.shape[1] * self.mask.element_size()

    def masked(self, rows: slice | Tensor) -> Tensor | None:
        """The mask of some of the sampled rows."""
        return None if self.mask is None else self.mask[rows]


_UNCHANGED = Changes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Drawn tokens on the device, and host arrays that will hold them and their logprobs."""

    ids: Tensor
    host_ids: I64
    host_logprobs: tuple[F32, ...]

    def logprobs(self) -> F32:
        """Processed logprobs, float32 [n]; after the wait."""
        return np.concatenate(self.host_logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one block of rows will leave on the host; `owners` index the asks."""

    asks: Asks
    owners: I64
    logprobs: F32
    top_ids: I64
    top_logprobs: F32
    token_logprobs: F32

    def read(self) -> Iterator[tuple[int, Scores]]:
        """Plan row and scores of each ask in the block."""
        edges = np.flatnonzero(np.diff(self.owners)) + 1
        bounds = [0, *edges.tolist(), len(self.owners)]
        for start, end in pairwise(bounds):
            owner = int(self.owners[start])
            if owner == NOBODY:
                continue
            ids, part = self.asks.token_ids[owner], slice(start, end)
            yield (
                int(self.asks.plan_rows[owner]),
                Scores(
                    logprobs=self.logprobs[part].copy(),
                    top_ids=self.top_ids[part, : self.asks.top_k[owner]].copy(),
                    top_logprobs=self.top_logprobs[part, : self.asks.top_k[owner]].copy(),
                    token_logprobs=self.token_logprobs[part, : len(ids)].copy(),
                ),
            )


class Pending:
    """Scores that the device may still be computing."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []

    def add(self, part: _Part) -> None:
        """One more block."""
        self._parts.append(part)

    def read(self) -> dict[int, Scores]:
        """Scores by plan row; after the wait."""
        found: dict[int, list[Scores]] = {}
        for part in self._parts:
            for row, scores in part.read():
                found.setdefault(row, []).append(scores)
        return {row: _joined(parts) for row, parts in found.items()}


class Scorer:
    """The LM head's owner on the step path: never more than a few numbers a row leave it.

    Args:
        max_gaps: rows that nobody asked for but that are scored along with their neighbours, as a
            share of those asked for, where that saves the copy of all of them.
    """

    def __init__(self, head: HeadWeights, logits_bytes: int, *, max_gaps: float = 0.0) -> None:
        if head.bias is not None and (head.scale != 1.0 or head.softcap is not None):
            raise ModelError(
                f"LM head: a bias together with scale {head.scale} or softcap {head.softcap} is "
                "not built yet; use another model"
            )
        self._head = head
        self._max_gaps = max_gaps
        self._workspace_bytes, self._rows_bytes = logits_split(logits_bytes)

    def score(
        self,
        hidden: Tensor,
        asks: Asks,
        transfer: Transfer,
        changes: Changes = _UNCHANGED,
        drawn: Tensor | None = None,
    ) -> Pending:
        """Logprobs for each ask.

        Args:
            hidden: the matrix that `asks.rows` index.
            asks: what is wanted of which rows.
            transfer: the step's.
            changes: to the logits of sampled rows.
            drawn: int64, the targets of asks that have none, by hidden row.
        """
        pending = Pending()
        rich = asks.rich
        for chosen in (~rich, rich):
            if chosen.any():
                self._score(hidden, asks.only(chosen), (transfer, changes, drawn), pending)
        return pending

    def draw(
        self,
        hidden: Tensor,
        sampled: Sampled,
        tables: SeatTables,
        transfer: Transfer,
        changes: Changes,
    ) -> Drawn:
        """One token for each of `hidden`'s first rows; the seats' newest tokens are set to them."""
        changed = _changed_per_row(sampled.rows, changes.adjust)
        cost = row_bytes(self._head.weight.shape[1], hidden.element_size(), 0, 0)
        if self._max_gaps:
            cost = row_bytes(0, 0, 0, 0)
        found = []
        for start, end in _runs(cost + changed * ADJUST_BYTES, self._rows_bytes):
            at = sampled.device_seats[start:end]
            adjust = _sparse(changes.adjust, sampled.rows[start:end], transfer)
            transfer.send()
            mask = changes.masked(slice(start, end))
            source = self._source(hidden[start:end], tables.temperature[at], adjust, mask)
            filtered = bool(tables.notes.filtered[sampled.seats[start:end]].any())
            draw = DrawInput(
                seeds=tables.seed[at],
                positions=sampled.device_positions[start:end],
                top_k=tables.top_k[at] if filtered else None,
                top_p=tables.top_p[at] if filtered else None,
                min_p=tables.min_p[at] if filtered else None,
            )
            drawn = entry.sample_rows(source, draw, self._workspace_bytes)
            tables.last_token.index_copy_(0, at, drawn.ids)
            found.append(transfer.take(drawn.logprobs))
        ids = tables.last_token.index_select(0, sampled.device_seats)
        return Drawn(ids=ids, host_ids=transfer.take(ids), host_logprobs=tuple(found))

    def _source(
        self, hidden: Tensor, heat: Tensor, adjust: SparseAdjust | None, mask: Tensor | None
    ) -> LogitsInput:
        """What the head makes of these rows."""
        return LogitsInput(
            hidden=hidden,
            weight=self._head.weight,
            temperature=heat,
            softcap=self._head.softcap,
            scale=self._head.scale,
            bias=self._head.bias,
            adjust=adjust,
            bitmask=mask,
        )

    def _score(
        self,
        hidden: Tensor,
        asks: Asks,
        given: tuple[Transfer, Changes, Tensor | None],
        pending: Pending,
    ) -> None:
        """Asks of one kind, in blocks whose inputs and results fit the rows' share."""
        flat = asks.flat(self._max_gaps)
        wide = not (self._max_gaps and flat.in_one)
        changed = _changed_per_row(asks.plan_rows, given[1].adjust)
        cost = (
            ADJUST_BYTES * int(changed.max())
            + given[1].mask_bytes
            + row_bytes(
                hidden.shape[1] if wide else 0,
                hidden.element_size(),
                int(asks.top_k.max()),
                max(len(ids) for ids in asks.token_ids),
            )
        )
        most = max(self._rows_bytes // cost, 1)
        for start in range(0, len(flat.rows), most):
            end = min(start + most, len(flat.rows))
            pending.add(self._score_block(hidden, asks, flat, (start, end), given))

    def _score_block(
        self,
        hidden: Tensor,
        asks: Asks,
        flat: Flat,
        span: tuple[int, int],
        given: tuple[Transfer, Changes, Tensor | None],
    ) -> _Part:
        transfer, changes, drawn = given
        part = slice(*span)
        rows, owners = flat.rows[part], flat.owners[part]
        view = slice(int(rows[0]), int(rows[-1]) + 1)
        asked = np.unique(owners[owners != NOBODY])
        num_ids = max((len(asks.token_ids[i]) for i in asked), default=0)
        # A row of nobody's takes the last ask's numbers, which are not read.
        temperature = transfer.put(asks.temperature[owners])
        ids = transfer.put(_id_table(asks, num_ids)[owners]) if num_ids else None
        at = None if flat.in_one else transfer.put(rows)
        targets = None if flat.targets is None else transfer.put(flat.targets[part])
        plan_rows = np.where(owners == NOBODY, NOBODY, asks.plan_rows[owners])
        adjust = _sparse(changes.adjust, plan_rows, transfer)
        transfer.send()
        if targets is None:
            assert drawn is not None
            targets = drawn[view] if at is None else drawn.index_select(0, at)
        result = entry.score_rows(
            self._source(
                hidden[view] if at is None else hidden.index_select(0, at),
                temperature,
                adjust,
                changes.masked(view if at is None else at),
            ),
            logprobs.Ask(targets=targets, top_k=int(asks.top_k.max()), token_ids=ids),
            self._workspace_bytes,
        )
        assert result.logprobs is not None
        return _Part(
            asks=asks,
            owners=owners,
            logprobs=transfer.take(result.logprobs),
            top_ids=_taken(result.top_ids, transfer, _NO_IDS, len(rows)),
            top_logprobs=_taken(result.top_logprobs, transfer, _NO_SCORES, len(rows)),
            token_logprobs=_taken(result.token_logprobs, transfer, _NO_SCORES, len(rows)),
        )


def drawn_only(logprobs: F32) -> Scores:
    """The scores of a draw of which nothing else was asked, float32 [1]."""
    return Scores(
        logprobs=logprobs,
        top_ids=_NO_IDS,
        top_logprobs=_NO_SCORES,
        token_logprobs=_NO_SCORES,
    )


def _id_table(asks: Asks, num_ids: int) -> I64:
    """int64 [A, num_ids], filled up with id 0."""
    table = np.zeros((len(asks.token_ids), num_ids), np.int64)
    for i, ids in enumerate(asks.token_ids):
        table[i, : min(len(ids), num_ids)] = ids[:num_ids]
    return table


def _taken(tensor: Tensor | None, transfer: Transfer, nothing: np.ndarray, rows: int) -> np.ndarray:
    return nothing.repeat(rows, axis=0) if tensor is None else transfer.take(tensor)


def _joined(parts: list[Scores]) -> Scores:
    if len(parts) == 1:
        return parts[0]
    return Scores(
        logprobs=np.concatenate([p.logprobs for p in parts]),
        top_ids=np.concatenate([p.top_ids for p in parts]),
        top_logprobs=np.concatenate([p.top_logprobs for p in parts]),
        token_logprobs=np.concatenate([p.token_logprobs for p in parts]),
    )


def _changed_per_row(rows: I64, adjust: LogitAdjust | None) -> I64:
    """How many logits of each row are changed."""
    if adjust is None:
        return np.zeros(len(rows), np.int64)
    return np.searchsorted(adjust.rows, rows, "right") - np.searchsorted(adjust.rows, rows, "left")


def _sparse(adjust: LogitAdjust | None, plan_rows: I64, transfer: Transfer) -> SparseAdjust | None:
    """The changes of `plan_rows`, renumbered to their place in it; to be sent."""
    if adjust is None:
        return None
    first = np.searchsorted(adjust.rows, plan_rows, "left")
    counts = np.searchsorted(adjust.rows, plan_rows, "right") - first
    if not counts.any():
        return None
    ends = np.cumsum(counts)
    take = np.arange(ends[-1]) + np.repeat(first - (ends - counts), counts)
    return SparseAdjust(
        row=transfer.put(np.repeat(np.arange(len(plan_rows)), counts)),
        ids=transfer.put(adjust.ids[take]),
        repetition=transfer.put(adjust.repetition[take]),
        add=transfer.put(adjust.add[take]),
    )


def _runs(costs: I64, limit: int) -> Iterator[tuple[int, int]]:
    """Half-open runs of rows whose costs add up to at most `limit`; one row at least."""
    ends = np.cumsum(costs)
    start = 0
    while start < len(costs):
        base = int(ends[start - 1]) if start else 0
        end = max(int(np.searchsorted(ends, base + limit, "right")), start + 1)
        yield start, end
        start = end
