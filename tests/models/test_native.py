"""Native families against transformers in float32: whole, in pieces, and packed with others."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import seawall
from seawall.device.arena import Arena
from seawall.memory.footprint_model import weight_bytes
from seawall.memory.spec import ModelSpec
from seawall.models.hf_check import DenseAttention
from seawall.models.registry import load_model
from tests.models.checkpoints import (
    SIZES,
    assert_same_logits,
    forward,
    load,
    random_model,
    read_config,
    reference,
    save,
    tokens,
)

LENGTH = 30
HALF_HEAD = 6  # rotated pairs: hidden 48 / 4 heads / 2

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        # Long enough for the ramp to lie within the six pairs.
        "original_max_position_embeddings": 256,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn, truncated ramp": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn with attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.3,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0 + 0.1 * i for i in range(HALF_HEAD)],
        "long_factor": [2.0 + 0.3 * i for i in range(HALF_HEAD)],
    },
}

DEEP = SIZES | {"num_hidden_layers": 3}
# Caps that the small scores of a random model meet.
GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "query_pre_attn_scalar": 20,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 3.0,
}

FAMILIES: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SIZES),
    "llama, all heads": transformers.LlamaConfig(**SIZES | {"num_key_value_heads": 4}),
    "llama, one kv head": transformers.LlamaConfig(**SIZES | {"num_key_value_heads": 1}),
    "llama, tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama, biases": transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama, wide heads": transformers.LlamaConfig(**SIZES, head_dim=20),
    "llama, gelu": transformers.LlamaConfig(**SIZES, hidden_act="gelu"),
    "llama, tanh gelu": transformers.LlamaConfig(**SIZES, hidden_act="gelu_pytorch_tanh"),
    "llama, relu": transformers.LlamaConfig(**SIZES, hidden_act="relu"),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=None, rms_norm_eps=1e-3),
    "mistral, wide window": transformers.MistralConfig(**SIZES, sliding_window=64),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen2, tied": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=16),
    "qwen3, biases": transformers.Qwen3Config(**SIZES, head_dim=16, attention_bias=True),
    "mistral, window": transformers.MistralConfig(**SIZES, sliding_window=8),
    "mistral, window of one": transformers.MistralConfig(**SIZES, sliding_window=1),
    "qwen2, late windows": transformers.Qwen2Config(
        **DEEP, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "qwen3, listed windows": transformers.Qwen3Config(
        **DEEP,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=7,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "gemma2": transformers.Gemma2Config(**DEEP, **GEMMA, sliding_window=8),
    "gemma2, wide window": transformers.Gemma2Config(**DEEP, **GEMMA, sliding_window=64),
    "gemma2, no caps": transformers.Gemma2Config(
        **DEEP,
        **GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        sliding_window=8,
    ),
    "gemma2, biases and an untied head": transformers.Gemma2Config(
        **DEEP, **GEMMA, sliding_window=8, attention_bias=True, tie_word_embeddings=False
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **DEEP, head_dim=16, query_pre_attn_scalar=20, sliding_window=8, sliding_window_pattern=3
    ),
    "gemma3, wide window": transformers.Gemma3TextConfig(**DEEP, head_dim=16, sliding_window=64),
    "gemma3, scaled": transformers.Gemma3TextConfig(
        **DEEP,
        head_dim=16,
        sliding_window=8,
        final_logit_softcapping=3.0,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 900.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
}


def check(config: Any, folder: Path, **options: Any) -> None:
    theirs = random_model(config)
    ours, spec, arena = load(save(theirs, folder), **options)
    assert spec.native
    sequence = tokens(LENGTH)
    expected = reference(theirs, sequence)
    assert_same_logits(forward(ours, spec, sequence, steps=(LENGTH,)), expected)
    pieces = forward(ours, spec, sequence, tokens(11, seed=1), steps=(7, 1, 12, 10))
    assert_same_logits(pieces, expected)
    assert arena.bytes("weights") == weight_bytes(spec, "float32")


@pytest.mark.parametrize("name", FAMILIES)
def test_family_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    check(FAMILIES[name], tmp_path)


@pytest.mark.parametrize("name", ROPES)
def test_rope_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    rope = {"rope_theta": 500.0, **ROPES[name]}
    check(transformers.LlamaConfig(**SIZES, rope_parameters=rope), tmp_path)


def test_short_context_takes_the_short_factors(tmp_path: Path) -> None:
    rope = {"rope_theta": 500.0, **ROPES["longrope"]}
    theirs = random_model(transformers.LlamaConfig(**SIZES, rope_parameters=rope))
    folder = save(theirs, tmp_path)
    ours, spec, _ = load(folder, context_length=16)
    sequence = tokens(16)
    logits = forward(ours, spec, sequence, steps=(16,))
    assert_same_logits(logits, reference(theirs, sequence))


def test_dynamic_rope_past_its_context_is_generation_token_by_token(tmp_path: Path) -> None:
    rope = {"rope_theta": 500.0, **ROPES["dynamic"]}
    sizes = SIZES | {"max_position_embeddings": 16}
    theirs = random_model(transformers.LlamaConfig(**sizes, rope_parameters=rope))
    ours, spec, _ = load(save(theirs, tmp_path))
    assert spec.context_length == 32
    sequence = tokens(32)
    cache = transformers.DynamicCache(config=theirs.config)
    rows: list[Tensor] = []
    with torch.no_grad():
        for start, end in [(0, 12), *((at, at + 1) for at in range(12, 32))]:
            part = sequence[start:end].unsqueeze(0)
            rows.append(theirs(part, past_key_values=cache, use_cache=True).logits[0])
    whole = forward(ours, spec, sequence, steps=(32,))
    assert_same_logits(whole, torch.cat(rows))


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3"])
def test_bfloat16_stays_close(name: str, tmp_path: Path) -> None:
    theirs = random_model(FAMILIES[name])
    folder = save(theirs, tmp_path)
    ours, spec, arena = load(folder, dtype="bfloat16")
    sequence = tokens(LENGTH)
    expected = reference(theirs, sequence)
    found = forward(ours, spec, sequence, steps=(LENGTH,))
    assert found.dtype == torch.bfloat16
    rounded = reference(theirs.to(torch.bfloat16), sequence).float()
    own_error = (rounded - expected).abs().mean()
    assert (found.float() - expected).abs().mean() < 1.5 * own_error
    assert arena.bytes("weights") == weight_bytes(spec, "bfloat16")


def test_old_configurations_load(tmp_path: Path) -> None:
    """rope_theta and rope_scaling at the top, torch_dtype, no head_dim."""
    config = transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_theta": 700.0, "rope_type": "linear", "factor": 2.0}
    )
    theirs = random_model(config)
    folder = save(theirs, tmp_path)
    old = read_config(folder)
    for name in ("rope_parameters", "head_dim", "dtype", "architectures"):
        del old[name]
    old |= {"rope_theta": 700.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (folder / "config.json").write_text(json.dumps(old))
    ours, spec, _ = load(folder)
    sequence = tokens(LENGTH)
    logits = forward(ours, spec, sequence, steps=(LENGTH,))
    assert_same_logits(logits, reference(theirs, sequence))


def test_demo_model_agrees_with_its_reference() -> None:
    folder = Path(seawall.__file__).parent / "demo_model"
    spec = ModelSpec.from_config(read_config(folder))
    model = load_model(folder, spec, "float32", Arena.unbounded(torch.device("cpu")))
    prompts = json.loads((folder / "reference.json").read_text())["prompts"]
    compared = 0
    for prompt in prompts:
        ids = torch.tensor(prompt["token_ids"])
        attention = DenseAttention(spec.softmax_scale)
        attention.prepare([len(ids)])
        with torch.inference_mode():
            hidden = model.forward(ids, torch.arange(len(ids)), attention)
            logprobs = model.head.logits(hidden).double().log_softmax(-1)
        for position, expected in enumerate(prompt["prompt_logprobs"]):
            if expected is not None:
                found = logprobs[position - 1, ids[position]].item()
                assert found == pytest.approx(expected, abs=1e-4)
                compared += 1
        best = logprobs[-1].topk(5).indices.tolist()
        assert best == [entry["id"] for entry in prompt["last_top5"]]
    assert compared > 100
