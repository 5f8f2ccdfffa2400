"""Footprints of the KV pool and of attention: pages, workspace, and transients of one call.

Nothing here allocates or imports torch. The attention backend makes its buffers from the same
`AttentionSizes` that the plan adds up, so the two agree by construction.

Two ways to attend share the workspace (attention/torch_sdpa.py tells when each is taken):

    ragged   every (token, head) is one run of score entries, padded to a multiple of TILE;
             an entry costs 12 bytes: its KV column, its bias, its score
    chunked  one row at a time over blocks of KV; only rows whose pages are not consecutive are
             gathered, into one block of keys and one of values

Where the pool has another dtype than the model, everything goes the chunked way, and every block is
converted into those two; the pages of one head are gathered as they are stored into a third.
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
# The same where scores are capped: no fused kernel caps, so their scores are written out.
CAPPED_QUERY_TOKENS = 64
CAPPED_BLOCK_TOKENS = 512


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

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer, None where it sees everything; or empty if none has one."""

    @property
    def attention_softcap(self) -> float | None:
        """Cap of the scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """HeadCounts by themselves, for a share of a model, one class of its layers, or a test."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...] = ()
    attention_softcap: float | None = None


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
        stored_pages: pages of one head, as they are stored; 0 where nothing is converted.
        query_tokens: most queries of one chunked call.
        mask: elements of the triangle for the edge of a window, and for capped scores, in the
            dtype of the model.
    """

    step_tokens: int
    tokens: int
    entries: int
    bounds: int
    block_tokens: int
    block_pages: int
    stored_pages: int
    query_tokens: int
    mask: int


def kv_page_bytes(
    *, num_layers: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: str
) -> int:
    """Bytes of one page: keys and values of all layers."""
    return 2 * num_layers * num_kv_heads * page_size * head_dim * dtype_bytes(dtype)


def attention_classes(shape: HeadCounts) -> tuple[AttentionShape, ...]:
    """A shape for each class of layers: `windows` is empty or has the one size."""
    sizes = dict.fromkeys(shape.windows or (None,))
    return tuple(
        AttentionShape(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            windows=() if window is None else (window,),
            attention_softcap=shape.attention_softcap,
        )
        for window in sizes
    )


def attention_sizes(
    shape: AttentionShape, dtype: str, limits: Limits, kv_dtype: str | None = None
) -> AttentionSizes:
    """The workspace of one class of layers within the limits of a step.

    Args:
        shape: of the class.
        dtype: of the model.
        limits: the largest step.
        kv_dtype: of the pool; None if it is the model's.
    """
    converts = kv_dtype not in (None, dtype)
    window = shape.windows[0] if shape.windows else None
    is_capped = shape.attention_softcap is not None
    seen = limits.context_length if window is None else min(window, limits.context_length)
    longest = ceil_div(seen, TILE) * TILE * shape.num_heads
    entries = tokens = bounds = 0
    if dtype == "float32" and not converts:
        entries = min(limits.step_tokens * longest, MAX_ENTRIES)
        tokens = min(limits.step_tokens, entries // (TILE * shape.num_heads))
        bounds = tokens * shape.num_heads + 1
    query_tokens = min(CAPPED_QUERY_TOKENS, QUERY_TOKENS) if is_capped else QUERY_TOKENS
    if window is not None:
        # So that no query's window begins after the first query of its piece.
        query_tokens = max(1, min(query_tokens, window - 1))
    block_tokens = CAPPED_BLOCK_TOKENS if is_capped else BLOCK_TOKENS
    block_tokens = min(max(block_tokens, query_tokens), limits.context_length)
    block_pages = ceil_div(block_tokens, limits.page_size) + 1
    return AttentionSizes(
        step_tokens=limits.step_tokens,
        tokens=tokens,
        entries=entries,
        bounds=bounds,
        block_tokens=block_pages * limits.page_size,
        block_pages=block_pages,
        stored_pages=block_pages if converts else 0,
        query_tokens=query_tokens,
        mask=0 if window is None and not is_capped else query_tokens**2,
    )


def attention_workspace_bytes(
    shape: HeadCounts, dtype: str, limits: Limits, kv_dtype: str | None = None
) -> int:
    """Bytes of the arena account "attention": exactly what the backends make."""
    parts = attention_classes(shape)
    return sum(_workspace_bytes(part, dtype, limits, kv_dtype or dtype) for part in parts)


def attention_activation_bytes(
    shape: HeadCounts, dtype: str, limits: Limits, kv_dtype: str | None = None
) -> int:
    """Upper bound of what one prepare() or run() holds besides q, k, v and the output."""
    parts = attention_classes(shape)
    return max(_activation_bytes(part, dtype, limits, kv_dtype or dtype) for part in parts)


def _workspace_bytes(shape: AttentionShape, dtype: str, limits: Limits, kv_dtype: str) -> int:
    sizes = attention_sizes(shape, dtype, limits, kv_dtype)
    block = sizes.block_tokens * shape.num_kv_heads * shape.head_dim * dtype_bytes(dtype)
    return (
        2 * 8 * sizes.step_tokens
        + 8 * sizes.tokens
        + 12 * sizes.entries
        + 4 * sizes.bounds
        + 2 * block
        + 4 * sizes.block_pages
        + sizes.stored_pages * limits.page_size * shape.head_dim * dtype_bytes(kv_dtype)
        + dtype_bytes(dtype) * sizes.mask
    )


def _activation_bytes(shape: AttentionShape, dtype: str, limits: Limits, kv_dtype: str) -> int:
    sizes = attention_sizes(shape, dtype, limits, kv_dtype)
    width = shape.num_heads * shape.head_dim
    kv_width = shape.num_kv_heads * shape.head_dim
    size = dtype_bytes(dtype)
    # The new keys and values, picked and turned to the pool's order.
    store = 2 * limits.step_tokens * kv_width * size
    if kv_dtype != dtype:
        # One of them in float32 and in the pool's dtype.
        store += limits.step_tokens * kv_width * (4 + dtype_bytes(kv_dtype))
    # Ragged: the queries in entry order, the result in entry order, two counts per result row.
    ragged = sizes.tokens * (2 * width * 4 + 2 * 4 * shape.num_heads)
    # Chunked: result so far, result of a block, their blend, in float32; and log-sum-exps.
    piece = min(limits.step_tokens, sizes.query_tokens)
    chunked = piece * (width * (3 * 4 + size) + 6 * 4 * shape.num_heads)
    if shape.attention_softcap is not None:
        # The scores of a block; queries, keys and values in float32.
        chunked += 4 * piece * shape.num_heads * (sizes.block_tokens + 4)
        chunked += 2 * 4 * piece * width + 2 * 4 * sizes.block_tokens * kv_width
    # Host arrays of prepare: slots of the ragged rows, twice, with a window also their positions,
    # pages and offsets; and a few numbers per token.
    copies = 5 if shape.windows else 2
    prepare = copies * 4 * (sizes.entries // shape.num_heads) + 96 * limits.step_tokens
    return max(store, ragged, chunked, prepare) + 4096
