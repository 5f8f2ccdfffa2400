"""Attention over one set of keys, with its log-sum-exp; and how several sets become one result.

    parts of keys     [ edge ) [ block ) [ block ) [ own )
    each gives        result, lse      blended by softmax over the lse's; then the sink's share

Two ways to compute a part: the fused kernel, and plain products where scores are capped, which no
fused kernel on the CPU does. Owns nothing.

Legend: K = kv heads, G = query heads of a kv head, n = queries, S = keys, D = head_dim.
"""

from typing import Protocol

import torch
from torch import Tensor

# The public function keeps the log-sum-exp to itself.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001

Part = tuple[Tensor, Tensor]


class Parts(Protocol):
    """Result and log-sum-exp over some keys, for queries of one row."""

    def single(self, q_KGD: Tensor, keys_KSD: Tensor, values_KSD: Tensor) -> Part:
        """One position that sees all the keys: [K, G, D] and [K, G]."""

    def masked(
        self, q_KGnD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, mask_nS: Tensor | None
    ) -> Part:
        """Several positions; the mask is added to the scores: [K, G, n, D] and [K, G, n]."""

    def causal(self, q_KGnD: Tensor, keys_KnD: Tensor, values_KnD: Tensor) -> Part:
        """Several positions over their own keys: each sees those up to its own."""


class FusedParts:
    """The fused kernel: no score is ever written out."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def single(self, q_KGD: Tensor, keys_KSD: Tensor, values_KSD: Tensor) -> Part:
        """See Parts."""
        # The heads that share keys become the queries of one head: the keys are read once.
        result, lse = _flash(q_KGD[None], keys_KSD[None], values_KSD[None], scale=self._scale)
        return result[0], lse[0]

    def masked(
        self, q_KGnD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, mask_nS: Tensor | None
    ) -> Part:
        """See Parts."""
        mask = None if mask_nS is None else mask_nS[None, None]
        keys, values = self._repeat(q_KGnD, keys_KSD), self._repeat(q_KGnD, values_KSD)
        result, lse = _flash(q_KGnD, keys, values, attn_mask=mask, scale=self._scale)
        return result, lse

    def causal(self, q_KGnD: Tensor, keys_KnD: Tensor, values_KnD: Tensor) -> Part:
        """See Parts."""
        keys, values = self._repeat(q_KGnD, keys_KnD), self._repeat(q_KGnD, values_KnD)
        result, lse = _flash(q_KGnD, keys, values, is_causal=True, scale=self._scale)
        return result, lse

    def _repeat(self, q_KGnD: Tensor, x_KSD: Tensor) -> Tensor:
        """For each query head of a kv head, without a copy."""
        return x_KSD[:, None].expand(-1, q_KGnD.shape[1], -1, -1)


class CappedParts:
    """Plain products in float32, for scores that become c tanh(score / c).

    Args:
        scale: factor on the scores.
        softcap: c.
        mask: [Q, Q] in the model's dtype, -inf below the diagonal and 0 elsewhere.
    """

    def __init__(self, scale: float, softcap: float, mask: Tensor) -> None:
        self._scale = scale
        self._softcap = softcap
        self._mask = mask

    def single(self, q_KGD: Tensor, keys_KSD: Tensor, values_KSD: Tensor) -> Part:
        """See Parts."""
        result, lse = self.masked(q_KGD[:, :, None], keys_KSD, values_KSD, None)
        return result[:, :, 0], lse[:, :, 0]

    def masked(
        self, q_KGnD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, mask_nS: Tensor | None
    ) -> Part:
        """See Parts."""
        num_kv_heads, group, count, dim = q_KGnD.shape
        q_KND = q_KGnD.reshape(num_kv_heads, -1, dim).float()
        scores_KNS = torch.bmm(q_KND, keys_KSD.float().transpose(1, 2))
        scores_KNS.mul_(self._scale / self._softcap).tanh_().mul_(self._softcap)
        if mask_nS is not None:
            scores_KNS.view(num_kv_heads, group, count, -1).add_(mask_nS)
        highest = scores_KNS.amax(-1, keepdim=True)
        scores_KNS.sub_(highest).exp_()
        total = scores_KNS.sum(-1, keepdim=True)
        result = torch.bmm(scores_KNS, values_KSD.float()).div_(total)
        lse = highest.add_(total.log_())
        shape = (num_kv_heads, group, count)
        return result.view(*shape, dim), lse.view(shape)

    def causal(self, q_KGnD: Tensor, keys_KnD: Tensor, values_KnD: Tensor) -> Part:
        """See Parts."""
        count = q_KGnD.shape[2]
        return self.masked(q_KGnD, keys_KnD, values_KnD, self._mask[:count, :count].t())


class Blend:
    """Attention over several sets of keys, from the result and log-sum-exp of each.

    The shares of two sets are softmax(lse), so the first result moves towards the second by
    sigmoid(lse2 - lse1).
    """

    def __init__(self) -> None:
        self._result: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, result: Tensor, lse: Tensor) -> None:
        """Blends the result over one more set of keys in; keeps and changes the first result."""
        if self._result is None or self._lse is None:
            self._result, self._lse = result, lse
            return
        self._widen()
        share = torch.sigmoid(lse - self._lse).unsqueeze(-1)
        self._result.lerp_(result.float(), share)
        self._lse = torch.logaddexp(self._lse, lse)

    def add_sink(self, sink: Tensor) -> None:
        """One more key of this score whose value is zero; `sink` broadcasts to the lse."""
        assert self._lse is not None
        self._widen()
        self.result.mul_(torch.sigmoid(self._lse - sink).unsqueeze(-1))

    @property
    def result(self) -> Tensor:
        """The blend; some set was added."""
        assert self._result is not None
        return self._result

    def _widen(self) -> None:
        if self.result.dtype != torch.float32:
            self._result = self.result.float()
