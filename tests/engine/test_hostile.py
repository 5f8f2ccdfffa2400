"""Hostile calls: each is refused with one line before anything runs, and changes nothing."""

import math
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seawall import Engine, EngineError, QueueFullError, RequestError, SamplingParams
from seawall.engine.results import RESULTS, ResultAccount
from seawall.memory.footprint import scores_bytes
from seawall.memory.ledger import Ledger
from tests.engine.harness import open_engine, prompt
from tests.models.checkpoints import VOCAB

IDS = list(prompt(9, 1))
HUGE = 10**5000  # more digits than Python writes out
NESTED: list[Any] = []
for _ in range(100_000):
    NESTED = [NESTED]
SCORED: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0}


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with open_engine(tiny, host_memory_budget="3MiB") as engine:
        yield engine


class Unprintable:
    """Whatever is asked of it raises."""

    def __repr__(self) -> str:
        raise ZeroDivisionError


# options -> what the line says: value, limit, fix
CALLS: list[tuple[dict[str, Any], str]] = [
    # token ids
    ({"input_ids": [*IDS, VOCAB]}, r"input_ids: got id 97, the vocabulary is \[0, 97\); tokenise"),
    ({"input_ids": [-1, *IDS]}, r"got id -1, the vocabulary is \[0, 97\); tokenise"),
    ({"input_ids": [HUGE]}, r"got id .*, the vocabulary is \[0, 97\); tokenise"),
    ({"input_ids": np.array([3, VOCAB])}, r"got id 97, the vocabulary"),
    ({"input_ids": np.array([2**63], np.uint64)}, r"got id 9223372036854775808, the vocabulary"),
    ({"input_ids": torch.tensor([-5])}, r"got id -5, the vocabulary"),
    ({"input_ids": np.array([], np.int64)}, "got 0 tokens, the least is 1; give"),
    ({"input_ids": torch.tensor([0.5])}, r"got 0\.5 in the list, integers are needed"),
    ({"input_ids": torch.tensor([0.5]).bfloat16()}, "input_ids: got Tensor, .*; give a list"),
    ({"input_ids": np.array([True])}, "got True in the list, integers are needed"),
    ({"input_ids": np.array(["7"])}, "got '7' in the list, integers are needed"),
    ({"input_ids": np.array([None])}, "got None in the list, integers are needed"),
    ({"input_ids": np.int64(3)}, "got an array of 0 axes; give one, or two"),
    ({"input_ids": torch.zeros((1, 1, 1), dtype=torch.int64)}, "got an array of 3 axes; give one"),
    ({"input_ids": [np.zeros((1, 1), np.int64)]}, "got an array of 2 axes in the list; give one"),
    ({"input_ids": [3, np.array([1, 2])]}, r"got array\(\[1, 2\]\) in the list, integers are need"),
    ({"input_ids": [3, True]}, "got True in the list, integers are needed"),
    ({"input_ids": [3, "4"]}, "got '4' in the list, integers are needed"),
    ({"input_ids": [3, 4.0]}, r"got 4\.0 in the list, integers are needed"),
    ({"input_ids": [3, Unprintable()]}, "got <Unprintable .* in the list, integers are needed"),
    ({"input_ids": [[[3]]]}, r"got \[3\] in the list, integers are needed"),
    ({"input_ids": NESTED}, "in the list, integers are needed"),
    ({"input_ids": "3 4"}, "got str; give a list of token ids"),
    ({"input_ids": b"34"}, "got bytes; give a list of token ids"),
    ({"input_ids": {3: 4}}, "got dict; give a list of token ids"),
    ({"input_ids": iter([3])}, "give a list of token ids"),
    ({"input_ids": [3] * 65}, "prompt: got 65 tokens, context_length is 64; shorten the prompt"),
    # which logprobs
    ({"top_logprobs_num": VOCAB + 1}, r"got 98, the limit is 97 \(vocabulary 97, .*; ask for few"),
    ({"top_logprobs_num": HUGE}, "got .*, the limit is"),
    ({"top_logprobs_num": True}, "got True, an integer is needed"),
    ({"top_logprobs_num": 2.0}, r"got 2\.0, an integer is needed"),
    ({"top_logprobs_num": "2"}, "got '2', an integer is needed"),
    ({"token_ids_logprob": list(range(97)) * 50}, "got 4850 ids, the limit is .*; ask for fewer"),
    ({"token_ids_logprob": [VOCAB]}, r"got id 97, the vocabulary is \[0, 97\); use ids of"),
    ({"token_ids_logprob": [-1]}, r"got id -1, the vocabulary is \[0, 97\); use ids of"),
    ({"token_ids_logprob": [True]}, "got True, an integer is needed"),
    ({"token_ids_logprob": np.array([0.5])}, r"got 0\.5 in the list, integers are needed"),
    ({"token_ids_logprob": torch.tensor([VOCAB])}, r"got id 97, the vocabulary"),
    ({"token_ids_logprob": iter([3])}, "a list of token ids is needed"),
    ({"token_ids_logprob": {"3": 1}}, "a list of token ids is needed"),
    ({"token_ids_logprob": b"ab"}, "a list of token ids is needed"),
    ({"logprob_start_len": 10}, "got 10, the prompt has 9 tokens; give a position inside"),
    ({"logprob_start_len": -2}, "got -2, the least is -1"),
    ({"logprob_start_len": HUGE}, "logprob_start_len: got .*, the limit is"),
    ({"logprob_start_len": 0.0}, r"got 0\.0, an integer is needed"),
    ({"logprobs_mode": ["raw"]}, "choose 'raw' or 'processed'"),
    ({"logprobs_mode": np.array(["raw", "raw"])}, "choose 'raw' or 'processed'"),
    ({"return_logprob": "yes"}, "got 'yes', true or false is needed"),
    ({"return_logprob": np.array([True])}, r"got array\(\[ ?True\]\), true or false is needed"),
    # names
    ({"rid": ["a", "b"]}, "got 2 values for 1 prompts"),
    ({"rid": b"a"}, "got b'a', a string is needed"),
    ({"priority": HUGE}, "priority: got .*, the limit is"),
]
PARAMS: list[tuple[Any, str]] = [
    ({"temperature": math.nan}, "temperature: got nan, a finite number is needed"),
    ({"temperature": math.inf}, "temperature: got inf, a finite number is needed"),
    ({"temperature": -0.5}, r"temperature: got -0\.5, the range is \[0, 10000\.0\]; change it"),
    ({"temperature": -math.inf}, "got -inf, a finite number is needed"),
    ({"temperature": np.float32("nan")}, "got nan, a finite number is needed"),
    ({"temperature": "1"}, "got '1', a number is needed"),
    ({"temperature": True}, "got True, a number is needed"),
    ({"temperature": [0.5]}, r"got \[0\.5\], a number is needed"),
    ({"temperature": HUGE}, "got an integer beyond any float; lower it"),
    ({"max_new_tokens": HUGE}, "max_new_tokens: got .*, the range is"),
    ({"max_new_tokens": 1e300}, "max_new_tokens: got .*, the range is"),
    ({"max_new_tokens": 2**62}, "after a prompt of 9 tokens, context_length is 64; ask for at mos"),
    ({"max_new_tokens": math.nan}, "got nan, an integer is needed"),
    ({"top_k": HUGE}, "top_k: got .*, the range is"),
    ({"top_k": Unprintable()}, "got <Unprintable .*, an integer is needed"),
    ({"stop_token_ids": [2**70]}, "stop_token_ids: got .*, the range is"),
    ({"logit_bias": {"9" * 5000: 1}}, "got key '999.*, a token id is needed"),
    ({"logit_bias": {"5": 1, 5: 2}}, "got id 5 twice; give each id one value"),
    ({"logit_bias": {"-1": 1}}, "got key '-1', a token id is needed"),
    ({"logit_bias": {True: 1}}, "got key True, a token id is needed"),
    ({"logit_bias": {"97": 1}}, r"got id 97, the vocabulary is \[0, 97\); use ids"),
    ({"stream_interval": np.array([1, 1])}, "not supported; leave it out"),
    ({("a",): 1}, r"unknown name \('a',\)"),
    ("temperature=1", "got str; give a mapping of names to values"),
    ({1, 2}, "got set; give a mapping of names to values"),
    (SamplingParams(temperature=math.nan), "temperature: got nan, a finite number is needed"),
    (SamplingParams(top_k="all"), "top_k: got 'all', an integer is needed"),  # type: ignore[arg-type]
    (SamplingParams(logit_bias=((97, 1.0),)), r"got id 97, the vocabulary is \[0, 97\)"),
]


