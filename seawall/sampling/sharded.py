"""Logprobs when the LM head is sharded by vocabulary over a process group.

Owns: which ids a rank has, what ranks tell each other (a few numbers a row, never a row of
logits), and how the parts become the whole. It is not the local passes, which are those of one
device (entry.py), nor the draw (sharded_draw.py).

Legend: R rows, P ranks, k best ids, m ids asked for; a shard is ids [first_id, first_id + V_r).

Every rank has the same hidden rows, asks for the same and gets the same results. What a rank
tells, per row: log-sum-exp, entropy sum, target's logit, ids above the target (8 bytes each), k
pairs of logit and id (8 bytes each), and m logits of 8 bytes: at most 8 (k + m + 4) bytes. The
count comes in a second pass and gather. Shards are merged in rank order, which is the order of
ids, from logits with the bits of the tiles, so that equal logits still rank by lowest id.

A shard in which bitmask and changes allow no id counts as empty, whatever its product.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from seawall.sampling.adjust import SparseAdjust
from seawall.sampling.entry import DevicePass, device_pass
from seawall.sampling.logprobs import Ask, LogprobResult
from seawall.sampling.tiles import LogitsInput

_NUMBERS = 4  # of 8 bytes a row, besides the k pairs and m logits
_LOOSE_BYTES = 32 << 10
_ROW_BYTES = 320
_BEST_BYTES = 96
_ID_BYTES = 64
_MASK_PARTS = 5  # copies of a row's bitmask alive at once
_ENTRY_BYTES = 72


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Which ids this rank has, and whom to tell.

    Attributes:
        sizes: ids of every rank, in rank order.
        need: smallest workspace with which every rank can serve the call.
    """

    group: dist.ProcessGroup
    rank: int
    sizes: tuple[int, ...]
    need: int

    @staticmethod
    def of(group: dist.ProcessGroup, source: LogitsInput, need: int) -> "Shard":
        """Tell all ranks this one's size and need, and learn theirs.

        Raises:
            ValueError: hidden rows or weights differ where they must not; on every rank alike.
        """
        weight, hidden = source.weight, source.hidden
        mine = [weight.shape[0], need, *hidden.shape, hidden.itemsize, weight.itemsize]
        told = gather(torch.tensor(mine, device=hidden.device), group).tolist()
        for name, column in (("rows", 2), ("hidden size", 3), ("dtypes", slice(4, 6))):
            found = [row[column] for row in told]
            if any(each != found[0] for each in found):
                raise ValueError(
                    f"group: ranks disagree on {name}: {found}; give all the same hidden rows"
                )
        return Shard(
            group=group,
            rank=dist.get_rank(group),
            sizes=tuple(row[0] for row in told),
            need=max(row[1] for row in told),
        )

    @property
    def first_id(self) -> int:
        """Id of the vocabulary that is id 0 of the shard."""
        return sum(self.sizes[: self.rank])

    @property
    def size(self) -> int:
        """Ids of the shard."""
        return self.sizes[self.rank]

    @property
    def vocab_size(self) -> int:
        """Ids of all shards."""
        return sum(self.sizes)

    def check_workspace(self, workspace_bytes: int) -> None:
        """Refuse what is too small for any rank, on every rank, so that none waits for another."""
        if workspace_bytes < self.need:
            raise ValueError(
                f"workspace_bytes: {workspace_bytes} is too small for vocabulary "
                f"{self.vocab_size} on {len(self.sizes)} ranks; give at least {self.need}"
            )

    def gather(self, mine: Tensor) -> Tensor:
        """All ranks' tensors of this shape, [P, ...] in rank order."""
        return gather(mine, self.group)

    def owned(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Ids within the shard, 0 where another rank has them, and which it has."""
        inner = ids - self.first_id
        mine = (inner >= 0).logical_and_(inner < self.size)
        return inner.masked_fill_(mine.logical_not(), 0), mine

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


def gather(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' tensors of this shape, [P, ...] in rank order."""
    everyone = mine.new_empty((dist.get_world_size(group), *mine.shape))
    dist.all_gather(list(everyone.unbind(0)), mine.contiguous(), group=group)
    return everyone


def empty_rows(source: LogitsInput) -> Tensor | None:
    """Rows of which bitmask and changes allow no id here; None if that cannot be."""
    bitmask, adjust = source.bitmask, source.adjust
    if bitmask is None and adjust is None:
        return None
    rows, vocab_size, device = source.hidden.shape[0], source.vocab_size, source.hidden.device
    if bitmask is None:
        counts = torch.full((rows,), vocab_size, dtype=torch.int64, device=device)
    else:
        counts = _allowed(bitmask, vocab_size)
    if adjust is not None:
        gone = (adjust.add == -torch.inf).nonzero().view(-1)
        row, ids = adjust.row[gone], adjust.ids[gone]
        taken = torch.ones_like(row)
        if bitmask is not None:
            taken = (bitmask[row, ids // 32] >> (ids % 32)).bitwise_and_(1).to(torch.int64)
        counts.index_add_(0, row, taken.neg_())
    return counts == 0


def _allowed(bitmask: Tensor, vocab_size: int) -> Tensor:
    """Bits set of each row's ids, int64 [R]: pairs, then fours, then bytes are added up."""
    words = bitmask[:, : -(-vocab_size // 32)].clone()
    if vocab_size % 32:
        words[:, -1] &= (1 << (vocab_size % 32)) - 1
    # Shifts copy the sign; the masks drop those copies.
    words -= (words >> 1).bitwise_and_(0x55555555)
    words = (words & 0x33333333).add_((words >> 2).bitwise_and_(0x33333333))
    words = words.add_(words >> 4).bitwise_and_(0x0F0F0F0F)
    return words.view(torch.uint8).sum(1)


def blocks(rows: int, step: int) -> Sequence[slice]:
    """Runs of rows; one empty run if there are none, so that results have a shape."""
    spans = [slice(first, min(first + step, rows)) for first in range(0, rows, step)]
    return spans or [slice(0, 0)]


def take(source: LogitsInput, rows: slice) -> LogitsInput:
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


def exchange_row_bytes(
    source: LogitsInput, size: int, ranks: int, best: int, num_ids: int = 0
) -> int:
    """Bytes a row of what is told, heard and merged, and of the inputs' share of `size` ids."""
    total = _ROW_BYTES + 16 * _NUMBERS * ranks
    total += best * (8 * ranks + _BEST_BYTES) + num_ids * (8 * ranks + _ID_BYTES)
    if source.bitmask is not None:
        total += _MASK_PARTS * 4 * -(-size // 32)
    if source.adjust is not None and source.adjust.row.numel():
        starts = source.adjust.row.diff(prepend=source.adjust.row[:1] - 1).nonzero().view(-1)
        runs = starts.diff(append=starts.new_tensor([source.adjust.row.shape[0]]))
        total += _ENTRY_BYTES * int(runs.max())
    return total


def need_of(local_bytes: int, row_bytes: int) -> int:
    """Smallest workspace for a local pass and the exchange of one row."""
    return local_bytes + row_bytes + _LOOSE_BYTES


def split_workspace(shard: Shard, row_bytes: int, workspace_bytes: int) -> tuple[int, int]:
    """Rows of a block, and the bytes left to the local pass; the same on every rank."""
    shard.check_workspace(workspace_bytes)
    spare = min(workspace_bytes // 4, workspace_bytes - shard.need)
    step = 1 + spare // row_bytes
    return step, workspace_bytes - step * row_bytes - _LOOSE_BYTES


def score_need(source: LogitsInput, ask: Ask, ranks: int) -> int:
    """Smallest workspace of this rank."""
    local = device_pass(source.hidden.device)
    need = local.smallest_workspace(source, ask=_local_ask(source, ask))
    row = exchange_row_bytes(source, source.vocab_size, ranks, ask.top_k, ask.num_ids)
    return need_of(need, row)


def _local_ask(source: LogitsInput, ask: Ask) -> Ask:
    """What is asked of a shard: no more ids than it has."""
    return replace(ask, top_k=min(ask.top_k, source.vocab_size), logits=True)


def score_rows(whole: LogitsInput, ask: Ask, workspace_bytes: int, shard: Shard) -> LogprobResult:
    """The result of one device with all the ids, on every rank."""
    rows, device = whole.hidden.shape[0], whole.hidden.device
    local = device_pass(device)
    ranks, most = len(shard.sizes), max(shard.sizes)
    row_bytes = exchange_row_bytes(whole, most, ranks, ask.top_k, ask.num_ids)
    step, inner = split_workspace(shard, row_bytes, workspace_bytes)
    result = ask.result(rows, device)
    for span in blocks(rows, step):
        part = replace(
            ask,
            targets=None if ask.targets is None else ask.targets[span],
            token_ids=ask.token_ids
            if ask.token_ids is None or ask.shared_ids
            else ask.token_ids[span],
        )
        found = _score_block(shard.source(take(whole, span)), part, local, shard, inner)
        for into, numbers in zip(_fields(result), _fields(found), strict=True):
            if into is not None and numbers is not None:
                into[span] = numbers
    return result


def _fields(result: LogprobResult) -> tuple[Tensor | None, ...]:
    return (
        result.logprobs, result.logsumexp, result.top_logprobs, result.top_ids,
        result.token_logprobs, result.rank, result.entropy,
    )  # fmt: skip


def _score_block(
    source: LogitsInput, ask: Ask, local: DevicePass, shard: Shard, workspace_bytes: int
) -> LogprobResult:
    inner, mine = (None, None) if ask.targets is None else shard.owned(ask.targets)
    ids, mine_ids = (None, None) if ask.token_ids is None else shard.owned(ask.token_ids)
    asked = replace(_local_ask(source, ask), targets=inner, token_ids=ids)
    part = local.score_rows(source, asked, workspace_bytes)
    empty = empty_rows(source)
    # Columns: log-sum-exp, sum of p logit if the entropy is asked, target's logit, ids' logits.
    told = [_lse(part, empty)[:, None]]
    if part.entropy is not None:
        means = part.logsumexp.double() - part.entropy
        told.append((means if empty is None else means.masked_fill_(empty, 0.0))[:, None])
    if part.logprobs is not None and mine is not None:
        told.append(part.logprobs.double().masked_fill_(mine.logical_not(), 0.0)[:, None])
    if part.token_logprobs is not None and mine_ids is not None:
        told.append(part.token_logprobs.double().masked_fill_(mine_ids.logical_not(), 0.0))
    heard = shard.gather(torch.cat(told, 1))
    del told
    total = total_of(heard[:, :, 0])
    entropy = None
    if part.entropy is not None:
        shares = (heard[:, :, 0] - total).exp_()
        entropy = (total - shares.mul_(heard[:, :, 1]).sum(0)).float()
    sums = heard[:, :, 1 + ask.entropy :].sum(0)
    del heard
    own = None if ask.targets is None else sums[:, 0]
    given = None
    if ask.token_ids is not None:
        given = sums[:, 1 if own is not None else 0 :].sub_(total[:, None]).float()
    best, best_ids = merged_best(part, shard, ask.top_k)
    rank = None
    if part.rank is not None and mine is not None and own is not None:
        above = Ask(rank=True, above=own.float())
        others = local.score_rows(source, above, workspace_bytes).rank
        assert others is not None
        counts = torch.where(mine, part.rank, others).sub_(1).clamp_(min=0)
        rank = shard.gather(counts).sum(0).add_(1).masked_fill_(total.isnan(), 0)
    return LogprobResult(
        logprobs=None if own is None else (own - total).float(),
        logsumexp=total.float(),
        top_logprobs=None if best is None else _less(best, total),
        top_ids=best_ids,
        token_logprobs=given,
        rank=rank,
        entropy=entropy,
    )


def _lse(part: LogprobResult, empty: Tensor | None) -> Tensor:
    lse = part.logsumexp.double()
    return lse if empty is None else lse.masked_fill_(empty, -torch.inf)


def total_of(lse_PR: Tensor) -> Tensor:
    """Log-sum-exp of all shards, float64 [R]; NaN where no id is allowed."""
    total = lse_PR.logsumexp(0)
    return total.masked_fill_(total.isinf(), torch.nan)


def _less(logits: Tensor, total: Tensor) -> Tensor:
    """Float32 logprobs from float32 logits, with nothing of the float64 total lost."""
    high = total.float()
    return logits.sub_(high[:, None]).sub_((total - high).float()[:, None])


def merged_best(
    part: LogprobResult, shard: Shard, top_k: int
) -> tuple[Tensor | None, Tensor | None]:
    """Logits float32 and ids of the k best of all shards, equal logits by id.

    `part` holds the shard's own best as logits.
    """
    if not top_k:
        return None, None
    assert part.top_logprobs is not None and part.top_ids is not None
    rows, found = part.top_ids.shape
    pairs = torch.zeros((rows, top_k, 2), dtype=torch.int32, device=part.top_ids.device)
    pairs[:, :found, 0] = part.top_logprobs.view(torch.int32)
    pairs[:, :found, 1] = part.top_ids + shard.first_id
    heard = shard.gather(pairs)
    del pairs
    logits, ids = _columns(heard[0], min(top_k, shard.sizes[0]))
    for theirs, size in zip(heard[1:], shard.sizes[1:], strict=True):
        more, more_ids = _columns(theirs, min(top_k, size))
        # Stable: what was found before has the lower ids and comes first among equals.
        logits, ids = torch.cat((logits, more), 1), torch.cat((ids, more_ids), 1)
        del more, more_ids
        logits, order = logits.sort(dim=1, descending=True, stable=True)
        logits, ids = logits[:, :top_k], ids.gather(1, order[:, :top_k])
        del order
    return logits.contiguous(), ids.long()


def _columns(pairs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first pairs of a rank, [R, count] each."""
    return pairs[:, :count, 0].contiguous().view(torch.float32), pairs[:, :count, 1].contiguous()
