"""Bytes of one pass through the LM head, and the tile shape that keeps it within a bound.

Owns: the arithmetic that turns a workspace in bytes into rows a block and ids a tile, and the
smallest workspace that works at all. It counts every tensor that the pass makes, inputs and
results excepted. It is not the pass itself (seawall.sampling), and it never imports torch.

    logits    [rows, ids] float32                     the tile of the product
    scratch   3 x [some rows, ids], 4 bytes each      exponentials, noise and masks
    weight    [ids, hidden] float32                   only if the weights are not float32 already
    hidden    [rows, hidden]                          only if converted or reordered
    per row   running max and sum, the k best, ids asked for
    sorting   [few rows, vocabulary] value, id        only for filters on a flat distribution

The tile's width follows from constants and the shape alone; the workspace limits the rows of a
block first, and only a workspace too small for a useful number of rows narrows the tile. So
results hardly depend on it.
"""

from dataclasses import dataclass

MASK_WORD_IDS = 32  # ids a word of a bitmask covers; every tile starts on a word
MAX_TILE_IDS = 4096
MIN_TILE_IDS = 256
MAX_BLOCK_ROWS = 1024
CANDIDATES = 256  # best ids kept of a row that asks for top-k, top-p or min-p
ADJUST_CHUNK = 4096  # sparse entries applied at once
PICK_CHUNK = 256  # ids of token_ids gathered at once

_TILE_LOGITS_BYTES = 8 << 20
_TILE_WEIGHT_BYTES = 8 << 20
_SCRATCH_IDS = 64 << 10
_DRAW_IDS = 16 << 10
_USEFUL_ROWS = 32
_SORT_ROWS = 8
_SORT_IDS = 256 << 10
_FIXED_BYTES = 4 << 10
_ROW_BYTES = 224
_TILE_ID_BYTES = 20
_BEST_BYTES = 60
_PICK_BYTES = 20
_ADJUST_BYTES = 80
_DRAW_BYTES = 36
_SORT_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsShape:
    """What decides the temporary bytes of one call.

    Attributes:
        hidden_copy_bytes: bytes an element of hidden costs when copied, 0 if used in place.
        copies_weight: whether the weight tile is converted to float32 in the workspace.
        top_k: best ids kept a row, 0 for none.
        num_token_ids: ids asked for a row, besides the target.
        filtered: whether rows may ask for top-k, top-p or min-p sampling.
        adjusted: whether sparse adjustments are applied.
    """

    vocab_size: int
    hidden_size: int
    hidden_copy_bytes: int
    copies_weight: bool
    top_k: int = 0
    num_token_ids: int = 0
    filtered: bool = False
    adjusted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePlan:
    """Shape of the pass.

    Attributes:
        rows: of a block.
        ids: of a tile.
        scratch_rows: rows whose exponentials, noise or masks are made at once.
        draw_ids: filtered candidates that are raced at once.
        sort_rows: rows sorted whole at once.
    """

    rows: int
    ids: int
    scratch_rows: int
    draw_ids: int
    sort_rows: int


def widest_tile(shape: LogitsShape) -> int:
    """Ids a tile has when the workspace does not narrow it."""
    ids = MAX_TILE_IDS
    while (
        shape.copies_weight
        and ids > MIN_TILE_IDS
        and 4 * ids * shape.hidden_size > _TILE_WEIGHT_BYTES
    ):
        ids //= 2
    return min(ids, _padded(shape.vocab_size))


