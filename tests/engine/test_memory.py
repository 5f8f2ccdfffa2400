"""The memory contract on the engine: no account passes its plan, and everything comes back.

With debug_memory the tracker counts every tensor byte of every step, the page ledger is compared
with leases and tree after each step, and a misuse raises where it is made.
"""

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from seawall import Engine
from tests.engine.harness import make_tiny_llama, open_engine, prompt
from tests.models.checkpoints import VOCAB

Report = dict[str, Any]


def check_report(engine: Engine) -> Report:
    """No measured peak above its line, the lines within the budget, no violation."""
    report = engine.memory_report()
    assert report["violations"] == []
    plan = report["plan"]
    for account, figures in report["measured"].items():
        assert figures["now"] <= figures["peak"] <= plan[account], account
    assert {"activations", "logits"} <= set(report["measured"])
    assert report["measured"]["activations"]["source"] == "tracker"
    assert sum(plan.values()) <= report["budget_bytes"]
    host = report["host"]
    for account, figures in host["measured"].items():
        if account in host["plan"]:
            assert figures["peak"] <= host["plan"][account], account
    pages = report["pages"]
    assert pages["free"] + pages["cached"] + pages["in_use"] == pages["total"]
    return report


def check_idle(engine: Engine, before: Report) -> None:
    """All requests have ended: pages and bytes are where they were after the warm-up."""
    report = check_report(engine)
    assert report["pages"]["in_use"] == 0
    now, then = report["measured"], before["measured"]
    assert {a: f["now"] for a, f in now.items()} == {a: f["now"] for a, f in then.items()}
    assert report["host"]["measured"]["queue"]["now"] == 0
    assert engine.flush_cache()
    pages = engine.memory_report()["pages"]
    assert pages["free"] == pages["total"]


def random_call(rng: random.Random, longest: int, names: list[str], crowd: str) -> dict[str, Any]:
    """Arguments of one batch of ten requests."""
    ids, params, ranks, mine = [], [], [], []
    for at in range(10):
        length = rng.randint(1, longest)
        ids.append(prompt(length, rng.randint(1, 6)))
        room = longest - length
        max_new = min(rng.choice([0, 1, 5, 20]), room)
        params.append(
            {
                "max_new_tokens": max_new,
                "temperature": rng.choice([0.0, 0.8, 1.2]),
                "top_p": rng.choice([1.0, 0.9]),
                "top_k": rng.choice([-1, 3]),
                "min_p": rng.choice([0.0, 0.05]),
                "repetition_penalty": rng.choice([1.0, 1.3]),
                "frequency_penalty": rng.choice([0.0, 0.7]),
                "logit_bias": rng.choice([None, {str(t): 0.5 for t in range(VOCAB)}]),
                "n": rng.choice([1, 1, 1, 4]) if max_new else 1,
            }
        )
        ranks.append(rng.choice([0, 1, 20, VOCAB]))
        mine.append(f"{crowd} {at} {len(names)}")
    # Four callers add to the list: what a caller sends are its own names, not the last ten.
    names.extend(mine)
    return {
        "input_ids": ids,
        "sampling_params": params,
        "return_logprob": [rng.random() < 0.7 for _ in ids],
        "logprob_start_len": [rng.choice([-1, 0]) for _ in ids],
        "top_logprobs_num": ranks,
        "token_ids_logprob": rng.choice([None, [0, VOCAB - 1], list(range(VOCAB))]),
        "rid": mine,
    }


