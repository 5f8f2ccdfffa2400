"""The KV pool: keys and values of every layer, in pages.

Owns one arena tensor of the account "kv". Who holds which page is the cache's business; here a
page is `page_size` consecutive slots, and a slot is a number.

    storage  [layer, K or V, kv head, slot, head_dim]     slot = page_id * page_size + offset

The heads are outermost, so the slots of a run of consecutive pages are one contiguous stretch per
head: a row is read front to back, and a run needs no gather. Measured against [slot, head, dim]
(CPU, 64 rows of mean length 300, 7 layers, 2 kv heads of 64, float32): 6.1 against 8.5 ms.

The pool may have another dtype than the model: `write` converts, and who reads converts back
(convert.py). Eight-bit numbers are divided by a scale for each layer first.

Legend: T = tokens, K = kv heads, D = head_dim, S = slots.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from seawall.device.arena import Arena
from seawall.kv.convert import bits, narrowed
from seawall.memory.kv_scales import LayerScales


class KVPool:
    """Keys and values of every layer. One writer: the attention backend."""

    def __init__(
        self,
        arena: Arena,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        self._scales = (LayerScales(),) * num_layers
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        num_slots = num_pages * page_size
        shape = (num_layers, 2, num_kv_heads, num_slots, head_dim)
        storage = arena.zeros("kv", shape, dtype)
        self._keys = [storage[layer, 0] for layer in range(num_layers)]
        self._values = [storage[layer, 1] for layer in range(num_layers)]

    @property
    def num_slots(self) -> int:
        """Slots of the pool: num_pages * page_size."""
        return self.num_pages * self.page_size

    def keys(self, layer: int) -> Tensor:
        """Keys of a layer, [K, S, D], contiguous; a view."""
        return self._keys[layer]

    def values(self, layer: int) -> Tensor:
        """Values of a layer, [K, S, D], contiguous; a view."""
        return self._values[layer]

    def write(self, layer: int, slot_ids: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Stores token t in slot slot_ids[t]; the ids are int64 and distinct."""
        scales = self._scales[layer]
        self._store(self._keys[layer], slot_ids, k_TKD, scales.key)
        self._store(self._values[layer], slot_ids, v_TKD, scales.value)

    def scales(self, layer: int) -> LayerScales:
        """What the layer's keys and values were divided by."""
        return self._scales[layer]

    def set_scales(self, scales: Sequence[LayerScales]) -> None:
        """Use other scales from here on; nothing that is stored may be read afterwards."""
        assert len(scales) == self.num_layers
        self._scales = tuple(scales)

    def _store(self, target_KSD: Tensor, slot_ids: Tensor, x_TKD: Tensor, scale: float) -> None:
        if x_TKD.dtype != self.dtype:
            x_TKD = narrowed(x_TKD, self.dtype, scale)
        bits(target_KSD).index_copy_(1, slot_ids, bits(x_TKD).transpose(0, 1))
