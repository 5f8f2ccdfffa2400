"""New weights for a running engine: whole or not at all, and never mixed with the old ones."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from seawall import Engine
from seawall.core.errors import ConfigError, EngineError, ModelError, RequestError
from tests.engine.harness import GREEDY, Probe, open_engine, prompt, run, run_alone, score_from
from tests.engine.meeting import meet
from tests.models.checkpoints import SIZES, random_model, read_config, save

SINGLE = "model.safetensors"
IDS = list(prompt(14, 3))
PROBES = [
    Probe(ids=prompt(14, 3), params=GREEDY, start_len=0),
    Probe(ids=prompt(30, 4), params={"max_new_tokens": 5, "sampling_seed": 3, "top_p": 0.9}),
    Probe(ids=prompt(9, 5), params={"max_new_tokens": 4, "sampling_seed": 4, "n": 2}),
]


def copied(source: Path, folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> Path:
    """A checkpoint whose tensors went through `edit`."""
    folder.mkdir(exist_ok=True)
    tensors = load_file(source / SINGLE)
    edit(tensors)
    save_file(tensors, folder / SINGLE)
    (folder / "config.json").write_text(json.dumps(read_config(source)))
    return folder


def shuffle(tensors: dict[str, Tensor]) -> None:
    """Other numbers of the same size, the same for the same tensors."""
    for tensor in tensors.values():
        tensor.copy_(tensor.flip(-1) * 1.1)


@pytest.fixture(scope="module")
def other(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another checkpoint of the tiny model."""
    return copied(tiny, tmp_path_factory.mktemp("other"), shuffle)


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with open_engine(tiny, debug_memory=True) as engine:
        yield engine


def fresh(folder: Path) -> Any:
    with open_engine(folder) as engine:
        return plain(run_alone(engine, PROBES))


def plain(results: Any) -> Any:
    """What does not depend on when and under which name a request ran."""
    kept = {"finish_reason", "input_token_logprobs", "output_token_logprobs", "output_top_logprobs"}
    return [
        [
            (one["output_ids"], {k: v for k, v in one["meta_info"].items() if k in kept})
            for one in samples
        ]
        for samples in results
    ]


def versions(results: Any) -> set[str]:
    return {one["meta_info"]["weight_version"] for samples in results for one in samples}


@pytest.fixture(scope="module")
def expected(tiny: Path, other: Path) -> dict[str, Any]:
    found = {"tiny": fresh(tiny), "other": fresh(other)}
    assert found["tiny"] != found["other"]
    return found


def test_from_disk_equals_a_fresh_engine_there_and_back(
    engine: Engine, tiny: Path, other: Path, expected: dict[str, Any]
) -> None:
    results = run_alone(engine, PROBES)
    assert plain(results) == expected["tiny"]
    assert versions(results) == {"default"}
    done, message = engine.update_weights_from_disk(str(other), weight_version="step 1")
    assert done and str(other) in message
    assert engine.memory_report()["pages"]["cached"] == 0
    results = run_alone(engine, PROBES)
    assert plain(results) == expected["other"]
    assert versions(results) == {"step 1"}
    engine.update_weights_from_disk(str(tiny), load_format="safetensors", weight_version="default")
    assert plain(run_alone(engine, PROBES)) == expected["tiny"]
    assert engine.memory_report()["violations"] == []


def test_from_tensors_equals_a_fresh_engine(
    engine: Engine, tiny: Path, other: Path, expected: dict[str, Any]
) -> None:
    tensors = load_file(other / SINGLE)
    assert any(name.endswith("q_proj.weight") for name in tensors)
    assert any(name.endswith("up_proj.weight") for name in tensors)
    run_alone(engine, PROBES)
    assert engine.memory_report()["pages"]["cached"] > 0
    engine.update_weights_from_tensor(list(tensors.items()), weight_version="t")
    assert engine.memory_report()["pages"]["cached"] == 0
    results = run_alone(engine, PROBES)
    assert plain(results) == expected["other"]
    assert versions(results) == {"t"}
    assert engine.get_server_info()["weight_version"] == "t"
    # Without a name the version stays, and a generator of pairs does as well.
    back = load_file(tiny / SINGLE)
    engine.update_weights_from_tensor(pair for pair in back.items())
    results = run_alone(engine, PROBES)
    assert plain(results) == expected["tiny"]
    assert versions(results) == {"t"}
    engine.update_weights_from_disk(str(tiny), weight_version="default")


