"""One decoder for most native families: embedding, layers of attention and gated MLP, final norm.

Owns its weight tensors, made in the arena's "weights" account, and nothing per request. Rows are
packed [T, hidden]: there is no batch dimension and no phase.

    tokens -> embedding -> | residual += attention(norm(residual)) | x layers -> norm -> hidden rows
                           | residual += mlp(norm(residual))       |

Which layers see a window only is attention's business. Gemma's decoder is another (gemma.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from seawall.device.dtypes import torch_dtype
from seawall.layers.attention import Attention
from seawall.layers.embedding import Embedding
from seawall.layers.linear import Linear
from seawall.layers.mlp import GatedMLP
from seawall.layers.norm import RMSNorm
from seawall.layers.ops import decoder_ops
from seawall.layers.rope import Rotary
from seawall.models import families
from seawall.models.base import HeadWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from seawall.attention.base import AttentionOp
    from seawall.device.arena import Arena
    from seawall.layers.norm import Norm
    from seawall.memory.rope_spec import RopeSpec
    from seawall.memory.spec import ModelSpec
    from seawall.models.weights import Extras

    NormMaker = Callable[[int], Norm]

ACCOUNT = "weights"


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; both halves add to the residual in place."""

    attention: Attention
    mlp: GatedMLP


class Decoder:
    """A native model with weights of undefined content, to be filled by name through `weights`."""

    def __init__(self, spec: ModelSpec, dtype: str, arena: Arena) -> None:
        make = Maker(spec, torch_dtype(dtype), arena)
        assert spec.rope is not None, spec.architecture
        self.spec = spec
        self.embedding = Embedding(make.empty(spec.vocab_size, spec.hidden_size))
        self.layers = tuple(
            Layer(make.attention(index, make.norm), make.mlp(make.norm))
            for index in range(spec.num_layers)
        )
        self.norm = make.norm(spec.hidden_size)
        self.rotary = make.rotary(spec.rope)
        self._head = make.head(self.embedding.weight)

    def forward(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionOp
    ) -> torch.Tensor:
        """Hidden rows [T, hidden] after the final norm."""
        residual_TH = self.embedding(tokens_T)
        rotation = self.rotary(positions_T)
        for layer in self.layers:
            layer.attention(residual_TH, rotation, attention)
            layer.mlp(residual_TH)
        return self.norm.apply_(residual_TH)

    @property
    def head(self) -> HeadWeights:
        """The LM head; shares the embedding's matrix when the model ties them."""
        return self._head

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """Checkpoint names and the views that hold them; a tied head has no name of its own."""
        return families.name_weights(self)

    @property
    def extras(self) -> Extras:
        """Buffers of old checkpoints, and the head's copy of a tied embedding."""
        return families.extras(self.spec)


class Maker:
    """Makes the empty parts of one model in the arena."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, arena: Arena) -> None:
        self._spec = spec
        self._dtype = dtype
        self._arena = arena
        self._ops = decoder_ops(arena.device)

    def empty(self, *shape: int) -> torch.Tensor:
        """A tensor in the model's dtype."""
        return self._arena.empty(ACCOUNT, shape, self._dtype)

    def norm(self, width: int) -> RMSNorm:
        """The norm of Llama and its kin."""
        return RMSNorm(self.empty(width), self._spec.norm_eps, self._ops)

    def linear(self, num_out: int, num_in: int, *, bias: bool) -> Linear:
        """A projection."""
        return Linear(self.empty(num_out, num_in), self.empty(num_out) if bias else None)

    def rotary(self, rope: RopeSpec) -> Rotary:
        """Rotary positions."""
        frequencies = self._arena.empty(ACCOUNT, (rope.rotary_dim // 2,), torch.float32)
        return Rotary(rope, frequencies, self._dtype)

    def head(self, embedding_VH: torch.Tensor) -> HeadWeights:
        """The LM head: the embedding's matrix if the model ties them."""
        spec = self._spec
        weight = embedding_VH
        if not spec.tie_embeddings:
            weight = self.empty(spec.vocab_size, spec.hidden_size)
        return HeadWeights(weight=weight, softcap=spec.final_softcap)

    def attention(self, index: int, norm: NormMaker) -> Attention:
        """One layer's attention; `index` is the layer's."""
        spec = self._spec
        return Attention(
            layer=index,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            norm=norm(spec.hidden_size),
            qkv=self.linear(
                spec.query_size + 2 * spec.kv_size, spec.hidden_size, bias=spec.qkv_bias
            ),
            output=self.linear(spec.hidden_size, spec.query_size, bias=spec.output_bias),
            query_norm=norm(spec.head_dim) if spec.qk_norm else None,
            key_norm=norm(spec.head_dim) if spec.qk_norm else None,
            ops=self._ops,
        )

    def mlp(self, norm: NormMaker) -> GatedMLP:
        """One layer's gated MLP."""
        spec = self._spec
        return GatedMLP(
            norm=norm(spec.hidden_size),
            gate_up=self.linear(2 * spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias),
            down=self.linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias),
            activation=spec.activation,
            ops=self._ops,
        )
