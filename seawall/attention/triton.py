"""Attention on CUDA by Triton kernels: mixed steps over the paged pool, no toolchain needed.

Owns the layout of the step in progress and the workspace of shares. The pool's content is written
here and nowhere else. A step's rows take one of two tile shapes in one kernel:

    decode   rows of one token; few of them are cut into shares of their keys, which are merged
    chunk    rows of several tokens, cut into tiles, the longest contexts first

prepare() copies the step's layout up without waiting for anything; run() only queues kernels.

Legend: T = packed tokens, H = query heads, K = kv heads, D = head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from seawall.attention.base import PLAIN_SCORES, AttentionRows, ScoreRules
from seawall.device.arena import Arena
from seawall.device.runtime import Transfer
from seawall.kernels import triton_attention as kernels
from seawall.kernels.triton_attention import MAX_SPLITS, Partials, Rows, Scoring, Shapes, Tiles
from seawall.kv.pool import KVPool
from seawall.memory.footprint_cuda import SPLIT_TILES, partial_elements
from seawall.memory.kv_scales import LayerScales

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
# A share of fewer keys than this costs more in merging than it gains.
_LEAST_SHARE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Where a step's layout comes from.

    Attributes:
        page_table: int32 [seats, pages_per_seq] on the device, kept up to date by its owner.
        transfers: used in turn, one a step.
    """

    page_table: Tensor
    transfers: Sequence[Transfer]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A step's layout on the device."""

    slot_ids: Tensor
    rows: Rows
    chunks: Tiles
    decodes: Tiles
    num_splits: int


class TritonAttention:
    """The backend "triton". One writer: the engine's core thread.

    Args:
        pool: where keys and values live; written by `run`.
        arena: makes the workspace, exactly `attention_workspace_bytes` of footprint_cuda.
        inputs: the device's page table, and the way up.
        num_heads: query heads, a multiple of the pool's kv heads.
        scale: factor on the scores, usually 1 / sqrt(head_dim).
        dtype: of the model.
        rules: window, cap and sinks of the pool's layers.
    """

    def __init__(
        self,
        pool: KVPool,
        arena: Arena,
        *,
        inputs: Inputs,
        num_heads: int,
        scale: float,
        dtype: torch.dtype,
        rules: ScoreRules = PLAIN_SCORES,
    ) -> None:
        self._pool = pool
        self._inputs = inputs
        self._turn = 0
        self._shapes = Shapes.of(num_heads, pool.num_kv_heads, pool.head_dim, dtype.itemsize)
        sums, logs = partial_elements(num_heads, pool.num_kv_heads, pool.head_dim)
        self._partials = Partials(
            sums=arena.empty("attention", (sums,), torch.float32),
            logs=arena.empty("attention", (logs,), torch.float32),
        )
        self._scale = scale
        self._rules = rules
        self._scoring = self._make_scoring()
        self._step: _Step | None = None

    def set_scales(self, scales: Sequence[LayerScales]) -> None:
        """What keys and values are divided by, layer by layer, from here on."""
        self._pool.set_scales(scales)
        self._scoring = self._make_scoring()

    def prepare(self, rows: AttentionRows) -> None:
        """Lays the step out; called once before the layers run."""
        self._turn = (self._turn + 1) % len(self._inputs.transfers)
        transfer = self._inputs.transfers[self._turn]
        transfer.begin()
        offsets = np.cumsum(rows.lengths, dtype=np.int64) - rows.lengths
        slot_ids = transfer.put(self._slots(rows, offsets))
        on_device = Rows(
            seats=transfer.put(rows.seats),
            starts=transfer.put(rows.starts),
            lengths=transfer.put(rows.lengths),
            offsets=transfer.put(offsets.astype(np.int32)),
            page_table=self._inputs.page_table,
        )
        decodes = np.flatnonzero(rows.lengths == 1).astype(np.int32)
        chunk_rows, chunk_firsts = self._chunk_tiles(rows)
        self._step = _Step(
            slot_ids=slot_ids,
            rows=on_device,
            chunks=Tiles(
                rows=transfer.put(chunk_rows),
                firsts=transfer.put(chunk_firsts),
                shape=self._shapes.chunk,
            ),
            decodes=Tiles(
                rows=transfer.put(decodes),
                firsts=transfer.put(np.zeros(len(decodes), np.int32)),
                shape=self._shapes.decode,
            ),
            num_splits=self._num_splits(rows, decodes),
        )
        transfer.send()
        transfer.finish()

    def run(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int) -> Tensor:
        """Stores k and v, then attends, as `rules` say. Gives [T, H, D]."""
        step, pool = self._step, self._pool
        assert step is not None
        keys, values, scales = pool.keys(layer), pool.values(layer), pool.scales(layer)
        kernels.store(k_TKD, v_TKD, keys, values, step.slot_ids, (scales.key, scales.value))
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        for tiles, num_splits in ((step.chunks, 1), (step.decodes, step.num_splits)):
            kernels.attend(
                q_THD,
                keys,
                values,
                out_THD,
                step.rows,
                tiles,
                shapes=self._shapes,
                page_size=pool.page_size,
                scoring=self._scoring[layer],
                partials=self._partials,
                num_splits=num_splits,
            )
        return out_THD

    def _make_scoring(self) -> list[Scoring]:
        """How each layer makes its scores."""
        rules, pool = self._rules, self._pool
        return [
            Scoring(
                scale=self._scale,
                key_scale=pool.scales(layer).key,
                value_scale=pool.scales(layer).value,
                softcap=rules.softcap,
                window=rules.window,
                sinks=None if rules.sinks is None else rules.sinks[layer],
            )
            for layer in range(pool.num_layers)
        ]

    def _slots(self, rows: AttentionRows, offsets: LongArray) -> IntArray:
        """The slot of each packed token, -1 where its key and value are in the pool already."""
        lengths = rows.lengths
        positions = np.arange(int(lengths.sum())) - np.repeat(offsets - rows.starts, lengths)
        page, within = np.divmod(positions, self._pool.page_size)
        pages = rows.page_table[np.repeat(rows.seats, lengths), page]
        slots = pages * np.int32(self._pool.page_size) + within.astype(np.int32)
        cached = rows.write_starts > rows.starts
        if cached.any():
            slots[positions < np.repeat(rows.write_starts, lengths)] = -1
        return slots

    def _chunk_tiles(self, rows: AttentionRows) -> tuple[IntArray, IntArray]:
        """Row and first query of the tiles of longer rows, those with most keys first."""
        chosen = np.flatnonzero(rows.lengths > 1)
        tokens = self._shapes.chunk.tokens
        counts = -(-rows.lengths[chosen] // tokens)
        tile_rows = np.repeat(chosen, counts)
        ends = np.cumsum(counts)
        firsts = (np.arange(len(tile_rows)) - np.repeat(ends - counts, counts)) * tokens
        order = np.argsort(-(rows.starts[tile_rows] + firsts), kind="stable")
        return tile_rows[order].astype(np.int32), firsts[order].astype(np.int32)

    def _num_splits(self, rows: AttentionRows, decodes: IntArray) -> int:
        """Into how many shares a few decode rows are cut, so that they fill the device."""
        if len(decodes) == 0:
            return 1
        wanted = SPLIT_TILES // (len(decodes) * self._pool.num_kv_heads)
        if not rows.captured:
            longest = int(rows.starts[decodes].max()) + 1
            wanted = min(wanted, longest // _LEAST_SHARE)
        return max(1, min(MAX_SPLITS, wanted))
