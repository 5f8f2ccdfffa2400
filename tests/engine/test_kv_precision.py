"""A KV pool in fewer bits, end to end: how far logprobs move, and that memory keeps its plan.

Bounds are two to three times what was measured on the demo model in float32 with a prompt of 120
tokens (largest and mean difference of a prompt logprob; docs/memory.md).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from seawall import Engine
from seawall.core.errors import ModelError
from tests.engine.harness import GREEDY, TEXT, open_engine, prompt, score_from
from tests.models.checkpoints import read_config

BOUNDS = {
    "float32": (0.0, 0.0),
    "float16": (0.015, 0.002),
    "bf16": (0.12, 0.02),
    "fp8_e4m3": (1.8, 0.25),
    "fp8_e5m2": (2.6, 0.4),
}
BYTES = {"float32": 4, "float16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
IDS = list(prompt(40, 3))


def demo_engine(**changes: Any) -> Engine:
    sizes = {"memory_budget": "256MiB", "logits_workspace": "8MiB", "page_size": 16}
    return open_engine("demo", **(sizes | {"skip_tokenizer_init": False} | changes))


def logprobs(engine: Engine, ids: list[int]) -> Any:
    entries = score_from(engine, ids, 0)["input_token_logprobs"]
    return np.array([entry[0] for entry in entries[1:]])


@pytest.fixture(scope="module")
def long_ids(demo: Engine) -> list[int]:
    found: list[int] = demo.tokenizer.encode(TEXT * 8)  # type: ignore[union-attr]
    return found


@pytest.fixture(scope="module")
def exact(long_ids: list[int]) -> Any:
    with demo_engine() as engine:
        return logprobs(engine, long_ids)


@pytest.mark.parametrize("name", BOUNDS)
def test_logprobs_stay_near_and_memory_in_its_plan(
    long_ids: list[int], exact: Any, name: str
) -> None:
    with demo_engine(kv_cache_dtype=name, debug_memory=True) as engine:
        found = logprobs(engine, long_ids)
        difference = np.abs(found - exact)
        largest, mean = BOUNDS[name]
        assert difference.max() <= largest
        assert difference.mean() <= mean
        if name != "float32":
            assert difference.max() > 0
        engine.generate([TEXT] * 6, {"max_new_tokens": 8, "temperature": 0})
        report = engine.memory_report()
        spec = engine._assembly.plan.spec
        slots = engine.get_server_info()["max_total_num_tokens"]
        per_slot = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * BYTES[name]
        assert report["plan"]["kv"] == report["measured"]["kv"]["now"] == slots * per_slot
        assert report["violations"] == []
        for account, figures in report["measured"].items():
            assert figures["peak"] <= report["plan"][account], account


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3"])
def test_results_do_not_depend_on_cuts_or_the_cache(tiny: Path, name: str) -> None:
    # What a query reads is what the pool has, whoever computed it, so only sums are rounded apart.
    found = []
    for size in (5, 32, 64):
        with open_engine(tiny, kv_cache_dtype=name, chunked_prefill_size=size) as engine:
            found.append(logprobs(engine, IDS))
            shorter = logprobs(engine, IDS[:30])
            again = logprobs(engine, [*IDS[:20], *IDS[20:]])
            np.testing.assert_allclose(shorter, found[-1][:29], rtol=0, atol=5e-5)
            np.testing.assert_allclose(again, found[-1], rtol=0, atol=5e-5)
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=0, atol=5e-5)


def test_the_pool_grows_with_what_a_token_takes_less(tiny: Path) -> None:
    pages = {}
    for name in ("auto", "fp8_e5m2"):
        with open_engine(tiny, kv_cache_dtype=name, max_running_requests=1024) as engine:
            report = engine.memory_report()
            pages[name] = report["plan"]["kv"] / report["pages"]["total"]
    assert pages["auto"] == 4 * pages["fp8_e5m2"]


def with_scales(source: Path, folder: Path, **scales: float) -> Path:
    """The checkpoint with scales for layer 0, and one for both of layer 1."""
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    prefix = "model.layers.0.self_attn."
    tensors |= {f"{prefix}{name}": torch.tensor(value) for name, value in scales.items()}
    tensors["model.layers.1.self_attn.attn.kv_scale"] = torch.tensor([1.0])
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(read_config(source)))
    return folder


def test_scales_are_read_and_used_for_eight_bits_only(tiny: Path, tmp_path: Path) -> None:
    # Keys and values of this model are around 1: in steps of 4 little of layer 0 is left.
    coarse = with_scales(tiny, tmp_path / "coarse", k_scale=1.0, v_scale=2048.0)
    with open_engine(tiny) as engine:
        exact = logprobs(engine, IDS)
    with open_engine(coarse) as engine:
        assert (logprobs(engine, IDS) == exact).all()
    with open_engine(tiny, kv_cache_dtype="fp8_e4m3") as engine:
        plain = logprobs(engine, IDS)
        engine.update_weights_from_disk(str(coarse))
        changed = logprobs(engine, IDS)
        engine.update_weights_from_disk(str(tiny))
        assert (logprobs(engine, IDS) == plain).all()
    with open_engine(coarse, kv_cache_dtype="fp8_e4m3") as engine:
        assert (logprobs(engine, IDS) == changed).all()
    assert np.abs(changed - exact).mean() > 2 * np.abs(plain - exact).mean()


def test_bad_scales_are_refused(tiny: Path, tmp_path: Path) -> None:
    bad = with_scales(tiny, tmp_path / "bad", k_scale=0.0)
    with pytest.raises(ModelError, match=r"k_scale of shape \[\] is not one positive number"):
        open_engine(bad, kv_cache_dtype="fp8_e4m3")
    with open_engine(tiny, kv_cache_dtype="fp8_e4m3") as engine:
        before = engine.generate(input_ids=IDS, sampling_params=GREEDY)["output_ids"]
        with pytest.raises(ModelError, match="is not one positive number"):
            engine.update_weights_from_disk(str(bad))
        assert engine.generate(input_ids=IDS, sampling_params=GREEDY)["output_ids"] == before
