"""Companions: logprobs that lie beside the KV of a token and go wherever its page goes.

Owns, for every KV slot, the record of the token in it given the tokens before it; a request that
asks for logprobs of a cached prefix is answered from here, and only what has no record is computed
again. It is on the host: whether a position must be computed is settled while a step is planned,
and scores come to the host anyway. It knows neither requests nor trees: pages are named by id, so
splits, locks and evictions need nothing of it. Written by leases (`clear`, `merge`) and by the
scheduler (`record`).

    plain    three arrays [pages, page_size], 12 bytes a slot, always there: the raw logprob (NaN:
             no record), the best id (-1: no record) and its raw logprob
    extras   page -> entries with more best ids, given ids or a temperature, [page_size, ...] each;
             at most `extra_bytes` in all, the pages not used for longest go first

A record stays as it was first written, so that the same question gets the same bits again. Records
are valid for one set of weights: new weights come with an empty cache, and a page's records are
cleared when the page is given out anew.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from seawall.cache.pages import PageIds
from seawall.core.params import LogprobSpec
from seawall.core.step import F32, I32, I64, Scores

PLAIN_SLOT_BYTES = 12
EXTRA_ENTRY_BYTES = 1024  # one entry: object, four array headers, its place in the order
KIND_BYTES = 512  # one question, shared by all entries made for it, besides its ids
ID_BYTES = 40  # one id of its list: a pointer and an int
_MAX_ENTRIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which scores of a position are asked for; at temperature 1 they are raw."""

    temperature: float
    top_k: int
    token_ids: tuple[int, ...]

    @classmethod
    def of_prompt(cls, spec: LogprobSpec) -> "Wanted":
        """What a request wants of its prompt."""
        return cls(temperature=spec.prompt_temperature, top_k=spec.top_k, token_ids=spec.token_ids)

    def answers(self, asked: "Wanted") -> bool:
        """Whether scores made for this one have all that `asked` wants."""
        return (
            self.temperature == asked.temperature
            and self.top_k >= asked.top_k
            and asked.token_ids in ((), self.token_ids)
        )

    @property
    def is_plain(self) -> bool:
        """Whether the record of every slot has it all."""
        return self.temperature == 1.0 and self.top_k <= 1 and not self.token_ids


class _Entry:
    """Scores of one page beyond the plain record; logprobs NaN where there are none."""

    __slots__ = ("given", "logprobs", "top_ids", "top_logprobs", "wanted")

    def __init__(self, wanted: Wanted, page_size: int) -> None:
        self.wanted = wanted
        self.logprobs: F32 = np.full(page_size, np.nan, np.float32)
        self.top_ids: I32 = np.empty((page_size, wanted.top_k), np.int32)
        self.top_logprobs: F32 = np.empty((page_size, wanted.top_k), np.float32)
        self.given: F32 = np.empty((page_size, len(wanted.token_ids)), np.float32)

    def scores(self) -> Scores:
        """All of the page, NaN where there is no record."""
        return Scores(
            logprobs=self.logprobs,
            top_ids=self.top_ids.astype(np.int64),
            top_logprobs=self.top_logprobs,
            token_logprobs=self.given,
        )

    def write(self, at: int, scores: Scores, part: slice) -> None:
        """Fill positions from `at` on that have no record yet."""
        count = part.stop - part.start
        free = np.flatnonzero(np.isnan(self.logprobs[at : at + count]))
        into, source = at + free, part.start + free
        self.logprobs[into] = scores.logprobs[source]
        self.top_ids[into] = scores.top_ids[source]
        self.top_logprobs[into] = scores.top_logprobs[source]
        self.given[into] = scores.token_logprobs[source]


