"""Too few pages: every request ends in its result or its own error, and nothing is lost.

Also what an accounting fault does: it is found within the step, named, and service goes on.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from seawall import Engine
from seawall.cache.lease import Lease
from seawall.core.step import StepPlan
from seawall.scheduler.scheduler import Scheduler
from tests.engine.harness import (
    Probe,
    Result,
    assert_same,
    assert_same_result,
    open_engine,
    prompt,
    run,
    run_alone,
)
from tests.models.checkpoints import SIZES, random_model, save

_TOP = 12
_MAX_RUNNING = 12


@pytest.fixture(scope="session")
def soak_factor(soak: bool) -> int:
    return 34 if soak else 1


def make_probes(count: int, vocab: int) -> list[Probe]:
    """Requests of all kinds; many begin alike."""
    rng = random.Random(7)
    stems = [[rng.randrange(3, vocab) for _ in range(80)] for _ in range(6)]
    probes = []
    for at in range(count):
        ids = [*rng.choice(stems)[: rng.randint(0, 60)], rng.randrange(3, vocab)]
        params: dict[str, Any] = {
            "max_new_tokens": rng.randint(4, 48),
            # Short answers teach admission to expect little; the others then ask for more.
            "stop_token_ids": list(range(3, 2000)) if rng.random() < 0.4 else [],
            "n": rng.choice([1, 1, 1, 1, 2, 3]),
        }
        if rng.random() < 0.5:
            params["temperature"] = 0
        else:
            # Whoever is drawn is among the ids whose logprobs are asked for.
            params |= {"temperature": 0.8, "top_k": _TOP, "sampling_seed": at}
        probes.append(Probe(ids=tuple(ids), params=params, start_len=rng.choice([-1, -1, 0, 5])))
    return [
        Probe(ids=p.ids, params=p.params, start_len=min(p.start_len, len(p.ids))) for p in probes
    ]


class Observer:
    """Counts computed tokens on the core thread, and aborts requests at chosen outputs."""

    def __init__(self, engine: Engine, aborts: dict[str, int]) -> None:
        core = engine._assembly.core
        self.scheduler: Scheduler = core.scheduler
        self.computed = 0
        self._aborts = dict(aborts)
        runner: Any = core._runner
        self._launch: Callable[[StepPlan], Any] = runner.launch
        runner.launch = self._note

    def _note(self, plan: StepPlan) -> Any:
        self.computed += plan.num_tokens
        for request in list(self.scheduler._running):
            if request.num_output >= self._aborts.get(request.rid, 1 << 30):
                del self._aborts[request.rid]
                self.scheduler.abort(request.rid)
        return self._launch(plan)


def generate(engine: Engine, probes: list[Probe], priorities: list[int]) -> list[list[Result]]:
    flat = engine.generate(
        input_ids=[list(probe.ids) for probe in probes],
        sampling_params=[probe.params for probe in probes],
        rid=[f"r{at}" for at in range(len(probes))],
        return_logprob=True,
        logprob_start_len=[probe.start_len for probe in probes],
        top_logprobs_num=_TOP,
        logprobs_mode="raw",
        priority=priorities,
    )
    found, start = [], 0
    for probe in probes:
        found.append(flat[start : start + probe.num_samples])
        start += probe.num_samples
    assert start == len(flat)
    return found


def open_demo(max_total_tokens: int, **changes: Any) -> Engine:
    return open_engine(
        "demo",
        memory_budget="256MiB",
        logits_workspace="8MiB",
        page_size=8,
        max_running_requests=_MAX_RUNNING,
        chunked_prefill_size=64,
        max_total_tokens=max_total_tokens,
        schedule_policy="priority",
        schedule_conservativeness=0.05,
        **changes,
    )


def test_a_pool_three_times_too_small(soak_factor: int) -> None:
    rng = random.Random(3)
    probes = make_probes(150 * soak_factor, 500)
    priorities = [rng.randrange(3) for _ in probes]
    lengths = [len(p.ids) + p.params["max_new_tokens"] for p in probes]
    wanted = _MAX_RUNNING * sum(lengths) // len(lengths)
    aborts = {
        f"r{at}": rng.randint(0, probe.params["max_new_tokens"])
        for at, probe in enumerate(probes)
        if rng.random() < 0.3
    }
    with open_demo(4 * wanted) as engine:
        roomy = Observer(engine, {})
        expected = generate(engine, probes, priorities)
        assert roomy.scheduler.counts.retractions == 0
    with open_demo(max(wanted // 3, max(lengths))) as engine:
        pressed = Observer(engine, aborts)
        found = generate(engine, probes, priorities)
        num_aborted = check_results(found, expected, probes, aborts)
        assert 0.1 * len(probes) < num_aborted < 0.6 * len(probes)
        assert pressed.scheduler.counts.retractions >= 3
        # Throughput does not collapse: most of what is computed is computed once.
        assert roomy.computed >= 0.6 * pressed.computed
        assert_nothing_leaked(engine)


def check_results(
    found: list[list[Result]],
    expected: list[list[Result]],
    probes: list[Probe],
    aborts: dict[str, int],
) -> int:
    """Each sample has its result, or was aborted and had been asked to; returns how many."""
    num_aborted = 0
    for at, (ours, theirs, probe) in enumerate(zip(found, expected, probes, strict=True)):
        reasons = [sample["meta_info"]["finish_reason"] for sample in ours]
        if any(reason["type"] == "abort" for reason in reasons):
            num_aborted += 1
            assert f"r{at}" in aborts
            assert {r["status_code"] for r in reasons if r["type"] == "abort"} == {499}
            continue
        for index, (sample, right) in enumerate(zip(ours, theirs, strict=True)):
            assert_same_result(sample, right, probe, index)
    return num_aborted


def assert_nothing_leaked(engine: Engine) -> None:
    report = engine.memory_report()
    pages = report["pages"]
    assert report["violations"] == []
    assert (pages["in_use"], pages["quarantined"]) == (0, 0)
    assert pages["free"] + pages["cached"] == pages["total"]
    assert report["requests"] == {}
    assert engine.flush_cache()
    assert engine.memory_report()["pages"]["free"] == pages["total"]


# -- windows -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model whose layers see 8 positions, over a context of 64."""
    config = transformers.MistralConfig(**SIZES, sliding_window=8)
    return save(random_model(config), tmp_path_factory.mktemp("windowed"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"disable_radix_cache": True},
        {"page_size": 1, "schedule_conservativeness": 0.05, "max_total_tokens": 96},
        {"chunked_prefill_size": 5, "disable_overlap_schedule": True},
    ],
)
def test_windows_change_nothing_but_the_pages(windowed: Path, changes: dict[str, Any]) -> None:
    rng = random.Random(5)
    probes = [
        Probe(
            ids=prompt(rng.randint(1, 44), rng.randint(1, 4)),
            params={
                "temperature": rng.choice([0, 0.8]),
                "sampling_seed": at,
                "max_new_tokens": rng.randint(1, 16),
                "n": rng.choice([1, 1, 3]),
            },
            start_len=rng.choice([-1, 0]),
        )
        for at in range(24)
    ]
    with open_engine(windowed, disable_overlap_schedule=True) as engine:
        expected = run_alone(engine, probes)
    with open_engine(windowed, debug_memory=True, **changes) as engine:
        most = engine.memory_report()["window_pages"]["total"]
        assert 0 < most <= engine.memory_report()["pages"]["total"]
        for _ in range(2):  # the second time with what the first has left in the cache
            assert_same(run(engine, probes), expected, probes)
        report = engine.memory_report()
        assert report["violations"] == []
        assert report["window_pages"]["in_use"] == report["pages"]["in_use"] == 0
        assert engine.flush_cache()
        assert engine.memory_report()["window_pages"]["free"] == most


