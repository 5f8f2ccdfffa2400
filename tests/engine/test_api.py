"""The shapes and meanings of the public engine, on the embedded model."""

import asyncio
import itertools
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seawall import BudgetError, ConfigError, Engine, RequestError
from tests.engine.harness import GREEDY, TEXT, every_logprob, open_engine, prompt, score_from
from tests.models.checkpoints import VOCAB

Result = dict[str, Any]
LAST_ID = 4095
LOGPROB_KEYS = {
    "input_token_logprobs",
    "output_token_logprobs",
    "input_top_logprobs",
    "output_top_logprobs",
    "input_token_ids_logprobs",
    "output_token_ids_logprobs",
}


def plain_json(value: object) -> object:
    return json.loads(json.dumps(value, allow_nan=False))


# -- logprobs of prompts ------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [False, True])
def test_lengths_for_every_start(
    demo: Engine, ids: list[int], scored: list[float | None], cached: bool
) -> None:
    for start in (0, 1, 2, len(ids) - 1, len(ids)):
        if not cached:
            assert demo.flush_cache()
        meta = score_from(demo, ids, start, top_logprobs_num=3, token_ids_logprob=[7, LAST_ID])
        entries = meta["input_token_logprobs"]
        assert [entry[1] for entry in entries] == ids[start:]
        assert [entry[0] is None for entry in entries] == [at == 0 for at in range(start, len(ids))]
        for ours, right in zip(entries, scored[start:], strict=True):
            assert ours[0] == pytest.approx(right, abs=5e-5)
        for name in ("input_top_logprobs", "input_token_ids_logprobs"):
            assert [entry is None for entry in meta[name]] == [e[0] is None for e in entries]
        for entry, best in zip(entries, meta["input_top_logprobs"], strict=True):
            if best is None:
                continue
            assert len(best) == 3
            assert [b[0] for b in best] == sorted((b[0] for b in best), reverse=True)
            assert entry[0] <= best[0][0] + 1e-6
            same = [b[0] for b in best if b[1] == entry[1]]
            assert not same or same[0] == pytest.approx(entry[0], abs=1e-5)
        for given in meta["input_token_ids_logprobs"]:
            assert given is None or [g[1] for g in given] == [7, LAST_ID]
        assert meta["output_token_logprobs"] == meta["output_top_logprobs"] == []
        assert meta["prompt_tokens"] == len(ids)
        assert meta["finish_reason"] == {"type": "length", "length": 0}


def test_outputs_only(demo: Engine, ids: list[int]) -> None:
    for start in (-1, None):
        meta = demo.generate(
            input_ids=ids,
            sampling_params=GREEDY,
            return_logprob=True,
            logprob_start_len=start,
            top_logprobs_num=2,
            token_ids_logprob=[5],
        )["meta_info"]
        assert meta["input_token_logprobs"] == meta["input_top_logprobs"] == []
        assert meta["input_token_ids_logprobs"] == []
        assert len(meta["output_token_logprobs"]) == 6
        assert [len(best) for best in meta["output_top_logprobs"]] == [2] * 6
        assert [given[0][1] for given in meta["output_token_ids_logprobs"]] == [5] * 6


def test_no_logprobs_unless_asked(demo: Engine) -> None:
    meta = demo.generate(TEXT, GREEDY)["meta_info"]
    assert not LOGPROB_KEYS & set(meta)
    assert {
        "id",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "cached_tokens",
        "e2e_latency",
        "weight_version",
    } <= set(meta)
    meta = demo.generate(TEXT, GREEDY, return_logprob=True)["meta_info"]
    assert LOGPROB_KEYS & set(meta) == {"input_token_logprobs", "output_token_logprobs"}


