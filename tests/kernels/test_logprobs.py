"""Logprobs without the logits matrix: against the whole matrix, its ties, its faults, its bytes."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from logits_cases import DTYPES, Case, adjustments, cases, counting, masks

from seawall.kernels.logits_reference import best_of, processed_logits
from seawall.memory.footprint_logits import (
    LogitsShape,
    min_workspace_bytes,
    plan_tiles,
    smallest_workspace,
    tile_bytes,
)
from seawall.ops import LogprobResult, SparseAdjust, linear_logprobs
from seawall.sampling.tiles import LogitsInput

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
HUGE = 1 << 40


def shape_of(case: Case, top_k: int = 0, num_token_ids: int = 0) -> LogitsShape:
    source = LogitsInput(hidden=case.hidden, weight=case.weight, adjust=case.adjust)
    return source.shape(top_k=top_k, num_token_ids=num_token_ids, reordered=False)


def least(case: Case, top_k: int = 0, num_token_ids: int = 0) -> int:
    return smallest_workspace(shape_of(case, top_k, num_token_ids))


def footprint(shape: LogitsShape, rows: int) -> int:
    """Bytes of a call whose workspace does not limit it."""
    return tile_bytes(shape, plan_tiles(shape, rows, HUGE))


def tensors(result: LogprobResult) -> list[torch.Tensor | None]:
    return [getattr(result, field.name) for field in dataclasses.fields(result)]


@settings(max_examples=60)
@given(cases(), st.data())
def test_agrees_with_the_whole_matrix(case: Case, data: st.DataObject) -> None:
    top_k = data.draw(st.sampled_from([0, 1, min(20, case.vocab), case.vocab]))
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(0, case.vocab, (case.rows,), generator=generator)
    targets[:1] = case.vocab - 1
    token_ids = torch.randint(0, case.vocab, (case.rows, 5), generator=generator)
    token_ids[:, -1:] = case.vocab - 1
    if data.draw(st.booleans()):
        token_ids = torch.tensor([case.vocab - 1, 0, 0])
    workspace = data.draw(st.sampled_from([least(case, top_k, 5), 1 << 20, HUGE]))
    workspace = max(workspace, least(case, top_k, 5))

    result = linear_logprobs(
        case.hidden,
        case.weight,
        targets,
        top_k=top_k,
        token_ids=token_ids,
        with_rank=True,
        with_entropy=True,
        workspace_bytes=workspace,
        **case.processing(),
    )

    logits = processed_logits(case.hidden, case.weight, **case.processing())
    expected = logits.log_softmax(1)
    close = {"atol": 1e-4, "rtol": 1e-5, "check_dtype": False}
    own = expected.gather(1, targets[:, None])
    torch.testing.assert_close(result.logsumexp, logits.logsumexp(1), **close)
    torch.testing.assert_close(result.logprobs, own[:, 0], **close)
    asked = token_ids.expand(case.rows, -1)
    torch.testing.assert_close(result.token_logprobs, expected.gather(1, asked), **close)
    probs = expected.exp()
    entropy = -(probs * expected).nan_to_num(0.0).sum(1)
    torch.testing.assert_close(result.entropy, entropy, **close)
    assert result.rank is not None
    certainly, perhaps = (expected > own + 1e-4).sum(1), (expected > own - 1e-4).sum(1)
    assert ((certainly + 1 <= result.rank) & (result.rank <= perhaps + 1)).all()
    if top_k:
        check_top(result, expected, top_k)


def check_top(result: LogprobResult, expected: torch.Tensor, top_k: int) -> None:
    """Values of the best, and ids: distinct, in range, and worth what the best are worth."""
    assert result.top_ids is not None and result.top_logprobs is not None
    close = {"atol": 1e-4, "rtol": 1e-5, "check_dtype": False}
    values, ids = best_of(expected, top_k)
    torch.testing.assert_close(result.top_logprobs, values, **close)
    torch.testing.assert_close(expected.gather(1, result.top_ids), values, **close)
    ordered = result.top_ids.sort(1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all()
    forbidden = values == -torch.inf
    assert (result.top_ids[forbidden] == ids[forbidden]).all()


@settings(max_examples=40)
@given(
    rows=st.integers(1, 12),
    vocab=st.sampled_from([1, 5, 32, 300, 4096, 5000, 9001]),
    k=st.sampled_from([1, 2, 20, 257, 5000]),
    seed=st.integers(0, 1000),
    masked=st.booleans(),
    tight=st.booleans(),
)
def test_equal_logits_rank_by_lowest_id(
    rows: int, vocab: int, k: int, seed: int, masked: bool, tight: bool
) -> None:
    # Whole numbers: every logit is exact in float32, and most have many equals.
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randint(-3, 4, (rows, 3), generator=generator).float()
    weight = torch.randint(-3, 4, (vocab, 3), generator=generator).float()
    k = min(k, vocab)
    bitmask = masks(rows, vocab, generator) if masked else None
    workspace = min_workspace_bytes(vocab, 3, "float32", top_k=k) if tight else 64 << 20
    result = linear_logprobs(hidden, weight, top_k=k, bitmask=bitmask, workspace_bytes=workspace)
    logits = processed_logits(hidden, weight, bitmask=bitmask, dtype=torch.float32)
    _, ids = best_of(logits, k)
    assert result.top_ids is not None
    assert (result.top_ids == ids).all()


def test_negative_zero_equals_zero() -> None:
    # So hot that every logit becomes a zero with the sign it had.
    weight = torch.tensor([[-1e-30], [1e-30], [-1e-30], [1e-30]])
    result = linear_logprobs(torch.ones(1, 1), weight, top_k=2, temperature=1e20)
    assert result.top_ids is not None
    assert result.top_ids.tolist() == [[0, 1]]


def test_rank_counts_strictly_greater_logits() -> None:
    hidden, weight = torch.ones(4, 1), torch.tensor([[1.0], [3.0], [3.0], [2.0]])
    result = linear_logprobs(hidden, weight, torch.arange(4), with_rank=True)
    assert result.rank is not None
    assert result.rank.tolist() == [4, 1, 1, 3]


def test_masked_entries_fill_up_the_best() -> None:
    hidden, weight = torch.ones(1, 1), torch.arange(40.0)[:, None]
    bitmask = torch.tensor([[0b1010, 0]], dtype=torch.int32)
    result = linear_logprobs(hidden, weight, top_k=5, bitmask=bitmask)
    assert result.top_ids is not None and result.top_logprobs is not None
    assert result.top_ids.tolist() == [[3, 1, 0, 2, 4]]
    assert result.top_logprobs[0, 2:].tolist() == [-torch.inf] * 3
    assert result.top_logprobs[0, :2].exp().sum().item() == pytest.approx(1.0)


def test_nothing_is_made_that_was_not_asked() -> None:
    result = linear_logprobs(torch.ones(2, 3), torch.ones(4, 3))
    assert [t is None for t in tensors(result)] == [True, False, True, True, True, True, True]
    empty = linear_logprobs(torch.ones(0, 3), torch.ones(4, 3), torch.ones(0).long(), top_k=2)
    assert empty.top_ids is not None and empty.logprobs is not None
    assert (empty.top_ids.shape, empty.logprobs.shape) == ((0, 2), (0,))


@pytest.mark.parametrize("dtype", DTYPES)
def test_error_against_float64(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(16, 512, generator=generator).to(dtype)
    weight = (torch.randn(3000, 512, generator=generator) * 0.2).to(dtype)
    targets = torch.randint(0, 3000, (16,), generator=generator)
    result = linear_logprobs(hidden, weight, targets, top_k=3000)
    expected = processed_logits(hidden, weight).log_softmax(1)
    assert result.logprobs is not None and result.top_logprobs is not None
    own = expected.gather(1, targets[:, None])[:, 0]
    assert (result.logprobs - own).abs().max() <= 1e-4
    assert (result.top_logprobs - best_of(expected, 3000)[0]).abs().max() <= 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_workspace_does_not_change_results(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(50, 64, generator=generator).to(dtype)
    weight = (torch.randn(9000, 64, generator=generator) * 0.3).to(dtype)
    targets = torch.randint(0, 9000, (50,), generator=generator)
    smallest = min_workspace_bytes(9000, 64, NAMES[dtype], top_k=5)
    runs = [
        linear_logprobs(hidden, weight, targets, top_k=5, workspace_bytes=bound)
        for bound in (smallest, 1 << 20, 1 << 30)
    ]
    for run in runs[:2]:
        assert run.logprobs is not None and runs[2].logprobs is not None
        torch.testing.assert_close(run.logprobs, runs[2].logprobs, atol=1e-6, rtol=1e-6)
        assert run.top_ids is not None and runs[2].top_ids is not None
        assert (run.top_ids == runs[2].top_ids).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_faulty_row_is_nan_alone(bad: float, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(5, 8, generator=generator), torch.rand(300, 8, generator=generator)
    good = linear_logprobs(hidden, weight, torch.arange(5), top_k=3, softcap=softcap)
    hidden[2, 4] = bad
    ids = torch.tensor([1, 2])
    result = linear_logprobs(
        hidden,
        weight,
        torch.arange(5),
        top_k=3,
        token_ids=ids,
        softcap=softcap,
        with_rank=True,
        with_entropy=True,
    )
    for values in (result.logprobs, result.logsumexp, result.entropy):
        assert values is not None
        assert values.isnan().tolist() == [False, False, True, False, False]
    for matrix in (result.top_logprobs, result.token_logprobs):
        assert matrix is not None
        assert matrix.isnan().all(1).tolist() == [False, False, True, False, False]
    assert result.rank is not None and result.rank[2] == 0
    others = torch.tensor([0, 1, 3, 4])
    assert result.logprobs is not None and good.logprobs is not None
    torch.testing.assert_close(result.logprobs[others], good.logprobs[others])


def test_a_faulty_weight_row_poisons_every_row() -> None:
    weight = torch.ones(300, 4)
    weight[299, 1] = -torch.inf
    result = linear_logprobs(torch.ones(3, 4), weight, torch.tensor([0, 1, 2]))
    assert result.logprobs is not None
    assert result.logprobs.isnan().all()


def test_a_row_without_allowed_ids_is_nan() -> None:
    bitmask = torch.tensor([[0], [1]], dtype=torch.int32)
    result = linear_logprobs(
        torch.ones(2, 2), torch.ones(9, 2), torch.zeros(2).long(), bitmask=bitmask
    )
    assert result.logprobs is not None
    assert result.logprobs[0].isnan()
    assert result.logprobs[1] == 0.0


def test_views_and_odd_strides() -> None:
    generator = torch.Generator().manual_seed(6)
    hidden, weight = (
        torch.randn(8, 5, generator=generator).T,
        torch.randn(8, 70, generator=generator).T,
    )
    targets = torch.arange(5)
    result = linear_logprobs(hidden, weight, targets)
    expected = processed_logits(hidden, weight).log_softmax(1).gather(1, targets[:, None])
    assert result.logprobs is not None
    assert (result.logprobs - expected[:, 0]).abs().max() < 1e-5


@settings(max_examples=60)
@given(cases(max_vocab=9000), st.data())
def test_temporaries_stay_within_the_workspace(case: Case, data: st.DataObject) -> None:
    top_k = data.draw(st.sampled_from([0, 1, min(20, case.vocab), case.vocab]))
    targets = torch.zeros(case.rows, dtype=torch.int64)
    token_ids = torch.zeros(case.rows, data.draw(st.sampled_from([1, 300])), dtype=torch.int64)
    # From the smallest workspace to the largest that is used: the bound always binds.
    shape = shape_of(case, top_k, token_ids.shape[1])
    smallest, largest = smallest_workspace(shape), footprint(shape, case.rows)
    bound = smallest + int(data.draw(st.floats(0.0, 1.0)) * max(0, largest - smallest))
    adjust = case.adjust
    parts = [] if adjust is None else [adjust.row, adjust.ids, adjust.repetition, adjust.add]
    extra = [t for t in (case.bias, case.bitmask, case.temperature) if isinstance(t, torch.Tensor)]
    with counting(case.hidden, case.weight, targets, token_ids, *parts, *extra) as counter:
        result = linear_logprobs(
            case.hidden,
            case.weight,
            targets,
            top_k=top_k,
            token_ids=token_ids,
            with_rank=True,
            with_entropy=True,
            workspace_bytes=bound,
            **case.processing(),
        )
    assert counter.peak_without(tensors(result)) <= bound


@pytest.mark.parametrize(
    ("rows", "vocab", "hidden_size", "dtype", "top_k", "num_ids"),
    [
        (1024, 1, 4, torch.float32, 0, 0),
        (512, 4096, 4, torch.float32, 0, 0),
        (4, 4096, 512, torch.bfloat16, 0, 0),
        (1024, 32, 1024, torch.bfloat16, 0, 0),
        (256, 8192, 4, torch.float32, 1000, 0),
        (512, 64, 4, torch.float32, 0, 256),
    ],
    ids=["rows", "tile", "weight", "hidden", "best", "picked"],
)
def test_the_footprint_is_no_guess(
    rows: int, vocab: int, hidden_size: int, dtype: torch.dtype, top_k: int, num_ids: int
) -> None:
    # Whole numbers, so that many logits are equal and the keyed selection is counted as well.
    generator = torch.Generator().manual_seed(9)
    hidden = torch.randint(-2, 3, (rows, hidden_size), generator=generator).to(dtype)
    weight = torch.randint(-2, 3, (vocab, hidden_size), generator=generator).to(dtype)
    targets, temperature = torch.zeros(rows, dtype=torch.int64), torch.full((rows,), 0.5)
    token_ids = torch.zeros(rows, num_ids, dtype=torch.int64)
    with counting(hidden, weight, targets, token_ids, temperature) as counter:
        result = linear_logprobs(
            hidden,
            weight,
            targets,
            top_k=top_k,
            token_ids=token_ids,
            temperature=temperature,
            with_rank=True,
            with_entropy=True,
            workspace_bytes=HUGE,
        )
    source = LogitsInput(hidden=hidden, weight=weight)
    shape = source.shape(top_k=top_k, num_token_ids=num_ids, reordered=False)
    planned = footprint(shape, rows)
    assert 0.75 * planned <= counter.peak_without(tensors(result)) <= planned


def test_a_large_vocabulary_fits_64_mib(soak: bool) -> None:
    rows = 10_000 if soak else 600
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(rows, 64, generator=generator)
    weight = torch.randn(150_000, 64, generator=generator) * 0.3
    targets = torch.randint(0, 150_000, (rows,), generator=generator)
    with counting(hidden, weight, targets) as counter:
        result = linear_logprobs(hidden, weight, targets, top_k=20, workspace_bytes=64 << 20)
    assert counter.peak_without(tensors(result)) <= 64 << 20
    logits = hidden[:8].double() @ weight.double().T
    assert result.top_ids is not None and result.logprobs is not None
    assert (result.top_ids[:8] == logits.topk(20).indices).all()
    own = logits.log_softmax(1).gather(1, targets[:8, None])[:, 0]
    assert (result.logprobs[:8] - own).abs().max() <= 1e-4


@given(
    vocab=st.integers(1, 300_000),
    hidden=st.integers(1, 16_384),
    rows=st.integers(0, 20_000),
    top_k=st.integers(0, 50),
    copies=st.booleans(),
    filtered=st.booleans(),
    spare=st.integers(0, 1 << 27),
)
def test_every_plan_fits_its_workspace(
    vocab: int, hidden: int, rows: int, top_k: int, copies: bool, filtered: bool, spare: int
) -> None:
    shape = LogitsShape(
        vocab_size=vocab,
        hidden_size=hidden,
        hidden_copy_bytes=4,
        copies_weight=copies,
        top_k=min(top_k, vocab),
        filtered=filtered,
        adjusted=filtered,
    )
    smallest = smallest_workspace(shape)
    plan = plan_tiles(shape, rows, smallest + spare)
    assert tile_bytes(shape, plan) <= smallest + spare
    assert plan.rows >= 1 and plan.ids >= 1
    with pytest.raises(ValueError, match=f"give at least {smallest}"):
        plan_tiles(shape, rows, smallest - 1)


def test_a_small_workspace_names_the_smallest_that_works() -> None:
    hidden, weight = torch.ones(3, 64).bfloat16(), torch.ones(5000, 64).bfloat16()
    with pytest.raises(ValueError, match="give at least") as caught:
        linear_logprobs(hidden, weight, workspace_bytes=1000)
    need = int(str(caught.value).split()[-1])
    linear_logprobs(hidden, weight, workspace_bytes=need)
    with pytest.raises(ValueError, match=f"give at least {need}"):
        linear_logprobs(hidden, weight, workspace_bytes=need - 1)
    assert need <= min_workspace_bytes(5000, 64, "bfloat16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"targets": torch.tensor([0, 7])}, r"targets: 7 is not in \[0, 7\)"),
        ({"targets": torch.tensor([0, -1])}, r"targets: -1"),
        ({"targets": torch.tensor([0])}, r"targets: shape \(1,\)"),
        ({"targets": torch.tensor([0.0, 1.0])}, "targets: dtype"),
        ({"token_ids": torch.tensor([7])}, "token_ids: 7"),
        ({"token_ids": torch.tensor([[1]])}, "token_ids: shape"),
        ({"top_k": 8}, r"top_k: 8 is not in \[0, 7\]"),
        ({"top_k": -1}, "top_k: -1"),
        ({"temperature": -0.5}, "temperature: -0.5"),
        ({"temperature": torch.tensor([1.0, torch.nan])}, "temperature: nan"),
        ({"temperature": torch.ones(3)}, "temperature: shape"),
        ({"softcap": 0.0}, "softcap: 0.0"),
        ({"scale": torch.inf}, "scale: inf"),
        ({"bias": torch.ones(6)}, "bias: shape"),
        ({"bitmask": torch.ones(2, 2).int()}, "bitmask: shape"),
        ({"bitmask": torch.ones(2, 1).long()}, "bitmask: dtype"),
        ({"with_rank": True}, "with_rank"),
        ({"group": object()}, "is not a torch.distributed process group"),
        ({"weight": torch.ones(7, 4)}, "do not multiply"),
        ({"weight": torch.ones(7, 3).double()}, "weight: dtype"),
        ({"weight": torch.ones(0, 3)}, "is empty"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    given_arguments = {"hidden": torch.ones(2, 3), "weight": torch.ones(7, 3), **arguments}
    with pytest.raises(ValueError, match=message):
        linear_logprobs(**given_arguments)  # type: ignore[arg-type]


def test_unsorted_or_stray_changes_are_refused() -> None:
    def entries(row: list[int], ids: list[int]) -> SparseAdjust:
        ones = torch.ones(len(row))
        return SparseAdjust(row=torch.tensor(row), ids=torch.tensor(ids), repetition=ones, add=ones)

    hidden, weight = torch.ones(2, 3), torch.ones(7, 3)
    for adjust, message in (
        (entries([1, 0], [0, 0]), "do not ascend"),
        (entries([0, 2], [0, 0]), "adjust.row: 2"),
        (entries([0, 1], [0, 7]), "adjust.ids: 7"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_logprobs(hidden, weight, adjust=adjust)


def test_changes_of_many_entries_reach_every_tile() -> None:
    # More entries than are applied at once, over more than one tile.
    generator = torch.Generator().manual_seed(8)
    vocab, rows = 9000, 3
    ids = torch.cat([torch.randperm(vocab, generator=generator)[:5000] for _ in range(rows)])
    adjust = SparseAdjust(
        row=torch.arange(rows).repeat_interleave(5000),
        ids=ids,
        repetition=torch.full((len(ids),), 1.3),
        add=torch.randn(len(ids), generator=generator),
    )
    hidden, weight = (
        torch.randn(rows, 8, generator=generator),
        torch.randn(vocab, 8, generator=generator),
    )
    result = linear_logprobs(hidden, weight, top_k=vocab, adjust=adjust)
    expected = processed_logits(hidden, weight, adjust=adjust).log_softmax(1)
    assert result.top_logprobs is not None
    assert (result.top_logprobs - best_of(expected, vocab)[0]).abs().max() < 1e-4


def test_adjustments_helper_covers_repetition_on_both_signs() -> None:
    adjust = adjustments(3, 50, torch.Generator().manual_seed(0))
    assert adjust is not None
    hidden, weight = torch.ones(3, 1), torch.linspace(-2, 2, 50)[:, None]
    result = linear_logprobs(hidden, weight, top_k=50, adjust=adjust)
    expected = processed_logits(hidden, weight, adjust=adjust).log_softmax(1)
    assert result.top_logprobs is not None
    values = best_of(expected, 50)[0].float()
    torch.testing.assert_close(result.top_logprobs, values, atol=1e-5, rtol=1e-5)
