"""With grammars too: one request, one result, whatever runs beside it, is late or is taken away."""

import gc
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from seawall import Engine
from seawall.grammar.filler import MatcherConstraint
from tests.engine.harness import Probe, Result, assert_same, prompt, run
from tests.grammar.conftest import PERSON, grammar_bytes, open_demo, schema
from tests.grammar.test_grammar_output import TREE

GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 24}
DRAWN: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 24, "sampling_seed": 5}
TOPS = 40
PROBES = [
    Probe(ids=prompt(13, 1), params={**GREEDY, "json_schema": schema(PERSON)}, start_len=0),
    Probe(ids=prompt(17, 1), params={**DRAWN, "json_schema": schema(PERSON)}, start_len=6),
    Probe(ids=prompt(9, 2), params={**DRAWN, "json_schema": schema(TREE), "n": 3}),
    Probe(ids=prompt(32, 3), params={**DRAWN, "regex": "[a-z ]{5,60}[.!]"}, start_len=3),
    Probe(ids=prompt(16, 4), params={**DRAWN, "regex": "ab{60}", "repetition_penalty": 1.3}),
    Probe(ids=prompt(8, 5), params={**DRAWN, "choice": ["yes", "no", "yes, but"]}),
    Probe(ids=prompt(8, 5), params={**GREEDY, "ebnf": 'start: "x"~3..9 ("y" | "z")'}),
    Probe(ids=prompt(20, 6), params={**DRAWN, "regex": "[0-9]+", "logit_bias": {"1": 9.0}}),
    Probe(ids=prompt(20, 6), params={**DRAWN, "regex": "[0-9]+", "top_k": 3, "top_p": 0.8}),
    Probe(ids=prompt(12, 7), params=DRAWN),
    Probe(ids=prompt(12, 8), params={**GREEDY, "frequency_penalty": 0.5}, start_len=0),
]


def go(engine: Engine, probes: list[Probe]) -> list[list[Result]]:
    return run(engine, probes, top_k=TOPS)


@pytest.fixture(scope="module")
def alone() -> Iterator[list[list[Result]]]:
    with open_demo(disable_overlap_schedule=True, enable_mixed_chunk=False) as engine:
        results = []
        for probe in PROBES:
            assert engine.flush_cache()
            results += go(engine, [probe])
        yield results


def test_the_probes_end_in_every_way(alone: list[list[Result]]) -> None:
    reasons = [s["meta_info"]["finish_reason"] for samples in alone for s in samples]
    assert {"type": "stop", "matched": None} in reasons
    assert any(r["type"] == "length" for r in reasons)
    assert any(r["type"] == "stop" and r["matched"] in (1, 5) for r in reasons)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"disable_overlap_schedule": True},
        {"enable_mixed_chunk": False, "disable_radix_cache": True},
        {"chunked_prefill_size": 3, "page_size": 1},
        {"max_running_requests": 3, "schedule_policy": "lpm"},
    ],
    ids=lambda changes: " ".join(changes) or "defaults",
)
def test_in_a_crowd(alone: list[list[Result]], changes: dict[str, Any]) -> None:
    mixed = [*PROBES, *(Probe(ids=p.ids[:5], params=p.params) for p in PROBES)]
    random.Random(3).shuffle(mixed)
    with open_demo(**changes) as engine:
        found = go(engine, mixed)
        assert_same([found[mixed.index(probe)] for probe in PROBES], alone, PROBES)
        again = go(engine, PROBES) if not changes else found
    if not changes:
        assert_same(again, alone, PROBES)


@pytest.mark.parametrize("overlap", [True, False])
def test_after_retraction(alone: list[list[Result]], overlap: bool) -> None:
    with open_demo(
        page_size=4,
        max_total_tokens=128,
        schedule_conservativeness=0.05,
        disable_overlap_schedule=not overlap,
        context_length=128,
    ) as engine:
        quick = {"max_new_tokens": 20, "stop_token_ids": list(range(4096)), "temperature": 1}
        engine.generate(input_ids=[[7]] * 40, sampling_params=quick)
        found = go(engine, PROBES * 2)
        retracted = [s["meta_info"]["num_retractions"] for samples in found for s in samples]
        assert sum(retracted) > 0
        report = engine.memory_report()
        assert report["violations"] == []
    assert_same(found, alone * 2, PROBES * 2)