def test_top_entries_are_exactly_as_many_as_asked(demo: Engine, ids: list[int]) -> None:
    limit = 4096
    for k in (1, 20, limit):
        meta = score_from(demo, ids[:4], 1, top_logprobs_num=k)
        for best in meta["input_top_logprobs"]:
            assert len(best) == len({entry[1] for entry in best}) == k
            if k == limit:
                assert math.fsum(math.exp(entry[0]) for entry in best) == pytest.approx(1, abs=1e-4)
    with pytest.raises(RequestError, match=r"got 4097, the limit is 4096 \(vocabulary 4096"):
        score_from(demo, ids[:4], 1, top_logprobs_num=limit + 1)


def test_text_in_logprobs(demo: Engine) -> None:
    asked: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 1}
    bare = demo.generate(TEXT, GREEDY, **asked)["meta_info"]
    assert {entry[2] for entry in bare["input_token_logprobs"]} == {None}
    meta = demo.generate(TEXT, GREEDY, return_text_in_logprobs=True, **asked)["meta_info"]
    assert "".join(entry[2] for entry in meta["input_token_logprobs"]) == TEXT
    assert all(isinstance(best[0][2], str) for best in meta["output_top_logprobs"])


def test_edges_of_the_vocabulary_and_of_length(demo: Engine) -> None:
    meta = score_from(demo, [0, LAST_ID, 0, LAST_ID], 0, token_ids_logprob=[0, LAST_ID])
    for entry, given in zip(
        meta["input_token_logprobs"][1:], meta["input_token_ids_logprobs"][1:], strict=True
    ):
        assert given[0 if entry[1] == 0 else 1][0] == pytest.approx(entry[0], abs=1e-5)
    one = demo.generate(
        input_ids=[LAST_ID], sampling_params=GREEDY, return_logprob=True, logprob_start_len=0
    )
    assert one["meta_info"]["input_token_logprobs"] == [[None, LAST_ID, None]]
    assert len(one["output_ids"]) == 6
    whole = [5] * 1024
    assert len(score_from(demo, whole, 0)["input_token_logprobs"]) == 1024
    with pytest.raises(RequestError, match="context_length is 1024; shorten"):
        demo.generate(input_ids=[*whole, 5])
    # With no room left, a prompt alone writes nothing.
    assert demo.generate(input_ids=whole)["output_ids"] == []


def test_results_are_json(demo: Engine) -> None:
    forbidden = {str(token): -100 for token in range(100)}
    results = demo.generate(
        [TEXT, "x"],
        {"max_new_tokens": 4, "min_new_tokens": 4, "logit_bias": forbidden, "temperature": 0.01},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=4096,
    )
    assert plain_json(results) == results
    # Ids that may not come (min_new_tokens forbids the ends) have the least number there is.
    worst = min(entry[0] for entry in results[0]["meta_info"]["output_top_logprobs"][0])
    assert worst < -1e38


# -- scales of logprobs -------------------------------------------------------------------------


def log_softmax(logits: dict[int, float]) -> dict[int, float]:
    top = max(logits.values())
    total = top + math.log(math.fsum(math.exp(v - top) for v in logits.values()))
    return {token: value - total for token, value in logits.items()}


def test_raw_and_processed(demo: Engine, ids: list[int]) -> None:
    raw = every_logprob(demo, ids, "raw", temperature=0.7)
    assert math.fsum(map(math.exp, raw.values())) == pytest.approx(1, abs=1e-4)
    greedy = every_logprob(demo, ids, "processed", temperature=0)
    warm = every_logprob(demo, ids, "processed", temperature=0.7, top_k=3, top_p=0.5, min_p=0.2)
    expected = log_softmax({token: value / 0.7 for token, value in raw.items()})
    for token, value in raw.items():
        assert greedy[token] == pytest.approx(value, abs=1e-4)
        # Before top-k, top-p and min-p: every id has its own.
        assert warm[token] == pytest.approx(expected[token], abs=2e-4)


