"""For every suite: hypothesis profiles, the soak switch, GPU tests by request, time by suite.

SEAWALL_SOAK=1   full counts (`make soak`)
SEAWALL_GPU=1    collect tests/gpu too; without it that folder is not looked at

tests/eval is collected where lm-eval is installed (extra `eval`).
"""

import importlib.util
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parent
SOAK = os.environ.get("SEAWALL_SOAK") == "1"
GPU = os.environ.get("SEAWALL_GPU") == "1"
EVAL = importlib.util.find_spec("lm_eval") is not None
SUITE_TIMES = pytest.StashKey[Counter[str]]()
SUITE_COUNTS = pytest.StashKey[Counter[str]]()

# No deadlines: a busy machine is not a failing test. Same examples each run unless soaking.
settings.register_profile("quick", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("soak", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("soak" if SOAK else "quick")


@pytest.fixture(scope="session")
def soak() -> bool:
    """Whether to run at full counts."""
    return SOAK


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    # Decided before the files are imported: they may need libraries that are not there.
    left_out = {TESTS / "gpu": not GPU, TESTS / "eval": not EVAL}
    return left_out.get(collection_path) or None


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SUITE_TIMES] = Counter()
    config.stash[SUITE_COUNTS] = Counter()


class SuiteClock:
    """Adds up set-up, call and tear-down of each test, by the folder under tests/."""

    def __init__(self, times: Counter[str], counts: Counter[str]) -> None:
        self._times = times
        self._counts = counts

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        suite = _suite(report.nodeid)
        # Milliseconds, as Counter adds whole numbers exactly.
        self._times[suite] += round(report.duration * 1000)
        self._counts[suite] += report.when == "call"


def pytest_sessionstart(session: pytest.Session) -> None:
    clock = SuiteClock(session.config.stash[SUITE_TIMES], session.config.stash[SUITE_COUNTS])
    session.config.pluginmanager.register(clock, "suite-clock")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    times, counts = config.stash[SUITE_TIMES], config.stash[SUITE_COUNTS]
    if not times:
        return
    terminalreporter.section("time by suite" + (" (soak)" if SOAK else ""))
    for suite, milliseconds in sorted(times.items()):
        seconds = milliseconds / 1000
        terminalreporter.write_line(f"{suite:12} {seconds:8.1f} s {counts[suite]:6} tests")
    if (TESTS / "gpu").is_dir() and not GPU:
        terminalreporter.write_line("gpu          left out: set SEAWALL_GPU=1 where there is CUDA")
    if not EVAL:
        terminalreporter.write_line("eval         left out: lm-eval is not installed (extra eval)")


def _suite(nodeid: str) -> str:
    parts = Path(nodeid.partition("::")[0]).parts
    inside = parts[parts.index("tests") + 1 :] if "tests" in parts else parts
    return inside[0] if len(inside) > 1 else "(top)"
