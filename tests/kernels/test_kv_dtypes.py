"""A KV pool of another dtype than the model's: what is stored, what is read, what it takes."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seawall.core.errors import ModelError
from seawall.device.arena import Arena
from seawall.device.dtypes import dtype_name, torch_dtype
from seawall.kernels.attention_reference import reference_attention
from seawall.kv.convert import narrowed, widen
from seawall.kv.pool import KVPool
from seawall.memory.footprint_attention import (
    attention_activation_bytes,
    attention_workspace_bytes,
    kv_page_bytes,
)
from seawall.memory.kv_scales import LayerScales
from seawall.memory.ledger import Ledger
from seawall.models.kv_scales import is_kv_scale, kv_scales
from tests.kernels.test_attention import (
    TOLERANCE,
    Case,
    Row,
    peak_of,
    row_lists,
    shapes,
    small_blocks,
)
from tests.kernels.test_attention import rules as any_rules

CPU = torch.device("cpu")
NAMES = ("float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2")
# The step between 1 and the next number, halved: the most that rounding moves a number, relative.
HALF_STEP = {
    "float32": 2.0**-24,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "fp8_e4m3": 2.0**-4,
    "fp8_e5m2": 2.0**-3,
}
OTHERS = [
    (model, pool) for model in ("float32", "bfloat16", "float16") for pool in NAMES if pool != model
]
SCALES = [LayerScales(), LayerScales(key=0.25, value=3.0)]


@pytest.mark.parametrize("name", NAMES)
def test_names_and_sizes(name: str) -> None:
    dtype = torch_dtype(name)
    assert dtype_name(dtype) == name
    page = kv_page_bytes(num_layers=2, num_kv_heads=3, head_dim=5, page_size=4, dtype=name)
    assert page == 2 * 2 * 3 * 5 * 4 * dtype.itemsize
    arena = Arena(Ledger({"kv": 7 * page}), CPU)
    pool = KVPool(
        arena, num_layers=2, num_pages=7, page_size=4, num_kv_heads=3, head_dim=5, dtype=dtype
    )
    assert arena.bytes("kv") == 7 * page
    assert not pool.keys(1).float().any()


@pytest.mark.parametrize(
    ("model", "pool", "scale"),
    # Only eight bits are scaled.
    [(*pair, s) for pair in OTHERS for s in (1.0, 0.125, 1.7) if s == 1 or "fp8" in pair[1]],
)
def test_what_comes_back_is_the_nearest(model: str, pool: str, scale: float) -> None:
    generator = torch.Generator().manual_seed(3)
    sample = torch.randn(4000, generator=generator) * 10
    x = sample[sample.abs() > 0.1].to(torch_dtype(model))
    stored = narrowed(x, torch_dtype(pool), scale)
    out = torch.empty_like(x)
    widen(stored, out, scale)
    # Rounded once into the pool, and with a scale once more on the way out.
    step = HALF_STEP[pool] + HALF_STEP[model] * (scale != 1.0)
    assert ((out - x).abs().float() <= x.abs().float() * step * 1.01).all()
    exact = stored.float() * scale
    assert torch.equal(out, exact.to(out.dtype))


@pytest.mark.parametrize(("model", "pool"), OTHERS)
def test_numbers_beyond_the_range_are_cut_and_no_number_stays_none(model: str, pool: str) -> None:
    most = torch.finfo(torch_dtype(pool)).max
    large = torch.finfo(torch_dtype(model)).max
    x = torch.tensor([large, -large, math.inf, -math.inf, math.nan], dtype=torch_dtype(model))
    found = narrowed(x, torch_dtype(pool), 1.0).float()
    top = min(most, large)
    assert found[0].item() == pytest.approx(top, rel=HALF_STEP[pool])
    assert found[1] == -found[0]
    assert found[2:4].tolist() == [most, -most]
    assert found[4].isnan()


@pytest.mark.parametrize("pool", ["fp8_e4m3", "fp8_e5m2", "bfloat16"])
@pytest.mark.parametrize("scales", SCALES)
def test_tokens_land_in_their_slots_and_nowhere_else(pool: str, scales: LayerScales) -> None:
    dtype = torch_dtype(pool)
    arena = Arena.unbounded(CPU)
    kv = KVPool(
        arena, num_layers=2, num_pages=6, page_size=4, num_kv_heads=3, head_dim=5, dtype=dtype
    )
    kv.set_scales([LayerScales(), scales])
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(9, 3, 5, generator=generator) for _ in range(2))
    slot_ids = torch.randperm(kv.num_slots, generator=generator)[:9]
    kv.write(1, slot_ids, k, v)
    pairs = ((kv.keys(1), k, scales.key), (kv.values(1), v, scales.value))
    for stored, given_TKD, scale in pairs:
        expected = torch.zeros(3, kv.num_slots, 5)
        expected[:, slot_ids] = (given_TKD / scale).to(dtype).float().transpose(0, 1)
        assert torch.equal(stored.float(), expected)
    assert not kv.keys(0).float().any()


def seen_by_reader(case: Case, stored: Tensor, scale: float) -> Tensor:
    out = torch.empty(stored.shape, dtype=case.dtype)
    widen(stored, out, scale)
    return out


def check_against_twin(case: Case, scales: LayerScales) -> None:
    """The twin reads the pool in full, in the model's dtype, after the step stored its own."""
    case.backend.set_scales([scales] * case.pool.num_layers)
    out = case.run()
    rows = [
        (case.table[case.seats[index]], row.start, row.length)
        for index, row in enumerate(case.rows)
    ]
    expected = reference_attention(
        case.q,
        seen_by_reader(case, case.pool.keys(1), scales.key),
        seen_by_reader(case, case.pool.values(1), scales.value),
        rows,
        case.page_size,
        case.scale,
        window=case.window,
        softcap=case.softcap,
        sinks_H=None if case.sinks is None else case.sinks[1],
    )
    assert out.dtype == case.dtype
    torch.testing.assert_close(
        out.float(), expected, rtol=0, atol=TOLERANCE[case.dtype] * max(1.0, scales.value)
    )


