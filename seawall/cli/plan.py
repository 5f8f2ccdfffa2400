"""`seawall plan`: the memory plan from config.json alone. Loads no weights and no torch."""

import argparse
import json
import sys

from seawall.cli.command import DONE
from seawall.cli.engine_flags import engine_args
from seawall.core.config import EngineConfig
from seawall.core.units import human_bytes
from seawall.engine.planning import EnginePlan, make_plan


def run(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    config = EngineConfig.from_args(engine_args(arguments))
    plan = make_plan(config, device_memory=arguments.device_memory)
    text = json.dumps(_as_json(plan), indent=2) if arguments.json else _as_text(plan)
    sys.stdout.write(text + "\n")
    return DONE


def _as_text(plan: EnginePlan) -> str:
    spec, limits, memory = plan.spec, plan.limits, plan.memory
    longest = min(limits.context_length, plan.max_total_tokens)
    return "\n".join(
        (
            f"{spec.architecture}, {plan.dtype}, KV {plan.kv_dtype}; nothing was loaded",
            "",
            "device",
            memory.table(),
            "",
            "host",
            plan.host.table(),
            "",
            f"longest request     {longest:,} tokens",
            f"requests at a time  {limits.max_running:,}, "
            f"{min(limits.max_running, memory.num_at_once(longest)):,} of them at full length",
            f"tokens in a step    {limits.step_tokens:,}",
            f"KV bytes a token    {_per_token(memory.page_bytes, memory.page_size)}",
            *_window_lines(plan),
        )
    )


def _per_token(page_bytes: int, page_size: int) -> str:
    return f"{page_bytes // page_size:,} ({human_bytes(page_bytes // page_size)})"


def _window_lines(plan: EnginePlan) -> tuple[str, ...]:
    """What layers with a window add; nothing if there are none."""
    spec, memory = plan.spec, plan.memory
    if spec.window is None:
        return ()
    per_token = _per_token(memory.window_page_bytes, memory.page_size)
    return (
        f"in the window       {per_token} more, for the newest {spec.window:,} tokens",
        f"layers              {spec.num_full_layers} see everything, {spec.num_window_layers} a "
        f"window; a request holds {memory.window_pages_per_seq} window pages at most",
    )


def _as_json(plan: EnginePlan) -> dict[str, object]:
    spec, limits, memory = plan.spec, plan.limits, plan.memory
    return {
        "architecture": spec.architecture,
        "dtype": plan.dtype,
        "kv_dtype": plan.kv_dtype,
        "context_length": limits.context_length,
        "max_running_requests": limits.max_running,
        "step_tokens": limits.step_tokens,
        "page_size": memory.page_size,
        "page_bytes": memory.page_bytes,
        "num_pages": memory.num_pages,
        "window": spec.window,
        "window_page_bytes": memory.window_page_bytes,
        "num_window_pages": memory.num_window_pages,
        "max_total_tokens": plan.max_total_tokens,
        "max_top_logprobs": plan.max_top_k,
        "device": {
            "budget_bytes": memory.budget_bytes,
            "plan": dict(memory.lines),
            "unplanned_bytes": memory.unplanned_bytes,
        },
        "host": {
            "budget_bytes": plan.host.budget_bytes,
            "plan": dict(plan.host.lines),
            "unplanned_bytes": plan.host.unplanned_bytes,
        },
    }
