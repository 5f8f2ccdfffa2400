"""Noise of the sampler: a pure function of (seed, position, token id), with no state to carry.

Owns: the hash and the clocks made of it. It is not the draw (seawall.sampling.sampler).

Legend: R rows, n ids of a tile or candidates of a row.

The draw is the Gumbel-max draw in its other form. With E exponential, -log(E) is a Gumbel variate,
so the id with the largest logit/T - log(E) is the one with the largest exp(logit/T) / E, whose
numerator the log-sum-exp needs anyway.

A row's 64-bit key is mixed from seed and position in int64. An id's variate is mixed from that key
and the id in int32, whose products wrap, because this runs once per row and id. Shifts of signed
integers copy the sign; where that would lose bits they are masked.

    v = (31 random bits + 1/2) * 2**-31 * (1 - 2**-24)   in (0, 1) strictly, also rounded to float32
    E = -log1p(-v)                                       finest where it matters: small E, to 2**-32
"""

import torch
from torch import Tensor

_MASK31 = 0x7FFFFFFF
# Odd multipliers: the best for avalanche of some hundred random triples.
_ID_STEP = 0x2423EA21
_MIX_1 = 0x625DD03B
_MIX_2 = 0xC1CA15D7 - (1 << 32)
_KEY_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_KEY_MIX_A = 0xD6E8FEB86659FD93 - (1 << 64)
_KEY_MIX_B = 0xA0761D6478BD642F - (1 << 64)
_UNIT = 2.0**-31 * (1.0 - 2.0**-24)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    return z.bitwise_right_shift(bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix64(z: Tensor) -> Tensor:
    z = _shift_right(z, 32).bitwise_xor_(z).mul_(_KEY_MIX_A)
    z = _shift_right(z, 29).bitwise_xor_(z).mul_(_KEY_MIX_B)
    return _shift_right(z, 32).bitwise_xor_(z)


def row_keys(seeds_R: Tensor, positions_R: Tensor) -> Tensor:
    """Keys of rows, int32 [R, 2], from int64 seeds and positions."""
    mixed = _mix64(_mix64(seeds_R + _KEY_STEP).add_(positions_R * _KEY_STEP))
    return mixed.view(torch.int32).view(-1, 2)


def id_codes(ids: Tensor) -> Tensor:
    """What the hash takes of token ids: int32 of the same shape. `ids` is int32 or int64."""
    return torch.mul(ids.to(torch.int32), _ID_STEP)


def negative_clocks(codes: Tensor, keys_R2: Tensor, hashes: Tensor, spare: Tensor) -> Tensor:
    """Negative exponential variates, float32 [R, n], strictly below zero.

    Args:
        codes: `id_codes` of the ids, int32 [n] or [R, n].
        keys_R2: `row_keys` of the rows.
        hashes: int32 [R, n], overwritten.
        spare: int32 [R, n], overwritten; the result is a float32 view of it.
    """
    h, t = hashes, spare
    torch.bitwise_xor(codes, keys_R2[:, :1], out=h)
    torch.bitwise_right_shift(h, 16, out=t)
    h.bitwise_xor_(t.bitwise_and_(0xFFFF)).mul_(_MIX_1).bitwise_xor_(keys_R2[:, 1:])
    torch.bitwise_right_shift(h, 15, out=t)
    h.bitwise_xor_(t.bitwise_and_(0x1FFFF)).mul_(_MIX_2)
    # The copied sign may stay here: the sign bit itself is dropped next, so no bit is lost twice.
    torch.bitwise_right_shift(h, 16, out=t)
    h.bitwise_xor_(t).bitwise_and_(_MASK31)
    unit = t.view(torch.float32).copy_(h)
    return unit.add_(0.5).mul_(-_UNIT).log1p_()
