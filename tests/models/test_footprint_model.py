"""What the plan says of a model against what it takes, to the byte."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seawall.device.arena import Arena
from seawall.memory.footprint_model import activation_bytes, weight_bytes
from seawall.memory.spec import ModelSpec
from seawall.models.registry import load_model
from tests.models.counting import StorageCounter

ROPES = (
    None,
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
)


class NoAttention:
    """Makes the tensor that attention returns and nothing else."""

    def run(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int) -> Tensor:
        return torch.zeros(q_THD.shape, dtype=q_THD.dtype)


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    num_kv_heads = draw(st.sampled_from((1, 2, 3)))
    names = (
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
    )
    config = {
        "architectures": [draw(st.sampled_from(names))],
        "hidden_size": draw(st.sampled_from((16, 64, 200))),
        "intermediate_size": draw(st.sampled_from((16, 64, 300))),
        "num_hidden_layers": 2,
        "num_attention_heads": num_kv_heads * draw(st.sampled_from((1, 2, 4))),
        "num_key_value_heads": num_kv_heads,
        "head_dim": draw(st.sampled_from((8, 16, 64))),
        "vocab_size": 50,
        "max_position_embeddings": 600,
        "sliding_window": None,
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "rope_scaling": draw(st.sampled_from(ROPES)),
        "partial_rotary_factor": draw(st.sampled_from((0.5, 1.0))),
    }
    return ModelSpec.from_config(config)


@settings(max_examples=60)
@given(
    spec=specs(),
    dtype=st.sampled_from(("float32", "bfloat16", "float16")),
    num_tokens=st.sampled_from((1, 7, 64, 500)),
)
def test_native_footprints_hold(spec: ModelSpec, dtype: str, num_tokens: int) -> None:
    arena = Arena.unbounded(torch.device("cpu"))
    model = load_model(None, spec, dtype, arena, load_format="dummy", seed=1)
    assert arena.bytes("weights") == weight_bytes(spec, dtype)
    tokens = torch.zeros(num_tokens, dtype=torch.int64)
    positions = torch.arange(num_tokens)
    with torch.inference_mode(), StorageCounter() as counter:
        hidden = model.forward(tokens, positions, NoAttention())
    bound = activation_bytes(spec, dtype, num_tokens)
    assert counter.live == hidden.nbytes
    assert counter.peak <= bound <= 1.5 * counter.peak + 65536


def test_counter_counts_storages_once_and_until_they_die() -> None:
    given_tensor = torch.ones(10)
    with StorageCounter() as counter:
        first = given_tensor + 1
        view = first[2:].view(2, 4)
        second = view * 2
        assert counter.live == 40 + 32
        del first, second
        assert counter.live == 40
        del view
        assert counter.live == 0
    assert counter.peak == 72
