"""Kernels of the LM head: the fused product, the stored product, and the merge of what is left.

Owns: the kernels that read hidden and weight, and the merge of the blocks of a row. It is not the
selection of the best ids (triton_topk), nor the draw among filtered ids (triton_sampling), nor
the plan of row blocks (seawall.memory.footprint_logits_cuda).

Legend: R rows of a call's block, V vocabulary, H hidden, M x N a tile, NB = ceil(V / N) blocks.

Row-indexed arrays are of the block of rows, [R] or [R, NB]; a tile is written by one program, and
blocks are merged in one fixed order, so that nothing depends on timing.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import triton
import triton.language as tl

from seawall.kernels.triton_parts import (
    FARTHEST,
    INF,
    LOG2_E,
    MIN_TEMPERATURE,
    bound_logits,
    reduce_tile,
    shape_logits,
    tile_order,
    tile_product,
)


@triton.jit
def _partials_of_tile(
    tile, h, w, num_rows, vocab, hidden_size,
    stride_h, stride_hk, stride_w, stride_wk,
    scale, softcap, bias, bitmask, stride_mask, temperature,
    peaks, sums, slopes, counts, above, targets, target_logits,
    seeds, positions, id_base, scores, places, winners,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr,
    TEMPER: tl.constexpr, ENTROPY: tl.constexpr, RANK: tl.constexpr, TARGET: tl.constexpr,
    SAMPLE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    BULK_H: tl.constexpr, BULK_W: tl.constexpr, EVEN_K: tl.constexpr, EVEN_V: tl.constexpr,
    WIDEN: tl.constexpr, PRECISION: tl.constexpr, LOOPED: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.cdiv(vocab, N)
    row_tile, block = tile_order(tile, tl.cdiv(num_rows, M), num_blocks, GROUP)
    row0, col0 = row_tile * M, block * N
    rows = row0 + tl.arange(0, M)
    cols = col0 + tl.arange(0, N)
    acc = tile_product(
        h, w, rows, row0, col0, num_rows, vocab, hidden_size,
        stride_h, stride_hk, stride_w, stride_wk,
        M, N, K, BULK_H, BULK_W, EVEN_K, WIDEN, PRECISION,
    )  # fmt: skip
    if SOFTCAP or BIAS or MASK:
        bad = tl.sum(acc * 0.0, 1) != 0.0  # infinity and NaN leave NaN
    else:
        bad = tl.min(acc, 1) == -INF  # what else is not finite makes the sum NaN by itself
    x = shape_logits(acc, cols, vocab, scale, softcap, bias, SCALE, SOFTCAP, BIAS)
    x = bound_logits(
        x, rows, cols, num_rows, vocab, bitmask, stride_mask, temperature, MASK, TEMPER, EVEN_V
    )
    reduce_tile(
        x, bad, rows, cols, num_rows, rows.to(tl.int64) * num_blocks + block, col0, vocab,
        peaks, sums, slopes, counts, above, targets, target_logits,
        temperature, seeds, positions, id_base, scores, places, winners,
        ENTROPY, RANK, TARGET, SAMPLE, N, LOOPED,
    )  # fmt: skip


@triton.jit
def partials_kernel(
    h, w, num_rows, vocab, hidden_size,
    stride_h, stride_hk, stride_w, stride_wk,
    scale, softcap, bias, bitmask, stride_mask, temperature,
    peaks, sums, slopes, counts, above, targets, target_logits,
    seeds, positions, id_base, scores, places, winners,
    num_programs,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr,
    TEMPER: tl.constexpr, ENTROPY: tl.constexpr, RANK: tl.constexpr, TARGET: tl.constexpr,
    SAMPLE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    BULK_H: tl.constexpr, BULK_W: tl.constexpr, EVEN_K: tl.constexpr, EVEN_V: tl.constexpr,
    WIDEN: tl.constexpr, PRECISION: tl.constexpr,
    PERSISTENT: tl.constexpr, SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """Product, processing and reduction of every tile; the logits stay in registers."""
    if PERSISTENT:
        num_tiles = tl.cdiv(num_rows, M) * tl.cdiv(vocab, N)
        for tile in tl.range(
            tl.program_id(0), num_tiles, num_programs, flatten=True, warp_specialize=SPECIALIZE
        ):
            _partials_of_tile(
                tile, h, w, num_rows, vocab, hidden_size,
                stride_h, stride_hk, stride_w, stride_wk,
                scale, softcap, bias, bitmask, stride_mask, temperature,
                peaks, sums, slopes, counts, above, targets, target_logits,
                seeds, positions, id_base, scores, places, winners,
                SCALE, SOFTCAP, BIAS, MASK, TEMPER, ENTROPY, RANK, TARGET, SAMPLE,
                M, N, K, GROUP, BULK_H, BULK_W, EVEN_K, EVEN_V, WIDEN, PRECISION, True,
            )  # fmt: skip
    else:
        _partials_of_tile(
            tl.program_id(0), h, w, num_rows, vocab, hidden_size,
            stride_h, stride_hk, stride_w, stride_wk,
            scale, softcap, bias, bitmask, stride_mask, temperature,
            peaks, sums, slopes, counts, above, targets, target_logits,
            seeds, positions, id_base, scores, places, winners,
            SCALE, SOFTCAP, BIAS, MASK, TEMPER, ENTROPY, RANK, TARGET, SAMPLE,
            M, N, K, GROUP, BULK_H, BULK_W, EVEN_K, EVEN_V, WIDEN, PRECISION, False,
        )  # fmt: skip


@triton.jit
def store_kernel(
    h, w, num_rows, vocab, hidden_size,
    stride_h, stride_hk, stride_w, stride_wk,
    scale, softcap, bias, logits, stride_logits,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    BULK_H: tl.constexpr, BULK_W: tl.constexpr, EVEN_K: tl.constexpr,
    WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Product, scale, softcap and bias of a few rows into memory; NaN where it is not finite."""
    row_tile, block = tile_order(tl.program_id(0), tl.cdiv(num_rows, M), tl.cdiv(vocab, N), GROUP)
    row0, col0 = row_tile * M, block * N
    rows = row0 + tl.arange(0, M)
    cols = col0 + tl.arange(0, N)
    acc = tile_product(
        h, w, rows, row0, col0, num_rows, vocab, hidden_size,
        stride_h, stride_hk, stride_w, stride_wk,
        M, N, K, BULK_H, BULK_W, EVEN_K, WIDEN, PRECISION,
    )  # fmt: skip
    x = shape_logits(acc, cols, vocab, scale, softcap, bias, SCALE, SOFTCAP, BIAS)
    x = tl.where(acc * 0.0 == 0.0, x, float("nan"))
    tl.store(
        logits + rows.to(tl.int64)[:, None] * stride_logits + cols[None, :],
        x,
        mask=(rows < num_rows)[:, None] & (cols < vocab)[None, :],
    )


