"""Two classes of layers behind one backend: those that see everything, and those with a window.

Each class has a backend with a pool, a workspace and a page table of its own, and counts its layers
by itself:

    layer of the model   0       1      2       3
    window               W       -      W       -
    backend, its layer   win 0   all 0  win 1   all 1

Owns nothing but this table. A model whose layers all have a window has no backend of the first
kind.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from seawall.attention.base import AttentionBackend, AttentionRows
from seawall.memory.kv_scales import LayerScales


class ClassBackend(AttentionBackend, Protocol):
    """A backend for one class of layers."""

    def set_scales(self, scales: Sequence[LayerScales]) -> None:
        """What keys and values are divided by, layer by layer, from here on."""


class HybridAttention:
    """Hands each layer to the backend of its class.

    Args:
        windows: the window of each layer of the model, None where it sees everything.
        full: backend of the layers without a window; None if there are none.
        window: backend of the layers with one.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        *,
        full: ClassBackend | None,
        window: ClassBackend,
    ) -> None:
        assert (full is None) == (None not in windows), "a backend for each class there is"
        self._full = full
        self._window = window
        self._layers: list[tuple[ClassBackend, int]] = []
        for layer, size in enumerate(windows):
            same = [before for before in windows[:layer] if (before is None) == (size is None)]
            backend = full if size is None else window
            assert backend is not None
            self._layers.append((backend, len(same)))

    def set_scales(self, scales: Sequence[LayerScales]) -> None:
        """What keys and values are divided by, layer of the model by layer, from here on."""
        for backend in (self._full, self._window):
            if backend is not None:
                own = [s for s, (of, _) in zip(scales, self._layers, strict=True) if of is backend]
                backend.set_scales(own)

    def prepare(self, rows: AttentionRows) -> None:
        """Lays the step out for both classes."""
        assert rows.window_page_table is not None, "layers with a window have a page table"
        if self._full is not None:
            self._full.prepare(rows)
        self._window.prepare(replace(rows, page_table=rows.window_page_table))

    def run(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int) -> Tensor:
        """Stores k and v in the pool of the layer's class, then attends. Gives [T, H, D]."""
        backend, index = self._layers[layer]
        return backend.run(q_THD, k_TKD, v_TKD, index)
