"""`seawall generate`: writes on from prompts, streamed for one prompt, in batches for a file."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from seawall.cli.command import DONE, FAILED, UsageError
from seawall.cli.engine_flags import engine_args, sampling_params
from seawall.cli.jsonl import Line, input_bytes, open_input, read_lines
from seawall.cli.progress import Progress
from seawall.core.errors import RequestError
from seawall.offline.engine import Engine
from seawall.offline.window import in_order

Result = dict[str, Any]
_BATCH_LINES = 64
_BATCH_BYTES = 256 << 10
_CALLS_AT_A_TIME = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """A line and its samples, or why there are none."""

    line: Line
    results: list[Result]
    error: str | None = None


def run(arguments: argparse.Namespace) -> int:
    """Write on."""
    if (arguments.input is None) == (not arguments.prompts):
        raise UsageError("generate: give PROMPT or --input FILE, one of the two")
    args, sampling = engine_args(arguments), sampling_params(arguments)
    if arguments.input is not None:
        with open_input(arguments.input) as source, Engine(**args) as engine:
            lines = read_lines(source)
            total = input_bytes(arguments.input)
            return _run_lines(engine, lines, sampling, total, as_json=arguments.json)
    with Engine(**args) as engine:
        if len(arguments.prompts) == 1 and not arguments.json and sampling.get("n", 1) == 1:
            return _stream(engine, arguments.prompts[0], sampling)
        found = engine.generate(list(arguments.prompts), sampling)
    num_samples = len(found) // len(arguments.prompts)
    for i, result in enumerate(found):
        prompt = arguments.prompts[i // num_samples]
        _print(result, prompt, {"prompt": prompt}, as_json=arguments.json)
    return FAILED if any(_problem(result) for result in found) else DONE


def _stream(engine: Engine, prompt: str, sampling: Mapping[str, object]) -> int:
    shown = 0
    last: Result = {}
    for last in engine.generate(prompt, sampling, stream=True):
        sys.stdout.write(last["text"][shown:])
        sys.stdout.flush()
        shown = len(last["text"])
    sys.stdout.write("\n")
    problem = _problem(last)
    if problem is not None:
        sys.stderr.write(f"seawall: {problem}\n")
    return DONE if problem is None else FAILED


def _run_lines(
    engine: Engine,
    lines: Iterable[Line],
    sampling: Mapping[str, object],
    total_bytes: int | None,
    *,
    as_json: bool,
) -> int:
    def work(batch: list[Line]) -> list[_Done]:
        return _generate(engine, batch, sampling)

    with Progress("generate", total_bytes) as progress:
        for batch in in_order(work, _batches(lines), depth=_CALLS_AT_A_TIME):
            for done in batch:
                _report(done, progress, as_json=as_json)
            sys.stdout.flush()
        progress.summary()
    return FAILED if progress.failed else DONE


def _batches(lines: Iterable[Line]) -> Iterator[list[Line]]:
    batch: list[Line] = []
    num_bytes = 0
    for line in lines:
        batch.append(line)
        num_bytes += line.num_bytes
        if len(batch) == _BATCH_LINES or num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _generate(engine: Engine, batch: list[Line], sampling: Mapping[str, object]) -> list[_Done]:
    """What each line gives; the lines of each form in one call, one by one if that is refused."""
    made: dict[int, _Done] = {}
    forms: dict[str, list[Line]] = {"prompt": [], "input_ids": []}
    for line in batch:
        error = line.error or _form_error(line.value)
        if error is not None:
            made[line.number] = _Done(line=line, results=[], error=error)
        else:
            forms["prompt" if "prompt" in line.value else "input_ids"].append(line)
    for form, lines in forms.items():
        for done in _call(engine, form, lines, sampling):
            made[done.line.number] = done
    return [made[line.number] for line in batch]


def _call(
    engine: Engine, form: str, lines: list[Line], sampling: Mapping[str, object]
) -> list[_Done]:
    if not lines:
        return []
    given: Any = [line.value[form] for line in lines]
    params: Any = [{**sampling, **_params(line)} for line in lines]
    try:
        if form == "prompt":
            found = engine.generate(given, params)
        else:
            found = engine.generate(input_ids=given, sampling_params=params)
    except RequestError as error:
        if len(lines) == 1:
            return [_Done(line=lines[0], results=[], error=str(error))]
        half = len(lines) // 2
        return [
            *_call(engine, form, lines[:half], sampling),
            *_call(engine, form, lines[half:], sampling),
        ]
    counts = [int(each.get("n") or 1) for each in params]
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [
        _Done(line=line, results=found[end - count : end])
        for line, count, end in zip(lines, counts, ends, strict=True)
    ]


def _params(line: Line) -> dict[str, object]:
    value = line.value.get("sampling_params")
    return value if isinstance(value, dict) else {}


def _form_error(value: dict[str, object]) -> str | None:
    prompt, ids, params = (value.get(n) for n in ("prompt", "input_ids", "sampling_params"))
    if ("prompt" in value) == ("input_ids" in value):
        return 'give "prompt" or "input_ids", one of the two'
    if "prompt" in value and not isinstance(prompt, str):
        return f"prompt: got {type(prompt).__name__}, a string is needed"
    if "input_ids" in value and not (isinstance(ids, list) and ids):
        return "input_ids: a list of token ids is needed"
    if params is not None and not isinstance(params, dict):
        return f"sampling_params: got {type(params).__name__}, an object is needed"
    return None


def _report(done: _Done, progress: Progress, *, as_json: bool) -> None:
    line = done.line
    key: dict[str, object] = {"line": line.number}
    if line.value.get("id") is not None:
        key = {"id": line.value["id"]}
    problem = done.error
    if problem is not None and as_json:
        sys.stdout.write(json.dumps({**key, "error": problem}) + "\n")
    for result in done.results:
        _print(result, line.value.get("prompt", ""), key, as_json=as_json)
        problem = problem or _problem(result)
    if problem is not None:
        progress.problem(f"line {line.number}: {problem}")
    progress.add(
        done=1,
        failed=problem is not None,
        tokens=sum(len(result["output_ids"]) for result in done.results),
        num_bytes=line.num_bytes,
    )


def _print(result: Result, prompt: object, key: Mapping[str, object], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps({**key, **result}, allow_nan=False) + "\n")
    else:
        sys.stdout.write(f"> {prompt}\n{result['text']}\n\n")


def _problem(result: Result) -> str | None:
    """Why a result is not what was asked for."""
    reason = result["meta_info"]["finish_reason"] if result else None
    if reason is not None and reason["type"] == "abort":
        return str(reason["message"])
    return None
