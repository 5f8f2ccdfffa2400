"""Scores and draws for chosen hidden rows, inside the logits account.

Everything here runs in the scope "logits". The account is split in two: most is the workspace of
the numeric functions, whose own bound it is; the rest holds what goes in and comes out (gathered
rows, sparse changes, results), and rows are taken in blocks that fit it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from seawall.core.errors import ModelError
from seawall.core.step import I64, LogitAdjust, Scores
from seawall.memory.footprint_step import ADJUST_BYTES, logits_split, row_bytes
from seawall.models.base import HeadWeights
from seawall.runner.buffers import SeatTables
from seawall.sampling.logprobs import SparseAdjust, linear_logprobs
from seawall.sampling.sampler import linear_sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Consecutive hidden rows of one request whose next tokens are scored.

    Attributes:
        row: the plan's row.
        rows: int64 [n] indices into the hidden matrix.
        targets: int64 [n].
        adjust: whether changes to logits apply (processed output scores).
    """

    row: int
    rows: I64
    targets: I64
    top_k: int
    token_ids: tuple[int, ...]
    temperature: float


class Scorer:
    """The LM head's owner on the step path: never more than a few numbers a row leave it."""

    def __init__(self, head: HeadWeights, logits_bytes: int) -> None:
        if head.bias is not None and (head.scale != 1.0 or head.softcap is not None):
            raise ModelError(
                f"LM head: a bias together with scale {head.scale} or softcap {head.softcap} is "
                "not built yet; use another model"
            )
        self._head = head
        self._workspace_bytes, self._rows_bytes = logits_split(logits_bytes)

    def score(
        self, hidden: Tensor, asks: Sequence[Ask], adjust: LogitAdjust | None = None
    ) -> dict[int, Scores]:
        """Logprobs for each ask, by plan row. `adjust.rows` index plan rows."""
        found: dict[int, list[Scores]] = {}
        for rich in (False, True):
            chosen = [a for a in asks if bool(a.top_k or a.token_ids) is rich]
            for block in self._blocks(chosen, hidden, adjust):
                for ask, scores in self._score_block(hidden, block, adjust):
                    found.setdefault(ask.row, []).append(scores)
        return {row: _joined(parts) for row, parts in found.items()}

    def draw(
        self,
        hidden: Tensor,
        rows: I64,
        seats: I64,
        positions: I64,
        tables: SeatTables,
        adjust: LogitAdjust | None,
    ) -> tuple[I64, np.ndarray]:
        """One token for each of `hidden`'s first rows.

        Args:
            hidden: at least n rows.
            rows: int64 [n] plan row of each, ascending; what `adjust.rows` refers to.
            seats: int64 [n], where `tables` has their sampling parameters.
            positions: int64 [n] of the tokens to draw.
            tables: sampling parameters by seat.
            adjust: changes to logits, if any row has some.

        Returns:
            ids int64 [n] and their processed logprobs float32 [n], on the host.
        """
        ids = np.empty(len(rows), np.int64)
        logprobs = np.empty(len(rows), np.float32)
        changed = _changed_per_row(rows, adjust)
        cost = row_bytes(self._head.weight.shape[1], hidden.element_size(), 0, 0)
        for start, end in _runs(cost + changed * ADJUST_BYTES, self._rows_bytes):
            at = torch.from_numpy(seats[start:end])
            drawn = linear_sample(
                hidden[start:end],
                self._head.weight,
                seeds=tables.seed[at],
                positions=torch.from_numpy(positions[start:end]),
                temperature=tables.temperature[at],
                top_k=tables.top_k[at],
                top_p=tables.top_p[at],
                min_p=tables.min_p[at],
                bias=self._head.bias,
                softcap=self._head.softcap,
                scale=self._head.scale,
                adjust=_sparse(adjust, rows[start:end]),
                workspace_bytes=self._workspace_bytes,
            )
            ids[start:end] = drawn.ids.numpy()
            logprobs[start:end] = drawn.logprobs.numpy()
        return ids, logprobs

    def _score_block(
        self, hidden: Tensor, block: Sequence[Ask], adjust: LogitAdjust | None
    ) -> Iterator[tuple[Ask, Scores]]:
        counts = np.array([len(a.rows) for a in block])
        top_k = max(a.top_k for a in block)
        num_ids = max(len(a.token_ids) for a in block)
        ids = np.zeros((len(block), num_ids), np.int64)
        for i, ask in enumerate(block):
            ids[i, : len(ask.token_ids)] = ask.token_ids
        plan_rows = np.repeat([a.row for a in block], counts)
        temperature = np.repeat(np.array([a.temperature for a in block], np.float32), counts)
        result = linear_logprobs(
            hidden[torch.from_numpy(np.concatenate([a.rows for a in block]))],
            self._head.weight,
            torch.from_numpy(np.concatenate([a.targets for a in block])),
            top_k=top_k,
            token_ids=torch.from_numpy(np.repeat(ids, counts, axis=0)) if num_ids else None,
            temperature=torch.from_numpy(temperature),
            softcap=self._head.softcap,
            bias=self._head.bias,
            scale=self._head.scale,
            adjust=_sparse(adjust, plan_rows),
            workspace_bytes=self._workspace_bytes,
        )
        assert result.logprobs is not None
        logprobs = result.logprobs.numpy()
        top_ids = _host(result.top_ids, (len(logprobs), 0), np.int64)
        tops = _host(result.top_logprobs, (len(logprobs), 0), np.float32)
        given = _host(result.token_logprobs, (len(logprobs), 0), np.float32)
        end = 0
        for ask, count in zip(block, counts, strict=True):
            part, end = slice(end, end + count), end + int(count)
            yield (
                ask,
                Scores(
                    logprobs=logprobs[part].copy(),
                    top_ids=top_ids[part, : ask.top_k].copy(),
                    top_logprobs=tops[part, : ask.top_k].copy(),
                    token_logprobs=given[part, : len(ask.token_ids)].copy(),
                ),
            )

    def _blocks(
        self, asks: Sequence[Ask], hidden: Tensor, adjust: LogitAdjust | None
    ) -> Iterator[list[Ask]]:
        """Asks, cut where needed, in blocks whose inputs and results fit the rows' share."""
        if not asks:
            return
        changed = _changed_per_row(np.array([a.row for a in asks]), adjust)
        cost = ADJUST_BYTES * int(changed.max()) + row_bytes(
            hidden.shape[1],
            hidden.element_size(),
            max(a.top_k for a in asks),
            max(len(a.token_ids) for a in asks),
        )
        room = most = max(self._rows_bytes // cost, 1)
        block: list[Ask] = []
        for ask in asks:
            start = 0
            while start < len(ask.rows):
                end = min(start + room, len(ask.rows))
                block.append(_part(ask, start, end))
                room -= end - start
                start = end
                if room == 0:
                    yield block
                    block, room = [], most
        if block:
            yield block


def _part(ask: Ask, start: int, end: int) -> Ask:
    return Ask(
        row=ask.row,
        rows=ask.rows[start:end],
        targets=ask.targets[start:end],
        top_k=ask.top_k,
        token_ids=ask.token_ids,
        temperature=ask.temperature,
    )


def _joined(parts: list[Scores]) -> Scores:
    if len(parts) == 1:
        return parts[0]
    return Scores(
        logprobs=np.concatenate([p.logprobs for p in parts]),
        top_ids=np.concatenate([p.top_ids for p in parts]),
        top_logprobs=np.concatenate([p.top_logprobs for p in parts]),
        token_logprobs=np.concatenate([p.token_logprobs for p in parts]),
    )


def _host(tensor: Tensor | None, shape: tuple[int, int], dtype: type) -> np.ndarray:
    return np.empty(shape, dtype) if tensor is None else tensor.numpy()


def _changed_per_row(rows: I64, adjust: LogitAdjust | None) -> I64:
    """How many logits of each row are changed."""
    if adjust is None:
        return np.zeros(len(rows), np.int64)
    return np.searchsorted(adjust.rows, rows, "right") - np.searchsorted(adjust.rows, rows, "left")


def _sparse(adjust: LogitAdjust | None, plan_rows: I64) -> SparseAdjust | None:
    """The changes of `plan_rows`, renumbered to their place in it."""
    if adjust is None:
        return None
    first = np.searchsorted(adjust.rows, plan_rows, "left")
    counts = np.searchsorted(adjust.rows, plan_rows, "right") - first
    if not counts.any():
        return None
    ends = np.cumsum(counts)
    take = np.arange(ends[-1]) + np.repeat(first - (ends - counts), counts)
    return SparseAdjust(
        row=torch.from_numpy(np.repeat(np.arange(len(plan_rows)), counts)),
        ids=torch.from_numpy(adjust.ids[take]),
        repetition=torch.from_numpy(adjust.repetition[take]),
        add=torch.from_numpy(adjust.add[take]),
    )


def _runs(costs: I64, limit: int) -> Iterator[tuple[int, int]]:
    """Half-open runs of rows whose costs add up to at most `limit`; one row at least."""
    start, total = 0, 0
    for i, cost in enumerate(costs):
        if i > start and total + cost > limit:
            yield start, i
            start, total = i, 0
        total += int(cost)
    if start < len(costs):
        yield start, len(costs)
