"""The transformers path: parity, what is adopted, and what is refused."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from seawall.core.errors import ConfigError, ModelError
from seawall.device.arena import Arena
from seawall.memory.footprint_model import activation_bytes, weight_bytes
from seawall.memory.spec import ModelSpec
from seawall.models.base import HeadWeights
from seawall.models.hf_check import DenseAttention, check_routing
from seawall.models.registry import load_model
from tests.models.checkpoints import (
    SIZES,
    VOCAB,
    assert_same_logits,
    forward,
    load,
    random_model,
    read_config,
    reference,
    save,
    tokens,
)
from tests.models.counting import StorageCounter
from tests.models.test_footprint_model import NoAttention

LENGTH = 30
GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_positions": 64,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HALF_HEAD = 6
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0 + 0.1 * i for i in range(HALF_HEAD)],
    "long_factor": [2.0 + 0.3 * i for i in range(HALF_HEAD)],
}

MODELS: dict[str, Any] = {
    "gpt2": transformers.GPT2Config(**GPT2),
    "gpt2, scale by layer": transformers.GPT2Config(**GPT2, scale_attn_by_inverse_layer_idx=True),
    "phi3": transformers.Phi3Config(**SIZES),
    "phi, head bias": transformers.PhiConfig(**SIZES),
    "granite, scaled logits": transformers.GraniteConfig(
        **SIZES, attention_multiplier=0.3, logits_scaling=3.0, residual_multiplier=0.5
    ),
    "cohere, scaled logits": transformers.CohereConfig(**SIZES, logit_scale=0.3),
    "vaultgemma, capped logits": transformers.VaultGemmaConfig(
        **SIZES,
        head_dim=12,
        query_pre_attn_scalar=20,
        sliding_window=64,
        attn_logit_softcapping=None,
        final_logit_softcapping=2.0,
    ),
    "qwen3 moe": transformers.Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    theirs = random_model(MODELS[name])
    ours, spec, _ = load(save(theirs, tmp_path))
    assert not spec.native
    sequence = tokens(LENGTH)
    expected = reference(theirs, sequence)
    whole = forward(ours, spec, sequence, steps=(LENGTH,))
    assert_same_logits(whole, expected)
    pieces = forward(ours, spec, sequence, tokens(11, seed=1), steps=(7, 1, 12, 10))
    assert_same_logits(pieces, expected)


def test_native_and_routed_llama_agree(tmp_path: Path) -> None:
    folder = save(random_model(transformers.LlamaConfig(**SIZES)), tmp_path)
    native, spec, _ = load(folder)
    as_json = json.dumps(read_config(folder))
    foreign = replace(spec, native=False, config_json=as_json)
    routed = load_model(folder, foreign, "float32", Arena.unbounded(torch.device("cpu")))
    sequence = tokens(LENGTH)
    expected = forward(native, spec, sequence, steps=(20, 10))
    assert_same_logits(forward(routed, spec, sequence, steps=(20, 10)), expected)


def test_longrope_follows_the_context_and_not_the_neighbours(tmp_path: Path) -> None:
    config = transformers.Phi3Config(
        **SIZES, original_max_position_embeddings=16, rope_parameters=LONGROPE
    )
    theirs = random_model(config)
    folder = save(theirs, tmp_path)
    short, short_spec, _ = load(folder, context_length=16)
    few, many = tokens(12), tokens(40, seed=1)
    found = forward(short, short_spec, few, steps=(12,))
    assert_same_logits(found, reference(theirs, few))
    long, spec, _ = load(folder)
    whole = forward(long, spec, many, steps=(40,))
    assert_same_logits(whole, reference(theirs, many))
    alone = forward(long, spec, few, steps=(12,))
    beside = forward(long, spec, few, many, steps=(40,))
    assert_same_logits(beside, alone, 1e-5)


def test_every_parameter_and_buffer_is_adopted_and_can_be_released(tmp_path: Path) -> None:
    theirs = random_model(transformers.Phi3Config(**SIZES))
    ours, spec, arena = load(save(theirs, tmp_path))
    for name, tensor in ours.weights.items():
        assert arena.owner(tensor) == "weights", name
    num_weights = sum(tensor.numel() for tensor in theirs.parameters())
    buffers = sum(buffer.nbytes for buffer in theirs.buffers())
    assert arena.bytes("weights") == 4 * num_weights + buffers
    assert arena.bytes("weights") <= weight_bytes(spec, "float32")
    arena.release("weights")
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in ours.weights.values())


def test_tied_head_is_one_tensor(tmp_path: Path) -> None:
    ours, _, _ = load(save(random_model(MODELS["gpt2"]), tmp_path))
    embedding = ours.weights["transformer.wte.weight"]
    assert ours.head.weight.data_ptr() == embedding.data_ptr()


def test_16_bit_dummy_weights_follow_the_seed() -> None:
    config = MODELS["phi3"].to_dict() | {"architectures": ["Phi3ForCausalLM"]}
    spec = ModelSpec.from_config(config)
    first, again, other = (
        load_model(
            None,
            spec,
            "bfloat16",
            Arena.unbounded(torch.device("cpu")),
            load_format="dummy",
            seed=seed,
        )
        for seed in (5, 5, 6)
    )
    weight = first.head.weight
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight, again.head.weight)
    assert not torch.equal(weight, other.head.weight)


def test_overridden_configuration_reaches_transformers(tmp_path: Path) -> None:
    folder = save(random_model(MODELS["phi3"]), tmp_path)
    config = read_config(folder) | {"rms_norm_eps": 0.5}
    spec = ModelSpec.from_config(config)
    changed = load_model(folder, spec, "float32", Arena.unbounded(torch.device("cpu")))
    plain, _, _ = load(folder)
    sequence = tokens(8)
    difference = forward(changed, spec, sequence, steps=(8,)) - forward(
        plain, spec, sequence, steps=(8,)
    )
    assert difference.abs().max() > 0.01


@pytest.mark.parametrize("name", ["gpt2", "phi3", "qwen3 moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activation_bound_holds(name: str, dtype: str) -> None:
    config = MODELS[name].to_dict()
    config["architectures"] = [type(random_model(MODELS[name])).__name__]
    spec = ModelSpec.from_config(config)
    arena = Arena.unbounded(torch.device("cpu"))
    model = load_model(None, spec, dtype, arena, load_format="dummy", seed=1)
    for count in (1, 300, 2000):
        positions = torch.arange(count) % 64
        with torch.inference_mode(), StorageCounter() as counter:
            model.forward(torch.zeros(count, dtype=torch.int64), positions, NoAttention())
        bound = activation_bytes(spec, dtype, count)
        assert counter.peak <= bound <= 5 * counter.peak + (1 << 20)


def test_no_mask_is_made() -> None:
    """One packed row of 2,000 tokens: a mask alone would take 4 MB as booleans."""
    config = MODELS["phi3"].to_dict() | {"architectures": ["Phi3ForCausalLM"]}
    spec = ModelSpec.from_config(config)
    arena = Arena.unbounded(torch.device("cpu"))
    model = load_model(None, spec, "float32", arena, load_format="dummy", seed=1)
    peaks = []
    for count in (1000, 2000):
        with torch.inference_mode(), StorageCounter() as counter:
            model.forward(
                torch.zeros(count, dtype=torch.int64), torch.arange(count) % 64, NoAttention()
            )
        peaks.append(counter.peak)
    assert peaks[1] <= 2.01 * peaks[0]


def refused(config: Any, folder: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load(save(random_model(config), folder))
    assert "\n" not in str(caught.value)


def test_attention_sinks_are_refused(tmp_path: Path) -> None:
    config = transformers.GptOssConfig(
        **SIZES, head_dim=12, num_local_experts=2, num_experts_per_tok=1, sliding_window=64
    )
    refused(config, tmp_path, "layer 0 asks attention for attention sinks")


def test_own_attention_is_refused(tmp_path: Path) -> None:
    config = transformers.StableLmConfig(**SIZES)
    refused(config, tmp_path, "StableLmForCausalLM computes attention in its own way")


def test_arguments_that_are_not_handed_on_are_refused(tmp_path: Path) -> None:
    refused(transformers.NemotronConfig(**SIZES), tmp_path, "does not hand its keyword arguments")


def test_unsaid_window_is_refused(tmp_path: Path) -> None:
    """Phi-3 with a window that config.json states, read as if it did not."""
    folder = save(random_model(transformers.Phi3Config(**SIZES, sliding_window=8)), tmp_path)
    with pytest.raises(ConfigError, match="sliding_window 8"):
        load(folder)
    config = read_config(folder)
    spec = ModelSpec.from_config(config | {"sliding_window": None})
    spec = replace(spec, config_json=json.dumps(config))
    with pytest.raises(ModelError, match="a window of 8 tokens, which is not built yet"):
        load_model(folder, spec, "float32", Arena.unbounded(torch.device("cpu")))


def test_sizes_that_config_json_does_not_tell_are_refused(tmp_path: Path) -> None:
    folder = save(random_model(MODELS["phi3"]), tmp_path)
    spec = replace(ModelSpec.from_config(read_config(folder)), num_kv_heads=4)
    with pytest.raises(ModelError, match=r"attends with .* shapes .* config\.json promises"):
        load_model(folder, spec, "float32", Arena.unbounded(torch.device("cpu")))


def test_unknown_model_type_is_refused() -> None:
    config = {**SIZES, "architectures": ["WondrousForCausalLM"], "model_type": "wondrous"}
    spec = ModelSpec.from_config(config)
    with pytest.raises(ModelError, match="WondrousForCausalLM is not known to transformers"):
        load_model(None, spec, "float32", Arena.unbounded(torch.device("cpu")), load_format="dummy")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("transformer.h.0.ln_1.weight", None, "missing tensor transformer.h.0.ln_1.weight"),
        ("transformer.h.0.ln_9.weight", torch.ones(3), "unexpected tensor .*ln_9"),
        (
            "transformer.h.0.ln_1.weight",
            torch.ones(3),
            r"ln_1\.weight of shape \[3\] instead of \[48\]",
        ),
    ],
)
def test_broken_checkpoints_are_refused(
    tmp_path: Path, name: str, value: Tensor | None, message: str
) -> None:
    folder = save(random_model(MODELS["gpt2"]), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    if value is not None:
        tensors[name] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_truncated_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = save(random_model(MODELS["gpt2"]), tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read"):
        load(folder)


class Faulty:
    """A model that scales its logits, or asks another's attention from its nth step on."""

    def __init__(self, inner: Any, *, scale: float = 1.0, strays_after: int = 100) -> None:
        head = inner.head
        self.head = HeadWeights(weight=head.weight, bias=head.bias, scale=scale)
        self.weights = inner.weights
        self._inner = inner
        self._steps_left = strays_after

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attention: Any) -> Tensor:
        if self._steps_left == 0:
            lengths = attention._lengths
            attention = DenseAttention(12**-0.5)
            attention.prepare(lengths)
        else:
            self._steps_left -= 1
        hidden: Tensor = self._inner.forward(tokens_T, positions_T, attention)
        return hidden


