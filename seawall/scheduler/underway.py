"""Prefixes that running requests are computing now, so that others can wait for them.

Requests with a common context often arrive together (options of one question, samples of one
dialogue). The first computes the context; the others would compute it again beside it, since the
cache holds only what is done. One that shares enough stays in the queue until then.

Written by the scheduler. Holds no pages and no locks: if the first one ends early, the next takes
its place.
"""

from seawall.cache.prefix import common_length
from seawall.core.request import Request, Status

# Below this a shared prefix is not worth a step's wait.
LEAST_SHARED_TOKENS = 32
_Key = tuple[str | None, int, bytes]


class PrefixesUnderWay:
    """The first tokens that each prefilling request adds to the cache."""

    def __init__(self, page_size: int) -> None:
        self._num_tokens = -(-LEAST_SHARED_TOKENS // page_size) * page_size
        self._leaders: dict[_Key, Request] = {}
        self._keys: dict[int, _Key] = {}

    def enter(self, request: Request, cache_key: str | None, num_cached: int) -> None:
        """A request got its seat and computes what follows its `num_cached` cached tokens."""
        key = self._key(request, cache_key, num_cached)
        if key is not None and key not in self._leaders:
            self._leaders[key] = request
            self._keys[request.seat] = key

    def leave(self, request: Request) -> None:
        """Its pages are in the cache, or it has given up its seat; harmless if it led nothing."""
        key = self._keys.pop(request.seat, None)
        if key is not None:
            del self._leaders[key]

    def worth_waiting(self, request: Request, cache_key: str | None, num_cached: int) -> bool:
        """Whether a running request will soon have most of what this one needs computed.

        Soon: at least a quarter of what the other computes is shared. Most: at least half of what
        this one would compute.
        """
        key = self._key(request, cache_key, num_cached)
        leader = None if key is None else self._leaders.get(key)
        if leader is None or leader is request:
            return False
        assert leader.status is Status.RUNNING
        mine, other = request.tokens[: request.num_tokens], leader.tokens[: leader.num_tokens]
        # Other tokens may stand in front of the same page.
        shared = common_length(mine, other) - num_cached
        return (
            shared >= self._num_tokens
            and 2 * shared >= len(mine) - num_cached
            and 4 * shared >= len(other) - num_cached
        )

    def _key(self, request: Request, cache_key: str | None, num_cached: int) -> _Key | None:
        end = num_cached + self._num_tokens
        if end > request.num_tokens:
            return None
        return cache_key, num_cached, request.tokens[num_cached:end].tobytes()
