"""The backend by itself: which texts a grammar allows, token by token, and where they may end."""

import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import psutil
import pytest

from seawall.core.errors import RequestError
from seawall.core.grammar import GrammarSpec, choices, nesting, rules_text, schema_text, tags_text
from seawall.core.params import SamplingParams
from seawall.engine.planning import DEMO_FOLDER
from seawall.grammar.base import GrammarError, Matcher, Vocabulary
from seawall.grammar.compiler import Compiled
from seawall.grammar.filler import MatcherConstraint
from seawall.grammar.llguidance import LLGuidance
from seawall.grammar.store import GrammarStore
from seawall.text.tokenizer import Tokenizer
from tests.grammar.conftest import PERSON, schema

EOS = 5
VOCABULARY = Vocabulary(
    tokenizer_file=DEMO_FOLDER / "tokenizer.json", vocab_size=4099, eos_token_ids=(1, EOS)
)
TAGS = {
    "structures": [
        {"begin": "<f=add>", "schema": {"enum": [1, 2]}, "end": "</f>"},
        {"begin": "<f=sub>", "schema": {"type": "null"}, "end": ""},
    ],
    "triggers": ["<f="],
}


@pytest.fixture(scope="module")
def backend() -> LLGuidance:
    return LLGuidance(VOCABULARY)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO_FOLDER)


