"""The decoder of Gemma 2 and 3: norms before and after each half of a layer, two ropes.

Owns its weight tensors, made in the arena's "weights" account, and nothing per request.

    tokens -> embedding x sqrt(hidden) -> | residual += norm(attention(norm(residual))) | x layers
                                          | residual += norm(mlp(norm(residual)))       |
           -> norm -> hidden rows

A second decoder beside decoder.py because every line of its mathematics differs a little: norms
weigh by 1 + w, halves are normed on their way out, and in Gemma 3 layers with a window have a rope
of their own. Windows and capped scores are attention's business, the cap of the logits is the
head's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from seawall.device.dtypes import torch_dtype
from seawall.layers.attention import NormedAttention
from seawall.layers.embedding import ScaledEmbedding
from seawall.layers.mlp import NormedMLP
from seawall.layers.norm import OffsetRMSNorm
from seawall.models import families
from seawall.models.decoder import Maker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from seawall.attention.base import AttentionOp
    from seawall.device.arena import Arena
    from seawall.memory.spec import ModelSpec
    from seawall.models.base import HeadWeights
    from seawall.models.weights import Extras


@dataclass(frozen=True, slots=True)
class GemmaLayer:
    """One decoder layer; both halves add to the residual in place. `rope`: which rotation."""

    attention: NormedAttention
    mlp: NormedMLP
    rope: int


class GemmaDecoder:
    """A Gemma with weights of undefined content, to be filled by name through `weights`."""

    def __init__(self, spec: ModelSpec, dtype: str, arena: Arena) -> None:
        make = Maker(spec, torch_dtype(dtype), arena)

        def norm(width: int) -> OffsetRMSNorm:
            return OffsetRMSNorm(make.empty(width), spec.norm_eps)

        ropes = [rope for rope in (spec.rope, spec.window_rope) if rope is not None]
        self.spec = spec
        # The factor is rounded to the model's dtype, as it was in training.
        scale = torch.tensor(math.sqrt(spec.hidden_size), dtype=torch_dtype(dtype)).item()
        self.embedding = ScaledEmbedding(make.empty(spec.vocab_size, spec.hidden_size), scale)
        self.layers = tuple(
            GemmaLayer(
                NormedAttention(make.attention(index, norm), norm(spec.hidden_size)),
                NormedMLP(make.mlp(norm), norm(spec.hidden_size)),
                rope=1 if index in spec.local_layers else 0,
            )
            for index in range(spec.num_layers)
        )
        self.norm = norm(spec.hidden_size)
        self.rotaries = tuple(make.rotary(rope) for rope in ropes)
        self._head = make.head(self.embedding.weight)

    def forward(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionOp
    ) -> torch.Tensor:
        """Hidden rows [T, hidden] after the final norm."""
        residual_TH = self.embedding(tokens_T)
        rotations = [rotary(positions_T) for rotary in self.rotaries]
        for layer in self.layers:
            layer.attention(residual_TH, rotations[layer.rope], attention)
            layer.mlp(residual_TH)
        return self.norm.apply_(residual_TH)

    @property
    def head(self) -> HeadWeights:
        """The LM head; shares the embedding's matrix when the model ties them."""
        return self._head

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """Checkpoint names and the views that hold them; a tied head has no name of its own."""
        return families.name_gemma_weights(self)

    @property
    def extras(self) -> Extras:
        """Buffers of old checkpoints, and the head's copy of a tied embedding."""
        return families.extras(self.spec)
