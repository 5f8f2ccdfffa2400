"""The draw when the LM head is sharded by vocabulary over a process group.

Owns: the race between the shards' winners, and the filters over ids that no rank has all of. It
is not the local passes (entry.py), nor what shards are (sharded.py).

Legend: R rows, P ranks, F rows that filter, C candidates.

Every rank gets the same results. Noise is keyed by the vocabulary's ids, so a draw does not
depend on how many ranks there are, but for rounding. What a rank tells, per row:

    by temperature   log-sum-exp, its winner's logit and id
    filtered         CANDIDATES pairs of logit and id: a race among the best of all shards, done
                     if top-k, top-p or min-p certainly end among them
    flat             else a search for the threshold, 48 counts and 48 masses of 8 bytes, and
                     ten numbers more: each shard keeps a prefix of its ids in falling order

At most 8 (2 CANDIDATES + 4) bytes in all, and never a row of logits.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from seawall.sampling.adjust import SparseAdjust
from seawall.sampling.entry import DevicePass, device_pass
from seawall.sampling.filters import Filters, relative_powers
from seawall.sampling.logprobs import Ask
from seawall.sampling.noise import id_codes, negative_clocks, row_keys
from seawall.sampling.sampler import DrawInput, SampleResult
from seawall.sampling.sharded import (
    Shard,
    blocks,
    empty_rows,
    exchange_row_bytes,
    merged_best,
    need_of,
    split_workspace,
    take,
    total_of,
)
from seawall.sampling.tiles import MIN_TEMPERATURE, LogitsInput

CANDIDATES = 128  # best ids that each shard tells of a row that filters
_CANDIDATE_BYTES = 96
_SEARCH_ID_BYTES = 88
# Keys of floats from minus to plus infinity, ordered as integers; fewer than 2**32.
_FIRST_KEY, _LAST_KEY, _KEY_BITS = -2139095041, 2139095040, 32


def sample_need(source: LogitsInput, draw: DrawInput, ranks: int) -> int:
    """Smallest workspace of this rank."""
    local = device_pass(source.hidden.device)
    need = local.smallest_workspace(source, draw=_unfiltered(draw))
    if draw.may_filter:
        best = Ask(top_k=min(CANDIDATES, source.vocab_size), logits=True)
        whole = Ask(top_k=source.vocab_size, logits=True)
        search = _SEARCH_ID_BYTES * source.vocab_size
        need = max(
            need,
            local.smallest_workspace(source, ask=best),
            local.smallest_workspace(source, ask=whole) + search,
        )
    return need_of(need, _row_bytes(source, source.vocab_size, draw, ranks))


def _unfiltered(draw: DrawInput) -> DrawInput:
    return replace(draw, top_k=None, top_p=None, min_p=None)


def _row_bytes(source: LogitsInput, size: int, draw: DrawInput, ranks: int) -> int:
    best = CANDIDATES if draw.may_filter else 0
    return exchange_row_bytes(source, size, ranks, best) + best * _CANDIDATE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Some rows of a call, all ids' processing, and what serves them.

    Attributes:
        workspace_bytes: of the local pass.
        search_rows: rows whose threshold is searched at once.
    """

    whole: LogitsInput
    draw: DrawInput
    local: DevicePass
    shard: Shard
    workspace_bytes: int
    search_rows: int

    @property
    def rows(self) -> int:
        return self.whole.hidden.shape[0]

    def choose(self, rows: Tensor) -> LogitsInput:
        """The shard's part of some rows, in order."""
        return self.shard.source(_choose(self.whole, rows))


