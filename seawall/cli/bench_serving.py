"""`seawall bench serving`: reads arguments, runs the benchmark, prints a table and a JSON line."""

import argparse
import json
import sys
from pathlib import Path

from seawall.benchmarks.serving import Goals, Target, measure, table
from seawall.benchmarks.workload import random_workload, ratio_range
from seawall.cli.command import DONE, FAILED, UsageError


def run(arguments: argparse.Namespace) -> int:
    """Measure a running server."""
    if not arguments.request_rate > 0:
        raise UsageError(f"--request-rate: got {arguments.request_rate}, give a rate above 0")
    ratio = arguments.random_range_ratio
    if not 0 <= ratio <= 1:
        raise UsageError(f"--random-range-ratio: got {ratio}, the range is [0, 1]")
    work = random_workload(
        num_requests=arguments.num_prompts,
        input_range=ratio_range(arguments.random_input_len, ratio, least=1),
        output_range=ratio_range(arguments.random_output_len, ratio, least=1),
        vocab_size=arguments.vocab_size,
        seed=arguments.seed,
    )
    result = measure(
        Target.from_url(arguments.base_url, arguments.api_key),
        work,
        rate=arguments.request_rate,
        seed=arguments.seed,
        goals=Goals(
            ttft=arguments.goodput_ttft, itl=arguments.goodput_itl, e2e=arguments.goodput_e2e
        ),
    )
    summary = {"benchmark": "serving", **result.summary()}
    sys.stdout.write(table(summary))
    # JSON has no infinity.
    rate = None if arguments.request_rate == float("inf") else arguments.request_rate
    line = json.dumps({**summary, "request_rate": rate}, allow_nan=False)
    sys.stdout.write(line + "\n")
    if arguments.json is not None:
        Path(arguments.json).write_text(line + "\n", encoding="utf-8")
    return FAILED if summary["failed_requests"] else DONE
