"""Paged attention on the CPU against its slow twin, and against its memory footprint."""

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from seawall.attention import ragged
from seawall.attention.base import AttentionRows, ScoreRules
from seawall.attention.hybrid import HybridAttention
from seawall.attention.torch_sdpa import TorchAttention
from seawall.device.arena import Arena
from seawall.kernels.attention_reference import reference_attention
from seawall.kv.pool import KVPool
from seawall.memory import footprint_attention
from seawall.memory.footprint import Limits
from seawall.memory.footprint_attention import (
    AttentionShape,
    attention_activation_bytes,
    attention_workspace_bytes,
)

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LAYERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row as a test asks for it; `prefix_of` shares the whole pages before `start`."""

    start: int
    length: int
    cached: int = 0
    prefix_of: int | None = None


class Case:
    """A pool, a backend and one step; slots that no row may read hold NaN."""

    def __init__(
        self,
        rows: list[Row],
        *,
        kv_heads: int = 2,
        group: int = 2,
        head_dim: int = 8,
        page_size: int = 4,
        dtype: torch.dtype = torch.float32,
        shuffled: bool = False,
        context: int | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        kv_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        self.rows, self.page_size, self.dtype, self.window = rows, page_size, dtype, window
        self.scale = 1 / math.sqrt(head_dim)
        self.rng = np.random.default_rng(seed)
        longest = max((row.start + row.length for row in rows), default=1)
        self.limits = Limits(
            max_running=max(1, len(rows)),
            step_tokens=max(1, sum(row.length for row in rows)),
            context_length=context or longest,
            page_size=page_size,
        )
        self.shape = AttentionShape(
            num_heads=kv_heads * group,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            windows=() if window is None else (window,),
            attention_softcap=softcap,
        )
        self.sinks = self.normal(LAYERS, kv_heads * group).float() * 2 if sinks else None
        self.softcap = softcap
        per_row = -(-longest // page_size)
        num_pages = (len(rows) + 1) * per_row
        ids = self.rng.permutation(num_pages) if shuffled else np.arange(num_pages)
        # Entries that cover no position are nobody's page.
        table = ids.reshape(-1, per_row).astype(np.int32)[: max(1, len(rows))]
        self.seats = self.rng.permutation(len(rows)).astype(np.int32)
        for index, row in enumerate(rows):
            if row.prefix_of is not None:
                shared = min(row.start, rows[row.prefix_of].start) // page_size
                table[self.seats[index], :shared] = table[self.seats[row.prefix_of], :shared]
            table[self.seats[index], -(-(row.start + row.length) // page_size) :] = 2**30
        # Entries of columns that have left the window are stale.
        for index, row in enumerate(rows):
            table[self.seats[index], : self.first_seen(row.start) // page_size] = 2**30
        self.table = table
        self.arena = Arena.unbounded(CPU)
        self.pool = KVPool(
            self.arena,
            num_layers=LAYERS,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=kv_dtype or dtype,
        )
        self.backend = TorchAttention(
            self.pool,
            self.arena,
            num_heads=kv_heads * group,
            scale=self.scale,
            limits=self.limits,
            dtype=dtype,
            rules=ScoreRules(window=window, softcap=softcap, sinks=self.sinks),
        )
        self._fill_cached()
        tokens = sum(row.length for row in rows)
        self.q = self.normal(tokens, kv_heads * group, head_dim)
        self.k = self.normal(tokens, kv_heads, head_dim)
        self.v = self.normal(tokens, kv_heads, head_dim)
        self._poison_cached_inputs()

    def normal(self, *shape: int) -> Tensor:
        return torch.from_numpy(self.rng.standard_normal(shape)).to(self.dtype)

    def first_seen(self, position: int) -> int:
        return 0 if self.window is None else max(0, position - self.window + 1)

    def slots(self, index: int, begin: int, end: int) -> Tensor:
        position = np.arange(begin, end)
        pages = self.table[self.seats[index]][position // self.page_size]
        return torch.from_numpy(pages.astype(np.int64) * self.page_size + position % self.page_size)

    def _fill_cached(self) -> None:
        for layer in range(LAYERS):
            self.pool.keys(layer).fill_(math.nan)
            self.pool.values(layer).fill_(math.nan)
            for index, row in enumerate(self.rows):
                slots = self.slots(index, self.first_seen(row.start), row.start + row.cached)
                shape = (len(slots), self.shape.num_kv_heads, self.shape.head_dim)
                self.pool.write(layer, slots, self.normal(*shape), self.normal(*shape))

    def _poison_cached_inputs(self) -> None:
        """What the pool has already must come from there."""
        offset = 0
        for row in self.rows:
            self.k[offset : offset + row.cached] = math.nan
            self.v[offset : offset + row.cached] = math.nan
            offset += row.length

    def asked(self) -> AttentionRows:
        return AttentionRows(
            seats=self.seats,
            starts=np.array([row.start for row in self.rows], dtype=np.int32),
            write_starts=np.array([row.start + row.cached for row in self.rows], dtype=np.int32),
            lengths=np.array([row.length for row in self.rows], dtype=np.int32),
            page_table=self.table,
        )

    def run(self, layer: int = 1) -> Tensor:
        with torch.inference_mode():
            self.backend.prepare(self.asked())
            return self.backend.run(self.q, self.k, self.v, layer)

    def expected(self, layer: int = 1) -> Tensor:
        rows = [
            (self.table[self.seats[index]], row.start, row.length)
            for index, row in enumerate(self.rows)
        ]
        keys, values = self.pool.keys(layer), self.pool.values(layer)
        return reference_attention(
            self.q,
            keys,
            values,
            rows,
            self.page_size,
            self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks_H=None if self.sinks is None else self.sinks[layer],
        )

    def check(self) -> None:
        before = [self.pool.keys(1).clone(), self.pool.values(1).clone()]
        out = self.run()
        assert out.dtype == self.dtype
        assert out.shape == self.q.shape
        offset = 0
        for index, row in enumerate(self.rows):
            slots = self.slots(index, row.start + row.cached, row.start + row.length)
            part = slice(offset + row.cached, offset + row.length)
            before[0][:, slots] = self.k[part].transpose(0, 1)
            before[1][:, slots] = self.v[part].transpose(0, 1)
            offset += row.length
        assert torch.equal(self.pool.keys(1).nan_to_num(7), before[0].nan_to_num(7))
        assert torch.equal(self.pool.values(1).nan_to_num(7), before[1].nan_to_num(7))
        torch.testing.assert_close(out.float(), self.expected(), rtol=0, atol=TOLERANCE[self.dtype])


@contextmanager
def small_blocks(
    *, block: int = 1024, query: int = 256, entries: int = 10**6, ragged_from: int = 4
) -> Iterator[None]:
    """The constants of the backend at sizes that a small case passes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(footprint_attention, "BLOCK_TOKENS", block)
        patch.setattr(footprint_attention, "MAX_ENTRIES", entries)
        patch.setattr(footprint_attention, "QUERY_TOKENS", query)
        patch.setattr(footprint_attention, "CAPPED_QUERY_TOKENS", query)
        patch.setattr(footprint_attention, "CAPPED_BLOCK_TOKENS", block)
        patch.setattr(ragged, "MIN_RAGGED_TOKENS", ragged_from)
        yield


