"""Launches of the LM-head kernels: grids, flags and operands from plain tensors.

Owns: how each kernel is called, and the one allocation that their buffers are cut from. It is not
the order of the calls (seawall.sampling.cuda).

Legend: R rows of a block of the call, V vocabulary, H hidden, NB blocks of the vocabulary.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from seawall.kernels.logits_configs import TileConfig
from seawall.kernels.triton_logprobs import (
    count_kernel,
    dots_kernel,
    finish_kernel,
    merge_kernel,
    pair_target_kernel,
    pairs_kernel,
    partials_kernel,
    pick_kernel,
    store_kernel,
)
from seawall.kernels.triton_sampling import (
    adjust_kernel,
    few_kernel,
    filter_kernel,
    stored_partials_kernel,
)
from seawall.kernels.triton_topk import (
    choose_kernel,
    place_kernel,
    schedule_kernel,
    select_kernel,
    target_block_kernel,
)

_ALIGN = 256
_STORED_ROWS = 4  # rows of a tile of stored logits
_PICK = 64
_COUNT_IDS = 4096
_FILTER_IDS = 2048
_ADJUST_PROGRAMS = 128
_LEAST_SORT = 2  # the language's sort knows no single element


class Slab:
    """One allocation, cut into buffers from front to back; its caller is its writer."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._used = 0

    def cut(self, dtype: torch.dtype, *size: int) -> Tensor:
        """The next buffer; what it holds is undefined."""
        count = 1
        for dim in size:
            count *= dim
        end = self._used + count * dtype.itemsize
        assert end <= self._memory.shape[0], (end, self._memory.shape[0])
        part = self._memory[self._used : end].view(dtype).view(size)
        self._used = -(-end // _ALIGN) * _ALIGN
        return part

    @property
    def used(self) -> int:
        """Bytes cut so far: a mark to return to."""
        return self._used

    def rewind(self, mark: int) -> None:
        """Forget the buffers cut since the mark."""
        self._used = mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Operands of the product of one block of rows, and how its logits are processed.

    Attributes:
        hidden: [R, H]. weight: [V, H]. bias: [V] or None.
        bitmask: int32 [R, ceil(V / 32)] or None, rows of unit stride.
        temperature: float32 [R], or None where no row is scaled.
    """

    config: TileConfig
    hidden: Tensor
    weight: Tensor
    scale: float
    softcap: float | None
    bias: Tensor | None
    bitmask: Tensor | None
    temperature: Tensor | None

    @property
    def num_rows(self) -> int:
        """Rows of the block."""
        return self.hidden.shape[0]

    @property
    def vocab_size(self) -> int:
        """Ids of the weight."""
        return self.weight.shape[0]

    @property
    def num_blocks(self) -> int:
        """Blocks of ids."""
        return -(-self.weight.shape[0] // self.config.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What the draw needs: int64 [R] each, and the id that noise knows of id 0."""

    seeds: Tensor
    positions: Tensor
    id_base: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Partials:
    """What is left of tiles, [R, NB] each; None where not asked.

    Attributes:
        peaks, sums: float32, largest logit and sum of exp(logit - peak).
        slopes: float32, sum of d exp(d). counts: int32, logits above `above` [R].
        scores, winners: float32, the draw's best score and its logit. places: int32, its id.
        target_logits: float32 [R].
    """

    peaks: Tensor
    sums: Tensor
    slopes: Tensor | None
    counts: Tensor | None
    above: Tensor | None
    scores: Tensor | None
    places: Tensor | None
    winners: Tensor | None
    target_logits: Tensor | None


def _bulk(matrix: Tensor, wanted: bool) -> bool:
    """Whether the copy engine can read tiles of the matrix."""
    aligned = matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0
    return wanted and matrix.stride(1) == 1 and aligned and matrix.shape[0] > 0


def _operand(matrix: Tensor, bulk: bool, rows: int, inner: int) -> object:
    if not bulk:
        return matrix
    return TensorDescriptor(
        matrix, list(matrix.shape), [matrix.stride(0), matrix.stride(1)], [rows, inner]
    )


def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["multiprocessor_count"])


