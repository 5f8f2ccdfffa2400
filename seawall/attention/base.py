"""What the model asks of attention, what a step asks, and what a backend is.

    runner --prepare(rows)--> backend <--run(q, k, v, layer)-- model, once a layer

No tensors are made here. A row is one request's share of a step: positions
[start, start + length), packed one row after the other.

    position   0 ........... start ........ write_start ............ start + length
    query                    [------------------- this step -------------------)
    key, value [-- read from the pool ----------)[-- stored by this step, then read --)

Legend: T = packed tokens of the step, H = query heads, K = kv heads, D = head_dim.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRows:
    """The rows of one step, in packing order; host arrays, read during prepare() only.

    Attributes:
        seats: [R] row of page_table that belongs to the request.
        starts: [R] first position computed in this step.
        write_starts: [R] first position whose key and value are stored; those of
            [start, write_start) are in the pool already and are read from there.
        lengths: [R] number of positions.
        page_table: [seats, pages_per_seq] page ids; the entries that cover
            [0, start + length) are valid.
        window_page_table: the same for layers with a window of W positions; the entries that
            cover [start - W + 1, start + length) are valid, the others stale. None if the model
            has no such layers.
        captured: the launches are recorded, or replayed from a record: all that they are told
            besides device arrays may depend on the number of rows only, all of length 1.
    """

    seats: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]
    write_starts: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    page_table: npt.NDArray[np.int32]
    window_page_table: npt.NDArray[np.int32] | None = None
    captured: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRules:
    """How a backend's layers turn scores into weights, where that is not a softmax over [0, p].

    Attributes:
        window: W, if the query at position p sees [max(0, p - W + 1), p] only.
        softcap: c, if scores become c tanh(score / c).
        sinks: [layers, H], if each head has one more score that takes its share of the softmax
            and adds nothing.
    """

    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


PLAIN_SCORES = ScoreRules()


class AttentionOp(Protocol):
    """All that a model sees of attention."""

    def run(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int) -> Tensor:
        """Stores k and v, then attends. Gives [T, H, D].

        The query at position p sees [0, p], or what of it is in the layer's window.
        """


class AttentionBackend(AttentionOp, Protocol):
    """Attention for a device: prepared once a step, run once a layer."""

    def prepare(self, rows: AttentionRows) -> None:
        """Lays the step out; what it needs of `rows` is copied or turned into indices."""
