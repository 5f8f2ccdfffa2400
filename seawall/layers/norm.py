"""RMSNorm in its two forms: one weight vector and its epsilon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from seawall.kernels import reference
from seawall.layers.ops import PLAIN

if TYPE_CHECKING:
    import torch

    from seawall.layers.ops import DecoderOps


class Norm(Protocol):
    """A norm over the last dimension."""

    @property
    def weight(self) -> torch.Tensor:
        """As the checkpoint has it."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor of x's shape."""

    def apply_(self, x: torch.Tensor) -> torch.Tensor:
        """The same in place."""


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Divides each row by its root mean square and scales it by a weight."""

    weight: torch.Tensor
    eps: float
    ops: DecoderOps = PLAIN

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor of x's shape."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def apply_(self, x: torch.Tensor) -> torch.Tensor:
        """The same in place."""
        return self.ops.rms_norm(x, self.weight, self.eps, out=x)


@dataclass(frozen=True, slots=True)
class OffsetRMSNorm:
    """RMSNorm whose weight is stored as its distance from 1."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor of x's shape."""
        return reference.rms_norm_offset(x, self.weight, self.eps)

    def apply_(self, x: torch.Tensor) -> torch.Tensor:
        """The same in place."""
        return reference.rms_norm_offset(x, self.weight, self.eps, out=x)
