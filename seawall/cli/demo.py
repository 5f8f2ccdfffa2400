"""`seawall demo`: what the engine is for, on one screen.

Plans, scores, predicts, writes a story, and closes the books: what every line of the plan was
given, what it took, and that all pages are back. Fails if they are not.
"""

import argparse
import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from seawall.cli.command import DONE, FAILED
from seawall.core.units import human_bytes
from seawall.offline.engine import Engine
from seawall.offline.score import ScoreResult

Report = dict[str, Any]
_WIDTH = 78
_INDENT = "   "
_SENTENCE = "The old king called his three sons and gave them each a horse."
_SHUFFLED = "Gave horse the each sons king old his them three a and called."
_QUESTION = "Once upon a time there was a"
_STORY = "Once upon a time there was a little fox who lived in the forest."
_STORY_TOKENS = 110
_STORY_PARAMS = {"max_new_tokens": _STORY_TOKENS, "temperature": 0.7, "top_p": 0.9}


def run(arguments: argparse.Namespace) -> int:
    """Show it."""
    start = time.perf_counter()
    with Engine(
        memory_budget=arguments.memory_budget,
        context_length=512,
        max_running_requests=16,
        chunked_prefill_size=256,
        logits_workspace=16 << 20,
        random_seed=arguments.seed,
    ) as engine:
        started = time.perf_counter() - start
        _say("Seawall demo: a story model of 5.9M parameters, inside the package")
        _plan(engine.memory_report(), engine.get_server_info(), started)
        _scores(engine)
        _next_tokens(engine)
        _story(engine, arguments.seed)
        balanced = _balance(engine.memory_report())
    _say("")
    _say("Next: seawall generate demo 'The fox said'   seawall plan demo   seawall doctor")
    return DONE if balanced else FAILED


def _plan(report: Report, info: Mapping[str, Any], started: float) -> None:
    _head("1. The plan, made before anything is allocated")
    budget = report["budget_bytes"]
    for account, planned in _lines(report).items():
        _say(f"{_INDENT}{account:<14}{human_bytes(planned):>12}{planned / budget:>8.1%}")
    _say(f"{_INDENT}{'budget':<14}{human_bytes(budget):>12}")
    _say(
        f"{_INDENT}{report['pages']['total']:,} pages hold {info['max_total_num_tokens']:,} "
        f"tokens; the engine started in {started:.2f} s"
    )


def _scores(engine: Engine) -> None:
    _head("2. Scores: logprob a token, as written and with the words shuffled")
    texts = (_SENTENCE, _SHUFFLED)
    for text, result in zip(texts, engine.score(list(texts), reduce="mean"), strict=True):
        assert isinstance(result, ScoreResult)
        _say(f"{_INDENT}{result.value:7.3f}  {text}")


def _next_tokens(engine: Engine) -> None:
    result = engine.generate(
        _QUESTION,
        {"max_new_tokens": 1, "temperature": 0},
        return_logprob=True,
        top_logprobs_num=4,
        return_text_in_logprobs=True,
        logprobs_mode="raw",
    )
    best = result["meta_info"]["output_top_logprobs"][0]
    _head(f"3. What comes after '{_QUESTION}'")
    _say(_INDENT + "   ".join(f"{text!r} {_percent(logprob)}" for logprob, _, text in best))


def _story(engine: Engine, seed: int) -> None:
    _head("4. A story")
    page = _Page()
    page.write(_STORY)
    params = {**_STORY_PARAMS, "sampling_seed": seed}
    start = time.perf_counter()
    first, shown, tokens = 0.0, 0, 0
    for result in engine.generate(_STORY, params, stream=True):
        first = first or time.perf_counter() - start
        page.write(result["text"][shown:])
        shown, tokens = len(result["text"]), len(result["output_ids"])
    seconds = time.perf_counter() - start
    page.end()
    rate = (tokens - 1) / (seconds - first) if tokens > 1 else 0.0
    _say(f"{_INDENT}[first token after {first * 1000:.0f} ms, then {rate:.0f} tokens/s]")


def _balance(report: Report) -> bool:
    _head("5. The balance: no line passed its plan, and every page is back")
    measured, pages = report["measured"], report["pages"]
    _say(f"{_INDENT}{'':<14}{'planned':>12}{'peak':>12}{'now':>12}")
    for account, planned in _lines(report).items():
        took = measured[account]
        _say(
            f"{_INDENT}{account:<14}{human_bytes(planned):>12}"
            f"{human_bytes(took['peak']):>12}{human_bytes(took['now']):>12}"
        )
    back = pages["free"] + pages["cached"] == pages["total"]
    _say(
        f"{_INDENT}pages: {pages['free']:,} free + {pages['cached']:,} cached = "
        f"{pages['free'] + pages['cached']:,} of {pages['total']:,}"
    )
    for violation in report["violations"]:
        _say(f"{_INDENT}violation: {violation}")
    return back and not report["violations"]


def _lines(report: Report) -> dict[str, int]:
    """The lines of the device plan that are not empty."""
    return {account: planned for account, planned in report["plan"].items() if planned}


class _Page:
    """Writes words as they come, wrapped to the page. A word is held until it is complete."""

    def __init__(self) -> None:
        self._column = 0
        self._word = ""

    def write(self, text: str) -> None:
        """Write text; what is after its last space waits."""
        *words, self._word = (self._word + text.replace("\n", " ")).split(" ")
        for word in words:
            self._put(word)
        sys.stdout.flush()

    def end(self) -> None:
        """Write what is held, and end the line."""
        self._put(self._word)
        self._word = ""
        _say("")

    def _put(self, word: str) -> None:
        if not word:
            return
        if self._column and self._column + 1 + len(word) > _WIDTH:
            _say("")
            self._column = 0
        lead = " " if self._column else _INDENT
        sys.stdout.write(lead + word)
        self._column += len(lead) + len(word)


def _percent(logprob: float) -> str:
    return f"{math.exp(logprob):.1%}"


def _head(text: str) -> None:
    _say("")
    _say(text)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
