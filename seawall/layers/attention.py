"""The attention layer of a decoder: norm, projection, rotation, attention, output.

Knows nothing of pages, masks or other requests: it hands packed rows to the AttentionOp, which
stores keys and values and attends.

    qkv [T, (H + 2K) D]:   | H query heads | K key heads | K value heads | the first two are rotated
    in place
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from seawall.layers.ops import PLAIN

if TYPE_CHECKING:
    import torch

    from seawall.attention.base import AttentionOp
    from seawall.layers.linear import Linear
    from seawall.layers.norm import Norm
    from seawall.layers.ops import DecoderOps
    from seawall.layers.rope import Rotation


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's attention; `layer` is its index in the KV pool."""

    layer: int
    num_heads: int
    num_kv_heads: int
    norm: Norm
    qkv: Linear
    output: Linear
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    ops: DecoderOps = PLAIN

    def __call__(
        self, residual_TH: torch.Tensor, rotation: Rotation, attention: AttentionOp
    ) -> None:
        """Adds the layer's output to the residual in place."""
        self.output.add_to(residual_TH, self.attended(residual_TH, rotation, attention))

    def attended(
        self, residual_TH: torch.Tensor, rotation: Rotation, attention: AttentionOp
    ) -> torch.Tensor:
        """The heads' results side by side, before the output projection."""
        qkv = self.qkv(self.norm(residual_TH))
        num_tokens = qkv.shape[0]
        num_rotated = self.num_heads + self.num_kv_heads
        qkv_TND = qkv.view(num_tokens, num_rotated + self.num_kv_heads, -1)
        q_THD = qkv_TND[:, : self.num_heads]
        k_TKD = qkv_TND[:, self.num_heads : num_rotated]
        if self.query_norm is not None and self.key_norm is not None:
            self.query_norm.apply_(q_THD)
            self.key_norm.apply_(k_TKD)
        self.ops.rotate_(qkv_TND[:, :num_rotated], rotation.cos, rotation.sin)
        attended = attention.run(q_THD, k_TKD, qkv_TND[:, num_rotated:], self.layer)
        return attended.reshape(num_tokens, -1)


@dataclass(frozen=True, slots=True)
class NormedAttention:
    """Attention whose output is normed before it joins the residual."""

    inner: Attention
    post_norm: Norm

    def __call__(
        self, residual_TH: torch.Tensor, rotation: Rotation, attention: AttentionOp
    ) -> None:
        """Adds the layer's output to the residual in place."""
        output_TH = self.inner.output(self.inner.attended(residual_TH, rotation, attention))
        residual_TH.add_(self.post_norm.apply_(output_TH))
