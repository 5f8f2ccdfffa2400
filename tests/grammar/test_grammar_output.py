"""What comes out matches what was asked, whatever else is asked with it."""

import json
import re
from itertools import pairwise
from typing import Any

import jsonschema
import pydantic
import pytest

from seawall import Engine
from tests.engine.harness import TEXT
from tests.grammar.conftest import PERSON, grammar_bytes, open_demo, schema

# The end token is likely, so that what may go on for ever ends.
ENDING = {"logit_bias": {"1": 8.0}}
DRAWN: dict[str, Any] = {"temperature": 1.0, "sampling_seed": 11, "max_new_tokens": 300, "n": 2}
SCHEMAS: dict[str, Any] = {
    "flat": PERSON,
    "nested": {
        "type": "object",
        "properties": {
            "who": PERSON,
            "where": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": -5, "maximum": 5}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
        "required": ["who", "where"],
        "additionalProperties": False,
    },
    "array": {
        "type": "array",
        "items": {"anyOf": [{"type": "boolean"}, {"const": "a b"}, {"type": "null"}]},
        "minItems": 2,
        "maxItems": 4,
    },
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"enum": ["u", "v"]}],
        "items": False,
        "minItems": 2,
    },
    "number": {"type": "number", "minimum": 0.5, "exclusiveMaximum": 2},
    "multiple": {"type": "integer", "minimum": 0, "maximum": 40, "multipleOf": 7},
    "unicode": {"enum": ["\u00e9\u4e2d\u6587", "\U0001f98a", 'say "\\"\n', "\u007f/~"]},
    "pattern": {"type": "string", "pattern": "^[A-F]{2,3}-\\d{2}$"},
    "date": {"type": "string", "format": "date"},
    "references": {
        "$defs": {"leaf": {"enum": [1, 2]}},
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/leaf"}, "b": {"$ref": "#/$defs/leaf"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "all of": {
        "allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 4}],
    },
}
TREE: dict[str, Any] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"enum": [0, 1]},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            },
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


class Address(pydantic.BaseModel, extra="forbid"):
    street: str = pydantic.Field(max_length=6)
    number: int = pydantic.Field(ge=1, le=99)


class Person(pydantic.BaseModel, extra="forbid"):
    home: Address
    happy: bool


def samples(engine: Engine, **params: Any) -> list[dict[str, Any]]:
    found = engine.generate(TEXT, {**DRAWN, **params})
    return found if isinstance(found, list) else [found]


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas(demo: Engine, name: str) -> None:
    wanted = SCHEMAS[name]
    validator = jsonschema.Draft202012Validator(
        wanted, format_checker=jsonschema.FormatChecker(formats=["date"])
    )
    for sample in samples(demo, json_schema=wanted, **ENDING):
        assert sample["meta_info"]["finish_reason"]["type"] == "stop", sample
        validator.validate(json.loads(sample["text"]))


def test_recursion(demo: Engine) -> None:
    stopped = [
        json.loads(sample["text"])
        for sample in samples(demo, json_schema=TREE, n=16, temperature=2.0, max_new_tokens=200)
        if sample["meta_info"]["finish_reason"]["type"] == "stop"
    ]
    assert len(stopped) >= 4
    for value in stopped:
        jsonschema.validate(value, TREE)
    assert any(value["next"] is not None for value in stopped)


def test_any_object(demo: Engine) -> None:
    wanted = {"type": "object", "maxProperties": 2, "additionalProperties": {"type": "boolean"}}
    for sample in samples(demo, json_schema={"type": "object", "properties": {}, **wanted}, n=2):
        if sample["meta_info"]["finish_reason"]["type"] == "stop":
            assert isinstance(json.loads(sample["text"]), dict)
        else:
            assert "Unimplemented" in sample["meta_info"]["finish_reason"]["message"]


def test_pydantic_models(demo: Engine) -> None:
    for sample in samples(demo, json_schema=Person):
        person = Person.model_validate_json(sample["text"])
        assert 1 <= person.home.number <= 99


@pytest.mark.parametrize(
    "pattern", [r"[0-9]{3}-(abc|x+y){1,2}", r"\w{2,5} \w{2,5}\.", r"(?i)yes|no", "\u00e9{3}\\s?"]
)
def test_patterns(demo: Engine, pattern: str) -> None:
    for sample in samples(demo, regex=pattern, max_new_tokens=200):
        reason = sample["meta_info"]["finish_reason"]["type"]
        assert reason == "stop" or "+" in pattern
        if reason == "stop":
            assert re.fullmatch(pattern, sample["text"]), sample["text"]


@pytest.mark.parametrize(
    "rules",
    [
        'start: greeting " " ("fox" | "owl") "!"~1..3\ngreeting: "hello" | "good day"',
        'root ::= ("hello" | "good day") " " animal ("!" | "!!" | "!!!")\nanimal ::= "fox" | "owl"',
    ],
    ids=["lark", "ebnf"],
)
def test_rules(demo: Engine, rules: str) -> None:
    for sample in samples(demo, ebnf=rules):
        assert re.fullmatch("(hello|good day) (fox|owl)!{1,3}", sample["text"]), sample["text"]


def test_tags_inside_free_text(demo: Engine) -> None:
    tag = {
        "structures": [{"begin": "<f=add>", "schema": {"enum": [1, 2]}, "end": "</f>"}],
        "triggers": ["<f="],
    }
    for sample in samples(demo, structural_tag=tag, n=2, max_new_tokens=20):
        assert sample["meta_info"]["completion_tokens"] > 1
        assert re.fullmatch(r"<f=add>\s*[12]</f>.*", sample["text"], re.DOTALL) or (
            "<f=" not in sample["text"]
        )