@st.composite
def row_lists(draw: st.DrawFn) -> list[Row]:
    rows: list[Row] = []
    for index in range(draw(st.integers(1, 7))):
        length = draw(st.one_of(st.just(1), st.integers(1, 12)))
        shared = draw(st.integers(0, index - 1)) if index and draw(st.booleans()) else None
        rows.append(
            Row(
                start=draw(st.one_of(st.just(0), st.integers(0, 90))),
                length=length,
                cached=draw(st.one_of(st.just(0), st.integers(0, length))),
                # A shared page is never written: the sharer's own tokens come after it.
                prefix_of=shared,
            )
        )
    return rows


shapes = {
    "kv_heads": st.integers(1, 3),
    "group": st.integers(1, 3),
    "head_dim": st.sampled_from([1, 5, 16, 33]),
    "page_size": st.one_of(st.integers(1, 64), st.sampled_from([1, 2, 16])),
    "shuffled": st.booleans(),
    "seed": st.integers(0, 2**16),
}
rules = {
    "window": st.one_of(st.none(), st.integers(1, 9), st.sampled_from([10, 31, 32, 33, 64, 200])),
    "softcap": st.sampled_from([None, 1.5, 30.0]),
    "sinks": st.booleans(),
}


@settings(max_examples=120, deadline=None)
@given(
    rows=row_lists(),
    block=st.sampled_from([8, 64, 1024]),
    query=st.sampled_from([1, 4, 256]),
    entries=st.sampled_from([0, 500, 4000, 10**6]),
    ragged_from=st.sampled_from([1, 4, 10**6]),
    shape=st.fixed_dictionaries(shapes),
)
def test_any_mix_agrees_with_the_twin(
    rows: list[Row],
    block: int,
    query: int,
    entries: int,
    ragged_from: int,
    shape: dict[str, Any],
) -> None:
    with small_blocks(block=block, query=query, entries=entries, ragged_from=ragged_from):
        Case(rows, **shape).check()


