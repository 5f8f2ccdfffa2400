"""Sparse changes to logits: penalties, bias and forbidden ids of the rows that have any.

Owns: the value and how it is applied to a tile. It is not how the changes are computed from a
request's history (the scheduler's business), and there is no [rows, vocabulary] state anywhere.

    row          0 0 0 2 2 5 ...      ascending; rows without changes do not occur
    ids          each (row, id) at most once, in any order within a row
    repetition   logit / r where positive, logit * r where not; 1 = none
    add          added after that; -inf forbids the id
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from seawall.memory.footprint_logits import ADJUST_CHUNK


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseAdjust:
    """Changes to the logits of some rows, as coordinates sorted by row.

    Attributes:
        row: int64 [nnz], ascending.
        ids: int64 [nnz]; each (row, id) at most once.
        repetition: float32 [nnz], above 0.
        add: float32 [nnz], finite or -inf.
    """

    row: Tensor
    ids: Tensor
    repetition: Tensor
    add: Tensor

    def span(self, first_row: int, end_row: int) -> tuple[int, int]:
        """Half-open range of entries that belong to rows [first_row, end_row)."""
        bounds = torch.tensor([first_row, end_row], dtype=torch.int64, device=self.row.device)
        first, end = torch.searchsorted(self.row, bounds).tolist()
        return first, end


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockAdjust:
    """The entries of one block of rows, and where in the tile each row lies.

    Attributes:
        first_row: row of the call that is row 0 of the block.
        first, end: half-open range of entries.
        places: int64 [rows of the block], place in the tile or -1; None if places are rows.
    """

    source: SparseAdjust
    first_row: int
    first: int
    end: int
    places: Tensor | None

    def apply(self, tile_RT: Tensor, start: int) -> None:
        """Change the logits of ids [start, start + T) in place."""
        for begin in range(self.first, self.end, ADJUST_CHUNK):
            self._apply_chunk(tile_RT, start, begin, min(begin + ADJUST_CHUNK, self.end))

    def _apply_chunk(self, tile_RT: Tensor, start: int, begin: int, end: int) -> None:
        source, width = self.source, tile_RT.shape[1]
        column = source.ids[begin:end] - start
        place = source.row[begin:end] - self.first_row
        if self.places is not None:
            place = self.places[place]
        hit = (column >= 0).logical_and_(column < width).logical_and_(place >= 0)
        chosen = hit.nonzero().view(-1)
        if chosen.numel() == 0:
            return
        flat = place.mul_(width).add_(column)[chosen]
        logits = tile_RT.view(-1)
        value = logits[flat]
        repetition = source.repetition[begin:end][chosen]
        value = torch.where(value > 0, value / repetition, value * repetition)
        logits.index_copy_(0, flat, value.add_(source.add[begin:end][chosen]))
