"""Attention on the CPU in plain PyTorch ("torch_native"): mixed steps over the paged pool.

Owns the layout of the step in progress; the pool's content is written here and nowhere else. The
rows of a step take one of two ways, chosen in prepare():

    ragged   (ragged.py)    decode rows and short chunks, all at once
    chunked  (chunked.py)   longer chunks, and what the ragged workspace has no room for

Either way a result depends on its own row only, and no mask grows with chunk times context.

Legend: T = packed tokens, H = query heads, K = kv heads, D = head_dim.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from seawall.attention.base import PLAIN_SCORES, AttentionRows, ScoreRules
from seawall.attention.chunked import ChunkedAttention
from seawall.attention.ragged import RaggedAttention
from seawall.device.arena import Arena
from seawall.device.dtypes import dtype_name
from seawall.kv.pool import KVPool
from seawall.memory.footprint import Limits
from seawall.memory.footprint_attention import AttentionShape, AttentionSizes, attention_sizes
from seawall.memory.kv_scales import LayerScales

LongArray = npt.NDArray[np.int64]


class TorchAttention:
    """The CPU backend. One writer: the engine's core thread.

    Args:
        pool: where keys and values live; written by `run`.
        arena: makes the workspace, exactly `attention_workspace_bytes`.
        num_heads: query heads, a multiple of the pool's kv heads.
        scale: factor on the scores, usually 1 / sqrt(head_dim).
        limits: the largest step.
        dtype: of the model; None if the pool has the same.
        rules: window, cap and sinks of the pool's layers.
    """

    def __init__(
        self,
        pool: KVPool,
        arena: Arena,
        *,
        num_heads: int,
        scale: float,
        limits: Limits,
        dtype: torch.dtype | None = None,
        rules: ScoreRules = PLAIN_SCORES,
    ) -> None:
        shape = AttentionShape(
            num_heads=num_heads,
            num_kv_heads=pool.num_kv_heads,
            head_dim=pool.head_dim,
            windows=() if rules.window is None else (rules.window,),
            attention_softcap=rules.softcap,
        )
        model_dtype = pool.dtype if dtype is None else dtype
        sizes = attention_sizes(shape, dtype_name(model_dtype), limits, dtype_name(pool.dtype))
        self._pool = pool
        self._store = _Store(pool, arena, sizes)
        self._ragged = RaggedAttention(
            pool, arena, sizes, num_heads=num_heads, scale=scale, rules=rules
        )
        self._chunked = ChunkedAttention(
            pool, arena, sizes, num_heads=num_heads, scale=scale, dtype=model_dtype, rules=rules
        )

    def set_scales(self, scales: Sequence[LayerScales]) -> None:
        """What keys and values are divided by, layer by layer, from here on."""
        self._pool.set_scales(scales)

    def prepare(self, rows: AttentionRows) -> None:
        """Lays the step out; called once before the layers run."""
        offsets = np.zeros(len(rows.lengths), dtype=np.int64)
        np.cumsum(rows.lengths[:-1], out=offsets[1:])
        self._store.prepare(rows, offsets)
        ragged_rows = self._ragged.choose(rows)
        self._ragged.prepare(rows, offsets, ragged_rows)
        self._chunked.prepare(rows, offsets, np.flatnonzero(~ragged_rows))

    def run(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int) -> Tensor:
        """Stores k and v, then attends, as `rules` say. Gives [T, H, D]."""
        self._store.run(k_TKD, v_TKD, layer)
        out_THD = q_THD.new_empty(q_THD.shape)
        self._ragged.run(q_THD, layer, out_THD)
        self._chunked.run(q_THD, k_TKD, v_TKD, layer, out_THD)
        return out_THD


class _Store:
    """Which tokens of the step go to which slots."""

    def __init__(self, pool: KVPool, arena: Arena, sizes: AttentionSizes) -> None:
        self._pool = pool
        self._slot_ids = arena.empty("attention", (sizes.step_tokens,), torch.int64)
        self._token_ids = arena.empty("attention", (sizes.step_tokens,), torch.int64)
        self._num_stored = 0
        self._all = True

    def prepare(self, rows: AttentionRows, offsets: LongArray) -> None:
        num_tokens = int(rows.lengths.sum())
        positions = np.arange(num_tokens) - np.repeat(offsets - rows.starts, rows.lengths)
        stored = positions >= np.repeat(rows.write_starts, rows.lengths)
        self._all = bool(stored.all())
        seats = np.repeat(rows.seats, rows.lengths)
        if not self._all:
            positions, seats = positions[stored], seats[stored]
            token_ids = torch.from_numpy(np.flatnonzero(stored))
            self._token_ids[: len(token_ids)].copy_(token_ids)
        self._num_stored = len(positions)
        page, offset = np.divmod(positions, self._pool.page_size)
        slot_ids = rows.page_table[seats, page].astype(np.int64) * self._pool.page_size + offset
        self._slot_ids[: self._num_stored].copy_(torch.from_numpy(slot_ids))

    def run(self, k_TKD: Tensor, v_TKD: Tensor, layer: int) -> None:
        if not self._all:
            token_ids = self._token_ids[: self._num_stored]
            k_TKD = k_TKD.index_select(0, token_ids)
            v_TKD = v_TKD.index_select(0, token_ids)
        self._pool.write(layer, self._slot_ids[: self._num_stored], k_TKD, v_TKD)