def _flags(product: Product) -> dict[str, object]:
    """Compile-time arguments that every kernel with a product takes."""
    config = product.config
    # On a CPU these run in Triton's interpreter, whose product knows no bfloat16.
    interpreted = product.hidden.device.type == "cpu"
    widen = interpreted or product.hidden.dtype != product.weight.dtype
    return {
        "SCALE": product.scale != 1.0,
        "SOFTCAP": product.softcap is not None,
        "BIAS": product.bias is not None,
        "M": config.rows,
        "N": config.ids,
        "K": config.inner,
        "EVEN_K": product.hidden.shape[1] % config.inner == 0,
        "WIDEN": widen,
        "PRECISION": "ieee",
        "num_warps": config.warps,
        "num_stages": config.stages,
    }


def _strides(product: Product) -> tuple[int, int, int, int]:
    h, w = product.hidden, product.weight
    return h.stride(0), h.stride(1), w.stride(0), w.stride(1)


def _mask(product: Product) -> tuple[Tensor | None, int]:
    mask = product.bitmask
    return mask, 0 if mask is None else mask.stride(0)


def partials(
    product: Product, out: Partials, targets: Tensor | None = None, draw: Draw | None = None
) -> None:
    """The fused pass over every tile."""
    config, p = product.config, product
    bulk_h, bulk_w = _bulk(p.hidden, config.bulk), _bulk(p.weight, config.bulk)
    num_tiles = -(-p.num_rows // config.rows) * p.num_blocks
    programs = min(_num_programs(p.hidden.device), num_tiles) if config.persistent else num_tiles
    partials_kernel[(programs,)](
        _operand(p.hidden, bulk_h, config.rows, config.inner),
        _operand(p.weight, bulk_w, config.ids, config.inner),
        p.num_rows, p.vocab_size, p.hidden.shape[1], *_strides(p),
        p.scale, p.softcap or 1.0, p.bias, *_mask(p), p.temperature,
        out.peaks, out.sums, out.slopes, out.counts, out.above, targets, out.target_logits,
        draw.seeds if draw else None, draw.positions if draw else None,
        draw.id_base if draw else 0, out.scores, out.places, out.winners,
        programs,
        MASK=p.bitmask is not None, TEMPER=p.temperature is not None,
        ENTROPY=out.slopes is not None, RANK=out.counts is not None, TARGET=targets is not None,
        SAMPLE=draw is not None, GROUP=config.group, BULK_H=bulk_h, BULK_W=bulk_w,
        EVEN_V=p.vocab_size % config.ids == 0, PERSISTENT=config.persistent,
        SPECIALIZE=config.specialize, **_flags(p),
    )  # fmt: skip


def store(product: Product, logits: Tensor) -> None:
    """Scale, softcap and bias of the product into [R, V] float32; NaN where not finite."""
    config, p = product.config, product
    bulk_h, bulk_w = _bulk(p.hidden, config.bulk), _bulk(p.weight, config.bulk)
    store_kernel[(-(-p.num_rows // config.rows) * p.num_blocks,)](
        _operand(p.hidden, bulk_h, config.rows, config.inner),
        _operand(p.weight, bulk_w, config.ids, config.inner),
        p.num_rows, p.vocab_size, p.hidden.shape[1], *_strides(p),
        p.scale, p.softcap or 1.0, p.bias, logits, logits.stride(0),
        GROUP=config.group, BULK_H=bulk_h, BULK_W=bulk_w, **_flags(p),
    )  # fmt: skip


def stored_partials(
    product: Product, logits: Tensor, out: Partials, draw: Draw | None = None
) -> None:
    """Bitmask and temperature on stored logits, and what is left of their blocks."""
    p = product
    stored_partials_kernel[(p.num_blocks, -(-p.num_rows // _STORED_ROWS))](
        logits, logits.stride(0), p.num_rows, p.vocab_size, *_mask(p), p.temperature,
        out.peaks, out.sums, out.slopes,
        draw.seeds if draw else None, draw.positions if draw else None,
        draw.id_base if draw else 0, out.scores, out.places, out.winners,
        MASK=p.bitmask is not None, TEMPER=p.temperature is not None,
        ENTROPY=out.slopes is not None, SAMPLE=draw is not None,
        M=_STORED_ROWS, N=p.config.ids, num_warps=4,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Results of the merge, [R] each; None where not asked. `exact_lse` is float64."""

    exact_lse: Tensor
    lse: Tensor
    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    rank: Tensor | None = None
    ids: Tensor | None = None
    drawn_logprobs: Tensor | None = None


def merge(product: Product, parts: Partials, out: Merged) -> None:
    """Rows from their blocks."""
    merge_kernel[(product.num_rows,)](
        parts.peaks, parts.sums, parts.slopes, parts.counts, parts.target_logits,
        parts.scores, parts.places, parts.winners, product.temperature, product.num_blocks,
        out.exact_lse, out.lse, out.logprobs, out.entropy, out.rank, out.ids, out.drawn_logprobs,
        ENTROPY=out.entropy is not None, RANK=out.rank is not None and parts.counts is not None,
        TARGET=out.logprobs is not None, SAMPLE=out.ids is not None,
        BLOCKS=triton.next_power_of_2(product.num_blocks), num_warps=4,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """(row, block) pairs and their recomputed tiles; B pairs a row.

    Attributes:
        blocks, slots: int32 [R, B], block of each pair and its place among all.
        rows: int32 [R * B], row of each place.
        counts, starts, tile_starts: int32 [NB + 1], pairs of blocks and running sums.
        logits: float32 [R * B, N].
    """

    blocks: Tensor
    slots: Tensor
    rows: Tensor
    counts: Tensor
    starts: Tensor
    tile_starts: Tensor
    logits: Tensor


def recompute(product: Product, pairs: Pairs) -> None:
    """Group the pairs by block and compute their tiles; `slots` held places within blocks."""
    config, p = product.config, product
    blocks = triton.next_power_of_2(p.num_blocks)
    num_pairs = pairs.blocks.numel()
    schedule_kernel[(1,)](
        pairs.counts, p.num_blocks, pairs.starts, pairs.tile_starts,
        BLOCKS=blocks, M=config.rows, num_warps=4,
    )  # fmt: skip
    place_kernel[(-(-num_pairs // 1024),)](
        pairs.blocks, pairs.slots, pairs.starts, num_pairs, pairs.blocks.shape[1], pairs.rows,
        SIZE=1024, num_warps=4,
    )  # fmt: skip
    bulk_w = _bulk(p.weight, config.bulk)
    most_tiles = min(num_pairs, p.num_blocks) + num_pairs // config.rows
    pairs_kernel[(most_tiles,)](
        p.hidden, _operand(p.weight, bulk_w, config.ids, config.inner),
        p.num_rows, p.vocab_size, p.hidden.shape[1], *_strides(p),
        p.scale, p.softcap or 1.0, p.bias, *_mask(p), p.temperature,
        pairs.rows, pairs.starts, pairs.tile_starts, p.num_blocks, pairs.logits,
        MASK=p.bitmask is not None, TEMPER=p.temperature is not None, BLOCKS=blocks,
        BULK_W=bulk_w, EVEN_V=p.vocab_size % config.ids == 0, **_flags(p),
    )  # fmt: skip


def target_pairs(product: Product, pairs: Pairs, targets: Tensor, out: Tensor) -> None:
    """The logits [R] of targets, with the bits of the fused pass."""
    pairs.counts.zero_()
    num_rows, ids = product.num_rows, product.config.ids
    grid = (-(-num_rows // 1024),)
    target_block_kernel[grid](
        targets, num_rows, pairs.blocks, pairs.slots, pairs.counts, N=ids, M=1024, num_warps=4
    )
    recompute(product, pairs)
    pair_target_kernel[grid](
        pairs.logits, pairs.slots, targets, out, num_rows, N=ids, M=1024, num_warps=4
    )


def select(
    product: Product,
    parts: Partials,
    pairs: Pairs,
    stored: Tensor | None,
    found: Tensor,
    limits: Tensor,
    exact_lse: Tensor,
    top_logprobs: Tensor,
    top_ids: Tensor,
) -> None:
    """The k best of every row, from stored logits or from recomputed tiles."""
    p, (num_rows, num_best) = product, top_ids.shape
    num_chosen, grouped = pairs.blocks.shape[1], stored is None
    if grouped:
        pairs.counts.zero_()
    choose_kernel[(num_rows,)](
        parts.peaks, p.num_blocks, num_chosen, num_best, pairs.blocks, pairs.slots, limits,
        pairs.counts, GROUPED=grouped,
        BLOCKS=max(_LEAST_SORT, triton.next_power_of_2(p.num_blocks)),
        KEPT=max(_LEAST_SORT, triton.next_power_of_2(num_chosen)), num_warps=2,
    )  # fmt: skip
    if grouped:
        recompute(product, pairs)
    kept = max(_LEAST_SORT, triton.next_power_of_2(num_best))
    select_kernel[(num_rows,)](
        pairs.logits if stored is None else stored,
        0 if stored is None else stored.stride(0), p.config.ids,
        pairs.slots, pairs.blocks, limits, found,
        num_chosen, num_best, p.vocab_size, exact_lse, top_logprobs, top_ids,
        GROUPED=grouped, N=p.config.ids, WIDE=max(p.config.ids, kept), KEPT=kept,
        FOUND=found.shape[1], num_warps=2,
    )  # fmt: skip


def dots(product: Product, token_ids: Tensor, out: Tensor) -> None:
    """Logits [R, m] at each row's own ids, before bitmask and temperature."""
    p, (num_rows, num_ids) = product, token_ids.shape
    ids = 8
    dots_kernel[(num_rows, -(-num_ids // ids))](
        p.hidden, p.weight, token_ids, out, num_ids, p.vocab_size, p.hidden.shape[1], *_strides(p),
        token_ids.stride(0), out.stride(0), p.scale, p.softcap or 1.0, p.bias,
        SCALE=p.scale != 1.0, SOFTCAP=p.softcap is not None, BIAS=p.bias is not None,
        N=ids, K=512, num_warps=4,
    )  # fmt: skip


def finish(product: Product, token_ids: Tensor | None, values: Tensor, exact_lse: Tensor) -> None:
    """Make logits [R, m] logprobs in place; `token_ids` None if they are processed already."""
    num_rows, num_ids = values.shape
    raw = token_ids is not None
    mask, stride_mask = _mask(product)
    finish_kernel[(num_rows, -(-num_ids // _PICK))](
        values, token_ids, num_ids, values.stride(0),
        0 if token_ids is None else token_ids.stride(0), mask, stride_mask, product.temperature,
        exact_lse, MASK=raw and mask is not None,
        TEMPER=raw and product.temperature is not None, N=_PICK, num_warps=1,
    )  # fmt: skip


def pick(logits: Tensor, ids: Tensor, out: Tensor, exact_lse: Tensor | None) -> None:
    """Stored logits [R, V] at ids [R, m]; logprobs if the log-sum-exp is given."""
    num_rows, num_ids = ids.shape
    pick_kernel[(num_rows, -(-num_ids // _PICK))](
        logits, ids, out, num_ids, logits.stride(0), ids.stride(0), out.stride(0), exact_lse,
        LOGPROB=exact_lse is not None, N=_PICK, num_warps=1,
    )  # fmt: skip


def count_above(
    logits: Tensor, vocab_size: int, above: Tensor, exact_lse: Tensor, rank: Tensor
) -> None:
    """Ranks from stored logits."""
    count_kernel[(logits.shape[0],)](
        logits, logits.stride(0), above, exact_lse, rank, vocab_size, N=_COUNT_IDS, num_warps=8
    )


def adjust(
    logits: Tensor,
    entries: tuple[Tensor, Tensor, Tensor, Tensor],
    bounds: tuple[Tensor, Tensor],
    first_row: int,
) -> None:
    """Apply entries (row, id, repetition, add) between the bounds, device numbers, in place."""
    adjust_kernel[(_ADJUST_PROGRAMS,)](
        logits, logits.stride(0), *entries, *bounds, first_row, logits.shape[0],
        SIZE=256, num_warps=4,
    )  # fmt: skip


def filter_rows(
    product: Product,
    logits: Tensor,
    parts: Partials,
    draw: Draw,
    filters: tuple[Tensor, Tensor, Tensor],
    best: tuple[Tensor, Tensor],
    open_rows: Tensor,
    out: Merged,
) -> None:
    """Draw again where top_k, top_p or min_p [R] filter, from processed stored logits.

    `best` holds each row's best logits and ids [R, C]; `open_rows` int32 [R] is overwritten.
    """
    num_best = best[0].shape[1]
    few_kernel[(product.num_rows,)](
        *best, num_best, product.vocab_size, out.exact_lse, product.temperature, *filters,
        draw.seeds, draw.positions, draw.id_base, open_rows, out.ids, out.drawn_logprobs,
        KEPT=max(_LEAST_SORT, triton.next_power_of_2(num_best)), num_warps=4,
    )  # fmt: skip
    filter_kernel[(product.num_rows,)](
        logits, logits.stride(0), product.vocab_size, out.exact_lse, parts.peaks,
        product.num_blocks, *filters, draw.seeds, draw.positions,
        draw.id_base, open_rows, out.ids, out.drawn_logprobs,
        BLOCKS=triton.next_power_of_2(product.num_blocks), N=_FILTER_IDS, num_warps=8,
    )  # fmt: skip
