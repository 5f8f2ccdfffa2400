"""By what a layer's keys and values are divided before they are stored in eight bits.

    stored = round(x / scale), cut to the range of the dtype;   read = stored * scale

Plain numbers: the checkpoint has them, the pool applies them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerScales:
    """Of one layer; 1 where the checkpoint has none."""

    key: float = 1.0
    value: float = 1.0
