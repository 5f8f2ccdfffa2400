"""The logits path on CUDA: rows in blocks that fit the workspace, and the order of the kernels.

Owns: the choice of route, the buffers of a block and the calls. It is not the kernels
(seawall.kernels), and it computes the same as logprobs.py and sampler.py, which are the
specification. Inputs are taken as valid (seawall.ops checks them).

Legend: R rows of a block, V vocabulary, NB blocks of it, B chosen blocks of a row.

Two routes, chosen by what is asked and by the number of rows, never by the workspace:

    fused     tiles stay in registers; the k best come from recomputed winning tiles
    stored    logits of a block of rows lie in the workspace for a while: sparse changes, top-k,
              top-p and min-p sampling, k beyond FAST_TOP_K, and top-k of a few rows, which would
              read the weights twice to recompute

Tiles have the same bits in both. No call waits for the device.
"""

from dataclasses import replace

import torch
from torch import Tensor

from seawall.kernels import logits_launch as launch
from seawall.kernels.logits_configs import FEW_ROWS, TileConfig, configs_for
from seawall.memory.footprint_logits_cuda import (
    FAST_TOP_K,
    FEW_IDS,
    PICK_IDS,
    PassShape,
    arena_bytes,
    plan_rows,
    smallest_cuda_workspace,
)
from seawall.sampling.logprobs import Ask, LogprobResult
from seawall.sampling.sampler import DrawInput, SampleResult
from seawall.sampling.tiles import MIN_TEMPERATURE, LogitsInput

__all__ = ["Ask", "pass_shape", "sample_rows", "score_rows", "smallest_workspace"]


def tile_config(source: LogitsInput) -> TileConfig:
    """The tile shape of a call: by dtype and number of rows."""
    same = source.hidden.dtype == source.weight.dtype
    itemsize = source.weight.element_size() if same else 4
    return configs_for(itemsize).choose(source.hidden.shape[0])


def pass_shape(
    source: LogitsInput, ask: Ask | None = None, draw: DrawInput | None = None
) -> PassShape:
    """What the footprint needs to know of a call that scores (`ask`) or draws (`draw`)."""
    config = tile_config(source)
    ask = ask or Ask()
    few = source.hidden.shape[0] <= FEW_ROWS
    stored = source.adjust is not None or (draw is not None and draw.may_filter)
    stored = stored or ask.top_k > FAST_TOP_K or (few and ask.top_k > 0)
    kept = min(FEW_IDS, source.vocab_size) if draw is not None and draw.may_filter else 0
    num_partials = 2 + ask.entropy + (ask.rank and not stored) + (3 if draw is not None else 0)
    return PassShape(
        vocab_size=source.vocab_size,
        hidden_size=source.hidden.shape[1],
        itemsize=source.weight.element_size(),
        block_ids=config.ids,
        block_rows=config.rows,
        stored=stored,
        num_partials=num_partials,
        top_k=ask.top_k or kept,
        num_kept=kept,
        rank=ask.rank,
        num_shared=ask.num_ids if ask.shared_ids and not stored else 0,
        copied_row_bytes=_copied_row_bytes(source, ask),
    )


def _copied_row_bytes(source: LogitsInput, ask: Ask) -> int:
    """Bytes a row of the inputs that kernels cannot read in place."""
    size = 0
    for matrix in (source.bitmask, ask.token_ids):
        if matrix is not None and matrix.dim() == 2 and matrix.stride(1) != 1:
            size += matrix.shape[1] * matrix.element_size()
    return size


def smallest_workspace(
    source: LogitsInput, ask: Ask | None = None, draw: DrawInput | None = None
) -> int:
    """Fewest bytes that a call which scores or draws can work in."""
    return smallest_cuda_workspace(pass_shape(source, ask=ask, draw=draw))


def score_rows(source: LogitsInput, ask: Ask, workspace_bytes: int) -> LogprobResult:
    """Score every row, block by block."""
    rows, device = source.hidden.shape[0], source.hidden.device

    def floats(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float32, device=device)

    def longs(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64, device=device)

    k, m = ask.top_k, ask.num_ids
    result = LogprobResult(
        logprobs=None if ask.targets is None else floats(rows),
        logsumexp=floats(rows),
        top_logprobs=floats(rows, k) if k else None,
        top_ids=longs(rows, k) if k else None,
        token_logprobs=None if ask.token_ids is None else floats(rows, m),
        rank=longs(rows) if ask.rank else None,
        entropy=floats(rows) if ask.entropy else None,
    )
    shape = pass_shape(source, ask=ask)
    block_rows = plan_rows(shape, rows, workspace_bytes)
    if rows == 0:
        return result
    slab = launch.Slab(arena_bytes(shape, block_rows), device)
    blocks = _Blocks(source, shape, block_rows, slab)
    for first in range(0, rows, block_rows):
        slab.rewind(0)
        span = slice(first, min(first + block_rows, rows))
        if shape.stored:
            _score_stored(blocks, ask, result, span)
        else:
            _score_fused(blocks, ask, result, span)
    return result