def test_bit_by_bit_in_buckets(
    engine: Engine, tiny: Path, other: Path, expected: dict[str, Any]
) -> None:
    run_alone(engine, PROBES)
    pairs = sorted(load_file(other / SINGLE).items())
    for at in range(0, len(pairs), 5):
        last = at + 5 >= len(pairs)
        engine.update_weights_from_tensor(pairs[at : at + 5], flush_cache=last)
        assert (engine.memory_report()["pages"]["cached"] == 0) is last
    assert plain(run_alone(engine, PROBES)) == expected["other"]
    engine.update_weights_from_disk(str(tiny))


def test_sources_of_any_layout(engine: Engine, tiny: Path, other: Path, expected: Any) -> None:
    def spread(tensor: Tensor) -> Tensor:
        wide = torch.empty((*tensor.shape[:-1], 2 * tensor.shape[-1]))
        wide[..., ::2] = tensor
        return wide[..., ::2].requires_grad_(True)

    tensors = {name: spread(tensor) for name, tensor in load_file(other / SINGLE).items()}
    assert not next(iter(tensors.values())).is_contiguous()
    engine.update_weights_from_tensor(tensors)
    assert plain(run_alone(engine, PROBES)) == expected["other"]
    engine.update_weights_from_disk(str(tiny))


NORM = "model.norm.weight"
BAD_TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "name": (lambda t: [("model.nrom.weight", t[NORM])], r"model\.nrom\.weight.* none"),
    "shape": (
        lambda t: [(NORM, t[NORM][:-1])],
        r"model\.norm\.weight: got float32 \[47\], the model has float32 \[48\]",
    ),
    "dtype": (
        lambda t: [(NORM, t[NORM].bfloat16())],
        r"got bfloat16 \[48\], the model has float32 \[48\]; convert",
    ),
    "twice": (lambda t: [(NORM, t[NORM]), (NORM, t[NORM])], "given twice"),
    "no pair": (lambda t: [NORM], "an item of type str is no pair"),
    "no tensor": (lambda t: [(NORM, [1.0])], "no pair of a name and a tensor"),
    "no list": (lambda t: 7, "got int, give pairs"),
}


def test_tensors_that_do_not_fit_change_nothing(
    engine: Engine, other: Path, expected: dict[str, Any]
) -> None:
    tensors = load_file(other / SINGLE)
    good = [("model.embed_tokens.weight", tensors["model.embed_tokens.weight"])]
    for make, message in BAD_TENSORS.values():
        bad = make(tensors)
        with pytest.raises(ModelError, match=message):
            engine.update_weights_from_tensor([*good, *bad] if isinstance(bad, list) else bad)
    assert plain(run_alone(engine, PROBES)) == expected["tiny"]


def test_folders_that_do_not_fit_change_nothing(
    engine: Engine, tiny: Path, other: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    last = "model.layers.1.mlp.up_proj.weight"
    edits: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
        "missing": (lambda t: t.pop(last), f"missing tensor {last}"),
        "shape": (lambda t: t.update({last: t[last][:, 1:].contiguous()}), f"{last} has shape"),
        "more": (lambda t: t.update({"z": t[last].clone()}), "unexpected tensor z"),
        "kind": (lambda t: t.update({last: t[last].to(torch.int8)}), f"{last} is of type int8"),
    }
    for name, (edit, message) in edits.items():
        folder = copied(other, tmp_path / name, edit)
        with pytest.raises(ModelError, match=message):
            engine.update_weights_from_disk(str(folder))
    folder = copied(other, tmp_path / "config", lambda t: None)
    config = read_config(other) | {"rms_norm_eps": 0.5}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"norm_eps is 0\.5, the engine serves a model with"):
        engine.update_weights_from_disk(str(folder))
    with pytest.raises(ConfigError, match=r"no config\.json"):
        engine.update_weights_from_disk(str(tmp_path))
    with pytest.raises(ConfigError, match="load_format: got 'gguf'"):
        engine.update_weights_from_disk(str(other), load_format="gguf")
    with pytest.raises(ConfigError, match="load_format: got 'flattened_bucket', not built"):
        engine.update_weights_from_tensor([], load_format="flattened_bucket")
    assert plain(run_alone(engine, PROBES)) == expected["tiny"]


