"""The embedded model against its reference, which transformers made."""

import json
from pathlib import Path
from typing import Any

import pytest

import seawall
from seawall import Engine
from tests.engine.harness import open_engine

REFERENCE: dict[str, Any] = json.loads(
    (Path(seawall.__file__).parent / "demo_model" / "reference.json").read_text()
)
PROMPTS: list[dict[str, Any]] = REFERENCE["prompts"]
IDS: list[list[int]] = [prompt["token_ids"] for prompt in PROMPTS]


def prompt_logprobs(engine: Engine) -> list[list[float | None]]:
    results = engine.generate(
        input_ids=IDS,
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=0,
    )
    return [[entry[0] for entry in r["meta_info"]["input_token_logprobs"]] for r in results]


def differences(engine: Engine) -> list[float]:
    found = []
    for ours, prompt in zip(prompt_logprobs(engine), PROMPTS, strict=True):
        theirs = prompt["prompt_logprobs"]
        assert ours[0] is theirs[0] is None
        found += [abs(a - b) for a, b in zip(ours[1:], theirs[1:], strict=True) if a is not None]
    return found


def test_float32_prompt_logprobs(demo: Engine) -> None:
    found = differences(demo)
    assert len(found) == sum(map(len, IDS)) - len(IDS)
    assert max(found) <= 1e-4


def test_float32_continuations(demo: Engine) -> None:
    """Greedy, 32 tokens, token for token; the best five after each prompt."""
    results = demo.generate(
        input_ids=IDS,
        sampling_params={"max_new_tokens": 32, "temperature": 0, "ignore_eos": True},
        return_logprob=True,
        top_logprobs_num=5,
    )
    for result, prompt in zip(results, PROMPTS, strict=True):
        meta = result["meta_info"]
        assert result["output_ids"] == prompt["greedy_ids"]
        best = meta["output_top_logprobs"][0]
        assert [entry[1] for entry in best] == [entry["id"] for entry in prompt["last_top5"]]
        for ours, theirs in zip(best, prompt["last_top5"], strict=True):
            assert ours[0] == pytest.approx(theirs["logprob"], abs=1e-4)
        ours = [entry[0] for entry in meta["output_token_logprobs"]]
        assert ours == pytest.approx(prompt["greedy_logprobs"], abs=1e-4)


def test_bfloat16_prompt_logprobs() -> None:
    with open_engine("demo", dtype="bfloat16", memory_budget="256MiB", page_size=16) as engine:
        found = differences(engine)
    assert sum(found) / len(found) <= 0.02
    assert max(found) <= 0.2
    # It did run in bfloat16.
    assert max(found) > 1e-3