def sample_rows(
    source: LogitsInput, draw: DrawInput, workspace_bytes: int, id_base: int = 0
) -> SampleResult:
    """Draw one token for every row, block by block; noise takes id 0 of the weight for id_base."""
    rows, device = source.hidden.shape[0], source.hidden.device
    result = SampleResult(
        ids=torch.empty(rows, dtype=torch.int64, device=device),
        logprobs=torch.empty(rows, dtype=torch.float32, device=device),
        logsumexp=torch.empty(rows, dtype=torch.float32, device=device),
    )
    shape = pass_shape(source, draw=draw)
    block_rows = plan_rows(shape, rows, workspace_bytes)
    if rows == 0:
        return result
    slab = launch.Slab(arena_bytes(shape, block_rows), device)
    blocks = _Blocks(source, shape, block_rows, slab)
    for first in range(0, rows, block_rows):
        slab.rewind(0)
        span = slice(first, min(first + block_rows, rows))
        _sample_block(blocks, draw, result, span, id_base)
    return result


class _Blocks:
    """The operands and buffers of blocks of rows; cuts them from the slab."""

    def __init__(
        self, source: LogitsInput, shape: PassShape, block_rows: int, slab: launch.Slab
    ) -> None:
        self._source = source
        self._config = tile_config(source)
        self._block_rows = block_rows
        self._bounds = _entry_bounds(source, block_rows)
        self.shape = shape
        self.slab = slab

    def product(self, span: slice, *, tempered: bool = False) -> launch.Product:
        """Operands of the rows; the temperature is there if it may scale or `tempered`."""
        source = self._source
        mask = None if source.bitmask is None else _rows(source.bitmask[span])
        return launch.Product(
            config=self._config,
            hidden=source.hidden[span],
            weight=source.weight,
            scale=source.scale,
            softcap=source.softcap,
            bias=None if source.bias is None else _rows(source.bias),
            bitmask=mask,
            temperature=self._temperature(span, tempered),
        )

    def _temperature(self, span: slice, tempered: bool) -> Tensor | None:
        given = self._source.temperature
        if isinstance(given, float) and (given == 1.0 or given < MIN_TEMPERATURE) and not tempered:
            return None
        divisors = self.slab.cut(torch.float32, span.stop - span.start)
        return divisors.copy_(given[span]) if isinstance(given, Tensor) else divisors.fill_(given)

    def partials(self, num_rows: int, ask: Ask, *, draw: bool = False) -> launch.Partials:
        """Buffers of what is left of tiles."""
        cut, num_blocks = self.slab.cut, self.shape.num_blocks

        def floats(wanted: bool) -> Tensor | None:
            return cut(torch.float32, num_rows, num_blocks) if wanted else None

        def ints(wanted: bool) -> Tensor | None:
            return cut(torch.int32, num_rows, num_blocks) if wanted else None

        counted = ask.rank and not self.shape.stored
        has_targets = ask.targets is not None
        return launch.Partials(
            peaks=cut(torch.float32, num_rows, num_blocks),
            sums=cut(torch.float32, num_rows, num_blocks),
            slopes=floats(ask.entropy),
            counts=ints(counted),
            above=cut(torch.float32, num_rows) if counted else None,
            scores=floats(draw),
            places=ints(draw),
            winners=floats(draw),
            target_logits=cut(torch.float32, num_rows) if has_targets else None,
        )

    def pairs(self, num_rows: int, chosen: int) -> launch.Pairs:
        """Buffers of (row, block) pairs; without tiles where rows are stored."""
        cut, grouped = self.slab.cut, not self.shape.stored
        num_pairs, num_blocks = num_rows * chosen, self.shape.num_blocks
        return launch.Pairs(
            blocks=cut(torch.int32, num_rows, chosen),
            slots=cut(torch.int32, num_rows, chosen),
            rows=cut(torch.int32, num_pairs if grouped else 1),
            counts=cut(torch.int32, num_blocks + 1),
            starts=cut(torch.int32, num_blocks + 1),
            tile_starts=cut(torch.int32, num_blocks + 1),
            logits=cut(torch.float32, num_pairs if grouped else 0, self.shape.block_ids),
        )

    def stored(self, product: launch.Product, span: slice) -> Tensor:
        """Logits [R, V] after scale, softcap, bias and sparse changes."""
        stride = self.shape.stored_stride
        rows = self.slab.cut(torch.float32, product.num_rows, stride)
        logits = rows[:, : product.vocab_size]
        launch.store(product, logits)
        adjust = self._source.adjust
        if adjust is not None and self._bounds is not None:
            at = span.start // self._block_rows
            entries = (adjust.row, adjust.ids, adjust.repetition, adjust.add)
            bounds = (self._bounds[at : at + 1], self._bounds[at + 1 : at + 2])
            launch.adjust(logits, entries, bounds, span.start)
        return logits