def test_another_dtype_on_disk_is_converted(
    engine: Engine, tiny: Path, other: Path, tmp_path: Path
) -> None:
    def halve(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})

    folder = copied(other, tmp_path / "half", halve)
    engine.update_weights_from_disk(str(folder))
    assert plain(run_alone(engine, PROBES)) == fresh(folder)
    engine.update_weights_from_disk(str(tiny))


def test_values_by_name(engine: Engine, tiny: Path) -> None:
    tensors = load_file(tiny / SINGLE)
    for name in ("lm_head.weight", "model.layers.1.self_attn.v_proj.weight", NORM):
        assert engine.get_weights_by_name(name, 3) == tensors[name][:3].tolist()
    assert len(engine.get_weights_by_name("model.embed_tokens.weight")) == 97
    assert len(engine.get_weights_by_name(NORM)) == 48
    assert engine.get_weights_by_name(NORM, 0) == []
    with pytest.raises(RequestError, match=r"no weight 'model\.nrom\.weight'"):
        engine.get_weights_by_name("model.nrom.weight")
    with pytest.raises(RequestError, match="truncate_size: got -1"):
        engine.get_weights_by_name(NORM, -1)


def test_running_requests_end_with_old_weights_and_later_ones_wait(
    engine: Engine, tiny: Path, other: Path, expected: dict[str, Any]
) -> None:
    assert engine.flush_cache()
    first = PROBES[0]
    results, error = meet(
        engine,
        lambda: run(engine, [first]),
        lambda: engine.update_weights_from_disk(str(other), weight_version="new"),
    )
    assert error is None
    assert plain(results) == expected["tiny"][:1]
    assert versions(results) == {"default"}
    results = run_alone(engine, PROBES)
    assert plain(results) == expected["other"]
    assert versions(results) == {"new"}
    engine.update_weights_from_disk(str(tiny), weight_version="default")


def test_requests_that_arrive_during_the_wait_are_computed_with_new_weights(
    engine: Engine, tiny: Path, other: Path, expected: dict[str, Any]
) -> None:
    async def all_at_once() -> tuple[Any, Any]:
        long = engine.async_generate(
            input_ids=IDS, sampling_params={"max_new_tokens": 45, "ignore_eos": True}
        )
        first = asyncio.create_task(long)
        await asyncio.sleep(0)
        update = asyncio.create_task(
            asyncio.to_thread(engine.update_weights_from_disk, str(other), weight_version="new")
        )
        while engine._assembly.core.scheduler._queue._held_from is None and not update.done():
            await asyncio.sleep(0.001)
        late = await engine.async_generate(input_ids=list(PROBES[0].ids), sampling_params=GREEDY)
        await update
        return await first, late

    first, late = asyncio.run(all_at_once())
    assert first["meta_info"]["weight_version"] == "default"
    assert first["meta_info"]["completion_tokens"] == 45
    assert late["meta_info"]["weight_version"] == "new"
    assert late["output_ids"] == expected["other"][0][0][0]
    engine.update_weights_from_disk(str(tiny), weight_version="default")


def test_aborting_instead_of_waiting(engine: Engine, other: Path, tiny: Path) -> None:
    params = {"max_new_tokens": 40, "ignore_eos": True}
    result, error = meet(
        engine,
        lambda: engine.generate(input_ids=IDS, sampling_params=params),
        lambda: engine.update_weights_from_disk(str(other), abort_all_requests=True),
    )
    assert error is None
    assert result["meta_info"]["finish_reason"]["type"] == "abort"
    assert engine.memory_report()["pages"]["in_use"] == 0
    engine.update_weights_from_disk(str(tiny))


def test_an_update_that_waits_ends_with_the_engine(tiny: Path, other: Path) -> None:
    engine = open_engine(tiny)
    core = engine._assembly.core
    # Never idle: what waits for that must be answered all the same.
    core.settle = lambda: False  # type: ignore[method-assign]
    raised: list[Exception] = []

    def update() -> None:
        try:
            engine.update_weights_from_disk(str(other))
        except EngineError as error:
            raised.append(error)

    thread = threading.Thread(target=update)
    thread.start()
    while not engine._thread._put_off:
        time.sleep(0.001)
    engine.shutdown()
    thread.join(60)
    assert "was shut down" in str(raised[0])