@settings(max_examples=80, deadline=None)
@given(
    rows=row_lists(),
    block=st.sampled_from([8, 64, 1024]),
    query=st.sampled_from([1, 4, 256]),
    dtypes=st.sampled_from(OTHERS),
    scales=st.sampled_from(SCALES),
    shape=st.fixed_dictionaries(shapes | any_rules),
)
def test_any_mix_agrees_with_the_twin(
    rows: list[Row],
    block: int,
    query: int,
    dtypes: tuple[str, str],
    scales: LayerScales,
    shape: dict[str, Any],
) -> None:
    model, pool = map(torch_dtype, dtypes)
    with small_blocks(block=block, query=query):
        check_against_twin(Case(rows, dtype=model, kv_dtype=pool, **shape), scales)


@settings(max_examples=60, deadline=None)
@given(
    rows=row_lists(),
    dtypes=st.sampled_from(OTHERS),
    shape=st.fixed_dictionaries(shapes | any_rules),
)
def test_any_mix_stays_within_its_footprint(
    rows: list[Row], dtypes: tuple[str, str], shape: dict[str, Any]
) -> None:
    with small_blocks(block=64, query=16):
        check_memory(
            Case(rows, dtype=torch_dtype(dtypes[0]), kv_dtype=torch_dtype(dtypes[1]), **shape)
        )


def check_memory(case: Case) -> None:
    names = dtype_name(case.dtype), case.limits, dtype_name(case.pool.dtype)
    assert case.arena.bytes("attention") == attention_workspace_bytes(case.shape, *names)
    assert peak_of(case) <= attention_activation_bytes(case.shape, *names)


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
@pytest.mark.parametrize("dtypes", [("float32", "fp8_e4m3"), ("bfloat16", "fp8_e5m2")])
def test_large_steps_stay_within_their_footprint(rows: list[Row], dtypes: tuple[str, str]) -> None:
    model, pool = map(torch_dtype, dtypes)
    check_memory(Case(rows, dtype=model, kv_dtype=pool, shuffled=True, head_dim=64, page_size=16))


def test_what_a_query_sees_does_not_depend_on_the_cut() -> None:
    """One chunk of 40, or 25 cached and 15 new: the same keys and values, so the same result."""
    whole = Case([Row(start=0, length=40)], kv_dtype=torch.float8_e4m3fn, page_size=8)
    out = whole.run()
    parts = Case([Row(start=0, length=40)], kv_dtype=torch.float8_e4m3fn, page_size=8)
    parts.rows = [Row(start=0, length=25)]
    q, k, v = parts.q, parts.k, parts.v
    parts.q, parts.k, parts.v = (tensor[:25] for tensor in (q, k, v))
    first = parts.run()
    parts.rows = [Row(start=25, length=15)]
    parts.q, parts.k, parts.v = (tensor[25:] for tensor in (q, k, v))
    second = parts.run()
    stored = [case.pool.keys(1).float().nan_to_num(7) for case in (whole, parts)]
    assert torch.equal(*stored)
    torch.testing.assert_close(torch.cat((first, second)), out, rtol=0, atol=1e-6)


def tensor_list(**named: Any) -> list[tuple[str, Tensor, Path]]:
    return [(name, torch.as_tensor(value), Path("x")) for name, value in named.items()]


def test_scales_of_checkpoints() -> None:
    names = {
        "model.layers.0.self_attn.k_scale": 0.5,
        "model.layers.0.self_attn.attn.v_scale": [2.0],
        "model.layers.2.self_attn.kv_scale": 3.0,
        "model.layers.1.self_attn.v_proj.v_scale": 4.0,
        "model.layers.1.mlp.up_proj.weight_scale": 9.0,
        "model.norm.weight": [1.0, 1.0],
    }
    found = kv_scales(tensor_list(**names), 3)
    assert found == (
        LayerScales(key=0.5, value=2.0),
        LayerScales(value=4.0),
        LayerScales(key=3.0, value=3.0),
    )
    assert [is_kv_scale(name) for name in names] == [True] * 4 + [False] * 2
    for value in (0.0, -1.0, math.nan, math.inf, [1.0, 2.0]):
        with pytest.raises(ModelError, match="not one positive number"):
            kv_scales(tensor_list(**{"model.layers.0.self_attn.k_scale": value}), 1)
    with pytest.raises(ModelError, match="the model has 1 layers"):
        kv_scales(tensor_list(**{"model.layers.1.self_attn.k_scale": 1.0}), 1)
