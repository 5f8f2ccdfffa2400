"""Kernels that find the k best ids of rows from block maxima: only winning tiles are looked at.

Owns: the choice of blocks, their grouping for recomputation, and the selection inside. It is not
the product (triton_logprobs).

Legend: R rows, k best asked, B = min(k, NB) blocks chosen of a row, N ids of a block.

    choose     the B blocks with the largest maxima, equal ones by number: they hold the k best,
               for an id in another block has B block winners before it, all of other ids
    schedule   where the pairs of each block start, and how many tiles they fill
    place      a slot for every (row, block) pair, pairs of a block side by side
    select     of the B blocks, the ids at or above the smallest of the B maxima (at least k if
               B = k); sorted if few, else merged block by block, which is always right

Order is by logit, then lowest id, everywhere. Slots depend on timing within a block of pairs;
values do not depend on slots.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import triton
import triton.language as tl

from seawall.kernels.triton_parts import INF, LEAST_KEY, key_id, key_logit, rank_key, unordered


@triton.jit
def choose_kernel(
    peaks, num_blocks, num_chosen, num_best, blocks, spots, limits, pair_counts,
    GROUPED: tl.constexpr, BLOCKS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Blocks [R, B] of each row, best first; the limit below which no id can be among the best."""
    row = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, BLOCKS)
    inside = numbers < num_blocks
    peak = tl.load(peaks + row * num_blocks + numbers, mask=inside, other=-INF)
    key = tl.where(inside, rank_key(peak, numbers), LEAST_KEY)
    best = tl.topk(key, KEPT)
    places = tl.arange(0, KEPT)
    chosen = places < num_chosen
    block = tl.minimum(tl.where(chosen, key_id(best), 0), num_blocks - 1)
    tl.store(blocks + row * num_chosen + places, block, mask=chosen)
    last = tl.max(tl.where(places == num_chosen - 1, best, LEAST_KEY), 0)
    limit = tl.where(num_chosen == num_best, unordered((last >> 32).to(tl.int32)), -INF)
    tl.store(limits + row, limit)
    if GROUPED:
        spot = tl.atomic_add(pair_counts + block, 1, mask=chosen, sem="relaxed")
        tl.store(spots + row * num_chosen + places, spot, mask=chosen)


@triton.jit
def target_block_kernel(
    targets, num_rows, blocks, spots, pair_counts, N: tl.constexpr, M: tl.constexpr
):
    """The one block of each row that holds its target, for the grouping."""
    rows = tl.program_id(0) * M + tl.arange(0, M)
    ok = rows < num_rows
    block = (tl.load(targets + rows, mask=ok, other=0) // N).to(tl.int32)
    tl.store(blocks + rows, block, mask=ok)
    spot = tl.atomic_add(pair_counts + block, 1, mask=ok, sem="relaxed")
    tl.store(spots + rows, spot, mask=ok)


@triton.jit
def schedule_kernel(
    pair_counts, num_blocks, pair_starts, tile_starts, BLOCKS: tl.constexpr, M: tl.constexpr
):
    """Running sums [NB + 1] of pairs and of tiles of M pairs; one program."""
    numbers = tl.arange(0, BLOCKS)
    inside = numbers < num_blocks
    count = tl.load(pair_counts + numbers, mask=inside, other=0)
    tl.store(pair_starts + 1 + numbers, tl.cumsum(count, 0), mask=inside)
    tl.store(tile_starts + 1 + numbers, tl.cumsum((count + M - 1) // M, 0), mask=inside)
    tl.store(pair_starts + numbers, 0, mask=numbers == 0)
    tl.store(tile_starts + numbers, 0, mask=numbers == 0)


@triton.jit
def place_kernel(blocks, spots, pair_starts, num_pairs, num_chosen, pair_rows, SIZE: tl.constexpr):
    """`spots` become slots, and slots learn their rows."""
    pairs = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    ok = pairs < num_pairs
    block = tl.load(blocks + pairs, mask=ok, other=0)
    slot = tl.load(pair_starts + block, mask=ok, other=0) + tl.load(spots + pairs, mask=ok, other=0)
    tl.store(spots + pairs, slot, mask=ok)
    tl.store(pair_rows + slot, pairs // num_chosen, mask=ok)


@triton.jit
def _keys_of_block(logits, stride_slot, slot, block, vocab, N: tl.constexpr, WIDE: tl.constexpr):
    """Keys of one block's ids; the least key in places past the block or the vocabulary."""
    inside = tl.arange(0, WIDE)
    ids = block * N + inside
    ok = (inside < N) & (ids < vocab)
    x = tl.load(logits + slot.to(tl.int64) * stride_slot + inside, mask=ok, other=0.0)
    return tl.where(ok, rank_key(x, ids), LEAST_KEY)


@triton.jit
def select_kernel(
    logits, stride_row, stride_slot, spots, blocks, limits, found,
    num_chosen, num_best, vocab, exact_lse, top_logprobs, top_ids,
    GROUPED: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr, KEPT: tl.constexpr,
    FOUND: tl.constexpr,
):  # fmt: skip
    """The k best of a row from its chosen blocks, grouped pairs or stored rows of logits."""
    row = tl.program_id(0).to(tl.int64)
    limit = tl.load(limits + row)
    base = logits + row * stride_row
    count = 0
    for j in range(num_chosen):
        block = tl.load(blocks + row * num_chosen + j)
        slot = block
        if GROUPED:
            slot = tl.load(spots + row * num_chosen + j)
        key = _keys_of_block(base, stride_slot, slot, block, vocab, N, WIDE)
        good = (key != LEAST_KEY) & (key_logit(key) >= limit)
        place = count + tl.cumsum(good.to(tl.int32), 0) - 1
        tl.store(found + row * FOUND + place, key, mask=good & (place < FOUND))
        count += tl.sum(good.to(tl.int32), 0)
    if count <= FOUND:
        tl.debug_barrier()
        numbers = tl.arange(0, FOUND)
        key = tl.load(found + row * FOUND + numbers, mask=numbers < count, other=LEAST_KEY)
        best = tl.topk(key, KEPT)
    else:
        best = tl.full((KEPT,), LEAST_KEY, dtype=tl.int64)
        for j in range(num_chosen):
            block = tl.load(blocks + row * num_chosen + j)
            slot = block
            if GROUPED:
                slot = tl.load(spots + row * num_chosen + j)
            key = _keys_of_block(base, stride_slot, slot, block, vocab, N, WIDE)
            # Of two sorted lists, one rising: the larger of each pair are the best of both.
            other = tl.sort(tl.topk(key, KEPT), descending=False)
            best = tl.sort(tl.maximum(best, other), descending=True)
    places = tl.arange(0, KEPT)
    ok = places < num_best
    exact = tl.load(exact_lse + row)
    ids = tl.minimum(tl.maximum(key_id(best), 0), vocab - 1)
    value = (key_logit(best).to(tl.float64) - exact).to(tl.float32)
    tl.store(top_ids + row * num_best + places, ids.to(tl.int64), mask=ok)
    tl.store(top_logprobs + row * num_best + places, value, mask=ok)
