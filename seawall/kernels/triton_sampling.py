"""Kernels of the general path: stored logits of a few rows, changed, reduced, filtered and drawn.

Owns: what happens to rows whose logits are in memory for a while, because sparse changes, top-k,
top-p or min-p need them. It is not the product, nor the draw in the product's epilogue, whose
noise is the same.

Legend: R rows, V vocabulary, N ids of a block.

The filters, exactly and without sorting. In falling order of (logit, lowest id), the kept ids are
a prefix, so one key and a number of equals among which the lowest ids stay say which:

    top_k   the largest key with at least k ids at or above it
    top_p   the smallest key such that the mass above it is less than p of the mass of the k best
    min_p   the smallest logit at least min_p times as probable as the best

Keys are int32, so each search takes 16 passes over the row with three keys tried in each. Most
rows need none: if the filters certainly end among a row's best few, the draw is made from those.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import triton
import triton.language as tl

from seawall.kernels.triton_parts import (
    INF,
    LOG2_E,
    MIN_TEMPERATURE,
    bound_logits,
    clock,
    clock_bits,
    ordered,
    quick_inverse,
    reduce_tile,
    row_key,
)


@triton.jit
def adjust_kernel(
    logits, stride_logits, entry_rows, entry_ids, repetition, add, first_entry, end_entry,
    first_row, num_rows, SIZE: tl.constexpr,
):  # fmt: skip
    """Apply the entries of rows [first_row, first_row + num_rows); no two share a place.

    `first_entry` and `end_entry` point at the bounds, which never leave the device.
    """
    begin, end = tl.load(first_entry), tl.load(end_entry)
    step = tl.num_programs(0) * SIZE
    for base in range(begin + tl.program_id(0) * SIZE, end, step):
        entry = base + tl.arange(0, SIZE)
        ok = entry < end
        row = tl.load(entry_rows + entry, mask=ok, other=0) - first_row
        ids = tl.load(entry_ids + entry, mask=ok, other=0)
        at = logits + row * stride_logits + ids
        x = tl.load(at, mask=ok, other=0.0)
        r = tl.load(repetition + entry, mask=ok, other=1.0)
        x = tl.where(x > 0, x / r, x * r) + tl.load(add + entry, mask=ok, other=0.0)
        tl.store(at, x, mask=ok)


@triton.jit
def stored_partials_kernel(
    logits, stride_logits, num_rows, vocab, bitmask, stride_mask, temperature,
    peaks, sums, slopes, seeds, positions, id_base, scores, places, winners,
    MASK: tl.constexpr, TEMPER: tl.constexpr, ENTROPY: tl.constexpr, SAMPLE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Bitmask and temperature in place, and what is left of each block, as in the fused product."""
    block = tl.program_id(0)
    rows = tl.program_id(1) * M + tl.arange(0, M)
    col0 = block * N
    cols = col0 + tl.arange(0, N)
    ok = (rows < num_rows)[:, None] & (cols < vocab)[None, :]
    at = logits + rows.to(tl.int64)[:, None] * stride_logits + cols[None, :]
    raw = tl.load(at, mask=ok, other=0.0)
    bad = tl.sum((raw != raw).to(tl.int32), 1) > 0
    x = bound_logits(
        raw, rows, cols, num_rows, vocab, bitmask, stride_mask, temperature, MASK, TEMPER, False
    )
    if MASK or TEMPER:
        tl.store(at, x, mask=ok)
    reduce_tile(
        x, bad, rows, cols, num_rows,
        rows.to(tl.int64) * tl.num_programs(0) + block, col0, vocab,
        peaks, sums, slopes, peaks, peaks, peaks, peaks,
        temperature, seeds, positions, id_base, scores, places, winners,
        ENTROPY, False, False, SAMPLE, N, False,
    )  # fmt: skip