@pytest.mark.parametrize("overlap", [True, False])
def test_late_masks_sit_out(
    alone: list[list[Result]], overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows whose mask is late draw later, from KV that is there; nothing else changes."""
    fill, rng = MatcherConstraint.fill, random.Random(1)

    def slow(self: MatcherConstraint, banned: Any) -> None:
        if rng.random() < 0.1:
            time.sleep(0.03)
        fill(self, banned)

    monkeypatch.setattr(MatcherConstraint, "fill", slow)
    monkeypatch.setattr("seawall.scheduler.constrained.MASK_SECONDS", 0.002)
    with open_demo(disable_overlap_schedule=not overlap, debug_memory=True) as engine:
        found = go(engine, PROBES)
        again = go(engine, PROBES)
        assert engine._assembly.core.scheduler.constrained.num_late > 10
        assert engine.memory_report()["violations"] == []
    assert_same(found, alone, PROBES)
    assert_same(again, alone, PROBES)


def test_others_go_on_while_a_mask_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that comes only when another request has been served to its end."""
    fill, served = MatcherConstraint.fill, threading.Event()

    def held(self: MatcherConstraint, banned: Any) -> None:
        assert served.wait(60)
        fill(self, banned)

    monkeypatch.setattr(MatcherConstraint, "fill", held)
    texts: list[str] = []
    with open_demo() as engine:

        def constrained() -> None:
            texts.append(engine.generate("A", {"regex": "[a-c]{6}"})["text"])

        thread = threading.Thread(target=constrained)
        thread.start()
        others = engine.generate(
            ["Once", "upon"], {"max_new_tokens": 40, "ignore_eos": True, "temperature": 0}
        )
        assert [len(other["output_ids"]) for other in others] == [40, 40]
        assert not texts
        served.set()
        thread.join()
        assert len(texts[0]) == 6
        # One that is ended while its mask is late leaves nothing behind.
        served.clear()
        thread = threading.Thread(target=constrained)
        thread.start()
        engine.generate("Once", {"max_new_tokens": 4})
        engine.abort_request(abort_all=True)
        thread.join()
        served.set()
        assert engine.flush_cache()


def test_a_mask_that_never_comes_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    fill, over = MatcherConstraint.fill, threading.Event()

    def stuck(self: MatcherConstraint, banned: Any) -> None:
        if self.matcher is first[0]:
            assert over.wait(60)
        fill(self, banned)

    monkeypatch.setattr(MatcherConstraint, "fill", stuck)
    monkeypatch.setattr("seawall.scheduler.constrained.LONGEST_SECONDS", 0.2)
    first: list[Any] = [None]
    make = MatcherConstraint.__init__

    def noted(self: MatcherConstraint, *args: Any) -> None:
        make(self, *args)
        first[0] = first[0] or self.matcher

    monkeypatch.setattr(MatcherConstraint, "__init__", noted)
    with open_demo() as engine:
        found = engine.generate(["a", "b"], {"regex": "[a-c]{6}", "temperature": 0})
        reasons = [each["meta_info"]["finish_reason"] for each in found]
        assert [reason["type"] for reason in reasons] == ["abort", "stop"]
        assert reasons[0]["message"].startswith("regex: after 0 tokens: its mask took longer than")
        over.set()
        assert engine.flush_cache()


def test_aborts_and_stop_strings_leave_nothing(demo: Engine) -> None:
    pages = demo.memory_report()["pages"]["total"]
    rng = random.Random(7)
    for _ in range(6):
        params = [
            rng.choice(
                [
                    {"regex": "[a-z ]{200}", "stop": ["e"]},
                    {"json_schema": schema(PERSON)},
                    {"choice": ["yes", "no"], "n": 3},
                    {"max_new_tokens": 30},
                ]
            )
            for _ in range(6)
        ]
        for each in params:
            each["sampling_seed"] = rng.randrange(99)
        rids = [f"storm {rng.random()}" for _ in params]
        killer = threading.Timer(0.01, demo.abort_request, [rng.choice(rids)])
        killer.start()
        found = demo.generate([str(p) for p in range(6)], params, rid=rids)
        killer.join()
        assert len(found) == sum(int(p.get("n", 1)) for p in params)
        assert demo.flush_cache()
        report = demo.memory_report()
        assert report["pages"]["free"] == pages
        assert report["violations"] == []
    before = grammar_bytes(demo)["now"]
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o) is MatcherConstraint]
    demo.generate("a", {"choice": ["yes", "no"]})
    assert grammar_bytes(demo)["now"] == before


def test_nothing_grows(soak: bool) -> None:
    """Live tensor bytes after constrained steps are those of before, whatever was asked."""
    with open_demo(debug_memory=True) as engine:
        asked = {"return_logprob": True, "top_logprobs_num": 3}
        params = {"regex": "[a-z ]{2000}", "max_new_tokens": 60, "sampling_seed": 1}

        def measured() -> dict[str, int]:
            assert engine.flush_cache()
            report = engine.memory_report()
            assert report["violations"] == []
            lines = {name: line["now"] for name, line in report["measured"].items()}
            return {**lines, "host grammars": grammar_bytes(engine)["now"]}

        engine.generate(["a", "b"], params, **asked)
        first = measured()
        for _ in range(170 if soak else 4):
            engine.generate(["a", "b"], params, **asked)
            assert measured() == first
        assert first["masks"] == 16 * 4096 // 8
