"""Pieces shared by the LM-head kernels: the product of a tile, its processing and its reduction.

Owns: the arithmetic of one tile, so that every kernel that makes a logit makes the same bits.
It is not a kernel: these are inlined into the kernels of triton_logprobs and triton_sampling.

Legend: M rows of a tile, N ids of a tile, NB blocks of N ids that cover the vocabulary.

    logit = softcap(scale * hidden weight^T) + bias     float32 in registers, never rounded
    logit = -inf where the bitmask forbids the id
    logit = logit / temperature                         below 1e-6: unscaled

What is left of a tile, per row and block: the largest logit `peak`, the sum of exp(logit - peak)
(NaN if the product is not finite), and, where asked, the sum of d exp(d) with d = logit - peak,
the number of logits above a given one, the target's logit, and the winner of the draw.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
MIN_TEMPERATURE = tl.constexpr(1e-6)
FARTHEST = tl.constexpr(-1e4)
INF = tl.constexpr(float("inf"))
LEAST_KEY = tl.constexpr(-(2**63))
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def tile_order(tile, num_row_tiles, num_col_tiles, GROUP: tl.constexpr):
    """Row tile and column tile of a program: GROUP row tiles go down before the next column."""
    per_group = GROUP * num_col_tiles
    first = (tile // per_group) * GROUP
    size = min(num_row_tiles - first, GROUP)
    inside = tile % per_group
    return first + inside % size, inside // size


@triton.jit
def tile_product(
    h, w, rows_M, row0, col0, num_rows, vocab, hidden_size,
    stride_h, stride_hk, stride_w, stride_wk,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BULK_H: tl.constexpr, BULK_W: tl.constexpr, EVEN_K: tl.constexpr,
    WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Float32 [M, N] hidden x weight^T; rows and ids past the end repeat the last one or are 0."""
    acc = tl.zeros((M, N), dtype=tl.float32)
    ks = tl.arange(0, K)
    rows = tl.minimum(rows_M, num_rows - 1).to(tl.int64)
    cols = tl.minimum(col0 + tl.arange(0, N), vocab - 1).to(tl.int64)
    for k in range(0, hidden_size, K):
        inner = k + ks
        if BULK_H:
            a = h.load([row0, k])
        elif EVEN_K:
            a = tl.load(h + rows[:, None] * stride_h + inner[None, :] * stride_hk)
        else:
            a = tl.load(
                h + rows[:, None] * stride_h + inner[None, :] * stride_hk,
                mask=(inner < hidden_size)[None, :],
                other=0.0,
            )
        if BULK_W:
            b = w.load([col0, k])
        elif EVEN_K:
            b = tl.load(w + cols[:, None] * stride_w + inner[None, :] * stride_wk)
        else:
            b = tl.load(
                w + cols[:, None] * stride_w + inner[None, :] * stride_wk,
                mask=(inner < hidden_size)[None, :],
                other=0.0,
            )
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
    return acc


