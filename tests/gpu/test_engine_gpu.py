"""The engine on a GPU: parity, bytes against the plan, no waiting, no growth."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_checks import (
    FAMILIES,
    batch,
    check_attention,
    largest_difference,
    memory_use,
    results,
    same_tokens,
    tiny_checkpoint,
)

import seawall
from seawall import Engine
from tests.engine.harness import open_engine

pytestmark = pytest.mark.gpu
FOLDER = Path(seawall.__file__).parent / "demo_model"
PROMPTS: list[dict[str, Any]] = json.loads((FOLDER / "reference.json").read_text())["prompts"]


@pytest.mark.parametrize("seed", range(60))
def test_attention(seed: int) -> None:
    check_attention(seed)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def demo(request: pytest.FixtureRequest) -> Iterator[tuple[str, Engine]]:
    with open_engine(
        "demo", device="cuda", dtype=request.param, memory_budget="4GiB", page_size=16
    ) as engine:
        yield request.param, engine


def differences(engine: Engine) -> list[float]:
    found = engine.generate(
        input_ids=[prompt["token_ids"] for prompt in PROMPTS],
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=0,
    )
    gaps = []
    for result, prompt in zip(found, PROMPTS, strict=True):
        ours = [entry[0] for entry in result["meta_info"]["input_token_logprobs"]]
        pairs = zip(ours[1:], prompt["prompt_logprobs"][1:], strict=True)
        gaps += [abs(a - b) for a, b in pairs]
    return gaps


def test_prompt_logprobs(demo: tuple[str, Engine]) -> None:
    dtype, engine = demo
    found = differences(engine)
    assert len(found) > 100
    if dtype == "float32":
        assert max(found) <= 1e-4
    else:
        assert sum(found) / len(found) <= 0.02
        assert max(found) <= 0.2


def test_float32_continuations(demo: tuple[str, Engine]) -> None:
    dtype, engine = demo
    found = engine.generate(
        input_ids=[prompt["token_ids"] for prompt in PROMPTS],
        sampling_params={"max_new_tokens": 32, "temperature": 0, "ignore_eos": True},
        return_logprob=True,
    )
    equal = [r["output_ids"] == p["greedy_ids"] for r, p in zip(found, PROMPTS, strict=True)]
    assert all(equal) if dtype == "float32" else sum(equal) >= len(equal) // 3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_model_equals_the_cpu(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(family, tmp_path)
    ours, theirs = results(folder, "cuda"), results(folder, "cpu")
    assert largest_difference(ours, theirs) <= 1e-4
    assert same_tokens(ours, theirs) == 1.0


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_graphs_equal_eager(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(family, tmp_path)
    ours = results(folder, "cuda")
    theirs = results(folder, "cuda", disable_cuda_graph=True)
    assert same_tokens(ours, theirs) == 1.0
    assert largest_difference(ours, theirs) <= 2e-5


def test_graphs_are_replayed(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    with open_engine(folder, device="cuda", memory_budget="4GiB") as engine:
        graphs = engine._assembly.runner._graphs
        replayed: list[int] = []
        inner = graphs.replay
        graphs.replay = lambda bucket: (replayed.append(bucket), inner(bucket))[1]
        engine.generate(
            input_ids=[[5, 6, 7]] * 3,
            sampling_params={"max_new_tokens": 9, "ignore_eos": True, "temperature": 0},
        )
    # The first token of each comes from its prompt's step, and the requests may come one by one.
    assert len(replayed) >= 7
    assert set(replayed) <= {1, 2, 4}


def test_no_step_waits_for_the_device(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    with open_engine(folder, device="cuda", memory_budget="4GiB") as engine:
        expected = engine.generate(**batch())
        assert engine.flush_cache()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = engine.generate(**batch())
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [r["output_ids"] for r in found] == [r["output_ids"] for r in expected]


def test_bytes_stay_within_the_plan_and_do_not_grow(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    with open_engine(folder, device="cuda", memory_budget="4GiB") as engine:
        engine.generate(**batch())
        before = memory_use(engine)
        for _ in range(5):
            engine.generate(**batch())
        after = memory_use(engine)
        report = engine.memory_report()
    lines = report["plan"]
    assert report["violations"] == []
    assert after["allocated"] == before["allocated"]
    # Idle, there are the arena's tensors and cuBLAS's workspace; what a step adds is planned.
    assert after["peak"] - after["allocated"] <= lines["activations"] + lines["logits"]
    assert after["in_use"] <= after["budget"]
    assert after["reserved_peak"] == before["reserved_peak"]
