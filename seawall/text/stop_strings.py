"""Finds stop strings in text that arrives in pieces, in constant state per stop string.

Each stop string is followed by one integer, the length of its longest beginning that the text so
far ends with (Knuth, Morris and Pratt). A character costs amortised O(1) per stop string, however
long the text or the stop string is; nothing of the text itself is kept here.

    text so far   ... t h e   E N
    stop "END."             [ E N )      progress 2: these two characters must be held back
"""

from collections.abc import Sequence
from dataclasses import dataclass

from seawall.core.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class StopHit:
    """A completed stop string; `end` counts characters of the piece that completed it."""

    stop: str
    end: int


class StopFinder:
    """Follows several stop strings at once; the earliest end wins, then the longest string.

    The one writer is the detokenizer that owns it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise RequestError(
                "stop: an empty string would end every request at once; remove it from the list"
            )
        # Longest first, so that the first string completed at a character is the one to report.
        self._stops = tuple(sorted(dict.fromkeys(stops), key=len, reverse=True))
        self._fallbacks = tuple(_fallbacks(stop) for stop in self._stops)
        self._progress = [0] * len(self._stops)
        self._first = frozenset(stop[0] for stop in self._stops)

    @property
    def num_held(self) -> int:
        """How many of the last characters may still become a stop string."""
        return max(self._progress, default=0)

    def feed(self, piece: str) -> StopHit | None:
        """Advance over a piece of text; None unless a stop string ends in it."""
        if not any(self._progress) and self._first.isdisjoint(piece):
            return None
        for index, char in enumerate(piece):
            completed = self._advance(char)
            if completed is not None:
                return StopHit(stop=completed, end=index + 1)
        return None

    def _advance(self, char: str) -> str | None:
        completed = None
        for which, stop in enumerate(self._stops):
            length = self._progress[which]
            while length and stop[length] != char:
                length = self._fallbacks[which][length - 1]
            if stop[length] == char:
                length += 1
            self._progress[which] = length
            if length == len(stop):
                # The finder is not fed again after a hit, so a full progress is never read.
                completed = completed or stop
        return completed


def _fallbacks(stop: str) -> tuple[int, ...]:
    """For each prefix of `stop`: the longest proper beginning that the prefix also ends with."""
    table = [0]
    length = 0
    for char in stop[1:]:
        while length and stop[length] != char:
            length = table[length - 1]
        if stop[length] == char:
            length += 1
        table.append(length)
    return tuple(table)
