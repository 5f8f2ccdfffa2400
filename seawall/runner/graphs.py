"""Captured forwards of decode steps: one launch instead of one a kernel.

A graph exists for some numbers of rows, its buckets; a step of decode rows is padded up to the next
one. Padding rows attend to one position of seat 0 and store nothing. What a graph reads lies where
it lay when it was captured: tokens and positions in the step buffers, the layout in the block that
attention's transfers share, cut in the same order for the same bucket.

Owns the graphs and the one memory pool of their temporaries, the account "graphs". They hold
addresses into weights, KV pool and buffers: whoever releases one of those drops them first.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from seawall.attention.base import AttentionRows
from seawall.core.step import I32, StepPlan


class Graphs(Protocol):
    """What the runner asks of captured forwards."""

    def bucket(self, plan: StepPlan) -> int:
        """Rows of the graph that serves a step; 0 if it must be launched kernel by kernel."""

    def replay(self, bucket: int) -> None:
        """Queue the captured forward."""


class NoGraphs:
    """Nothing was captured."""

    def bucket(self, plan: StepPlan) -> int:
        """See Graphs."""
        return 0

    def replay(self, bucket: int) -> None:
        """Is not called."""
        raise AssertionError(f"no graph of {bucket} rows")


class DecodeGraphs:
    """Forwards by number of rows.

    Args:
        buckets: numbers of rows, ascending.
        prepare: lays a step of that many rows out, outside the capture.
        forward: queues the forward of that many rows; its result goes to a fixed place.
    """

    def __init__(
        self,
        buckets: Sequence[int],
        prepare: Callable[[int], None],
        forward: Callable[[int], None],
    ) -> None:
        self._buckets = np.array(buckets, np.int64)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        pool = torch.cuda.graph_pool_handle()
        # The largest first: the others' temporaries fit into the memory that it took.
        for rows in reversed(buckets):
            prepare(rows)
            forward(rows)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            forward(rows)
            graph.capture_end()
            self._graphs[rows] = graph
        torch.cuda.synchronize()

    def bucket(self, plan: StepPlan) -> int:
        """Rows of the graph that serves a step: decode rows only, all of which sample."""
        num_rows = plan.num_rows
        if num_rows != plan.num_tokens or num_rows > self._buckets[-1] or not plan.samples.all():
            return 0
        return int(self._buckets[np.searchsorted(self._buckets, num_rows)])

    def replay(self, bucket: int) -> None:
        """Queue the captured forward."""
        self._graphs[bucket].replay()


def padded_rows(rows: AttentionRows, num_rows: int) -> AttentionRows:
    """The rows of a step with padding rows behind them, for a graph."""
    missing = num_rows - len(rows.seats)

    def padded(values: I32, filling: int) -> I32:
        return np.concatenate([values, np.full(missing, filling, np.int32)])

    return AttentionRows(
        seats=padded(rows.seats, 0),
        starts=padded(rows.starts, 0),
        # One position, whose key and value count as stored already.
        write_starts=padded(rows.write_starts, 1),
        lengths=padded(rows.lengths, 1),
        page_table=rows.page_table,
        window_page_table=rows.window_page_table,
        captured=True,
    )
