"""Offline throughput: all requests handed over at once, until the last one has ended.

What is measured: the time from the first submission to the last result, as Python values, after
the engine has started and a short warm-up has run. Every output has the length that was asked for
(the end token is ignored); draws are greedy.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from seawall.benchmarks.workload import Workload
from seawall.offline.engine import Engine
from seawall.offline.window import in_order

# With prompt logprobs, results are larger than what they are made of, so few exist at a time.
_PIECE = 64
_PIECES_AT_A_TIME = 4
_WARM_REQUESTS = 8
_WARM_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobAsk:
    """Which logprobs every request asks for."""

    wanted: bool
    start_len: int
    top_k: int

    def options(self) -> dict[str, Any]:
        """Arguments of `generate`."""
        if not self.wanted:
            return {}
        return {
            "return_logprob": True,
            "logprob_start_len": self.start_len,
            "top_logprobs_num": self.top_k,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineResult:
    """What came of a run."""

    successful: int
    failed: int
    duration: float
    input_tokens: int
    output_tokens: int
    num_logprobs: int
    report: dict[str, Any]

    def summary(self) -> dict[str, object]:
        """As plain data for JSON."""
        plan, measured = self.report["plan"], self.report["measured"]
        total = self.input_tokens + self.output_tokens
        return {
            "successful_requests": self.successful,
            "failed_requests": self.failed,
            "duration_s": self.duration,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "total_tokens": total,
            "logprobs": self.num_logprobs,
            "request_throughput": self.successful / self.duration,
            "input_throughput": self.input_tokens / self.duration,
            "output_throughput": self.output_tokens / self.duration,
            "total_throughput": total / self.duration,
            "budget_bytes": self.report["budget_bytes"],
            "peak_bytes": {
                account: {"planned": planned, "peak": measured[account]["peak"]}
                for account, planned in plan.items()
            },
            "violations": self.report["violations"],
        }


def measure(engine: Engine, work: Workload, ask: LogprobAsk) -> OfflineResult:
    """Run a workload; the engine's cache is emptied first."""
    warm = slice(0, _WARM_REQUESTS)
    engine.generate(
        input_ids=work.prompts[warm],
        sampling_params={"max_new_tokens": _WARM_TOKENS, "ignore_eos": True, "temperature": 0},
    )
    engine.flush_cache()
    start = time.perf_counter()
    counts = [_count(result) for result in _results(engine, work, ask)]
    duration = time.perf_counter() - start
    done = [count for count in counts if count is not None]
    return OfflineResult(
        successful=len(done),
        failed=len(counts) - len(done),
        duration=duration,
        input_tokens=sum(count[0] for count in done),
        output_tokens=sum(count[1] for count in done),
        num_logprobs=sum(count[2] for count in done),
        report=engine.memory_report(),
    )


def _results(engine: Engine, work: Workload, ask: LogprobAsk) -> Iterator[dict[str, Any]]:
    def run(piece: slice) -> list[dict[str, Any]]:
        params = [
            {"max_new_tokens": n, "ignore_eos": True, "temperature": 0.0}
            for n in work.output_lens[piece]
        ]
        found: list[dict[str, Any]] = engine.generate(
            input_ids=work.prompts[piece], sampling_params=params, **ask.options()
        )
        return found

    total = len(work.prompts)
    size = _PIECE if ask.wanted else total
    pieces = [slice(at, at + size) for at in range(0, total, size)]
    for found in in_order(run, pieces, depth=_PIECES_AT_A_TIME):
        yield from found


def _count(result: dict[str, Any]) -> tuple[int, int, int] | None:
    """(prompt tokens, output tokens, logprobs) of a result; None if it was cut short."""
    meta = result["meta_info"]
    if meta["finish_reason"]["type"] == "abort":
        return None
    lists = [meta.get(name, ()) for name in ("input_token_logprobs", "output_token_logprobs")]
    scored = sum(entry[0] is not None for entries in lists for entry in entries)
    return meta["prompt_tokens"], meta["completion_tokens"], scored