def test_choices(demo: Engine) -> None:
    options = ["yes", "yes, but", "no.", "a|b", "\u4e2d(*)", 'q"\n']
    found = {s["text"] for s in samples(demo, choice=options, n=24, temperature=4.0)}
    assert found <= set(options)
    assert len(found) > 1


def test_logprobs_processed_and_raw(demo: Engine) -> None:
    """Processed logprobs see the mask, raw ones don't; neither changes what is drawn."""
    params = {**DRAWN, "n": 1, "regex": "[0-9]{6}"}
    asked = {"return_logprob": True, "top_logprobs_num": 12}
    processed = demo.generate(TEXT, params, logprobs_mode="processed", **asked)
    raw = demo.generate(TEXT, params, logprobs_mode="raw", **asked)
    free = demo.generate(TEXT, {"max_new_tokens": 0}, return_logprob=True)
    assert processed["output_ids"] == raw["output_ids"]
    assert free["output_ids"] == []
    possible = [
        [entry for entry in tops if entry[0] > -1e30]
        for tops in processed["meta_info"]["output_top_logprobs"]
    ]
    assert all(1 <= len(tops) <= 12 for tops in possible)
    text = demo.tokenizer
    assert text is not None
    assert all(text.decode([e[1]]).isdigit() for tops in possible for e in tops)
    # The model itself would hardly write digits here: its best ids are others, all possible.
    tops = raw["meta_info"]["output_top_logprobs"][0]
    assert all(entry[0] > -1e30 for entry in tops)
    assert not all(text.decode([e[1]]).isdigit() for e in tops)
    for ours, theirs in zip(
        processed["meta_info"]["output_token_logprobs"],
        raw["meta_info"]["output_token_logprobs"],
        strict=True,
    ):
        assert ours[0] > theirs[0]


def test_with_penalties_and_bias(demo: Engine) -> None:
    more = {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "logit_bias": {"3": 5.0}}
    for sample in samples(demo, json_schema=PERSON, **more):
        jsonschema.validate(json.loads(sample["text"]), PERSON)


def test_the_end_comes_with_the_grammar(demo: Engine) -> None:
    """No end token before it is satisfied, none needed after, none dropped from the text."""
    eos = {"1": 50.0, "5": 50.0}
    [sample] = samples(demo, regex="[a-c]{4}", n=1, logit_bias=eos)
    assert re.fullmatch("[a-c]{4}", sample["text"])
    assert sample["meta_info"]["finish_reason"] == {"type": "stop", "matched": None}
    [sample] = samples(demo, regex="[a-c]{4,400}", n=1, logit_bias=eos)
    assert re.fullmatch("[a-c]{4,8}", sample["text"])
    assert sample["meta_info"]["finish_reason"]["matched"] in (1, 5)
    # Where it may go on it must, if the end token is to be ignored or comes too early.
    going_on = {"regex": "[a-c]{4,400}", "n": 1, "logit_bias": eos, "max_new_tokens": 20}
    for more in ({"ignore_eos": True}, {"min_new_tokens": 20}):
        [sample] = samples(demo, **going_on, **more)
        assert sample["meta_info"]["completion_tokens"] == 20
    # Where it may not, that is the end all the same.
    [sample] = samples(demo, regex="[a-c]{4}", n=1, min_new_tokens=100, ignore_eos=True)
    assert re.fullmatch("[a-c]{4}", sample["text"])


def test_stop_strings_and_lengths_cut(demo: Engine) -> None:
    [sample] = samples(demo, regex="ab{30}", n=1, stop=["bbb"])
    assert sample["text"] == "a"
    assert sample["meta_info"]["finish_reason"] == {"type": "stop", "matched": "bbb"}
    [sample] = samples(demo, regex="[a-z]{300}", n=1, max_new_tokens=5)
    assert sample["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
    # Satisfied by the last token that was allowed: that is an end, not a cut.
    count = samples(demo, choice=["yes, but"], n=1)[0]["meta_info"]["completion_tokens"]
    [sample] = samples(demo, choice=["yes, but"], n=1, max_new_tokens=count)
    assert sample["meta_info"]["finish_reason"]["type"] == "stop"


def test_streams_grow_into_the_result(demo: Engine) -> None:
    params = {**DRAWN, "n": 1, "json_schema": PERSON}
    texts = [part["text"] for part in demo.generate(TEXT, params, stream=True)]
    assert texts[-1] == demo.generate(TEXT, params)["text"]
    assert all(late.startswith(early) for early, late in pairwise(texts))


def test_one_grammar_is_compiled_once(demo: Engine) -> None:
    wanted = schema({**PERSON, "title": "compiled once"})
    samples(demo, json_schema=wanted)
    before = grammar_bytes(demo)["now"]
    samples(demo, json_schema=wanted, n=5)
    assert grammar_bytes(demo)["now"] == before


def test_without_a_backend() -> None:
    with open_demo(grammar_backend="none") as engine:
        assert engine.memory_report()["plan"]["masks"] == 0
        with pytest.raises(ValueError, match="regex: grammar_backend is 'none'"):
            engine.generate(TEXT, {"regex": "a"})
        assert engine.generate(TEXT, {"max_new_tokens": 1})["text"]
