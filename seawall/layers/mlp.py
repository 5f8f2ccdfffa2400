"""The gated MLP of a decoder layer: down(act(gate(x)) * up(x)), with gate and up in one matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from seawall.kernels import reference

if TYPE_CHECKING:
    import torch

    from seawall.layers.linear import Linear
    from seawall.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """Norm, gate, and the way back into the residual stream.

    `gate_up` is [2I, hidden]: gate rows above up rows.
    """

    norm: RMSNorm
    gate_up: Linear
    down: Linear
    activation: str

    def __call__(self, residual_TH: torch.Tensor) -> None:
        """Adds the layer's output to the residual in place."""
        gate_up = self.gate_up(self.norm(residual_TH))
        self.down.add_to(residual_TH, reference.gate_(gate_up, self.activation))
