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
    """

    seats: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]
    write_starts: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    page_table: npt.NDArray[np.int32]


class AttentionOp(Protocol):
    """All that a model sees of attention."""

    def run(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int) -> Tensor:
        """Stores k and v, then attends: the query at position p sees [0, p]. Gives [T, H, D]."""


class AttentionBackend(AttentionOp, Protocol):
    """Attention for a device: prepared once a step, run once a layer."""

    def prepare(self, rows: AttentionRows) -> None:
        """Lays the step out; what it needs of `rows` is copied or turned into indices."""
