"""The locked nodes of a prefix tree: a second account of its locks, for the audit of each step.

Each node counts its own locks; here is which nodes have any and how many there are in all. Written
by one tree, which keeps both; a count that went wrong shows as a sum that differs.
"""

from operator import attrgetter

from seawall.cache.node import TreeNode

_NUM_LOCKS = attrgetter("num_locks")


class TreeLocks:
    """Which nodes are locked, and the number of all locks on them."""

    def __init__(self) -> None:
        self._nodes: set[TreeNode] = set()
        self._total = 0

    def lock(self, node: TreeNode) -> bool:
        """Add a lock; returns whether it is the node's first."""
        self._total += 1
        node.num_locks += 1
        if node.num_locks > 1:
            return False
        self._nodes.add(node)
        return True

    def unlock(self, node: TreeNode) -> bool:
        """Take a lock away; returns whether it was the node's last."""
        self._total -= 1
        node.num_locks -= 1
        if node.num_locks > 0:
            return False
        self._nodes.discard(node)
        return True

    def split(self, upper: TreeNode) -> None:
        """A node was split; the upper part has the locks of the lower."""
        if upper.num_locks:
            self._nodes.add(upper)
            self._total += upper.num_locks

    def clear(self) -> None:
        """No node has any lock."""
        self._nodes.clear()
        self._total = 0

    @property
    def add_up(self) -> bool:
        """Whether the nodes' own counts are the total; O(locked nodes)."""
        return bool(sum(map(_NUM_LOCKS, self._nodes)) == self._total)
