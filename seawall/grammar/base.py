"""What a grammar backend is: it compiles a spec to a template, which makes matchers.

A backend is made from a tokenizer and is used by several threads; a matcher belongs to one at a
time.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from seawall.core.grammar import GrammarSpec
from seawall.core.step import I32

# Of one compile and the steps that are tried with it.
COMPILE_SECONDS = 2.0
COMPILE_BYTES = 512 << 20


class GrammarError(Exception):
    """A grammar that the backend refuses; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What a backend must know of the model's tokens.

    Attributes:
        tokenizer_file: of the tokenizers library.
        vocab_size: the model's, which may be larger than the tokenizer's.
        eos_token_ids: what may come where the grammar is satisfied.
    """

    tokenizer_file: Path
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @property
    def num_words(self) -> int:
        """Words of 32 bits, one bit a token."""
        return -(-self.vocab_size // 32)


class Matcher(Protocol):
    """A place in a grammar."""

    def fill(self, words: I32) -> None:
        """Set the bits of the tokens that may come next, clear all others.

        Raises:
            GrammarError: it can't be told, or none may.
        """

    def accept(self, token: int) -> bool:
        """Move past a token; returns whether nothing may follow.

        Raises:
            GrammarError: the token may not come here.
        """


class Template(Protocol):
    """A compiled grammar."""

    def matcher(self) -> Matcher:
        """One at its start."""


class Backend(Protocol):
    """Compiles grammars."""

    def compile(self, spec: GrammarSpec) -> Template:
        """Compile.

        Raises:
            GrammarError: it is malformed, or asks what is not supported.
        """
