"""One request, one result: whatever else runs, is cached, is taken away or overlaps."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seawall import Engine
from tests.engine.harness import (
    Probe,
    Result,
    assert_same,
    open_engine,
    prompt,
    run,
    run_alone,
)
from tests.models.checkpoints import VOCAB

GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 14}
DRAWN: dict[str, Any] = {"temperature": 0.9, "max_new_tokens": 14, "sampling_seed": 42}
# A bias makes the end-of-sequence id (2) likely, so that it ends some and is forbidden for others.
ENDING = {"logit_bias": {"2": 4.0}}
PROBES = [
    Probe(ids=prompt(13, 1), params=GREEDY, start_len=0),
    Probe(ids=prompt(17, 1), params=GREEDY, start_len=6),
    Probe(ids=prompt(1, 2), params={**GREEDY, "ignore_eos": True}, start_len=0),
    Probe(ids=prompt(24, 3), params={**GREEDY, "max_new_tokens": 0}, start_len=3),
    Probe(ids=prompt(9, 4), params={**GREEDY, "repetition_penalty": 1.4}),
    Probe(ids=prompt(9, 5), params={**GREEDY, "frequency_penalty": 1.0, "presence_penalty": 0.5}),
    Probe(ids=prompt(8, 6), params={**GREEDY, **ENDING}),
    Probe(ids=prompt(8, 6), params={**GREEDY, **ENDING, "min_new_tokens": 9}),
    Probe(ids=prompt(21, 7), params=DRAWN, start_len=1),
    Probe(ids=prompt(12, 8), params={**DRAWN, "top_k": 5, "sampling_seed": -3}),
    Probe(ids=prompt(12, 9), params={**DRAWN, "top_p": 0.6}, start_len=11),
    Probe(ids=prompt(12, 9), params={**DRAWN, "min_p": 0.1, "temperature": 1.3}),
    Probe(ids=prompt(16, 10), params={**DRAWN, "stop_token_ids": list(range(3, 30))}),
    Probe(ids=prompt(19, 11), params={**DRAWN, "n": 3}, start_len=0),
    Probe(ids=prompt(3, 12), params={**DRAWN, "n": 2, "repetition_penalty": 1.2}),
]


@pytest.fixture(scope="module")
def plain(tiny: Path) -> Iterator[Engine]:
    """No overlap, no mixing: as simple as it gets."""
    with open_engine(tiny, disable_overlap_schedule=True, enable_mixed_chunk=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(plain: Engine) -> list[list[Result]]:
    """Each probe by itself: what every other schedule must give."""
    return run_alone(plain, PROBES)


def others(count: int, seed: int) -> list[Probe]:
    """A crowd; some of them share prefixes with the probes."""
    rng = random.Random(seed)
    crowd = []
    for _ in range(count):
        params: dict[str, Any] = {
            "temperature": rng.choice([0.0, 0.7, 1.0]),
            "max_new_tokens": rng.randint(0, 20),
            "sampling_seed": rng.randrange(1000),
            "repetition_penalty": rng.choice([1.0, 1.0, 1.1]),
            "top_p": rng.choice([1.0, 0.9]),
        }
        ids = prompt(rng.randint(1, 36), rng.randint(1, 12))
        crowd.append(Probe(ids=ids, params=params, start_len=rng.choice([-1, 0])))
    return crowd


def test_the_probes_end_in_every_way(alone: list[list[Result]]) -> None:
    reasons = [sample["meta_info"]["finish_reason"] for samples in alone for sample in samples]
    assert {"type": "stop", "matched": 2} in reasons
    assert {"type": "length", "length": 14} in reasons
    assert {"type": "length", "length": 0} in reasons
    assert any(r["type"] == "stop" and r["matched"] != 2 for r in reasons)
    assert alone[6][0]["meta_info"]["completion_tokens"] < 9
    assert alone[7][0]["meta_info"]["completion_tokens"] >= 9


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"enable_mixed_chunk": False},
        {"disable_overlap_schedule": True},
        {"disable_radix_cache": True},
        {"chunked_prefill_size": 3, "page_size": 1},
        {"chunked_prefill_size": -1, "page_size": 16, "schedule_policy": "lpm"},
        {"max_running_requests": 64, "schedule_policy": "priority"},
    ],
    ids=lambda changes: " ".join(changes) or "defaults",
)
def test_in_a_crowd(tiny: Path, alone: list[list[Result]], changes: dict[str, Any]) -> None:
    mixed = [*PROBES, *others(64 - len(PROBES), 3)]
    random.Random(1).shuffle(mixed)
    with open_engine(tiny, **changes) as engine:
        found = run(engine, mixed)
    assert_same([found[mixed.index(probe)] for probe in PROBES], alone, PROBES)


def test_after_a_cache_hit(tiny: Path, alone: list[list[Result]]) -> None:
    with open_engine(tiny, page_size=2) as engine:
        run(engine, PROBES)
        again = run(engine, PROBES)
        assert_same(again, alone, PROBES)
        # Prompts of which nothing is scored are served from the cache but for their last token.
        for probe, samples in zip(PROBES, again, strict=True):
            meta = samples[0]["meta_info"]
            assert meta["cached_tokens"] < len(probe.ids)
            if probe.start_len < 0:
                assert meta["cached_tokens"] >= (len(probe.ids) - 1) // 2 * 2
        # A longer prompt that begins like one that has been seen, scored from inside it: all but
        # the boundary is served.
        longer = [Probe(ids=(*prompt(24, 3), *prompt(9, 13)), params=GREEDY, start_len=12)]
        hit = run(engine, longer)
        assert hit[0][0]["meta_info"]["cached_tokens"] == 23
        assert_same(hit, run_alone(engine, longer), longer)


def test_a_conversation_goes_on_from_the_cache(plain: Engine) -> None:
    """What was generated is cached too: the next turn computes little more than what is new."""
    assert plain.flush_cache()
    ids = prompt(12, 20)
    first = run(plain, [Probe(ids=ids, params={**GREEDY, "ignore_eos": True})])[0][0]
    turn = Probe(ids=(*ids, *first["output_ids"], *prompt(5, 21)), params=GREEDY)
    second = run(plain, [turn])
    # 26 tokens before the new ones; the last of them was drawn but never computed.
    assert second[0][0]["meta_info"]["cached_tokens"] == 24
    assert_same(second, run_alone(plain, [turn]), [turn])


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("page_size", "radix"), [(1, True), (4, True), (4, False)])
def test_after_retraction(
    tiny: Path, alone: list[list[Result]], page_size: int, radix: bool, overlap: bool
) -> None:
    with open_engine(
        tiny,
        page_size=page_size,
        max_total_tokens=72,
        schedule_conservativeness=0.05,
        disable_radix_cache=not radix,
        disable_overlap_schedule=not overlap,
    ) as engine:
        expect_short_answers(engine)
        found = run(engine, PROBES * 3)
        retracted = [s["meta_info"]["num_retractions"] for samples in found for s in samples]
        assert sum(retracted) > 0
        assert engine.get_server_info()["internal_states"][0]["retractions"] >= sum(retracted)
    assert_same(found, alone * 3, PROBES * 3)


def expect_short_answers(engine: Engine) -> None:
    """Let requests that were allowed 20 tokens end after one, till admission expects no more."""
    params = {"max_new_tokens": 20, "temperature": 0, "stop_token_ids": list(range(VOCAB))}
    results = engine.generate(input_ids=[[5, 6]] * 40, sampling_params=params)
    assert all(len(result["output_ids"]) == 1 for result in results)


def test_conservativeness_1_never_retracts(tiny: Path) -> None:
    with open_engine(
        tiny, page_size=2, max_total_tokens=90, schedule_conservativeness=1.0
    ) as engine:
        expect_short_answers(engine)
        crowd = others(60, 5)
        found = run(engine, crowd)
        assert engine.get_server_info()["internal_states"][0]["retractions"] == 0
    with open_engine(tiny, disable_overlap_schedule=True) as engine:
        assert_same(found, run(engine, crowd), crowd)


def test_sample_i_of_n_is_the_sample_of_its_seed(plain: Engine) -> None:
    """Sample i depends on its own mixed seed alone: not on n, nor on its siblings."""
    four = run(plain, [Probe(ids=prompt(15, 1), params={**DRAWN, "n": 4})])[0]
    two = run(plain, [Probe(ids=prompt(15, 1), params={**DRAWN, "n": 2})])[0]
    assert [s["output_ids"] for s in four[:2]] == [s["output_ids"] for s in two]
    assert len({tuple(s["output_ids"]) for s in four}) == 4
    for index, sample in enumerate(four):
        params = {**DRAWN, "sampling_seed": seed_of_sample(42, index)}
        single = run(plain, [Probe(ids=prompt(15, 1), params=params)])[0][0]
        assert single["output_ids"] == sample["output_ids"]


MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def seed_of_sample(seed: int, index: int) -> int:
    """The seed whose sample 0 draws as sample `index` of `seed`: splitmix64 run backwards."""
    value = unmix((mix(seed) + index * GOLDEN) & MASK)
    return value - (1 << 64) if value >> 63 else value


def mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def unmix(value: int) -> int:
    value = value ^ (value >> 31) ^ (value >> 62)
    value = value * pow(0x94D049BB133111EB, -1, 1 << 64) & MASK
    value = value ^ (value >> 27) ^ (value >> 54)
    value = value * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & MASK
    return value ^ (value >> 30) ^ (value >> 60)
