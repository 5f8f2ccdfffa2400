"""Logprobs of cached prefixes: served from the cache, equal to computed ones, never missing."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from seawall import Engine
from tests.engine.harness import LOGPROB_TOLERANCE, open_engine, prompt

SCORE = {"max_new_tokens": 0}
ONE = {"max_new_tokens": 1, "temperature": 0}
IDS = [5, 96, 0]


def ask(engine: Engine, ids: list[int], params: dict[str, Any], **more: Any) -> dict[str, Any]:
    result: dict[str, Any] = engine.generate(
        input_ids=ids, sampling_params=params, return_logprob=True, **more
    )
    return result


def entries(meta: dict[str, Any], *, kind: str = "input") -> list[Any]:
    """All numbers of the prompt (or output), position by position, ids with them."""
    lists = [meta[f"{kind}_token_logprobs"]]
    lists += [meta.get(f"{kind}_{name}", []) for name in ("top_logprobs", "token_ids_logprobs")]
    return [flat(position) for position in itertools.chain(*lists)]


def flat(position: Any) -> list[tuple[float | None, int]]:
    if position is None:
        return [(None, -1)]
    rows = [position] if not position or not isinstance(position[0], list) else position
    return [(row[0], row[1]) for row in rows]


def assert_close(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert [token for _, token in ours] == [token for _, token in theirs]
        for (a, _), (b, _) in zip(ours, theirs, strict=True):
            assert (a is None) == (b is None)
            assert a is None or abs(a - b) <= LOGPROB_TOLERANCE


def cached(meta: dict[str, Any]) -> int:
    return int(meta["cached_tokens"])


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"top_logprobs_num": 1},
        {"top_logprobs_num": 6},
        {"top_logprobs_num": 2, "token_ids_logprob": IDS},
    ],
)
def test_a_repeated_question_costs_the_boundary(
    tiny: Path, page_size: int, more: dict[str, Any]
) -> None:
    ids = list(prompt(50, 1))
    with open_engine(tiny, page_size=page_size) as engine:
        for start in (0, 7, 16, 49, 50):
            engine.flush_cache()
            without = engine.generate(input_ids=ids, sampling_params=ONE)["meta_info"]
            assert cached(without) == 0
            engine.flush_cache()
            cold = ask(engine, ids, ONE, logprob_start_len=start, **more)["meta_info"]
            warm = ask(engine, ids, ONE, logprob_start_len=start, **more)["meta_info"]
            hit = engine.generate(input_ids=ids, sampling_params=ONE)["meta_info"]
            assert_close(entries(warm), entries(cold))
            assert len(warm["input_token_logprobs"]) == 50 - start
            nulls = [e[0][0] is None for e in entries(warm)]
            assert sum(nulls) == (len(nulls) // max(50 - start, 1) if start == 0 else 0)
            assert cached(hit) - 1 <= cached(warm) <= cached(hit)
            assert cached(hit) >= 49 // page_size * page_size


def test_what_was_not_kept_is_computed(tiny: Path) -> None:
    ids = list(prompt(50, 2))
    questions: list[dict[str, Any]] = [
        {},
        {"top_logprobs_num": 1},
        {"top_logprobs_num": 3},
        {"top_logprobs_num": 9},
        {"top_logprobs_num": 2},
        {"token_ids_logprob": IDS},
        {"token_ids_logprob": [1]},
    ]
    with open_engine(tiny) as engine, open_engine(tiny, disable_radix_cache=True) as plain:
        for more in questions:
            expected = ask(plain, ids, SCORE, logprob_start_len=0, **more)["meta_info"]
            for _ in range(2):
                found = ask(engine, ids, SCORE, logprob_start_len=0, **more)["meta_info"]
                assert_close(entries(found), entries(expected))
            assert cached(found) >= 47
            assert cached(expected) == 0
        # Less than what is kept is served at once.
        less = ask(engine, ids, SCORE, logprob_start_len=0, top_logprobs_num=8)["meta_info"]
        assert cached(less) >= 47


def test_processed_temperature_has_records_of_its_own(tiny: Path) -> None:
    ids = list(prompt(40, 3))
    with open_engine(tiny) as engine, open_engine(tiny, disable_radix_cache=True) as plain:
        for temperature in (1.0, 0.5, 0.5, 1.0, 0.0):
            params = {"max_new_tokens": 1, "temperature": temperature, "sampling_seed": 1}
            more = {"logprob_start_len": 0, "logprobs_mode": "processed", "top_logprobs_num": 2}
            found = ask(engine, ids, params, **more)["meta_info"]
            assert_close(entries(found), entries(ask(plain, ids, params, **more)["meta_info"]))
        assert cached(found) >= 35


def test_a_next_turn_is_served_through_the_answer(tiny: Path) -> None:
    ids = list(prompt(22, 4))
    with open_engine(tiny) as engine, open_engine(tiny, disable_radix_cache=True) as plain:
        params = {"max_new_tokens": 19, "temperature": 0, "ignore_eos": True}
        first = ask(engine, ids, params, logprob_start_len=0)
        turn = [*ids, *first["output_ids"], *prompt(9, 5)]
        for overlap in (engine,):
            found = ask(overlap, turn, SCORE, logprob_start_len=0)["meta_info"]
            # All whole pages of prompt and answer but the last token, whose KV was never needed.
            assert cached(found) >= (22 + 19 - 1) // 4 * 4 - 1
        expected = ask(plain, turn, SCORE, logprob_start_len=0)["meta_info"]
        assert_close(entries(found), entries(expected))


@pytest.mark.parametrize("overlap", [True, False])
def test_answers_keep_records_page_after_page(tiny: Path, overlap: bool) -> None:
    ids = list(prompt(5, 6))
    with open_engine(tiny, page_size=1, disable_overlap_schedule=not overlap) as engine:
        params = {"max_new_tokens": 30, "temperature": 0, "ignore_eos": True}
        first = ask(engine, ids, params, logprob_start_len=0, top_logprobs_num=2)
        turn = [*ids, *first["output_ids"]]
        found = ask(engine, turn, SCORE, logprob_start_len=0, top_logprobs_num=2)["meta_info"]
        assert cached(found) == len(turn) - 2
        both = [*entries(first["meta_info"])[:5], *entries(first["meta_info"], kind="output")[:30]]
        assert_close(entries(found)[:34], both[:34])


def test_penalised_outputs_are_not_taken_for_raw(tiny: Path) -> None:
    ids = list(prompt(20, 7))
    changes: list[dict[str, Any]] = [
        {"repetition_penalty": 1.5},
        {"logit_bias": {"5": 3.0}},
        {"temperature": 0.7, "sampling_seed": 3},
        {"min_new_tokens": 16, "ignore_eos": False},
    ]
    for change in changes:
        with open_engine(tiny) as engine, open_engine(tiny, disable_radix_cache=True) as plain:
            params = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True, **change}
            first = ask(engine, ids, params, logprob_start_len=0)
            turn = [*ids, *first["output_ids"]]
            found = ask(engine, turn, SCORE, logprob_start_len=0)["meta_info"]
            expected = ask(plain, turn, SCORE, logprob_start_len=0)["meta_info"]
            assert_close(entries(found), entries(expected))


def test_requests_that_arrive_together_compute_their_context_once(tiny: Path) -> None:
    context = list(prompt(48, 8))
    asked = [[*context, 3 + i, 4 + i] for i in range(6)]
    with open_engine(tiny, chunked_prefill_size=512) as engine:
        results = engine.generate(
            input_ids=asked, sampling_params=SCORE, return_logprob=True, logprob_start_len=0
        )
        assert [cached(r["meta_info"]) for r in results] == [0, *[47] * 5]
        alone = []
        for ids in asked:
            engine.flush_cache()
            alone.append(ask(engine, ids, SCORE, logprob_start_len=0))
    for found, expected in zip(results, alone, strict=True):
        assert_close(entries(found["meta_info"]), entries(expected["meta_info"]))


def computed(results: list[dict[str, Any]]) -> int:
    metas = [result["meta_info"] for result in results]
    return sum(meta["prompt_tokens"] - cached(meta) for meta in metas)


@pytest.mark.parametrize("header", [0, 32, 36])
def test_a_common_header_does_not_hide_longer_contexts(tiny: Path, header: int) -> None:
    head = list(prompt(header, 20))
    contexts = [[*head, *prompt(60, 21 + i)] for i in range(4)]
    asked = [[*context, 3 + j] for context in contexts for j in range(6)]
    longer = '{"max_position_embeddings": 128}'
    with open_engine(
        tiny,
        chunked_prefill_size=2048,
        max_running_requests=64,
        json_model_override_args=longer,
    ) as engine:
        results = engine.generate(
            input_ids=asked, sampling_params=SCORE, return_logprob=True, logprob_start_len=0
        )
    # Each context once, and of each option the boundary, what is no whole page, and itself.
    assert computed(results) <= sum(map(len, contexts)) + len(asked) * 6


def test_cached_pages_without_records_are_scored_once(tiny: Path) -> None:
    context = list(prompt(60, 30))
    asked = [[*context, 3 + j] for j in range(8)]
    with open_engine(tiny, chunked_prefill_size=2048) as engine:
        engine.generate(input_ids=context, sampling_params=ONE)
        results = engine.generate(
            input_ids=asked, sampling_params=SCORE, return_logprob=True, logprob_start_len=0
        )
        assert computed(results) <= len(asked[0]) + 7 * 6


def test_who_leaves_no_records_is_not_waited_for(tiny: Path) -> None:
    context = list(prompt(60, 31))
    with open_engine(tiny, chunked_prefill_size=2048) as engine:
        results = engine.generate(
            input_ids=[context, [*context, 4], [*context, 5], [*context, 6]],
            sampling_params=SCORE,
            return_logprob=[False, True, True, False],
            logprob_start_len=[-1, 0, 0, -1],
        )
        # The second is no use to wait for the first; the third waits for the second.
        assert [cached(r["meta_info"]) > 50 for r in results] == [False, False, True, True]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("chunk", [5, 8, 32])
def test_records_have_no_hole_where_a_chunk_ends(tiny: Path, chunk: int, overlap: bool) -> None:
    ids = list(prompt(50, 32))
    with open_engine(
        tiny, chunked_prefill_size=chunk, disable_overlap_schedule=not overlap
    ) as engine:
        for more in ({}, {"top_logprobs_num": 4}):
            ask(engine, ids, SCORE, logprob_start_len=0, **more)
            again = ask(engine, ids, SCORE, logprob_start_len=0, **more)["meta_info"]
            assert cached(again) == 47


def test_sampled_answers_keep_processed_records(tiny: Path) -> None:
    ids = list(prompt(20, 33))
    more = {"logprob_start_len": 0, "logprobs_mode": "processed"}
    with open_engine(tiny) as engine:
        params = {"temperature": 0.7, "sampling_seed": 5, "ignore_eos": True}
        first = ask(engine, ids, {**params, "max_new_tokens": 30}, **more)
        turn = [*ids, *first["output_ids"]]
        again = ask(engine, turn, {**params, "max_new_tokens": 1}, **more)
        assert cached(again["meta_info"]) >= 47
        assert_close(
            entries(again["meta_info"])[20:49], entries(first["meta_info"], kind="output")[:29]
        )


def test_retraction_leaves_no_hole(tiny: Path) -> None:
    asked = [list(prompt(9, 40 + i)) for i in range(4)]
    with open_engine(
        tiny,
        page_size=16,
        max_total_tokens=112,
        schedule_conservativeness=0.05,
        max_running_requests=4,
    ) as engine:
        # Let admission expect short answers.
        stops = {"max_new_tokens": 20, "temperature": 0, "stop_token_ids": list(range(97))}
        engine.generate(input_ids=[[5, 6]] * 40, sampling_params=stops)
        params = {"max_new_tokens": 40, "min_new_tokens": 40, "temperature": 0}
        results = engine.generate(
            input_ids=asked,
            sampling_params=params,
            return_logprob=True,
            logprob_start_len=0,
            logprobs_mode="raw",
        )
        # The pool is too small for all of them: only the pages of the last one are surely there.
        last = max(range(4), key=lambda i: results[i]["meta_info"]["e2e_latency"])
        assert results[last]["meta_info"]["num_retractions"] > 0
        turn = [*asked[last], *results[last]["output_ids"]]
        assert cached(ask(engine, turn, SCORE, logprob_start_len=0)["meta_info"]) == 47


def test_aborted_leaders_hold_nobody_up(tiny: Path) -> None:
    context = list(prompt(60, 9))
    with open_engine(tiny, chunked_prefill_size=8) as engine:
        stream = engine.generate(
            input_ids=context, sampling_params=SCORE, rid="leader", stream=True
        )
        engine.abort_request("leader")
        results = engine.generate(input_ids=[context, [*context, 5]], sampling_params=ONE)
        list(stream)
    assert all(len(r["output_ids"]) == 1 for r in results)


def test_flush_forgets(tiny: Path) -> None:
    ids = list(prompt(33, 10))
    with open_engine(tiny) as engine:
        cold = ask(engine, ids, SCORE, logprob_start_len=0)["meta_info"]
        assert engine.flush_cache()
        again = ask(engine, ids, SCORE, logprob_start_len=0)["meta_info"]
        assert cached(again) == 0
        assert_close(entries(again), entries(cold))


def test_report_counts_records(tiny: Path) -> None:
    with open_engine(tiny) as engine:
        before = engine.memory_report()["host"]
        ask(engine, list(prompt(40, 11)), SCORE, logprob_start_len=0, top_logprobs_num=5)
        after = engine.memory_report()["host"]
        slots = engine.memory_report()["pages"]["total"] * 4
    assert before["measured"]["companions"]["now"] == slots * 12
    grown = after["measured"]["companions"]["now"] - slots * 12
    assert grown == 512 + 10 * (1024 + 4 * (4 + 8 * 5))
    assert after["measured"]["companions"]["peak"] <= after["plan"]["companions"]
