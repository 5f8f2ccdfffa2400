"""The embedded model with its tokenizer; a page of a few schemas."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from seawall import Engine
from tests.engine.harness import open_engine

OPTIONS: dict[str, Any] = {
    "memory_budget": "256MiB",
    "logits_workspace": "8MiB",
    "page_size": 16,
    "max_running_requests": 16,
    "skip_tokenizer_init": False,
}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["fox", "owl", None, 7]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


def open_demo(**changes: Any) -> Engine:
    return open_engine("demo", **{**OPTIONS, **changes})


def grammar_bytes(engine: Engine) -> dict[str, int]:
    found: dict[str, int] = engine.memory_report()["host"]["measured"]["grammars"]
    return found


def schema(value: Any) -> str:
    return json.dumps(value)


@pytest.fixture(scope="session")
def demo() -> Iterator[Engine]:
    with open_demo() as engine:
        yield engine
