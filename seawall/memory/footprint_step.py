"""Footprints of the runner: step buffers, seat tables, and how the logits account is divided.

The runner makes its tensors from these same lists, so plan and allocation can't drift apart.

Legend: R = max_running (seats), T = step_tokens, S = pages_per_seq, H = hidden size.
"""

import math
from dataclasses import dataclass

from seawall.memory.footprint import Limits, dtype_bytes

NUM_STEP_SETS = 2
# A changed logit: row, id (int64), two float32, and room for the copy that is renumbered.
ADJUST_BYTES = 48
# Of the logits account, the part for gathered rows and results; the rest is workspace.
_ROWS_SHARE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A tensor that is made once."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of its storage."""
        return math.prod(self.shape) * dtype_bytes(self.dtype)


def step_tables(limits: Limits, hidden_size: int, dtype: str) -> tuple[Table, ...]:
    """Tensors of one set of step buffers: 16 T + R H b bytes."""
    return (
        Table(name="tokens", shape=(limits.step_tokens,), dtype="int64"),
        Table(name="positions", shape=(limits.step_tokens,), dtype="int64"),
        Table(name="hidden", shape=(limits.max_running, hidden_size), dtype=dtype),
    )


def seat_tables(limits: Limits, *, windows: bool = False) -> tuple[Table, ...]:
    """Tensors with one entry a seat: R (4 S + 36) bytes, and 4 R S more with window layers."""
    seats = limits.max_running
    page_tables = ("page_table", "window_page_table") if windows else ("page_table",)
    return (
        *(Table(name=n, shape=(seats, limits.pages_per_seq), dtype="int32") for n in page_tables),
        Table(name="last_token", shape=(seats,), dtype="int64"),
        Table(name="temperature", shape=(seats,), dtype="float32"),
        Table(name="top_k", shape=(seats,), dtype="int64"),
        Table(name="top_p", shape=(seats,), dtype="float32"),
        Table(name="min_p", shape=(seats,), dtype="float32"),
        Table(name="seed", shape=(seats,), dtype="int64"),
    )


def step_buffer_bytes(limits: Limits, hidden_size: int, dtype: str) -> int:
    """Both sets of step buffers."""
    return NUM_STEP_SETS * sum(t.num_bytes for t in step_tables(limits, hidden_size, dtype))


def sampler_bytes(limits: Limits, *, windows: bool = False) -> int:
    """Seat tables."""
    return sum(table.num_bytes for table in seat_tables(limits, windows=windows))


def mask_words(vocab_size: int) -> int:
    """Words of 32 bits, one bit a token."""
    return -(-vocab_size // 32)


def mask_bytes(limits: Limits, vocab_size: int) -> int:
    """A mask for every seat."""
    return 4 * limits.max_running * mask_words(vocab_size)


def logits_split(logits_bytes: int) -> tuple[int, int]:
    """Workspace of the numeric functions, and the share for rows that go in and come out."""
    rows = logits_bytes // _ROWS_SHARE
    return logits_bytes - rows, rows


def row_bytes(hidden_size: int, element_size: int, top_k: int, num_token_ids: int) -> int:
    """Bytes that one row takes outside the workspace: gathered, asked and answered.

    Index, target, temperature, seed, position, sampling parameters and logprob: 96 at most; 12 a
    best token; 12 a given id.
    """
    return hidden_size * element_size + 96 + 12 * top_k + 12 * num_token_ids


def max_top_k(logits_bytes: int, hidden_size: int, element_size: int) -> int:
    """Largest k whose one row fits the rows' share."""
    room = logits_split(logits_bytes)[1] - row_bytes(hidden_size, element_size, 0, 0)
    return max(room // 12, 0)
