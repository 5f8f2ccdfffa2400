"""The text of one token after another, in whole characters.

Two ways, chosen once by the tokenizer's decoder:

- byte-level vocabularies (GPT-2, Llama 3, Qwen): a token is bytes, the text is their UTF-8, and a
  standard incremental decoder is exact in constant state;
- all others (SentencePiece with byte fallback, WordPiece): a token's text depends on the one
  before it, so a window of the last tokens is decoded twice, without and with the new ones, and
  the difference is the new text.

The one known difference to decoding all ids at once: with byte fallback, a run of byte tokens
that turns out not to be UTF-8 is replaced as a whole there, while here the whole characters at its
beginning have been given out already and stay.
"""

import codecs
from typing import Protocol

from seawall.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# A character is at most four bytes: a window that still ends in U+FFFD after four new tokens ends
# in bytes that will never become a character.
_MAX_HELD_TOKENS = 4
# Tokens without text before the first token with some are kept (a decoder may strip the first
# space of all), but only so many.
_MAX_WINDOW_TOKENS = 16


class TextStream(Protocol):
    """Turns ids into text; `push` may hold text back, `finish` gives out the rest."""

    def push(self, token_id: int) -> str:
        """Take one id and return the text that is certain now."""
        ...

    def finish(self) -> str:
        """Return the rest; half a character becomes U+FFFD."""
        ...


def open_stream(
    tokenizer: Tokenizer, skip_special_tokens: bool, spaces_between_special_tokens: bool
) -> TextStream:
    """The stream that fits the tokenizer's decoder."""
    if tokenizer.is_byte_level:
        return ByteStream(tokenizer, skip_special_tokens)
    return WindowStream(tokenizer, skip_special_tokens, spaces_between_special_tokens)


class ByteStream:
    """Byte-level vocabularies: token bytes through an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """See TextStream."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """See TextStream."""
        return self._utf8.decode(b"", final=True)


class WindowStream:
    """Any decoder: the difference between two decodings of a small window.

    window = [0, shown) tokens whose text is out, kept as context | [shown, end) held back
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._join_special_tokens = not spaces_between_special_tokens
        self._window: list[int] = []
        self._num_shown = 0
        self._shown_text = ""
        self._after_special = False

    def push(self, token_id: int) -> str:
        """See TextStream."""
        special = self._tokenizer.is_special(token_id)
        if (special and self._skip_special_tokens) or not self._tokenizer.knows(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and len(self._window) - self._num_shown < _MAX_HELD_TOKENS:
            return ""
        delta = self._advance(text)
        joined = special and self._after_special and self._join_special_tokens
        self._after_special = special
        return delta.removeprefix(" ") if joined else delta

    def finish(self) -> str:
        """See TextStream."""
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        """Give out the held tokens; they become the context of the next ones."""
        held = self._window[self._num_shown :]
        if text.startswith(self._shown_text):
            delta = text[len(self._shown_text) :]
        else:
            # The new tokens spoilt the context (a byte run that is not UTF-8): they stand alone.
            delta = self._decode(held)
        if delta:
            self._window = held
        elif self._shown_text:
            # Tokens without text are no context for the next one: keep the one before them.
            self._window = self._window[: self._num_shown]
        else:
            self._window = self._window[-_MAX_WINDOW_TOKENS:]
        self._num_shown = len(self._window)
        self._shown_text = self._decode(self._window)
        return delta

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
