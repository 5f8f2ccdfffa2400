"""The decoder's numeric operations in plain PyTorch: the specification, and the CPU path.

Works in place or into `out` where that saves memory, and rounds where transformers rounds, so that
float32 agrees with it to the last bits and bfloat16 closely. Owns no tensor and keeps no state.

Legend: T rows, N heads, D width of a row or a head, R rotated part of a head, I width of the gated
MLP.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(
    x: torch.Tensor, weight_D: torch.Tensor, eps: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, rounded before the weight is applied.

    Args:
        x: [..., D].
        weight_D: [D], in the dtype of x.
        eps: added to the mean square.
        out: where the result goes; may be x itself. None makes a new tensor.
    """
    if x.dtype == torch.float32:
        scale = (x * x).mean(-1, keepdim=True).add_(eps).rsqrt_()
        return torch.mul(x, scale, out=out).mul_(weight_D)
    wide = x.float()
    scale = (wide * wide).mean(-1, keepdim=True).add_(eps).rsqrt_()
    wide.mul_(scale)
    normed = wide.to(x.dtype) if out is None else out.copy_(wide)
    return normed.mul_(weight_D)


def rms_norm_offset(
    x: torch.Tensor, weight_D: torch.Tensor, eps: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The same for a weight that is stored as its distance from 1, and rounded after it.

    Args:
        x: [..., D].
        weight_D: [D], in the dtype of x.
        eps: added to the mean square.
        out: where the result goes; may be x itself. None makes a new tensor.
    """
    if x.dtype == torch.float32:
        scale = (x * x).mean(-1, keepdim=True).add_(eps).rsqrt_()
        normed = torch.mul(x, scale, out=out)
        return normed.addcmul_(normed, weight_D)
    wide = x.float()
    scale = (wide * wide).mean(-1, keepdim=True).add_(eps).rsqrt_()
    wide.mul_(scale)
    wide.addcmul_(wide, weight_D.float())
    return wide.to(x.dtype) if out is None else out.copy_(wide)


def rotate_(x_TND: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
    """Rotates the first R entries of every head in place, pairing entry i with entry i + R/2.

    `sin_TR` carries the sign: its first half is negated, so that
    x[i] = x[i] cos - x[i + R/2] sin and x[i + R/2] = x[i + R/2] cos + x[i] sin.
    """
    rotary_dim = cos_TR.shape[-1]
    half = rotary_dim // 2
    turned = x_TND[..., :rotary_dim]
    swapped = torch.cat((turned[..., half:], turned[..., :half]), dim=-1)
    turned.mul_(cos_TR.unsqueeze(1)).addcmul_(swapped, sin_TR.unsqueeze(1))
    return x_TND


def gate_(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up for [T, 2I] holding gate beside up; the result is the first half, in place."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        functional.silu(gate, inplace=True)
    elif activation == "relu":
        gate.relu_()
    elif activation == "gelu":
        torch.ops.aten.gelu_(gate)
    else:
        assert activation == "gelu_tanh", activation
        torch.ops.aten.gelu_(gate, approximate="tanh")
    return gate.mul_(up)
