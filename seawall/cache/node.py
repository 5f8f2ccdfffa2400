"""One node of a prefix tree: an edge of whole pages and what hangs below it.

Owns its token and page arrays (copies, so that no request's buffer is kept alive by the cache and
the host bytes of a node follow from its length). The tree is the only writer.
"""

import numpy as np
import numpy.typing as npt

from seawall.cache.pages import PageIds


class TreeNode:
    """Pages [depth, depth + len(page_ids)) of every prompt that passes through here.

    Attributes:
        tokens: int32 [len(page_ids) * page_size], the tokens of these pages.
        page_ids: int32, the pages; owned by the tree.
        edge: the key under which the parent knows this node (its first page's tokens).
        parent: None for the root and for a node that has left the tree.
        num_locks: locks on this node and on all below it; hence never more than the parent's.
        last_used: logical time of the last use or insert that passed.
        num_hits: uses that passed.
        priority: the highest that it was stored with.
        serial: unique; breaks ties.
    """

    __slots__ = (
        "children",
        "edge",
        "last_used",
        "num_hits",
        "num_locks",
        "page_ids",
        "parent",
        "priority",
        "serial",
        "tokens",
    )

    def __init__(
        self,
        *,
        tokens: npt.NDArray[np.int32],
        page_ids: PageIds,
        edge: bytes,
        parent: "TreeNode | None",
        serial: int,
    ) -> None:
        self.tokens = tokens
        self.page_ids = page_ids
        self.edge = edge
        self.parent = parent
        self.serial = serial
        self.children: dict[bytes, TreeNode] = {}
        self.num_locks = 0
        self.last_used = 0
        self.num_hits = 0
        self.priority = 0

    def spells(self, tokens: npt.NDArray[np.int32]) -> bool:
        """Whether the path from the root to the end of this node is exactly these tokens."""
        node, end = self, len(tokens)
        while node.parent is not None:
            start = end - len(node.tokens)
            if start < 0 or not np.array_equal(node.tokens, tokens[start:end]):
                return False
            node, end = node.parent, start
        return end == 0

    def split(self, num_pages: int, serial: int) -> "TreeNode":
        """Cut the edge and return the new upper node, which holds the first pages.

        This object stays the lower node: whoever has locked it has locked the whole path, and goes
        on to do so. Everything a node carries page by page is divided here and nowhere else.
        """
        assert self.parent is not None
        assert 0 < num_pages < len(self.page_ids), (num_pages, len(self.page_ids))
        page_size = len(self.tokens) // len(self.page_ids)
        cut = num_pages * page_size
        upper = TreeNode(
            tokens=self.tokens[:cut].copy(),
            page_ids=self.page_ids[:num_pages].copy(),
            edge=self.edge,
            parent=self.parent,
            serial=serial,
        )
        upper.num_locks = self.num_locks
        upper.last_used = self.last_used
        upper.num_hits = self.num_hits
        upper.priority = self.priority
        self.tokens = self.tokens[cut:].copy()
        self.page_ids = self.page_ids[num_pages:].copy()
        self.edge = self.tokens[:page_size].tobytes()
        self.parent.children[upper.edge] = upper
        self.parent = upper
        upper.children[self.edge] = self
        return upper