@pytest.mark.parametrize(("policy", "found"), [("lru", 0), ("lfu", 32), ("priority", 32)])
def test_windows_go_in_the_order_of_the_policy(windowed: Path, policy: str, found: int) -> None:
    """A prompt used often and stored with a priority, and many others after it."""
    wanted = {"input_ids": list(prompt(33, 3)), "sampling_params": {"max_new_tokens": 1}}
    with open_engine(
        windowed,
        page_size=4,
        max_total_tokens=256,
        max_running_requests=2,
        context_length=64,
        chunked_prefill_size=8,
        radix_eviction_policy=policy,
    ) as engine:
        for _ in range(4):
            engine.generate(**wanted, priority=10)
        rng = random.Random(1)
        for _ in range(25):
            other = [rng.randrange(3, 97) for _ in range(20)]
            engine.generate(input_ids=other, sampling_params={"max_new_tokens": 1}, priority=0)
        result = engine.generate(**wanted, priority=10)
        assert result["meta_info"]["cached_tokens"] == found


# -- faults of the accounting ----------------------------------------------------------------

PROBES = [
    Probe(
        ids=prompt(9 + 3 * at, at + 1),
        params={"temperature": 0, "max_new_tokens": 18, "ignore_eos": True},
    )
    for at in range(5)
]
VICTIM = "r2"


def forget_a_page(scheduler: Scheduler, lease: Lease) -> None:
    """The lease loses sight of its last page: leaked."""
    lease.num_pages -= 1
    lease._pages[lease.num_pages] = -1
    # What it wrote there is gone for it, so it must not go on as if nothing had happened.
    scheduler.end_untrusted(lease.rid, "planted")


