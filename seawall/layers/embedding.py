"""The token embedding: one row a token. Its matrix may be shared with the LM head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Embedding:
    """Looks rows up."""

    weight: torch.Tensor

    def __call__(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """A new tensor [T, hidden]; it becomes the residual stream and is written in place."""
        return functional.embedding(tokens_T, self.weight)


@dataclass(frozen=True, slots=True)
class ScaledEmbedding:
    """Looks rows up and multiplies them by a number; the LM head has the rows as they are."""

    weight: torch.Tensor
    scale: float

    def __call__(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """A new tensor [T, hidden]; it becomes the residual stream and is written in place."""
        return functional.embedding(tokens_T, self.weight).mul_(self.scale)
