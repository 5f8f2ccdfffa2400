"""Rotary positions: cosines and sines of a step's positions, computed once for all layers.

Owns the frequency vector (float32, R/2 numbers). There is no table over the context: a step
computes its own rows, which costs T R numbers instead of context R ones that live forever.

A position's rotation depends on that position and the configuration alone, never on the request's
present length, because rotated keys stay in pages that other requests may share:

- dynamic NTK: positions inside the original context use the plain frequencies; position p beyond it
  uses those of a sequence of p + 1 tokens. This is what transformers computes when it generates
  token by token with a cache. It is not what transformers computes for a whole sequence longer than
  the original context at once (there all positions take the frequencies of the full length).
- longrope: the context length served chooses the factors (memory/rope_spec.py), the long ones
  if it exceeds the original context, for all positions alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from seawall.memory.rope_spec import RopeSpec


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and signed sin of one step's positions, [T, R] in the model's dtype."""

    cos: torch.Tensor
    sin: torch.Tensor


class Rotary:
    """Makes the Rotation of a step.

    Args:
        spec: the kind and its numbers.
        frequencies: long-lived float32 tensor [R/2]; filled here.
        dtype: of the rotation.
    """

    def __init__(self, spec: RopeSpec, frequencies: torch.Tensor, dtype: torch.dtype) -> None:
        frequencies.copy_(inverse_frequencies(spec))
        self._spec = spec
        self._frequencies = frequencies
        self._dtype = dtype

    def __call__(self, positions_T: torch.Tensor) -> Rotation:
        """The rotation of these positions."""
        angles = positions_T.to(torch.float32).unsqueeze(-1) * self._step_frequencies(positions_T)
        num_tokens, half = angles.shape
        cos = torch.empty((num_tokens, 2 * half), dtype=self._dtype, device=angles.device)
        sin = torch.empty_like(cos)
        scale = self._spec.attention_factor
        cos[:, half:] = cos[:, :half] = angles.cos().mul_(scale)
        sines = angles.sin_().mul_(scale)
        sin[:, half:] = sines
        sin[:, :half] = sines.neg_()
        return Rotation(cos, sin)

    def _step_frequencies(self, positions_T: torch.Tensor) -> torch.Tensor:
        spec = self._spec
        if spec.kind != "dynamic":
            return self._frequencies
        length = (positions_T + 1).clamp_(min=spec.original_context).to(torch.float32)
        growth = length.mul_(spec.factor / spec.original_context).sub_(spec.factor - 1)
        growth.pow_(spec.rotary_dim / (spec.rotary_dim - 2))
        exponents = torch.arange(0, spec.rotary_dim, 2, device=growth.device, dtype=torch.float32)
        exponents.div_(-spec.rotary_dim)
        return growth.unsqueeze(-1).pow(exponents).mul_(self._frequencies)


def inverse_frequencies(spec: RopeSpec) -> torch.Tensor:
    """The angle a position adds, for each rotated pair: float32 [R/2], on the CPU."""
    plain = spec.theta ** (
        torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    )
    if spec.kind == "linear":
        return 1.0 / plain / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, 1.0 / plain)
    if spec.kind == "yarn":
        return _yarn(spec, plain)
    if spec.kind == "longrope":
        return 1.0 / (torch.tensor(spec.factors, dtype=torch.float32) * plain)
    return 1.0 / plain


def _llama3(spec: RopeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    """Long waves are slowed by the factor, short ones kept, those between blended."""
    wavelength = 2 * math.pi / frequencies
    turns = spec.original_context / wavelength
    low, high = spec.low_freq_factor, spec.high_freq_factor
    blend = (turns - low) / (high - low)
    blended = (1 - blend) * frequencies / spec.factor + blend * frequencies
    is_long = wavelength > spec.original_context / low
    is_short = wavelength < spec.original_context / high
    return torch.where(
        is_long, frequencies / spec.factor, torch.where(is_short, frequencies, blended)
    )


def _yarn(spec: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """Pairs that turn often keep their frequency, those that turn seldom are slowed."""
    low = _pair_of_turns(spec, spec.beta_fast)
    high = _pair_of_turns(spec, spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.arange(spec.rotary_dim // 2, dtype=torch.float32).sub(low).div(high - low)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (spec.factor * plain) * (1 - kept) + 1.0 / plain * kept


def _pair_of_turns(spec: RopeSpec, turns: float) -> float:
    """Where along the head the wave makes this many turns within the original context."""
    return (
        spec.rotary_dim
        * math.log(spec.original_context / (turns * 2 * math.pi))
        / (2 * math.log(spec.theta))
    )