def state(engine: Engine) -> Any:
    report = engine.memory_report()
    return (
        engine.get_server_info()["internal_states"],
        report["pages"],
        report["host"]["measured"]["queue"]["now"],
        report["host"]["measured"][RESULTS]["now"],
        report["violations"],
    )


def refused(engine: Engine, call: dict[str, Any]) -> str:
    with pytest.raises(RequestError) as caught:
        engine.generate(**call)
    message = str(caught.value)
    assert "\n" not in message
    assert 20 < len(message) < 250
    return message


@pytest.mark.parametrize("at", range(len(CALLS)))
def test_a_hostile_call_changes_nothing(engine: Engine, at: int) -> None:
    options, said = CALLS[at]
    call = {"input_ids": IDS, **SCORED, **options}
    before = state(engine)
    assert re.search(said, refused(engine, call))
    # In a batch, the good ones beside it don't run either; a stream is refused before it is read.
    if "input_ids" not in options:
        refused(engine, {**call, "stream": True})
    assert state(engine) == before


@pytest.mark.parametrize("at", range(len(PARAMS)))
def test_hostile_sampling_params(engine: Engine, at: int) -> None:
    params, said = PARAMS[at]
    before = state(engine)
    assert re.search(said, refused(engine, {"input_ids": IDS, "sampling_params": params}))
    batch = {"input_ids": [IDS, IDS], "sampling_params": [{}, params]}
    assert re.search(said, refused(engine, batch))
    assert state(engine) == before


