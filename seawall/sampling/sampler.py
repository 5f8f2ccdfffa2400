"""One token a row, drawn in the tiled pass: greedy, by temperature, or among filtered ids.

Owns: the three routes and the result. Inputs are taken as valid (seawall.ops checks them).

Legend: R rows of a block, T ids of a tile, V vocabulary, F filtered rows, C candidates.

The rows of a block are put in order of their route, so that one product serves all:

    [0, plain)           temperature only: the race runs in the tile, over every id
    [plain, drawn)       filtered: the best few are kept; the race runs among them
    [drawn, R)           greedy: the largest logit, lowest id among equals; no noise is made

The few are enough when top-k, top-p or min-p ends among them. Rows where that is not certain are
computed again, some at a time, and sorted whole. The noise depends on (seed, position, id) alone,
so all routes draw the same token.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from seawall.memory.footprint_logits import CANDIDATES, LogitsShape, plan_tiles
from seawall.sampling.filters import Filters, Race, relative_powers
from seawall.sampling.logprobs import accumulate
from seawall.sampling.noise import id_codes, negative_clocks, row_keys
from seawall.sampling.softmax import RunningSoftmax
from seawall.sampling.tiles import MIN_TEMPERATURE, Buffers, LogitsInput, TileReader
from seawall.sampling.topk import RunningTopK


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """Drawn tokens. A row that is NaN or has no allowed id has id 0 and NaN numbers.

    Attributes:
        ids: int64 [rows].
        logprobs: float32 [rows], log-softmax of the processed logits before top-k, top-p, min-p.
        logsumexp: float32 [rows], of the processed logits.
    """

    ids: Tensor
    logprobs: Tensor
    logsumexp: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawInput:
    """What a draw needs besides the logits.

    Attributes:
        seeds, positions: int64 [rows].
        top_k: integers [rows] or one; 0, -1 or at least V = off.
        top_p, min_p: floats [rows] or one; 1 and 0 = off.
    """

    seeds: Tensor
    positions: Tensor
    top_k: Tensor | int | None
    top_p: Tensor | float | None
    min_p: Tensor | float | None

    @property
    def may_filter(self) -> bool:
        """Whether any row may need more than its temperature."""
        return self.top_k is not None or self.top_p is not None or self.min_p is not None

    def filters(self, first: int, end: int, vocab_size: int) -> Filters:
        """The filters of rows [first, end), neutral where off."""

        def rows(value: Tensor | float | None, off: float, dtype: torch.dtype) -> Tensor:
            if isinstance(value, Tensor):
                return value[first:end].to(dtype, copy=True)
            number = off if value is None else value
            return torch.full((end - first,), number, dtype=dtype, device=self.seeds.device)

        top_k = rows(self.top_k, 0, torch.int64)
        top_p = rows(self.top_p, 1.0, torch.float64)
        return Filters(
            top_k=top_k.masked_fill_(top_k <= 0, vocab_size).clamp_(max=vocab_size),
            top_p=top_p.masked_fill_(top_p >= 1.0, torch.inf),
            min_p=rows(self.min_p, 0.0, torch.float64),
        )


def sample_shape(source: LogitsInput, draw: DrawInput) -> LogitsShape:
    """What the footprint needs to know of a call."""
    return replace(source.shape(reordered=True), filtered=draw.may_filter)


def sample_rows(
    source: LogitsInput, draw: DrawInput, workspace_bytes: int, id_base: int = 0
) -> SampleResult:
    """Draw one token for every row, block by block; noise takes id 0 of the weight for id_base."""
    rows, device = source.hidden.shape[0], source.hidden.device
    plan = plan_tiles(sample_shape(source, draw), rows, workspace_bytes)
    result = SampleResult(
        ids=torch.zeros(rows, dtype=torch.int64, device=device),
        logprobs=torch.zeros(rows, dtype=torch.float32, device=device),
        logsumexp=torch.zeros(rows, dtype=torch.float32, device=device),
    )
    buffers = Buffers.make(plan, source)
    for first in range(0, rows, plan.rows):
        span = slice(first, min(first + plan.rows, rows))
        _Block(source, draw, buffers, span, id_base).sample(result)
    return result


class _Block:
    """One block of rows: their order by route, their draws, and the writing of their results."""

    def __init__(
        self,
        source: LogitsInput,
        draw: DrawInput,
        buffers: Buffers,
        span: slice,
        id_base: int,
    ) -> None:
        assert id_base == 0 or not draw.may_filter, "filters need all ids of the vocabulary"
        self._source = source
        self._buffers = buffers
        self._id_base = id_base
        self._first, self._end = first, end = span.start, span.stop
        self._keys = row_keys(draw.seeds[span], draw.positions[span])
        filters = draw.filters(first, end, source.vocab_size) if draw.may_filter else None
        routes = _routes(source, filters, first, end)
        self._num_plain, self._num_drawn = routes.num_plain, routes.num_drawn
        self._order = routes.order
        if self._order is not None:
            self._keys = self._keys[self._order]
            filters = None if filters is None else filters.take(self._order)
        filtered = slice(self._num_plain, self._num_drawn)
        self._filters = None if filters is None else filters.part(filtered)

    def sample(self, result: SampleResult) -> None:
        """Draw, and write rows [first, end) of the result."""
        reader = TileReader(self._source, self._buffers, self._first, self._end, self._order)
        device = result.ids.device
        softmax_plain = RunningSoftmax(self._num_plain, device)
        softmax_rest = RunningSoftmax(reader.num_rows - self._num_plain, device)
        plain = _Winner(self._num_plain, device)
        greedy = _Winner(reader.num_rows - self._num_drawn, device)
        best = self._candidates()
        for start, tile in reader.tiles():
            if self._num_plain:
                self._race(tile[: self._num_plain], start, plain, softmax_plain)
            if best is not None:
                best.merge(tile[self._num_plain : self._num_drawn], start, self._buffers)
            if self._num_drawn < reader.num_rows:
                values, places = tile[self._num_drawn :].max(1)
                greedy.update(values.double(), places.add_(start), values)
            if self._num_plain < reader.num_rows:
                accumulate(tile[self._num_plain :], softmax_rest, self._buffers)
        lse = torch.cat((softmax_plain.logsumexp(), softmax_rest.logsumexp())).add_(reader.poison)
        ids, logits = [plain.ids, greedy.ids], [plain.logits, greedy.logits]
        if best is not None:
            drawn_ids, drawn_logits = self._draw_filtered(best, softmax_rest)
            ids.insert(1, drawn_ids)
            logits.insert(1, drawn_logits)
        self._write(result, torch.cat(ids), torch.cat(logits), lse)

    def _write(self, result: SampleResult, ids: Tensor, logits: Tensor, lse: Tensor) -> None:
        logprobs = lse.neg().add_(logits)
        ids.masked_fill_(lse.isnan(), 0)
        rows = slice(self._first, self._end)
        outputs = (
            (result.ids[rows], ids),
            (result.logprobs[rows], logprobs.float()),
            (result.logsumexp[rows], lse.float()),
        )
        for out, values in outputs:
            if self._order is None:
                out.copy_(values)
            else:
                out.index_copy_(0, self._order, values)

    def _race(
        self, tile_RT: Tensor, start: int, winner: "_Winner", softmax: RunningSoftmax
    ) -> None:
        """The tile's winners by exp(logit) / clock and its sums, a few rows at a time."""
        rows, width = tile_RT.shape
        peak_R = tile_RT.amax(1)
        shift_R1 = RunningSoftmax.shift(peak_R)[:, None]
        first_id = start + self._id_base
        codes = id_codes(torch.arange(first_id, first_id + width, device=tile_RT.device))
        sums_R, weights_R = torch.empty_like(peak_R), torch.empty_like(peak_R)
        places_R = torch.empty(rows, dtype=torch.int64, device=tile_RT.device)
        step = self._buffers.plan.scratch_rows
        for first in range(0, rows, step):
            part = slice(first, min(first + step, rows))
            count = part.stop - first
            clocks = negative_clocks(
                codes,
                self._keys[part],
                self._buffers.ints(1, count, width),
                self._buffers.ints(2, count, width),
            )
            powers = self._buffers.floats(count, width)
            torch.sub(tile_RT[part], shift_R1[part], out=powers).exp_()
            torch.sum(powers, 1, out=sums_R[part])
            torch.min(powers.div_(clocks), 1, out=(weights_R[part], places_R[part]))
        score = weights_R.double().neg_().log_().add_(peak_R)
        logits = tile_RT.gather(1, places_R[:, None]).view(-1)
        winner.update(score, places_R.add_(start), logits)
        softmax.merge(peak_R, sums_R)

    def _candidates(self) -> RunningTopK | None:
        """Keeper of the best few of filtered rows: k of them where that is all that counts."""
        if self._filters is None or self._filters.top_k.shape[0] == 0:
            return None
        most = int(self._filters.top_k.max())
        return RunningTopK(min(most, CANDIDATES))

    def _draw_filtered(self, best: RunningTopK, softmax: RunningSoftmax) -> tuple[Tensor, Tensor]:
        """Race among the best few; rows not certain to end there are sorted whole.

        The first rows of `softmax` are the filtered ones.
        """
        assert self._filters is not None and best.values is not None and best.ids is not None
        filtered = slice(self._num_plain, self._num_drawn)
        filters, keys = self._filters, self._keys[filtered]
        num_filtered = self._num_drawn - self._num_plain
        peak, total = softmax.peak[:num_filtered], softmax.total[:num_filtered]
        kept = best.values.shape[1]
        vocab_size = self._source.vocab_size
        mass = _mass_of_best(best.values, peak, filters.top_k, self._buffers.plan.draw_ids)
        mass = torch.where(filters.top_k < vocab_size, mass, total)
        race = Race(filters, keys, peak, mass)
        race.run(best.values, best.ids, self._buffers)
        ids, logits = race.ids, race.logits
        # The mass of the k best is known only if the few hold them all, or all that is allowed.
        unknown = (filters.top_k < vocab_size).logical_and_(filters.top_p <= 1.0)
        wider = (filters.top_k > kept).logical_and_(best.values[:, -1] > -torch.inf)
        unsure = unknown.logical_or_(race.open).logical_and_(wider).nonzero().view(-1)
        best.values = best.ids = None
        for first in range(0, unsure.shape[0], max(1, self._buffers.plan.sort_rows)):
            some = unsure[first : first + self._buffers.plan.sort_rows]
            sorted_race = self._draw_sorted(
                some, filters.take(some), keys[some], peak[some], total[some]
            )
            ids[some] = sorted_race.ids
            logits[some] = sorted_race.logits
        return ids, logits

    def _draw_sorted(
        self, some: Tensor, filters: Filters, keys: Tensor, peak: Tensor, total: Tensor
    ) -> Race:
        """Compute filtered rows `some` again, sort them whole and race among what is kept."""
        rows, vocab_size, width = some.shape[0], self._source.vocab_size, self._buffers.plan.ids
        chosen = some + self._num_plain
        if self._order is not None:
            chosen = self._order[chosen]
        reader = TileReader(self._source, self._buffers, self._first, self._end, chosen)
        logits = torch.empty((rows, vocab_size), dtype=torch.float32, device=some.device)
        for start, tile in reader.tiles():
            logits[:, start : start + tile.shape[1]] = tile
        values, ids = logits.sort(dim=1, descending=True, stable=True)
        del logits
        inner = torch.zeros_like(total)
        for first in range(0, vocab_size, width):
            part = values[:, first : first + width]
            inner += _mass_of_best(part, peak, filters.top_k - first, self._buffers.plan.draw_ids)
        race = Race(filters, keys, peak, torch.where(filters.top_k < vocab_size, inner, total))
        for first in range(0, vocab_size, width):
            race.run(values[:, first : first + width], ids[:, first : first + width], self._buffers)
            if not bool(race.open.any()):
                break
        return race