def test_a_training_loop_does_not_grow(engine: Engine, tiny: Path, other: Path) -> None:
    tensors = load_file(other / SINGLE)
    seen: list[dict[str, int]] = []
    for step in range(5):
        factor = 1.0 + step / 100
        update = {name: tensor * factor for name, tensor in tensors.items()}
        engine.update_weights_from_tensor(update, weight_version=str(step))
        assert versions(run_alone(engine, PROBES)) == {str(step)}
        engine.release_memory_occupation(["kv_cache"])
        engine.resume_memory_occupation(["kv_cache"])
        measured = engine.memory_report()["measured"]
        seen.append({account: figures["now"] for account, figures in measured.items()})
    assert all(figures == seen[0] for figures in seen)
    report = engine.memory_report()
    assert report["violations"] == []
    for account, figures in report["measured"].items():
        assert figures["peak"] <= report["plan"][account], account
    engine.update_weights_from_disk(str(tiny), weight_version="default")


def test_tied_heads(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    folder = save(random_model(config), tmp_path / "tied")
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    with open_engine(folder) as engine:
        before = score_from(engine, IDS, 0)["input_token_logprobs"]
        table = load_file(folder / SINGLE)[embedding]
        assert engine.get_weights_by_name(head, 2) == table[:2].tolist()
        # The head alone, both alike, and both at odds.
        engine.update_weights_from_tensor([(head, table * 2)])
        assert score_from(engine, IDS, 0)["input_token_logprobs"] != before
        engine.update_weights_from_tensor([(head, table.clone()), (embedding, table)])
        assert score_from(engine, IDS, 0)["input_token_logprobs"] == before
        for pairs in (
            [(head, table * 2), (embedding, table)],
            [(embedding, table), (head, table * 2)],
        ):
            with pytest.raises(ModelError, match=r"differs from model\.embed_tokens\.weight"):
                engine.update_weights_from_tensor(pairs)
        assert engine.flush_cache()
        assert score_from(engine, IDS, 0)["input_token_logprobs"] == before


def test_models_of_transformers(tmp_path: Path) -> None:
    model = random_model(transformers.OlmoConfig(**SIZES))
    first = save(model, tmp_path / "first")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    second = save(model, tmp_path / "second")
    with open_engine(second) as engine:
        wanted = score_from(engine, IDS, 0)["input_token_logprobs"]
    with open_engine(first) as engine:
        assert not engine._assembly.plan.spec.native
        before = score_from(engine, IDS, 0)["input_token_logprobs"]
        engine.update_weights_from_disk(str(second))
        assert score_from(engine, IDS, 0)["input_token_logprobs"] == wanted
        engine.release_memory_occupation()
        engine.resume_memory_occupation()
        assert score_from(engine, IDS, 0)["input_token_logprobs"] == wanted
        engine.update_weights_from_tensor(load_file(first / SINGLE))
        assert score_from(engine, IDS, 0)["input_token_logprobs"] == before
        config = read_config(second) | {"clip_qkv": 0.5}
        (second / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError, match=r"config\.json differs|norm_eps"):
            engine.update_weights_from_disk(str(second))


def test_checkpoints_that_transformers_renames_are_refused_whole(tmp_path: Path) -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    folder = save(random_model(transformers.GPTNeoXConfig(**sizes)), tmp_path / "neox")
    with open_engine(folder) as engine:
        before = score_from(engine, IDS, 0)["input_token_logprobs"]
        with pytest.raises(ModelError, match=r"embed_out\.weight.*only checkpoints that have"):
            engine.update_weights_from_disk(str(folder))
        with pytest.raises(ModelError, match="only checkpoints that have the names"):
            engine.release_memory_occupation()
        engine.release_memory_occupation(["kv_cache"])
        engine.resume_memory_occupation()
        assert score_from(engine, IDS, 0)["input_token_logprobs"] == before


def test_the_demo_model_doubled(demo: Engine, ids: list[int], scored: list[float | None]) -> None:
    norm = torch.tensor(demo.get_weights_by_name(NORM, 4096))
    demo.update_weights_from_tensor([(NORM, norm * 2)], weight_version="doubled")
    meta = score_from(demo, ids, 0)
    assert meta["weight_version"] == "doubled"
    assert [entry[0] for entry in meta["input_token_logprobs"]] != scored
    demo.update_weights_from_disk("demo", weight_version="default")
    found = [entry[0] for entry in score_from(demo, ids, 0)["input_token_logprobs"]]
    assert found == scored
