"""Ragged attention on the CPU: the decode rows of a step at once, without gathering their keys.

Owns its share of the workspace and the layout of the step in progress; only reads the pool. Every
(token, head) is one row of a sparse matrix whose columns are pool slots, so that PyTorch's sparse
kernels do the walking:

    scores = sampled_addmm(q, keys)      dot products at the listed slots only
    softmax, in place                    tokens of equal padded length together
    out = embedding_bag(values, scores)  weighted sums of the listed slots

With a window the entries of a token begin where its window does. Capped scores get their bias
after the cap. A sink is one entry more, in the padding: its score is set before the softmax, and
its weight to zero after.

A step costs a dozen calls a layer however many rows it has, and keys and values are read where
they lie. Every result is a fixed-order sum over its own row: neighbours do not change it. float32
only, since sampled_addmm knows no narrower type.

Legend: T = packed tokens, N = ragged tokens, H = query heads, D = head_dim, S = slots of all kv
heads, one head after the other.
"""

import math
import warnings
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from seawall.attention.base import AttentionRows, ScoreRules
from seawall.core.units import ceil_div
from seawall.device.arena import Arena
from seawall.kv.pool import KVPool
from seawall.memory.footprint_attention import TILE, AttentionSizes

# Below this many tokens the chunked way is quicker: the ragged one has a fixed price a layer.
MIN_RAGGED_TOKENS = 4
# A chunk of several tokens goes ragged while it takes no more entries than this.
MAX_CHUNK_ENTRIES = 6144

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedStep:
    """One ragged pass: the sparse matrix of the step, and its parts by padded length."""

    token_ids: Tensor
    matrix: Tensor
    columns: Tensor
    bounds: Tensor
    bias: Tensor
    scores: Tensor
    groups: list[Tensor]


