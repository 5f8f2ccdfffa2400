"""Whom to send back to the queue when pages run out.

A retracted request gives its pages to the tree; those that are evicted before it runs again must be
computed again. So the cheapest victim is the one whose end frees few pages, but enough of them. The
request that was served first is never a victim while another is there: it runs to its end, and so,
one after the other, do all. Owns no state.
"""

from collections.abc import Sequence

from seawall.cache.lease import Lease
from seawall.core.request import Request


def choose_victim(
    candidates: Sequence[tuple[Request, Lease]], num_pages: int
) -> tuple[Request, Lease]:
    """The cheapest of some running requests, given in the order in which they are served.

    Args:
        candidates: those that may be sent back, at least one.
        num_pages: how many pages would be of use; who frees fewer is taken only if all do.
    """
    gains = [(lease.gain(), -place) for place, (_, lease) in enumerate(candidates)]
    enough = [gain for gain in gains if gain[0] >= num_pages]
    # Of equal ones the last in order goes; if nobody frees enough, the one that frees most.
    best = min(enough) if enough else max(gains, key=lambda gain: (gain[0], -gain[1]))
    return candidates[-best[1]]
