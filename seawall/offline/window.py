"""An ordered map with bounded look-ahead, for long lists of work on one engine.

    items --take one when one is handed out--> [ depth calls in threads ] --in order--> results

Reads its input no further than it must, so that a file of any length is worked off in bounded
memory, while the engine always has the next calls waiting. Owns its threads; keeps no result.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_order(work: Callable[[T], R], items: Iterable[T], *, depth: int) -> Iterator[R]:
    """Results of `work(item)` in the order of items, `depth` of them computed at a time.

    What `work` raises is raised in its turn. If the caller stops early, calls that have begun are
    left to themselves and the others are dropped.
    """
    assert depth >= 1
    pending: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(depth, thread_name_prefix="seawall-window")
    try:
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) == depth:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
