"""Top-k, top-p and min-p: which of a row's ids may be drawn, and the draw among them.

Owns: the three filters on ids in falling order of logit, the race among the kept ones, and the
certificate that the best few are enough. It is not the tiled pass (seawall.sampling.sampler).

Legend: F filtered rows, C ids of a row in falling order (equal logits by id).

The filters work one after another, as transformers and vLLM order them:

    top_k   the k best
    top_p   of these, renormalised: the fewest best whose mass reaches p, at least one
    min_p   of these: at least min_p times as probable as the best
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from seawall.sampling.noise import id_codes, negative_clocks
from seawall.sampling.tiles import Buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """What rows keep; made so that every number is the neutral one where a filter is off.

    Attributes:
        top_k: int64 [F], the vocabulary size where off.
        top_p: float64 [F], infinity where off.
        min_p: float64 [F], 0 where off.
    """

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def take(self, rows: Tensor) -> "Filters":
        """The filters of some rows."""
        return Filters(top_k=self.top_k[rows], top_p=self.top_p[rows], min_p=self.min_p[rows])

    def part(self, rows: slice) -> "Filters":
        """Views of some rows."""
        return Filters(top_k=self.top_k[rows], top_p=self.top_p[rows], min_p=self.min_p[rows])


class Race:
    """Draws among the ids of some rows, given in falling order, in one or more runs of columns.

    Attributes:
        ids: int64 [F] drawn so far, 0 where nothing could be.
        logits: float32 [F] their processed logits.
        open: bool [F] rows whose kept ids may go on beyond the columns seen.
    """

    def __init__(self, filters: Filters, keys_F2: Tensor, peak_F: Tensor, mass_F: Tensor) -> None:
        """`mass_F` float64 is what top_p is a part of: sum of exp(logit - peak) in the k best."""
        self._filters = filters
        self._keys = keys_F2
        self._peak = peak_F
        self._enough = filters.top_p * mass_F
        self._before = torch.zeros_like(mass_F)
        self._score = torch.full_like(mass_F, -torch.inf)
        self._column = 0
        self.ids = torch.zeros_like(filters.top_k)
        self.logits = torch.full_like(peak_F, torch.nan)
        self.open = torch.ones_like(filters.top_k, dtype=torch.bool)

    def run(self, values_FC: Tensor, ids_FC: Tensor, buffers: Buffers) -> None:
        """Take in the next columns of every row."""
        width = values_FC.shape[1]
        step = max(1, buffers.plan.draw_ids // width)
        for first in range(0, values_FC.shape[0], step):
            part = slice(first, min(first + step, values_FC.shape[0]))
            self._run_rows(part, values_FC[part], ids_FC[part], buffers)
        self._column += width

    def _run_rows(self, part: slice, values: Tensor, ids: Tensor, buffers: Buffers) -> None:
        rows, width = values.shape
        powers = relative_powers(values, self._peak[part])
        keep = self._kept(part, powers)
        self.open[part].logical_and_(keep[:, -1]).logical_and_(values[:, -1] > -torch.inf)
        weights = powers.float().masked_fill_(keep.logical_not_(), 0.0)
        clocks = negative_clocks(
            id_codes(ids),
            self._keys[part],
            buffers.ints(1, rows, width),
            buffers.ints(2, rows, width),
        )
        fastest, place = weights.div_(clocks).min(1)
        score = fastest.double().neg_().log_()
        better = score > self._score[part]
        self._score[part] = torch.where(better, score, self._score[part])
        drawn = ids.gather(1, place[:, None]).view(-1)
        self.ids[part] = torch.where(better, drawn, self.ids[part])
        logits = values.gather(1, place[:, None]).view(-1)
        self.logits[part] = torch.where(better, logits, self.logits[part])

    def _kept(self, part: slice, powers: Tensor) -> Tensor:
        """Which columns pass; they are a prefix of each row."""
        filters, columns = self._filters.part(part), powers.shape[1]
        mass = powers.cumsum(1).add_(self._before[part][:, None])
        last = mass[:, -1].clone()
        keep = mass.sub_(powers) < self._enough[part][:, None]
        self._before[part] = last
        numbers = torch.arange(self._column, self._column + columns, device=powers.device)
        keep.logical_and_(numbers < filters.top_k[:, None])
        keep.logical_and_(powers >= filters.min_p[:, None])
        if self._column == 0:
            keep[:, 0] = True
        return keep


def relative_powers(values: Tensor, peak_F: Tensor) -> Tensor:
    """Exp(logit - peak) in float64, at most 1 even where the peak came from another product."""
    return (values - peak_F[:, None]).clamp_(max=0.0).double().exp_()