@triton.jit
def shape_logits(
    acc, cols, vocab, scale, softcap, bias,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Scale, softcap and bias."""
    x = acc
    if SCALE:
        x = x * scale
    if SOFTCAP:
        t = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E / softcap))
        tanh = (1.0 - t) / (1.0 + t)
        x = softcap * tl.where(x < 0, -tanh, tanh)
    if BIAS:
        x = x + tl.load(bias + cols, mask=cols < vocab, other=0.0).to(tl.float32)[None, :]
    return x


@triton.jit
def bound_logits(
    x, rows, cols, num_rows, vocab, bitmask, stride_mask, temperature,
    MASK: tl.constexpr, TEMPER: tl.constexpr, EVEN_V: tl.constexpr,
):  # fmt: skip
    """Bitmask and temperature; ids past the vocabulary become -inf."""
    row_ok = rows < num_rows
    if MASK:
        words = tl.load(
            bitmask + rows.to(tl.int64)[:, None] * stride_mask + (cols // 32)[None, :],
            mask=row_ok[:, None] & (cols < vocab)[None, :],
            other=0,
        )
        x = tl.where(((words >> (cols % 32)[None, :]) & 1) == 0, -INF, x)
    if TEMPER:
        divisor = tl.load(temperature + rows, mask=row_ok, other=1.0)
        x = x * (1.0 / tl.where(divisor < MIN_TEMPERATURE, 1.0, divisor))[:, None]
    if not EVEN_V:
        x = tl.where((cols < vocab)[None, :], x, -INF)
    return x


@triton.jit
def mix64(z):
    z = (z ^ (z >> 32)) * 0xD6E8FEB86659FD93
    z = (z ^ (z >> 29)) * 0xA0761D6478BD642F
    return z ^ (z >> 32)


@triton.jit
def row_key(seed, position):
    """The two halves of the key, as the sampler's noise defines it, from int64."""
    step = tl.full(seed.shape, 0x9E3779B97F4A7C15, tl.uint64)
    z = seed.to(tl.uint64, bitcast=True) + step
    z = mix64(mix64(z) + position.to(tl.uint64, bitcast=True) * step)
    return z.to(tl.uint32), (z >> 32).to(tl.uint32)


@triton.jit
def clock_bits(ids, key_low, key_high):
    """31 random bits of (key, id) as int32; the arguments broadcast."""
    h = (ids.to(tl.uint32) * 0x2423EA21) ^ key_low
    h = ((h ^ (h >> 16)) * 0x625DD03B) ^ key_high
    h = (h ^ (h >> 15)) * 0xC1CA15D7
    signed = h.to(tl.int32, bitcast=True)
    return (signed ^ (signed >> 16)) & 0x7FFFFFFF


@triton.jit
def quick_log2(x):
    """The hardware's logarithm, absolute error 2**-22 near 1; the library's has a branch."""
    if INTERPRETED:
        y = tl.log2(x)
    else:
        y = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def quick_inverse(x):
    """1 / x for normal x, within 1 ulp."""
    if INTERPRETED:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def clock(bits):
    """Exponential variate -log1p(-v), float32, above zero; v has the very bits of the CPU's.

    Below v = 1/4 a polynomial keeps the relative error near 1e-7, which a logarithm of 1 - v
    would lose; above, the logarithm's absolute error is below 1e-6 of the result.
    """
    v = (bits.to(tl.float32) + 0.5) * 4.656612595521636e-10
    p = v * 0.3325749337673187 + 0.0905156135559082
    p = p * v + 0.21397438645362854
    p = p * v + 0.24872595071792603
    p = p * v + 0.33338767290115356
    p = p * v + 0.49999913573265076
    p = p * v + 1.0
    return tl.where(v < 0.25, p * v, quick_log2(1.0 - v) * -LN_2)


@triton.jit
def ordered(x):
    """Int32 that orders as the float32 does; the two zeros are equal, NaN is above all."""
    x = tl.where(x == 0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x != x, 0x7FFFFFFF, bits)


@triton.jit
def unordered(key):
    """The float32 of `ordered`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def rank_key(x, ids):
    """Int64 that orders by logit, then lowest id; `ids` int32."""
    return (ordered(x).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def key_id(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def key_logit(key):
    return unordered((key >> 32).to(tl.int32))


@triton.jit
def reduce_tile(
    x, bad_M, rows, cols, num_rows, at_M, first_id, vocab,
    peaks, sums, slopes, counts, above, targets, target_logits,
    temperature, seeds, positions, id_base, scores, places, winners,
    ENTROPY: tl.constexpr, RANK: tl.constexpr, TARGET: tl.constexpr,
    SAMPLE: tl.constexpr, N: tl.constexpr, LOOPED: tl.constexpr,
):  # fmt: skip
    """Store what is left of a tile. `at_M` int64 is the place of (row, block) in the outputs.

    Ids are of this weight; `id_base` more is the id that the noise knows.
    """
    row_ok = rows < num_rows
    peak = tl.max(x, 1)
    shift = tl.where(peak == -INF, 0.0, peak)
    power = tl.exp2(x * LOG2_E - (shift * LOG2_E)[:, None])
    total = tl.where(bad_M, float("nan"), tl.sum(power, 1))
    tl.store(peaks + at_M, peak, mask=row_ok)
    tl.store(sums + at_M, total, mask=row_ok)
    if ENTROPY:
        depth = tl.maximum(x - shift[:, None], FARTHEST)
        tl.store(slopes + at_M, tl.sum(depth * power, 1), mask=row_ok)
    if RANK:
        limit = tl.load(above + rows, mask=row_ok, other=0.0)
        count = tl.sum((x > limit[:, None]).to(tl.int32), 1)
        tl.store(counts + at_M, count, mask=row_ok)
    if TARGET:
        place = (tl.load(targets + rows, mask=row_ok, other=-1) - first_id).to(tl.int32)
        inside = (place >= 0) & (place < N)
        own = place[:, None] == (cols - first_id)[None, :]
        if LOOPED:  # a branch would keep the compiler from overlapping tiles
            logit = tl.sum(tl.where(own, x, 0.0), 1)
            tl.store(target_logits + rows, logit, mask=inside & row_ok)
        elif tl.max(inside.to(tl.int32), 0) > 0:
            logit = tl.sum(tl.where(own, x, 0.0), 1)
            tl.store(target_logits + rows, logit, mask=inside & row_ok)
    if SAMPLE:
        seed = tl.load(seeds + rows, mask=row_ok, other=0)
        position = tl.load(positions + rows, mask=row_ok, other=0)
        low, high = row_key(seed, position)
        e = clock(clock_bits((cols + id_base)[None, :], low[:, None], high[:, None]))
        divisor = tl.load(temperature + rows, mask=row_ok, other=1.0)
        greedy = divisor < MIN_TEMPERATURE
        race = tl.where(greedy[:, None], x, power * quick_inverse(e))
        best, place = tl.max(race, 1, return_indices=True)
        score = tl.where(greedy, best, tl.log2(best) * LN_2 + peak)
        # The winner's logit from its score: the tile is not kept alive for it.
        own = clock(clock_bits(first_id + place + id_base, low, high))
        logit = tl.where(greedy, best, score + tl.log2(own) * LN_2)
        tl.store(scores + at_M, score, mask=row_ok)
        tl.store(places + at_M, tl.minimum(first_id + place, vocab - 1), mask=row_ok)
        tl.store(winners + at_M, logit, mask=row_ok)