def test_a_batch_with_one_bad_prompt_runs_none(engine: Engine) -> None:
    before = state(engine)
    for bad in ([], [VOCAB], np.array([-1]), torch.tensor([1.5])):
        refused(engine, {"input_ids": [IDS, bad, IDS]})
    assert state(engine) == before


def test_odd_but_sound_values_are_served(engine: Engine) -> None:
    greedy = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    right = engine.generate(input_ids=IDS, sampling_params=greedy)["output_ids"]
    for ids in (
        tuple(IDS),
        np.array(IDS, np.uint8),
        np.array(IDS, np.int64)[::-1][::-1],
        torch.tensor(IDS),
        torch.tensor(IDS, dtype=torch.int32),
        [np.int64(token) for token in IDS],
    ):
        assert engine.generate(input_ids=ids, sampling_params=greedy)["output_ids"] == right
    for rows in (
        np.array([IDS, IDS]),
        torch.tensor([IDS, IDS]),
        [np.array(IDS), IDS],
        [torch.tensor(IDS), tuple(IDS)],
    ):
        results = engine.generate(input_ids=rows, sampling_params=greedy)
        assert [result["output_ids"] for result in results] == [right, right]
    for params in (
        {"top_k": 2**63 - 1, "temperature": 1e4, "sampling_seed": -(2**63)},
        {"top_p": 1e-300, "min_p": 1.0},
        {"temperature": 1e-300},
        {"repetition_penalty": 1e-6, "logit_bias": {"5": 1e30, 6: -1e30}},
        SamplingParams(logit_bias=((5, 1.0),), stop_token_ids=(96,), max_new_tokens=3),
    ):
        result = engine.generate(input_ids=IDS, sampling_params=params)
        assert result["meta_info"]["finish_reason"]["type"] in ("stop", "length")
    given = [
        engine.generate(
            input_ids=IDS, sampling_params=greedy, return_logprob=True, token_ids_logprob=ids
        )["meta_info"]["output_token_ids_logprobs"]
        for ids in ([3, 4], np.array([3, 4]), torch.tensor([3, 4]), range(3, 5))
    ]
    assert given[0] == given[1] == given[2] == given[3]