def allowed(words: Any, token: int) -> bool:
    return bool(words.view(np.uint32)[token // 32] >> (token % 32) & 1)


def follow(backend: LLGuidance, spec: GrammarSpec, ids: list[int]) -> tuple[int, bool]:
    """How many tokens are allowed, and whether the text may end after them."""
    matcher, words = backend.compile(spec).matcher(), np.zeros(VOCABULARY.num_words, np.int32)
    for i, token in enumerate(ids):
        matcher.fill(words)
        assert not words.view(np.uint32)[-1] >> (4099 % 32), "beyond the vocabulary"
        if not allowed(words, token):
            return i, False
        if matcher.accept(token):
            return i + 1, True
    matcher.fill(words)
    return len(ids), allowed(words, EOS) and allowed(words, 1)


@pytest.mark.parametrize(
    ("kind", "text", "written", "good"),
    [
        ("json_schema", schema(PERSON), '{"name":"a","age":7,"kind":"fox"}', True),
        ("json_schema", schema(PERSON), '{\n  "name": "\u4e2d", "age": 120, "kind": null}', True),
        ("json_schema", schema(PERSON), '{"name":"a","age":121,"kind":"fox"}', False),
        ("json_schema", schema(PERSON), '{"name":"a","age":7}', False),
        ("json_schema", schema(PERSON), '{"name":"a","age":7,"kind":"fox"', False),
        ("json_schema", schema(PERSON), '{"name":' + " " * 40 + '"a","age":7,"kind":7}', False),
        ("json_schema", "{}", '[1, {"a": "\\n"}]', True),
        ("json_schema", '{"type": "object"}', "[]", False),
        ("regex", "a{3,5}b?", "aaaab", True),
        ("regex", "a{3,5}b?", "aa", False),
        ("choice", '["a.b", "c|d"]', "a.b", True),
        ("choice", '["a.b", "c|d"]', "axb", False),
        ("choice", '["a.b", "c|d"]', "c", False),
        ("ebnf", 'start: "x"+ %json {"enum": [1]}', "xx1", True),
        ("ebnf", 'root ::= ("x" | "y")* "."', "xyyx.", True),
        ("ebnf", 'root ::= ("x" | "y")* "."', "xyz.", False),
        ("structural_tag", tags_text("t", TAGS), "free <b> text", True),
        ("structural_tag", tags_text("t", TAGS), "a <f=add>1</f> <f=sub>null.", True),
        ("structural_tag", tags_text("t", TAGS), "a <f=add>3</f>", False),
        ("structural_tag", tags_text("t", TAGS), "a <f=mul>1</f>", False),
        ("structural_tag", tags_text("t", TAGS), "a <f=add>1", False),
    ],
)
def test_what_is_allowed(
    backend: LLGuidance, tokenizer: Tokenizer, kind: Any, text: str, written: str, good: bool
) -> None:
    ids = tokenizer.encode(written, add_special_tokens=False)
    count, may_end = follow(backend, GrammarSpec(kind=kind, text=text), ids)
    assert (count == len(ids) and may_end) is good


def test_matchers_are_apart(backend: LLGuidance) -> None:
    template = backend.compile(GrammarSpec(kind="regex", text="[ab]c"))
    first, second = template.matcher(), template.matcher()
    words = np.zeros(VOCABULARY.num_words, np.int32)
    first.fill(words)
    before = words.copy()
    assert not first.accept(int(np.flatnonzero(_bits(words))[0]))
    second.fill(words)
    assert np.array_equal(words, before)


def _bits(words: Any) -> Any:
    return np.unpackbits(words.view(np.uint8), bitorder="little")


def test_a_token_that_may_not_come_is_an_error(backend: LLGuidance) -> None:
    matcher = backend.compile(GrammarSpec(kind="regex", text="ab")).matcher()
    with pytest.raises(GrammarError):
        matcher.accept(EOS)


def test_references_that_drafts_read_differently(backend: LLGuidance) -> None:
    text = schema({"allOf": [{"$id": "http://a/b/", "$ref": "c.json"}]})
    with pytest.raises(GrammarError, match=r"^\$id beside \$ref"):
        backend.compile(GrammarSpec(kind="json_schema", text=text))


def test_banned_tokens_go_unless_nothing_else_is_left() -> None:
    class Fixed:
        def fill(self, words: Any) -> None:
            words[:] = 0
            words[0] = 0b1010

        def accept(self, token: int) -> bool:
            return False

    fixed: Matcher = Fixed()
    constraint = MatcherConstraint(fixed, 2)
    for banned, left in (((1,), 0b1000), ((1, 40), 0b1000), ((1, 3), 0b1010), ((), 0b1010)):
        constraint.fill(banned)
        assert constraint.words.tolist() == [left, 0]


def test_depth_counts_brackets_outside_strings() -> None:
    assert nesting('{"a]]]": ["{{{", {"\\"[": 1}]}') == 3
    assert nesting("]]]") == 0
    assert nesting("") == 0


@pytest.mark.parametrize("value", [True, {}, "{}", '{"type": "null"}'])
def test_schemas_in_their_forms(value: Any) -> None:
    assert isinstance(schema_text("s", value), str)


def test_parsing_twice_changes_nothing() -> None:
    for given in (
        {"json_schema": PERSON},
        {"choice": ["a", "b"]},
        {"structural_tag": TAGS},
        {"regex": "a", "n": 2},
        {},
    ):
        once = SamplingParams.parse(given)
        assert SamplingParams.parse(once) == once
        assert (once.grammar is None) == (not given)


def test_the_backend_is_imported_when_a_grammar_comes() -> None:
    """An engine that sees none needs no llguidance."""
    code = (
        "import sys, seawall.engine.planning, seawall.scheduler.scheduler; "
        "assert 'llguidance' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_forms_that_are_refused() -> None:
    with pytest.raises(RequestError, match="each structure needs"):
        tags_text("t", {"structures": [{"begin": "a"}], "triggers": ["a"]})
    with pytest.raises(RequestError, match="give a list of strings"):
        choices("c", [1])
    with pytest.raises(RequestError, match="got bytes; give"):
        rules_text("e", b"x")


def opened(store: GrammarStore, spec: GrammarSpec) -> MatcherConstraint:
    found = store.open(spec)
    while found is None:
        store.pause(0.1)
        found = store.open(spec)
    return found


def test_the_store_keeps_what_is_used_and_evicts_the_oldest() -> None:
    store = GrammarStore(VOCABULARY, LLGuidance, 1 << 20)
    specs = [GrammarSpec(kind="regex", text=f"a{{{i}}}") for i in range(1, 40)]
    used = opened(store, specs[0])
    for spec in specs[1:]:
        store.close(opened(store, spec))
        assert store.num_bytes <= 1 << 20
    assert 1 < store.num_grammars < len(specs)
    assert store.open(specs[-1]) is not None
    assert store.open(specs[0]) is not None, "in use all the time"
    assert store.open(specs[1]) is None, "compiled again"
    store.close(used)
    store.shut_down()


def test_a_worker_that_dies_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Compiled] = []
    came = threading.Event()
    store = GrammarStore(VOCABULARY, LLGuidance, 64 << 20)
    take = store._compiler._done

    def note(compiled: Compiled) -> None:
        take(compiled)
        done.append(compiled)
        came.set()

    monkeypatch.setattr(store._compiler, "_done", note)
    hang = schema({"type": "integer", "multipleOf": 9999991})
    spec = GrammarSpec(kind="json_schema", text=hang)
    assert store.open(spec) is None
    process = psutil.Process()
    before = set(process.children())
    while not (fresh := set(process.children()) - before) and not came.is_set():
        time.sleep(0.01)
    time.sleep(0.3)
    for worker in fresh:
        worker.kill()
    assert came.wait(30)
    assert done[0].error is not None
    with pytest.raises(RequestError, match=r"^json_schema: "):
        store.open(spec)
    store.close(opened(store, GrammarSpec(kind="regex", text="fine")))
    store.shut_down()
