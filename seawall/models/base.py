"""What the engine sees of a model: a forward pass to hidden rows, and the matrix that scores them.

Owns the protocol and the value HeadWeights. A model never applies its own LM head: the sampling
part does, tile by tile, within its own account.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from seawall.attention.base import AttentionOp
    from seawall.models.weights import Extras


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadWeights:
    """logits = softcap(scale * (hidden weight^T + bias)), with softcap(x) = c tanh(x / c).

    `weight` is [V, hidden], `bias` [V] or None; `softcap` None means no cap.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """All logits of a few rows, [T, V]: for load-time checks and tests, not for serving."""
        logits = torch.nn.functional.linear(hidden_TH, self.weight, self.bias) * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


class CausalLM(Protocol):
    """A loaded decoder-only language model."""

    def forward(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionOp
    ) -> torch.Tensor:
        """Hidden rows [T, hidden] after the final norm, of packed tokens at their positions."""
        ...

    @property
    def head(self) -> HeadWeights:
        """What turns hidden rows into logits."""
        ...

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """Every checkpoint name and the tensor, or view of a fused one, that holds it."""
        ...

    @property
    def extras(self) -> Extras:
        """What else a checkpoint of this model may carry."""
        ...