def free_a_page(scheduler: Scheduler, lease: Lease) -> None:
    """Somebody frees a page that the lease still uses: lost."""
    scheduler._leases.ledger.free(lease.page_ids[-1:].copy(), lease.owner)


def steal_a_page(scheduler: Scheduler, lease: Lease) -> None:
    """A page is booked to somebody else: lost."""
    ledger = scheduler._leases.ledger
    ledger.transfer(lease.page_ids[-1:].copy(), lease.owner, ledger.new_owner("thief"))


class Planter:
    """Plants one fault while the victim runs, and looks whether that very turn finds it."""

    def __init__(self, engine: Engine, plant: Callable[[Scheduler, Lease], None]) -> None:
        self._core: Any = engine._assembly.core
        self._plant = plant
        self._launch, self._turn = self._core._runner.launch, self._core.turn
        self.planted = False
        self.found_in_the_turn = False
        self._core._runner.launch = self.launch
        self._core.turn = self.turn

    def launch(self, plan: StepPlan) -> Any:
        flight = self._launch(plan)
        scheduler = self._core.scheduler
        for request in [r for r in scheduler._running if r.rid == VICTIM and r.num_output > 4]:
            if not self.planted:
                self.planted = True
                self._plant(scheduler, scheduler._seats.lease(request))
        return flight

    def turn(self, *args: Any) -> Any:
        before = self.planted
        answers = self._turn(*args)
        if self.planted and not before:
            self.found_in_the_turn = self._core.leases.ledger.num_violations > 0
        return answers


@pytest.mark.parametrize("plant", [forget_a_page, free_a_page, steal_a_page])
def test_a_planted_fault_is_found_named_and_survived(
    tiny: Path, plant: Callable[[Scheduler, Lease], None]
) -> None:
    with open_engine(tiny) as engine:
        right = run_alone(engine, PROBES)
        assert engine.flush_cache()
        planter = Planter(engine, plant)
        flat = engine.generate(
            input_ids=[list(probe.ids) for probe in PROBES],
            sampling_params=[probe.params for probe in PROBES],
            rid=[f"r{at}" for at in range(len(PROBES))],
            return_logprob=True,
            logprob_start_len=-1,
            top_logprobs_num=97,
        )
        assert planter.planted
        assert planter.found_in_the_turn
        for at, (sample, expected) in enumerate(zip(flat, right, strict=True)):
            reason = sample["meta_info"]["finish_reason"]
            if f"r{at}" == VICTIM:
                assert (reason["type"], reason["status_code"]) == ("abort", 500)
            else:
                assert_same_result(sample, expected[0], PROBES[at], 0)
        report = engine.memory_report()
        assert any(f"{VICTIM}#0" in violation for violation in report["violations"])
        pages = report["pages"]
        assert pages["quarantined"] + pages["in_use"] == 1  # the page, wherever it ended
        assert (
            sum(pages[kind] for kind in ("free", "cached", "in_use", "quarantined"))
            == (pages["total"])
        )
        # Service goes on.
        again = run(engine, PROBES)
        for at, samples in enumerate(again):
            assert_same_result(samples[0], right[at][0], PROBES[at], 0)


def test_pages_of_a_running_request_are_listed_by_id(tiny: Path) -> None:
    with open_engine(tiny, debug_memory=True) as engine:
        stream = engine.generate(
            input_ids=list(PROBES[0].ids),
            sampling_params={"temperature": 0, "max_new_tokens": 30, "ignore_eos": True},
            rid="me",
            stream=True,
        )
        next(stream)
        listed = engine.memory_report()["requests"]
        assert list(listed) == ["me#0"]
        pages = np.array(listed["me#0"]["shared"] + listed["me#0"]["own"])
        assert len(set(pages.tolist())) == len(pages) >= 3
        assert len(list(stream)) > 0
        assert engine.memory_report()["requests"] == {}


def test_cache_figures_are_reported(tiny: Path) -> None:
    with open_engine(tiny, radix_eviction_policy="lfu") as engine:
        run(engine, PROBES[:1])
        run(engine, PROBES[:1])
        figures = engine.memory_report()["cache"]
        assert figures["hit_tokens"] > 0
        assert figures["evictable_pages"] == engine.memory_report()["pages"]["cached"] > 0
        assert figures["protected_pages"] == figures["evicted_pages"] == 0
        info = engine.get_server_info()
        assert info["internal_states"][0]["cache"]["hit_tokens"] == figures["hit_tokens"]
        assert info["radix_eviction_policy"] == "lfu"