def _rows(matrix: Tensor) -> Tensor:
    """The matrix or vector with unit stride in its last dimension."""
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def _entry_bounds(source: LogitsInput, block_rows: int) -> Tensor | None:
    """Entries before each block of rows, int64 on the device, where it stays."""
    adjust = source.adjust
    if adjust is None:
        return None
    rows = source.hidden.shape[0]
    edges = torch.arange(
        0, rows + block_rows, block_rows, dtype=torch.int64, device=adjust.row.device
    )
    return torch.searchsorted(adjust.row, edges)


def _score_fused(blocks: _Blocks, ask: Ask, result: LogprobResult, span: slice) -> None:
    num_rows, slab = span.stop - span.start, blocks.slab
    product = blocks.product(span)
    targets = None if ask.targets is None else _rows(ask.targets[span])
    parts = blocks.partials(num_rows, ask)
    mark = slab.used
    if parts.above is not None and ask.above is not None:
        parts.above.copy_(ask.above[span])
        launch.partials(product, parts, targets)
    elif parts.above is not None and targets is not None:
        # The count needs the target's logit, with the bits that the tile will have.
        launch.target_pairs(product, blocks.pairs(num_rows, 1), targets, parts.above)
        slab.rewind(mark)
        parts = replace(parts, target_logits=parts.above)
        launch.partials(product, parts)
    else:
        launch.partials(product, parts, targets)
    merged = _merged(slab, result, span)
    launch.merge(product, parts, merged)
    _leave_logits(parts, ask, merged, result, span)
    if result.top_ids is not None and result.top_logprobs is not None:
        _select(blocks, product, parts, None, merged.exact_lse, result, span)
    if ask.token_ids is not None and result.token_logprobs is not None:
        out = result.token_logprobs[span]
        if ask.shared_ids:
            _shared_ids(blocks, product, ask.token_ids, out)
            ids = ask.token_ids.expand(num_rows, -1)
        else:
            ids = _rows(ask.token_ids[span])
            launch.dots(product, ids, out)
        launch.finish(product, ids, out, merged.exact_lse)


def _leave_logits(
    parts: launch.Partials, ask: Ask, merged: launch.Merged, result: LogprobResult, span: slice
) -> None:
    """Where logits are asked for, let what follows subtract nothing from them."""
    if not ask.logits:
        return
    merged.exact_lse.zero_()
    if result.logprobs is not None and parts.target_logits is not None:
        result.logprobs[span].copy_(parts.target_logits)