def test_the_callers_array_is_its_own(engine: Engine) -> None:
    """What is written into it while the request runs changes nothing."""
    ids = np.array(IDS, np.int32)
    stream = engine.generate(
        input_ids=ids,
        sampling_params={"max_new_tokens": 3, "ignore_eos": True},
        stream=True,
        logprob_format="columns",
        **SCORED,
    )
    ids[:] = 0
    *_, last = stream
    assert last["meta_info"]["input_ids"].tolist() == IDS


def test_abort_after_shutdown_says_so(tiny: Path) -> None:
    engine = open_engine(tiny)
    engine.abort_request("nobody")
    engine.shutdown()
    for call in ({"rid": "nobody"}, {"abort_all": True}):
        with pytest.raises(EngineError, match="was shut down; make a new Engine"):
            engine.abort_request(**call)


# -- bytes of results ---------------------------------------------------------------------------


def results_line(engine: Engine) -> dict[str, int]:
    host = engine.memory_report()["host"]
    return {"plan": host["plan"][RESULTS], **host["measured"][RESULTS]}


def test_results_beyond_the_account_are_refused(engine: Engine) -> None:
    before, plan = state(engine), results_line(engine)["plan"]
    each = scores_bytes(60 + 4, VOCAB, 0)
    most = plan // each
    assert 5 < most < 40
    call = {
        "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
        "top_logprobs_num": VOCAB,
        "logprob_format": "columns",
        **SCORED,
    }
    said = refused(engine, {"input_ids": [prompt(60, 1)] * (most + 1), **call})
    assert f"can take {each * (most + 1)} bytes, the host plan has {plan} for results" in said
    assert "raise host_memory_budget" in said
    assert state(engine) == before
    # As many as fit are served; what they took is gone with them.
    results = engine.generate(input_ids=[prompt(60, 1)] * most, **call)
    assert len(results) == most
    line = results_line(engine)
    assert line["now"] == 0
    assert plan // 2 < line["peak"] <= plan
    del results
    # The same for samples of one prompt, and for one that asks for everything.
    refused(engine, {"input_ids": IDS, **call, "sampling_params": {"n": 4096, "max_new_tokens": 9}})


def test_what_others_hold_is_respected_and_comes_back(engine: Engine) -> None:
    plan = results_line(engine)["plan"]
    half = int(plan * 0.6) // scores_bytes(50, VOCAB, 0)
    call = {
        "input_ids": [prompt(42, 1)] * half,
        "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
        "top_logprobs_num": VOCAB,
        **SCORED,
    }
    stream = engine.generate(**call, stream=True)
    next(stream)
    before = results_line(engine)["now"]
    assert before > 0
    with pytest.raises(QueueFullError, match=r"bytes, \d+ of the host plan's \d+ are not spoken"):
        engine.generate(**call)
    # Without logprobs there is nothing to hold.
    assert engine.generate(input_ids=IDS, sampling_params={"max_new_tokens": 1})["output_ids"]
    stream.close()
    assert results_line(engine)["now"] == 0
    assert len(engine.generate(**call)) == half
    assert results_line(engine)["now"] == 0


def test_sums_keep_nothing(tiny: Path) -> None:
    with open_engine(tiny) as engine:
        rows = [list(prompt(60, seed)) for seed in range(20)]
        totals: Any = engine.score(rows, reduce="sum")
        assert results_line(engine)["peak"] == 0
        full: Any = engine.score(rows)
        assert results_line(engine)["peak"] == 20 * 59 * 12
        assert results_line(engine)["now"] == 0
        for ours, theirs in zip(totals, full, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)


def test_claims_from_many_threads_add_up() -> None:
    """Whatever order they come and go in, the account never holds more than its line."""
    ledger = Ledger({RESULTS: 1000})
    account = ResultAccount(ledger)
    refusals: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(300):
            size = int(rng.integers(1, 600))
            try:
                claim = account.reserve(size)
            except QueueFullError:
                refusals.append(size)
                continue
            with claim:
                claim.charge(size // 2)
                claim.charge(size - size // 2)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.now(RESULTS) == 0
    assert 0 < ledger.peak(RESULTS) <= 1000
    with account.reserve(1000) as claim, pytest.raises(QueueFullError):
        account.reserve(1)
    claim.close()
    with account.reserve(1000) as again:
        again.charge(1000)