def sample_rows(
    whole: LogitsInput, draw: DrawInput, workspace_bytes: int, shard: Shard
) -> SampleResult:
    """The draw of one device with all the ids, on every rank."""
    rows, device = whole.hidden.shape[0], whole.hidden.device
    most = max(shard.sizes)
    row_bytes = _row_bytes(whole, most, draw, len(shard.sizes))
    step, inner = split_workspace(shard, row_bytes, workspace_bytes)
    # What the smallest workspace leaves to the local pass holds one searched row.
    spare = workspace_bytes - shard.need - (step - 1) * row_bytes
    result = SampleResult(
        ids=torch.zeros(rows, dtype=torch.int64, device=device),
        logprobs=torch.zeros(rows, dtype=torch.float32, device=device),
        logsumexp=torch.zeros(rows, dtype=torch.float32, device=device),
    )
    for span in blocks(rows, step):
        block = _Block(
            whole=take(whole, span),
            draw=_of_rows(draw, span),
            local=device_pass(device),
            shard=shard,
            workspace_bytes=inner,
            search_rows=1 + spare // (2 * _SEARCH_ID_BYTES * most),
        )
        out = SampleResult(
            ids=result.ids[span], logprobs=result.logprobs[span], logsumexp=result.logsumexp[span]
        )
        total = _race_of_winners(block, out)
        if draw.may_filter:
            _filter(block, total, out)
    return result


def _of_rows(draw: DrawInput, rows: slice | Tensor) -> DrawInput:
    return DrawInput(
        seeds=draw.seeds[rows],
        positions=draw.positions[rows],
        top_k=draw.top_k[rows] if isinstance(draw.top_k, Tensor) else draw.top_k,
        top_p=draw.top_p[rows] if isinstance(draw.top_p, Tensor) else draw.top_p,
        min_p=draw.min_p[rows] if isinstance(draw.min_p, Tensor) else draw.min_p,
    )


def _race_of_winners(block: _Block, out: SampleResult) -> Tensor:
    """Draw by temperature alone; returns the log-sum-exp, float64 [R]."""
    source, shard = block.shard.source(block.whole), block.shard
    plain = _unfiltered(block.draw)
    part = block.local.sample_rows(source, plain, block.workspace_bytes, shard.first_id)
    empty = empty_rows(source)
    lse = part.logsumexp.double()
    logits = part.logprobs.double() + lse
    if empty is not None:
        lse.masked_fill_(empty, -torch.inf)
        logits.masked_fill_(empty, -torch.inf)
    told = torch.stack((lse, logits, (part.ids + shard.first_id).double()), 1)
    heard = shard.gather(told)
    total = total_of(heard[:, :, 0])
    logits, ids = heard[:, :, 1], heard[:, :, 2].long()
    heat = torch.as_tensor(block.whole.temperature, device=ids.device).expand(block.rows)
    clocks = _clocks(ids.t(), block.draw).t()
    scores = torch.where(heat < MIN_TEMPERATURE, logits, logits - clocks.log_())
    best = scores.nan_to_num_(nan=-torch.inf).argmax(0)[None]
    out.ids.copy_(ids.gather(0, best)[0].masked_fill_(total.isnan(), 0))
    out.logprobs.copy_(logits.gather(0, best)[0].sub_(total))
    out.logsumexp.copy_(total)
    return total


def _clocks(ids_RC: Tensor, draw: DrawInput) -> Tensor:
    """Exponential variates float64 of ids of the vocabulary, [R, C]."""
    spare = torch.empty((2, *ids_RC.shape), dtype=torch.int32, device=ids_RC.device)
    keys = row_keys(draw.seeds, draw.positions)
    return negative_clocks(id_codes(ids_RC), keys, spare[0], spare[1]).neg_().double()


def _filter(block: _Block, total: Tensor, out: SampleResult) -> None:
    """Draw again for the rows that filter: among candidates, else by a search."""
    vocab_size = block.shard.vocab_size
    filters = block.draw.filters(0, block.rows, vocab_size)
    heat = torch.as_tensor(block.whole.temperature, device=total.device).expand(block.rows)
    on = (filters.top_k < vocab_size) | (filters.top_p <= 1.0) | (filters.min_p > 0.0)
    rows = ((heat >= MIN_TEMPERATURE) & on & total.isfinite()).nonzero().view(-1)
    if rows.numel() == 0:
        return
    flat = _race_of_candidates(block, rows, filters.take(rows), total[rows], out)
    for some in torch.split(rows[flat], block.search_rows):
        _race_of_prefixes(block, some, filters.take(some), total[some], out)


