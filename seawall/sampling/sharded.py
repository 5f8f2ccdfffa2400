"""Logprobs and draws when the LM head is sharded by vocabulary over a process group.

Owns: what ranks tell each other, a few numbers a row and never a row of logits, and how the parts
become the whole. It is not the local passes, which are those of one device (`Local`).

Legend: R rows, P ranks, k best ids; a shard is ids [first_id, first_id + V_r) of the vocabulary.

Every rank has the same hidden rows and gets the same results. Told per row and rank, in one
gather: log-sum-exp, target's logit, entropy sum, count above the target (8 bytes each) and k
pairs of logit and id (8 bytes each). The count takes a second pass and gather, when asked. Shards
are merged in rank order, which is the order of ids. Noise is keyed by the vocabulary's ids, so a
draw does not depend on how many ranks there are, but for rounding.

Draws that filter race among the best few of all shards, at first CANDIDATES of each; rows whose
kept ids may go on beyond those are asked again for more, some rows at a time.

A shard in which bitmask and changes allow no id counts as empty, whatever its product.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from seawall.memory.footprint_logits import CANDIDATES, plan_tiles
from seawall.sampling.adjust import SparseAdjust
from seawall.sampling.logprobs import LogprobResult, accumulate
from seawall.sampling.noise import id_codes, negative_clocks, row_keys
from seawall.sampling.sampler import DrawInput, SampleResult
from seawall.sampling.softmax import RunningSoftmax
from seawall.sampling.tiles import MIN_TEMPERATURE, Buffers, LogitsInput, TileReader

_CHECK_ROWS = 32  # rows whose bitmasks are counted at once
_FIXED = 4  # numbers of 8 bytes a row besides the k pairs


class Local(Protocol):
    """The pass of one device over its shard."""

    def score(
        self,
        source: LogitsInput,
        targets: Tensor | None,
        token_ids: Tensor | None,
        top_k: int,
        with_rank: bool,
        with_entropy: bool,
        workspace_bytes: int,
    ) -> LogprobResult:
        """Logprobs within the shard."""
        ...

    def draw(
        self, source: LogitsInput, draw: DrawInput, first_id: int, workspace_bytes: int
    ) -> SampleResult:
        """One id of the shard a row, by temperature alone, with the noise of id + first_id."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Which ids this rank has, and whom to tell."""

    group: dist.ProcessGroup
    first_id: int
    size: int
    vocab_size: int

    @staticmethod
    def of(group: dist.ProcessGroup, weight: Tensor) -> "Shard":
        """Learn the shards' sizes from all ranks, in rank order."""
        sizes = _gather(torch.tensor([weight.shape[0]], device=weight.device), group)[:, 0].tolist()
        rank = dist.get_rank(group)
        return Shard(
            group=group,
            first_id=sum(sizes[:rank]),
            size=sizes[rank],
            vocab_size=sum(sizes),
        )

    def owned(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Ids within the shard, 0 where another rank has them, and which it has."""
        inner = ids - self.first_id
        mine = (inner >= 0) & (inner < self.size)
        return inner.masked_fill(~mine, 0), mine

    def source(self, whole: LogitsInput) -> LogitsInput:
        """The shard's part of what processes logits; bias, bitmask and changes are of all ids."""
        end = self.first_id + self.size
        bias, adjust = whole.bias, whole.adjust
        if adjust is not None:
            inside = ((adjust.ids >= self.first_id) & (adjust.ids < end)).nonzero().view(-1)
            adjust = SparseAdjust(
                row=adjust.row[inside],
                ids=adjust.ids[inside] - self.first_id,
                repetition=adjust.repetition[inside],
                add=adjust.add[inside],
            )
        return replace(
            whole,
            bias=None if bias is None else bias[self.first_id : end],
            bitmask=None if whole.bitmask is None else self._mask(whole.bitmask),
            adjust=adjust,
        )

    def _mask(self, bitmask: Tensor) -> Tensor:
        """Words of the shard's ids; shifted copies if the shard does not start on a word."""
        first, shift = divmod(self.first_id, 32)
        words = -(-self.size // 32)
        low = bitmask[:, first : first + words]
        if shift == 0:
            return low
        high = bitmask.new_zeros(low.shape[0], words)
        rest = bitmask[:, first + 1 : first + 1 + words]
        high[:, : rest.shape[1]] = rest
        kept = torch.bitwise_right_shift(low, shift).bitwise_and_((1 << (32 - shift)) - 1)
        return kept.bitwise_or_(high.bitwise_left_shift_(32 - shift))


def _gather(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' tensors of this shape, [P, ...] in rank order."""
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine.contiguous(), group=group)
    return torch.stack(parts)


def _empty_rows(source: LogitsInput) -> Tensor | None:
    """Rows of which bitmask and changes allow no id here; None if that cannot be."""
    if source.bitmask is None and source.adjust is None:
        return None
    rows, vocab_size, device = source.hidden.shape[0], source.vocab_size, source.hidden.device
    counts = torch.full((rows,), vocab_size, dtype=torch.int64, device=device)
    bits = torch.arange(32, dtype=torch.int32, device=device)
    if source.bitmask is not None:
        for first in range(0, rows, _CHECK_ROWS):
            words = source.bitmask[first : first + _CHECK_ROWS]
            allowed = (words[:, :, None] >> bits).bitwise_and_(1).flatten(1)[:, :vocab_size]
            counts[first : first + _CHECK_ROWS] = allowed.sum(1)
    adjust = source.adjust
    if adjust is not None:
        gone = (adjust.add == -torch.inf).nonzero().view(-1)
        row, ids = adjust.row[gone], adjust.ids[gone]
        taken = torch.ones_like(row)
        if source.bitmask is not None:
            taken = (source.bitmask[row, ids // 32] >> (ids % 32)).bitwise_and(1).to(torch.int64)
        counts.index_add_(0, row, -taken)
    return counts == 0


def _blocks(rows: int, row_bytes: int, budget: int) -> Sequence[slice]:
    step = max(1, budget // max(1, row_bytes))
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def _take(source: LogitsInput, rows: slice) -> LogitsInput:
    """A run of rows of an input."""
    heat, adjust = source.temperature, source.adjust
    if adjust is not None:
        first, end = adjust.span(rows.start, rows.stop)
        adjust = SparseAdjust(
            row=adjust.row[first:end] - rows.start,
            ids=adjust.ids[first:end],
            repetition=adjust.repetition[first:end],
            add=adjust.add[first:end],
        )
    return replace(
        source,
        hidden=source.hidden[rows],
        temperature=heat[rows] if isinstance(heat, Tensor) else heat,
        bitmask=None if source.bitmask is None else source.bitmask[rows],
        adjust=adjust,
    )


def sharded_logprobs(  # noqa: PLR0913 -- what a call can ask
    whole: LogitsInput,
    local: Local,
    shard: Shard,
    targets: Tensor | None,
    token_ids: Tensor | None,
    *,
    top_k: int,
    with_rank: bool,
    with_entropy: bool,
    workspace_bytes: int,
) -> LogprobResult:
    """The result of one device with all the ids, on every rank. `token_ids` is [rows, m]."""
    rows = whole.hidden.shape[0]
    num_ids = 0 if token_ids is None else token_ids.shape[1]
    ranks = dist.get_world_size(shard.group)
    row_bytes = (ranks + 2) * 8 * (top_k + num_ids + 2 * _FIXED)
    row_bytes += shard.size // 4 if whole.bitmask is not None else 0
    asked = (top_k, with_rank, with_entropy, workspace_bytes - workspace_bytes // 4)
    parts = [
        _score_block(
            shard.source(_take(whole, span)),
            local,
            shard,
            None if targets is None else targets[span],
            None if token_ids is None else token_ids[span],
            asked,
        )
        for span in _blocks(rows, row_bytes, workspace_bytes // 4) or [slice(0, 0)]
    ]

    def joined(pieces: list[Tensor | None]) -> Tensor | None:
        found = [piece for piece in pieces if piece is not None]
        return torch.cat(found) if found else None

    return LogprobResult(
        logprobs=joined([p.logprobs for p in parts]),
        logsumexp=torch.cat([p.logsumexp for p in parts]),
        top_logprobs=joined([p.top_logprobs for p in parts]),
        top_ids=joined([p.top_ids for p in parts]),
        token_logprobs=joined([p.token_logprobs for p in parts]),
        rank=joined([p.rank for p in parts]),
        entropy=joined([p.entropy for p in parts]),
    )


def _score_block(
    source: LogitsInput,
    local: Local,
    shard: Shard,
    targets: Tensor | None,
    token_ids: Tensor | None,
    asked: tuple[int, bool, bool, int],
) -> LogprobResult:
    top_k, with_rank, with_entropy, workspace = asked
    inner, mine = (None, None) if targets is None else shard.owned(targets)
    inner_ids, mine_ids = (None, None) if token_ids is None else shard.owned(token_ids)
    k = min(top_k, shard.size)
    part = local.score(source, inner, inner_ids, k, with_rank, with_entropy, workspace)
    empty = _empty_rows(source)
    lse = part.logsumexp.double()
    offset = lse if empty is None else lse.masked_fill(empty, 0.0)
    told = [lse if empty is None else lse.masked_fill(empty, -torch.inf)]
    if part.entropy is not None:  # sum of p logit within the shard
        means = lse - part.entropy
        told.append(means if empty is None else means.masked_fill(empty, 0.0))
    for found, has in ((part.logprobs, mine), (part.token_logprobs, mine_ids)):
        if found is None or has is None:
            continue
        logits = found.double() + (offset if found.dim() == 1 else offset[:, None])
        if empty is not None:
            gone = empty if found.dim() == 1 else empty[:, None]
            logits = logits.masked_fill(gone, -torch.inf)
        told += list(logits.masked_fill(~has, 0.0).view(len(lse), -1).unbind(1))
    numbers = _gather(torch.stack(told, 1), shard.group)
    total = numbers[:, :, 0].logsumexp(0)
    total = total.masked_fill(total.isinf(), torch.nan)
    at = 1
    entropy = None
    if part.entropy is not None:
        shares = (numbers[:, :, 0] - total).exp()
        entropy = (total - (shares * numbers[:, :, 1]).sum(0)).float()
        at = 2
    own = None
    if targets is not None:
        own, at = numbers[:, :, at].sum(0), at + 1
    given = None
    if token_ids is not None:
        given = (numbers[:, :, at:].sum(0) - total[:, None]).float()
    top_logprobs, top_ids = _merge_best(part, offset, empty, shard, top_k)
    rank = None
    if with_rank and own is not None and mine is not None and part.rank is not None:
        above = _count_above(source, own, workspace)
        counts = torch.where(mine, (part.rank - 1).clamp_(min=0), above)
        rank = _gather(counts, shard.group).sum(0).add_(1).masked_fill_(total.isnan(), 0)
    return LogprobResult(
        logprobs=None if own is None else (own - total).float(),
        logsumexp=total.float(),
        top_logprobs=None if top_logprobs is None else (top_logprobs - total[:, None]).float(),
        top_ids=top_ids,
        token_logprobs=given,
        rank=rank,
        entropy=entropy,
    )


def _merge_best(
    part: LogprobResult, offset: Tensor, empty: Tensor | None, shard: Shard, top_k: int
) -> tuple[Tensor | None, Tensor | None]:
    """Logits float64 and ids of the k best of all shards, equal logits by id."""
    if not top_k:
        return None, None
    assert part.top_logprobs is not None and part.top_ids is not None
    rows, found = part.top_ids.shape
    logits = part.top_logprobs + offset[:, None].float()
    ids = part.top_ids + shard.first_id
    if empty is not None:
        # Nothing is allowed here: the lowest ids are as good as any.
        lowest = torch.arange(found, device=ids.device) + shard.first_id
        logits = logits.masked_fill(empty[:, None], -torch.inf)
        ids = torch.where(empty[:, None], lowest, ids)
    pairs = torch.full((rows, top_k, 2), -1, dtype=torch.int32, device=ids.device)
    pairs[:, :found, 0] = logits.view(torch.int32)
    pairs[:, :found, 1] = ids.to(torch.int32)
    everyone = _gather(pairs, shard.group).permute(1, 0, 2, 3).reshape(rows, -1, 2)
    ids = everyone[:, :, 1].contiguous().long()
    logits = everyone[:, :, 0].contiguous().view(torch.float32)
    missing = ids < 0
    logits = torch.where(missing, -torch.inf, logits)
    ids = ids.masked_fill(missing, shard.vocab_size)
    order = ids.argsort(dim=1, stable=True)
    logits, ids = logits.gather(1, order), ids.gather(1, order)
    logits, order = logits.sort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)[:, :top_k].clamp_(max=shard.vocab_size - 1)
    return logits[:, :top_k].double(), ids


def _count_above(source: LogitsInput, logits: Tensor, workspace_bytes: int) -> Tensor:
    """Ids of the shard with logits above the row's, int64."""
    rows = source.hidden.shape[0]
    plan = plan_tiles(source.shape(reordered=False), rows, workspace_bytes)
    buffers = Buffers.make(plan, source)
    counts = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    limit = logits.float()
    for first in range(0, rows, plan.rows):
        end = min(first + plan.rows, rows)
        for _, tile in TileReader(source, buffers, first, end).tiles():
            counts[first:end] += tile.gt_(limit[first:end, None]).sum(1).to(torch.int64)
    return counts


def draw_tiles(
    source: LogitsInput, draw: DrawInput, first_id: int, workspace_bytes: int
) -> SampleResult:
    """The race by temperature over a shard, in tiles, with noise keyed by id + first_id."""
    rows, device = source.hidden.shape[0], source.hidden.device
    plan = plan_tiles(source.shape(reordered=True), rows, workspace_bytes)
    buffers = Buffers.make(plan, source)
    heat = torch.as_tensor(source.temperature, dtype=torch.float32, device=device).expand(rows)
    ids = torch.zeros(rows, dtype=torch.int64, device=device)
    logits = torch.full((rows,), torch.nan, dtype=torch.float32, device=device)
    lse = torch.zeros(rows, dtype=torch.float64, device=device)
    for first in range(0, rows, plan.rows):
        end = min(first + plan.rows, rows)
        reader = TileReader(source, buffers, first, end)
        softmax = RunningSoftmax(end - first, device)
        keys = row_keys(draw.seeds[first:end], draw.positions[first:end])
        greedy = heat[first:end] < MIN_TEMPERATURE
        best = torch.full((end - first,), -torch.inf, dtype=torch.float64, device=device)
        for start, tile in reader.tiles():
            accumulate(tile, softmax, buffers)
            codes = id_codes(torch.arange(tile.shape[1], device=device) + (start + first_id))
            for begin in range(0, end - first, plan.scratch_rows):
                part = slice(begin, min(begin + plan.scratch_rows, end - first))
                size = (part.stop - begin, tile.shape[1])
                clocks = negative_clocks(
                    codes, keys[part], buffers.ints(1, *size), buffers.ints(2, *size)
                )
                noise = torch.where(greedy[part, None], 0.0, clocks.neg_().log_())
                score, place = torch.sub(tile[part], noise).max(1)
                better = score > best[part]
                best[part] = torch.where(better, score.double(), best[part])
                where = slice(first + begin, first + part.stop)
                ids[where] = torch.where(better, place + start, ids[where])
                logit = tile[part].gather(1, place[:, None])[:, 0]
                logits[where] = torch.where(better, logit, logits[where])
        lse[first:end] = softmax.logsumexp().add_(reader.poison)
    return SampleResult(
        ids=ids.masked_fill(lse.isnan(), 0),
        logprobs=(logits - lse).float(),
        logsumexp=lse.float(),
    )


def sharded_sample(
    whole: LogitsInput, draw: DrawInput, local: Local, shard: Shard, workspace_bytes: int
) -> SampleResult:
    """The draw of one device with all the ids, on every rank."""
    rows, device = whole.hidden.shape[0], whole.hidden.device
    ranks = dist.get_world_size(shard.group)
    row_bytes = (ranks + 2) * 8 * 2 * _FIXED
    if draw.may_filter:
        row_bytes += (ranks + 2) * 48 * min(CANDIDATES, shard.vocab_size)
    row_bytes += shard.size // 4 if whole.bitmask is not None else 0
    result = SampleResult(
        ids=torch.zeros(rows, dtype=torch.int64, device=device),
        logprobs=torch.zeros(rows, dtype=torch.float32, device=device),
        logsumexp=torch.zeros(rows, dtype=torch.float32, device=device),
    )
    inner = workspace_bytes - workspace_bytes // 4
    for span in _blocks(rows, row_bytes, workspace_bytes // 4):
        block = _take(whole, span)
        some = replace(draw, seeds=draw.seeds[span], positions=draw.positions[span])
        drawn = _draw_block(block, some, local, shard, inner)
        result.ids[span], result.logsumexp[span] = drawn.ids, drawn.logsumexp
        result.logprobs[span] = drawn.logprobs
        if draw.may_filter:
            _filter_block(block, draw, span, local, shard, inner, result)
    return result


def _draw_block(
    block: LogitsInput, draw: DrawInput, local: Local, shard: Shard, workspace_bytes: int
) -> SampleResult:
    source = shard.source(block)
    part = local.draw(source, draw, shard.first_id, workspace_bytes)
    empty = _empty_rows(source)
    lse = part.logsumexp.double()
    logits = part.logprobs.double() + lse
    ids = part.ids + shard.first_id
    if empty is not None:
        lse, logits = lse.masked_fill(empty, -torch.inf), logits.masked_fill(empty, -torch.inf)
    told = torch.stack((lse, logits, ids.double()), 1)
    everyone = _gather(told, shard.group)
    total = everyone[:, :, 0].logsumexp(0)
    total = total.masked_fill(total.isinf(), torch.nan)
    logits, ids = everyone[:, :, 1], everyone[:, :, 2].long()
    heat = torch.as_tensor(block.temperature, device=ids.device).expand(ids.shape[1])
    clocks = _clocks(ids.t(), draw).t()
    scores = torch.where(heat < MIN_TEMPERATURE, logits, logits - clocks.log())
    best = scores.nan_to_num(nan=-torch.inf).argmax(0)[None]
    chosen = ids.gather(0, best)[0].masked_fill(total.isnan(), 0)
    logprobs = (logits.gather(0, best)[0] - total).float()
    return SampleResult(ids=chosen, logprobs=logprobs, logsumexp=total.float())


def _clocks(ids_RC: Tensor, draw: DrawInput) -> Tensor:
    """Exponential variates float64 of ids of the vocabulary, [R, C]."""
    spare = torch.empty((2, *ids_RC.shape), dtype=torch.int32, device=ids_RC.device)
    keys = row_keys(draw.seeds, draw.positions)
    return negative_clocks(id_codes(ids_RC), keys, spare[0], spare[1]).neg_().double()


def _filter_block(
    block: LogitsInput,
    draw: DrawInput,
    span: slice,
    local: Local,
    shard: Shard,
    workspace_bytes: int,
    result: SampleResult,
) -> None:
    """Draw again for the rows that filter, from ever more candidates until they are enough."""
    vocab_size, device = shard.vocab_size, result.ids.device
    filters = draw.filters(span.start, span.stop, vocab_size)
    heat = torch.as_tensor(block.temperature, device=device).expand(span.stop - span.start)
    on = (filters.top_k < vocab_size) | (filters.top_p <= 1.0) | (filters.min_p > 0.0)
    on &= (heat >= MIN_TEMPERATURE) & ~result.logsumexp[span].isnan()
    open_rows = on.nonzero().view(-1)
    wanted = CANDIDATES
    while open_rows.numel():
        wanted = min(wanted, vocab_size)
        step = max(1, CANDIDATES * (span.stop - span.start) // wanted)
        left = [
            _filter_rows(block, draw, span, some, wanted, local, shard, workspace_bytes, result)
            for some in torch.split(open_rows, step)
        ]
        open_rows = torch.cat(left)
        wanted *= 16


def _filter_rows(  # noqa: PLR0913 -- the loop of _filter_block, cut out
    block: LogitsInput,
    draw: DrawInput,
    span: slice,
    some: Tensor,
    wanted: int,
    local: Local,
    shard: Shard,
    workspace_bytes: int,
    result: SampleResult,
) -> Tensor:
    """Draw among the best `wanted` ids; returns the rows for which they may not be enough."""
    chosen = _choose(block, some)
    source, empty = shard.source(chosen), None
    part = local.score(source, None, None, min(wanted, shard.size), False, False, workspace_bytes)
    empty = _empty_rows(source)
    lse = part.logsumexp.double()
    offset = lse if empty is None else lse.masked_fill(empty, 0.0)
    logits, ids = _merge_best(part, offset, empty, shard, wanted)
    assert logits is not None and ids is not None
    at = some + span.start
    filters = draw.filters(span.start, span.stop, shard.vocab_size).take(some)
    total = result.logsumexp[at].double()
    columns = torch.arange(wanted, device=ids.device)
    probs = (logits - total[:, None]).exp()
    in_k = columns < filters.top_k[:, None]
    mass = probs.masked_fill(~in_k, 0.0).sum(1)
    mass = torch.where(filters.top_k < shard.vocab_size, mass, 1.0)
    keep = probs.cumsum(1) - probs < (filters.top_p * mass)[:, None]
    keep &= in_k & (probs >= filters.min_p[:, None] * probs[:, :1])
    keep[:, 0] = True
    keys = replace(draw, seeds=draw.seeds[at], positions=draw.positions[at])
    race = (probs / _clocks(ids, keys)).masked_fill(~keep, -1.0)
    best = race.argmax(1)[:, None]
    result.ids[at] = ids.gather(1, best)[:, 0]
    result.logprobs[at] = (logits.gather(1, best)[:, 0] - total).float()
    # The mass of the k best is known only from all of them; else the prefix must end inside.
    by_mass = (filters.top_k < shard.vocab_size) & (filters.top_p <= 1.0)
    more = (filters.top_k > wanted) & (logits[:, -1] > -torch.inf)
    unsure = more & (by_mass | keep[:, -1]) & (wanted < shard.vocab_size)
    return some[unsure]


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