def _merged(slab: launch.Slab, result: LogprobResult, span: slice) -> launch.Merged:
    def part(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[span]

    return launch.Merged(
        exact_lse=slab.cut(torch.float64, span.stop - span.start),
        lse=result.logsumexp[span],
        logprobs=part(result.logprobs),
        entropy=part(result.entropy),
        rank=part(result.rank),
    )


def _select(
    blocks: _Blocks,
    product: launch.Product,
    parts: launch.Partials,
    stored: Tensor | None,
    exact_lse: Tensor,
    result: LogprobResult,
    span: slice,
) -> None:
    assert result.top_ids is not None and result.top_logprobs is not None
    num_rows, slab, mark = product.num_rows, blocks.slab, blocks.slab.used
    pairs = blocks.pairs(num_rows, blocks.shape.num_chosen)
    found = slab.cut(torch.int64, num_rows, blocks.shape.found_ids)
    limits = slab.cut(torch.float32, num_rows)
    out = (result.top_logprobs[span], result.top_ids[span])
    launch.select(product, parts, pairs, stored, found, limits, exact_lse, *out)
    slab.rewind(mark)


def _shared_ids(blocks: _Blocks, product: launch.Product, token_ids: Tensor, out: Tensor) -> None:
    """Logits of ids that all rows ask for: the product with their gathered weight rows."""
    mark = blocks.slab.used
    for first in range(0, token_ids.shape[0], PICK_IDS):
        ids = token_ids[first : first + PICK_IDS]
        picked = blocks.slab.cut(product.weight.dtype, ids.shape[0], product.weight.shape[1])
        torch.index_select(product.weight, 0, ids, out=picked)
        bias = None
        if product.bias is not None:
            bias = blocks.slab.cut(product.bias.dtype, ids.shape[0])
            torch.index_select(product.bias, 0, ids, out=bias)
        part = replace(product, weight=picked, bias=bias, bitmask=None, temperature=None)
        launch.store(part, out[:, first : first + PICK_IDS])
        blocks.slab.rewind(mark)


def _score_stored(blocks: _Blocks, ask: Ask, result: LogprobResult, span: slice) -> None:
    num_rows, slab = span.stop - span.start, blocks.slab
    product = blocks.product(span)
    logits = blocks.stored(product, span)
    parts = blocks.partials(num_rows, ask)
    launch.stored_partials(product, logits, parts)
    if ask.targets is not None and parts.target_logits is not None:
        targets = _rows(ask.targets[span])[:, None]
        launch.pick(logits, targets, parts.target_logits[:, None], None)
    merged = _merged(slab, result, span)
    launch.merge(product, parts, merged)
    above = parts.target_logits if ask.above is None else ask.above[span]
    if result.rank is not None and above is not None:
        launch.count_above(logits, product.vocab_size, above, merged.exact_lse, result.rank[span])
    _leave_logits(parts, ask, merged, result, span)
    if ask.token_ids is not None and result.token_logprobs is not None:
        ids = ask.token_ids.expand(num_rows, -1) if ask.shared_ids else ask.token_ids[span]
        launch.pick(logits, _rows(ids), result.token_logprobs[span], merged.exact_lse)
    if result.top_ids is None or result.top_logprobs is None:
        return
    if blocks.shape.fast_top_k:
        _select(blocks, product, parts, logits, merged.exact_lse, result, span)
    else:
        _sort_rows(product, logits, merged.exact_lse, result, span)


def _sort_rows(
    product: launch.Product,
    logits: Tensor,
    exact_lse: Tensor,
    result: LogprobResult,
    span: slice,
) -> None:
    """The k best by sorting rows one at a time; slow, for any k."""
    assert result.top_ids is not None and result.top_logprobs is not None
    k = result.top_ids.shape[1]
    for row in range(product.num_rows):
        values, ids = logits[row].sort(descending=True, stable=True)
        result.top_logprobs[span.start + row].copy_(values[:k])
        result.top_ids[span.start + row].copy_(ids[:k])
        del values, ids
    launch.finish(product, None, result.top_logprobs[span], exact_lse)


def _sample_block(
    blocks: _Blocks, draw: DrawInput, result: SampleResult, span: slice, id_base: int
) -> None:
    num_rows, slab = span.stop - span.start, blocks.slab
    product = blocks.product(span, tempered=True)
    keys = launch.Draw(
        seeds=_rows(draw.seeds[span]), positions=_rows(draw.positions[span]), id_base=id_base
    )
    parts = blocks.partials(num_rows, Ask(), draw=True)
    merged = launch.Merged(
        exact_lse=slab.cut(torch.float64, num_rows),
        lse=result.logsumexp[span],
        ids=result.ids[span],
        drawn_logprobs=result.logprobs[span],
    )
    if not blocks.shape.stored:
        launch.partials(product, parts, draw=keys)
        launch.merge(product, parts, merged)
        return
    logits = blocks.stored(product, span)
    launch.stored_partials(product, logits, parts, keys)
    launch.merge(product, parts, merged)
    if draw.may_filter:
        filters = (
            _numbers(slab, draw.top_k, 0, torch.int64, span),
            _numbers(slab, draw.top_p, 1.0, torch.float64, span),
            _numbers(slab, draw.min_p, 0.0, torch.float64, span),
        )
        best = _candidates(blocks, product, parts, logits)
        open_rows = slab.cut(torch.int32, num_rows)
        launch.filter_rows(product, logits, parts, keys, filters, best, open_rows, merged)


def _candidates(
    blocks: _Blocks, product: launch.Product, parts: launch.Partials, logits: Tensor
) -> tuple[Tensor, Tensor]:
    """The best logits and ids of each row: enough for most draws that filter."""
    num_rows, cut, shape = product.num_rows, blocks.slab.cut, blocks.shape
    best = cut(torch.float32, num_rows, shape.num_kept), cut(torch.int64, num_rows, shape.num_kept)
    nothing = cut(torch.float64, num_rows).zero_()  # subtracted from logits, which stay logits
    mark = blocks.slab.used
    pairs = blocks.pairs(num_rows, shape.num_chosen)
    found = cut(torch.int64, num_rows, shape.found_ids)
    limits = cut(torch.float32, num_rows)
    launch.select(product, parts, pairs, logits, found, limits, nothing, *best)
    blocks.slab.rewind(mark)
    return best


def _numbers(
    slab: launch.Slab, value: Tensor | float | None, off: float, dtype: torch.dtype, span: slice
) -> Tensor:
    """One number a row, `off` where there is none."""
    numbers = slab.cut(dtype, span.stop - span.start)
    if isinstance(value, Tensor):
        return numbers.copy_(value[span])
    return numbers.fill_(off if value is None else value)
