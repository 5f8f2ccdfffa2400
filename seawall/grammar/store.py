"""Compiled grammars in an LRU counted in bytes, and the constraints of the samples that use them.

    charged to "grammars"   every template, used or not, and every constraint
                            + what the largest may take, for each that is being compiled

What a template and a matcher take was measured in the worker process: what the C library gave out
for them, the matcher followed for some steps. A matcher may grow later on, so it counts a few times
what it took. A template that a sample uses is never evicted; when
nothing can be evicted, grammars wait to be compiled and samples for their seats.
"""

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from seawall.core.errors import RequestError
from seawall.core.grammar import Constraint, GrammarSpec
from seawall.grammar.base import Backend, Template, Vocabulary
from seawall.grammar.compiler import Compiled, Compiler
from seawall.grammar.filler import Filler, MatcherConstraint

# The largest grammar takes this share of the cap.
_LARGEST_SHARE = 8
_FLOOR_BYTES = 16 << 10
_GROWTH = 4
# How long a refusal is remembered: for the samples that wait for it, not for good.
_REFUSED_SECONDS = 5.0
_MOST_REFUSALS = 64


@dataclass(slots=True)
class _Entry:
    template: Template
    num_bytes: int
    matcher_bytes: int
    users: int = 0


class GrammarStore:
    """See `core.grammar.Grammars`. The core thread is its only caller.

    Args:
        vocabulary: of the model.
        make_backend: makes the backend when it is first needed.
        cap_bytes: of the host account.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        make_backend: Callable[[Vocabulary], Backend],
        cap_bytes: int,
    ) -> None:
        self._num_words = vocabulary.num_words
        self._cap_bytes = cap_bytes
        self._entries: OrderedDict[GrammarSpec, _Entry] = OrderedDict()
        self._users: dict[MatcherConstraint, _Entry] = {}
        self._compiling: set[GrammarSpec] = set()
        self._refused: OrderedDict[GrammarSpec, tuple[str, float]] = OrderedDict()
        self._results: queue.SimpleQueue[Compiled] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._compiler = Compiler(vocabulary, make_backend, self._done)
        self._filler = Filler(self._wake)
        self.num_bytes = 0
        self.peak_bytes = 0

    @property
    def _largest(self) -> int:
        """The most that one grammar and its matcher may take."""
        return self._cap_bytes // _LARGEST_SHARE

    @property
    def num_grammars(self) -> int:
        """Compiled grammars that are kept."""
        return len(self._entries)

    def open(self, spec: GrammarSpec) -> MatcherConstraint | None:
        """See the protocol."""
        self._take_results()
        entry = self._entries.get(spec)
        if entry is None:
            self._ask(spec)
            return None
        if not self._make_room(entry.matcher_bytes):
            return None
        self._charge(entry.matcher_bytes)
        self._entries.move_to_end(spec)
        entry.users += 1
        made = MatcherConstraint(entry.template.matcher(), self._num_words)
        self._users[made] = entry
        return made

    def prepare(self, spec: GrammarSpec) -> None:
        """See the protocol."""
        self._take_results()
        if spec not in self._entries and spec not in self._refused:
            self._ask(spec)

    def close(self, constraint: Constraint) -> None:
        """See the protocol."""
        assert isinstance(constraint, MatcherConstraint)
        entry = self._users.pop(constraint)
        entry.users -= 1
        self._charge(-entry.matcher_bytes)

    def fill(self, constraint: Constraint, banned: Sequence[int]) -> None:
        """See the protocol."""
        assert isinstance(constraint, MatcherConstraint)
        self._filler.submit(constraint, banned)

    def wait(self, constraints: Sequence[Constraint], seconds: float) -> None:
        """See the protocol."""
        self._filler.wait(constraints, seconds)  # type: ignore[arg-type]  # all made by `open`

    def pause(self, seconds: float) -> None:
        """See the protocol."""
        if self._results.empty():
            self._wake.wait(seconds)
        self._wake.clear()

    def shut_down(self) -> None:
        """End threads and processes."""
        self._compiler.close()
        self._filler.close()

    def _done(self, compiled: Compiled) -> None:
        """On a compiling thread."""
        self._results.put(compiled)
        self._wake.set()

    def _ask(self, spec: GrammarSpec) -> None:
        """Have it compiled, unless that is under way, was refused, or there is no room yet."""
        if spec in self._compiling:
            return
        refusal = self._refused.get(spec)
        if refusal is not None:
            reason, until = refusal
            if time.monotonic() < until:
                raise RequestError(f"{spec.kind}: {reason}")
            del self._refused[spec]
        if self._make_room(self._largest):
            self._charge(self._largest)
            self._compiling.add(spec)
            self._compiler.submit(spec)

    def _take_results(self) -> None:
        while not self._results.empty():
            found = self._results.get()
            self._compiling.discard(found.spec)
            self._charge(-self._largest)
            num_bytes = _FLOOR_BYTES + found.template_bytes + 4 * len(found.spec.text)
            matcher_bytes = _FLOOR_BYTES + _GROWTH * found.matcher_bytes + 4 * self._num_words
            reason = found.error
            if reason is None and num_bytes + matcher_bytes > self._largest:
                reason = (
                    f"takes {num_bytes + matcher_bytes} bytes, the limit is {self._largest}; "
                    "simplify it, or raise host_memory_budget"
                )
            if reason is not None:
                self._refused[found.spec] = (reason, time.monotonic() + _REFUSED_SECONDS)
                if len(self._refused) > _MOST_REFUSALS:
                    self._refused.popitem(last=False)
                continue
            assert found.template is not None
            self._charge(num_bytes)
            self._entries[found.spec] = _Entry(found.template, num_bytes, matcher_bytes)

    def _make_room(self, num_bytes: int) -> bool:
        """Evict what is not used, the least recently opened first, until so much fits."""
        if self.num_bytes + num_bytes <= self._cap_bytes:
            return True
        for spec in [spec for spec, entry in self._entries.items() if not entry.users]:
            if self.num_bytes + num_bytes <= self._cap_bytes:
                break
            self._charge(-self._entries.pop(spec).num_bytes)
        return self.num_bytes + num_bytes <= self._cap_bytes

    def _charge(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
