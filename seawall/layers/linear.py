"""A matrix with an optional bias: projections, fused or not.

Owns its two tensors, which come from an arena. Is not a module: nothing is registered, nothing is
trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b, for W [out, in] and b [out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """A new tensor [T, out]."""
        return functional.linear(x_TI, self.weight, self.bias)

    def add_to(self, residual_TO: torch.Tensor, x_TI: torch.Tensor) -> None:
        """Adds y to the residual in place: one matrix product and no temporary."""
        residual_TO.addmm_(x_TI, self.weight.t())
        if self.bias is not None:
            residual_TO.add_(self.bias)
