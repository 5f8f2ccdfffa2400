"""Drawing tokens without the logits matrix: distribution, determinism, routes, faults, bytes."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from logits_cases import Case, cases, chi_square_limit, counting

from seawall.kernels.logits_reference import clocks, draw_scores, kept_ids, processed_logits
from seawall.memory.footprint_logits import (
    LogitsShape,
    min_workspace_bytes,
    plan_tiles,
    smallest_workspace,
    tile_bytes,
)
from seawall.ops import SampleResult, linear_sample
from seawall.sampling.noise import id_codes, negative_clocks, row_keys
from seawall.sampling.tiles import LogitsInput

HUGE = 1 << 40
NO_FILTER: dict[str, Any] = {}
FILTERS: list[dict[str, Any]] = [
    NO_FILTER,
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 8, "top_p": 0.6},
    {"top_k": 8, "min_p": 0.15},
    {"top_p": 0.8, "min_p": 0.1},
    {"top_k": 12, "top_p": 0.9, "min_p": 0.1},
]


def keys(rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return {
        "seeds": torch.full((rows,), seed, dtype=torch.int64),
        "positions": torch.arange(rows),
    }


def shape_of(case: Case, filtered: bool) -> LogitsShape:
    source = LogitsInput(hidden=case.hidden, weight=case.weight, adjust=case.adjust)
    return replace(source.shape(reordered=True), filtered=filtered)


def noise(seeds: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    shape = (seeds.shape[0], ids.shape[-1])
    hashes, spare = torch.empty(shape, dtype=torch.int32), torch.empty(shape, dtype=torch.int32)
    return negative_clocks(id_codes(ids), row_keys(seeds, positions), hashes, spare)


# The noise.


def test_noise_agrees_with_its_twin_in_unsigned_integers() -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 123456789])
    positions = torch.tensor([0, 7, 131071, 2**31, 5, 0])
    # Odd sizes, so that both the vector code and what is left over are met.
    found = noise(seeds, positions, torch.arange(1013))
    expected = clocks(seeds.tolist(), positions.tolist(), 1013)
    torch.testing.assert_close(
        found, torch.from_numpy(-expected), rtol=1e-5, atol=1e-9, check_dtype=False
    )


def test_noise_is_finite_and_strictly_negative() -> None:
    values = noise(torch.arange(200), torch.zeros(200).long(), torch.arange(20_000))
    assert values.isfinite().all()
    assert (values < 0).all()
    # Fine steps at the small end: 4 million draws of Exp(1) go well below 2**-20.
    assert values.max() > -(2.0**-20)


def uniforms(values: torch.Tensor) -> npt.NDArray[np.float64]:
    return -np.expm1(values.double().numpy())


def grid(vary: str, count: int = 1 << 19) -> npt.NDArray[np.float64]:
    """Uniforms of consecutive seeds, positions or ids."""
    many, zero = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    if vary == "ids":
        return uniforms(noise(zero[:1] + 3, zero[:1] + 11, many))[0]
    seeds, positions = (many, zero) if vary == "seeds" else (zero + 3, many)
    return uniforms(noise(seeds, positions, torch.tensor([17])))[:, 0]


@pytest.mark.parametrize("vary", ["seeds", "positions", "ids"])
def test_noise_is_uniform_along_each_axis(vary: str) -> None:
    values = 1.0 - grid(vary)  # survival: E = -log(1 - v)
    counts = np.histogram(values, bins=1024, range=(0.0, 1.0))[0]
    expected = len(values) / 1024
    assert ((counts - expected) ** 2 / expected).sum() < chi_square_limit(1023)


@pytest.mark.parametrize("vary", ["seeds", "positions", "ids"])
@pytest.mark.parametrize("lag", [1, 2, 3, 32, 4096])
def test_neighbours_are_independent(vary: str, lag: int) -> None:
    values = grid(vary)
    first, second = values[:-lag], values[lag:]
    correlation = np.corrcoef(first, second)[0, 1]
    assert abs(correlation) < 4.5 / len(first) ** 0.5
    # Not only uncorrelated: pairs fill the square evenly.
    counts = np.histogram2d(first, second, bins=32, range=((0, 1), (0, 1)))[0]
    expected = len(first) / 1024
    assert ((counts - expected) ** 2 / expected).sum() < chi_square_limit(1023)


@pytest.mark.parametrize("neighbour", ["seeds", "positions"])
def test_rows_share_no_noise(neighbour: str) -> None:
    # The same ids in neighbouring rows, and the pattern across ids, must not repeat.
    zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    seeds, positions = (torch.cat((zero, one)), torch.cat((zero, zero)))
    if neighbour == "positions":
        seeds, positions = positions, seeds
    both = uniforms(noise(seeds, positions, torch.arange(1 << 18)))
    for shift in (0, 1, 2, 64):
        first, second = both[0, : both.shape[1] - shift], both[1, shift:]
        assert abs(np.corrcoef(first, second)[0, 1]) < 4.5 / len(first) ** 0.5


def test_every_bit_of_seed_and_position_flips_half_of_the_noise() -> None:
    ids = torch.arange(512)
    for bit in (0, 1, 15, 31, 32, 47, 62):
        for which in (0, 1):
            base, other = torch.tensor([[5, 9]] * 16), torch.tensor([[5, 9]] * 16)
            base[:, 1 - which] += torch.arange(16)
            other[:, 1 - which] += torch.arange(16)
            other[:, which] ^= 1 << bit
            a = uniforms(noise(base[:, 0], base[:, 1], ids)) < 0.5
            b = uniforms(noise(other[:, 0], other[:, 1], ids)) < 0.5
            assert abs((a != b).mean() - 0.5) < 4.5 * 0.5 / a.size**0.5


# The distribution.


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_draws_follow_the_distribution(filters: dict[str, Any], temperature: float) -> None:
    rows, vocab = 20_000, 48
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 1.5
    result = linear_sample(
        torch.ones(rows, 1), logits[:, None], temperature=temperature, **filters, **keys(rows, 42)
    )
    kept = kept_ids(logits / temperature, **filters)
    counts = np.bincount(result.ids.numpy(), minlength=vocab)
    assert set(np.flatnonzero(counts)) <= set(kept)
    expected = np.array([kept.get(i, 0.0) * rows for i in range(vocab)])
    often = expected >= 5.0
    statistic = ((counts[often] - expected[often]) ** 2 / expected[often]).sum()
    rare, rare_expected = counts[~often].sum(), expected[~often].sum()
    statistic += (rare - rare_expected) ** 2 / max(rare_expected, 1.0)
    assert statistic < chi_square_limit(int(often.sum()))


def test_a_flat_distribution_over_many_tiles() -> None:
    rows, vocab = 10_000, 9000
    result = linear_sample(torch.ones(rows, 1), torch.zeros(vocab, 1), **keys(rows, 7))
    counts = np.bincount(result.ids.numpy() // 90, minlength=100)
    expected = rows / 100
    assert ((counts - expected) ** 2 / expected).sum() < chi_square_limit(99)


def test_a_thin_tail_is_drawn_as_often_as_it_should() -> None:
    # 4,000 ids that share 5% beside one that has 95%.
    rows, tail = 20_000, 4000
    logits = torch.full((tail + 1,), float(np.log(0.05 / tail)))
    logits[0] = float(np.log(0.95))
    result = linear_sample(torch.ones(rows, 1), logits[:, None], **keys(rows, 3))
    found = int((result.ids != 0).sum())
    assert abs(found - 0.05 * rows) < 4.5 * (rows * 0.05 * 0.95) ** 0.5


# Filters and routes.


@settings(max_examples=80)
@given(cases(), st.data())
def test_agrees_with_the_whole_matrix(case: Case, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10_000)))
    rows, vocab = case.rows, case.vocab
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    positions = torch.randint(0, 10**6, (rows,), generator=generator)
    top_k = torch.randint(-1, vocab + 2, (rows,), generator=generator)
    top_k[::2] %= 30
    top_p = torch.rand(rows, generator=generator).clamp(min=0.01)
    top_p[::3] = 1.0
    min_p = torch.rand(rows, generator=generator) * 0.2
    min_p[::2] = 0.0
    bound = smallest_workspace(shape_of(case, True))
    bound = max(bound, data.draw(st.sampled_from([0, 1 << 20, 64 << 20])))
    result = linear_sample(
        case.hidden,
        case.weight,
        seeds=seeds,
        positions=positions,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        workspace_bytes=bound,
        **case.processing(),
    )
    logits = processed_logits(case.hidden, case.weight, **case.processing())
    expected = logits.log_softmax(1)
    own = expected.gather(1, result.ids[:, None])[:, 0]
    close = {"atol": 1e-4, "rtol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(result.logprobs, own, **close)
    torch.testing.assert_close(result.logsumexp, logits.logsumexp(1), **close)
    temperature = torch.as_tensor(case.temperature).expand(rows)
    spread = clocks(seeds.tolist(), positions.tolist(), vocab)
    for row in range(rows):
        chosen = int(result.ids[row])
        if temperature[row] == 0.0:
            assert logits[row, chosen] >= logits[row].max() - 1e-4
            continue
        p, least_p = float(top_p[row]), float(min_p[row])
        k = int(top_k[row]) if 0 < top_k[row] < vocab else 0
        # Rounding may decide what lies on the very edge of top-p or min-p: both are right.
        inner = set(kept_ids(logits[row], k, max(p - 1e-5, 1e-9) if p < 1 else p, least_p + 1e-5))
        outer = set(kept_ids(logits[row], k, p + 1e-5 if p < 1 else p, max(least_p - 1e-5, 0.0)))
        assert chosen in outer or logits[row, chosen] >= min(logits[row, list(outer)]) - 1e-4
        must_beat = draw_scores(logits[row], spread[row], inner)
        assert draw_scores(logits[row], spread[row], {chosen})[chosen] >= must_beat.max() - 1e-4


def spiky(rows: int, vocab: int, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    hidden = torch.randn(rows, 16, generator=generator)
    return hidden, torch.randn(vocab, 16, generator=generator) * spread


@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0], ids=["flat", "middle", "peaked"])
@pytest.mark.parametrize("vocab", [200, 5000])
def test_all_routes_draw_the_same_token(vocab: int, spread: float) -> None:
    # Filters that keep everything go through candidates or a whole sort, none through the tiles.
    rows = 48
    hidden, weight = spiky(rows, vocab, spread)
    plain = linear_sample(hidden, weight, **keys(rows))
    for filters in ({"top_p": 1.0 - 1e-9}, {"min_p": 1e-30}, {"top_k": vocab - 1}):
        filtered = linear_sample(hidden, weight, **filters, **keys(rows))
        assert (filtered.ids == plain.ids).all()
        torch.testing.assert_close(filtered.logprobs, plain.logprobs)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_depend_on_seed_and_position_alone(filters: dict[str, Any]) -> None:
    rows, vocab = 40, 5000
    hidden, weight = spiky(rows, vocab, 0.5)
    temperature = torch.linspace(0.0, 1.5, rows)
    generator = torch.Generator().manual_seed(12)
    seeds = torch.randint(0, 2**60, (rows,), generator=generator)
    positions = torch.randint(0, 4096, (rows,), generator=generator)

    def drawn(order: torch.Tensor, workspace_bytes: int) -> torch.Tensor:
        result = linear_sample(
            hidden[order],
            weight,
            seeds=seeds[order],
            positions=positions[order],
            temperature=temperature[order],
            workspace_bytes=workspace_bytes,
            **filters,
        )
        return result.ids

    together = drawn(torch.arange(rows), 64 << 20)
    order = torch.randperm(rows, generator=generator)
    assert (drawn(order, 64 << 20) == together[order]).all()
    assert (drawn(order, min_workspace_bytes(vocab, 16, "float32")) == together[order]).all()
    alone = torch.cat([drawn(torch.tensor([row]), 1 << 20) for row in range(rows)])
    assert (alone == together).all()
    again = linear_sample(
        hidden, weight, seeds=seeds, positions=positions + 1, temperature=temperature, **filters
    )
    assert (again.ids != together).any()


def test_rows_of_every_route_share_a_batch() -> None:
    rows, vocab = 60, 5000
    hidden, weight = spiky(rows, vocab, 0.5)
    temperature = torch.where(torch.arange(rows) % 3 == 0, 0.0, 0.9)
    top_p = torch.where(torch.arange(rows) % 3 == 1, 0.8, 1.0)
    mixed = linear_sample(hidden, weight, temperature=temperature, top_p=top_p, **keys(rows))
    greedy = linear_sample(hidden, weight, temperature=0.0, **keys(rows))
    filtered = linear_sample(hidden, weight, temperature=0.9, top_p=0.8, **keys(rows))
    plain = linear_sample(hidden, weight, temperature=0.9, **keys(rows))
    for route, alone in enumerate((greedy, filtered, plain)):
        assert (mixed.ids[route::3] == alone.ids[route::3]).all()
        torch.testing.assert_close(mixed.logprobs[route::3], alone.logprobs[route::3])


def test_top_k_of_equal_logits_keeps_the_lowest_ids() -> None:
    rows = 400
    result = linear_sample(torch.ones(rows, 1), torch.ones(300, 1), top_k=3, **keys(rows))
    assert sorted(set(result.ids.tolist())) == [0, 1, 2]


def test_top_p_keeps_at_least_the_best() -> None:
    hidden, weight = spiky(30, 500, 0.1)
    tiny = linear_sample(hidden, weight, top_p=1e-6, **keys(30))
    certain = linear_sample(hidden, weight, min_p=1.0, **keys(30))
    greedy = linear_sample(hidden, weight, temperature=0.0, **keys(30))
    assert (tiny.ids == greedy.ids).all()
    assert (certain.ids == greedy.ids).all()


def test_greedy_takes_the_lowest_of_equal_ids_in_any_tile() -> None:
    weight = torch.zeros(9000, 1)
    weight[[4097, 4100, 8999]] = 2.0
    result = linear_sample(torch.ones(2, 1), weight, temperature=0.0, **keys(2))
    assert result.ids.tolist() == [4097, 4097]


def test_only_allowed_ids_are_drawn() -> None:
    rows, vocab = 500, 4500
    words = torch.zeros(rows, -(-vocab // 32), dtype=torch.int32)
    words[:, 3] = 0b101  # ids 96 and 98
    words[:, -1] = 1 << ((vocab - 1) % 32)
    hidden, weight = spiky(rows, vocab, 0.01)
    for filters in FILTERS:
        result = linear_sample(hidden, weight, bitmask=words, **filters, **keys(rows))
        assert set(result.ids.tolist()) <= {96, 98, vocab - 1}
    assert set(result.ids.tolist()) == {96, 98, vocab - 1}


# Faults and bounds.


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_faulty_row_has_id_0_and_nan_alone(filters: dict[str, Any], temperature: float) -> None:
    hidden, weight = spiky(6, 5000, 0.5)
    sound = linear_sample(hidden, weight, temperature=temperature, **filters, **keys(6))
    hidden[1, 0], hidden[3, 2] = torch.nan, torch.inf
    bitmask = torch.full((6, 157), -1, dtype=torch.int32)
    bitmask[5] = 0
    result = linear_sample(
        hidden, weight, temperature=temperature, bitmask=bitmask, **filters, **keys(6)
    )
    faulty = [False, True, False, True, False, True]
    assert result.logprobs.isnan().tolist() == faulty
    assert result.logsumexp.isnan().tolist() == faulty
    assert result.ids[torch.tensor(faulty)].tolist() == [0, 0, 0]
    others = torch.tensor([0, 2, 4])
    assert (result.ids[others] == sound.ids[others]).all()
    torch.testing.assert_close(result.logprobs[others], sound.logprobs[others])


def test_no_rows() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    result = linear_sample(
        torch.ones(0, 3), torch.ones(9, 3), seeds=empty, positions=empty, top_p=0.5
    )
    assert (result.ids.shape, result.logprobs.shape) == ((0,), (0,))


@settings(max_examples=60)
@given(cases(max_vocab=9000), st.sampled_from(FILTERS), st.data())
def test_temporaries_stay_within_the_workspace(
    case: Case, filters: dict[str, Any], data: st.DataObject
) -> None:
    # From the smallest workspace to the largest that is used: the bound always binds.
    shape = shape_of(case, bool(filters))
    smallest, largest = smallest_workspace(shape), footprint(shape, case.rows)
    bound = smallest + int(data.draw(st.floats(0.0, 1.0)) * max(0, largest - smallest))
    rows = keys(case.rows)
    adjust = case.adjust
    parts = [] if adjust is None else [adjust.row, adjust.ids, adjust.repetition, adjust.add]
    extra = [t for t in (case.bias, case.bitmask, case.temperature) if isinstance(t, torch.Tensor)]
    inputs = [case.hidden, case.weight, *rows.values(), *parts, *extra]
    with counting(*inputs) as counter:
        result = linear_sample(
            case.hidden,
            case.weight,
            workspace_bytes=bound,
            **filters,
            **rows,
            **case.processing(),
        )
    assert peak(counter, result) <= bound


def footprint(shape: LogitsShape, rows: int) -> int:
    """Bytes of a call whose workspace does not limit it."""
    return tile_bytes(shape, plan_tiles(shape, rows, HUGE))


@pytest.mark.parametrize(
    ("rows", "vocab", "hidden_size", "filters"),
    [
        (1024, 1, 4, NO_FILTER),
        (512, 4096, 4, NO_FILTER),
        (1024, 32, 1024, NO_FILTER),
        (500, 9000, 2, {"top_k": 256}),
        (16, 100_000, 2, {"top_p": 0.9}),
    ],
    ids=["rows", "tile", "hidden", "candidates", "sorted"],
)
def test_the_footprint_is_no_guess(
    rows: int, vocab: int, hidden_size: int, filters: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(13)
    hidden = torch.randint(-1, 2, (rows, hidden_size), generator=generator).bfloat16()
    weight = torch.randint(-1, 2, (vocab, hidden_size), generator=generator).float()
    temperature = torch.where(torch.arange(rows) % 8 == 7, 0.0, 9.0)
    some = keys(rows)
    with counting(hidden, weight, temperature, *some.values()) as counter:
        result = linear_sample(
            hidden, weight, temperature=temperature, workspace_bytes=HUGE, **filters, **some
        )
    source = LogitsInput(hidden=hidden, weight=weight)
    planned = footprint(replace(source.shape(reordered=True), filtered=bool(filters)), rows)
    assert 0.6 * planned <= peak(counter, result) <= planned


def peak(counter: Any, result: SampleResult) -> int:
    return int(counter.peak_without([result.ids, result.logprobs, result.logsumexp]))


@pytest.mark.parametrize("filters", [NO_FILTER, {"top_p": 0.9}, {"top_k": 400}], ids=str)
def test_a_large_vocabulary_fits_64_mib(filters: dict[str, Any]) -> None:
    rows, vocab = 12, 150_000
    hidden, weight = spiky(rows, vocab, 0.1)
    rows_keys = keys(rows)
    with counting(hidden, weight, *rows_keys.values()) as counter:
        result = linear_sample(hidden, weight, **filters, **rows_keys)
    assert peak(counter, result) <= 64 << 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seeds": torch.zeros(3).long()}, "seeds: shape"),
        ({"seeds": torch.zeros(2).int()}, "seeds: dtype"),
        ({"positions": torch.zeros(1).long()}, "positions: shape"),
        ({"top_p": 0.0}, r"top_p: 0.0 is not in \(0.0, 1.0\]"),
        ({"top_p": 1.5}, "top_p: 1.5"),
        ({"top_p": torch.tensor([0.5, torch.nan])}, "top_p: nan"),
        ({"min_p": -0.1}, "min_p: -0.1"),
        ({"min_p": torch.ones(5)}, "min_p: shape"),
        ({"top_k": -2}, "top_k: -2"),
        ({"top_k": torch.ones(2)}, "top_k: dtype"),
        ({"temperature": -1.0}, "temperature: -1.0"),
        ({"group": object()}, "is not a torch.distributed process group"),
        ({"workspace_bytes": 100}, "give at least"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    all_arguments = {
        "hidden": torch.ones(2, 3),
        "weight": torch.ones(7, 3),
        **keys(2),
        **arguments,
    }
    with pytest.raises(ValueError, match=message):
        linear_sample(**all_arguments)
