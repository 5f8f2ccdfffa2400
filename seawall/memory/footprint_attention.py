"""Footprints of the KV pool and of attention: pages, workspace, and transients of one call.

Nothing here allocates or imports torch. The attention backend makes its buffers from the same
`AttentionSizes` that the plan adds up, so the two agree by construction.

Two ways to attend share the workspace (attention/torch_sdpa.py tells when each is taken):

    ragged   every (token, head) is one run of score entries, padded to a multiple of TILE;
             an entry costs 12 bytes: its KV column, its bias, its score
    chunked  one row at a time over blocks of KV; only rows whose pages are not consecutive are
             gathered, into one block of keys and one of values
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from seawall.core.units import ceil_div
from seawall.memory.footprint import dtype_bytes

if TYPE_CHECKING:
    from seawall.memory.footprint import Limits

TILE = 32
# Most score entries of one step: 12 bytes each, 15.75 MiB. Rows beyond it take the chunked way.
MAX_ENTRIES = 1_376_256
# Most query tokens of one chunked call.
QUERY_TOKENS = 256
# Tokens of a gathered block, rounded up to pages, and one page more for a first one cut into.
BLOCK_TOKENS = 1024


class HeadCounts(Protocol):
    """What attention needs to know of a model: a ModelSpec has it, and so has AttentionShape."""

    @property
    def num_heads(self) -> int:
        """Query heads."""

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads; divides num_heads."""

    @property
    def head_dim(self) -> int:
        """Width of one head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """HeadCounts by themselves, for a share of a model or a test."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """Element counts of the workspace.

    Attributes:
        step_tokens: slot ids (int64) and token ids (int64) of the tokens that are stored.
        tokens: most tokens of one ragged pass; 0 where it is not offered.
        entries: score entries of one ragged pass: column (int32), bias and score (float32).
        bounds: first entry of each (token, head), and the end (int32).
        block_tokens: tokens of a gathered block of keys, and as many of values.
        block_pages: page ids (int32) of a gathered block.
    """

    step_tokens: int
    tokens: int
    entries: int
    bounds: int
    block_tokens: int
    block_pages: int


def kv_page_bytes(
    *, num_layers: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: str
) -> int:
    """Bytes of one page: keys and values of all layers."""
    return 2 * num_layers * num_kv_heads * page_size * head_dim * dtype_bytes(dtype)


def attention_sizes(shape: HeadCounts, dtype: str, limits: Limits) -> AttentionSizes:
    """The workspace for a model within the limits of a step."""
    longest = ceil_div(limits.context_length, TILE) * TILE * shape.num_heads
    entries = tokens = bounds = 0
    if dtype == "float32":
        entries = min(limits.step_tokens * longest, MAX_ENTRIES)
        tokens = min(limits.step_tokens, entries // (TILE * shape.num_heads))
        bounds = tokens * shape.num_heads + 1
    block_tokens = min(max(BLOCK_TOKENS, QUERY_TOKENS), limits.context_length)
    block_pages = ceil_div(block_tokens, limits.page_size) + 1
    return AttentionSizes(
        step_tokens=limits.step_tokens,
        tokens=tokens,
        entries=entries,
        bounds=bounds,
        block_tokens=block_pages * limits.page_size,
        block_pages=block_pages,
    )


def attention_workspace_bytes(shape: HeadCounts, dtype: str, limits: Limits) -> int:
    """Bytes of the arena account "attention": exactly what the backend makes."""
    sizes = attention_sizes(shape, dtype, limits)
    block = sizes.block_tokens * shape.num_kv_heads * shape.head_dim * dtype_bytes(dtype)
    return (
        2 * 8 * sizes.step_tokens
        + 8 * sizes.tokens
        + 12 * sizes.entries
        + 4 * sizes.bounds
        + 2 * block
        + 4 * sizes.block_pages
    )


def attention_activation_bytes(shape: HeadCounts, dtype: str, limits: Limits) -> int:
    """Upper bound of what one prepare() or run() holds besides q, k, v and the output."""
    sizes = attention_sizes(shape, dtype, limits)
    width = shape.num_heads * shape.head_dim
    kv_width = shape.num_kv_heads * shape.head_dim
    size = dtype_bytes(dtype)
    # The new keys and values, picked and turned to the pool's order.
    store = 2 * limits.step_tokens * kv_width * size
    # Ragged: the queries in entry order, the result in entry order, two counts per result row.
    ragged = sizes.tokens * (2 * width * 4 + 2 * 4 * shape.num_heads)
    # Chunked: result so far, result of a block, their blend, in float32; and log-sum-exps.
    piece = min(limits.step_tokens, QUERY_TOKENS)
    chunked = piece * (width * (3 * 4 + size) + 6 * 4 * shape.num_heads)
    # Host arrays of prepare: slots of the ragged rows, twice; and a few numbers per token.
    prepare = 2 * 4 * (sizes.entries // shape.num_heads) + 96 * limits.step_tokens
    return max(store, ragged, chunked, prepare) + 4096
