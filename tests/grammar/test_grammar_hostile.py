"""Grammars made to hurt: each ends in its result or a clear error, while others are served."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from seawall import Engine
from tests.engine.harness import TEXT
from tests.grammar.conftest import grammar_bytes, open_demo


def _deep(levels: int) -> Any:
    value: Any = {"type": "integer"}
    for _ in range(levels):
        value = {"type": "object", "properties": {"a": value}}
    return value


def _union(count: int) -> Any:
    return {
        "anyOf": [
            {"type": "object", "properties": {f"k{i}": {"type": "null"}}, "required": [f"k{i}"]}
            for i in range(count)
        ]
    }


def _fields(seed: int) -> Any:
    names = [f"field {seed} {i}" for i in range(20)]
    return {
        "type": "object",
        "properties": {name: {"type": "string", "maxLength": 9} for name in names},
        "required": names,
    }


# What is refused at once, before anything is compiled: (parameter, value, what is said).
REFUSED: dict[str, tuple[str, Any, str]] = {
    "5 MB": ("json_schema", {"enum": ["x" * 50] * 100_000}, "the limit is 65536; shorten it"),
    "10,000 branches": ("json_schema", _union(10_000), "the limit is 65536; shorten it"),
    "deep dict": ("json_schema", _deep(40), "nested 81 deep, the limit is 32"),
    "very deep dict": ("json_schema", _deep(5_000), "recursion"),
    "deep text": ("json_schema", '{"not":' * 9_000, "nested 9000 deep, the limit is 32"),
    "no JSON": ("json_schema", "{'type': 1}", "not JSON"),
    "a list": ("json_schema", "[1]", "an object is needed"),
    "a number": ("json_schema", 7, "got int; give a JSON schema"),
    "no model": ("json_schema", int, "got type; give a JSON schema"),
    "a set inside": ("json_schema", {"enum": {1}}, "not JSON serializable"),
    "long pattern": ("regex", "a" * 5_000, "got 5000 bytes, the limit is 4096"),
    "empty pattern": ("regex", "", "give a string that is not empty"),
    "half a character": ("regex", "\ud800", "lone surrogate"),
    "long rules": ("ebnf", "start: " + "x" * 70_000, "the limit is 65536"),
    "no list": ("choice", "yes", "give a list of strings"),
    "no choices": ("choice", [], "got no strings"),
    "an empty choice": ("choice", ["a", ""], "empty string"),
    "many choices": ("choice", ["opt"] * 30_000, "the limit is 65536"),
    "tags": ("structural_tag", "{}", "lists 'structures' and 'triggers' is needed"),
    "a tag without a trigger": (
        "structural_tag",
        {"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b>"]},
        "'<a>' starts with none of the triggers",
    ),
}
# What a process of its own has to find out: (parameter, value, what is said; None for a result).
FOUND_OUT: dict[str, tuple[str, Any, str | None]] = {
    "hang in native code": (
        "json_schema",
        {"type": "integer", "multipleOf": 9999991},
        "took longer than 2 s to compile; simplify it",
    ),
    "no such keyword": (
        "json_schema",
        {"contains": {"const": 1}},
        'Unimplemented keys: ["contains"]',
    ),
    "no such type": ("json_schema", {"type": "strin"}, "Invalid type: strin"),
    "needs itself": ("json_schema", {"$ref": "#"}, ""),
    "reference to nothing": ("json_schema", {"$ref": "#/$defs/none"}, ""),
    "allows nothing": ("json_schema", {"type": "integer", "minimum": 5, "maximum": 4}, ""),
    "wide union": ("json_schema", _union(700), None),
    "many properties": (
        "json_schema",
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2_000)}},
        "Current row has",
    ),
    "unclosed": ("regex", "(a", "unclosed group"),
    "looks ahead": ("regex", "(?=a)b", "look-around"),
    "nested counts": ("regex", "((a{100}){100}){100}", ""),
    "nested stars": ("regex", "((((a+)+)+)+)+b", None),
    "many states": ("regex", "(.*a){20}.{20}b", None),
    "bad rules": ("ebnf", "start: nowhere", "nowhere"),
    "deep rules": ("ebnf", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000, "too deeply nested"),
    "wide rules": ("ebnf", "start: " + " | ".join(f'"{i}"' for i in range(7_000)), "Current row"),
    "wide choice": ("choice", [f"opt-{i}" for i in range(6_000)], None),
    "parts of characters": ("regex", "[\u4e00-\u9fff]{4}\U0001f98a", None),
}
SMALL: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "sampling_seed": 2}


@pytest.fixture(scope="module")
def busy(demo: Engine) -> Iterator[Engine]:
    """An engine that serves somebody else all the time."""
    stop, failed = threading.Event(), []

    def serve() -> None:
        while not stop.is_set():
            found = demo.generate(TEXT, {"max_new_tokens": 8, "temperature": 0})
            if found["meta_info"]["finish_reason"]["type"] == "abort":
                failed.append(found)

    thread = threading.Thread(target=serve)
    thread.start()
    yield demo
    stop.set()
    thread.join()
    assert not failed


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_once(demo: Engine, name: str) -> None:
    parameter, value, said = REFUSED[name]
    with pytest.raises(ValueError, match=f"^{parameter}: ") as caught:
        demo.generate(TEXT, {parameter: value})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_one_grammar_a_request(demo: Engine) -> None:
    with pytest.raises(ValueError, match="json_schema and regex: both given"):
        demo.generate(TEXT, {"regex": "a", "json_schema": {}})


@pytest.mark.parametrize("name", FOUND_OUT)
def test_found_out(busy: Engine, name: str) -> None:
    parameter, value, said = FOUND_OUT[name]
    found = busy.generate(TEXT, {**SMALL, parameter: value})
    reason = found["meta_info"]["finish_reason"]
    if said is None:
        assert reason["type"] in ("stop", "length")
    else:
        assert reason["type"] == "abort", found
        assert reason["status_code"] == 400
        assert reason["message"].startswith(f"{parameter}: ")
        assert said in reason["message"]
        assert "\n" not in reason["message"]
        assert len(reason["message"]) < 400
        assert found["output_ids"] == []


def test_a_bad_one_holds_nobody_up(demo: Engine) -> None:
    """What comes with it and after it is served before it has been found out."""
    order: list[str] = []

    def ask(name: str, params: dict[str, Any]) -> None:
        demo.generate(TEXT, {**SMALL, **params})
        order.append(name)

    hang = {"json_schema": {"type": "integer", "multipleOf": 9999973}}
    threads = [threading.Thread(target=ask, args=("hang", hang))]
    threads += [
        threading.Thread(target=ask, args=(f"other {i}", params))
        for i, params in enumerate([{}, {"regex": "[a-e]{3}"}, {"choice": ["x", "y"]}])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order[-1] == "hang"


def test_one_bad_of_a_batch_and_all_its_samples(demo: Engine) -> None:
    found = demo.generate(
        [TEXT, TEXT], [{**SMALL, "n": 3, "regex": "(b"}, {**SMALL, "n": 2, "regex": "[0-3]{2}"}]
    )
    assert [s["meta_info"]["finish_reason"]["type"] for s in found] == ["abort"] * 3 + ["stop"] * 2


def test_memory_is_bounded_and_comes_back() -> None:
    """More grammars than the account holds: the oldest go, the cap stays."""
    with open_demo(host_memory_budget="96MiB") as engine:
        cap = engine.memory_report()["host"]["plan"]["grammars"]
        for i in range(0, 48, 12):
            params = [{**SMALL, "json_schema": _fields(i + j)} for j in range(12)]
            found = engine.generate([TEXT] * 12, params)
            assert {s["meta_info"]["finish_reason"]["type"] for s in found} == {"length"}, found
            assert 0 < grammar_bytes(engine)["now"] <= cap
        assert grammar_bytes(engine)["peak"] <= cap
        assert engine.memory_report()["violations"] == []
        wide = {**SMALL, "choice": [f"{i}-{i * i}" for i in range(5_000)]}
        reason = engine.generate(TEXT, wide)["meta_info"]["finish_reason"]
        assert reason["type"] == "abort"
        assert f"the limit is {cap // 8}; simplify it" in reason["message"]


def test_shut_down_with_work_at_hand() -> None:
    before = set(threading.enumerate())
    engine = open_demo()
    thread = threading.Thread(
        target=lambda: engine.generate(TEXT, {"regex": "[a-z]{2000}", "max_new_tokens": 500})
    )
    thread.start()
    while not engine.get_server_info()["internal_states"][0]["running"]:
        pass
    engine.shutdown()
    thread.join()
    names = [found.name for found in set(threading.enumerate()) - before]
    assert not [name for name in names if name.startswith("seawall")]
