"""Reading config.json: sizes, names of older families, rope forms, overrides, refusals."""

import math
from typing import Any

import pytest

from seawall.core.errors import ConfigError
from seawall.memory.footprint_model import activation_bytes, weight_bytes
from seawall.memory.spec import ModelSpec, apply_overrides

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "torch_dtype": "bfloat16",
}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}


def read(**changes: Any) -> ModelSpec:
    return ModelSpec.from_config(LLAMA_8B | changes)


def test_llama_8b() -> None:
    spec = read()
    assert spec.native
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (32, 32, 8, 128)
    assert (spec.context_length, spec.vocab_size, spec.dtype) == (131072, 128256, "bfloat16")
    assert spec.softmax_scale == pytest.approx(1 / math.sqrt(128))
    # 8,030,261,248 parameters as published, 2 bytes each, and 64 rotary frequencies.
    assert weight_bytes(spec, "bfloat16") == 2 * 8_030_261_248 + 256


def test_activations_grow_with_tokens_and_element_size() -> None:
    spec = read()
    assert activation_bytes(spec, "bfloat16", 2000) == 2 * activation_bytes(spec, "bfloat16", 1000)
    assert activation_bytes(spec, "float32", 100) > 1.5 * activation_bytes(spec, "bfloat16", 100)


def test_spec_is_frozen_and_comparable() -> None:
    assert read() == read()
    assert hash(read()) == hash(read())
    assert read() != read(rms_norm_eps=1e-6)


def test_names_of_gpt2() -> None:
    spec = ModelSpec.from_config(GPT2)
    assert not spec.native
    assert (spec.hidden_size, spec.num_layers, spec.num_heads, spec.head_dim) == (768, 12, 12, 64)
    assert (spec.num_kv_heads, spec.context_length, spec.vocab_size) == (12, 1024, 50257)
    # 124,439,808 parameters; the head is counted as if it were not tied.
    assert weight_bytes(spec, "float32") >= 4 * 124_439_808


def test_softmax_scale_of_other_families() -> None:
    assert ModelSpec.from_config(GPT2 | {"attention_multiplier": 0.25}).softmax_scale == 0.25
    assert ModelSpec.from_config(GPT2 | {"query_pre_attn_scalar": 16}).softmax_scale == 0.25


def test_multi_query_has_one_kv_head() -> None:
    assert ModelSpec.from_config(GPT2 | {"multi_query": True}).num_kv_heads == 1


def test_architecture_from_model_type() -> None:
    assert read(architectures=None, model_type="qwen3").qk_norm
    with pytest.raises(ConfigError, match="names no architectures"):
        read(architectures=None, model_type="strange")


@pytest.mark.parametrize(
    ("family", "biases"),
    [
        ("LlamaForCausalLM", (True, True, True)),
        ("MistralForCausalLM", (False, False, False)),
        ("Qwen2ForCausalLM", (True, False, False)),
        ("Qwen3ForCausalLM", (True, True, False)),
    ],
)
def test_biases_of_families(family: str, biases: tuple[bool, bool, bool]) -> None:
    spec = read(architectures=[family], attention_bias=True, mlp_bias=True, sliding_window=None)
    assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias) == biases


def test_qwen2_has_biases_unasked() -> None:
    assert read(architectures=["Qwen2ForCausalLM"]).qkv_bias
    assert not read(architectures=["Qwen3ForCausalLM"]).qkv_bias


def test_both_rope_forms_are_one() -> None:
    old = {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2}}
    new = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
    assert read(**old).rope == read(rope_scaling=None, rope_theta=None, rope_parameters=new).rope


def test_rope_scaling_stretches_the_context() -> None:
    def longest(**rope: Any) -> int:
        return read(max_position_embeddings=4096, rope_scaling=rope).context_length

    assert longest(rope_type="linear", factor=4.0) == 16384
    assert longest(rope_type="dynamic", factor=2.0) == 8192
    assert longest(rope_type="yarn", factor=4.0, original_max_position_embeddings=2048) == 8192
    assert longest(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024) == 4096
    assert longest(rope_type="llama3", factor=8.0) == 4096


def test_partial_rotary_width() -> None:
    rope = read(partial_rotary_factor=0.25).rope
    assert rope is not None
    assert rope.rotary_dim == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "swiglu7"}, "hidden_act 'swiglu7' is not one of silu"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "not a decoder-only"),
        ({"architectures": ["T5ForCausalLM"], "is_encoder_decoder": True}, "not a decoder-only"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_key_value_heads": 5}, "32 is not a multiple of num_key_value_heads 5"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"torch_dtype": "int8"}, "checkpoint dtype 'int8'"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantized \(awq\)"),
        ({"attn_logit_softcapping": 50.0}, "caps attention scores at 50.0"),
        ({"layer_types": ["full_attention", "mamba"]}, "layers of type mamba"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope type 'mrope' is not one of default"),
        ({"rope_scaling": {"rope_type": "linear"}}, "linear needs a factor of at least 1"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "at least 1, got 0.5"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "a list of 64 numbers"),
        ({"rope_scaling": "llama3"}, "not one flat object"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "not one flat object"),
        ({"partial_rotary_factor": 1.5}, r"rotary width 192 .* even number in 2\.\.128"),
        ({"head_dim": 33}, "rotary width 33 .* is not an even number"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**changes)


def test_context_length_is_checked() -> None:
    assert ModelSpec.from_config(LLAMA_8B, context_length=100).context_length == 100
    for length in (0, 131073):
        with pytest.raises(ConfigError, match=rf"context_length {length} is outside 1\.\.131072"):
            ModelSpec.from_config(LLAMA_8B, context_length=length)


def test_windows_are_refused_when_they_would_bind() -> None:
    mistral = LLAMA_8B | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096}
    assert ModelSpec.from_config(mistral, context_length=4096).context_length == 4096
    with pytest.raises(ConfigError, match="windows are not built yet; set context_length to at m"):
        ModelSpec.from_config(mistral, context_length=4097)
    # Absent means 4096 for Mistral, null means none.
    del mistral["sliding_window"]
    with pytest.raises(ConfigError, match="sliding_window 4096"):
        ModelSpec.from_config(mistral)
    assert ModelSpec.from_config(mistral | {"sliding_window": None}).context_length == 131072


def test_qwen_windows_count_only_when_switched_on() -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096}
    assert read(**qwen).context_length == 131072
    with pytest.raises(ConfigError, match="sliding_window 4096"):
        read(**qwen, use_sliding_window=True)
    full = ["full_attention"] * 32
    assert read(**qwen, use_sliding_window=True, layer_types=full).context_length == 131072


def test_overrides() -> None:
    assert apply_overrides(LLAMA_8B, "") == LLAMA_8B
    assert apply_overrides(LLAMA_8B, "{}") == LLAMA_8B
    changed = apply_overrides(LLAMA_8B, '{"rope_scaling": null, "vocab_size": 7}')
    assert (changed["rope_scaling"], changed["vocab_size"]) == (None, 7)
    assert LLAMA_8B["vocab_size"] == 128256


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[1]", "is a JSON list"), ("3", "is a JSON int")],
)
def test_malformed_overrides(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_overrides(LLAMA_8B, text)
