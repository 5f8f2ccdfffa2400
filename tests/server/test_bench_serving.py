"""The load generator against the real server, and its arithmetic by hand."""

import json
import subprocess
import sys

import pytest

from seawall.benchmarks.serving import Goals, ServingResult, Target, Timing, arrivals, percentiles
from seawall.benchmarks.workload import Workload
from seawall.core.errors import ConfigError
from tests.server.harness import REPO, ServerProcess

FLAGS = ["--num-prompts=6", "--random-input-len=12", "--random-output-len=9"]


def bench(*flags: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "seawall.cli.main", "bench", "serving", *FLAGS, *flags],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_every_request_is_answered_in_full(server: ServerProcess) -> None:
    done = bench(f"--base-url={server.url}", "--request-rate=50", "--random-range-ratio=1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["successful_requests"] == 6
    assert found["input_tokens"] == 6 * 12
    assert found["output_tokens"] == 6 * 9
    assert found["goodput"] == found["request_throughput"]
    assert 0 < found["ttft_ms"]["p50"] <= found["e2e_ms"]["p50"]
    assert "output throughput" in done.stdout


def test_goals_and_failures_count(server: ServerProcess) -> None:
    done = bench(f"--base-url={server.url}", "--goodput-e2e=0.000001")
    assert json.loads(done.stdout.splitlines()[-1])["goodput"] == 0
    done = bench(f"--base-url={server.url}", "--random-output-len=5000")
    assert done.returncode == 1
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failed_requests"] == 6
    assert "max_new_tokens" in found["errors"][0]


def test_summary_by_hand() -> None:
    timings = [
        Timing(ttft=0.1, e2e=0.5, num_tokens=3, gaps=[0.2, 0.2]),
        Timing(ttft=0.3, e2e=0.4, num_tokens=2, gaps=[0.1]),
        Timing(error="status 503"),
    ]
    work = Workload(prompts=[[1], [1, 2], [1]], output_lens=[3, 2, 2])
    result = ServingResult(
        timings=timings, duration=2.0, work=work, rate=1.0, goals=Goals(ttft=0.2, itl=0.3)
    )
    found = result.summary()
    assert found["successful_requests"] == 2
    assert found["failed_requests"] == 1
    assert found["output_throughput"] == 2.5
    assert found["goodput"] == 0.5
    assert found["ttft_ms"] == pytest.approx({"mean": 200, "p50": 200, "p90": 280, "p99": 298})
    assert found["errors"] == ["status 503"]
    assert percentiles([]) == {}


def test_arrivals_follow_the_rate() -> None:
    assert arrivals(3, float("inf"), 1) == [0.0, 0.0, 0.0]
    times = arrivals(4000, 10.0, 1)
    assert times[0] == 0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(400, rel=0.1)
    assert times == arrivals(4000, 10.0, 1)


@pytest.mark.parametrize("url", ["localhost:30000", "https://a", "http://", "http://a:b"])
def test_addresses(url: str) -> None:
    with pytest.raises(ConfigError):
        Target.from_url(url, None)
    assert Target.from_url("http://a", None) == Target(host="a", port=80)
