"""Holding requests back while earlier ones run to their end, as an update of weights does."""

import random

import pytest

from tests.host.scheduler_machine import STEM, SchedulerMachine, Setup, random_sample

SMALL = Setup(page_size=4, num_pages=14, conservativeness=0.3, max_running=3)


@pytest.mark.parametrize("setup", [SMALL, Setup(page_size=2, num_pages=80, policy="priority")])
@pytest.mark.parametrize("seed", range(6))
def test_earlier_ones_end_and_later_ones_do_not_begin(setup: Setup, seed: int) -> None:
    rng = random.Random(seed)
    machine = SchedulerMachine(setup)
    for _ in range(6):
        random_sample(machine, rng)
    for _ in range(rng.randrange(4)):
        machine.turn()
    earlier = machine.open
    machine.scheduler.hold()
    later = []
    for _ in range(4):
        later += random_sample(machine, rng)
    turns = 0
    while not machine.core.settle():
        machine.turn()
        machine.check()
        turns += 1
        assert turns < 2000
    assert all(sample.finish is not None for sample in earlier)
    waiting = [sample for sample in later if sample.finish is None]
    assert waiting
    assert not any(sample.tokens or sample.prompt_scores for sample in waiting)
    assert machine.scheduler.counts.running == 0
    assert machine.core._in_flight is None
    # What was cached of the earlier ones can go, and the held ones can be aborted.
    assert machine.leases.cache.reset()
    machine.abort(waiting[0].message.rid)
    machine.scheduler.let_go()
    machine.close()


def test_an_idle_core_is_settled_at_once() -> None:
    machine = SchedulerMachine(SMALL)
    assert machine.core.settle()
    [sample] = machine.add(STEM[:9])
    assert not machine.core.settle()
    machine.drain()
    assert sample.finish is not None
    assert machine.core.settle()


def test_a_core_that_refuses_answers_and_queues_nothing() -> None:
    machine = SchedulerMachine(SMALL)
    machine.core.refuse("engine: the memory of kv_cache is released")
    assert machine.core.refusal is not None
    [sample] = machine.add(STEM[:9])
    assert (sample.finish, sample.status) == ("abort", 503)
    assert not machine.core.has_work
    machine.core.refuse(None)
    [sample] = machine.add(STEM[:9])
    machine.drain()
    assert sample.finish != "abort"


def test_messages_carry_the_version_of_the_weights() -> None:
    machine = SchedulerMachine(SMALL)
    seen = []
    for version in ("default", "step 2"):
        machine.scheduler.outbox.weight_version = version
        machine.add(STEM[:9])
        while machine.core.has_work:
            seen += [(version, answer.weight_version) for answer in machine.core.turn()]  # type: ignore[union-attr]
    assert len(seen) > 2
    assert all(expected == found for expected, found in seen)
