"""Memory that is given back for a while: what goes, what is refused meanwhile, what comes back."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from seawall import Engine
from seawall.core.errors import EngineError, ModelError, RequestError
from tests.engine.harness import GREEDY, make_tiny_llama, open_engine, prompt, score_from
from tests.engine.meeting import meet

IDS = list(prompt(14, 3))
ACCOUNTS = {"weights": "weights", "kv_cache": "kv"}


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with open_engine(tiny, debug_memory=True) as engine:
        yield engine


def now(engine: Engine, account: str) -> int:
    num_bytes: int = engine.memory_report()["measured"][account]["now"]
    return num_bytes


def greedy(engine: Engine) -> list[int]:
    found: list[int] = engine.generate(input_ids=IDS, sampling_params=GREEDY)["output_ids"]
    return found


@pytest.mark.parametrize(
    "tags",
    [None, ["weights", "cuda_graph"], ["weights"], ["kv_cache"], ["kv_cache", "weights"], []],
)
def test_released_bytes_come_back_with_the_same_results(
    engine: Engine, tags: list[str] | None
) -> None:
    before = greedy(engine)
    logprobs = score_from(engine, IDS, 0)["input_token_logprobs"]
    held = {account: now(engine, account) for account in ACCOUNTS.values()}
    engine.release_memory_occupation(tags)
    for tag in ACCOUNTS:
        gone = not tags or tag in tags
        left = now(engine, ACCOUNTS[tag])
        # The rotary frequencies follow from the configuration and stay: 6 float32.
        assert left == (24 if tag == "weights" else 0) if gone else left == held[ACCOUNTS[tag]]
        assert (tag in engine.get_server_info()["released"]) is gone
    engine.resume_memory_occupation(tags)
    assert {account: now(engine, account) for account in held} == held
    assert greedy(engine) == before
    assert score_from(engine, IDS, 0)["input_token_logprobs"] == logprobs
    assert engine.memory_report()["violations"] == []


def test_requests_are_refused_until_all_is_back(engine: Engine) -> None:
    engine.release_memory_occupation()
    with pytest.raises(EngineError, match="weights and kv_cache is released"):
        engine.generate(input_ids=IDS, sampling_params=GREEDY)
    engine.resume_memory_occupation(["weights"])
    with pytest.raises(EngineError, match="memory of kv_cache is released; call resume"):
        engine.score(prompts=[IDS])
    with pytest.raises(EngineError, match="is released"):
        asyncio.run(engine.async_generate(input_ids=IDS))
    # Asking twice is no error: what is there stays there.
    engine.resume_memory_occupation(["weights"])
    engine.release_memory_occupation(["kv_cache"])
    engine.resume_memory_occupation()
    assert greedy(engine)


def test_a_request_that_slips_through_is_turned_away_by_the_core(engine: Engine) -> None:
    # What a front end in another process would meet: it can't look before it sends.
    core = engine._assembly.core
    engine._thread.call(lambda: core.refuse("engine: nothing is served today"))
    read = engine._reader.read(None, IDS, {"sampling_params": GREEDY})
    found: Any = engine._run(read, lambda samples: [s.finish for s in samples.values()])
    engine._thread.call(lambda: core.refuse(None))
    assert found[0]["type"] == "abort"
    assert found[0]["status_code"] == 503
    assert found[0]["message"] == "engine: nothing is served today"


def test_releasing_flushes_the_cache(engine: Engine) -> None:
    greedy(engine)
    assert engine.memory_report()["pages"]["cached"] > 0
    engine.release_memory_occupation(["kv_cache"])
    assert engine.memory_report()["pages"]["cached"] == 0
    engine.resume_memory_occupation(["kv_cache"])
    again = engine.generate(input_ids=IDS, sampling_params=GREEDY)["meta_info"]
    assert again["cached_tokens"] == 0


def test_release_is_refused_while_requests_run(engine: Engine) -> None:
    params = {"max_new_tokens": 20, "ignore_eos": True}
    result, error = meet(
        engine,
        lambda: engine.generate(input_ids=IDS, sampling_params=params),
        engine.release_memory_occupation,
    )
    assert isinstance(error, EngineError)
    assert "0 requests run and 1 wait; let them end, or call abort_request" in str(error)
    assert len(result["output_ids"]) == 20
    assert engine.get_server_info()["released"] == []


def test_unknown_tags_release_nothing(engine: Engine) -> None:
    held = now(engine, "kv")
    with pytest.raises(RequestError, match="tags: got 'kv', the tags are weights, kv_cache"):
        engine.release_memory_occupation(["weights", "kv"])
    with pytest.raises(RequestError, match="tags: got 'lora'"):
        engine.resume_memory_occupation(["lora"])
    assert now(engine, "kv") == held
    assert greedy(engine)


def test_weights_from_tensors_must_be_given_again(tiny: Path) -> None:
    tensors = load_file(tiny / "model.safetensors")
    with open_engine(tiny) as engine:
        before = greedy(engine)
        some = {"model.norm.weight": tensors["model.norm.weight"]}
        engine.update_weights_from_tensor(some, weight_version="a")
        engine.release_memory_occupation(["weights"])
        with pytest.raises(EngineError, match="memory of the weights is released; call resume"):
            engine.update_weights_from_tensor(some)
        with pytest.raises(EngineError, match="memory of the weights is released"):
            engine.update_weights_from_disk(str(tiny))
        with pytest.raises(EngineError, match="memory of the weights is released"):
            engine.get_weights_by_name("model.norm.weight")
        engine.resume_memory_occupation(["weights"])
        engine.update_weights_from_tensor(some)
        with pytest.raises(EngineError, match=rf"{len(tensors) - 1} of {len(tensors)} have no"):
            greedy(engine)
        with pytest.raises(EngineError, match="have no content"):
            engine.get_weights_by_name("model.norm.weight")
        engine.update_weights_from_tensor(tensors)
        assert greedy(engine) == before


def test_random_weights_come_back_too(tiny: Path) -> None:
    with open_engine(tiny, load_format="dummy") as engine:
        before = greedy(engine)
        engine.release_memory_occupation(["weights"])
        engine.resume_memory_occupation(["weights"])
        assert greedy(engine) == before


def test_a_checkpoint_that_is_gone_is_not_given_up(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "model")
    with open_engine(folder) as engine:
        before = greedy(engine)
        (folder / "model.safetensors").rename(folder / "elsewhere")
        with pytest.raises(ModelError, match="neither"):
            engine.release_memory_occupation()
        assert engine.get_server_info()["released"] == []
        assert greedy(engine) == before
        (folder / "elsewhere").rename(folder / "model.safetensors")
        engine.release_memory_occupation()
        (folder / "model.safetensors").rename(folder / "elsewhere")
        with pytest.raises(ModelError, match="neither"):
            engine.resume_memory_occupation()
        with pytest.raises(EngineError, match="have no content"):
            greedy(engine)
        (folder / "elsewhere").rename(folder / "model.safetensors")
        engine.update_weights_from_disk(str(folder))
        assert greedy(engine) == before


def test_resident_memory_falls(tiny: Path) -> None:
    with open_engine(tiny, max_running_requests=1024) as engine:
        kv = now(engine, "kv")
        assert kv == 1024 * 64 * 2 * 2 * 2 * 12 * 4
        greedy(engine)
        before = engine.memory_report()["host"]["resident"]["now"]
        engine.release_memory_occupation(["kv_cache"])
        after = engine.memory_report()["host"]["resident"]["now"]
        # Zeroed pages that were never written may be shared, but the warm-up writes nearly all.
        assert before - after > kv // 2
        engine.resume_memory_occupation(["kv_cache"])
        assert greedy(engine)


def test_a_released_engine_can_be_shut_down(tiny: Path) -> None:
    engine = open_engine(tiny)
    engine.release_memory_occupation()
    engine.shutdown()
    with pytest.raises(EngineError, match="was shut down"):
        engine.resume_memory_occupation()