def test_check_finds_wrong_logits_and_lost_state(tmp_path: Path) -> None:
    theirs = random_model(transformers.LlamaConfig(**SIZES))
    ours, spec, _ = load(save(theirs, tmp_path))

    def own(sequence: Tensor) -> Tensor:
        return reference(theirs, sequence)

    with torch.inference_mode():
        check_routing(ours, spec, own)
        with pytest.raises(ModelError, match=r"logits in one step differ .* the limit is 0.001"):
            check_routing(Faulty(ours, scale=1.01), spec, own)
        with pytest.raises(ModelError, match="attention was asked by layers"):
            check_routing(Faulty(ours, strays_after=0), spec, own)
        with pytest.raises(ModelError, match=r"logits in two steps differ .* the limit is 0.001"):
            check_routing(Faulty(ours, strays_after=1), spec, own)
        with pytest.raises(ModelError, match="attention was asked by layers"):
            check_routing(ours, replace(spec, num_layers=3), own)


BLOCKED = """
import json, sys
sys.modules["transformers"] = None
import torch
from pathlib import Path
from seawall.device.arena import Arena
from seawall.memory.spec import ModelSpec
from seawall.models.registry import load_model
folder = Path(sys.argv[1])
spec = ModelSpec.from_config(json.loads((folder / "config.json").read_text()))
load_model(folder, spec, "float32", Arena.unbounded(torch.device("cpu")))
print("loaded")
"""


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [("llama", 0, ""), ("gpt2", 1, "needs transformers, which is not installed")],
)
def test_transformers_is_imported_only_when_needed(
    tmp_path: Path, name: str, code: int, message: str
) -> None:
    config = transformers.LlamaConfig(**SIZES) if name == "llama" else MODELS[name]
    folder = save(random_model(config), tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert message in done.stderr
