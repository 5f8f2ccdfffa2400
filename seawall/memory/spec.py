"""What the engine must know about a model before it loads anything: numbers read from config.json.

Owns ModelSpec and RopeSpec, the rules that turn a Hugging Face configuration into them, and the
refusal of models whose mathematics is not built. Is torch-free, so that `seawall plan` runs where
torch is not installed. Does not read files, weights or generation settings.

    config.json -> apply_overrides -> ModelSpec.from_config -> footprints, layers, loader

Four families are native (the decoder in models/decoder.py). Every other architecture is
`native=False`: its sizes are read here, its mathematics is transformers' (models/hf.py).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from seawall.core.errors import ConfigError
from seawall.memory.config_values import number, optional_size, size
from seawall.memory.rope_spec import RopeSpec, longest_context, read_rope

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")
_FULL_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a native architecture fixes without saying it in its configuration."""

    qkv_bias: bool | None = False
    output_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: bool = False
    head_dim: int | None = None
    num_kv_heads: int | None = None
    window: int | None = None


# None as a bias: the configuration says it (attention_bias, mlp_bias).
FAMILIES = {
    "LlamaForCausalLM": Family(qkv_bias=None, output_bias=None, mlp_bias=None),
    "MistralForCausalLM": Family(num_kv_heads=8, window=4096),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "Qwen3ForCausalLM": Family(qkv_bias=None, output_bias=None, qk_norm=True, head_dim=128),
}
_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_SAME_ARCHITECTURE = {"LLaMAForCausalLM": "LlamaForCausalLM"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of one model, as plain numbers.

    `context_length` is what the engine serves, at most `max_context_length`. `dtype` is the
    checkpoint's. `config_json` carries the whole configuration for models that transformers builds,
    else it is empty.
    """

    architecture: str
    native: bool
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    max_context_length: int
    softmax_scale: float
    dtype: str = "float32"
    norm_eps: float = 1e-6
    activation: str = "silu"
    rope: RopeSpec | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    config_json: str = field(default="", repr=False)

    @property
    def query_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, which is also that of the value heads."""
        return self.num_kv_heads * self.head_dim

    @staticmethod
    def from_config(config: Mapping[str, Any], *, context_length: int | None = None) -> ModelSpec:
        """Reads a Hugging Face configuration.

        Args:
            config: the parsed config.json, overrides applied.
            context_length: the longest sequence to serve; None takes the model's own limit.

        Raises:
            ConfigError: a size is missing or impossible, or the mathematics is not built.
        """
        architecture = _architecture(config)
        _refuse_unbuilt(config, architecture)
        if architecture in FAMILIES:
            return _native_spec(config, architecture, context_length)
        return _foreign_spec(config, architecture, context_length)


def apply_overrides(config: Mapping[str, Any], json_model_override_args: str) -> dict[str, Any]:
    """Returns the configuration with the keys of a JSON object laid over it.

    Raises:
        ConfigError: the text is not a JSON object.
    """
    if not json_model_override_args.strip():
        return dict(config)
    try:
        overrides = json.loads(json_model_override_args)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"json_model_override_args is not JSON ({error}): {json_model_override_args!r}; "
            'write an object such as {"rope_theta": 500000.0}'
        ) from error
    if not isinstance(overrides, dict):
        raise ConfigError(
            f"json_model_override_args is a JSON {type(overrides).__name__}, not an object: "
            f'{json_model_override_args!r}; write an object such as {{"rope_theta": 500000.0}}'
        )
    return {**config, **overrides}


def refuse_short_window(config: Mapping[str, Any], architecture: str, context_length: int) -> None:
    """Refuses a model whose sliding window is shorter than the context: windows are not built yet.

    A window of W tokens lets position p attend to (p - W, p], so a context of W tokens never meets
    it.
    """
    family = FAMILIES.get(architecture, Family())
    window = config.get("sliding_window", family.window)
    switched_off = config.get("use_sliding_window", not architecture.startswith("Qwen")) is False
    layer_types = config.get("layer_types")
    if layer_types is not None and "sliding_attention" not in layer_types:
        switched_off = True
    if window is None or switched_off or context_length <= window:
        return
    raise ConfigError(
        f"sliding_window {window} is shorter than the context of {context_length} tokens "
        f"and windows are not built yet; set context_length to at most {window}"
    )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    if not names and config.get("model_type") in _MODEL_TYPES:
        names = [_MODEL_TYPES[config["model_type"]]]
    if not names:
        raise ConfigError(
            "config.json names no architectures and its model_type "
            f"{config.get('model_type')!r} is not one of {', '.join(_MODEL_TYPES)}; "
            'add "architectures"'
        )
    name = str(names[0])
    name = _SAME_ARCHITECTURE.get(name, name)
    if not name.endswith(_CAUSAL_SUFFIXES) or config.get("is_encoder_decoder"):
        raise ConfigError(
            f"architecture {name} is not a decoder-only language model; "
            f"give one whose name ends in {' or '.join(_CAUSAL_SUFFIXES)}"
        )
    return name


