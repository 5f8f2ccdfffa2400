"""Grammars as a request names them, checked at the edge, and what the engine asks of them.

    GrammarSpec    kind and text: what a grammar is compiled from, and its key in the cache
    Constraint     one sample's place in its grammar: advanced by each token, filled by a thread
    Grammars       what the scheduler needs of whoever compiles and fills

Only size, depth and form are looked at here; whether a grammar can be compiled is found out in a
process of its own (package `grammar`).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from seawall.core.errors import RequestError
from seawall.core.step import I32

GrammarKind = Literal["json_schema", "regex", "ebnf", "choice", "structural_tag"]

MAX_SCHEMA_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 32
MAX_REGEX_BYTES = 4 << 10
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """What a sample's text must match: `text` is the schema, pattern or rules, or JSON of the rest.

    A structural tag's text is a JSON list of [trigger, begin, schema, end].
    """

    kind: GrammarKind
    text: str


class Constraint(Protocol):
    """One sample's place in its grammar. The core thread calls it; a thread fills its words."""

    @property
    def words(self) -> I32:
        """int32 [ceil(V / 32)]: bit set = the token may come next; valid while `is_ready`."""

    @property
    def is_ready(self) -> bool:
        """Whether the words are those of the present place, or `error` says why they can't be."""

    @property
    def error(self) -> str | None:
        """Why the grammar can't go on; None while it can."""

    def accept(self, token: int) -> bool:
        """Move past a token; returns whether nothing may follow it."""


class Grammars(Protocol):
    """Compiles grammars and fills words, outside the core thread."""

    def open(self, spec: GrammarSpec) -> Constraint | None:
        """A sample's constraint; None as long as the grammar is compiled or has no room.

        Raises:
            RequestError: the grammar can't be used, with the reason.
        """

    def prepare(self, spec: GrammarSpec) -> None:
        """A sample will want it: have it compiled, if there is room."""

    def close(self, constraint: Constraint) -> None:
        """The sample has ended."""

    def fill(self, constraint: Constraint, banned: Sequence[int]) -> None:
        """Start to fill its words; banned ids are left out where others remain."""

    def wait(self, constraints: Sequence[Constraint], seconds: float) -> None:
        """Return when all are ready, at the latest after so long."""

    def pause(self, seconds: float) -> None:
        """Return when a grammar was compiled or words were filled, at the latest after so long."""


class NoGrammars:
    """Where no backend is there: every request with a grammar was refused at the edge."""

    def open(self, spec: GrammarSpec) -> Constraint | None:
        """Refuses."""
        raise RequestError(f"{spec.kind}: this engine has no grammar backend")

    def prepare(self, spec: GrammarSpec) -> None:
        """Nothing is compiled."""

    def close(self, constraint: Constraint) -> None:
        """There is none."""

    def fill(self, constraint: Constraint, banned: Sequence[int]) -> None:
        """There is none."""

    def wait(self, constraints: Sequence[Constraint], seconds: float) -> None:
        """There is nothing to wait for."""

    def pause(self, seconds: float) -> None:
        """There is nothing to wait for."""


# -- parsing ---------------------------------------------------------------------------------


@runtime_checkable
class _HasSchema(Protocol):
    """A Pydantic model class, or whatever describes itself by a JSON schema."""

    def model_json_schema(self) -> Mapping[str, object]: ...


def schema_text(name: str, value: object) -> str:
    """A JSON schema as text, from text, a mapping or a Pydantic model class.

    Raises:
        RequestError: no schema, too large or too deep.
    """
    if isinstance(value, type) and isinstance(value, _HasSchema):
        value = value.model_json_schema()
    if isinstance(value, Mapping | bool):
        try:
            value = json.dumps(value if isinstance(value, bool) else dict(value))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"{name}: {_line(error)}; give a JSON schema") from None
    if not isinstance(value, str):
        raise RequestError(
            f"{name}: got {type(value).__name__}; give a JSON schema: text, dict or Pydantic model"
        )
    check_text(name, value, MAX_SCHEMA_BYTES)
    depth = nesting(value)
    if depth > MAX_SCHEMA_DEPTH:
        raise RequestError(
            f"{name}: nested {depth} deep, the limit is {MAX_SCHEMA_DEPTH}; flatten it or use $ref"
        )
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name}: not JSON ({_line(error)}); give a JSON schema") from None
    if not isinstance(parsed, dict | bool):
        raise RequestError(f"{name}: got a JSON {type(parsed).__name__}, an object is needed")
    return value


def pattern_text(name: str, value: object) -> str:
    """A regular expression."""
    return _text(name, value, MAX_REGEX_BYTES)


def rules_text(name: str, value: object) -> str:
    """A grammar in Lark or EBNF notation."""
    return _text(name, value, MAX_SCHEMA_BYTES)


def choices(name: str, value: object) -> tuple[str, ...]:
    """Texts of which the output is one.

    Raises:
        RequestError: not a list of texts, or too long.
    """
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise RequestError(f"{name}: got {type(value).__name__}; give a list of strings")
    if isinstance(value, list) and not value:
        raise RequestError(f"{name}: got no strings; give some, or leave it out")
    if any(not item for item in value):
        raise RequestError(f"{name}: got an empty string, which is no output; remove it")
    check_text(name, "".join(value), MAX_SCHEMA_BYTES)
    return tuple(value)


def tags_text(name: str, value: object) -> str:
    """Tags inside free text, in SGLang's form: where a trigger was written, one must follow.

        {"structures": [{"begin": "<f=add>", "schema": {...}, "end": "</f>"}], "triggers": ["<f="]}

    Raises:
        RequestError: another form, or a `begin` that starts with no trigger.
    """
    given = json.loads(schema_text(name, value))
    structures = given.get("structures") if isinstance(given, dict) else None
    triggers = given.get("triggers") if isinstance(given, dict) else None
    if not (_all(structures, dict) and _all(triggers, str)):
        raise RequestError(f"{name}: an object with lists 'structures' and 'triggers' is needed")
    assert isinstance(structures, list) and isinstance(triggers, list)
    tags = []
    for tag in structures:
        begin, schema, end = (tag.get(key) for key in ("begin", "schema", "end"))
        if not (isinstance(begin, str) and isinstance(end, str) and isinstance(schema, dict)):
            raise RequestError(f"{name}: each structure needs texts begin and end, and a schema")
        found = [trigger for trigger in triggers if trigger and begin.startswith(trigger)]
        if not found:
            raise RequestError(f"{name}: {begin[:60]!r} starts with none of the triggers; add one")
        tags.append([max(found, key=len), begin, schema, end])
    return json.dumps(tags)


def _all(items: object, kind: type) -> bool:
    """Whether it is a list of some things of that kind."""
    return isinstance(items, list) and bool(items) and all(isinstance(i, kind) for i in items)


def nesting(text: str) -> int:
    """How deep brackets of a JSON text are nested, whatever else is wrong with it."""
    depth = deepest = 0
    for found in _BRACKETS.finditer(text):
        mark = found[0]
        if mark in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif mark in "]}":
            depth -= 1
    return deepest


def check_text(name: str, text: str, limit: int) -> None:
    """Refuse a text that is no Unicode or longer than `limit` bytes of UTF-8."""
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise RequestError(f"{name}: holds a lone surrogate; send valid Unicode") from None
    if num_bytes > limit:
        raise RequestError(f"{name}: got {num_bytes} bytes, the limit is {limit}; shorten it")


def _text(name: str, value: object, limit: int) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name}: got {type(value).__name__}; give a string that is not empty")
    check_text(name, value, limit)
    return value


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
