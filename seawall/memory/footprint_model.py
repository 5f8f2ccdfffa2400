"""Bytes of a model: its weights, and the most that its forward pass holds at one moment.

Pure functions of the ModelSpec. For native families the weights are exact (what loading charges to
the account "weights") and the activations follow the decoder operation by operation; change both
when seawall/layers changes. For models that transformers builds, both are documented bounds.

Not counted here: the scratch of attention (footprint_attention.py) and the logits.

Legend: T step tokens, b bytes of an element, H hidden, D head width, Q all query heads, K all key
heads (also all value heads), R rotated part of a head, I width of the MLP, V vocabulary.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from seawall.memory.footprint import dtype_bytes

if TYPE_CHECKING:
    from seawall.memory.spec import ModelSpec

FLOAT32 = 4
# transformers keeps more alive at once than the decoder does; per token, in units of one element:
# residual, normed rows, projections, rotated and transposed copies, and the MLP's four stages.
_FOREIGN_HIDDEN_COPIES = 5
_FOREIGN_HEAD_COPIES = 4
_FOREIGN_MLP_COPIES = 4
_FOREIGN_FIXED_BYTES = 1 << 20
# Norms over the hidden width in a layer: before each half, and in Gemma after it too.
_NORMS = {"llama": 2, "gemma": 4}


def weight_bytes(spec: ModelSpec, dtype: str) -> int:
    """Bytes of all long-lived tensors of a model in this dtype.

    Exact for native families. Otherwise an estimate for dense or routed gated decoders that leans
    to the high side: an untied head, biases everywhere, learned positions.
    """
    if not spec.native:
        return _foreign_elements(spec) * dtype_bytes(dtype)
    ropes = [rope for rope in (spec.rope, spec.window_rope) if rope is not None]
    rotary = sum(rope.rotary_dim // 2 * FLOAT32 for rope in ropes)
    return native_elements(spec) * dtype_bytes(dtype) + rotary


def native_elements(spec: ModelSpec) -> int:
    """How many weights a native model has; a tied head is counted once."""
    hidden, query, kv, mlp = (
        spec.hidden_size,
        spec.query_size,
        spec.kv_size,
        spec.intermediate_size,
    )
    layer = (query + 2 * kv) * (hidden + spec.qkv_bias)
    layer += hidden * (query + spec.output_bias)
    layer += 2 * mlp * (hidden + spec.mlp_bias)
    layer += hidden * (mlp + spec.mlp_bias)
    layer += _NORMS[spec.decoder] * hidden + 2 * spec.head_dim * spec.qk_norm
    tables = (1 if spec.tie_embeddings else 2) * spec.vocab_size * hidden
    return tables + spec.num_layers * layer + hidden


def activation_bytes(spec: ModelSpec, dtype: str, step_tokens: int) -> int:
    """The most bytes that a forward pass over `step_tokens` rows holds at one moment.

    Includes the tensors handed to and returned by attention, not what attention makes inside.
    """
    if not spec.native:
        return _foreign_activation_bytes(spec, dtype, step_tokens)
    # Gemma's norms in 16 bits take their weight in float32.
    weight = FLOAT32 * max(spec.hidden_size, spec.head_dim) * (spec.decoder == "gemma")
    return _native_token_bytes(spec, dtype_bytes(dtype)) * step_tokens + weight


def _native_token_bytes(spec: ModelSpec, b: int) -> int:
    hidden, query, kv = spec.hidden_size, spec.query_size, spec.kv_size
    rotary_dim = 0 if spec.rope is None else spec.rope.rotary_dim
    rotation = (1 if spec.window_rope is None else 2) * 2 * rotary_dim * b
    fused = (query + 2 * kv) * b
    # Making the rotation takes less than the fused projection after it, and is left out.
    normed = _norm_bytes(hidden, 1, b)
    head_norms = _norm_bytes(query, spec.num_heads, b) if spec.qk_norm else 0
    swapped = (spec.num_heads + spec.num_kv_heads) * rotary_dim * b
    attended = query * b
    gated = 2 * spec.intermediate_size * b
    stages = [
        normed,
        hidden * b + fused,
        fused + max(head_norms, swapped, attended),
        hidden * b + gated,
    ]
    if spec.decoder == "gemma":
        # The output of each half is a tensor of its own, normed before it joins the residual.
        stages += [attended + hidden * b, gated + hidden * b, hidden * b + normed]
    return hidden * b + rotation + max(stages)


def _norm_bytes(width: int, num_rows: int, b: int) -> int:
    """A norm over rows of `width` in all: float32 squares, or the float32 copy and its squares."""
    scale = num_rows * FLOAT32
    if b == FLOAT32:
        return width * FLOAT32 + scale
    return 2 * width * FLOAT32 + scale


def _foreign_activation_bytes(spec: ModelSpec, dtype: str, step_tokens: int) -> int:
    """A bound for models of transformers: every stage of a layer alive at once, norms in float32.

    Routed models compute each row once for each of its experts.
    """
    b = dtype_bytes(dtype)
    config = json.loads(spec.config_json)
    routed = max(1, int(config.get("num_experts_per_tok") or 1))
    heads = spec.query_size + 2 * spec.kv_size
    row = _FOREIGN_HIDDEN_COPIES * spec.hidden_size + _FOREIGN_HEAD_COPIES * heads
    row += _FOREIGN_MLP_COPIES * spec.intermediate_size * routed
    upcast = 3 * FLOAT32 * max(spec.hidden_size, spec.head_dim)
    return (row * b + upcast) * step_tokens + _FOREIGN_FIXED_BYTES


def _foreign_elements(spec: ModelSpec) -> int:
    config = json.loads(spec.config_json)
    hidden = spec.hidden_size
    heads = 2 * spec.query_size + 2 * spec.kv_size
    experts = _experts(config)
    mlp = int(config.get("moe_intermediate_size") or spec.intermediate_size)
    layer = heads * (hidden + 1) + experts * 3 * mlp * (hidden + 1) + experts * hidden
    layer += 8 * hidden + 2 * spec.query_size
    layer += 3 * int(config.get("shared_expert_intermediate_size") or 0) * (hidden + 1)
    tables = 2 * spec.vocab_size * (hidden + 1) + spec.max_context_length * hidden
    return tables + spec.num_layers * layer + 2 * hidden


def _experts(config: dict[str, Any]) -> int:
    counts = [config.get(name) for name in ("num_local_experts", "num_experts", "n_routed_experts")]
    return max(1, *(int(count or 0) for count in counts)) + int(config.get("n_shared_experts") or 0)