def test_processed_has_penalties_and_bias(demo: Engine, ids: list[int]) -> None:
    """Against the plain computation on the model's own logits."""
    params = {"repetition_penalty": 1.5, "temperature": 0.5, "logit_bias": {"7": 3.0}}
    raw = every_logprob(demo, ids, "raw", **params)
    found = every_logprob(demo, ids, "processed", **params)
    # A penalty divides logits, which logprobs give but for a constant; find it by the difference
    # of two penalised ids, then everything follows.
    logits = dict(raw)
    best = None
    for shift in shifts(demo, ids):
        changed = {}
        for token, value in logits.items():
            logit = value + shift
            if token in set(ids):
                logit = logit / 1.5 if logit > 0 else logit * 1.5
            changed[token] = (logit + (3.0 if token == 7 else 0.0)) / 0.5
        expected = log_softmax(changed)
        worst = max(abs(expected[t] - found[t]) for t in found)
        best = worst if best is None else min(best, worst)
    assert best is not None
    assert best < 1e-3


def shifts(engine: Engine, ids: list[int]) -> Iterator[float]:
    """The log-sum-exp of the last position's logits, from the model itself."""
    runner: Any = engine._assembly.runner
    seen: list[float] = []
    draw = runner.draw

    def noting(flight: Any, adjust: Any, masks: Any) -> Any:
        head = runner.scorer._head
        rows = flight.hidden[: int(flight.plan.samples.sum())].float()
        seen.extend((rows @ head.weight.float().T).logsumexp(-1).tolist())
        return draw(flight, adjust, masks)

    runner.draw = noting
    try:
        every_logprob(engine, ids, "raw")
    finally:
        runner.draw = draw
    yield from seen


def test_prompt_temperature(demo: Engine, ids: list[int], scored: list[float | None]) -> None:
    """Prompt logprobs are raw, unless a request itself asks for processed ones."""

    def first(mode: str | None) -> dict[int, float]:
        meta = demo.generate(
            input_ids=ids,
            sampling_params={"max_new_tokens": 0, "temperature": 0.5},
            return_logprob=True,
            logprob_start_len=1,
            top_logprobs_num=4096,
            logprobs_mode=mode,
        )["meta_info"]
        return {token: logprob for logprob, token, _ in meta["input_top_logprobs"][0]}

    raw, silent, processed = first("raw"), first(None), first("processed")
    assert raw[ids[1]] == pytest.approx(scored[1], abs=5e-5)
    assert silent == pytest.approx(raw, abs=5e-5)
    expected = log_softmax({token: value / 0.5 for token, value in raw.items()})
    assert processed == pytest.approx(expected, abs=2e-4)
    assert processed != pytest.approx(raw, abs=1e-2)


# -- batches, samples, stops --------------------------------------------------------------------


def test_batches_keep_their_order(demo: Engine) -> None:
    texts = ["The fox", "A king who", "Once", "In the wood there"]
    params = [{"temperature": 0, "max_new_tokens": n} for n in (7, 1, 0, 3)]
    results = demo.generate(texts, params, rid=["a", "b", "c", "d"])
    assert [r["meta_info"]["id"] for r in results] == ["a", "b", "c", "d"]
    assert [len(r["output_ids"]) for r in results] == [7, 1, 0, 3]
    for text, one, result in zip(texts, params, results, strict=True):
        assert demo.generate(text, one)["output_ids"] == result["output_ids"]
    assert demo.generate([]) == []
    assert isinstance(demo.generate("The fox", GREEDY), dict)
    assert len(demo.generate(["The fox"], GREEDY)) == 1


def test_options_for_each_prompt(demo: Engine) -> None:
    results = demo.generate(
        ["The fox", "A king"],
        GREEDY,
        return_logprob=[True, False],
        logprob_start_len=[0, None],
        top_logprobs_num=[2, 0],
        token_ids_logprob=[[3, 4], None],
    )
    assert set(results[0]["meta_info"]) >= LOGPROB_KEYS
    assert not LOGPROB_KEYS & set(results[1]["meta_info"])