@settings(max_examples=150, deadline=None)
@given(
    rows=row_lists(),
    block=st.sampled_from([8, 64, 1024]),
    query=st.sampled_from([1, 4, 256]),
    entries=st.sampled_from([0, 500, 4000, 10**6]),
    ragged_from=st.sampled_from([1, 4, 10**6]),
    shape=st.fixed_dictionaries(shapes | rules),
)
def test_windows_caps_and_sinks_agree_with_the_twin(
    rows: list[Row],
    block: int,
    query: int,
    entries: int,
    ragged_from: int,
    shape: dict[str, Any],
) -> None:
    with small_blocks(block=block, query=query, entries=entries, ragged_from=ragged_from):
        Case(rows, **shape).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@settings(max_examples=30, deadline=None)
@given(
    rows=row_lists(), block=st.sampled_from([8, 1024]), shape=st.fixed_dictionaries(shapes | rules)
)
def test_narrow_types_keep_windows_caps_and_sinks(
    dtype: torch.dtype, rows: list[Row], block: int, shape: dict[str, Any]
) -> None:
    with small_blocks(block=block, query=4):
        Case(rows, dtype=dtype, **shape).check()


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("ragged_from", [1, 10**6])
def test_windows_of_default_blocks(softcap: float | None, ragged_from: int) -> None:
    rows = [
        Row(start=1700, length=330, cached=5),
        Row(start=0, length=700),
        Row(start=900, length=1),
        Row(start=40, length=1),
    ]
    with small_blocks(entries=footprint_attention.MAX_ENTRIES, ragged_from=ragged_from):
        Case(rows, window=600, softcap=softcap, sinks=True, shuffled=True, page_size=16).check()


def test_a_window_lets_a_token_see_itself_and_those_just_before() -> None:
    """Values that are the positions: the average over the window is known."""
    for window, expected in ((1, 20.0), (2, 19.5), (5, 18.0), (64, 10.0)):
        case = Case([Row(start=0, length=21)], window=window, kv_heads=1, group=1, head_dim=1)
        case.q.zero_()
        case.v.copy_(torch.arange(21.0)[:, None, None])
        assert case.run()[20].item() == pytest.approx(expected, abs=1e-5)


def test_a_sink_takes_its_share_and_a_cap_bounds_scores() -> None:
    case = Case([Row(start=0, length=1)], kv_heads=1, group=1, head_dim=1, softcap=2.0, sinks=True)
    assert case.sinks is not None
    case.sinks.fill_(1.0)
    case.q.fill_(100.0)
    case.k.fill_(100.0)
    case.v.fill_(1.0)
    # The score is 2 at the cap, the sink's is 1.
    assert case.run().item() == pytest.approx(1 / (1 + math.exp(1 - 2)), abs=1e-5)