@triton.jit
def _above(base, vocab, peak, key_a, key_b, key_c, N: tl.constexpr):
    """Numbers and masses (float64) of ids with keys at or above each of three keys."""
    count_a = tl.zeros((N,), dtype=tl.int32)
    count_b = tl.zeros((N,), dtype=tl.int32)
    count_c = tl.zeros((N,), dtype=tl.int32)
    mass_a = tl.zeros((N,), dtype=tl.float64)
    mass_b = tl.zeros((N,), dtype=tl.float64)
    mass_c = tl.zeros((N,), dtype=tl.float64)
    for first in range(0, vocab, N):
        cols = first + tl.arange(0, N)
        ok = cols < vocab
        x = tl.load(base + cols, mask=ok, other=-INF)
        key = ordered(x)
        # Widened once: the conversion is the slowest step of the loop.
        power = tl.where(ok, tl.exp2((x - peak) * LOG2_E), 0.0).to(tl.float64)
        a, b, c = ok & (key >= key_a), ok & (key >= key_b), ok & (key >= key_c)
        count_a += a.to(tl.int32)
        count_b += b.to(tl.int32)
        count_c += c.to(tl.int32)
        mass_a += tl.where(a, power, 0.0)
        mass_b += tl.where(b, power, 0.0)
        mass_c += tl.where(c, power, 0.0)
    return (
        tl.sum(count_a, 0), tl.sum(count_b, 0), tl.sum(count_c, 0),
        tl.sum(mass_a, 0), tl.sum(mass_b, 0), tl.sum(mass_c, 0),
    )  # fmt: skip


@triton.jit
def _search(base, vocab, peak, wanted_count, wanted_mass, BY_MASS: tl.constexpr, N: tl.constexpr):
    """The largest key with at least the wanted number, or mass, at or above it.

    The answer starts at the least key, which everything is at or above, and gains two bits in
    each pass.
    """
    key = tl.full((), -(2**31), tl.int64)
    for step in range(16):
        unit = tl.full((), 1, tl.int64) << (30 - 2 * step)
        a, b, c = key + unit, key + 2 * unit, key + 3 * unit
        na, nb, nc, ma, mb, mc = _above(
            base, vocab, peak, a.to(tl.int32), b.to(tl.int32), c.to(tl.int32), N
        )
        if BY_MASS:
            more = (ma >= wanted_mass).to(tl.int64) + (mb >= wanted_mass).to(tl.int64)
            more += (mc >= wanted_mass).to(tl.int64)
        else:
            more = (na >= wanted_count).to(tl.int64) + (nb >= wanted_count).to(tl.int64)
            more += (nc >= wanted_count).to(tl.int64)
        key += more * unit
    return key.to(tl.int32)


@triton.jit
def _at(base, vocab, peak, key, N: tl.constexpr):
    """Number of ids at and above the key, and mass strictly above and at it."""
    above = tl.where(key == 2147483647, key, key + 1)
    n_at, n_above, _, m_at, m_above, _ = _above(base, vocab, peak, key, above, above, N)
    return n_at - n_above, n_above, m_above, m_at - m_above