class CompanionStore:
    """Records by page and position; see the module's docstring.

    Args:
        num_pages: of the pool.
        page_size: slots of a page.
        extra_bytes: most bytes that extras may take.
    """

    def __init__(self, num_pages: int, page_size: int, *, extra_bytes: int) -> None:
        self.page_size = page_size
        self._whole_page = slice(0, page_size)
        self._plain_bytes = num_pages * page_size * PLAIN_SLOT_BYTES
        self._extra_cap = extra_bytes
        self._logprobs: F32 = np.full((num_pages, page_size), np.nan, np.float32)
        self._best_ids: I32 = np.full((num_pages, page_size), -1, np.int32)
        self._best_logprobs: F32 = np.empty((num_pages, page_size), np.float32)
        self._extras: OrderedDict[int, list[_Entry]] = OrderedDict()
        # One object for all entries of a kind, and how many there are: lists of ids can be long.
        self._kinds: dict[Wanted, tuple[Wanted, int]] = {}
        self._extra_bytes = 0
        self._extra_peak = 0

    @property
    def num_bytes(self) -> int:
        """Bytes held now: 12 a slot and the extras."""
        return self._plain_bytes + self._extra_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes ever held."""
        return self._plain_bytes + self._extra_peak

    def reset(self) -> None:
        """Forget everything: the cache is empty, or the weights are others."""
        self._logprobs.fill(np.nan)
        self._best_ids.fill(-1)
        for page in list(self._extras):
            self._drop_page(page)

    def borrow(self, num_bytes: int) -> bool:
        """Count scores that wait for their page among the extras; False if the cap has no room."""
        if num_bytes > self._extra_cap:
            return False
        while self._extra_bytes + num_bytes > self._extra_cap:
            if not self._extras:
                return False
            self._drop_page(next(iter(self._extras)))
        self._extra_bytes += num_bytes
        self._extra_peak = max(self._extra_peak, self._extra_bytes)
        return True

    def give_back(self, num_bytes: int) -> None:
        """Undo `borrow`."""
        self._extra_bytes -= num_bytes

    def clear(self, page_ids: PageIds) -> None:
        """Forget all about these pages: they are given out anew."""
        self._logprobs[page_ids] = np.nan
        self._best_ids[page_ids] = -1
        if self._extras:
            for page in page_ids.tolist():
                self._drop_page(page)

    def merge(self, sources: PageIds, targets: PageIds) -> None:
        """Add what is known of `sources` to `targets`, page by page the same tokens."""
        lacks = np.isnan(self._logprobs[targets])
        self._logprobs[targets] = np.where(lacks, self._logprobs[sources], self._logprobs[targets])
        lacks = self._best_ids[targets] < 0
        for array in (self._best_ids, self._best_logprobs):
            array[targets] = np.where(lacks, array[sources], array[targets])
        if not self._extras:
            return
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            for entry in list(self._extras.get(source, ())):
                self._write_extra(target, entry.wanted, 0, entry.scores(), self._whole_page)

    def record(self, page_ids: PageIds, start: int, scores: Scores, wanted: Wanted) -> None:
        """Keep scores of the tokens at positions [start, start + n).

        Args:
            page_ids: of the sequence, in position order; positions beyond them are passed over.
            start: position of the first token scored.
            scores: of n consecutive tokens, as `wanted` says.
            wanted: what was asked.
        """
        count = min(len(scores.logprobs), len(page_ids) * self.page_size - start)
        if count <= 0:
            return
        if wanted.temperature == 1.0:
            self._record_plain(self._slots(page_ids, start, count), scores, wanted, count)
        if not wanted.is_plain:
            for page, at, part in self._parts(page_ids, start, start + count):
                self._write_extra(page, wanted, at, scores, part)

    def known_until(self, page_ids: PageIds, start: int, end: int, wanted: Wanted) -> int:
        """End of the leading part of positions [start, end) that `read` can answer."""
        if end <= start:
            return start
        if wanted.is_plain:
            slots = self._slots(page_ids, start, end - start)
            lacks = np.isnan(self._logprobs.ravel()[slots])
            if wanted.top_k:
                lacks |= self._best_ids.ravel()[slots] < 0
            return start + (int(lacks.argmax()) if lacks.any() else end - start)
        for page, at, part in self._parts(page_ids, start, end):
            lacks = np.ones(part.stop - part.start, np.bool_)
            for entry in self._extras.get(page, ()):
                if entry.wanted.answers(wanted):
                    lacks &= np.isnan(entry.logprobs[at : at + len(lacks)])
            if lacks.any():
                return start + int(part.start + lacks.argmax())
        return end

    def read(self, page_ids: PageIds, start: int, end: int, wanted: Wanted) -> Scores:
        """Scores of positions [start, end), all of which are known."""
        count = end - start
        top_ids: I64 = np.empty((count, wanted.top_k), np.int64)
        top_logprobs: F32 = np.empty((count, wanted.top_k), np.float32)
        given: F32 = np.empty((count, len(wanted.token_ids)), np.float32)
        if wanted.is_plain:
            slots = self._slots(page_ids, start, count)
            logprobs = self._logprobs.ravel()[slots]
            if wanted.top_k:
                top_ids[:, 0] = self._best_ids.ravel()[slots]
                top_logprobs[:, 0] = self._best_logprobs.ravel()[slots]
        else:
            logprobs = np.full(count, np.nan, np.float32)
            for page, at, part in self._parts(page_ids, start, end):
                self._extras.move_to_end(page)
                for entry in self._extras[page]:
                    if not entry.wanted.answers(wanted):
                        continue
                    here = entry.logprobs[at : at + part.stop - part.start]
                    take = np.flatnonzero(np.isnan(logprobs[part]) & ~np.isnan(here))
                    into, source = part.start + take, at + take
                    logprobs[into] = entry.logprobs[source]
                    top_ids[into] = entry.top_ids[source, : wanted.top_k]
                    top_logprobs[into] = entry.top_logprobs[source, : wanted.top_k]
                    if wanted.token_ids:
                        given[into] = entry.given[source]
        assert not np.isnan(logprobs).any()
        return Scores(
            logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs, token_logprobs=given
        )

    def _record_plain(
        self, slots: npt.NDArray[np.int64], scores: Scores, wanted: Wanted, count: int
    ) -> None:
        lacks = np.isnan(self._logprobs.ravel()[slots])
        self._logprobs.ravel()[slots[lacks]] = scores.logprobs[:count][lacks]
        if wanted.top_k:
            lacks = self._best_ids.ravel()[slots] < 0
            self._best_ids.ravel()[slots[lacks]] = scores.top_ids[:count, 0][lacks]
            self._best_logprobs.ravel()[slots[lacks]] = scores.top_logprobs[:count, 0][lacks]

    def _slots(self, page_ids: PageIds, start: int, count: int) -> npt.NDArray[np.int64]:
        """Index of each position in the flat arrays."""
        positions = np.arange(start, start + count)
        pages = page_ids[positions // self.page_size].astype(np.int64)
        return pages * self.page_size + positions % self.page_size

    def _parts(self, page_ids: PageIds, start: int, end: int) -> Iterator[tuple[int, int, slice]]:
        """Positions page by page: its id, where in it they begin, and their place in the range."""
        position = start
        while position < end:
            page, at = divmod(position, self.page_size)
            stop = min(position + self.page_size - at, end)
            yield int(page_ids[page]), at, slice(position - start, stop - start)
            position = stop

    def _write_extra(self, page: int, wanted: Wanted, at: int, scores: Scores, part: slice) -> None:
        entries = self._extras.get(page, [])
        entry = next((e for e in entries if e.wanted == wanted), None)
        if entry is None:
            entry = self._new_entry(page, wanted)
            if entry is None:
                return
        entry.write(at, scores, part)
        self._extras.move_to_end(page)

    def _new_entry(self, page: int, wanted: Wanted) -> _Entry | None:
        """Room for one more; None if the cap can't hold it."""
        entries = self._extras.get(page, [])
        if len(entries) == _MAX_ENTRIES:
            self._release(entries.pop(0).wanted)
        while self._extra_bytes + self._cost(wanted) > self._extra_cap:
            if not self._extras:
                return None
            self._drop_page(next(iter(self._extras)))
        kind, count = self._kinds.get(wanted, (wanted, 0))
        self._extra_bytes += self._cost(wanted)
        self._kinds[kind] = (kind, count + 1)
        self._extra_peak = max(self._extra_peak, self._extra_bytes)
        entry = _Entry(kind, self.page_size)
        self._extras.setdefault(page, []).append(entry)
        return entry

    def _drop_page(self, page: int) -> None:
        for entry in self._extras.pop(page, ()):
            self._release(entry.wanted)

    def _release(self, wanted: Wanted) -> None:
        kind, count = self._kinds.pop(wanted)
        if count > 1:
            self._kinds[kind] = (kind, count - 1)
        self._extra_bytes -= self._cost(wanted)

    def _cost(self, wanted: Wanted) -> int:
        """Bytes that one more entry of this kind takes, or the last one gives back."""
        a_slot = 4 + 8 * wanted.top_k + 4 * len(wanted.token_ids)
        first = 0 if wanted in self._kinds else KIND_BYTES + ID_BYTES * len(wanted.token_ids)
        return EXTRA_ENTRY_BYTES + self.page_size * a_slot + first