def test_samples_are_flat_and_prompt_major(demo: Engine) -> None:
    params = {"n": 3, "max_new_tokens": 5, "temperature": 1.0, "sampling_seed": 8}
    results = demo.generate(
        ["The fox", "A king"], params, rid=["f", "k"], return_logprob=True, logprob_start_len=0
    )
    names = [result["meta_info"]["id"] for result in results]
    assert names == [f"{rid}_{i}" for rid in "fk" for i in range(3)]
    assert len({tuple(result["output_ids"]) for result in results[:3]}) > 1
    # Every sample has the prompt's logprobs, which were computed once.
    prompts = [result["meta_info"]["input_token_logprobs"] for result in results]
    assert prompts[0] == prompts[1] == prompts[2] != prompts[3]
    assert len(prompts[0]) == results[0]["meta_info"]["prompt_tokens"]
    assert len(demo.generate("The fox", {**params, "n": 2})) == 2


def test_stop_strings_and_ids(demo: Engine) -> None:
    params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    free = demo.generate(TEXT, params)
    words = free["text"].split()
    stop = " ".join(words[3:5])
    cut = demo.generate(TEXT, {**params, "stop": ["not there", stop]}, return_logprob=True)
    assert cut["text"] == free["text"][: free["text"].index(stop)]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    count = len(cut["output_ids"])
    assert cut["output_ids"] == free["output_ids"][:count]
    assert count < 24
    assert cut["meta_info"]["completion_tokens"] == count
    assert len(cut["meta_info"]["output_token_logprobs"]) == count
    kept = demo.generate(TEXT, {**params, "stop": stop, "no_stop_trim": True})
    assert kept["text"] == cut["text"] + stop
    token = free["output_ids"][4]
    at = free["output_ids"].index(token)
    ended = demo.generate(TEXT, {**params, "stop_token_ids": [token]})
    assert ended["output_ids"] == free["output_ids"][: at + 1]
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    assert free["text"].startswith(ended["text"])
    late = demo.generate(TEXT, {**params, "stop_token_ids": [token], "min_new_tokens": 12})
    assert len(late["output_ids"]) >= 12


def test_a_name_is_free_again_as_soon_as_its_result_is_there(demo: Engine) -> None:
    """Answers to the old request, still on their way, must not reach the new one."""
    params = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    free = demo.generate(TEXT, params)
    stop = free["text"].split()[2]
    for _ in range(10):
        assert demo.generate(TEXT, {**params, "stop": stop}, rid="same")["text"] in free["text"]
        whole = demo.generate(TEXT, {**params, "max_new_tokens": 3}, rid="same")
        assert whole["output_ids"] == free["output_ids"][:3]
        stream = demo.generate(TEXT, params, rid="same", stream=True)
        next(stream)
        stream.close()
        whole = demo.generate(TEXT, {**params, "max_new_tokens": 3}, rid="same")
        assert whole["output_ids"] == free["output_ids"][:3]


def test_a_name_in_use_is_refused(demo: Engine) -> None:
    params = {"max_new_tokens": 200, "ignore_eos": True}
    stream = demo.generate(TEXT, params, rid="busy", stream=True)
    next(stream)
    with pytest.raises(RequestError, match="'busy' is the name of a request that has not ended"):
        demo.generate(TEXT, GREEDY, rid="busy")
    # The first one goes on undisturbed.
    assert len(next(stream)["output_ids"]) >= 2
    stream.close()


# -- streams, event loops, aborts ---------------------------------------------------------------