def storm(engine: Engine, *, num_requests: int, longest: int, seed: int) -> None:
    """Several callers at once, while another thread aborts what it likes."""
    names: list[str] = []
    errors: list[BaseException] = []
    over = threading.Event()

    def call(caller: int) -> None:
        rng = random.Random(seed * 100 + caller)
        try:
            for _ in range(num_requests // 40):
                for result in engine.generate(**random_call(rng, longest, names, f"c{caller}")):
                    reason = result["meta_info"]["finish_reason"]
                    assert reason["type"] in ("stop", "length") or reason["status_code"] == 499
        except BaseException as error:
            errors.append(error)

    def abort() -> None:
        rng = random.Random(seed)
        while not over.is_set():
            time.sleep(rng.random() * 0.02)
            if names:
                engine.abort_request(rng.choice(names[-60:]))

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    aborter = threading.Thread(target=abort)
    for thread in (*callers, aborter):
        thread.start()
    for thread in callers:
        thread.join()
    over.set()
    aborter.join()
    assert not errors, errors[0]


@pytest.mark.parametrize(
    ("page_size", "changes"),
    [
        (1, {}),
        (16, {"schedule_conservativeness": 0.05, "max_total_tokens": 128}),
        (64, {"disable_radix_cache": True}),
        (4, {"chunked_prefill_size": -1, "max_prefill_tokens": 64, "logits_workspace": "640KiB"}),
    ],
    ids=["page 1", "page 16, small pool", "page 64, no cache", "whole prompts, small workspace"],
)
def test_a_random_mix_stays_below_the_plan(
    tiny: Path, page_size: int, changes: dict[str, Any], soak: bool
) -> None:
    with open_engine(tiny, page_size=page_size, debug_memory=True, **changes) as engine:
        before = check_report(engine)
        storm(engine, num_requests=4000 if soak else 200, longest=60, seed=page_size)
        check_report(engine)
        check_idle(engine, before)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_pool_of_exactly_one_request(tiny: Path, page_size: int) -> None:
    """The longest request takes every page; what comes beside it waits its turn."""
    with open_engine(tiny, page_size=page_size, max_total_tokens=48, debug_memory=True) as engine:
        before = check_report(engine)
        assert before["pages"]["total"] * page_size == 48
        results = engine.generate(
            input_ids=[prompt(20, seed) for seed in range(6)],
            sampling_params={"max_new_tokens": 28, "ignore_eos": True},
        )
        assert [len(r["output_ids"]) for r in results] == [28] * 6
        check_idle(engine, before)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_pool_one_page_short(tiny: Path, page_size: int) -> None:
    """One page less than two such requests need: each gets what it would get alone."""
    with open_engine(
        tiny,
        page_size=page_size,
        max_total_tokens=96 - page_size,
        schedule_conservativeness=0.05,
        debug_memory=True,
    ) as engine:
        before = check_report(engine)
        params = {"max_new_tokens": 28, "ignore_eos": True, "temperature": 0}
        ids = [prompt(20, seed) for seed in range(4)]
        together = engine.generate(input_ids=ids, sampling_params=params)
        assert [len(r["output_ids"]) for r in together] == [28] * 4
        check_idle(engine, before)
        alone = [engine.generate(input_ids=one, sampling_params=params) for one in ids]
        assert [r["output_ids"] for r in together] == [r["output_ids"] for r in alone]


def test_many_changed_logits_in_a_small_workspace(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Every seat changes every logit and asks for every id: blocks shrink, the bound holds."""
    folder = make_tiny_llama(tmp_path_factory.mktemp("adjusted"))
    with open_engine(
        folder, logits_workspace="640KiB", max_running_requests=48, debug_memory=True
    ) as engine:
        before = check_report(engine)
        bias = {str(token): 0.25 for token in range(VOCAB)}
        engine.generate(
            input_ids=[prompt(5, seed) for seed in range(96)],
            sampling_params={"max_new_tokens": 6, "logit_bias": bias, "top_p": 0.9},
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=VOCAB,
            token_ids_logprob=list(range(VOCAB)),
        )
        check_idle(engine, before)


def test_an_aborted_stream_gives_everything_back(tiny: Path) -> None:
    with open_engine(tiny, debug_memory=True) as engine:
        before = check_report(engine)
        for _ in range(5):
            stream = engine.generate(
                input_ids=prompt(9, 1),
                sampling_params={"max_new_tokens": 50, "ignore_eos": True, "n": 3},
                stream=True,
            )
            next(stream)
            stream.close()
        # The caller has left; the core hears of it at its next turn.
        engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 1})
        check_idle(engine, before)