class _Winner:
    """Best score, id and logit of rows seen so far; the earlier, lower id stays among equals."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._score = torch.full((num_rows,), -torch.inf, dtype=torch.float64, device=device)
        self.ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.logits = torch.full((num_rows,), torch.nan, dtype=torch.float32, device=device)

    def update(self, score_R: Tensor, ids_R: Tensor, logits_R: Tensor) -> None:
        """Take in a tile's best."""
        better = score_R > self._score
        self._score = torch.where(better, score_R, self._score)
        self.ids = torch.where(better, ids_R, self.ids)
        self.logits = torch.where(better, logits_R, self.logits)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Routes:
    """Order of a block's rows by route, None if they are in order already, and where routes end."""

    order: Tensor | None
    num_plain: int
    num_drawn: int


def _routes(source: LogitsInput, filters: Filters | None, first: int, end: int) -> _Routes:
    rows = end - first
    route = torch.zeros(rows, dtype=torch.int8, device=source.hidden.device)
    if filters is not None:
        filtered = (filters.top_k < source.vocab_size).logical_or_(filters.top_p <= 1.0)
        route.masked_fill_(filtered.logical_or_(filters.min_p > 0.0), 1)
    if isinstance(source.temperature, Tensor):
        route.masked_fill_(source.temperature[first:end] < MIN_TEMPERATURE, 2)
    elif source.temperature < MIN_TEMPERATURE:
        route.fill_(2)
    num_plain, num_drawn = int((route == 0).sum()), int((route <= 1).sum())
    in_order = bool((route[1:] >= route[:-1]).all())
    order = None if in_order else route.argsort(stable=True)
    return _Routes(order=order, num_plain=num_plain, num_drawn=num_drawn)


def _slices(rows: int, step: int) -> Iterator[slice]:
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def _mass_of_best(values_FC: Tensor, peak_F: Tensor, top_k_F: Tensor, draw_ids: int) -> Tensor:
    """Sum of exp(logit - peak) over the first top_k columns, float64 [F], a few rows at a time."""
    columns = torch.arange(values_FC.shape[1], device=values_FC.device)
    mass = torch.empty(values_FC.shape[0], dtype=torch.float64, device=values_FC.device)
    for part in _slices(values_FC.shape[0], max(1, draw_ids // values_FC.shape[1])):
        powers = relative_powers(values_FC[part], peak_F[part])
        mass[part] = powers.masked_fill_(columns >= top_k_F[part][:, None], 0.0).sum(1)
    return mass
