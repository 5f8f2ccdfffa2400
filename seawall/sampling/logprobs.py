"""Logprobs of rows: target, log-sum-exp, the k best, ids asked for, rank and entropy in tiles.

Owns: the passes over tiles and the result. Inputs are taken as valid (seawall.ops checks them).

Legend: R rows of a block, T ids of a tile, M ids asked for, k best ids.

One pass over the tiles finds everything but the rank, which needs the target's logit first and
takes a second pass. A row is its own: what the others hold changes none of its numbers beyond
the rounding of the product.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from seawall.memory.footprint_logits import PICK_CHUNK, LogitsShape, plan_tiles
from seawall.sampling.softmax import RunningSoftmax, subtract_logsumexp
from seawall.sampling.tiles import Buffers, LogitsInput, TileReader
from seawall.sampling.topk import RunningTopK

_FARTHEST = -1e4  # stands in for -inf in d exp(d), which is 0 there


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobResult:
    """Log-softmax of processed logits, at what was asked for.

    A row with a NaN or infinity in its product, or without any allowed id, is NaN throughout
    (rank 0, ids any).

    Attributes:
        logprobs: float32 [rows], of the targets; None without targets.
        logsumexp: float32 [rows], of the processed logits.
        top_logprobs: float32 [rows, top_k], best first; -inf where ids are forbidden.
        top_ids: int64 [rows, top_k], as a stable sort orders them: equal logits by lowest id.
        token_logprobs: float32 [rows, m], of `token_ids`.
        rank: int64 [rows], 1 + the number of ids whose logit is strictly greater than the target's.
        entropy: float32 [rows], in nats.
    """

    logprobs: Tensor | None
    logsumexp: Tensor
    top_logprobs: Tensor | None
    top_ids: Tensor | None
    token_logprobs: Tensor | None
    rank: Tensor | None
    entropy: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is wanted of rows besides their log-sum-exp.

    Attributes:
        targets: int64 or int32 [rows].
        token_ids: likewise [rows, m], or [m] where all rows ask for the same.
        above: float32 [rows]; `rank` then counts the ids above it, not above a target.
        logits: give processed logits where the result says logprobs.
    """

    targets: Tensor | None = None
    token_ids: Tensor | None = None
    top_k: int = 0
    rank: bool = False
    entropy: bool = False
    above: Tensor | None = None
    logits: bool = False

    @property
    def shared_ids(self) -> bool:
        """Whether all rows ask for the same ids."""
        return self.token_ids is not None and self.token_ids.dim() == 1

    @property
    def num_ids(self) -> int:
        """Ids asked for a row."""
        return 0 if self.token_ids is None else self.token_ids.shape[-1]

    def result(self, rows: int, device: torch.device) -> LogprobResult:
        """Room for the answers, each number as if nothing had been seen yet."""

        def floats(*size: int) -> Tensor:
            return torch.full(size, -torch.inf, dtype=torch.float32, device=device)

        ids = torch.zeros((rows, self.top_k), dtype=torch.int64, device=device)
        return LogprobResult(
            logprobs=None if self.targets is None else floats(rows),
            logsumexp=floats(rows),
            top_logprobs=floats(rows, self.top_k) if self.top_k else None,
            top_ids=ids if self.top_k else None,
            token_logprobs=None if self.token_ids is None else floats(rows, self.num_ids),
            rank=torch.ones(rows, dtype=torch.int64, device=device) if self.rank else None,
            entropy=floats(rows) if self.entropy else None,
        )


def score_shape(source: LogitsInput, ask: Ask) -> LogitsShape:
    """What the footprint needs to know of a call."""
    return source.shape(top_k=ask.top_k, num_token_ids=ask.num_ids, reordered=False)


def score_rows(source: LogitsInput, ask: Ask, workspace_bytes: int) -> LogprobResult:
    """Score every row, block by block."""
    rows = source.hidden.shape[0]
    plan = plan_tiles(score_shape(source, ask), rows, workspace_bytes)
    result = ask.result(rows, source.hidden.device)
    buffers = Buffers.make(plan, source)
    for first in range(0, rows, plan.rows):
        end = min(first + plan.rows, rows)
        reader = TileReader(source, buffers, first, end)
        _score_block(reader, buffers, _rows_asked(ask, first, end), _rows_of(result, first, end))
    return result


def _rows_asked(ask: Ask, first: int, end: int) -> Ask:
    """What is asked of some rows, with ids for each of them."""
    ids = ask.token_ids
    if ids is not None:
        ids = ids.expand(end - first, -1) if ask.shared_ids else ids[first:end]
    return replace(
        ask,
        targets=None if ask.targets is None else ask.targets[first:end],
        token_ids=ids,
        above=None if ask.above is None else ask.above[first:end],
    )