def check_stream(pieces: list[Result], whole: Result) -> None:
    texts = [piece["text"] for piece in pieces]
    for before, after in itertools.pairwise(texts):
        assert after.startswith(before)
    counts = [len(piece["output_ids"]) for piece in pieces]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    assert all(piece["meta_info"]["finish_reason"] is None for piece in pieces[:-1])
    assert pieces[-1]["text"] == whole["text"]
    assert pieces[-1]["output_ids"] == whole["output_ids"]
    assert pieces[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    for piece in pieces:
        logprobs = piece["meta_info"]["output_token_logprobs"]
        assert [entry[1] for entry in logprobs] == piece["output_ids"]


def test_streams_are_cumulative(demo: Engine) -> None:
    params = {"temperature": 0, "max_new_tokens": 20, "stop": ["\n\n\n"]}
    whole = demo.generate(TEXT, params, return_logprob=True)
    check_stream(list(demo.generate(TEXT, params, stream=True, return_logprob=True)), whole)

    async def collect() -> list[Result]:
        stream = await demo.async_generate(TEXT, params, stream=True, return_logprob=True)
        return [piece async for piece in stream]

    check_stream(asyncio.run(collect()), whole)


def test_twenty_at_once(demo: Engine) -> None:
    params = [{"temperature": 0, "max_new_tokens": n % 7 + 1} for n in range(20)]
    texts = [f"{TEXT} {'very ' * n}" for n in range(20)]

    async def together() -> list[Result]:
        calls = [demo.async_generate(t, p) for t, p in zip(texts, params, strict=True)]
        return list(await asyncio.gather(*calls))

    found = asyncio.run(together())
    expected = demo.generate(texts, params)
    assert [r["output_ids"] for r in found] == [r["output_ids"] for r in expected]


def test_a_cancelled_task_ends_its_request(demo: Engine) -> None:
    async def cancel() -> None:
        call = demo.async_generate(TEXT, {"max_new_tokens": 900, "ignore_eos": True})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call, 0.2)

    asyncio.run(cancel())
    demo.generate(TEXT, GREEDY)
    counts = demo.get_server_info()["internal_states"][0]
    assert counts["running"] == counts["waiting"] == 0


def test_abort_by_name_and_all(demo: Engine) -> None:
    params = {"max_new_tokens": 900, "ignore_eos": True}
    stream = demo.generate(TEXT, params, rid="long", stream=True)
    first = next(stream)
    demo.abort_request("somebody else")
    demo.abort_request("long")
    *_, last = stream
    reason = last["meta_info"]["finish_reason"]
    assert (reason["type"], reason["status_code"]) == ("abort", 499)
    assert last["output_ids"][: len(first["output_ids"])] == first["output_ids"]
    assert len(last["output_ids"]) < 900
    timer = threading.Timer(0.3, lambda: demo.abort_request(abort_all=True))
    timer.start()
    results = demo.generate([TEXT] * 12, params)
    timer.join()
    assert {r["meta_info"]["finish_reason"]["type"] for r in results} == {"abort"}


# -- the engine as a whole ----------------------------------------------------------------------

BAD_CALLS: list[dict[str, Any]] = [
    {"input_ids": []},
    {"input_ids": [4096]},
    {"input_ids": [[1, 2], [-1]]},
    {"input_ids": [5] * 1025},
    {"prompt": "x", "sampling_params": {"max_new_tokens": 2000}},
    {"prompt": ["x", "y"], "sampling_params": [{"temperature": math.nan}, {}]},
    {"prompt": ["x", "y"], "sampling_params": [{}, {"unknown": 1}]},
    {"prompt": "x", "return_logprob": True, "logprob_start_len": 99},
    {"prompt": "x", "return_logprob": True, "top_logprobs_num": 5000},
    {"prompt": "x", "sampling_params": {"n": 2, "max_new_tokens": 0}},
    {"prompt": "x", "priority": "high"},
    {"prompt": "x", "extra_key": ["a", "b"]},
]


def test_bad_calls_leave_the_engine_as_it_was(demo: Engine) -> None:
    demo.flush_cache()
    before = demo.get_server_info()["internal_states"], demo.memory_report()["pages"]
    for call in BAD_CALLS:
        with pytest.raises(RequestError):
            demo.generate(**call)
    with pytest.raises(TypeError, match="unknown argument 'promt'"):
        demo.generate(promt="x")
    after = demo.get_server_info()["internal_states"], demo.memory_report()["pages"]
    assert after == before
    assert demo.generate(TEXT, GREEDY)["output_ids"]


