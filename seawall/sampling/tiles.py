"""The tiled product: processed logits of a block of rows, one tile of the vocabulary at a time.

Owns: the order in which a logit is made, the buffers of the workspace and their reuse. It is not
what is made of the tiles (logprobs.py, sampler.py), and no tile outlives the next one.

Legend: R rows of a block, H hidden, V vocabulary, T ids of a tile, W = T/32 words of a bitmask.

    logit = softcap(scale * hidden weight^T) + bias         softcap(x) = c tanh(x / c)
    logit = adjusted(logit)                                 adjust.py
    logit = -inf where the bitmask forbids the id
    logit = logit / temperature                             below MIN_TEMPERATURE: unscaled

All of it is float32, whatever the weights are: their tile is converted, the logits never rounded.
A product that is not finite (an input held NaN or infinity) marks its row, which ends as NaN
even where a softcap or a mask would hide it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from seawall.memory.footprint_logits import MASK_WORD_IDS, LogitsShape, TilePlan
from seawall.sampling.adjust import BlockAdjust, SparseAdjust

MIN_TEMPERATURE = 1e-6  # below this a row is greedy, and its logprobs are unscaled


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsInput:
    """All that decides the processed logits of a call.

    Attributes:
        hidden: [rows, H] float32, bfloat16 or float16.
        weight: [V, H] likewise.
        temperature: float32 [rows], or one number.
        softcap: c of c tanh(x / c), or None.
        bias: [V] or None.
        bitmask: int32 [rows, ceil(V / 32)], bit set = allowed, or None.
    """

    hidden: Tensor
    weight: Tensor
    temperature: Tensor | float = 1.0
    softcap: float | None = None
    scale: float = 1.0
    bias: Tensor | None = None
    bitmask: Tensor | None = None
    adjust: SparseAdjust | None = None

    @property
    def vocab_size(self) -> int:
        """Ids of the vocabulary."""
        return self.weight.shape[0]

    def shape(self, *, top_k: int = 0, num_token_ids: int = 0, reordered: bool) -> LogitsShape:
        """What the footprint needs to know of this call; `reordered` rows may ask for filters."""
        hidden_copy = 0 if _usable(self.hidden) else 4
        if reordered:
            hidden_copy = 4 + (self.hidden.element_size() if hidden_copy else 0)
        return LogitsShape(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden.shape[1],
            hidden_copy_bytes=hidden_copy,
            copies_weight=not _usable(self.weight),
            top_k=top_k,
            num_token_ids=num_token_ids,
            adjusted=self.adjust is not None,
        )


def _usable(matrix: Tensor) -> bool:
    """Whether the product takes the matrix as it is, without a copy of its own."""
    rows_apart = matrix.stride(0) >= matrix.shape[1]
    return matrix.dtype == torch.float32 and matrix.stride(1) == 1 and rows_apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """The workspace's reused parts, made once a call.

    Attributes:
        logits: float32 [rows * ids].
        scratch: int32 [3 * scratch rows * ids], three parts of 4 bytes an element.
        weight: float32 [ids, H], or None where the weights are used in place.
    """

    plan: TilePlan
    logits: Tensor
    scratch: Tensor
    weight: Tensor | None

    @staticmethod
    def make(plan: TilePlan, source: LogitsInput) -> "Buffers":
        """Allocate them for a plan."""
        device = source.hidden.device
        weight = None
        if not _usable(source.weight):
            shape = (plan.ids, source.weight.shape[1])
            weight = torch.empty(shape, dtype=torch.float32, device=device)
        return Buffers(
            plan=plan,
            logits=torch.empty(plan.rows * plan.ids, dtype=torch.float32, device=device),
            scratch=torch.empty(3 * plan.scratch_rows * plan.ids, dtype=torch.int32, device=device),
            weight=weight,
        )

    def floats(self, rows: int, columns: int) -> Tensor:
        """First part of the scratch as float32 [rows, columns]."""
        return self._part(0, rows * columns).view(torch.float32).view(rows, columns)

    def ints(self, part: int, rows: int, columns: int) -> Tensor:
        """Part 1 or 2 of the scratch as int32 [rows, columns]."""
        return self._part(part, rows * columns).view(rows, columns)

    def longs(self, rows: int, columns: int) -> Tensor:
        """Parts 1 and 2 of the scratch as int64 [rows, columns]."""
        part = self.scratch.shape[0] // 3
        wide = self.scratch[part : part + 2 * rows * columns]
        return wide.view(torch.int64).view(rows, columns)

    def _part(self, part: int, size: int) -> Tensor:
        start = part * (self.scratch.shape[0] // 3)
        return self.scratch[start : start + size]


class TileReader:
    """Processed logits of some rows [first_row, end_row) of a call, tile by tile.

    Attributes:
        num_rows: rows of each tile.
        poison: float32 [rows], 0 or NaN, complete after the last tile.
    """

    def __init__(
        self,
        source: LogitsInput,
        buffers: Buffers,
        first_row: int,
        end_row: int,
        chosen: Tensor | None = None,
    ) -> None:
        """`chosen` int64 picks and orders rows of the block, None takes all in order."""
        self._source = source
        self._buffers = buffers
        hidden = source.hidden[first_row:end_row]
        if chosen is not None:
            hidden = hidden.index_select(0, chosen)
        if not _usable(hidden):
            hidden = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device).copy_(
                hidden
            )
        self._hidden = hidden
        self.num_rows = hidden.shape[0]
        self.poison = hidden.new_zeros(self.num_rows)
        self._chosen = chosen
        self._bitmask = None if source.bitmask is None else source.bitmask[first_row:end_row]
        self._temperature = _divisors(source.temperature, first_row, end_row, chosen)
        self._adjust = _block_adjust(source.adjust, first_row, end_row, chosen)

    def tiles(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (first id, logits [R, T]); the tensor is valid until the next one is asked for."""
        width = self._buffers.plan.ids
        for start in range(0, self._source.vocab_size, width):
            tile = self._product(start, min(start + width, self._source.vocab_size))
            self._process(tile, start)
            yield start, tile

    def _product(self, start: int, end: int) -> Tensor:
        weight = self._source.weight[start:end]
        if self._buffers.weight is not None:
            weight = self._buffers.weight[: end - start].copy_(weight)
        tile = self._buffers.logits[: self.num_rows * (end - start)].view(self.num_rows, -1)
        torch.addmm(tile, self._hidden, weight.t(), beta=0, alpha=self._source.scale, out=tile)
        total = tile.sum(1)
        self.poison += total.sub_(total)
        return tile

    def _process(self, tile: Tensor, start: int) -> None:
        source, end = self._source, start + tile.shape[1]
        if source.softcap is not None:
            tile.div_(source.softcap).tanh_().mul_(source.softcap)
        if source.bias is not None:
            tile.add_(source.bias[start:end])
        if self._adjust is not None:
            self._adjust.apply(tile, start)
        if self._bitmask is not None:
            self._forbid(tile, start, self._bitmask)
        if isinstance(self._temperature, Tensor):
            tile.div_(self._temperature[:, None])
        elif self._temperature != 1.0:
            tile.div_(self._temperature)

    def _forbid(self, tile: Tensor, start: int, bitmask: Tensor) -> None:
        first_word, num_words = start // MASK_WORD_IDS, -(-tile.shape[1] // MASK_WORD_IDS)
        words_BW = bitmask[:, first_word : first_word + num_words]
        bits = 1 << torch.arange(MASK_WORD_IDS, dtype=torch.int32, device=tile.device)
        step = self._buffers.plan.scratch_rows
        for row in range(0, self.num_rows, step):
            part = tile[row : row + step]
            words = (
                words_BW[row : row + step]
                if self._chosen is None
                else words_BW.index_select(0, self._chosen[row : row + step])
            )
            rows, width = part.shape[0], num_words * MASK_WORD_IDS
            masked = self._buffers.ints(1, rows, width).view(rows, num_words, MASK_WORD_IDS)
            torch.bitwise_and(words[:, :, None], bits, out=masked)
            flags = self._buffers.ints(2, rows, width).view(-1).view(torch.bool)
            forbidden = flags[: rows * width].view(rows, num_words, MASK_WORD_IDS)
            torch.eq(masked, 0, out=forbidden)
            part.masked_fill_(forbidden.view(rows, width)[:, : part.shape[1]], -torch.inf)


def _divisors(
    temperature: Tensor | float, first_row: int, end_row: int, chosen: Tensor | None
) -> Tensor | float:
    """Temperatures to divide by; 1 where a row is unscaled."""
    if isinstance(temperature, float):
        return temperature if temperature >= MIN_TEMPERATURE else 1.0
    part = temperature[first_row:end_row].float()  # a float64 divisor would copy the tile
    if chosen is not None:
        part = part.index_select(0, chosen)
    divisors = part.masked_fill(part < MIN_TEMPERATURE, 1.0)
    return 1.0 if bool((divisors == 1.0).all()) else divisors


def _block_adjust(
    adjust: SparseAdjust | None, first_row: int, end_row: int, chosen: Tensor | None
) -> BlockAdjust | None:
    if adjust is None:
        return None
    first, end = adjust.span(first_row, end_row)
    if first == end:
        return None
    places = None
    if chosen is not None:
        places = chosen.new_full((end_row - first_row,), -1)
        places[chosen] = torch.arange(chosen.shape[0], device=chosen.device)
    return BlockAdjust(source=adjust, first_row=first_row, first=first, end=end, places=places)
