"""RMSNorm: one weight vector and its epsilon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from seawall.kernels import reference

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Divides each row by its root mean square and scales it by a weight."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor of x's shape."""
        return reference.rms_norm(x, self.weight, self.eps)

    def apply_(self, x: torch.Tensor) -> torch.Tensor:
        """The same in place."""
        return reference.rms_norm(x, self.weight, self.eps, out=x)
