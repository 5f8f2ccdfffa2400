"""Bytes of one pass through the LM head on CUDA, and the rows of a block that keep it in bounds.

Owns: the arithmetic from a workspace in bytes to rows a block. It is not the pass itself
(seawall.sampling.cuda), and it never imports torch.

    partials   [rows, NB] of 2 to 7 numbers      peak, sum, ... of each block of `block_ids` ids
    pairs      [rows, B, block_ids] float32      recomputed winning tiles (fused route, top k)
    logits     [rows, vocabulary] float32        stored rows (general route)
    sorting    [1, vocabulary]                   general route with k beyond FAST_TOP_K
    picked     [ids, hidden]                     weight rows of ids that all rows share

Everything lies in one allocation of `bytes_of(shape, rows)`; `loose_bytes` more cover the few
small tensors beside it. Tile shapes never depend on the workspace: only rows a block do.
"""

from dataclasses import dataclass

FAST_TOP_K = 128  # selection by winning blocks up to here, by sorting rows beyond
FEW_IDS = 64  # best ids looked at first of a row that filters its draw
PICK_IDS = 256  # shared ids whose weight rows are gathered at once

ALIGN = 256
_NUM_PARTS = 40
_LOOSE_FIXED = 64 << 10
_LOOSE_ROW = 64
_ROW_BYTES = 96
_SORT_BYTES = 56
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """What decides the temporary bytes of one call.

    Attributes:
        block_ids, block_rows: of a tile of the product.
        stored: whether rows of logits are stored (the general route).
        num_partials: numbers of 4 bytes that a block of a row leaves.
        top_k: best ids wanted a row, 0 for none.
        num_kept: best ids kept of a row that may filter its draw, 0 for none.
        rank: whether targets are recomputed first, to count what is above them.
        num_shared: ids asked for of every row, 0 for none or where rows are stored.
        copied_row_bytes: of inputs that must be copied because their rows are not contiguous.
    """

    vocab_size: int
    hidden_size: int
    itemsize: int
    block_ids: int
    block_rows: int
    stored: bool
    num_partials: int
    top_k: int = 0
    num_kept: int = 0
    rank: bool = False
    num_shared: int = 0
    copied_row_bytes: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that cover the vocabulary."""
        return -(-self.vocab_size // self.block_ids)

    @property
    def fast_top_k(self) -> int:
        """The k of selection by winning blocks; 0 if there is none."""
        return self.top_k if self.top_k <= FAST_TOP_K else 0

    @property
    def num_chosen(self) -> int:
        """Blocks chosen of a row."""
        return min(self.fast_top_k, self.num_blocks)

    @property
    def num_pairs(self) -> int:
        """Recomputed (row, block) pairs of a row."""
        return 0 if self.stored else max(self.num_chosen, int(self.rank))

    @property
    def found_ids(self) -> int:
        """Places for a row's candidates of the selection."""
        return max(64, 4 * power_of_two(self.fast_top_k)) if self.fast_top_k else 0

    @property
    def stored_stride(self) -> int:
        """Numbers from one stored row to the next."""
        return -(-self.vocab_size // 4) * 4


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below the number."""
    return 1 << max(0, number - 1).bit_length()


def row_bytes(shape: PassShape) -> int:
    """Bytes of the workspace that a row of a block takes."""
    size = _ROW_BYTES + 4 * shape.num_partials * shape.num_blocks
    size += 8 * shape.num_chosen + 8 * shape.found_ids + 12 * shape.num_kept
    size += shape.num_pairs * (12 + 4 * shape.block_ids)
    size += 4 * shape.stored_stride if shape.stored else 0
    return size + _LOOSE_ROW + shape.copied_row_bytes


def fixed_bytes(shape: PassShape) -> int:
    """Bytes of the workspace that do not depend on rows."""
    size = _LOOSE_FIXED + _NUM_PARTS * ALIGN + 16 * (shape.num_blocks + 1)
    size += min(shape.num_shared, PICK_IDS) * (shape.hidden_size * shape.itemsize + 8)
    if shape.top_k > FAST_TOP_K:
        size += _SORT_BYTES * shape.vocab_size
    return size


def arena_bytes(shape: PassShape, rows: int) -> int:
    """Bytes of the one allocation; loose tensors and sorting come beside it."""
    beside = rows * (_LOOSE_ROW + shape.copied_row_bytes) + _LOOSE_FIXED
    beside += _SORT_BYTES * shape.vocab_size if shape.top_k > FAST_TOP_K else 0
    return fixed_bytes(shape) + rows * row_bytes(shape) - beside


def usable_bytes(workspace_bytes: int) -> int:
    """Bytes to plan with, so that what the allocator counts stays within the workspace.

    It rounds allocations above 1 MiB up by as much as 1 MiB, large ones by 2 MiB.
    """
    if workspace_bytes <= 2 * _MIB:
        return min(workspace_bytes, _MIB)
    return workspace_bytes - (_MIB if workspace_bytes < 16 * _MIB else 2 * _MIB)


def smallest_cuda_workspace(shape: PassShape) -> int:
    """Smallest workspace that holds one row."""
    need = fixed_bytes(shape) + row_bytes(shape)
    if need <= _MIB:
        return need
    return need + (_MIB if need < 15 * _MIB else 2 * _MIB)


def plan_rows(shape: PassShape, num_rows: int, workspace_bytes: int) -> int:
    """Rows of a block: as few blocks as fit, of about equal size, whole tiles where that can be.

    Raises:
        ValueError: the workspace holds not even one row; the message names the smallest that does.
    """
    most = (usable_bytes(workspace_bytes) - fixed_bytes(shape)) // row_bytes(shape)
    if most < 1:
        raise ValueError(
            f"workspace_bytes: {workspace_bytes} is too small for vocabulary {shape.vocab_size} "
            f"and hidden size {shape.hidden_size} on this device; "
            f"give at least {smallest_cuda_workspace(shape)}"
        )
    if num_rows <= most:
        return max(1, num_rows)
    tile = shape.block_rows if most >= shape.block_rows else 1
    most = most // tile * tile
    num_blocks = -(-num_rows // most)
    return min(most, -(-num_rows // (num_blocks * tile)) * tile)
