"""`seawall bench`: reads arguments, hands over to a benchmark, prints tables and one JSON line."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seawall.benchmarks.compare_cpu import Plan, compare, table
from seawall.benchmarks.offline import LogprobAsk, measure
from seawall.benchmarks.workload import random_workload, ratio_range
from seawall.cli.command import DONE, FAILED, UsageError
from seawall.cli.engine_flags import engine_args
from seawall.core.config import EngineConfig
from seawall.core.units import human_bytes
from seawall.engine.devices import choose_device
from seawall.engine.planning import make_plan
from seawall.offline.engine import Engine


def run_offline(arguments: argparse.Namespace) -> int:
    """Throughput of an offline engine on random prompts."""
    ratio = arguments.random_range_ratio
    if not 0 <= ratio <= 1:
        raise UsageError(f"--random-range-ratio: got {ratio}, the range is [0, 1]")
    args = engine_args(arguments)
    if args.get("load_format") == "dummy":
        # Random weights write no text, and their folder need not have a tokenizer.
        args["skip_tokenizer_init"] = True
    device = choose_device(args)
    config = EngineConfig.from_args(args, device.name)
    plan = make_plan(config, device_memory=device.memory_bytes)
    work = random_workload(
        num_requests=arguments.num_prompts,
        input_range=ratio_range(arguments.random_input_len, ratio, least=1),
        output_range=ratio_range(arguments.random_output_len, ratio, least=1),
        vocab_size=plan.spec.vocab_size,
        seed=arguments.seed,
    )
    ask = LogprobAsk(
        wanted=arguments.return_logprob,
        start_len=arguments.logprob_start_len,
        top_k=arguments.top_logprobs_num,
    )
    with Engine(**args) as engine:
        result = measure(engine, work, ask)
    summary = {"benchmark": "offline", "model_path": config.model.model_path, **result.summary()}
    sys.stdout.write(_offline_table(summary))
    _write_json(summary, arguments.json)
    return FAILED if result.failed or summary["violations"] else DONE


def _offline_table(summary: Mapping[str, Any]) -> str:
    rows = [
        ("successful requests", f"{summary['successful_requests']:,}"),
        ("duration", f"{summary['duration_s']:.2f} s"),
        ("input tokens", f"{summary['input_tokens']:,}"),
        ("generated tokens", f"{summary['output_tokens']:,}"),
        ("total tokens", f"{summary['total_tokens']:,}"),
        ("logprobs returned", f"{summary['logprobs']:,}"),
        ("request throughput", f"{summary['request_throughput']:,.2f} requests/s"),
        ("input throughput", f"{summary['input_throughput']:,.1f} tokens/s"),
        ("output throughput", f"{summary['output_throughput']:,.1f} tokens/s"),
        ("total throughput", f"{summary['total_throughput']:,.1f} tokens/s"),
    ]
    lines = [f"{name:<22}{value:>24}" for name, value in rows]
    lines.append(f"\n{'peak memory':<16}{'planned':>14}{'peak':>14}")
    lines += [
        f"{account:<16}{human_bytes(line['planned']):>14}{human_bytes(line['peak']):>14}"
        for account, line in summary["peak_bytes"].items()
        if line["planned"]
    ]
    lines.append(f"{'budget':<16}{human_bytes(summary['budget_bytes']):>14}")
    return "\n".join(lines) + "\n"


def run_compare(arguments: argparse.Namespace) -> int:
    """Side by side with transformers."""
    plan = Plan(
        models=tuple(arguments.models.split(",")),
        systems=tuple(arguments.systems.split(",")),
        num_requests=arguments.num_requests,
        num_requests_dummy=arguments.num_requests_dummy,
        threads=arguments.threads,
        seed=arguments.seed,
    )
    summary = compare(plan)
    sys.stdout.write(table(summary))
    _write_json(summary, arguments.json)
    return FAILED if any("error" in run for run in summary["runs"]) else DONE


def _write_json(summary: Mapping[str, Any], path: str | None) -> None:
    line = json.dumps(summary, allow_nan=False)
    if path is not None:
        Path(path).write_text(line + "\n", encoding="utf-8")
    sys.stdout.write(line + "\n")