def _race_of_candidates(
    block: _Block, rows: Tensor, filters: Filters, total: Tensor, out: SampleResult
) -> Tensor:
    """Draw among the best few of all shards; returns which rows' kept ids may go on beyond."""
    shard = block.shard
    ask = Ask(top_k=min(CANDIDATES, shard.size), logits=True)
    part = block.local.score_rows(block.choose(rows), ask, block.workspace_bytes)
    best, ids = merged_best(part, shard, min(CANDIDATES, shard.vocab_size))
    del part
    assert best is not None and ids is not None
    width = best.shape[1]
    columns = torch.arange(width, device=ids.device)
    probs = best.sub(total[:, None]).exp_()
    in_k = columns < filters.top_k[:, None]
    by_count = filters.top_k < shard.vocab_size
    mass = torch.where(by_count, probs.masked_fill(in_k.logical_not(), 0.0).sum(1), 1.0)
    keep = probs.cumsum(1).sub_(probs) < (filters.top_p * mass)[:, None]
    keep &= in_k & (probs >= filters.min_p[:, None] * probs[:, :1])
    keep[:, 0] = True
    race = probs.div_(_clocks(ids, _of_rows(block.draw, rows))).masked_fill_(~keep, -1.0)
    place = race.argmax(1)[:, None]
    _write(out, rows, ids.gather(1, place)[:, 0], best.gather(1, place)[:, 0].double(), total)
    # The mass of the k best is known only from all of them; else the prefix must end inside.
    more = (filters.top_k > width) & (best[:, -1] > -torch.inf)
    unsure = (by_count & (filters.top_p <= 1.0)) | keep[:, -1]
    return more & unsure & torch.tensor(shard.vocab_size > width, device=more.device)


def _write(out: SampleResult, rows: Tensor, ids: Tensor, logits: Tensor, total: Tensor) -> None:
    out.ids[rows] = ids
    out.logprobs[rows] = (logits - total).float()


