"""Tiny models for engine tests, engines over them, and what "the same result" means.

Results of two schedules agree when logprobs are within 5e-5 and tokens are equal wherever the best
leads the second by more than 1e-3; for sampled tokens the lead is that of the perturbed scores.
Requests ask for the logprob of every id, so a lead can be computed from a result.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from seawall import Engine
from seawall.core.seeds import mix_seed
from seawall.sampling.noise import id_codes, negative_clocks, row_keys
from tests.models.checkpoints import SIZES, VOCAB, random_model, save

LOGPROB_TOLERANCE = 5e-5
LEAD = 1e-3
DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "memory_budget": "96MiB",
    "logits_workspace": "2MiB",
    "max_running_requests": 8,
    "chunked_prefill_size": 32,
    "page_size": 4,
    "random_seed": 1,
    "skip_tokenizer_init": True,
    "log_level": "critical",
}

Result = dict[str, Any]
TEXT = "Once upon a time there was a fox who lived near the wood."
GREEDY = {"temperature": 0, "max_new_tokens": 6}


def make_tiny_llama(folder: Path) -> Path:
    """A random Llama of two layers and 97 ids."""
    return save(random_model(transformers.LlamaConfig(**SIZES)), folder)


def open_engine(folder: Path | str, **changes: Any) -> Engine:
    """An engine of a few MiB; `changes` go over the defaults."""
    return Engine(str(folder), **{**DEFAULTS, **changes})


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One request: every logprob is asked for."""

    ids: tuple[int, ...]
    params: dict[str, Any] = field(default_factory=dict)
    start_len: int = -1

    @property
    def num_samples(self) -> int:
        return int(self.params.get("n", 1))


def run(engine: Engine, probes: Sequence[Probe], *, top_k: int = VOCAB) -> list[list[Result]]:
    """All probes as one batch; the samples of each."""
    flat = engine.generate(
        input_ids=[list(probe.ids) for probe in probes],
        sampling_params=[probe.params for probe in probes],
        return_logprob=True,
        logprob_start_len=[probe.start_len for probe in probes],
        top_logprobs_num=top_k,
    )
    found, start = [], 0
    for probe in probes:
        found.append(flat[start : start + probe.num_samples])
        start += probe.num_samples
    assert start == len(flat)
    return found


def run_alone(engine: Engine, probes: Sequence[Probe]) -> list[list[Result]]:
    """Each probe by itself, with nothing cached."""
    results = []
    for probe in probes:
        assert engine.flush_cache()
        results += run(engine, [probe])
    return results


def assert_same(
    found: Sequence[Sequence[Result]], expected: Sequence[Sequence[Result]], probes: Sequence[Probe]
) -> None:
    """Compare the results of two schedules, probe by probe and sample by sample."""
    for probe, ours, theirs in zip(probes, found, expected, strict=True):
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same_result(*pair, probe, index)


def assert_same_result(found: Result, expected: Result, probe: Probe, index: int) -> None:
    meta, other = found["meta_info"], expected["meta_info"]
    prompt = [pair[0] for pair in meta["input_token_logprobs"]]
    _assert_close(prompt, [pair[0] for pair in other["input_token_logprobs"]])
    assert [p[1] for p in meta["input_token_logprobs"]] == [
        p[1] for p in other["input_token_logprobs"]
    ]
    pairs = zip(meta["output_token_logprobs"], other["output_token_logprobs"], strict=False)
    for at, (ours, theirs) in enumerate(pairs):
        if ours[1] != theirs[1]:
            tops = other["output_top_logprobs"][at]
            gap = perturbed_gap(tops, ours[1], theirs[1], probe, index, len(probe.ids) + at)
            assert gap <= LEAD, f"output {at} of {probe}: {ours} is not {theirs}"
            return
        _assert_close([ours[0]], [theirs[0]])
        _assert_close(_values(meta, at), _values(other, at))
    assert found["output_ids"] == expected["output_ids"]
    assert meta["finish_reason"] == other["finish_reason"]


def perturbed_gap(
    tops: list[list[Any]], first: int, second: int, probe: Probe, index: int, position: int
) -> float:
    """How far apart the scores are that the draw compared."""
    logprobs = {token: logprob for logprob, token, _ in tops}
    gap: float = logprobs[first] - logprobs[second]
    if probe.params.get("temperature", 1.0) > 0:
        noise = _noise(probe.params["sampling_seed"], index, position, (first, second))
        gap += noise[0] - noise[1]
    return abs(gap)


def _noise(seed: int, index: int, position: int, ids: tuple[int, int]) -> list[float]:
    keys = row_keys(torch.tensor([mix_seed(seed, index)]), torch.tensor([position]))
    spare = torch.empty((2, 1, 2), dtype=torch.int32)
    clocks = negative_clocks(id_codes(torch.tensor(ids)), keys, spare[0], spare[1])
    noise: list[float] = clocks.neg().log().neg()[0].tolist()
    return noise


def _values(meta: dict[str, Any], at: int) -> list[float]:
    return [entry[0] for entry in meta["output_top_logprobs"][at]]


def _assert_close(found: Sequence[float | None], expected: Sequence[float | None]) -> None:
    assert [x is None for x in found] == [x is None for x in expected]
    pairs = zip(found, expected, strict=True)
    worst = max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=0.0)
    # Ids that are forbidden have the least float there is on both sides.
    assert worst <= LOGPROB_TOLERANCE, worst


def prompt(length: int, seed: int) -> tuple[int, ...]:
    """Random ids; the same for the same arguments, and beginning alike for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, VOCAB, (64,), generator=generator)[:length].tolist())


def score_from(engine: Engine, ids: list[int], start: int, **more: Any) -> dict[str, Any]:
    meta: dict[str, Any] = engine.generate(
        input_ids=ids,
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=start,
        **more,
    )["meta_info"]
    return meta


def every_logprob(engine: Engine, ids: list[int], mode: str, **params: Any) -> dict[int, float]:
    """The first output position: id to logprob."""
    meta = engine.generate(
        input_ids=ids,
        sampling_params={"max_new_tokens": 1, "sampling_seed": 3, **params},
        return_logprob=True,
        top_logprobs_num=4096,
        logprobs_mode=mode,
    )["meta_info"]
    found = {token: logprob for logprob, token, _ in meta["output_top_logprobs"][0]}
    chosen = meta["output_token_logprobs"][0]
    assert chosen[0] == pytest.approx(found[chosen[1]], abs=1e-4)
    return found
