"""Chunked attention on the CPU: one row at a time, over blocks of keys.

Owns its share of the workspace and the layout of the step in progress; only reads the pool. A row
is cut into pieces of at most QUERY_TOKENS queries; a piece attends to earlier positions without a
mask and to itself causally, and the parts are blended by their log-sum-exps. Short pieces are also
quicker: the fused kernel computes the masked half of a causal square of up to 512 queries in full.
Consecutive pages are a view of the pool; others are gathered, a block at a time.

A pool of another dtype than the model's is read through the gather buffers, a block at a time and
converted on the way. Then a row reads its own step's keys and values from the pool too, so that
what a query sees does not depend on how its prompt was cut or what was cached.

    positions  0                block              first query    end
               [ view or gathered ) [ view or gathered ) [  causal  )

With a window a piece is shorter than the window, so that all its queries see everything from the
last one's first key on, and the keys before that, the edge, through a triangle:

    positions  first query - W + 1     last query - W + 1        first query    end
               [  edge: a triangle of keys  ) [ no mask )          [  causal  )

Legend: T = packed tokens, n = queries of a piece, H = query heads, K = kv heads, G = H / K,
D = head_dim, S = positions of a block.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from seawall.attention.base import AttentionRows, ScoreRules
from seawall.attention.parts import Blend, CappedParts, FusedParts, Parts
from seawall.core.units import ceil_div
from seawall.device.arena import Arena
from seawall.kv.convert import bits, widen
from seawall.kv.pool import KVPool
from seawall.memory.footprint_attention import AttentionSizes

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Some consecutive positions of a row.

    Attributes:
        length: how many.
        skip: slots before the first, from the begin of the pool or of the gathered pages.
        pages: the pages to gather; None if the slots are consecutive in the pool.
    """

    length: int
    skip: int
    pages: IntArray | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some consecutive queries of a row, and the keys they see.

    Attributes:
        offset: packed index of the first query.
        length: how many; a single one counts its own position to `blocks`.
        blocks: the positions before the first query that all of the queries see.
        own: the positions of the queries, where some lie in the pool only; None if the keys and
            values of the step have them all.
        edge: the positions before `blocks` that only some of the queries see; None if there are
            none.
        edge_skip: how many of the first query's window lie before position 0.
    """

    offset: int
    length: int
    blocks: tuple[Block, ...]
    own: Block | None
    edge: Block | None = None
    edge_skip: int = 0


class ChunkedAttention:
    """Rows that attend one at a time."""

    def __init__(
        self,
        pool: KVPool,
        arena: Arena,
        sizes: AttentionSizes,
        *,
        num_heads: int,
        scale: float,
        dtype: torch.dtype,
        rules: ScoreRules,
    ) -> None:
        self._pool = pool
        self._rules = rules
        self._sizes = sizes
        self._converts = dtype != pool.dtype
        self._group = num_heads // pool.num_kv_heads
        shape = (pool.num_kv_heads, sizes.block_pages, pool.page_size * pool.head_dim)
        self._keys = arena.empty("attention", shape, dtype)
        self._values = arena.empty("attention", shape, dtype)
        self._stored = arena.empty("attention", (sizes.stored_pages, shape[2]), pool.dtype)
        self._page_ids = arena.empty("attention", (sizes.block_pages,), torch.int32)
        side = sizes.query_tokens if sizes.mask else 0
        self._mask = arena.empty("attention", (side, side), dtype)
        self._parts: Parts = FusedParts(scale)
        if rules.softcap is not None:
            self._parts = CappedParts(scale, rules.softcap, self._mask)
        self._pieces: list[Piece] = []

    def prepare(self, rows: AttentionRows, offsets: LongArray, chosen: LongArray) -> None:
        """Cuts the chosen rows into pieces."""
        self._pieces = []
        # Here and not once: between steps the workspace may be released and restored.
        self._mask.fill_(-math.inf).tril_(-1)
        for row in chosen:
            start = int(rows.starts[row])
            end = start + int(rows.lengths[row])
            used = ceil_div(end, self._pool.page_size)
            pages = rows.page_table[rows.seats[row], :used].copy()
            offset = int(offsets[row]) - start
            for first, last in _cuts(start, end, self._sizes.query_tokens):
                from_pool = self._converts or int(rows.write_starts[row]) > first
                self._pieces.append(self._piece(pages, first, last, offset + first, from_pool))

    def run(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int, out_THD: Tensor) -> None:
        """Attends for the pieces of the step; the pool has its keys and values already."""
        for piece in self._pieces:
            part = slice(piece.offset, piece.offset + piece.length)
            if piece.length == 1:
                self._run_single(piece, q_THD[part], layer, out_THD[part])
            elif piece.own is None:
                own = (k_TKD[part].transpose(0, 1), v_TKD[part].transpose(0, 1))
                self._run_piece(piece, q_THD[part], own, layer, out_THD[part])
            else:
                own = self._fetch(piece.own, layer)
                self._run_piece(piece, q_THD[part], own, layer, out_THD[part])

    def _run_single(self, piece: Piece, q_THD: Tensor, layer: int, out_THD: Tensor) -> None:
        shape = (self._pool.num_kv_heads, self._group, self._pool.head_dim)
        blend = Blend()
        for block in piece.blocks:
            blend.add(*self._parts.single(q_THD.view(shape), *self._fetch(block, layer)))
        if self._rules.sinks is not None:
            blend.add_sink(self._rules.sinks[layer].view(shape[:2]))
        out_THD.view(shape).copy_(blend.result)

    def _run_piece(
        self,
        piece: Piece,
        q_THD: Tensor,
        own: tuple[Tensor, Tensor],
        layer: int,
        out_THD: Tensor,
    ) -> None:
        # Query heads are grouped under their kv head.
        split = (-1, self._pool.num_kv_heads, self._group, self._pool.head_dim)
        q_KGnD = q_THD.view(split).permute(1, 2, 0, 3)
        blend = Blend()
        # First, since its keys may lie in the gather buffer that the blocks are about to use.
        blend.add(*self._parts.causal(q_KGnD, *own))
        for block in piece.blocks:
            blend.add(*self._parts.masked(q_KGnD, *self._fetch(block, layer), None))
        if piece.edge is not None:
            width = slice(piece.edge_skip, piece.edge_skip + piece.edge.length)
            mask = self._mask[: piece.length, width]
            blend.add(*self._parts.masked(q_KGnD, *self._fetch(piece.edge, layer), mask))
        if self._rules.sinks is not None:
            blend.add_sink(self._rules.sinks[layer].view(*split[1:3], 1))
        out_THD.view(split).copy_(blend.result.permute(2, 0, 1, 3))

    def _fetch(self, block: Block, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a block, [K, S, D]; valid until the next call."""
        scales = self._pool.scales(layer)
        return (
            self._read(self._pool.keys(layer), block, self._keys, scales.key),
            self._read(self._pool.values(layer), block, self._values, scales.value),
        )

    def _read(self, source_KSD: Tensor, block: Block, buffer: Tensor, scale: float) -> Tensor:
        part = slice(block.skip, block.skip + block.length)
        num_heads, _, dim = source_KSD.shape
        if block.pages is not None:
            self._gather(source_KSD, block.pages, buffer, scale)
            return buffer.view(num_heads, -1, dim)[:, part]
        if not self._converts:
            return source_KSD[:, part]
        out_KSD = buffer.view(num_heads, -1, dim)[:, : block.length]
        widen(source_KSD[:, part], out_KSD, scale)
        return out_KSD

    def _gather(self, source_KSD: Tensor, pages: IntArray, buffer: Tensor, scale: float) -> None:
        """Pages side by side into `buffer`, head by head."""
        count = len(pages)
        page_ids = self._page_ids[:count]
        page_ids.copy_(torch.from_numpy(pages))
        paged = source_KSD.view(len(buffer), self._pool.num_pages, -1)
        for head in range(len(buffer)):
            if self._converts:
                stored = self._stored[:count]
                torch.index_select(bits(paged[head]), 0, page_ids, out=bits(stored))
                widen(stored, buffer[head, :count], scale)
            else:
                torch.index_select(paged[head], 0, page_ids, out=buffer[head, :count])

    def _piece(self, pages: IntArray, first: int, last: int, offset: int, from_pool: bool) -> Piece:
        if last - first == 1:
            blocks = tuple(self._blocks(pages, self._first_seen(first), last))
            return Piece(offset=offset, length=1, blocks=blocks, own=None)
        begin, edge, skip = self._first_seen(last - 1), None, 0
        if self._first_seen(first) < begin:
            # All queries see the last one's first key, so that no row of the mask is empty.
            begin += 1
            edge = self._block(pages, self._first_seen(first), begin)
            skip = last - first - edge.length
        return Piece(
            offset=offset,
            length=last - first,
            blocks=tuple(self._blocks(pages, begin, first)),
            own=self._block(pages, first, last) if from_pool else None,
            edge=edge,
            edge_skip=skip,
        )

    def _first_seen(self, position: int) -> int:
        window = self._rules.window
        return 0 if window is None else max(0, position - window + 1)

    def _blocks(self, pages: IntArray, begin: int, end: int) -> Iterator[Block]:
        """[begin, end) as one run of slots, or as blocks that fit the gather buffer."""
        if begin == end:
            return
        whole = self._block(pages, begin, end)
        # Keys that are converted, or whose scores are written out, come a block at a time.
        is_bounded = self._converts or self._rules.softcap is not None
        if whole.pages is None and (not is_bounded or end - begin <= self._sizes.block_tokens):
            yield whole
            return
        for first, last in _cuts(begin, end, self._sizes.block_tokens):
            yield self._block(pages, first, last)

    def _block(self, pages: IntArray, first: int, last: int) -> Block:
        page_size = self._pool.page_size
        used = pages[first // page_size : ceil_div(last, page_size)]
        skip = first % page_size
        if len(used) == 1 or bool((np.diff(used) == 1).all()):
            return Block(length=last - first, skip=int(used[0]) * page_size + skip, pages=None)
        return Block(length=last - first, skip=skip, pages=used)


def _cuts(begin: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    """[begin, end) cut at the multiples of `step`."""
    while begin < end:
        cut = min(end, (begin // step + 1) * step)
        yield begin, cut
        begin = cut
