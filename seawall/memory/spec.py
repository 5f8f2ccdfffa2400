"""What the engine must know about a model before it loads anything: numbers read from config.json.

Owns ModelSpec and RopeSpec, the rules that turn a Hugging Face configuration into them, and the
refusal of models whose mathematics is not built. Is torch-free, so that `seawall plan` runs where
torch is not installed. Does not read files, weights or generation settings.

    config.json -> apply_overrides -> ModelSpec.from_config -> footprints, layers, loader

The families below are native: most of them are one decoder (models/decoder.py), Gemma has its own
(models/gemma.py). Every other architecture is `native=False`: its sizes are read here, its
mathematics is transformers' (models/hf.py).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from seawall.core.errors import ConfigError
from seawall.memory.config_values import number, optional_size, size
from seawall.memory.rope_spec import (
    RopeSpec,
    longest_context,
    read_layer_ropes,
    read_rope,
)
from seawall.memory.window_spec import (
    WindowRule,
    local_layers,
    read_windows,
    refuse_short_window,
)

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
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
_GEMMA_SCALAR = 256

# Which decoder computes a native model.
DecoderName = Literal["llama", "gemma"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a native architecture fixes without saying it in its configuration.

    `window` is the default of sliding_window, `windows` tells which layers have one, and `period`
    is that of the rule "local". `local_theta`: layers with a window have a rope of their own, of
    this base by default. `softcaps`: the default caps of attention scores and of logits.
    """

    decoder: DecoderName = "llama"
    qkv_bias: bool | None = False
    output_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    head_dim: int | None = None
    num_kv_heads: int | None = None
    window: int | None = None
    windows: WindowRule = "none"
    period: int = 1
    local_theta: float | None = None
    softcaps: tuple[float | None, float | None] = (None, None)


