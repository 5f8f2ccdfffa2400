"""Faults: whatever breaks in a step ends the requests of that step, and nobody else's."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from seawall import Engine, EngineError
from seawall.cache.lease import Lease
from seawall.core.step import StepPlan
from tests.engine.harness import Probe, Result, assert_same_result, open_engine, prompt, run

ERRORS = [RuntimeError, MemoryError, torch.OutOfMemoryError]
# Different lengths, so that they enter and leave at different steps; three at most run at a time.
PROBES = [
    Probe(ids=prompt(3, 1), params={"temperature": 0, "max_new_tokens": 3}, start_len=0),
    Probe(ids=prompt(14, 2), params={"temperature": 0, "max_new_tokens": 1}, start_len=0),
    Probe(ids=prompt(5, 3), params={"temperature": 0.8, "max_new_tokens": 4, "sampling_seed": 1}),
    Probe(ids=prompt(6, 1), params={"temperature": 0, "max_new_tokens": 0}, start_len=0),
    Probe(ids=prompt(9, 4), params={"max_new_tokens": 2, "n": 2, "sampling_seed": 2}),
    Probe(ids=prompt(2, 5), params={"temperature": 0, "max_new_tokens": 3}),
]
AFTER = Probe(ids=prompt(14, 2), params={"temperature": 0, "max_new_tokens": 5}, start_len=0)


class Saboteur:
    """Raises in the k-th call of one place, and remembers who was in that step."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
        self._runner: Any = engine._assembly.runner
        self._scheduler = engine._assembly.core.scheduler
        self._plan: StepPlan | None = None
        self.countdown = -1
        self.error: type[Exception] = RuntimeError
        self.struck: set[str] = set()
        launch = self._runner.launch

        def noting(plan: StepPlan) -> Any:
            self._plan = plan
            return launch(plan)

        owner, name = self._find(place)
        monkeypatch.setattr(self._runner, "launch", noting)
        monkeypatch.setattr(owner, name, self._wrapped(getattr(owner, name)))

    def arm(self, step: int, error: type[Exception]) -> None:
        self.countdown, self.error, self.struck = step, error, set()

    def _find(self, place: str) -> tuple[Any, str]:
        return {
            "launch": (self._runner.seats, "load"),
            "forward": (self._runner._model, "forward"),
            "prompt scores": (self._runner.scorer, "score"),
            "draw": (self._runner, "draw"),
            "output scores": (self._runner, "_output_scores"),
        }[place]

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            result = function(*args, **named)
            self.countdown -= 1
            if self.countdown == -1:
                plan = self._plan
                assert plan is not None
                pairs = zip(plan.seats.tolist(), plan.epochs.tolist(), strict=True)
                holders = [self._scheduler._seats.holder(*pair) for pair in pairs]
                self.struck = {holder.name for holder in holders if holder is not None}
                raise self.error("injected")
            return result

        return call


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with open_engine(
        tiny, max_running_requests=3, chunked_prefill_size=8, page_size=2, debug_memory=True
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[list[Result]]:
    """Results without faults."""
    return run(engine, [*PROBES, AFTER])


def live_bytes(engine: Engine) -> dict[str, int]:
    measured = engine.memory_report()["measured"]
    return {account: figures["now"] for account, figures in measured.items()}


def assert_clean(engine: Engine) -> None:
    report = engine.memory_report()
    assert report["violations"] == []
    assert report["pages"]["in_use"] == report["pages"]["quarantined"] == 0
    assert report["pages"]["free"] + report["pages"]["cached"] == report["pages"]["total"]


@pytest.mark.parametrize("place", ["launch", "forward", "prompt scores", "draw", "output scores"])
def test_a_fault_in_any_step_ends_its_requests_only(
    engine: Engine,
    expected: list[list[Result]],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    soak: bool,
) -> None:
    before = live_bytes(engine)
    saboteur = Saboteur(engine, monkeypatch, place)
    step = struck = 0
    while True:
        assert engine.flush_cache()
        saboteur.arm(step, ERRORS[step % len(ERRORS)])
        found = run(engine, PROBES)
        if saboteur.countdown >= 0:
            break
        failed = check_outcomes(found, expected, saboteur.struck)
        assert bool(failed) == bool(saboteur.struck)
        struck += failed
        assert_clean(engine)
        assert live_bytes(engine) == before
        saboteur.countdown = -1
        again = run(engine, [AFTER])
        assert_same_result(again[0][0], expected[-1][0], AFTER, 0)
        step += 1 if soak or step < 8 else 3
    assert step > 5
    assert struck > 5


def check_outcomes(
    found: list[list[Result]], expected: list[list[Result]], struck: set[str]
) -> int:
    """Struck requests have failed with 500, the others have their results; returns how many."""
    failed = 0
    for samples, right, probe in zip(found, expected, PROBES, strict=False):
        for index, sample in enumerate(samples):
            name = sample["meta_info"]["id"].partition("_")[0] + f"#{index}"
            reason = sample["meta_info"]["finish_reason"]
            if name in struck and reason["type"] == "abort":
                failed += 1
                assert reason["status_code"] == 500
                assert reason["message"].startswith("engine fault: ")
                assert "injected" in reason["message"]
            elif index == 0 or reason["type"] == "abort":
                assert_same_result(sample, right[index], probe, index)
            else:
                # The prompt's scores are the first sample's, which may have failed.
                assert sample["output_ids"] == right[index]["output_ids"]
    return failed


def test_struck_requests_are_failed_ones(
    engine: Engine, expected: list[list[Result]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one request a step, the one that was in the broken step must fail."""
    assert len(expected) == len(PROBES) + 1
    saboteur = Saboteur(engine, monkeypatch, "forward")
    for step in range(3):
        saboteur.arm(step, RuntimeError)
        sample = run(engine, [AFTER])[0][0]
        assert sample["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(sample["output_ids"]) < 5


def poison(engine: Engine, token: int, value: float = torch.nan) -> None:
    """Spoil the embedding of one token; the head is another matrix and stays whole."""
    model: Any = engine._assembly.runner._model
    embedding, head = model.embedding.weight, model.head.weight
    assert embedding.data_ptr() != head.data_ptr()
    with torch.inference_mode():
        embedding[token] = value


@pytest.mark.parametrize(
    ("page_size", "value"), [(1, torch.nan), (4, torch.inf), (16, -torch.inf), (16, torch.nan)]
)
def test_weights_that_are_not_finite_fail_only_those_who_meet_them(
    tiny: Path, page_size: int, value: float
) -> None:
    clean = [p for p in PROBES if 90 not in p.ids]
    with open_engine(tiny, page_size=page_size, max_total_tokens=160) as engine:
        never = {"logit_bias": {"90": -1e9}}
        clean = [
            Probe(ids=p.ids, params={**p.params, **never}, start_len=p.start_len) for p in clean
        ]
        right = run(engine, clean)
        assert engine.flush_cache()
        poison(engine, 90, value)
        hit = [
            Probe(ids=(*prompt(9, 2)[:5], 90, *prompt(4, 9)), params={"max_new_tokens": 4}),
            Probe(ids=(*prompt(30, 7), 90), params={"max_new_tokens": 4}),
            Probe(ids=(90, *prompt(12, 8)), params={"max_new_tokens": 0}, start_len=0),
        ]
        # Again and again over the same few pages, where the bad keys and values were left.
        for _ in range(4):
            found = run(engine, [hit[0], *clean, hit[1], *clean, hit[2]])
            for at in (0, len(clean) + 1, -1):
                reason = found[at][0]["meta_info"]["finish_reason"]
                assert (reason["type"], reason["status_code"]) == ("abort", 500)
                assert "not finite" in reason["message"]
            for part in (found[1 : 1 + len(clean)], found[2 + len(clean) : -1]):
                for samples, other, probe in zip(part, right, clean, strict=True):
                    for index, sample in enumerate(samples):
                        assert_same_result(sample, other[index], probe, index)
        assert_clean(engine)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_head_that_is_not_finite_fails_with_an_error_not_with_numbers(
    tiny: Path, value: float
) -> None:
    """One bad row of the head is in every position's sum: all fail, and the engine lives on."""
    with open_engine(tiny) as engine:
        right = run(engine, PROBES)
        model: Any = engine._assembly.runner._model
        with torch.inference_mode():
            row = model.head.weight[50].clone()
            model.head.weight[50] = value
        assert engine.flush_cache()
        for samples, probe in zip(run(engine, PROBES), PROBES, strict=True):
            for sample in samples:
                reason = sample["meta_info"]["finish_reason"]
                assert (reason["type"], reason["status_code"]) == ("abort", 500), probe
                assert "not finite" in reason["message"]
        with torch.inference_mode():
            model.head.weight[50] = row
        assert engine.flush_cache()
        for samples, other, probe in zip(run(engine, PROBES), right, PROBES, strict=True):
            for index, sample in enumerate(samples):
                assert_same_result(sample, other[index], probe, index)
        assert_clean(engine)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nobody_waits_for_a_dead_core(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    engine = open_engine(tiny)
    core = engine._assembly.core
    waiting = threading.Event()
    turn = core.turn

    def dying(before_wait: Callable[[], None]) -> Any:
        if waiting.is_set():
            raise error("the core dies")
        return turn(before_wait)

    monkeypatch.setattr(core, "turn", dying)
    ended: list[Any] = []
    params = {"max_new_tokens": 30, "n": 2, "ignore_eos": True}

    def wait() -> None:
        for result in engine.generate(input_ids=[1, 2, 3], sampling_params=params, stream=True):
            waiting.set()
            ended.append(result)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a caller hangs"
    last = ended[-1]["meta_info"]["finish_reason"]
    assert (last["type"], last["status_code"]) == ("abort", 500)
    assert "the core dies" in last["message"]
    for call in (
        lambda: engine.generate(input_ids=[1, 2]),
        engine.flush_cache,
        engine.memory_report,
        engine.get_server_info,
    ):
        with pytest.raises(EngineError, match="the core dies; make a new Engine"):
            call()
    engine.shutdown()


def test_shutdown_answers_those_who_wait(tiny: Path) -> None:
    engine = open_engine(tiny)
    stream = engine.generate(
        input_ids=[3, 4, 5], sampling_params={"max_new_tokens": 60, "ignore_eos": True}, stream=True
    )
    next(stream)
    engine.shutdown()
    *_, last = stream
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert "shut down" in last["meta_info"]["finish_reason"]["message"]
    with pytest.raises(EngineError, match="shut down; make a new Engine"):
        engine.generate(input_ids=[1])


def test_a_planning_fault_ends_what_there_was(
    engine: Engine, expected: list[list[Result]], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = engine._assembly.core.scheduler
    with monkeypatch.context() as patch:

        def broken(**_: bool) -> None:
            raise RuntimeError("injected")

        patch.setattr(scheduler, "plan", broken)
        for samples in run(engine, PROBES):
            for sample in samples:
                assert sample["meta_info"]["finish_reason"]["status_code"] == 500
    assert_clean(engine)
    again = run(engine, [AFTER])
    assert_same_result(again[0][0], expected[-1][0], AFTER, 0)


def broken_release(*_: Any, **__: Any) -> None:
    raise RuntimeError("injected behind it")


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("place", ["audit", "plan", "launch", "abort"])
def test_requests_that_can_not_be_ended_in_order_are_dropped(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, place: str, debug: bool
) -> None:
    """The fault is followed by another one while its requests are ended."""
    with open_engine(
        tiny, max_running_requests=3, chunked_prefill_size=8, page_size=2, debug_memory=debug
    ) as engine:
        right = run(engine, [AFTER])
        core = engine._assembly.core
        with monkeypatch.context() as patch:
            owner: Any = {
                "audit": core.leases,
                "plan": core.scheduler,
                "launch": core._runner,
                "abort": core.scheduler,
            }[place]
            patch.setattr(Lease, "release", broken_release)
            working = getattr(owner, place)

            def broken(*args: Any, **named: Any) -> Any:
                if core.scheduler.counts.running:
                    raise RuntimeError("injected")
                return working(*args, **named)

            patch.setattr(owner, place, broken)
            if place == "abort":
                stream = engine.generate(
                    input_ids=[3, 4, 5],
                    sampling_params={"max_new_tokens": 60, "ignore_eos": True},
                    stream=True,
                    rid="x",
                )
                next(stream)
                engine.abort_request("x")
                *_, last = stream
                found = [[last]]
            else:
                found = run(engine, PROBES)
        for samples in found:
            for sample in samples:
                assert sample["meta_info"]["finish_reason"]["type"] == "abort"
        assert_clean(engine)
        assert engine.flush_cache()
        again = run(engine, [AFTER])
        assert_same_result(again[0][0], right[0][0], AFTER, 0)
        assert_clean(engine)
