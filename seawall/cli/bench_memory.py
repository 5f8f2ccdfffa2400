"""`seawall bench memory`: reads arguments, measures, prints tables and one JSON line."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from seawall.benchmarks.memory import SHAPES, growth, sweep, table, tree_rates
from seawall.cli.command import DONE, FAILED, UsageError


def run(arguments: argparse.Namespace) -> int:
    """Peaks against the plan, growth, and the speed of the tree."""
    if arguments.prompt_tokens > arguments.cached_tokens:
        raise UsageError(
            f"--prompt-tokens: got {arguments.prompt_tokens}, more than --cached-tokens "
            f"{arguments.cached_tokens}; lower it"
        )
    if 0 in arguments.page_sizes or max(arguments.page_sizes) > arguments.prompt_tokens:
        raise UsageError(
            f"--page-sizes: got {arguments.page_sizes}, each must be in "
            f"[1, {arguments.prompt_tokens}], the length of a prompt"
        )
    args: dict[str, Any] = {
        "model_path": arguments.model_path,
        "memory_budget": arguments.memory_budget,
        "logits_workspace": "8MiB",
        "skip_tokenizer_init": True,
        "random_seed": 1,
        "debug_memory": True,
    }
    rates = tree_rates(
        arguments.page_sizes,
        cached_tokens=arguments.cached_tokens,
        prompt_tokens=arguments.prompt_tokens,
    )
    summary: dict[str, Any] = {
        "benchmark": "memory",
        "model_path": arguments.model_path,
        "tree": [asdict(rate) for rate in rates],
        "peaks": sweep(args, SHAPES, arguments.num_requests),
        "growth": growth(args, rounds=arguments.rounds, num_requests=arguments.num_requests),
    }
    sys.stdout.write(table(summary))
    line = json.dumps(summary, allow_nan=False)
    if arguments.json is not None:
        Path(arguments.json).write_text(line + "\n", encoding="utf-8")
    sys.stdout.write(line + "\n")
    wrong = [*summary["peaks"]["violations"], *summary["growth"]["violations"]]
    return FAILED if wrong or summary["growth"]["pages_lost"] else DONE