@triton.jit
def pairs_kernel(
    h, w, num_rows, vocab, hidden_size,
    stride_h, stride_hk, stride_w, stride_wk,
    scale, softcap, bias, bitmask, stride_mask, temperature,
    pair_rows, pair_starts, tile_starts, num_blocks, logits,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr,
    TEMPER: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCKS: tl.constexpr,
    BULK_W: tl.constexpr, EVEN_K: tl.constexpr, EVEN_V: tl.constexpr,
    WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Processed logits [pairs, N] of (row, block) pairs, which lie sorted by block.

    `tile_starts` [NB + 1] counts the tiles of M pairs before each block; the grid is an upper
    bound, and programs past the last tile end at once.
    """
    tile = tl.program_id(0)
    if tile >= tl.load(tile_starts + num_blocks):
        return
    numbers = tl.arange(0, BLOCKS)
    starts = tl.load(tile_starts + 1 + numbers, mask=numbers < num_blocks, other=2147483647)
    block = tl.sum((starts <= tile).to(tl.int32), 0)
    first = tl.load(pair_starts + block) + (tile - tl.load(tile_starts + block)) * M
    end = tl.load(pair_starts + block + 1)
    slots = first + tl.arange(0, M)
    rows = tl.load(pair_rows + slots, mask=slots < end, other=0)
    col0 = block * N
    cols = col0 + tl.arange(0, N)
    acc = tile_product(
        h, w, rows, 0, col0, num_rows, vocab, hidden_size,
        stride_h, stride_hk, stride_w, stride_wk,
        M, N, K, False, BULK_W, EVEN_K, WIDEN, PRECISION,
    )  # fmt: skip
    x = shape_logits(acc, cols, vocab, scale, softcap, bias, SCALE, SOFTCAP, BIAS)
    x = bound_logits(
        x, rows, cols, num_rows, vocab, bitmask, stride_mask, temperature, MASK, TEMPER, EVEN_V
    )
    tl.store(
        logits + slots.to(tl.int64)[:, None] * N + tl.arange(0, N)[None, :],
        x,
        mask=(slots < end)[:, None],
    )


@triton.jit
def merge_kernel(
    peaks, sums, slopes, counts, target_logits, scores, places, winners,
    temperature, num_blocks,
    exact_lse, lse, logprobs, entropy, rank, ids, drawn_logprobs,
    ENTROPY: tl.constexpr, RANK: tl.constexpr, TARGET: tl.constexpr, SAMPLE: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """One row: log-sum-exp and the rest from its blocks, in float64 across blocks."""
    row = tl.program_id(0)
    numbers = tl.arange(0, BLOCKS)
    inside = numbers < num_blocks
    at = row.to(tl.int64) * num_blocks + numbers
    peak_B = tl.load(peaks + at, mask=inside, other=-INF)
    sum_B = tl.load(sums + at, mask=inside, other=0.0)
    peak = tl.max(peak_B, 0)
    shift = tl.where(peak == -INF, 0.0, peak)
    offset_B = tl.maximum(peak_B - shift, FARTHEST)
    weight_B = tl.exp2(offset_B * LOG2_E)
    # A sum that is NaN marks its row, also in a block that weighs nothing.
    mark = tl.sum(tl.where(sum_B != sum_B, 1, 0), 0)
    total = tl.sum((weight_B * sum_B).to(tl.float64), 0)
    known = (mark == 0) & (total > 0) & (total < INF) & (tl.abs(peak) < INF)
    exact = tl.where(known, tl.log(tl.where(known, total, 1.0)) + peak.to(tl.float64), float("nan"))
    tl.store(exact_lse + row, exact)
    tl.store(lse + row, exact.to(tl.float32))
    if TARGET:
        logit = tl.load(target_logits + row).to(tl.float64)
        tl.store(logprobs + row, (logit - exact).to(tl.float32))
    if ENTROPY:
        slope_B = tl.load(slopes + at, mask=inside, other=0.0) + offset_B * sum_B
        slope = tl.sum((weight_B * slope_B).to(tl.float64), 0)
        value = tl.log(tl.where(known, total, 1.0)) - slope / total
        tl.store(entropy + row, tl.where(known, value, float("nan")).to(tl.float32))
    if RANK:
        count = tl.sum(tl.load(counts + at, mask=inside, other=0), 0)
        tl.store(rank + row, tl.where(known, count + 1, 0).to(tl.int64))
    if SAMPLE:
        score_B = tl.load(scores + at, mask=inside, other=-INF)
        best = tl.argmax(score_B, 0)
        place = tl.load(places + row.to(tl.int64) * num_blocks + best)
        logit = tl.load(winners + row.to(tl.int64) * num_blocks + best).to(tl.float64)
        tl.store(ids + row, tl.where(known, place, 0).to(tl.int64))
        tl.store(drawn_logprobs + row, (logit - exact).to(tl.float32))


@triton.jit
def dots_kernel(
    h, w, token_ids, out, num_ids, vocab, hidden_size,
    stride_h, stride_hk, stride_w, stride_wk, stride_ids, stride_out,
    scale, softcap, bias,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Logits of a row at N ids of its own: dot products of gathered weight rows."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * N + tl.arange(0, N)
    ids = tl.load(token_ids + row * stride_ids + places, mask=places < num_ids, other=0)
    ids = ids.to(tl.int64)
    ks = tl.arange(0, K)
    acc = tl.zeros((N, K), dtype=tl.float32)
    for k in range(0, hidden_size, K):
        ok = k + ks < hidden_size
        a = tl.load(h + row * stride_h + (k + ks) * stride_hk, mask=ok, other=0.0)
        b = tl.load(
            w + ids[:, None] * stride_w + (k + ks)[None, :] * stride_wk,
            mask=(places < num_ids)[:, None] & ok[None, :],
            other=0.0,
        )
        acc += a.to(tl.float32)[None, :] * b.to(tl.float32)
    dot = tl.sum(acc, 1)
    x = dot
    if SCALE:
        x = x * scale
    if SOFTCAP:
        t = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E / softcap))
        tanh = (1.0 - t) / (1.0 + t)
        x = softcap * tl.where(x < 0, -tanh, tanh)
    if BIAS:
        x = x + tl.load(bias + ids).to(tl.float32)
    tl.store(out + row * stride_out + places, x, mask=places < num_ids)


@triton.jit
def finish_kernel(
    values, token_ids, num_ids, stride_values, stride_ids, bitmask, stride_mask, temperature,
    exact_lse,
    MASK: tl.constexpr, TEMPER: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Logits at asked ids, made before bitmask and temperature, become logprobs in place."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * N + tl.arange(0, N)
    ok = places < num_ids
    x = tl.load(values + row * stride_values + places, mask=ok, other=0.0)
    if MASK:
        ids = tl.load(token_ids + row * stride_ids + places, mask=ok, other=0)
        word = tl.load(bitmask + row * stride_mask + ids // 32, mask=ok, other=0)
        x = tl.where(((word >> (ids % 32).to(tl.int32)) & 1) == 0, -INF, x)
    if TEMPER:
        divisor = tl.load(temperature + row)
        x = x * (1.0 / tl.where(divisor < MIN_TEMPERATURE, 1.0, divisor))
    x = (x.to(tl.float64) - tl.load(exact_lse + row)).to(tl.float32)
    tl.store(values + row * stride_values + places, x, mask=ok)


@triton.jit
def pick_kernel(
    values, ids, out, num_ids, stride_values, stride_ids, stride_out,
    exact_lse, LOGPROB: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Values of stored rows at ids, as they are or less the log-sum-exp."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * N + tl.arange(0, N)
    ok = places < num_ids
    at = tl.load(ids + row * stride_ids + places, mask=ok, other=0).to(tl.int64)
    x = tl.load(values + row * stride_values + at, mask=ok, other=0.0)
    if LOGPROB:
        x = (x.to(tl.float64) - tl.load(exact_lse + row)).to(tl.float32)
    tl.store(out + row * stride_out + places, x, mask=ok)


@triton.jit
def pair_target_kernel(
    pair_logits, slots, targets, out, num_rows, N: tl.constexpr, M: tl.constexpr
):
    """The target's logit of each row, from the recomputed tile of its block."""
    rows = tl.program_id(0) * M + tl.arange(0, M)
    ok = rows < num_rows
    slot = tl.load(slots + rows, mask=ok, other=0).to(tl.int64)
    place = tl.load(targets + rows, mask=ok, other=0) % N
    tl.store(out + rows, tl.load(pair_logits + slot * N + place, mask=ok), mask=ok)


@triton.jit
def count_kernel(logits, stride_logits, above, exact_lse, rank, vocab, N: tl.constexpr):
    """Rank from a stored row: one more than the number of logits above the target's."""
    row = tl.program_id(0).to(tl.int64)
    limit = tl.load(above + row)
    count = tl.zeros((N,), dtype=tl.int32)
    for first in range(0, vocab, N):
        cols = first + tl.arange(0, N)
        x = tl.load(logits + row * stride_logits + cols, mask=cols < vocab, other=-INF)
        count += (x > limit).to(tl.int32)
    exact = tl.load(exact_lse + row)
    number = tl.where(exact == exact, tl.sum(count, 0) + 1, 0)
    tl.store(rank + row, number.to(tl.int64))