class RaggedAttention:
    """Tokens that attend all at once, as rows of one sparse matrix.

    Token n, head h is matrix row n * H + h. Its entries are the slots of the positions it sees,
    padded to a multiple of TILE with the last of them; the bias takes the padding out.
    """

    def __init__(
        self,
        pool: KVPool,
        arena: Arena,
        sizes: AttentionSizes,
        *,
        num_heads: int,
        scale: float,
        rules: ScoreRules,
    ) -> None:
        self._pool = pool
        self._num_heads = num_heads
        self._scale = scale
        self._rules = rules
        self._sizes = sizes
        self._token_ids = arena.empty("attention", (sizes.tokens,), torch.int64)
        self._columns = arena.empty("attention", (sizes.entries,), torch.int32)
        self._bias = arena.empty("attention", (sizes.entries,), torch.float32)
        self._scores = arena.empty("attention", (sizes.entries,), torch.float32)
        self._bounds = arena.empty("attention", (sizes.bounds,), torch.int32)
        # Where the slots of each query head's kv head begin, as columns.
        kv_heads = np.arange(num_heads, dtype=np.int32) // (num_heads // pool.num_kv_heads)
        self._head_columns = kv_heads[:, None] * np.int32(pool.num_slots)
        assert pool.num_kv_heads * pool.num_slots < 2**31 or sizes.entries == 0
        self._step: RaggedStep | None = None
        with warnings.catch_warnings():
            # PyTorch says once a process that sparse tensors are in beta.
            warnings.simplefilter("ignore")
            self._matrix(torch.zeros(2, dtype=torch.int32), self._columns[:0], self._scores[:0])

    def choose(self, rows: AttentionRows) -> npt.NDArray[np.bool_]:
        """Which rows take the ragged way: the short ones first, as far as the workspace goes."""
        lengths = rows.lengths.astype(np.int64)
        ends = rows.starts + lengths
        # An upper bound for several tokens, exact for one.
        widths = self._widths(self._seen(ends))
        entries = widths * lengths * self._num_heads
        fits = (lengths == 1) | ((entries <= MAX_CHUNK_ENTRIES) & (lengths > 0))
        # A sparse matrix cuts rows off that have more entries than there are columns: a padded
        # row of a tiny pool would.
        fits &= widths <= self._pool.num_kv_heads * self._pool.num_slots
        order = np.argsort(np.where(fits, entries, np.iinfo(np.int64).max), kind="stable")
        order = order[: int(fits.sum())]
        fit = np.cumsum(entries[order]) <= self._sizes.entries
        fit &= np.cumsum(lengths[order]) <= self._sizes.tokens
        chosen = np.zeros(len(lengths), dtype=np.bool_)
        chosen[order[fit]] = int(lengths[order[fit]].sum()) >= MIN_RAGGED_TOKENS
        return chosen

    def prepare(
        self, rows: AttentionRows, offsets: LongArray, chosen: npt.NDArray[np.bool_]
    ) -> None:
        """Lays out the tokens of the chosen rows: columns, bias and bounds of the matrix."""
        self._step = None
        lengths = np.where(chosen, rows.lengths, 0)
        num_tokens = int(lengths.sum())
        if num_tokens == 0:
            return
        first = np.cumsum(lengths) - lengths
        within = np.arange(num_tokens) - np.repeat(first, lengths)
        tokens = np.repeat(offsets, lengths) + within
        ends = np.repeat(rows.starts, lengths) + within + 1
        seen = self._seen(ends)
        seats = np.repeat(rows.seats, lengths)
        padded = self._widths(seen)
        groups = _groups(padded)
        order = np.concatenate(groups)
        self._token_ids[:num_tokens].copy_(torch.from_numpy(tokens[order]))
        bounds = np.zeros(num_tokens * self._num_heads + 1, dtype=np.int32)
        np.cumsum(np.repeat(padded[order], self._num_heads), out=bounds[1:])
        self._bounds[: len(bounds)].copy_(torch.from_numpy(bounds))
        num_entries = int(bounds[-1])
        self._bias[:num_entries].zero_()
        scores: list[Tensor] = []
        begin = 0
        for members in groups:
            width = int(padded[members[0]])
            end = begin + len(members) * self._num_heads * width
            slots = self._slots(rows.page_table, seats[members], ends[members], width)
            self._fill(slots, seen[members], begin)
            scores.append(self._scores[begin:end].view(-1, width))
            begin = end
        self._step = self._finish(num_tokens, len(bounds), num_entries, scores)

    def _finish(
        self, num_tokens: int, num_bounds: int, num_entries: int, groups: list[Tensor]
    ) -> RaggedStep:
        bounds = self._bounds[:num_bounds]
        columns = self._columns[:num_entries]
        scores = self._scores[:num_entries]
        return RaggedStep(
            token_ids=self._token_ids[:num_tokens],
            matrix=self._matrix(bounds, columns, scores),
            columns=columns,
            bounds=bounds[:-1],
            bias=self._bias[:num_entries],
            scores=scores,
            groups=groups,
        )

    def _matrix(self, bounds: Tensor, columns: Tensor, scores: Tensor) -> Tensor:
        """The sparse matrix over the buffers; its values are `scores` itself."""
        size = (len(bounds) - 1, self._pool.num_kv_heads * self._pool.num_slots)
        return torch.sparse_csr_tensor(bounds, columns, scores, size, check_invariants=False)

    def _seen(self, ends: LongArray) -> LongArray:
        """How many positions a token sees whose own is the last of [0, end)."""
        return ends if self._rules.window is None else np.minimum(ends, self._rules.window)

    def _widths(self, seen: LongArray) -> LongArray:
        """Entries of a token that sees so many positions."""
        return _padded(seen if self._rules.sinks is None else seen + 1)

    def _slots(
        self, page_table: IntArray, seats: IntArray, ends: LongArray, width: int
    ) -> IntArray:
        """The slots that each token sees, in order of position, and `width` of them or more."""
        page_size = self._pool.page_size
        if self._rules.window is None:
            pages = page_table[seats, : ceil_div(width, page_size)]
            short = ceil_div(width, page_size) - pages.shape[1]
            if short > 0:
                pages = np.pad(pages, ((0, 0), (0, short)))
            within = np.arange(page_size, dtype=np.int32)
            return (pages[:, :, None] * np.int32(page_size) + within).reshape(len(pages), -1)
        firsts = (ends - self._seen(ends)).astype(np.int32)
        within = np.arange(width, dtype=np.int32)
        positions: IntArray = np.add(firsts[:, None], within, dtype=np.int32)
        # Table entries past a token's own position may be anything.
        np.minimum(positions, ends.astype(np.int32)[:, None] - 1, out=positions)
        slots: IntArray = page_table[seats[:, None], positions // page_size]
        slots *= np.int32(page_size)
        slots += positions % np.int32(page_size)
        return slots

    def _fill(self, slots: IntArray, seen: LongArray, begin: int) -> None:
        """Columns and bias of the tokens of one padded length, from entry `begin` on."""
        width = int(self._widths(seen[:1])[0])
        slots = slots[:, :width]
        last = slots[np.arange(len(slots)), seen - 1]
        padding = np.arange(width - TILE, width) >= seen[:, None]
        np.copyto(slots[:, width - TILE :], last[:, None], where=padding)
        shape = (len(slots), self._num_heads, width)
        end = begin + math.prod(shape)
        torch.add(
            torch.from_numpy(slots)[:, None, :],
            torch.from_numpy(self._head_columns),
            out=self._columns[begin:end].view(shape),
        )
        tail = np.where(padding, np.float32(-np.inf), np.float32(0))
        bias = self._bias[begin:end].view(shape)[:, :, width - TILE :]
        bias.copy_(torch.from_numpy(tail)[:, None, :])

    def run(self, q_THD: Tensor, layer: int, out_THD: Tensor) -> None:
        """Attends for the tokens of the step; the pool has its keys and values already."""
        step = self._step
        if step is None:
            return
        dim = self._pool.head_dim
        q_ND = q_THD.index_select(0, step.token_ids).view(-1, dim)
        keys_DS = self._pool.keys(layer).view(-1, dim).t()
        values_SD = self._pool.values(layer).view(-1, dim)
        self._score(step, q_ND, keys_DS)
        for group in step.groups:
            if self._rules.sinks is None:
                torch.softmax(group, 1, out=group)
            else:
                _softmax_with_sink(group, self._rules.sinks[layer])
        bags = torch.embedding_bag(
            values_SD, step.columns, step.bounds, False, 0, False, step.scores
        )
        out_THD.index_copy_(0, step.token_ids, bags[0].view(-1, *out_THD.shape[1:]))

    def _score(self, step: RaggedStep, q_ND: Tensor, keys_DS: Tensor) -> None:
        """Scores of all entries, those of the padding at -inf."""
        softcap = self._rules.softcap
        if softcap is None:
            step.scores.copy_(step.bias)
            torch.sparse.sampled_addmm(
                step.matrix, q_ND, keys_DS, beta=1.0, alpha=self._scale, out=step.matrix
            )
            return
        step.scores.zero_()
        torch.sparse.sampled_addmm(
            step.matrix, q_ND, keys_DS, beta=1.0, alpha=self._scale / softcap, out=step.matrix
        )
        step.scores.tanh_().mul_(softcap).add_(step.bias)


def _softmax_with_sink(scores: Tensor, sinks_H: Tensor) -> None:
    """In place; the last entry of each row is padding, and takes the sink's share for a moment."""
    last = scores.view(-1, len(sinks_H), scores.shape[1])[:, :, -1]
    last.copy_(sinks_H)
    torch.softmax(scores, 1, out=scores)
    last.zero_()


def _padded(counts: LongArray) -> LongArray:
    """Each count rounded up to a multiple of TILE."""
    return -(-counts // TILE) * TILE


def _groups(padded: LongArray) -> list[LongArray]:
    """Tokens of equal padded length, ordered so that each thread gets a like share of entries.

    The weighted sums are split over threads by number of tokens, in order: dealing the groups from
    short to long like cards gives every thread short and long ones.
    """
    order = np.argsort(padded, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(padded[order])) + 1)
    hands = torch.get_num_threads()
    return [group for hand in range(hands) for group in groups[hand::hands]]
