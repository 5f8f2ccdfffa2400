"""Host accounts: each below its plan at the peak of a run, and empty when it is over."""

from typing import Any

import pytest

from seawall import Engine
from seawall.engine.texts import TextAccount
from seawall.memory.ledger import Ledger
from tests.engine.harness import TEXT, open_engine

# What a run leaves: fixed tables, and the cached prefixes, which go with a flush.
FIXED = {"pages", "companions"}
PARAMS = {"max_new_tokens": 12, "temperature": 0}


def host(engine: Engine) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = engine.memory_report()["host"]["measured"]
    return found


@pytest.fixture(scope="module")
def engine() -> Any:
    sizes = {"memory_budget": "256MiB", "logits_workspace": "8MiB", "page_size": 16}
    with open_engine("demo", **sizes, skip_tokenizer_init=False, debug_memory=True) as engine:
        yield engine


def test_every_account_is_used_bounded_and_empty_again(engine: Engine) -> None:
    engine.flush_cache()
    before = {account: figures["now"] for account, figures in host(engine).items()}
    peaks: dict[str, int] = {}
    stream = engine.generate(TEXT, PARAMS | {"max_new_tokens": 30}, stream=True)
    for _ in stream:
        for account, figures in host(engine).items():
            peaks[account] = max(peaks.get(account, 0), figures["now"])
    engine.generate(
        [f"{TEXT} {index}" for index in range(40)],
        PARAMS | {"stop": ["never seen"]},
        return_logprob=True,
        top_logprobs_num=2,
        logprob_start_len=0,
    )
    report = engine.memory_report()
    plan, measured = report["host"]["plan"], report["host"]["measured"]
    assert set(measured) == set(plan)
    for account, figures in measured.items():
        assert figures["peak"] <= plan[account], account
    # The peaks are those of the run, not of the moment of the report.
    for account in ("running", "radix"):
        assert measured[account]["peak"] >= peaks[account] > 0, account
    assert measured["running"]["now"] == 0 < measured["running"]["peak"]
    assert peaks["detokenizers"] > 0
    assert measured["detokenizers"]["peak"] > peaks["detokenizers"]
    assert report["violations"] == []
    assert engine.flush_cache()
    after = {account: figures["now"] for account, figures in host(engine).items()}
    for account in set(plan) - FIXED:
        assert after[account] == before[account], account
    for account in ("queue", "running", "results", "detokenizers"):
        assert after[account] == 0, account


def test_an_unread_stream_gives_its_room_back(engine: Engine) -> None:
    stream = engine.generate(TEXT, PARAMS, stream=True)
    next(stream)
    assert host(engine)["detokenizers"]["now"] > 0
    stream.close()
    assert host(engine)["detokenizers"]["now"] == 0


def test_without_room_texts_are_late_but_the_same(engine: Engine) -> None:
    prompts = [f"{TEXT} {index}" for index in range(6)]
    free = engine.generate(prompts, PARAMS)
    words = [result["text"].split()[1] for result in free]
    params = [PARAMS | {"stop": [word]} for word in words]
    expected = engine.generate(prompts, params)
    assert all(r["meta_info"]["finish_reason"]["type"] == "stop" for r in expected)
    room = engine._assembly.texts
    ledger = room._ledger
    # A line that holds a single text of this length.
    room._ledger = Ledger({"detokenizers": 2048 + 4 * 12})
    try:
        found = engine.generate(prompts, params)
        streamed = [list(engine.generate(prompts[0], params[0], stream=True))[-1]]
        assert room._ledger.peak("detokenizers") == 2048 + 4 * 12
        assert room._ledger.now("detokenizers") == 0
    finally:
        room._ledger = ledger
    for ours, theirs in zip([*found, *streamed], [*expected, expected[0]], strict=True):
        assert ours["text"] == theirs["text"]
        assert ours["output_ids"] == theirs["output_ids"]
        assert ours["meta_info"]["finish_reason"] == theirs["meta_info"]["finish_reason"]


def test_the_account_refuses_what_does_not_fit() -> None:
    account = TextAccount(Ledger({"detokenizers": 5000}))
    assert account.take(10)
    assert account.take(10)
    assert not account.take(200)
    account.give(10)
    assert account.take(200)
