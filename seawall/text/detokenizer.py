"""Token ids to text as they arrive: whole characters only, stop strings cut, bounded state.

A request owns one IncrementalDetokenizer. Ids go through three stages, one id at a time:

    id --> piece of text --> stop strings --> delta
           (text/stream.py:    (text/stop_strings.py: holds back what
           holds back half     may be the beginning of a stop string)
           a character)

What is held back is at most three tokens and one stop string, so the state of a request does not
grow with its text. It owns no text: the caller joins the deltas if it wants the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from seawall.text.stop_strings import StopFinder, StopHit
from seawall.text.stream import open_stream
from seawall.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatch:
    """The request ended here: only its first `num_tokens` ids count, `matched` is the string."""

    num_tokens: int
    matched: str


class IncrementalDetokenizer:
    """The text of one request; its one writer is the task that receives the request's ids.

    The deltas of all `push` calls and of `finish`, joined, are `tokenizer.decode` of all ids, or
    the part of it up to a stop string. A token that ended the request by its id (EOS, a stop id)
    is not text: do not push it, unless the request asked for it with `no_stop_trim`.

    Args:
        tokenizer: the model's tokenizer.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: keep the space that some decoders put between two of them.
        stop: strings that end the request when they appear in its text.
        no_stop_trim: keep the stop string in the text.
        min_tokens: the text of so many first tokens takes no part in a match.

    Attributes:
        match: the stop string found, None so far.
        num_tokens: ids taken; after a match no more are.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        stop: Sequence[str] = (),
        no_stop_trim: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._stream = open_stream(tokenizer, skip_special_tokens, spaces_between_special_tokens)
        self._finder = StopFinder(stop) if stop else None
        self._no_stop_trim = no_stop_trim
        self._min_tokens = min_tokens
        self._held = ""
        self.match: StopMatch | None = None
        self.num_tokens = 0

    def push(self, ids: Sequence[int]) -> str:
        """Take ids in arrival order and return the text that is certain now."""
        pieces = []
        for token_id in ids:
            if self.match is not None:
                break
            self.num_tokens += 1
            pieces.append(self._take(self._stream.push(token_id)))
        return "".join(pieces)

    def finish(self) -> str:
        """Return what was still held back; an incomplete character becomes U+FFFD."""
        if self.match is not None:
            return ""
        rest = self._held + self._stream.finish()
        self._held = ""
        return rest

    def _take(self, piece: str) -> str:
        if not piece or self._finder is None or self.num_tokens <= self._min_tokens:
            return piece
        hit = self._finder.feed(piece)
        text = self._held + piece
        if hit is not None:
            return self._cut(text, len(self._held) + hit.end, hit)
        # The finder holds back a suffix of `text`: the held part always began inside it.
        certain = len(text) - self._finder.num_held
        self._held = text[certain:]
        return text[:certain]

    def _cut(self, text: str, end: int, hit: StopHit) -> str:
        self.match = StopMatch(num_tokens=self.num_tokens, matched=hit.stop)
        self._held = ""
        return text[:end] if self._no_stop_trim else text[: end - len(hit.stop)]
