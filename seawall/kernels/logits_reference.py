"""Slow twin of the logits path: whole matrices, plain operations, the noise in unsigned integers.

Owns: the specification in code that the tiled passes are tested against. It is not used by the
engine, and it makes the [rows, vocabulary] matrix that the engine never makes.

Legend: R rows, V vocabulary, W = ceil(V / 32).
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

U32 = npt.NDArray[np.uint32]


class Adjust(Protocol):
    """Sparse changes: logit / r where positive, times r where not, plus a."""

    @property
    def row(self) -> Tensor:
        """Row of each entry."""
        ...

    @property
    def ids(self) -> Tensor:
        """Id of each entry."""
        ...

    @property
    def repetition(self) -> Tensor:
        """Factor r of each entry."""
        ...

    @property
    def add(self) -> Tensor:
        """Term a of each entry."""
        ...


def processed_logits(
    hidden: Tensor,
    weight: Tensor,
    *,
    temperature: Tensor | float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    bias: Tensor | None = None,
    bitmask: Tensor | None = None,
    adjust: Adjust | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Logits [R, V] in `dtype` after softcap, bias, changes, bitmask and temperature."""
    raw = hidden.to(dtype) @ weight.to(dtype).T * scale
    logits = raw if softcap is None else softcap * torch.tanh(raw / softcap)
    logits = logits.masked_fill(~raw.isfinite().all(1, keepdim=True), torch.nan)
    if bias is not None:
        logits = logits + bias.to(dtype)
    if adjust is not None:
        for row, token, repetition, add in zip(
            adjust.row.tolist(),
            adjust.ids.tolist(),
            adjust.repetition.tolist(),
            adjust.add.tolist(),
            strict=True,
        ):
            logit = logits[row, token]
            logits[row, token] = (logit / repetition if logit > 0 else logit * repetition) + add
    if bitmask is not None:
        ids = torch.arange(weight.shape[0])
        allowed = (bitmask[:, ids // 32] >> (ids % 32).to(torch.int32)) & 1
        logits = logits.masked_fill((allowed == 0) & ~logits.isnan(), -torch.inf)
    divisor = torch.as_tensor(temperature, dtype=dtype).expand(hidden.shape[0])
    return logits / torch.where(divisor < 1e-6, 1.0, divisor)[:, None]


def best_of(logits_RV: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The k best logits and ids, equal ones by lowest id."""
    values, ids = logits_RV.sort(dim=1, descending=True, stable=True)
    return values[:, :top_k], ids[:, :top_k]


def kept_ids(
    logits_V: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> dict[int, float]:
    """Ids of one row that may be drawn, and their probabilities renormalised."""
    probs, ids = logits_V.double().softmax(0).sort(descending=True, stable=True)
    if top_k > 0:
        probs, ids = probs[:top_k], ids[:top_k]
    probs = probs / probs.sum()
    if top_p < 1.0:
        before = probs.cumsum(0) - probs
        keep = before < top_p
        keep[0] = True
        probs, ids = probs[keep], ids[keep]
    keep = probs >= min_p * probs[0]
    probs, ids = probs[keep], ids[keep]
    return dict(zip(ids.tolist(), (probs / probs.sum()).tolist(), strict=True))


def clocks(seeds: list[int], positions: list[int], vocab_size: int) -> npt.NDArray[np.float64]:
    """Exponential variates [R, V] of the sampler, from Python integers and unsigned words."""
    mask = (1 << 64) - 1
    rows = []
    codes = np.arange(vocab_size, dtype=np.uint32) * np.uint32(0x2423EA21)
    for seed, position in zip(seeds, positions, strict=True):
        step = 0x9E3779B97F4A7C15
        key = _mix64((_mix64((seed + step) & mask) + position * step) & mask)
        h = codes ^ np.uint32(key & 0xFFFFFFFF)
        h = (h ^ (h >> np.uint32(16))) * np.uint32(0x625DD03B)
        h = h ^ np.uint32(key >> 32)
        h = (h ^ (h >> np.uint32(15))) * np.uint32(0xC1CA15D7)
        sign = np.where(h >> np.uint32(31), np.uint32(0xFFFF0000), np.uint32(0))
        h = (h ^ (h >> np.uint32(16)) ^ sign) & np.uint32(0x7FFFFFFF)
        rows.append(-np.log1p(-(h + 0.5) * 2.0**-31 * (1.0 - 2.0**-24)))
    return np.array(rows).reshape(len(seeds), vocab_size)


def _mix64(z: int) -> int:
    mask = (1 << 64) - 1
    z = ((z ^ (z >> 32)) * 0xD6E8FEB86659FD93) & mask
    z = ((z ^ (z >> 29)) * 0xA0761D6478BD642F) & mask
    return z ^ (z >> 32)


def draw_scores(logits_V: Tensor, clocks_V: npt.NDArray[np.float64], kept: set[int]) -> Tensor:
    """Gumbel scores [V] of one row, -inf where an id is not kept; the largest is drawn."""
    scores = logits_V.double() - torch.from_numpy(np.log(clocks_V))
    allowed = torch.zeros(logits_V.shape[0], dtype=torch.bool)
    allowed[list(kept)] = True
    return scores.masked_fill(~allowed, -torch.inf)
