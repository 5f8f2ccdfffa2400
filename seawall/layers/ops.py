"""Which kernels a layer's arithmetic runs on: the plain twins, or Triton's on CUDA.

Owns the protocol and the choice. A model asks once, when it is made; its layers keep the answer.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol, cast

from seawall.kernels import reference

if TYPE_CHECKING:
    import torch

# Imported when asked for: only CUDA needs triton.
_BY_DEVICE = {"cuda": "seawall.kernels.triton_ops"}


class DecoderOps(Protocol):
    """The operations of a decoder layer that are no matrix product; see kernels/reference.py."""

    def rms_norm(
        self, x: torch.Tensor, weight_D: torch.Tensor, eps: float, *, out: torch.Tensor | None = ...
    ) -> torch.Tensor:
        """Root-mean-square norm over the last dimension."""
        ...

    def rotate_(
        self, x_TND: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor
    ) -> torch.Tensor:
        """Rotates the first R entries of every head in place."""
        ...

    def gate_(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """act(gate) * up, in place of the gate."""
        ...


PLAIN: DecoderOps = cast("DecoderOps", reference)


def decoder_ops(device: torch.device) -> DecoderOps:
    """The operations for tensors of a device."""
    name = _BY_DEVICE.get(device.type)
    return PLAIN if name is None else cast("DecoderOps", importlib.import_module(name))
