"""Plans for a GPU, made without one: defaults, accounts, and what is refused."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from seawall.core.config import EngineConfig
from seawall.core.errors import ConfigError
from seawall.engine.planning import EnginePlan, make_plan
from seawall.memory.footprint_cuda import graph_buckets

H200 = 150_754_820_096
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 128_001,
}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(tmp_path)


def planned(folder: str, *, memory: int | None = H200, **args: Any) -> EnginePlan:
    config = EngineConfig.from_args({"model_path": folder, "load_format": "dummy", **args}, "cuda")
    return make_plan(config, device_memory=memory)


def test_defaults_of_a_large_card(folder: str) -> None:
    plan = planned(folder, context_length=2048)
    assert plan.dtype == plan.kv_dtype == "bfloat16"
    assert plan.limits.max_running == 4096
    assert plan.limits.step_tokens == 4096 + 8192
    assert plan.memory.budget_bytes <= H200 * 0.95
    assert plan.max_total_tokens >= 930_000
    lines = plan.memory.lines
    fixed = sum(lines.values()) - lines["kv"]
    assert lines["kv"] >= 0.97 * (plan.memory.budget_bytes - fixed)
    assert plan.host.lines["staging"] > 0


def test_seats_are_what_the_host_holds(folder: str) -> None:
    """A running request of 131,072 tokens takes 1.5 MiB of the host's budget."""
    assert 1000 < planned(folder).limits.max_running < 2000
    roomy = planned(folder, host_memory_budget="32GiB")
    assert roomy.limits.max_running == 4096
    assert planned(folder, max_running_requests=7).limits.max_running == 7


def test_graphs_have_an_account(folder: str) -> None:
    def graphs(**args: Any) -> int:
        return planned(folder, context_length=2048, **args).memory.lines["graphs"]

    assert graphs(disable_cuda_graph=True) == 0
    assert 0 < graphs(cuda_graph_max_bs=8) < graphs() < graphs(cuda_graph_max_bs=2048)
    assert graphs(max_running_requests=8) == graphs(cuda_graph_max_bs=8)


def test_one_row_always_fits_the_workspace(folder: str) -> None:
    with pytest.raises(ConfigError, match="logits_workspace: got 262144 bytes"):
        planned(folder, context_length=2048, logits_workspace="256KiB")


def test_the_card_must_be_known(folder: str) -> None:
    with pytest.raises(ConfigError, match="memory_budget: the GPU's memory is not known"):
        planned(folder, memory=None)
    assert planned(folder, memory=None, memory_budget="60GiB").memory.budget_bytes == 60 << 30


@pytest.mark.parametrize("most", [1, 2, 3, 8, 100, 512, 4096])
def test_buckets_ascend_to_the_most(most: int) -> None:
    found = graph_buckets(most)
    assert found == sorted(set(found))
    assert found[0] == 1
    assert found[-1] == most
    # Padding never doubles a step of more than four rows.
    assert all(2 * a >= b for a, b in pairwise(found))
