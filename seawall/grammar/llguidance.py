"""The llguidance backend: JSON schemas, regular expressions, Lark and EBNF rules, choices.

Whitespace between JSON tokens is bounded, so that a model can't fill its output with it. Keywords
of JSON schema that llguidance does not know are refused. Its errors come as text, panics as an
exception that is no Exception; both leave here as GrammarError.
"""

import json
import re

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from seawall.core.grammar import GrammarSpec
from seawall.core.step import I32
from seawall.grammar.base import GrammarError, Vocabulary

_META = re.compile(r"[\\.+*?()|\[\]{}^$/&~#\-]")
_AFTER = re.compile(r"<state>|<non-verbose/>|\n *\d+ \| ")
_MESSAGE_CHARS = 300
# A state is 1 to 2 KiB: what one matcher may grow to.
_MAX_LEXER_STATES = 20_000
# Room for an indented line of some depth.
_JSON = {"whitespace_pattern": r"\n? {0,8}", "lenient": False}


class _Panics:
    """Turns a panic of native code, and its ValueErrors, into GrammarError."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None and (kind.__name__ == "PanicException" or issubclass(kind, ValueError)):
            raise GrammarError(_line(str(error))) from None


_PANICS = _Panics()


class LLGuidanceMatcher:
    """See `grammar.base.Matcher`."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def fill(self, words: I32) -> None:
        """Native code, without the interpreter's lock."""
        with _PANICS:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise GrammarError(_line(self._matcher.get_error()))
        if not words.any():
            raise GrammarError("no token may come next")

    def accept(self, token: int) -> bool:
        """Native code."""
        with _PANICS:
            accepted = self._matcher.consume_token(token)
        if not accepted:
            raise GrammarError(_line(self._matcher.get_error()))
        return self._matcher.is_stopped()


class LLGuidanceTemplate:
    """See `grammar.base.Template`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def matcher(self) -> LLGuidanceMatcher:
        """A copy shares what is compiled."""
        return LLGuidanceMatcher(self._matcher.deep_copy())


class LLGuidance:
    """See `grammar.base.Backend`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        text = vocabulary.tokenizer_file.read_text(encoding="utf-8")
        with _PANICS:
            self._tokenizer = LLTokenizer(
                text, n_vocab=vocabulary.vocab_size, eos_token=list(vocabulary.eos_token_ids)
            )
        self._limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)

    def compile(self, spec: GrammarSpec) -> LLGuidanceTemplate:
        """Compile; in native code, without the interpreter's lock."""
        with _PANICS:
            matcher = LLMatcher(
                self._tokenizer, self._source(spec), log_level=0, limits=self._limits
            )
        if matcher.is_error():
            raise GrammarError(_line(matcher.get_error()))
        return LLGuidanceTemplate(matcher)

    def _source(self, spec: GrammarSpec) -> str:
        """The grammar in llguidance's own form."""
        if spec.kind == "structural_tag":
            return self._tags(json.loads(spec.text))
        return _source(spec)

    def _tags(self, tags: list[tuple[str, str, dict[str, object], str]]) -> str:
        """Free text with tags; a trigger in angle brackets may be one special token."""
        special = [self._is_special(trigger) for trigger, _, _, _ in tags]
        return StructTag.to_grammar(
            [
                StructTag(trigger=trigger, begin=begin, grammar=schema, end=end)
                for trigger, begin, schema, end in tags
            ],
            assume_special=all(special),
        )

    def _is_special(self, trigger: str) -> bool:
        ids = self._tokenizer.tokenize_str(trigger, parse_special=True)
        return len(ids) == 1 and self._tokenizer.is_special_token(ids[0])


def _source(spec: GrammarSpec) -> str:
    """Grammars of one part."""
    if spec.kind == "json_schema":
        _check_references(json.loads(spec.text))
        return LLMatcher.grammar_from_json_schema(spec.text, overrides=_JSON)  # type: ignore[arg-type]
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.text)
    if spec.kind == "choice":
        options = (_META.sub(r"\\\g<0>", option) for option in json.loads(spec.text))
        return LLMatcher.grammar_from_regex("|".join(f"({option})" for option in options))
    return LLMatcher.grammar_from_lark(any_to_lark(spec.text))


def _check_references(schema: object) -> None:
    """Refuse what drafts read differently: $id beside $ref moves the base in later ones."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            if isinstance(part.get("$ref"), str) and isinstance(part.get("$id"), str):
                raise GrammarError(
                    "$id beside $ref: drafts differ in its meaning; move one of them"
                )
            parts += part.values()
        elif isinstance(part, list):
            parts += part


def _line(text: str) -> str:
    """The message alone: what follows it is the grammar again, and the matcher's state."""
    return " ".join(_AFTER.split(text)[0].split())[:_MESSAGE_CHARS] or "refused"