@pytest.mark.parametrize("has_full", [True, False])
def test_layers_of_two_classes_keep_to_their_pools(has_full: bool) -> None:
    """Each class counts its layers by itself, and reads and writes through its own table."""
    rows = [Row(start=40, length=3), Row(start=0, length=9), *(Row(start=30, length=1),) * 4]
    windows: tuple[int | None, ...] = (7, None, 7, None) if has_full else (7, 7)
    full, window = Case(rows, seed=1), Case(rows, window=7, shuffled=True, seed=2)
    window_table = np.empty_like(window.table)
    window_table[full.seats] = window.table[window.seats]
    hybrid = HybridAttention(
        windows, full=full.backend if has_full else None, window=window.backend
    )
    asked = AttentionRows(
        seats=full.seats,
        starts=full.asked().starts,
        write_starts=full.asked().write_starts,
        lengths=full.asked().lengths,
        page_table=full.table,
        window_page_table=window_table,
    )
    with torch.inference_mode():
        hybrid.prepare(asked)
        for layer, size in enumerate(windows):
            case = full if size is None else window
            index = windows[:layer].count(size)
            found = hybrid.run(case.q, case.k, case.v, layer)
            torch.testing.assert_close(found, case.expected(index), rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@settings(max_examples=30, deadline=None)
@given(rows=row_lists(), block=st.sampled_from([8, 1024]), shape=st.fixed_dictionaries(shapes))
def test_narrow_types_agree_with_the_twin(
    dtype: torch.dtype, rows: list[Row], block: int, shape: dict[str, Any]
) -> None:
    with small_blocks(block=block):
        Case(rows, dtype=dtype, **shape).check()


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("ragged_from", [1, 10**6])
def test_rows_longer_than_blocks_and_workspace(shuffled: bool, ragged_from: int) -> None:
    rows = [
        Row(start=2600, length=1),
        Row(start=1500, length=20, cached=3),
        Row(start=900, length=1),
    ]
    with small_blocks(block=256, query=8, entries=30_000, ragged_from=ragged_from):
        Case(rows, shuffled=shuffled, page_size=16, context=131072).check()


def test_a_fresh_prompt_longer_than_a_piece() -> None:
    Case([Row(start=0, length=300), Row(start=37, length=290, cached=270)], page_size=7).check()


def test_large_scores_do_not_overflow() -> None:
    case = Case([Row(start=50 + i, length=1) for i in range(5)] + [Row(start=9, length=40)])
    case.q.mul_(300)
    case.check()


def test_a_pool_with_fewer_slots_than_a_padded_row() -> None:
    rows = [Row(start=3 - i % 2, length=1 + i % 2) for i in range(4)]
    case = Case(rows, kv_heads=1, page_size=1)
    assert case.pool.num_slots < footprint_attention.TILE
    case.check()


def test_an_empty_step_gives_an_empty_result() -> None:
    assert Case([]).run().shape == (0, 4, 8)


def batch_of_64() -> Case:
    rng = np.random.default_rng(5)
    rows = [Row(start=int(start), length=1) for start in rng.integers(0, 400, 60)]
    rows += [Row(start=0, length=40), Row(start=100, length=70), Row(start=9, length=3)]
    return Case([*rows, Row(start=33, length=1, prefix_of=3)], head_dim=64, page_size=16)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    whole = batch_of_64()
    together = whole.run()
    offset = 0
    for index, row in enumerate(whole.rows):
        one = whole.asked()
        pick = slice(index, index + 1)
        part = slice(offset, offset + row.length)
        with torch.inference_mode():
            whole.backend.prepare(
                AttentionRows(
                    seats=one.seats[pick],
                    starts=one.starts[pick],
                    write_starts=one.write_starts[pick],
                    lengths=one.lengths[pick],
                    page_table=one.page_table,
                )
            )
            alone = whole.backend.run(whole.q[part], whole.k[part], whole.v[part], 1)
        torch.testing.assert_close(alone, together[part], rtol=0, atol=2e-6)
        offset += row.length


def test_ragged_rows_are_bitwise_independent_of_neighbours_and_threads() -> None:
    case = Case([Row(start=37 * i, length=1) for i in range(12)], head_dim=64)
    together = case.run()
    asked = case.asked()
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - min(threads, 2))
    try:
        with torch.inference_mode():
            case.backend.prepare(
                AttentionRows(
                    seats=asked.seats[4:9],
                    starts=asked.starts[4:9],
                    write_starts=asked.write_starts[4:9],
                    lengths=asked.lengths[4:9],
                    page_table=asked.page_table,
                )
            )
            few = case.backend.run(case.q[4:9], case.k[4:9], case.v[4:9], 1)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(few, together[4:9])


@pytest.mark.parametrize("step", [1, 3, 64, 150])
def test_chunks_of_a_prompt_give_what_the_whole_gives(step: int) -> None:
    whole = Case([Row(start=0, length=330)], head_dim=32, page_size=3, shuffled=True)
    expected = whole.run()
    whole.pool.keys(1).fill_(math.nan)
    whole.pool.values(1).fill_(math.nan)
    parts = []
    for start in range(0, 330, step):
        count = min(step, 330 - start)
        part = slice(start, start + count)
        with torch.inference_mode():
            whole.backend.prepare(
                AttentionRows(
                    seats=whole.seats,
                    starts=np.array([start], dtype=np.int32),
                    write_starts=np.array([start], dtype=np.int32),
                    lengths=np.array([count], dtype=np.int32),
                    page_table=whole.table,
                )
            )
            parts.append(whole.backend.run(whole.q[part], whole.k[part], whole.v[part], 1))
    torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=2e-6)


