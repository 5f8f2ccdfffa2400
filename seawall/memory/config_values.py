"""Reading numbers out of a model's config.json, whatever name they go by there.

Knows the names that older families use for the same size, and refuses values that cannot be sizes
or numbers. Is torch-free and knows nothing of what the numbers mean.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from seawall.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_ALIASES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "max_position_embeddings": (
        "max_position_embeddings",
        "n_positions",
        "n_ctx",
        "max_seq_len",
        "max_sequence_length",
        "seq_length",
    ),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim"),
}


def size(config: Mapping[str, Any], name: str) -> int:
    """A positive whole number that must be there.

    Raises:
        ConfigError: it is missing, or not a positive whole number.
    """
    value = optional_size(config, name)
    if value is None:
        raise ConfigError(
            f"config.json has no {name} (nor {', '.join(_ALIASES.get(name, (name,)))}); "
            "add it with json_model_override_args"
        )
    return value


def optional_size(config: Mapping[str, Any], name: str) -> int | None:
    """A positive whole number, or None where it is absent or null."""
    for alias in _ALIASES.get(name, (name,)):
        value = config.get(alias)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{alias} is {value!r}, which is not a positive whole number")
        return value
    return None


def number(config: Mapping[str, Any], name: str, default: float) -> float:
    """A finite number, or the default where it is absent or null."""
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{name} is {value!r}, which is not a finite number")
    return float(value)