@triton.jit
def few_kernel(
    best, best_ids, num_best, vocab, exact_lse, temperature, top_k, top_p, min_p,
    seeds, positions, id_base, open_rows, ids, logprobs, KEPT: tl.constexpr,
):  # fmt: skip
    """Draw from a row's best logits if they certainly hold all that the filters keep.

    Rows that do not filter keep what the merge wrote; open rows are those that are not certain.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.load(top_k + row).to(tl.int64)
    p = tl.load(top_p + row).to(tl.float64)
    floor = tl.load(min_p + row).to(tl.float64)
    exact = tl.load(exact_lse + row)
    by_count, by_mass = (k > 0) & (k < vocab), p < 1.0
    greedy = tl.load(temperature + row) < MIN_TEMPERATURE
    tl.store(open_rows + row, 0)
    if greedy | (exact != exact) | ((by_count | by_mass | (floor > 0.0)) == 0):
        return
    cols = tl.arange(0, KEPT)
    ok = cols < num_best
    x = tl.load(best + row * num_best + cols, mask=ok, other=-INF)
    own = tl.load(best_ids + row * num_best + cols, mask=ok, other=0).to(tl.int32)
    peak = tl.max(x, 0)
    power = tl.where(ok, tl.exp2((x - peak) * LOG2_E), 0.0)
    inside = ok & ((by_count == 0) | (cols < k))
    wide = tl.where(inside, power.to(tl.float64), 0.0)
    mass = tl.exp(exact - peak.to(tl.float64))
    if by_count:
        mass = tl.sum(wide, 0)
    before = tl.cumsum(wide, 0) - wide
    keep = inside & ((by_mass == 0) | (before < p * mass)) & (wide >= floor)
    keep = keep | (cols == 0)
    last = cols == num_best - 1
    goes_on = tl.max((last & keep & (x > -INF)).to(tl.int32), 0) > 0
    # The mass of the k best is known only from all of them.
    unknown = by_count & by_mass & (tl.max((last & (x > -INF)).to(tl.int32), 0) > 0)
    beyond = (num_best < vocab) & ((by_count == 0) | (k > num_best))
    is_open = beyond & (goes_on | unknown)
    tl.store(open_rows + row, is_open.to(tl.int32))
    if is_open:
        return
    low, high = row_key(tl.load(seeds + row), tl.load(positions + row))
    race = tl.where(keep, power * quick_inverse(clock(clock_bits(own + id_base, low, high))), -1.0)
    _, place = tl.max(race, 0, return_indices=True)
    chosen = cols == place
    drawn = tl.sum(tl.where(chosen, own, 0), 0)
    value = tl.sum(tl.where(chosen, x, 0.0), 0).to(tl.float64)
    tl.store(ids + row, drawn.to(tl.int64))
    tl.store(logprobs + row, (value - exact).to(tl.float32))


@triton.jit
def filter_kernel(
    logits, stride_logits, vocab, exact_lse, peaks, num_blocks,
    top_k, top_p, min_p, seeds, positions, id_base, open_rows, ids, logprobs,
    BLOCKS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Draw again for rows that few_kernel left open; the others keep what was written."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(open_rows + row) == 0:
        return
    k = tl.load(top_k + row).to(tl.int64)
    p = tl.load(top_p + row).to(tl.float64)
    floor = tl.load(min_p + row).to(tl.float64)
    exact = tl.load(exact_lse + row)
    by_count, by_mass = (k > 0) & (k < vocab), p < 1.0
    base = logits + row * stride_logits
    numbers = tl.arange(0, BLOCKS)
    peak = tl.max(
        tl.load(peaks + row * num_blocks + numbers, mask=numbers < num_blocks, other=-INF), 0
    )
    # Ids with keys above `key` are kept, and the `equals` lowest ids among those with the key.
    key = tl.full((), -(2**31), tl.int32)
    equals = tl.full((), 0, tl.int32) + vocab
    mass = tl.exp(exact - peak.to(tl.float64))
    if by_count:
        key = _search(base, vocab, peak, k, 0.0, False, N)
        ties, above, mass_above, mass_at = _at(base, vocab, peak, key, N)
        equals = (k - above).to(tl.int32)
        mass = mass_above + mass_at * (equals.to(tl.float64) / ties.to(tl.float64))
    if by_mass:
        wanted = p * mass
        key_p = _search(base, vocab, peak, 0, wanted, True, N)
        ties, _, mass_above, mass_at = _at(base, vocab, peak, key_p, N)
        # Nothing lies at the least key, where the search ends if rounding left too little mass.
        one = tl.where(mass_at > 0, mass_at / tl.maximum(ties, 1).to(tl.float64), 1.0)
        needed = tl.ceil(tl.maximum(wanted - mass_above, 0.0) / one)
        equals_p = tl.maximum(tl.minimum(needed, ties.to(tl.float64)), 1.0).to(tl.int32)
        if key_p > key:
            key = key_p
            equals = equals_p
        elif key_p == key:
            equals = tl.minimum(equals, equals_p)
    low, high = row_key(tl.load(seeds + row), tl.load(positions + row))
    fastest = tl.full((), -1.0, tl.float32)
    drawn = tl.full((), 0, tl.int32)
    seen = tl.full((), 0, tl.int32)
    for first in range(0, vocab, N):
        cols = first + tl.arange(0, N)
        ok = cols < vocab
        x = tl.load(base + cols, mask=ok, other=-INF)
        own = ordered(x)
        tie = ok & (own == key)
        rank = seen + tl.cumsum(tie.to(tl.int32), 0)
        power = tl.exp2((x - peak) * LOG2_E)
        keep = ok & ((own > key) | (tie & (rank <= equals))) & (power.to(tl.float64) >= floor)
        e = clock(clock_bits(cols + id_base, low, high))
        race = tl.where(keep, power * quick_inverse(e), -1.0)
        best, place = tl.max(race, 0, return_indices=True)
        if best > fastest:
            fastest = best
            drawn = first + place
        seen += tl.sum(tie.to(tl.int32), 0)
    drawn = tl.minimum(drawn, vocab - 1)
    value = tl.load(base + drawn).to(tl.float64)
    tl.store(ids + row, drawn.to(tl.int64))
    tl.store(logprobs + row, (value - exact).to(tl.float32))
