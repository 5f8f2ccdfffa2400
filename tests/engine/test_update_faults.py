"""What goes wrong around an update of weights never reaches a result."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from seawall import Engine
from seawall.core.errors import EngineError
from tests.engine.harness import open_engine, prompt, score_from
from tests.models.checkpoints import read_config

IDS = list(prompt(14, 3))
PARAMS = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


def in_order(engine: Engine, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results or errors of calls that reach the core at once, in this order."""
    gate, held = threading.Event(), threading.Event()
    results: list[Any] = [None] * len(calls)

    def attempt(at: int) -> None:
        try:
            results[at] = calls[at]()
        except Exception as error:
            results[at] = error

    def hold() -> None:
        held.set()
        gate.wait()

    threads = [threading.Thread(target=lambda: engine._thread.call(hold))]
    threads[0].start()
    held.wait()
    for at in range(len(calls)):
        threads.append(threading.Thread(target=attempt, args=(at,)))
        threads[-1].start()
        while engine._thread._inbox.qsize() <= at:
            time.sleep(0.001)
    gate.set()
    for thread in threads:
        thread.join(60)
    return results


def generate(engine: Engine) -> dict[str, Any]:
    result: dict[str, Any] = engine.generate(input_ids=IDS, sampling_params=PARAMS)
    return result


def is_refused(result: Any) -> bool:
    """An error, or a result that ended with one."""
    if isinstance(result, Exception):
        return True
    reason = result["meta_info"]["finish_reason"]
    return reason["type"] == "abort" and reason["status_code"] == 503


def test_release_waits_for_requests_that_wait_for_an_update(tiny: Path) -> None:
    with open_engine(tiny) as engine:
        right = generate(engine)["output_ids"]
        updated, result, released = in_order(
            engine,
            [
                lambda: engine.update_weights_from_disk(str(tiny)),
                lambda: generate(engine),
                engine.release_memory_occupation,
            ],
        )
        assert updated[0] is True
        assert result["output_ids"] == right
        assert isinstance(released, EngineError)
        assert "requests run" in str(released)


def test_an_update_that_breaks_off_serves_nobody(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is replaced while it is read: half of the weights are new."""
    import seawall.engine.weights as module  # noqa: PLC0415  # patched below

    tensors = load_file(tiny / "model.safetensors")
    names = sorted(tensors)
    halves = {"a": names[: len(names) // 2], "b": names[len(names) // 2 :]}
    for half, chosen in halves.items():
        save_file({n: tensors[n] * 1.3 for n in chosen}, tmp_path / f"{half}.safetensors")
    weight_map = {n: f"{half}.safetensors" for half, chosen in halves.items() for n in chosen}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(read_config(tiny)))
    copy = module.copy_folder

    def racing(folder: Path, views: Any) -> None:
        if folder == tmp_path:
            second = folder / "b.safetensors"
            second.write_bytes(second.read_bytes()[:100])
        copy(folder, views)

    monkeypatch.setattr(module, "copy_folder", racing)
    with open_engine(tiny) as engine:
        right = generate(engine)
        results = in_order(
            engine,
            [
                lambda: engine.update_weights_from_disk(str(tmp_path)),
                lambda: generate(engine),
                lambda: generate(engine),
            ],
        )
        assert isinstance(results[0], Exception)
        assert all(is_refused(result) for result in results[1:]), results
        with pytest.raises(EngineError, match="an update broke off"):
            generate(engine)
        engine.update_weights_from_disk(str(tiny))
        assert generate(engine)["output_ids"] == right["output_ids"]


def test_a_second_update_does_not_let_requests_past_the_first(tiny: Path) -> None:
    with open_engine(tiny) as engine:
        results = in_order(
            engine,
            [
                lambda: engine.update_weights_from_disk(str(tiny), weight_version="v1"),
                lambda: generate(engine),
                lambda: engine.update_weights_from_disk(str(tiny), weight_version="v2"),
            ],
        )
        assert results[1]["meta_info"]["weight_version"] in ("v1", "v2")


def test_an_update_is_refused_while_the_cache_cannot_be_emptied(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {name: t * 1.2 for name, t in load_file(tiny / "model.safetensors").items()}
    with open_engine(tiny) as engine:
        before = score_from(engine, IDS, 0)
        with monkeypatch.context() as patch:
            patch.setattr(engine._assembly.core.leases, "flush", lambda: False)
            with pytest.raises(EngineError, match="cached prefixes are held"):
                engine.update_weights_from_tensor(tensors, weight_version="v1")
            with pytest.raises(EngineError, match="cached prefixes are held"):
                engine.release_memory_occupation(["kv_cache"])
        after = score_from(engine, IDS, 0)
        assert after["weight_version"] == before["weight_version"]
        assert after["input_token_logprobs"] == before["input_token_logprobs"]


def test_a_lock_that_nobody_gives_back_does_not_keep_old_kv(tiny: Path) -> None:
    tensors = {name: t * 1.2 for name, t in load_file(tiny / "model.safetensors").items()}
    with open_engine(tiny) as engine:
        score_from(engine, IDS, 0)
        cache = engine._assembly.core.leases.cache

        def leak() -> None:
            cache.lock(next(iter(cache.nodes())))

        engine._thread.call(leak)
        score_from(engine, IDS, 0)
        assert engine.memory_report()["violations"]
        engine.update_weights_from_tensor(tensors, weight_version="v1")
        found = score_from(engine, IDS, 0)
        assert found["cached_tokens"] == 0
        engine.flush_cache()
        again = score_from(engine, IDS, 0)
    pairs = zip(found["input_token_logprobs"], again["input_token_logprobs"], strict=True)
    assert all(a[0] is b[0] is None or abs(a[0] - b[0]) < 5e-5 for a, b in pairs)


def test_kept_kv_does_not_keep_logprobs_of_old_weights(tiny: Path) -> None:
    head = load_file(tiny / "model.safetensors")["lm_head.weight"]
    ids = list(prompt(33, 5))
    with open_engine(tiny) as engine:
        score_from(engine, ids, 0, top_logprobs_num=3)
        engine.update_weights_from_tensor(
            {"lm_head.weight": head * 0.5}, flush_cache=False, weight_version="v1"
        )
        kept = score_from(engine, ids, 0, top_logprobs_num=3)
        engine.flush_cache()
        computed = score_from(engine, ids, 0, top_logprobs_num=3)
    pairs = zip(kept["input_token_logprobs"], computed["input_token_logprobs"], strict=True)
    # The KV does not depend on the head, so the numbers must be those of the new one.
    assert all(a[0] is b[0] is None or abs(a[0] - b[0]) < 5e-5 for a, b in pairs)
    assert kept["weight_version"] == "v1"