def test_views_of_a_packed_projection_are_accepted() -> None:
    case = Case([Row(start=11 * i, length=1 + 20 * (i % 2)) for i in range(6)])
    case.run()
    packed = torch.cat([case.q, case.k, case.v], dim=1)
    expected = case.run()
    case.q, case.k, case.v = packed.split([4, 2, 2], dim=1)
    assert not case.q.is_contiguous()
    assert torch.equal(case.run(), expected)


def test_the_step_does_not_follow_later_changes_of_the_table() -> None:
    case = Case([Row(start=30 * i, length=1 + 20 * (i % 2)) for i in range(6)], shuffled=True)
    expected = case.run()
    with torch.inference_mode():
        case.backend.prepare(case.asked())
        case.table.fill(0)
        assert torch.equal(case.backend.run(case.q, case.k, case.v, 1), expected)


def test_the_workspace_may_be_released_between_steps() -> None:
    case = Case([Row(start=30 * i, length=1 + 20 * (i % 2)) for i in range(6)], shuffled=True)
    expected = case.run()
    case.arena.release("attention")
    case.arena.restore("attention")
    case.arena.seal()
    assert torch.equal(case.run(), expected)


class StorageCount(TorchDispatchMode):
    """Bytes of the storages that come out of operators and are alive, now and at most."""

    def __init__(self, known: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.known = known
        self.alive: dict[int, int] = {}
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, Tensor) and item.layout is torch.strided:
                self.see(item)
        return result

    def see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self.alive or self.known(tensor):
            return
        self.alive[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.gone, key)

    def gone(self, key: int) -> None:
        self.now -= self.alive.pop(key)


def peak_of(case: Case) -> int:
    """The most transient bytes of a step, the output left out."""
    tensors = [case.q, case.k, case.v, *([] if case.sinks is None else [case.sinks])]
    kept = [tensor.untyped_storage() for tensor in tensors]
    inputs = {id(storage) for storage in kept}

    def known(tensor: Tensor) -> bool:
        return id(tensor.untyped_storage()) in inputs or case.arena.owner(tensor) is not None

    with StorageCount(known) as count:
        out = case.run()
    assert count.now == out.untyped_storage().nbytes(), "a step keeps tensors alive"
    return count.peak - out.untyped_storage().nbytes()


def check_memory(case: Case) -> None:
    name = str(case.dtype).removeprefix("torch.")
    assert case.arena.bytes("attention") == attention_workspace_bytes(case.shape, name, case.limits)
    assert peak_of(case) <= attention_activation_bytes(case.shape, name, case.limits)


@settings(max_examples=60, deadline=None)
@given(
    rows=row_lists(),
    entries=st.sampled_from([0, 4000, 10**6]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    shape=st.fixed_dictionaries(shapes | rules),
)
def test_any_mix_stays_within_its_footprint(
    rows: list[Row], entries: int, dtype: torch.dtype, shape: dict[str, Any]
) -> None:
    with small_blocks(block=64, query=16, entries=entries):
        check_memory(Case(rows, dtype=dtype, **shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rules", [{}, {"window": 400, "softcap": 30.0}], ids=["plain", "capped"])
@pytest.mark.parametrize(
    "rows",
    [
        [Row(start=0, length=900)],
        [Row(start=1500, length=600, cached=590)],
        [Row(start=40 * i, length=1) for i in range(64)],
        [Row(start=3, length=9) for _ in range(64)],
    ],
    ids=["fresh", "cached", "decode", "short"],
)
def test_large_steps_stay_within_their_footprint(
    dtype: torch.dtype, rows: list[Row], rules: dict[str, Any]
) -> None:
    check_memory(Case(rows, dtype=dtype, shuffled=True, head_dim=64, page_size=16, **rules))


@pytest.mark.parametrize("context", [2048, 131072])
def test_the_default_workspace_is_modest(context: int) -> None:
    limits = Limits(max_running=256, step_tokens=768, context_length=context, page_size=16)
    demo = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=64)
    assert attention_workspace_bytes(demo, "float32", limits) <= 32 * 2**20
    assert attention_activation_bytes(demo, "float32", limits) <= 8 * 2**20
    assert attention_workspace_bytes(demo, "bfloat16", limits) <= 2**20