def test_flush_cache(demo: Engine) -> None:
    demo.generate(TEXT * 3, GREEDY)
    again = demo.generate(TEXT * 3, GREEDY)
    assert again["meta_info"]["cached_tokens"] > 0
    # True right after any result, however the request ended.
    for params in (
        GREEDY,
        {**GREEDY, "stop_token_ids": list(range(4096))},
        {**GREEDY, "stop": "e"},
    ):
        demo.generate(TEXT * 3, params)
        assert demo.flush_cache() is True
    assert demo.generate(TEXT * 3, GREEDY)["meta_info"]["cached_tokens"] == 0
    stream = demo.generate(TEXT, {"max_new_tokens": 300, "ignore_eos": True}, stream=True)
    next(stream)
    assert demo.flush_cache() is False
    stream.close()


def test_extra_key_parts_the_cache(demo: Engine) -> None:
    assert demo.flush_cache()
    cached = [
        demo.generate(TEXT * 3, GREEDY, extra_key=key)["meta_info"]["cached_tokens"]
        for key in (None, "tenant", None, "tenant")
    ]
    assert cached[:2] == [0, 0]
    assert min(cached[2:]) > 0


def test_server_info_and_report(demo: Engine) -> None:
    info = demo.get_server_info()
    assert plain_json(info) is not None
    assert info["model_path"] == "demo"
    assert info["context_length"] == 1024
    assert info["random_seed"] == 1
    assert info["max_total_num_tokens"] == demo.memory_report()["pages"]["total"] * 16
    report = demo.memory_report()
    assert plain_json(report) is not None
    assert {"budget_bytes", "plan", "measured", "pages", "violations", "host"} <= set(report)
    assert set(report["pages"]) == {"total", "free", "cached", "in_use", "quarantined"}
    assert "kv" in demo.plan_table


def test_shutdown_twice_and_context_manager(tiny: Path) -> None:
    with open_engine(tiny) as engine:
        assert len(engine.generate(input_ids=[1, 2], sampling_params=GREEDY)["output_ids"]) > 0
        engine.shutdown()
        engine.shutdown()
    with open_engine(tiny) as engine, pytest.raises(ZeroDivisionError):
        raise ZeroDivisionError
    engine.shutdown()


def test_without_a_tokenizer(tiny: Path) -> None:
    with open_engine(tiny) as engine:
        result = engine.generate(input_ids=[3, 4], sampling_params=GREEDY)
        assert result["text"] == ""
        assert all(0 <= token < VOCAB for token in result["output_ids"])
        with pytest.raises(RequestError, match="give input_ids instead"):
            engine.generate("text")
        with pytest.raises(RequestError, match="use stop_token_ids"):
            engine.generate(input_ids=[3], sampling_params={"stop": "x"})


def test_the_same_seed_gives_the_same_samples(tiny: Path) -> None:
    def sample(**changes: Any) -> list[list[int]]:
        with open_engine(tiny, **changes) as engine:
            results = engine.generate(
                input_ids=[prompt(5, 1)] * 3, sampling_params={"max_new_tokens": 12}
            )
            return [result["output_ids"] for result in results]

    assert sample() == sample()
    assert sample() != sample(random_seed=2)


def test_engines_that_cannot_be(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="memory_budget") as caught:
        open_engine(tiny, memory_budget="1MiB")
    assert "weights" in caught.value.table
    with pytest.raises(ConfigError, match=r"no config\.json; give"):
        open_engine(tmp_path)
    with pytest.raises(ConfigError, match="unknown name 'page_sise'"):
        open_engine(tiny, page_sise=4)
    with pytest.raises(ConfigError, match=r"logits_workspace: got 1024 bytes, .* raise it"):
        open_engine(tiny, logits_workspace=1024)


def test_empty_text_is_refused(demo: Engine) -> None:
    for text in ("", ["some", ""]):
        with pytest.raises(RequestError, match="empty text"):
            demo.generate(text)
