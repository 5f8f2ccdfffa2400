"""Items of `seawall score`: from a JSON line to what is scored, and from a score to a record.

    {"id"?, "text"} | {"id"?, "input_ids"} | {"id"?, "context", "continuation"}     in
    {"id" | "line", "logprob", "tokens", "perplexity", "is_greedy", ...}            out
    {"id" | "line", "error"}                                                        out, failed

Every line that is not blank gives exactly one record, in order: that is what resuming rests on.
Other keys of a line are ignored. Torch-free.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from seawall.cli.jsonl import Line

Kind = Literal["text", "input_ids", "pair", "bad"]
Record = dict[str, object]
_FORMS = 'one of "text", "input_ids", or "context" with "continuation"'
_LEAST = -3.4028234663852886e38  # of float32: JSON has no infinity
# A batch is one call of the engine: enough to fill steps, and a bound on what is in memory.
_BATCH_LINES = 64
_BATCH_BYTES = 128 << 10


class Scored(Protocol):
    """The result of scoring one item; `seawall.ScoreResult` is one."""

    @property
    def logprob(self) -> float:
        """Sum over the scored tokens."""

    @property
    def num_tokens(self) -> int:
        """Scored tokens."""

    @property
    def is_greedy(self) -> bool:
        """Each is the likeliest."""

    @property
    def value(self) -> float:
        """What was asked with `reduce`."""

    @property
    def token_ids(self) -> tuple[int, ...] | None:
        """Scored tokens, if asked."""

    @property
    def token_logprobs(self) -> tuple[float, ...] | None:
        """Their logprobs, if asked."""

    @property
    def top_logprobs(self) -> tuple[tuple[tuple[int, float], ...], ...] | None:
        """The best (id, logprob) pairs a token, if asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreItem:
    """One line to score.

    Attributes:
        key: ("id", its id), or ("line", its number) for a line without one.
        kind: which of the forms below is set; "bad" with `error`.
    """

    number: int
    num_bytes: int
    key: tuple[str, str | int]
    kind: Kind
    text: str = ""
    input_ids: tuple[int, ...] = ()
    pair: tuple[str, str] = ("", "")
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Which fields records have: what must not change between a run and its resumption."""

    reduce: str
    top_logprobs: int

    @property
    def has_tokens(self) -> bool:
        """Whether records list every token."""
        return self.reduce == "none"


def read_items(lines: Iterable[Line]) -> Iterator[ScoreItem]:
    """One item a line."""
    for line in lines:
        given = line.value.get("id")
        has_id = isinstance(given, str | int) and not isinstance(given, bool)
        key: tuple[str, str | int] = ("line", line.number)
        if isinstance(given, str | int) and has_id:
            key = ("id", given)
        error = line.error
        if error is None and given is not None and not has_id:
            error = f"id: got {type(given).__name__}, a string or an integer is needed"
        yield _item(line, key, error)


def _item(line: Line, key: tuple[str, str | int], error: str | None) -> ScoreItem:
    value = line.value
    kind: Kind = "bad"
    text, pair = "", ("", "")
    ids: tuple[int, ...] = ()
    if error is None:
        try:
            kind = _kind(value)
            if kind == "text":
                text = _text(value, "text")
            elif kind == "input_ids":
                ids = _ids(value["input_ids"])
            else:
                pair = (_text(value, "context"), _text(value, "continuation"))
        except ValueError as problem:
            kind, error = "bad", str(problem)
    return ScoreItem(
        number=line.number,
        num_bytes=line.num_bytes,
        key=key,
        kind=kind,
        text=text,
        input_ids=ids,
        pair=pair,
        error=error or "",
    )


def _kind(value: dict[str, object]) -> Kind:
    given = {name for name in ("text", "input_ids", "context", "continuation") if name in value}
    forms: dict[frozenset[str], Kind] = {
        frozenset({"text"}): "text",
        frozenset({"input_ids"}): "input_ids",
        frozenset({"context", "continuation"}): "pair",
    }
    kind = forms.get(frozenset(given))
    if kind is None:
        raise ValueError(f"got {' and '.join(sorted(given)) or 'no text'}; give {_FORMS}")
    return kind


def _text(value: dict[str, object], name: str) -> str:
    text = value[name]
    if not isinstance(text, str):
        raise ValueError(f"{name}: got {type(text).__name__}, a string is needed")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name}: holds half of a surrogate pair; remove it") from None
    return text


def _ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ValueError("input_ids: a list of integers is needed")
    if any(not 0 <= item < 2**31 for item in value):
        raise ValueError("input_ids: ids must be in [0, 2**31); use ids of this model's tokenizer")
    return tuple(value)


def batches(items: Iterable[ScoreItem], shape: Shape) -> Iterator[list[ScoreItem]]:
    """Items in runs that are scored by one call; smaller ones where results are larger."""
    most_bytes = _BATCH_BYTES // (1 + shape.top_logprobs)
    batch: list[ScoreItem] = []
    num_bytes = 0
    for item in items:
        batch.append(item)
        num_bytes += item.num_bytes
        if len(batch) == _BATCH_LINES or num_bytes >= most_bytes:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def record(item: ScoreItem, result: Scored, shape: Shape) -> Record:
    """The output line of a scored item."""
    made: Record = {
        item.key[0]: item.key[1],
        "logprob": _finite(result.logprob),
        "tokens": result.num_tokens,
        "perplexity": _perplexity(result.logprob, result.num_tokens),
        "is_greedy": result.is_greedy,
    }
    if not shape.has_tokens:
        made["reduce"] = shape.reduce
        made["value"] = _finite(result.value)
    if result.token_ids is not None:
        made["token_ids"] = result.token_ids
    if result.token_logprobs is not None:
        made["token_logprobs"] = [_finite(value) for value in result.token_logprobs]
    if result.top_logprobs is not None:
        made["top_logprobs"] = [_pairs(pairs) for pairs in result.top_logprobs]
    return made


def failure(item: ScoreItem, message: str) -> Record:
    """The output line of an item that could not be scored."""
    return {item.key[0]: item.key[1], "error": message}


def mismatch(found: object, item: ScoreItem, shape: Shape) -> str | None:
    """Why an existing record cannot be that of `item`; None if it can."""
    if not isinstance(found, dict):
        return "it is no record"
    name, value = item.key
    if name not in found or found[name] != value or type(found[name]) is not type(value):
        given = {key: found[key] for key in ("id", "line") if key in found}
        return f"it has {given or 'no id'}, line {item.number} of the input has {name} {value!r}"
    if "error" not in found and not _same_shape(found, shape):
        return "it was made with another --reduce or --top-logprobs"
    return None


def _same_shape(found: Record, shape: Shape) -> bool:
    tops = found.get("top_logprobs")
    if not shape.has_tokens:
        return found.get("reduce") == shape.reduce
    if "token_logprobs" not in found or (tops is None) != (shape.top_logprobs == 0):
        return False
    return not isinstance(tops, list) or all(len(pairs) == shape.top_logprobs for pairs in tops)


def _pairs(pairs: Sequence[tuple[int, float]]) -> list[list[float]]:
    return [[token, _finite(logprob)] for token, logprob in pairs]


def _perplexity(logprob: float, tokens: int) -> float | None:
    if tokens == 0:
        return None
    mean = logprob / tokens
    return math.exp(-mean) if -mean < math.log(sys.float_info.max) else sys.float_info.max


def _finite(value: float) -> float:
    return max(value, _LEAST) if value < 0 else min(value, sys.float_info.max)
