"""Paged attention on CUDA: prefill chunks and decode rows, one kernel for both.

Owns: the arithmetic of one query tile and the launches. It is not the choice of tiles
(seawall.attention.triton), and it allocates nothing. Its slow twin is attention_reference.py.

A tile is some consecutive queries of one row and all query heads of one kv head, folded into the
rows of one matrix, so that keys and values are read once for the heads that share them:

    tile row   m = token * GROUP + head         GROUP = query heads a kv head, padded to 2^n
    keys       blocks of BLOCK positions, found through the page table
    split      a share of a tile's blocks; shares are merged afterwards by their log-sum-exps

Legend: T packed tokens, H query heads, K kv heads, D head_dim, S slots of the pool.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_SPLITS = 32
# Matrix units take at least this many rows.
_LEAST_ROWS = 16
_FLOAT_ROWS = 32
_HALF_ROWS = 128
_STORE_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """One compiled shape of the attention kernel.

    Attributes:
        tokens: queries of a tile.
        block: key positions of a step.
    """

    tokens: int
    block: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What is fixed for a model: widths as powers of two, and the tiles of chunks and decodes."""

    group: int
    width: int
    chunk: TileShape
    decode: TileShape

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int) -> "Shapes":
        """The shapes that serve these heads."""
        group = triton.next_power_of_2(num_heads // num_kv_heads)
        width = max(_LEAST_ROWS, triton.next_power_of_2(head_dim))
        wide = itemsize > 2 or width > 128
        chunk_rows = _FLOAT_ROWS if wide else _HALF_ROWS
        return cls(
            group=group,
            width=width,
            chunk=TileShape(
                tokens=max(1, max(chunk_rows, _LEAST_ROWS) // group),
                block=32 if wide else 64,
                warps=4 if wide else 8,
                stages=2 if wide else 3,
            ),
            decode=TileShape(
                tokens=max(1, _LEAST_ROWS // group),
                block=32 if wide else 64,
                warps=4,
                stages=2 if wide else 3,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a step on the device, int32 [R] each, and where they find their pages.

    Attributes:
        offsets: packed index of a row's first query.
        page_table: int32 [seats, pages].
    """

    seats: Tensor
    starts: Tensor
    lengths: Tensor
    offsets: Tensor
    page_table: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Query tiles of one shape, int32 [N] each: a row, and its first query in the tile."""

    rows: Tensor
    firsts: Tensor
    shape: TileShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Partials:
    """Where shares are left: [N, H, splits, D] and [N, H, splits] float32, flat."""

    sums: Tensor
    logs: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How scores are made: softcap and window None where there is none, sinks [H] or None.

    Keys and values were divided by their scales when they were stored.
    """

    scale: float
    key_scale: float = 1.0
    value_scale: float = 1.0
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None


@triton.jit
def _masked_scores(
    s_MN, softcap, window, seen, ns, position_M, CAPPED: tl.constexpr, WINDOWED: tl.constexpr
):
    """Scores in units of log2, -inf where a query does not see a key."""
    if CAPPED:
        # tanh by exp: the language has none of its own
        bent = 2.0 / (1.0 + tl.exp(-2.0 * s_MN / softcap)) - 1.0
        s_MN = softcap * bent
    s_MN = s_MN * 1.4426950408889634
    allowed = seen[None, :] & (ns[None, :] <= position_M[:, None])
    if WINDOWED:
        allowed = allowed & (ns[None, :] > position_M[:, None] - window)
    return tl.where(allowed, s_MN, float("-inf"))


@triton.jit
def _span(
    first, end, window, split, num_splits,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """First visible position, and the positions [begin, end) of a tile's share."""
    # Pages before the first visible position may be somebody else's by now.
    low = first * 0
    if WINDOWED:
        low = tl.maximum(first - window + 1, 0)
    begin = low // BLOCK * BLOCK
    if SPLIT:
        share = tl.cdiv(tl.cdiv(end - begin, BLOCK), num_splits) * BLOCK
        begin = begin + split * share
        end = tl.minimum(begin + share, end)
    return low, begin, end


@triton.jit
def _leave_share(
    sums, logs, acc_MD, log_M, place_M, keep_M, D: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Result and log-sum-exp of a share, for the merge."""
    ds = tl.arange(0, WIDTH)
    mask = keep_M[:, None] & (ds < D)[None, :]
    tl.store(sums + place_M[:, None] * D + ds[None, :], acc_MD, mask=mask)
    tl.store(logs + place_M, log_M, mask=keep_M)


@triton.jit
def _with_sink(sink_M, high_M, sum_M, acc_MD):
    """The sink takes its share and adds nothing."""
    sink_M = sink_M * 1.4426950408889634
    new_M = tl.maximum(high_M, sink_M)
    fade_M = tl.exp2(high_M - new_M)
    sum_M = sum_M * fade_M + tl.exp2(sink_M - new_M)
    return new_M, sum_M, acc_MD * fade_M[:, None]


@triton.jit(do_not_specialize=["num_splits"])
def _attend_kernel(
    q, keys, values, out, sums, logs,
    tile_rows, tile_firsts, seats, starts, lengths, offsets, page_table, sinks,
    scale, value_scale, softcap, window, num_splits,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_k, stride_table, heads_per_kv, num_heads,
    PAGE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(tile_rows + tile)
    if row < 0:
        return
    first = tl.load(tile_firsts + tile)
    length = tl.load(lengths + row)
    start = tl.load(starts + row)
    offset = tl.load(offsets + row).to(tl.int64)
    pages = page_table + tl.load(seats + row).to(tl.int64) * stride_table

    ms = tl.arange(0, TOKENS * GROUP)
    token_M = first + ms // GROUP
    head_M = ms % GROUP
    valid_M = (token_M < length) & (head_M < heads_per_kv)
    position_M = start + token_M
    ds = tl.arange(0, WIDTH)
    in_head = ds < D
    q_head = kv_head * heads_per_kv + head_M
    q_at = (offset + token_M) * stride_qt + q_head * stride_qh
    q_MD = tl.load(
        q + q_at[:, None] + ds[None, :], mask=valid_M[:, None] & in_head[None, :], other=0.0
    )

    end = start + tl.minimum(first + TOKENS, length)
    low, begin, end = _span(start + first, end, window, split, num_splits, BLOCK, SPLIT, WINDOWED)

    high_M = tl.full((TOKENS * GROUP,), float("-inf"), dtype=tl.float32)
    sum_M = tl.zeros((TOKENS * GROUP,), dtype=tl.float32)
    acc_MD = tl.zeros((TOKENS * GROUP, WIDTH), dtype=tl.float32)
    head_base = kv_head.to(tl.int64) * stride_k
    for at in range(begin, end, BLOCK):
        ns = at + tl.arange(0, BLOCK)
        seen = (ns >= low) & (ns < end)
        page = tl.load(pages + ns // PAGE, mask=seen, other=0).to(tl.int64)
        slot_at = head_base + (page * PAGE + ns % PAGE) * D
        mask = seen[:, None] & in_head[None, :]
        k_ND = tl.load(keys + slot_at[:, None] + ds[None, :], mask=mask, other=0.0).to(q_MD.dtype)
        s_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * scale
        s_MN = _masked_scores(s_MN, softcap, window, seen, ns, position_M, CAPPED, WINDOWED)
        new_M = tl.maximum(high_M, tl.max(s_MN, 1))
        # A row that has seen nothing yet has no highest score to subtract.
        base_M = tl.where(new_M == float("-inf"), 0.0, new_M)
        p_MN = tl.exp2(s_MN - base_M[:, None])
        fade_M = tl.exp2(high_M - base_M)
        sum_M = sum_M * fade_M + tl.sum(p_MN, 1)
        v_ND = tl.load(values + slot_at[:, None] + ds[None, :], mask=mask, other=0.0)
        v_ND = v_ND.to(q_MD.dtype)
        acc_MD = acc_MD * fade_M[:, None]
        acc_MD = tl.dot(p_MN.to(v_ND.dtype), v_ND, acc_MD, input_precision=PRECISION)
        high_M = new_M

    if SUNK and not SPLIT:
        sink_M = tl.load(sinks + q_head, mask=head_M < heads_per_kv, other=0.0).to(tl.float32)
        high_M, sum_M, acc_MD = _with_sink(sink_M, high_M, sum_M, acc_MD)
    inverse_M = value_scale / tl.where(sum_M == 0.0, 1.0, sum_M)
    acc_MD = acc_MD * inverse_M[:, None]
    if SPLIT:
        # Tiles of shares hold one query: the tile's number is the query's.
        place_M = (tile.to(tl.int64) * num_heads + q_head) * num_splits + split
        log_M = high_M + tl.log2(sum_M)
        _leave_share(sums, logs, acc_MD, log_M, place_M, valid_M & (token_M == first), D, WIDTH)
    else:
        o_at = (offset + token_M) * stride_ot + q_head * stride_oh
        tl.store(
            out + o_at[:, None] + ds[None, :],
            acc_MD.to(out.dtype.element_ty),
            mask=valid_M[:, None] & in_head[None, :],
        )


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    sums, logs, out, tile_rows, offsets, sinks, num_splits, stride_ot, stride_oh, num_heads,
    D: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, SUNK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(tile_rows + tile)
    if row < 0:
        return
    ns = tl.arange(0, SPLITS)
    ds = tl.arange(0, WIDTH)
    place = (tile.to(tl.int64) * num_heads + head) * num_splits
    log_N = tl.load(logs + place + ns, mask=ns < num_splits, other=float("-inf"))
    high = tl.max(log_N, 0)
    sink = float("-inf")
    if SUNK:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        high = tl.maximum(high, sink)
    weight_N = tl.exp2(log_N - high)
    total = tl.sum(weight_N, 0)
    if SUNK:
        total += tl.exp2(sink - high)
    mask = (ns < num_splits)[:, None] & (ds < D)[None, :]
    part_ND = tl.load(sums + (place + ns)[:, None] * D + ds[None, :], mask=mask, other=0.0)
    result_D = tl.sum(part_ND * weight_N[:, None], 0) / total
    at = tl.load(offsets + row).to(tl.int64) * stride_ot + head * stride_oh
    tl.store(out + at + ds, result_D.to(out.dtype.element_ty), mask=ds < D)


@triton.jit(do_not_specialize=["num_tokens"])
def _store_kernel(
    k, v, keys, values, slot_ids, num_tokens, key_scale, value_scale,
    stride_kt, stride_kh, stride_vt, stride_vh, stride_k,
    D: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    ts = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    ds = tl.arange(0, WIDTH)
    slot = tl.load(slot_ids + ts, mask=ts < num_tokens, other=-1)
    mask = (slot >= 0)[:, None] & (ds < D)[None, :]
    at = head * stride_k + slot.to(tl.int64)[:, None] * D + ds[None, :]
    wide = ts.to(tl.int64)[:, None]
    k_TD = tl.load(k + wide * stride_kt + head * stride_kh + ds[None, :], mask=mask)
    v_TD = tl.load(v + wide * stride_vt + head * stride_vh + ds[None, :], mask=mask)
    if LIMIT > 0:
        k_TD = tl.clamp(k_TD.to(tl.float32) / key_scale, -LIMIT, LIMIT)
        v_TD = tl.clamp(v_TD.to(tl.float32) / value_scale, -LIMIT, LIMIT)
    tl.store(keys + at, k_TD.to(keys.dtype.element_ty), mask=mask)
    tl.store(values + at, v_TD.to(values.dtype.element_ty), mask=mask)


def attend(
    q_THD: Tensor,
    keys_KSD: Tensor,
    values_KSD: Tensor,
    out_THD: Tensor,
    rows: Rows,
    tiles: Tiles,
    *,
    shapes: Shapes,
    page_size: int,
    scoring: Scoring,
    partials: Partials | None = None,
    num_splits: int = 1,
) -> None:
    """Attend for the tiles; a tile of row -1 is padding. Shares need tiles of one query."""
    num_tiles, num_heads, num_kv_heads = tiles.rows.shape[0], q_THD.shape[1], keys_KSD.shape[0]
    if num_tiles == 0:
        return
    dim = q_THD.shape[2]
    split = num_splits > 1
    assert not split or partials is not None
    sums, logs = (partials.sums, partials.logs) if partials is not None else (out_THD, out_THD)
    sinks = out_THD if scoring.sinks is None else scoring.sinks
    _attend_kernel[(num_tiles, num_kv_heads, num_splits)](
        q_THD, keys_KSD, values_KSD, out_THD, sums, logs,
        tiles.rows, tiles.firsts, rows.seats, rows.starts, rows.lengths, rows.offsets,
        rows.page_table, sinks,
        scoring.scale * scoring.key_scale, scoring.value_scale,
        scoring.softcap or 1.0, scoring.window or 0, num_splits,
        q_THD.stride(0), q_THD.stride(1), out_THD.stride(0), out_THD.stride(1),
        keys_KSD.stride(0), rows.page_table.stride(0), num_heads // num_kv_heads, num_heads,
        PAGE=page_size, D=dim, WIDTH=shapes.width, GROUP=shapes.group,
        TOKENS=tiles.shape.tokens, BLOCK=tiles.shape.block,
        SPLIT=split, CAPPED=scoring.softcap is not None, WINDOWED=scoring.window is not None,
        SUNK=scoring.sinks is not None,
        PRECISION="ieee" if q_THD.dtype == torch.float32 else "tf32",
        num_warps=tiles.shape.warps, num_stages=tiles.shape.stages,
    )  # fmt: skip
    if split:
        _merge_kernel[(num_tiles, num_heads)](
            sums, logs, out_THD, tiles.rows, rows.offsets, sinks, num_splits,
            out_THD.stride(0), out_THD.stride(1), num_heads,
            D=dim, WIDTH=shapes.width, SPLITS=MAX_SPLITS, SUNK=scoring.sinks is not None,
            num_warps=2,
        )  # fmt: skip


def store(
    k_TKD: Tensor,
    v_TKD: Tensor,
    keys_KSD: Tensor,
    values_KSD: Tensor,
    slot_ids: Tensor,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Store token t in slot slot_ids[t], int32; below 0: not at all. Narrower types saturate."""
    num_tokens, num_kv_heads, dim = k_TKD.shape
    _store_kernel[(triton.cdiv(num_tokens, _STORE_TOKENS), num_kv_heads)](
        k_TKD, v_TKD, keys_KSD, values_KSD, slot_ids, num_tokens, *scales,
        k_TKD.stride(0), k_TKD.stride(1), v_TKD.stride(0), v_TKD.stride(1), keys_KSD.stride(0),
        D=dim, WIDTH=max(_LEAST_ROWS, triton.next_power_of_2(dim)), TOKENS=_STORE_TOKENS,
        LIMIT=torch.finfo(keys_KSD.dtype).max if keys_KSD.dtype != k_TKD.dtype else 0.0,
        num_warps=4,
    )  # fmt: skip
