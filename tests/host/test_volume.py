"""Many random operations over ledgers, trees, leases and scheduler, of any shape, in any order.

Hypothesis finds short sequences (test_lease, test_scheduler); this looks for what needs long ones.
"""

import logging
from collections.abc import Iterator

import pytest

from tests.host import cache_machine, scheduler_machine
from tests.host.cache_machine import soak_factor

CACHE_OPERATIONS = 180_000
SCHEDULER_OPERATIONS = 24_000
_BATCHES = 8
_CACHE_RUN = 500
_SCHEDULER_RUN = 200


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Steps fail by the hundred here; their tracebacks are not news."""
    logger = logging.getLogger("seawall")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(level)


def test_the_volume_is_what_is_promised() -> None:
    assert CACHE_OPERATIONS + SCHEDULER_OPERATIONS >= 200_000
    for operations, run in ((CACHE_OPERATIONS, _CACHE_RUN), (SCHEDULER_OPERATIONS, _SCHEDULER_RUN)):
        assert operations % (_BATCHES * run) == 0


@pytest.mark.parametrize("batch", range(_BATCHES))
def test_caches(batch: int) -> None:
    runs = CACHE_OPERATIONS // _BATCHES // _CACHE_RUN * soak_factor()
    machines = [cache_machine.run_random(batch * 100_000 + i, _CACHE_RUN) for i in range(runs)]
    checked = sum(machine.num_operations for machine in machines)
    assert checked >= CACHE_OPERATIONS // _BATCHES
    # Else the runs have met nothing worth checking.
    assert sum(machine.tree.stats().evicted_pages for machine in machines) > checked / 50
    assert sum(machine.tree.stats().hit_tokens for machine in machines) > checked / 50
    assert any(machine.num_window_evictions for machine in machines)


@pytest.mark.parametrize("batch", range(_BATCHES))
def test_scheduler(batch: int) -> None:
    runs = SCHEDULER_OPERATIONS // _BATCHES // _SCHEDULER_RUN * soak_factor()
    machines = [
        scheduler_machine.run_random(batch * 100_000 + i, _SCHEDULER_RUN) for i in range(runs)
    ]
    assert sum(machine.num_operations for machine in machines) >= SCHEDULER_OPERATIONS // _BATCHES
    assert sum(machine.scheduler.counts.retractions for machine in machines) > 0
