"""`seawall score`: a file of JSON lines in bounded memory, or options after one context."""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import BinaryIO

from seawall.cli.command import DONE, FAILED, CommandError, UsageError
from seawall.cli.engine_flags import engine_args
from seawall.cli.jsonl import STANDARD, input_bytes, open_input, read_lines
from seawall.cli.progress import Progress
from seawall.cli.score_items import (
    Record,
    ScoreItem,
    Shape,
    batches,
    failure,
    read_items,
    record,
)
from seawall.cli.score_output import Taken, check_apart, check_new, create, reopen, take_up
from seawall.core.errors import EngineError, RequestError
from seawall.offline.engine import Engine
from seawall.offline.score import ScoreArgs, ScoreResult
from seawall.offline.window import in_order

# Two calls keep the engine full while a third one's results are written.
_CALLS_AT_A_TIME = 3


def run(arguments: argparse.Namespace) -> int:
    """Score a file, or options."""
    if arguments.input is None and arguments.output is None:
        return _run_quick(arguments)
    if arguments.input is None or arguments.output is None or arguments.texts:
        raise UsageError("score: --input and --output go together, without CONTEXT and OPTION")
    if arguments.resume and arguments.output == STANDARD:
        raise UsageError("--resume: the output is stdout, which cannot be read again; give a file")
    if arguments.top_logprobs and arguments.reduce != "none":
        raise UsageError("--top-logprobs: --reduce leaves tokens out; give one of the two")
    return _run_file(arguments)


# -- a file ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """A batch and its records."""

    items: list[ScoreItem]
    records: list[Record]

    @property
    def num_tokens(self) -> int:
        return sum(int(str(record.get("tokens", 0))) for record in self.records)


class _Scorer:
    """Scores batches; called by several threads."""

    def __init__(self, engine: Engine, shape: Shape) -> None:
        self._engine = engine
        self._shape = shape

    def batch(self, items: list[ScoreItem]) -> _Scored:
        """A record for each item, in order."""
        made: dict[int, Record] = {
            item.number: failure(item, item.error) for item in items if item.kind == "bad"
        }
        for kind in ("text", "input_ids", "pair"):
            made |= self._records([item for item in items if item.kind == kind])
        return _Scored(items=items, records=[made[item.number] for item in items])

    def _records(self, items: Sequence[ScoreItem]) -> dict[int, Record]:
        """Records of items of one kind, by line; a bad one among them spoils no other."""
        if not items:
            return {}
        try:
            results = self._score(items)
        except (RequestError, EngineError) as error:
            if len(items) == 1:
                return {items[0].number: failure(items[0], str(error))}
            half = len(items) // 2
            return self._records(items[:half]) | self._records(items[half:])
        return {
            item.number: record(item, result, self._shape)
            for item, result in zip(items, results, strict=True)
        }

    def _score(self, items: Sequence[ScoreItem]) -> list[ScoreResult]:
        args: ScoreArgs = {
            "reduce": self._shape.reduce,  # type: ignore[typeddict-item]  # argparse has checked it
            "top_logprobs_num": self._shape.top_logprobs,
        }
        prompts: list[str] | list[list[int]] | None = None
        if items[0].kind == "pair":
            args["pairs"] = [item.pair for item in items]
        elif items[0].kind == "text":
            prompts = [item.text for item in items]
        else:
            prompts = [list(item.input_ids) for item in items]
        found = self._engine.score(prompts, **args)
        return [result for result in found if isinstance(result, ScoreResult)]


def _run_file(arguments: argparse.Namespace) -> int:
    args = engine_args(arguments)
    shape = Shape(reduce=arguments.reduce, top_logprobs=arguments.top_logprobs)
    check_apart(arguments.input, arguments.output)
    if not arguments.resume:
        check_new(arguments.output)
    with ExitStack() as stack:
        source = stack.enter_context(open_input(arguments.input))
        items = read_items(read_lines(source))
        taken = Taken()
        output: BinaryIO | None = None
        if arguments.resume:
            output = stack.enter_context(reopen(arguments.output))
            taken = take_up(output, arguments.output, items, shape)
        engine = stack.enter_context(Engine(**args))
        if output is None:
            # Made last, so that an engine that does not start leaves no file behind.
            output = stack.enter_context(create(arguments.output))
        progress = stack.enter_context(Progress("score", input_bytes(arguments.input)))
        if taken.done:
            progress.skip(done=taken.done, failed=taken.failed, num_bytes=taken.num_bytes)
        scored = in_order(
            _Scorer(engine, shape).batch, batches(items, shape), depth=_CALLS_AT_A_TIME
        )
        _write_all(scored, output, progress)
    return FAILED if progress.failed else DONE


def _write_all(scored: Iterator[_Scored], output: BinaryIO, progress: Progress) -> None:
    for batch in scored:
        lines = [json.dumps(made, allow_nan=False) for made in batch.records]
        output.write("".join(f"{line}\n" for line in lines).encode())
        output.flush()
        failed = 0
        for item, made in zip(batch.items, batch.records, strict=True):
            if "error" in made:
                failed += 1
                progress.problem(f"line {item.number}: {made['error']}")
        progress.add(
            done=len(batch.items),
            failed=failed,
            tokens=batch.num_tokens,
            num_bytes=sum(item.num_bytes for item in batch.items),
        )
    progress.summary()


# -- the quick form ----------------------------------------------------------------------------


def _run_quick(arguments: argparse.Namespace) -> int:
    if len(arguments.texts) < 2:
        raise UsageError("score: give CONTEXT and one OPTION or more, or --input and --output")
    if arguments.resume or arguments.top_logprobs:
        raise UsageError("score: --resume and --top-logprobs belong to --input and --output")
    context, options = arguments.texts[0], arguments.texts[1:]
    with Engine(**engine_args(arguments)) as engine:
        found = engine.score(context=context, options=options)
    results = [result for result in found if isinstance(result, ScoreResult)]
    if len(results) != len(options):
        raise CommandError(f"score: {len(results)} results for {len(options)} options; report this")
    rows = _rows(options, results)
    if arguments.json:
        made = {"context": context, "options": rows}
        sys.stdout.write(json.dumps(made, allow_nan=False) + "\n")
    else:
        sys.stdout.write(_table(rows))
    return DONE


def _rows(options: Sequence[str], results: Sequence[ScoreResult]) -> list[dict[str, object]]:
    best = max(result.logprob for result in results)
    total = math.fsum(math.exp(result.logprob - best) for result in results)
    return [
        {
            "option": option,
            "logprob": result.logprob,
            "tokens": result.num_tokens,
            "mean": result.logprob / result.num_tokens,
            "share": math.exp(result.logprob - best) / total,
            "is_greedy": result.is_greedy,
        }
        for option, result in zip(options, results, strict=True)
    ]


def _table(rows: Sequence[dict[str, object]]) -> str:
    lines = ["  logprob  tokens   a token   share  greedy  option"]
    lines += [
        f"{row['logprob']:9.4f}  {row['tokens']:6d}  {row['mean']:8.4f}  {row['share']:6.1%}  "
        f"{'yes' if row['is_greedy'] else 'no':>6}  {row['option']!r}"
        for row in rows
    ]
    return "\n".join(lines) + "\n"