# None as a bias: the configuration says it (attention_bias, mlp_bias).
FAMILIES = {
    "LlamaForCausalLM": Family(qkv_bias=None, output_bias=None, mlp_bias=None),
    "MistralForCausalLM": Family(num_kv_heads=8, window=4096, windows="all"),
    "Qwen2ForCausalLM": Family(qkv_bias=True, window=4096, windows="late"),
    "Qwen3ForCausalLM": Family(
        qkv_bias=None, output_bias=None, qk_norm=True, head_dim=128, window=4096, windows="late"
    ),
    "Gemma2ForCausalLM": Family(
        decoder="gemma",
        qkv_bias=None,
        output_bias=None,
        tie_embeddings=True,
        head_dim=256,
        num_kv_heads=4,
        window=4096,
        windows="local",
        period=2,
        softcaps=(50.0, 30.0),
    ),
    "Gemma3ForCausalLM": Family(
        decoder="gemma",
        qkv_bias=None,
        output_bias=None,
        qk_norm=True,
        tie_embeddings=True,
        head_dim=256,
        num_kv_heads=4,
        window=4096,
        windows="local",
        period=6,
        local_theta=10_000.0,
    ),
}
_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
_SAME_ARCHITECTURE = {"LLaMAForCausalLM": "LlamaForCausalLM"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of one model, as plain numbers.

    `context_length` is what the engine serves, at most `max_context_length`. `dtype` is the
    checkpoint's. `windows` has one entry a layer, None where it sees everything, or is empty if no
    layer has a window; all windows have one size. `window_rope` is the rope of the `local_layers`
    where it differs, be their window shorter than the context or not. `config_json` carries the
    whole configuration for models that transformers builds, else it is empty.
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
    decoder: DecoderName = "llama"
    windows: tuple[int | None, ...] = ()
    window_rope: RopeSpec | None = None
    local_layers: tuple[int, ...] = ()
    attention_softcap: float | None = None
    final_softcap: float | None = None
    config_json: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        sizes = sorted({window for window in self.windows if window is not None})
        if len(sizes) > 1:
            raise ConfigError(
                f"layers have windows of {', '.join(map(str, sizes))} tokens, and one page class "
                "holds one size; only one size of window is built"
            )
        assert len(self.windows) in (0, self.num_layers), self.windows

    @property
    def window(self) -> int | None:
        """The size that all windows share; None if no layer has one."""
        return next((window for window in self.windows if window is not None), None)

    @property
    def num_window_layers(self) -> int:
        """Layers that see a window only; their keys and values are in the window class."""
        return sum(window is not None for window in self.windows)

    @property
    def num_full_layers(self) -> int:
        """Layers that see everything before them."""
        return self.num_layers - self.num_window_layers

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
    caps_scores = architecture in FAMILIES and FAMILIES[architecture].softcaps[0] is not None
    if config.get("attn_logit_softcapping") is not None and not caps_scores:
        raise ConfigError(
            f"{architecture} caps attention scores at {config['attn_logit_softcapping']}, "
            "which is not built for it; use another model"
        )
    if config.get("use_bidirectional_attention"):
        raise ConfigError(
            f"{architecture} has use_bidirectional_attention set and attends to later positions, "
            "which no causal language model does; use another model"
        )
    unknown = sorted(set(config.get("layer_types") or ()) - _KNOWN_LAYERS)
    if unknown:
        raise ConfigError(
            f"{architecture} has layers of type {', '.join(unknown)}, which are not built yet; "
            "only full attention and sliding windows are"
        )


def _context(longest: int, asked: int | None) -> int:
    """The context to serve: what was asked, else the model's limit."""
    context = longest if asked is None else asked
    if not 1 <= context <= longest:
        raise ConfigError(
            f"context_length {context} is outside 1..{longest} (max_position_embeddings and rope "
            "scaling); lower it, or raise the model's limit with json_model_override_args"
        )
    return context


def _native_spec(
    config: Mapping[str, Any], architecture: str, context_length: int | None
) -> ModelSpec:
    family = FAMILIES[architecture]
    hidden_size = size(config, "hidden_size")
    num_heads = size(config, "num_attention_heads")
    num_layers = size(config, "num_hidden_layers")
    head_dim = optional_size(config, "head_dim") or family.head_dim or hidden_size // num_heads
    rope, window_rope, longest = _ropes(config, family, head_dim, context_length)
    context = _context(longest, context_length)
    attention_bias = bool(config.get("attention_bias", False))
    mlp_bias = bool(config.get("mlp_bias", False))
    spec = ModelSpec(
        architecture=architecture,
        native=True,
        hidden_size=hidden_size,
        intermediate_size=size(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_kv_heads(config, num_heads, family.num_kv_heads),
        head_dim=head_dim,
        vocab_size=size(config, "vocab_size"),
        context_length=context,
        max_context_length=longest,
        softmax_scale=head_dim**-0.5,
        dtype=_dtype(config),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        activation=_activation(config, family),
        rope=rope,
        tie_embeddings=bool(config.get("tie_word_embeddings", family.tie_embeddings)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=mlp_bias if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
    )
    spec = replace(spec, windows=_windows(config, family, spec))
    if family.decoder == "llama":
        return spec
    scores, logits = family.softcaps
    return replace(
        spec,
        decoder=family.decoder,
        softmax_scale=number(config, "query_pre_attn_scalar", _GEMMA_SCALAR) ** -0.5,
        window_rope=window_rope,
        local_layers=_local_layers(config, family, num_layers) if window_rope else (),
        attention_softcap=_softcap(config, "attn_logit_softcapping", scores),
        final_softcap=_softcap(config, "final_logit_softcapping", logits),
    )


def _ropes(
    config: Mapping[str, Any], family: Family, head_dim: int, context_length: int | None
) -> tuple[RopeSpec, RopeSpec | None, int]:
    """The rope, that of the layers with a window if it is another one, and the longest context."""
    if family.local_theta is not None:
        full, local = read_layer_ropes(config, head_dim, context_length, family.local_theta)
        return full, local, size(config, "max_position_embeddings")
    rope = read_rope(config, head_dim, context_length)
    return rope, None, longest_context(config, rope)


def _windows(config: Mapping[str, Any], family: Family, spec: ModelSpec) -> tuple[int | None, ...]:
    return read_windows(
        config,
        family.windows,
        num_layers=spec.num_layers,
        context_length=spec.context_length,
        default=family.window,
        period=family.period,
    )


def _local_layers(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int, ...]:
    is_local = local_layers(config, family.windows, num_layers=num_layers, period=family.period)
    return tuple(layer for layer in range(num_layers) if is_local[layer])


def _activation(config: Mapping[str, Any], family: Family) -> str:
    # Gemma's early configurations name another function in hidden_act than they were trained with.
    name, default = ("hidden_act", "silu")
    if family.decoder == "gemma":
        name, default = ("hidden_activation", "gelu_pytorch_tanh")
    activation = config.get(name) or default
    if activation not in ACTIVATIONS:
        raise ConfigError(f"{name} {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation]


def _softcap(config: Mapping[str, Any], name: str, default: float | None) -> float | None:
    """A cap; null in the configuration means none, absence the default."""
    if config.get(name, default) is None:
        return None
    cap = number(config, name, default or 0.0)
    if cap <= 0:
        raise ConfigError(f"{name} is {cap}, a cap is above 0; use null for none")
    return cap


def _foreign_spec(
    config: Mapping[str, Any], architecture: str, context_length: int | None
) -> ModelSpec:
    hidden_size = size(config, "hidden_size")
    num_heads = size(config, "num_attention_heads")
    head_dim = optional_size(config, "head_dim") or hidden_size // num_heads
    longest = size(config, "max_position_embeddings")
    context = _context(longest, context_length)
    refuse_short_window(config, architecture, context)
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
        context_length=context,
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