def _rows_of(result: LogprobResult, first: int, end: int) -> LogprobResult:
    """Views of some rows of a result, to be written."""

    def part(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[first:end]

    return LogprobResult(
        logprobs=part(result.logprobs),
        logsumexp=result.logsumexp[first:end],
        top_logprobs=part(result.top_logprobs),
        top_ids=part(result.top_ids),
        token_logprobs=part(result.token_logprobs),
        rank=part(result.rank),
        entropy=part(result.entropy),
    )


def _score_block(reader: TileReader, buffers: Buffers, ask: Ask, out: LogprobResult) -> None:
    """One pass over the tiles, a second one for the rank, and the results of a block."""
    targets_R, asked_RM = ask.targets, ask.token_ids
    softmax = RunningSoftmax(reader.num_rows, out.logsumexp.device)
    best = None if out.top_ids is None else RunningTopK(out.top_ids.shape[1])
    for start, tile in reader.tiles():
        if targets_R is not None and out.logprobs is not None:
            _pick(tile, start, targets_R[:, None], out.logprobs[:, None])
        if asked_RM is not None and out.token_logprobs is not None:
            _pick(tile, start, asked_RM, out.token_logprobs)
        if best is not None:
            best.merge(tile, start, buffers)
        accumulate(tile, softmax, buffers, with_slopes=out.entropy is not None)
    lse = softmax.logsumexp().add_(reader.poison)
    if best is not None and out.top_ids is not None and out.top_logprobs is not None:
        assert best.ids is not None and best.values is not None
        out.top_ids.copy_(best.ids)
        out.top_logprobs.copy_(best.values)
    if out.rank is not None:
        above = out.logprobs if ask.above is None else ask.above
        assert above is not None
        _rank(reader, targets_R if ask.above is None else None, above, out.rank)
        out.rank.masked_fill_(lse.isnan(), 0)
    for values in (out.logprobs, out.token_logprobs, out.top_logprobs):
        if values is not None and not ask.logits:
            subtract_logsumexp(values, lse)
    if out.entropy is not None:
        out.entropy.copy_(softmax.entropy().add_(reader.poison))
    out.logsumexp.copy_(lse)


def accumulate(
    tile_RT: Tensor, softmax: RunningSoftmax, buffers: Buffers, *, with_slopes: bool = False
) -> None:
    """Merge a tile into the running log-sum-exp, a few rows at a time; the tile stays as it is."""
    rows, width = tile_RT.shape
    peak_R = tile_RT.amax(1)
    shift_R1 = softmax.shift(peak_R)[:, None]
    sums_R = torch.empty_like(peak_R)
    slopes_R = torch.empty_like(peak_R) if with_slopes else None
    step = buffers.plan.scratch_rows
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        powers = buffers.floats(part.stop - first, width)
        torch.sub(tile_RT[part], shift_R1[part], out=powers)
        if slopes_R is None:
            powers.exp_()
        else:
            depths = buffers.ints(1, part.stop - first, width).view(torch.float32)
            torch.clamp(powers, min=_FARTHEST, out=depths)
            torch.sum(depths.mul_(powers.exp_()), 1, out=slopes_R[part])
        torch.sum(powers, 1, out=sums_R[part])
    softmax.merge(peak_R, sums_R, slopes_R)


def _pick(tile_RT: Tensor, start: int, ids_RM: Tensor, out_RM: Tensor) -> None:
    """Set out to the tile's logits at the ids that lie in it; keep the others."""
    width = tile_RT.shape[1]
    for first in range(0, ids_RM.shape[1], PICK_CHUNK):
        columns = ids_RM[:, first : first + PICK_CHUNK] - start
        inside = (columns >= 0).logical_and_(columns < width)
        found = tile_RT.gather(1, columns.clamp_(0, width - 1))
        out = out_RM[:, first : first + PICK_CHUNK]
        out.copy_(torch.where(inside, found, out))


def _rank(reader: TileReader, targets_R: Tensor | None, logits_R: Tensor, rank_R: Tensor) -> None:
    """Count the strictly greater logits in a second pass; a target itself never counts."""
    for start, tile in reader.tiles():
        if targets_R is not None:
            columns = targets_R - start
            inside = (columns >= 0).logical_and_(columns < tile.shape[1])
            columns.clamp_(0, tile.shape[1] - 1)
            own = tile.gather(1, columns[:, None]).masked_fill_(inside[:, None], -torch.inf)
            tile.scatter_(1, columns[:, None], own)
        tile.gt_(logits_R[:, None])
        rank_R.add_(tile.sum(1).to(torch.int64))
