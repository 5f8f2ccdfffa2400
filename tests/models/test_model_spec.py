"""Reading config.json: sizes, names of older families, rope forms, overrides, refusals."""

import math
from dataclasses import replace
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


def test_windows_of_mistral() -> None:
    mistral = LLAMA_8B | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096}
    spec = ModelSpec.from_config(mistral, context_length=4097)
    assert spec.windows == (4096,) * 32
    assert (spec.window, spec.num_window_layers, spec.num_full_layers) == (4096, 32, 0)
    # A window that the context never outgrows is none.
    assert ModelSpec.from_config(mistral, context_length=4096).windows == ()
    # Absent means 4096 for Mistral, null means none.
    del mistral["sliding_window"]
    assert ModelSpec.from_config(mistral).window == 4096
    assert ModelSpec.from_config(mistral | {"sliding_window": None}).window is None


def test_windows_of_qwen_are_switched_on_and_begin_late() -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096}
    assert read(**qwen).windows == ()
    late = read(**qwen, use_sliding_window=True, max_window_layers=30)
    assert late.windows == (None,) * 30 + (4096,) * 2
    assert read(**qwen, use_sliding_window=True).num_window_layers == 32 - 28
    kinds = ["full_attention", "sliding_attention"] * 16
    listed = read(**qwen, use_sliding_window=True, layer_types=kinds)
    assert listed.windows == (None, 4096) * 16
    full = read(**qwen, use_sliding_window=True, layer_types=["full_attention"] * 32)
    assert full.windows == ()


def test_windows_of_families_that_have_none_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sliding_window 4096 .* has no windows"):
        read(sliding_window=4096)
    assert read(sliding_window=4096, max_position_embeddings=4096).windows == ()
    assert read(sliding_window=None).windows == ()
    phi = LLAMA_8B | {"architectures": ["Phi3ForCausalLM"], "sliding_window": 2047}
    with pytest.raises(ConfigError, match=r"native architectures only.* to at most 2047"):
        ModelSpec.from_config(phi)


def test_windows_of_two_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="windows of 4, 8 tokens"):
        replace(read(num_hidden_layers=3), windows=(4, None, 8))


GEMMA = LLAMA_8B | {"rope_scaling": None, "head_dim": 256, "hidden_act": "gelu"}


def test_gemma_2_alternates_and_caps() -> None:
    config = GEMMA | {"architectures": ["Gemma2ForCausalLM"], "max_position_embeddings": 8192}
    spec = ModelSpec.from_config(config)
    assert (spec.decoder, spec.activation, spec.tie_embeddings) == ("gemma", "gelu_tanh", True)
    assert spec.windows == (4096, None) * 16
    assert (spec.attention_softcap, spec.final_softcap) == (50.0, 30.0)
    assert spec.softmax_scale == pytest.approx(1 / 16)
    assert spec.window_rope is None
    none = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    plain = ModelSpec.from_config(config | none | {"query_pre_attn_scalar": 144})
    assert (plain.attention_softcap, plain.final_softcap) == (None, None)
    assert plain.softmax_scale == pytest.approx(1 / 12)


def test_gemma_3_has_two_ropes_in_both_forms() -> None:
    config = GEMMA | {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7}
    old = ModelSpec.from_config(
        config
        | {
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window": 512,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        }
    )
    assert old.windows == (512,) * 5 + (None, 512)
    assert old.local_layers == (0, 1, 2, 3, 4, 6)
    assert old.qk_norm
    assert old.rope is not None
    assert old.window_rope is not None
    assert (old.rope.kind, old.rope.factor, old.rope.theta) == ("linear", 8.0, 1e6)
    assert (old.window_rope.kind, old.window_rope.theta) == ("default", 1e4)
    assert old.context_length == 131072
    by_layer = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    del config["rope_theta"]
    new = config | {"sliding_window": 512, "rope_parameters": by_layer}
    assert ModelSpec.from_config(new) == old
    # The local rope stays where no window binds.
    short = ModelSpec.from_config(new, context_length=512)
    assert (short.windows, short.local_layers) == ((), old.local_layers)
    pattern = ModelSpec.from_config(new | {"sliding_window_pattern": 2})
    assert pattern.windows == (512, None, 512, None, 512, None, 512)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": True}, "later positions"),
        ({"attn_logit_softcapping": 50.0}, "caps attention scores at 50.0"),
        ({"final_logit_softcapping": -1.0}, "a cap is above 0"),
        ({"rope_parameters": {"rope_type": "default"}}, "not an object by layer type"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"layer_types": ["sliding_attention"]}, "names 1 layers, num_hidden_layers is 32"),
        ({"hidden_activation": "swiglu7"}, "hidden_activation 'swiglu7' is not one of"),
    ],
)
def test_refusals_of_gemma_3(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelSpec.from_config(GEMMA | {"architectures": ["Gemma3ForCausalLM"]} | changes)


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
