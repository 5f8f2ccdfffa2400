"""Exact top-k over tiles: the entries a stable sort of the whole row would put first.

Owns: selection in a tile, also among equal logits, and the merge with what was best so far.

Legend: R rows, T ids of a tile, k entries kept.

Equal logits rank by id, lowest first. A partial selection does not promise that, so it takes one
entry more than asked: rows whose k+1 best all differ are done. The others (masked rows, mostly,
whose -inf are all equal) are selected again on integer keys that no two ids share.
"""

import torch
from torch import Tensor

from seawall.sampling.tiles import Buffers


class RunningTopK:
    """The k best logits and ids of rows seen so far, best first; its caller is its writer.

    Attributes:
        values: float32 [R, min(k, ids seen)].
        ids: int64, likewise.
    """

    def __init__(self, num_best: int) -> None:
        self._num_best = num_best
        self.values: Tensor | None = None
        self.ids: Tensor | None = None

    def merge(self, tile_RT: Tensor, start: int, buffers: Buffers) -> None:
        """Take in the tile of ids [start, start + T)."""
        values, ids = tile_topk(tile_RT, self._num_best, buffers)
        ids.add_(start)
        if self.values is None or self.ids is None:
            self.values, self.ids = values, ids
            return
        # Stable: what was found before has the lower ids and comes first among equals.
        values = torch.cat((self.values, values), 1)
        ids = torch.cat((self.ids, ids), 1)
        self.values = self.ids = None
        values, order = values.sort(dim=1, descending=True, stable=True)
        self.values = values[:, : self._num_best].contiguous()
        del values
        self.ids = ids.gather(1, order[:, : self._num_best])


def tile_topk(tile_RT: Tensor, num_best: int, buffers: Buffers) -> tuple[Tensor, Tensor]:
    """The best logits of a tile and their places in it, [R, min(num_best, T)] each."""
    width = tile_RT.shape[1]
    kept = min(num_best, width)
    values, places = tile_RT.topk(min(kept + 1, width), dim=1)
    tied = (values[:, 1:] == values[:, :-1]).any(1).nonzero().view(-1)
    values, places = values[:, :kept], places[:, :kept]
    step = buffers.plan.scratch_rows
    for first in range(0, tied.shape[0], step):
        some = tied[first : first + step]
        values[some], places[some] = _keyed_topk(tile_RT, some, kept, buffers)
    return values, places


def _keyed_topk(
    tile_RT: Tensor, some: Tensor, kept: int, buffers: Buffers
) -> tuple[Tensor, Tensor]:
    """Select rows `some` by keys: logit in the high half, ordered as integers, place in the low."""
    rows, width = some.shape[0], tile_RT.shape[1]
    logits = buffers.floats(rows, width)
    torch.index_select(tile_RT, 0, some, out=logits)
    logits.add_(0.0)  # -0.0 becomes 0.0: they are equal as floats, so their bits must be
    bits = logits.view(torch.int32)
    flips = buffers.ints(1, rows, width)
    torch.bitwise_right_shift(bits, 31, out=flips)
    bits.bitwise_xor_(flips.bitwise_and_(0x7FFFFFFF))
    keys = buffers.longs(rows, width).copy_(bits).bitwise_left_shift_(32)
    keys.add_(torch.arange(width - 1, -1, -1, device=keys.device))
    places = keys.topk(kept, dim=1).indices
    flat = places + (some * width)[:, None]
    return tile_RT.view(-1)[flat], places
