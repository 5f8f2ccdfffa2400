"""The gated MLP of a decoder layer: down(act(gate(x)) * up(x)), with gate and up in one matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from seawall.layers.ops import PLAIN

if TYPE_CHECKING:
    import torch

    from seawall.layers.linear import Linear
    from seawall.layers.norm import Norm
    from seawall.layers.ops import DecoderOps


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """Norm, gate, and the way back into the residual stream.

    `gate_up` is [2I, hidden]: gate rows above up rows.
    """

    norm: Norm
    gate_up: Linear
    down: Linear
    activation: str
    ops: DecoderOps = PLAIN

    def __call__(self, residual_TH: torch.Tensor) -> None:
        """Adds the layer's output to the residual in place."""
        self.down.add_to(residual_TH, self.gated(residual_TH))

    def gated(self, residual_TH: torch.Tensor) -> torch.Tensor:
        """act(gate) * up, before the way back."""
        gate_up = self.gate_up(self.norm(residual_TH))
        return self.ops.gate_(gate_up, self.activation)


@dataclass(frozen=True, slots=True)
class NormedMLP:
    """A gated MLP whose output is normed before it joins the residual."""

    inner: GatedMLP
    post_norm: Norm

    def __call__(self, residual_TH: torch.Tensor) -> None:
        """Adds the layer's output to the residual in place."""
        output_TH = self.inner.down(self.inner.gated(residual_TH))
        residual_TH.add_(self.post_norm.apply_(output_TH))
