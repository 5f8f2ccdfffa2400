"""Numbers on their way into a pool of another dtype, and out of it.

    in    x / scale, cut to the finite range of the pool's dtype, rounded to nearest
    out   the stored number in the reader's dtype, times scale

Nothing becomes infinite by being stored; what is not a number stays so, and ends the request that
it belongs to. Eight-bit tensors are copied and gathered as bytes: few operators know their dtypes.
"""

import torch
from torch import Tensor


def narrowed(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """A new tensor of `dtype`; makes one float32 copy of x on the way."""
    most = torch.finfo(dtype).max
    wide = x.to(torch.float32, copy=True)
    if scale != 1.0:
        wide.div_(scale)
    return wide.clamp_(-most, most).to(dtype)


def widen(stored: Tensor, out: Tensor, scale: float) -> None:
    """Writes the numbers that `stored` stands for to `out`, of the same shape."""
    out.copy_(stored)
    if scale != 1.0:
        out.mul_(scale)


def bits(x: Tensor) -> Tensor:
    """The same memory in a dtype that every operator knows; itself unless it has eight bits."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
