"""The KV pool: what it charges, where a token lands, and what is left alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seawall.core.errors import BudgetError, ConfigError
from seawall.device.arena import Arena
from seawall.kv.pool import KVPool
from seawall.memory.footprint_attention import kv_page_bytes
from seawall.memory.ledger import Ledger

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def make_pool(arena: Arena, dtype: torch.dtype = torch.float32, **sizes: int) -> KVPool:
    shape = {"num_layers": 2, "num_pages": 6, "page_size": 4, "num_kv_heads": 3, "head_dim": 5}
    return KVPool(arena, **(shape | sizes), dtype=dtype)


@settings(max_examples=50, deadline=None)
@given(
    num_layers=st.integers(1, 4),
    num_pages=st.integers(1, 9),
    page_size=st.integers(1, 64),
    num_kv_heads=st.integers(1, 5),
    head_dim=st.integers(1, 20),
    dtype=st.sampled_from(sorted(DTYPES)),
)
def test_pool_charges_exactly_its_pages(
    num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: str
) -> None:
    page = kv_page_bytes(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
    )
    arena = Arena(Ledger({"kv": num_pages * page}), CPU)
    make_pool(
        arena,
        DTYPES[dtype],
        num_layers=num_layers,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    assert arena.bytes("kv") == num_pages * page


def test_pool_over_the_cap_is_refused() -> None:
    page = kv_page_bytes(num_layers=2, num_kv_heads=3, head_dim=5, page_size=4, dtype="float32")
    with pytest.raises(BudgetError):
        make_pool(Arena(Ledger({"kv": 6 * page - 1}), CPU))


def test_unknown_dtype_has_no_page_size() -> None:
    with pytest.raises(ConfigError, match="float12"):
        kv_page_bytes(num_layers=1, num_kv_heads=1, head_dim=1, page_size=1, dtype="float12")


@settings(max_examples=50, deadline=None)
@given(
    dtype=st.sampled_from(sorted(DTYPES)),
    layer=st.integers(0, 1),
    num_tokens=st.integers(0, 24),
    seed=st.integers(0, 2**16),
)
def test_write_lands_in_its_slots_and_nowhere_else(
    dtype: str, layer: int, num_tokens: int, seed: int
) -> None:
    pool = make_pool(Arena.unbounded(CPU), DTYPES[dtype])
    rng = np.random.default_rng(seed)
    slot_ids = torch.from_numpy(rng.permutation(pool.num_slots)[:num_tokens].astype(np.int64))
    k = torch.from_numpy(rng.standard_normal((num_tokens, 3, 5))).to(DTYPES[dtype])
    v = torch.from_numpy(rng.standard_normal((num_tokens, 3, 5))).to(DTYPES[dtype])
    pool.write(layer, slot_ids, k, v)

    keys = torch.zeros(2, 3, pool.num_slots, 5, dtype=DTYPES[dtype])
    values = torch.zeros_like(keys)
    for token, slot in enumerate(slot_ids.tolist()):
        keys[layer, :, slot] = k[token]
        values[layer, :, slot] = v[token]
    for index in range(2):
        assert torch.equal(pool.keys(index), keys[index])
        assert torch.equal(pool.values(index), values[index])


def test_slots_of_a_head_are_contiguous() -> None:
    pool = make_pool(Arena.unbounded(CPU))
    assert pool.num_slots == 24
    assert pool.keys(1).shape == (3, 24, 5)
    assert pool.keys(1).is_contiguous()
    assert pool.values(1).is_contiguous()
