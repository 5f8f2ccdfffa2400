"""The seam between leases and prefix caches: keys, results and the PrefixCache protocol.

A prefix cache maps token prefixes to the pages that hold their KV. It is not the owner table (that
is the page ledger) and it holds no tensors. Only whole pages are ever stored or matched.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from seawall.cache.node import TreeNode
from seawall.cache.pages import PageIds

_FIRST_BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixKey:
    """Token ids that a prefix is looked up by; slicing makes a view, never a copy.

    Attributes:
        tokens: int32 [num_tokens], not changed by anybody while the key is in use.
        extra_key: what else the KV depends on (adapter, tenant, weights); None for nothing.
    """

    tokens: npt.NDArray[np.int32]
    extra_key: str | None = None

    def __post_init__(self) -> None:
        assert self.tokens.dtype == np.int32, self.tokens.dtype
        assert self.tokens.ndim == 1, self.tokens.shape

    def __len__(self) -> int:
        return len(self.tokens)

    def head(self, num_tokens: int) -> "PrefixKey":
        """The key of the first tokens."""
        return PrefixKey(tokens=self.tokens[:num_tokens], extra_key=self.extra_key)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Match:
    """The longest stored prefix of a key; lock `node` before the next call that evicts.

    Attributes:
        page_ids: the cache's pages of that prefix, in order.
        num_tokens: how long it is.
        num_asked: how long the key was.
        node: the node that the prefix ends in.
    """

    page_ids: PageIds
    num_tokens: int
    num_asked: int
    node: TreeNode


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InsertResult:
    """What the cache holds of a key after an insert.

    Attributes:
        node: the node that the stored prefix ends in.
        page_ids: the cache's pages of that prefix, in order. Pages [0, num_existing) were there
            before; [num_existing, len) have just been taken over from the caller.
        num_existing: the caller's own copies in front of it are duplicates, and still the caller's.
    """

    node: TreeNode
    page_ids: PageIds
    num_existing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Sizes now (first three), the most there ever were, and totals since the start."""

    evictable_pages: int
    protected_pages: int
    num_nodes: int
    most_nodes: int
    most_pages: int
    num_lookups: int
    lookup_tokens: int
    hit_tokens: int
    evicted_pages: int
    node_visits: int


class PrefixCache(Protocol):
    """Prefixes to pages. Owns the pages it stores; written by leases only."""

    @property
    def owner(self) -> int:
        """Who the cached pages belong to in the ledger."""

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could free now; O(1)."""

    def match(self, key: PrefixKey) -> Match:
        """Find the longest stored prefix, in whole pages; order and totals stay as they are."""

    def measure(self, key: PrefixKey) -> int:
        """Tokens that `match` would find; changes nothing."""

    def use(self, match: Match) -> None:
        """Somebody goes on from this match, whose node is locked: it counts, and it is renewed."""

    def lock(self, node: TreeNode) -> None:
        """Protect the prefix that ends in `node` from eviction, until as many unlocks."""

    def unlock(self, node: TreeNode) -> None:
        """Undo one lock."""

    def insert(
        self, key: PrefixKey, page_ids: PageIds, owner: int, *, priority: int = 0
    ) -> InsertResult:
        """Store the whole pages of a key; those not yet stored pass from `owner` to the cache."""

    def evict(self, num_pages: int) -> int:
        """Free at least that many unlocked pages, or all; returns how many left the cache."""

    def reset(self) -> bool:
        """Free everything unlocked; returns whether the cache is now empty."""

    def audit(self) -> PageIds:
        """Pages that the cache has lost to a fault since the last audit; O(1) if there is none."""

    def locks_agree(self, num_holders: int) -> bool:
        """Whether the locks are as many as their holders, in sums; cheap enough for every step."""

    def relock(self, nodes: Sequence[TreeNode], *, report: bool = True) -> list[TreeNode]:
        """Count all locks anew: one on each of these nodes and on all above it.

        What was wrong is reported, if that is wanted. Returns the nodes that are locked now: the
        root in place of one that has left the tree.
        """

    def stats(self) -> CacheStats:
        """Sizes and totals."""


def common_length(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    """Length of the common prefix.

    Compares blocks that grow, so that an early difference in a long prompt costs little.
    """
    end = min(len(a), len(b))
    start, block = 0, _FIRST_BLOCK
    while start < end:
        stop = min(start + block, end)
        differs = a[start:stop] != b[start:stop]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
        start, block = stop, block * 4
    return end
