"""The check that a routed model computes what it computes by itself.

One short row of tokens goes through the model twice within packed steps, once whole and once in two
pieces beside it, with a dense attention that keeps its own keys and values. Both must give the
logits of the model's own forward pass. So a model that keeps state of its own, mixes neighbours,
skips attention in some layers or scales its head in an unknown way is found when it is loaded.

Owns nothing; runs once, before the engine's memory is sealed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from seawall.core.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from seawall.memory.spec import ModelSpec
    from seawall.models.base import CausalLM

NUM_TOKENS = 8
FLOAT32_TOLERANCE = 1e-3
# In 16 bits the median difference may be this share of the largest logit: rounding changes single
# rows of routed models at will, while a model that is routed wrongly differs everywhere.
HALF_TOLERANCE = 0.0625


def check_routing(
    model: CausalLM, spec: ModelSpec, own_logits: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Compares the routed model with its own forward pass.

    Args:
        model: routed to the engine's attention protocol.
        spec: what config.json promises.
        own_logits: token ids [T] to the logits [T, V] of the model's own forward pass.

    Raises:
        ModelError: a layer's attention was not asked exactly once a step, or the logits differ.
    """
    weight = model.head.weight
    num_tokens = min(NUM_TOKENS, spec.context_length)
    tokens = (torch.arange(num_tokens, device=weight.device) * 7 + 3) % spec.vocab_size
    positions = torch.arange(num_tokens, device=weight.device)
    expected = own_logits(tokens).float()
    split = (num_tokens + 1) // 2
    attention = DenseAttention(spec.softmax_scale)
    attention.prepare((split, num_tokens))
    first = model.forward(
        torch.cat((tokens[:split], tokens)), torch.cat((positions[:split], positions)), attention
    )
    attention.check_layers(spec.num_layers)
    rows = [first]
    if split < num_tokens:
        attention.prepare((num_tokens - split, 0))
        rows.append(model.forward(tokens[split:], positions[split:], attention))
    logits = model.head.logits(torch.cat(rows)).float()
    whole = logits[split : split + num_tokens]
    pieces = torch.cat((logits[:split], logits[split + num_tokens :]))
    is_exact = weight.dtype == torch.float32
    largest = expected.abs().max().item()
    tolerance = FLOAT32_TOLERANCE if is_exact else HALF_TOLERANCE * max(1.0, largest)
    for name, found in (("in one step", whole), ("in two steps", pieces)):
        differences = (found - expected).abs()
        difference = (differences.max() if is_exact else differences.median()).item()
        if not difference <= tolerance:
            raise ModelError(
                f"logits {name} differ from the model's own by {difference:.3g}, "
                f"the limit is {tolerance:.3g}"
            )


class DenseAttention:
    """Plain causal attention over rows of one step; row i always continues sequence i."""

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._lengths: Sequence[int] = ()
        self._calls: list[int] = []
        self._stored: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def prepare(self, lengths: Sequence[int]) -> None:
        """Tokens of each row, in packed order."""
        self._lengths = lengths
        self._calls = []

    def check_layers(self, num_layers: int) -> None:
        """Raises ModelError unless every layer asked exactly once since prepare."""
        if sorted(self._calls) != list(range(num_layers)):
            raise ModelError(
                f"attention was asked by layers {sorted(self._calls)}, "
                f"expected each of 0..{num_layers - 1} once"
            )

    def run(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """Stores keys and values, then attends."""
        self._calls.append(layer)
        attended = torch.empty_like(q_THD)
        start = 0
        for row, length in enumerate(self._lengths):
            part = slice(start, start + length)
            attended[part] = self._row((row, layer), q_THD[part], k_TKD[part], v_TKD[part])
            start += length
        return attended

    def _row(
        self, name: tuple[int, int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        if name in self._stored:
            k = torch.cat((self._stored[name][0], k))
            v = torch.cat((self._stored[name][1], v))
        self._stored[name] = (k, v)
        group = q.shape[1] // k.shape[1]
        keys = k.repeat_interleave(group, dim=1).float()
        values = v.repeat_interleave(group, dim=1).float()
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * self._scale
        later = torch.ones_like(scores[0], dtype=torch.bool).triu(len(k) - len(q) + 1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
