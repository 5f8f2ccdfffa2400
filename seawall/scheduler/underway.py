"""Prefixes that running requests are computing now, so that others can wait for them.

Requests with a common context often arrive together (options of one question, samples of one
dialogue). The first computes the context; the others would compute it again beside it, since the
cache holds only what is done. One that would gain enough stays in the queue until then.

Written by the scheduler. Holds no pages and no locks: if a leader ends early, the next request
takes its place.
"""

from seawall.cache.companions import Wanted
from seawall.cache.prefix import common_length
from seawall.core.request import Request

# A shorter gain is not worth a step's wait.
LEAST_GAIN = 32
_MAX_COMPARED = 64
_Key = tuple[str | None, bytes]


class PrefixesUnderWay:
    """Running requests whose prompts are not all computed, by how their prompts begin."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._leaders: dict[_Key, dict[int, Request]] = {}
        self._keys: dict[int, _Key] = {}

    def enter(self, request: Request) -> None:
        """A request got its seat and begins to compute."""
        if request.num_left >= LEAST_GAIN:
            key = self._key(request)
            self._leaders.setdefault(key, {})[request.seat] = request
            self._keys[request.seat] = key

    def leave(self, request: Request) -> None:
        """Its pages are in the cache, or it has given up its seat; harmless if it led nothing."""
        key = self._keys.pop(request.seat, None)
        if key is not None:
            leaders = self._leaders[key]
            del leaders[request.seat]
            if not leaders:
                del self._leaders[key]

    def has_leader(self, request: Request) -> bool:
        """Whether a running request's prompt begins as this one does."""
        return request.num_tokens >= LEAST_GAIN and self._key(request) in self._leaders

    def worth_waiting(self, request: Request, first: int) -> bool:
        """Whether a running request will soon have most of what this one needs computed.

        Soon: at least a quarter of what the other still computes is gained. Most: at least half of
        what this one would compute, which begins at position `first`.
        """
        mine = request.tokens[: request.num_tokens]
        leaders = list(self._leaders.get(self._key(request), {}).values())
        for leader in leaders[-_MAX_COMPARED:]:
            if not _leaves_records(leader, request, first):
                continue
            shared = common_length(mine, leader.tokens[: leader.num_tokens])
            gain = shared // self._page_size * self._page_size - first
            if gain >= LEAST_GAIN and 2 * gain >= len(mine) - first and 4 * gain >= leader.num_left:
                return True
        return False

    def _key(self, request: Request) -> _Key:
        return request.extra_key, request.tokens[:LEAST_GAIN].tobytes()


def _leaves_records(leader: Request, request: Request, first: int) -> bool:
    """Whether the leader's scores answer what the other wants of its prompt from `first` on."""
    if max(request.scored, first) >= request.last_scored_position:
        return True
    start = leader.logprob.start_len
    return (
        leader.logprob.wants_prompt
        and start is not None
        and max(start, 1) - 1 <= first
        and Wanted.of_prompt(leader.logprob).answers(Wanted.of_prompt(request.logprob))
    )
