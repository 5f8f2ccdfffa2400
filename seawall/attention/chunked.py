"""Chunked attention on the CPU: one row at a time, over blocks of keys.

Owns its share of the workspace and the layout of the step in progress; only reads the pool. A row
is cut into pieces of at most QUERY_TOKENS queries; a piece attends to earlier positions without a
mask and to itself causally, and the parts are blended by their log-sum-exps. Short pieces are also
quicker: the flash kernel computes the masked half of a causal square of up to 512 queries in full.
Consecutive pages are a view of the pool; others are gathered, a block at a time.

    positions  0                block              first query    end
               [ view or gathered ) [ view or gathered ) [  causal  )

Legend: T = packed tokens, n = queries of a piece, H = query heads, K = kv heads, G = H / K,
D = head_dim, S = positions of a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from seawall.attention.base import AttentionRows
from seawall.core.units import ceil_div
from seawall.device.arena import Arena
from seawall.kv.pool import KVPool
from seawall.memory.footprint_attention import QUERY_TOKENS, AttentionSizes

# The public function keeps the log-sum-exp to itself.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001

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
        blocks: the positions before the first query.
        own: the positions of the queries, where some lie in the pool only; None if the keys and
            values of the step have them all.
    """

    offset: int
    length: int
    blocks: tuple[Block, ...]
    own: Block | None


class ChunkedAttention:
    """Rows that attend one at a time."""

    def __init__(
        self, pool: KVPool, arena: Arena, sizes: AttentionSizes, *, num_heads: int, scale: float
    ) -> None:
        self._pool = pool
        self._group = num_heads // pool.num_kv_heads
        self._scale = scale
        self._block_tokens = sizes.block_tokens
        shape = (pool.num_kv_heads, sizes.block_pages, pool.page_size * pool.head_dim)
        self._keys = arena.empty("attention", shape, pool.dtype)
        self._values = arena.empty("attention", shape, pool.dtype)
        self._page_ids = arena.empty("attention", (sizes.block_pages,), torch.int32)
        self._pieces: list[Piece] = []

    def prepare(self, rows: AttentionRows, offsets: LongArray, chosen: LongArray) -> None:
        """Cuts the chosen rows into pieces."""
        self._pieces = []
        for row in chosen:
            start = int(rows.starts[row])
            end = start + int(rows.lengths[row])
            used = ceil_div(end, self._pool.page_size)
            pages = rows.page_table[rows.seats[row], :used].copy()
            offset = int(offsets[row]) - start
            for first, last in _cuts(start, end, QUERY_TOKENS):
                cached = int(rows.write_starts[row]) > first
                self._pieces.append(self._piece(pages, first, last, offset + first, cached))

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
        # The heads that share keys become the queries of one head: the keys are read once.
        shape = (1, self._pool.num_kv_heads, self._group, self._pool.head_dim)
        blend = _Blend()
        for block in piece.blocks:
            keys, values = self._fetch(block, layer)
            blend.add(*_flash(q_THD.view(shape), keys[None], values[None], scale=self._scale))
        out_THD.view(shape).copy_(blend.result)

    def _run_piece(
        self,
        piece: Piece,
        q_THD: Tensor,
        own: tuple[Tensor, Tensor],
        layer: int,
        out_THD: Tensor,
    ) -> None:
        # Query heads are grouped under their kv head, and the keys repeated without a copy.
        split = (-1, self._pool.num_kv_heads, self._group, self._pool.head_dim)
        q_KGnD = q_THD.view(split).permute(1, 2, 0, 3)
        blend = _Blend()
        keys, values = self._repeat(*own)
        # First, since its keys may lie in the gather buffer that the blocks are about to use.
        blend.add(*_flash(q_KGnD, keys, values, is_causal=True, scale=self._scale))
        for block in piece.blocks:
            keys, values = self._repeat(*self._fetch(block, layer))
            blend.add(*_flash(q_KGnD, keys, values, scale=self._scale))
        out_THD.view(split).copy_(blend.result.permute(2, 0, 1, 3))

    def _repeat(self, keys_KSD: Tensor, values_KSD: Tensor) -> tuple[Tensor, Tensor]:
        return (
            keys_KSD[:, None].expand(-1, self._group, -1, -1),
            values_KSD[:, None].expand(-1, self._group, -1, -1),
        )

    def _fetch(self, block: Block, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a block, [K, S, D]; valid until the next call."""
        keys_KSD, values_KSD = self._pool.keys(layer), self._pool.values(layer)
        part = slice(block.skip, block.skip + block.length)
        if block.pages is None:
            return keys_KSD[:, part], values_KSD[:, part]
        return (
            self._gather(keys_KSD, block.pages, self._keys)[:, part],
            self._gather(values_KSD, block.pages, self._values)[:, part],
        )

    def _gather(self, source_KSD: Tensor, pages: IntArray, buffer: Tensor) -> Tensor:
        num_heads, _, dim = source_KSD.shape
        page_ids = self._page_ids[: len(pages)]
        page_ids.copy_(torch.from_numpy(pages))
        paged = source_KSD.view(num_heads, self._pool.num_pages, -1)
        for head in range(num_heads):
            torch.index_select(paged[head], 0, page_ids, out=buffer[head, : len(pages)])
        return buffer.view(num_heads, -1, dim)

    def _piece(self, pages: IntArray, first: int, last: int, offset: int, cached: bool) -> Piece:
        single = last - first == 1
        return Piece(
            offset=offset,
            length=last - first,
            blocks=tuple(self._blocks(pages, last if single else first)),
            own=self._block(pages, first, last) if cached and not single else None,
        )

    def _blocks(self, pages: IntArray, end: int) -> Iterator[Block]:
        """[0, end) as one run of slots, or as blocks that fit the gather buffer."""
        if end == 0:
            return
        whole = self._block(pages, 0, end)
        if whole.pages is None:
            yield whole
            return
        for first, last in _cuts(0, end, self._block_tokens):
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


class _Blend:
    """Attention over several sets of keys, from the result and log-sum-exp of each.

    The shares of two sets are softmax(lse), so the first result moves towards the second by
    sigmoid(lse2 - lse1).
    """

    def __init__(self) -> None:
        self._result: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, result: Tensor, lse: Tensor) -> None:
        """Blends the result over one more set of keys in; keeps and changes the first result."""
        if self._result is None or self._lse is None:
            self._result, self._lse = result, lse
            return
        if self._result.dtype != torch.float32:
            self._result = self._result.float()
        share = torch.sigmoid(lse - self._lse).unsqueeze(-1)
        self._result.lerp_(result.float(), share)
        self._lse = torch.logaddexp(self._lse, lse)

    @property
    def result(self) -> Tensor:
        """The blend; some set was added."""
        assert self._result is not None
        return self._result