class _Sorted:
    """A shard's logits of some rows in falling order, and questions that all ranks answer.

    Attributes:
        powers: float64 [F, V_r], exp(logit - peak).
    """

    def __init__(self, logits: Tensor, peak: Tensor, shard: Shard) -> None:
        self._rising = logits.neg()
        self._shard = shard
        self.powers = relative_powers(logits, peak)
        self._mass = self.powers.cumsum(1)

    def above(self, limit: Tensor) -> Tensor:
        """Ids of the shard with larger logits, int64 [F]."""
        return torch.searchsorted(self._rising, limit.neg()[:, None])[:, 0]

    def at_least(self, limit: Tensor) -> Tensor:
        """Ids of the shard with logits as large or larger, int64 [F]."""
        return torch.searchsorted(self._rising, limit.neg()[:, None], right=True)[:, 0]

    def mass(self, count: Tensor) -> Tensor:
        """Sum of the first powers, float64 [F]."""
        found = self._mass.gather(1, (count - 1).clamp_(min=0)[:, None])[:, 0]
        return found.masked_fill_(count == 0, 0.0)

    def limit(self, wanted: Tensor, *, by_mass: bool) -> Tensor:
        """The largest logit with at least so many ids, or so much mass, at or above it."""
        key = torch.full_like(wanted, _FIRST_KEY, dtype=torch.int64)
        for step in range(_KEY_BITS // 2):
            # Two bits a round: how many of the next three keys are still small enough?
            unit = 1 << (_KEY_BITS - 2 - 2 * step)
            told = torch.empty((3, wanted.shape[0]), dtype=torch.float64, device=wanted.device)
            for i in range(3):
                tried = (key + (i + 1) * unit).clamp_(max=_LAST_KEY)
                count = self.at_least(_logit_of(tried))
                told[i] = self.mass(count) if by_mass else count
            enough = self._shard.gather(told).sum(0) >= wanted
            key += enough.sum(0).mul_(unit)
        return _logit_of(key)

    def around(self, limit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ids above, ids equal and mass above a limit, of all shards; float64 [F]."""
        above, at_least = self.above(limit), self.at_least(limit)
        told = torch.stack((above.double(), (at_least - above).double(), self.mass(above)))
        ids, ties, mass = self._shard.gather(told).sum(0)
        return ids, ties, mass

    def prefix(self, limit: Tensor, equals: Tensor) -> Tensor:
        """Ids of this shard above the limit and among the lowest `equals` ids that equal it."""
        above, at_least = self.above(limit), self.at_least(limit)
        ties = self._shard.gather(at_least - above)
        before = ties[: self._shard.rank].sum(0)
        mine = ties[self._shard.rank]
        return above + torch.minimum((equals - before).clamp_(min=0), mine)


def _logit_of(keys: Tensor) -> Tensor:
    """Float32 with these ordered keys."""
    bits = torch.where(keys >= 0, keys, keys.bitwise_xor(0x7FFFFFFF))
    return bits.to(torch.int32).view(torch.float32)


def _cut(
    own: _Sorted, filters: Filters, total: Tensor, peak: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """The least logit that top_k and top_p keep, and how many ids that equal it, int64 [F]."""
    limit = torch.full_like(peak, -torch.inf)
    equals = torch.full_like(filters.top_k, vocab_size)
    mass = (total - peak).exp_()
    by_count = filters.top_k < vocab_size
    if bool(by_count.any()):
        found = own.limit(filters.top_k.double(), by_mass=False)
        above, _, mass_above = own.around(found)
        left = filters.top_k - above.long()
        inner = mass_above + left * (found - peak).double().exp_()
        limit = torch.where(by_count, found, limit)
        equals = torch.where(by_count, left, equals)
        mass = torch.where(by_count, inner, mass)
    by_mass = filters.top_p <= 1.0
    if bool(by_mass.any()):
        wanted = (filters.top_p * mass).masked_fill_(~by_mass, torch.inf)
        found = own.limit(wanted, by_mass=True)
        _, ties, mass_above = own.around(found)
        one = (found - peak).double().exp_()
        needed = ((wanted - mass_above) / one).ceil_().nan_to_num_(nan=1.0, posinf=vocab_size)
        needed = torch.minimum(needed, ties).clamp_(min=1.0).long()
        fewer = torch.where(found == limit, torch.minimum(needed, equals), needed)
        narrower = by_mass & (found >= limit)
        limit = torch.where(narrower, found, limit)
        equals = torch.where(narrower, fewer, equals)
    return limit, equals


def _race_of_prefixes(
    block: _Block, rows: Tensor, filters: Filters, total: Tensor, out: SampleResult
) -> None:
    """Draw among all kept ids; each shard races its own, and the winners race."""
    shard = block.shard
    inner = block.workspace_bytes - _SEARCH_ID_BYTES * max(shard.sizes) * block.search_rows
    part = block.local.score_rows(block.choose(rows), Ask(top_k=shard.size, logits=True), inner)
    logits, ids = part.top_logprobs, part.top_ids
    assert logits is not None and ids is not None
    peak = shard.gather(logits[:, 0].contiguous()).amax(0)
    own = _Sorted(logits, peak, shard)
    prefix = own.prefix(*_cut(own, filters, total, peak, shard.vocab_size))
    columns = torch.arange(shard.size, device=ids.device)
    keep = (columns < prefix[:, None]).logical_and_(own.powers >= filters.min_p[:, None])
    clocks = _clocks(ids.add_(shard.first_id), _of_rows(block.draw, rows))
    race = own.powers.div_(clocks).masked_fill_(keep.logical_not_(), -1.0)
    score, place = race.max(1)
    winner = logits.gather(1, place[:, None])[:, 0], ids.gather(1, place[:, None])[:, 0]
    heard = shard.gather(torch.stack((score, winner[0].double(), winner[1].double())))
    best = heard[:, 0].argmax(0)[None]
    _write(out, rows, heard[:, 2].gather(0, best)[0].long(), heard[:, 1].gather(0, best)[0], total)


def _choose(source: LogitsInput, rows: Tensor) -> LogitsInput:
    """Some rows of an input, in order."""
    heat, adjust = source.temperature, source.adjust
    if adjust is not None:
        place = rows.new_full((source.hidden.shape[0],), -1)
        place[rows] = torch.arange(rows.shape[0], device=rows.device)
        inside = (place[adjust.row] >= 0).nonzero().view(-1)
        adjust = SparseAdjust(
            row=place[adjust.row[inside]],
            ids=adjust.ids[inside],
            repetition=adjust.repetition[inside],
            add=adjust.add[inside],
        )
    return replace(
        source,
        hidden=source.hidden[rows],
        temperature=heat[rows] if isinstance(heat, Tensor) else heat,
        bitmask=None if source.bitmask is None else source.bitmask[rows],
        adjust=adjust,
    )
