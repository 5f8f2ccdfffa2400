"""The scales of an eight-bit KV pool, where a checkpoint has measured some.

Checkpoints call them `model.layers.N.self_attn.k_scale` and `v_scale`, or put them under `attn` or
the projections, or have one `kv_scale` for both. They are no weights: other pools do without them.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from seawall.core.errors import ModelError
from seawall.memory.kv_scales import LayerScales

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import torch

_NAME = re.compile(r"\.layers\.(\d+)\.(?:.+\.)?(k|v|kv)_scale$")


def is_kv_scale(name: str) -> bool:
    """Whether a tensor of a checkpoint is one of these."""
    return _NAME.search(name) is not None


def kv_scales(
    tensors: Iterable[tuple[str, torch.Tensor, Path]], num_layers: int
) -> tuple[LayerScales, ...]:
    """Scales by layer, 1 where a checkpoint has none, from its names, tensors and files.

    Raises:
        ModelError: a scale that is not one positive number, or of a layer that is not there.
    """
    keys, values = [1.0] * num_layers, [1.0] * num_layers
    for name, tensor, path in tensors:
        match = _NAME.search(name)
        if match is None:
            continue
        layer, kind = int(match[1]), match[2]
        if layer >= num_layers:
            raise ModelError(f"{path}: {name}: the model has {num_layers} layers; remove it")
        scale = _number(name, tensor, path)
        if "k" in kind:
            keys[layer] = scale
        if "v" in kind:
            values[layer] = scale
    return tuple(LayerScales(key=k, value=v) for k, v in zip(keys, values, strict=True))


def _number(name: str, tensor: torch.Tensor, path: Path) -> float:
    value = float(tensor.item()) if tensor.numel() == 1 else math.nan
    if not (math.isfinite(value) and value > 0):
        raise ModelError(
            f"{path}: {name} of shape {list(tensor.shape)} is not one positive number; "
            "remove it or choose kv_cache_dtype 'auto'"
        )
    return value