def _refuse_unbuilt(config: Mapping[str, Any], architecture: str) -> None:
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "unknown")
        raise ConfigError(
            f"the checkpoint is quantized ({method}) and quantized weights are not built yet; "
            "use an unquantized checkpoint"
        )
    if config.get("attn_logit_softcapping") is not None:
        raise ConfigError(
            f"{architecture} caps attention scores at {config['attn_logit_softcapping']}, "
            "which is not built yet; use another model"
        )
    unknown = sorted(set(config.get("layer_types") or ()) - _FULL_LAYERS)
    if unknown:
        raise ConfigError(
            f"{architecture} has layers of type {', '.join(unknown)}, which are not built yet; "
            "only full attention is"
        )


def _context(config: Mapping[str, Any], architecture: str, longest: int, asked: int | None) -> int:
    """The context to serve: what was asked, else the model's limit."""
    context = longest if asked is None else asked
    if not 1 <= context <= longest:
        raise ConfigError(
            f"context_length {context} is outside 1..{longest} (max_position_embeddings and rope "
            "scaling); lower it, or raise the model's limit with json_model_override_args"
        )
    refuse_short_window(config, architecture, context)
    return context


def _native_spec(
    config: Mapping[str, Any], architecture: str, context_length: int | None
) -> ModelSpec:
    family = FAMILIES[architecture]
    hidden_size = size(config, "hidden_size")
    num_heads = size(config, "num_attention_heads")
    head_dim = optional_size(config, "head_dim") or family.head_dim or hidden_size // num_heads
    activation = config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise ConfigError(f"hidden_act {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    rope = read_rope(config, head_dim, context_length)
    longest = longest_context(config, rope)
    attention_bias = bool(config.get("attention_bias", False))
    mlp_bias = bool(config.get("mlp_bias", False))
    return ModelSpec(
        architecture=architecture,
        native=True,
        hidden_size=hidden_size,
        intermediate_size=size(config, "intermediate_size"),
        num_layers=size(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_kv_heads(config, num_heads, family.num_kv_heads),
        head_dim=head_dim,
        vocab_size=size(config, "vocab_size"),
        context_length=_context(config, architecture, longest, context_length),
        max_context_length=longest,
        softmax_scale=head_dim**-0.5,
        dtype=_dtype(config),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        activation=ACTIVATIONS[activation],
        rope=rope,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=mlp_bias if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
    )


def _foreign_spec(
    config: Mapping[str, Any], architecture: str, context_length: int | None
) -> ModelSpec:
    hidden_size = size(config, "hidden_size")
    num_heads = size(config, "num_attention_heads")
    head_dim = optional_size(config, "head_dim") or hidden_size // num_heads
    longest = size(config, "max_position_embeddings")
    return ModelSpec(
        architecture=architecture,
        native=False,
        hidden_size=hidden_size,
        intermediate_size=optional_size(config, "intermediate_size") or 4 * hidden_size,
        num_layers=size(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_kv_heads(config, num_heads, None),
        head_dim=head_dim,
        vocab_size=size(config, "vocab_size"),
        context_length=_context(config, architecture, longest, context_length),
        max_context_length=longest,
        softmax_scale=_foreign_scale(config, head_dim),
        dtype=_dtype(config),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        config_json=json.dumps(dict(config), sort_keys=True),
    )


def _foreign_scale(config: Mapping[str, Any], head_dim: int) -> float:
    if config.get("attention_multiplier") is not None:
        return number(config, "attention_multiplier", 1.0)
    return 1.0 / math.sqrt(number(config, "query_pre_attn_scalar", head_dim))


def _kv_heads(config: Mapping[str, Any], num_heads: int, default: int | None) -> int:
    num_kv_heads = optional_size(config, "num_key_value_heads") or default or num_heads
    if config.get("multi_query") is True:
        num_kv_heads = 1
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    return num_kv_heads


def _dtype(config: Mapping[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"checkpoint dtype {name!r} is not one of {', '.join(DTYPES)}")
    return name