def _padded(vocab_size: int) -> int:
    return -(-vocab_size // MASK_WORD_IDS) * MASK_WORD_IDS


def _tile_plan(shape: LogitsShape, rows: int, ids: int, sort_rows: int) -> TilePlan:
    scratch_rows = min(rows, max(1, _SCRATCH_IDS // ids))
    return TilePlan(
        rows=rows,
        ids=ids,
        scratch_rows=scratch_rows,
        draw_ids=min(scratch_rows * ids, max(ids, _DRAW_IDS)) if shape.filtered else 0,
        sort_rows=min(sort_rows, rows) if shape.filtered else 0,
    )


def tile_bytes(shape: LogitsShape, plan: TilePlan) -> int:
    """Most bytes of temporary tensors alive at once in a pass of this plan."""
    scratch_ids = plan.scratch_rows * plan.ids
    kept = max(shape.top_k, min(CANDIDATES, shape.vocab_size) if shape.filtered else 0)
    row = _ROW_BYTES + shape.hidden_size * shape.hidden_copy_bytes
    row += 4 * plan.ids
    row += _BEST_BYTES * (kept + 1) if kept else 0
    row += _PICK_BYTES * min(shape.num_token_ids, PICK_CHUNK)
    total = _FIXED_BYTES + plan.rows * row + _TILE_ID_BYTES * plan.ids
    total += 12 * scratch_ids + scratch_ids // 4
    total += 4 * plan.ids * shape.hidden_size if shape.copies_weight else 0
    total += _ADJUST_BYTES * ADJUST_CHUNK if shape.adjusted else 0
    total += _DRAW_BYTES * plan.draw_ids
    if plan.sort_rows:
        # The sort itself numbers the ids of one row once more.
        total += _padded(shape.vocab_size) * (_SORT_BYTES * plan.sort_rows + 8)
    return total


def _most_rows(shape: LogitsShape, ids: int, sort_rows: int, limit: int, workspace: int) -> int:
    """Most rows of a block that fit, 0 if not even one does."""
    low, high = 0, limit
    while low < high:
        rows = high if low == 0 and high == limit else (low + high + 1) // 2
        if tile_bytes(shape, _tile_plan(shape, rows, ids, sort_rows)) <= workspace:
            low = rows
        else:
            high = rows - 1
    return low


def plan_tiles(shape: LogitsShape, num_rows: int, workspace_bytes: int) -> TilePlan:
    """Choose the tile shape for a call.

    Raises:
        ValueError: the workspace holds not even one row; the message names the smallest that does.
    """
    ids = widest_tile(shape)
    best = _tile_plan(shape, 0, ids, 1)
    most_sorted = max(_SORT_ROWS, _SORT_IDS // shape.vocab_size)
    while True:
        limit = max(1, min(num_rows, MAX_BLOCK_ROWS, _TILE_LOGITS_BYTES // (4 * ids)))
        for sort_rows in (most_sorted, 1) if shape.filtered else (1,):
            rows = _most_rows(shape, ids, sort_rows, limit, workspace_bytes)
            if rows > best.rows:
                best = _tile_plan(shape, rows, ids, sort_rows)
            if rows >= min(limit, _USEFUL_ROWS):
                return best
        if ids <= MIN_TILE_IDS:
            break
        ids = max(MIN_TILE_IDS, ids // 2 // MASK_WORD_IDS * MASK_WORD_IDS)
    if best.rows == 0:
        need = smallest_workspace(shape)
        raise ValueError(
            f"workspace_bytes: {workspace_bytes} is too small for vocabulary {shape.vocab_size} "
            f"and hidden size {shape.hidden_size}; give at least {need}"
        )
    return best


def smallest_workspace(shape: LogitsShape) -> int:
    """Smallest workspace with which `plan_tiles` succeeds for this shape."""
    ids = min(MIN_TILE_IDS, widest_tile(shape))
    return tile_bytes(shape, _tile_plan(shape, 1, ids, 1))


def min_workspace_bytes(
    vocab_size: int,
    hidden_size: int,
    weight_dtype: str,
    *,
    top_k: int = 0,
    num_token_ids: int = PICK_CHUNK,
) -> int:
    """Smallest `workspace_bytes` that serves every call of an engine.

    That is scoring and sampling, with filters and adjustments, of any number of rows.

    Args:
        vocab_size: rows of the LM head.
        hidden_size: columns of the LM head.
        weight_dtype: "float32", "bfloat16" or "float16".
        top_k: largest number of best ids that a request may ask for.
        num_token_ids: largest number of token ids that a request may ask for; more than the
            default need no more.
    """
    return smallest_workspace(
        LogitsShape(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            hidden_copy_bytes=8,  # whatever the rows' dtype and strides
            copies_weight=weight_dtype != "float32",
            top_k=min(top_k, vocab_size),
            num_token_ids=num_token_ids,
            filtered=True,
            adjusted=True,
        )
    )
