"""The native families: what their checkpoints call each weight.

Llama, Mistral, Qwen2 and Qwen3 share one naming; Gemma has norms of its own. What differs between
them in size and mathematics is in memory/spec.py; a family with other names gets its own function
here.

    qkv     [q_proj rows | k_proj rows | v_proj rows]
    gate_up [gate_proj rows | up_proj rows]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from seawall.models.weights import Extras

if TYPE_CHECKING:
    import torch

    from seawall.layers.attention import Attention
    from seawall.layers.linear import Linear
    from seawall.layers.mlp import GatedMLP
    from seawall.memory.spec import ModelSpec
    from seawall.models.decoder import Decoder
    from seawall.models.gemma import GemmaDecoder

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# Buffers that old checkpoints carry and that follow from the configuration.
HARMLESS_SUFFIXES = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")


def name_weights(model: Decoder) -> dict[str, torch.Tensor]:
    """Every weight of the checkpoint and the view that holds it."""
    views = {EMBEDDING: model.embedding.weight}
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}."
        views.update(_attention(prefix, layer.attention))
        views[f"{prefix}post_attention_layernorm.weight"] = layer.mlp.norm.weight
        views.update(_mlp(prefix, layer.mlp))
    views["model.norm.weight"] = model.norm.weight
    if not model.spec.tie_embeddings:
        views[HEAD] = model.head.weight
    return views


def name_gemma_weights(model: GemmaDecoder) -> dict[str, torch.Tensor]:
    """The same for Gemma: post_attention_layernorm is what it says there, not the MLP's own."""
    views = {EMBEDDING: model.embedding.weight}
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}."
        views.update(_attention(prefix, layer.attention.inner))
        views[f"{prefix}post_attention_layernorm.weight"] = layer.attention.post_norm.weight
        views[f"{prefix}pre_feedforward_layernorm.weight"] = layer.mlp.inner.norm.weight
        views.update(_mlp(prefix, layer.mlp.inner))
        views[f"{prefix}post_feedforward_layernorm.weight"] = layer.mlp.post_norm.weight
    views["model.norm.weight"] = model.norm.weight
    if not model.spec.tie_embeddings:
        views[HEAD] = model.head.weight
    return views


def extras(spec: ModelSpec) -> Extras:
    """What a checkpoint may carry beside the model's weights."""
    copies = ((HEAD, EMBEDDING),) if spec.tie_embeddings else ()
    return Extras(harmless_suffixes=HARMLESS_SUFFIXES, copies=copies)


def _attention(prefix: str, attention: Attention) -> dict[str, torch.Tensor]:
    num_rows = attention.qkv.weight.shape[0]
    head_dim = num_rows // (attention.num_heads + 2 * attention.num_kv_heads)
    key_start = attention.num_heads * head_dim
    value_start = key_start + attention.num_kv_heads * head_dim
    rows = {
        "q_proj": slice(0, key_start),
        "k_proj": slice(key_start, value_start),
        "v_proj": slice(value_start, num_rows),
    }
    within = f"{prefix}self_attn."
    views = {f"{prefix}input_layernorm.weight": attention.norm.weight}
    views.update(_linear(within, attention.qkv, rows))
    views.update(_linear(within, attention.output, {"o_proj": slice(None)}))
    if attention.query_norm is not None and attention.key_norm is not None:
        views[f"{within}q_norm.weight"] = attention.query_norm.weight
        views[f"{within}k_norm.weight"] = attention.key_norm.weight
    return views


def _mlp(prefix: str, mlp: GatedMLP) -> dict[str, torch.Tensor]:
    middle = mlp.gate_up.weight.shape[0] // 2
    rows = {"gate_proj": slice(0, middle), "up_proj": slice(middle, None)}
    views = _linear(f"{prefix}mlp.", mlp.gate_up, rows)
    views.update(_linear(f"{prefix}mlp.", mlp.down, {"down_proj": slice(None)}))
    return views


def _linear(prefix: str, linear: Linear, rows: dict[str, slice]) -> dict[str, torch.Tensor]:
    views = {f"{prefix}{name}.weight": linear.weight[part] for name, part in rows.items()}
    if linear.bias is not None:
        views.update({f"{prefix}{name}.bias": linear.bias[part] for name, part in rows.items()})
    return views
