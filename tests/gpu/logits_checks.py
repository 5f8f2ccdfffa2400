"""Checks of the CUDA logits path against float64 and the CPU's route; without a GPU, interpreted.

Each takes a seed and a device and raises AssertionError. They need torch, triton and numpy only.
"""

import random
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from seawall.kernels.logits_configs import FEW_ROWS
from seawall.kernels.logits_reference import (
    best_of,
    clocks,
    draw_scores,
    kept_ids,
    processed_logits,
)
from seawall.kernels.triton_parts import clock, clock_bits, row_key
from seawall.memory.footprint_logits_cuda import smallest_cuda_workspace
from seawall.sampling import cuda
from seawall.sampling.adjust import SparseAdjust
from seawall.sampling.noise import id_codes, negative_clocks, row_keys
from seawall.sampling.sampler import DrawInput
from seawall.sampling.tiles import LogitsInput

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HUGE = 1 << 34


def moved(value: Any, device: str) -> Any:
    """Tensors and what holds them, on the device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, SparseAdjust):
        return SparseAdjust(
            row=value.row.to(device),
            ids=value.ids.to(device),
            repetition=value.repetition.to(device),
            add=value.add.to(device),
        )
    if isinstance(value, dict):
        return {name: moved(item, device) for name, item in value.items()}
    return value


def random_masks(rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    words = -(-vocab // 32)
    bits = torch.randint(-(2**31), 2**31, (rows, words), generator=generator).to(torch.int32)
    bits[:, -1] |= 1 << torch.tensor((vocab - 1) % 32, dtype=torch.int32)
    return bits


def random_adjust(rows: int, vocab: int, generator: torch.Generator) -> SparseAdjust | None:
    count = min(20, vocab - 1)
    if count == 0:
        return None
    chosen = list(range(0, rows, 2))
    ids = torch.cat([torch.randperm(vocab - 1, generator=generator)[:count] for _ in chosen])
    add = torch.randn(len(ids), generator=generator)
    add[::5] = -torch.inf
    return SparseAdjust(
        row=torch.tensor(chosen).repeat_interleave(count),
        ids=ids,
        repetition=torch.rand(len(ids), generator=generator) + 0.5,
        add=add,
    )


def random_case(
    seed: int, most_rows: int, most_vocab: int
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Hidden, weight and processing; every shape and mix over the seeds."""
    choose, g = random.Random(seed), torch.Generator().manual_seed(seed)
    rows = choose.choice([1, 2, 7, FEW_ROWS, FEW_ROWS + 1, most_rows, choose.randint(1, most_rows)])
    vocab = choose.choice([1, 31, 33, 257, 512, most_vocab, choose.randint(1, most_vocab)])
    hidden_size = choose.choice([8, 64, 128, choose.randint(1, 160)])
    dtype = choose.choice(DTYPES)
    weight_dtype = choose.choice(DTYPES) if choose.random() < 0.2 else dtype
    hidden = torch.randn(rows, hidden_size, generator=g).to(dtype)
    weight = (2 * torch.randn(vocab, hidden_size, generator=g) / hidden_size**0.5).to(weight_dtype)
    temperature: Tensor | float = choose.choice([1.0, 1.0, 0.0, 0.7])
    if choose.random() < 0.3:
        temperature = torch.rand(rows, generator=g) * 2
        temperature[::3] = 0.0
    return (
        hidden,
        weight,
        {
            "temperature": temperature,
            "softcap": choose.choice([None, None, 2.5, 30.0]),
            "scale": choose.choice([1.0, 1.0, 0.5, 3.0]),
            "bias": torch.randn(vocab, generator=g) if choose.random() < 0.3 else None,
            "bitmask": random_masks(rows, vocab, g) if choose.random() < 0.3 else None,
            "adjust": random_adjust(rows, vocab, g) if choose.random() < 0.3 else None,
        },
    )


def close(got: Tensor | None, want: Tensor, what: str, limit: float = 1e-4) -> None:
    assert got is not None, what
    got, want = got.cpu().double(), want.double()
    same = (got == want) | (got.isnan() & want.isnan()) | ((got - want).abs() <= limit)
    assert bool(same.all()), (what, float((got - want).abs().nan_to_num(0.0).max()))


def workspaces(source: LogitsInput, choose: random.Random, **shape: Any) -> int:
    least = smallest_cuda_workspace(cuda.pass_shape(source, **shape))
    return choose.choice([least, 2 * least, HUGE])


def check_scores(seed: int, device: str, most_rows: int = 150, most_vocab: int = 3000) -> None:
    """Everything a call can be asked, against float64."""
    choose, g = random.Random(-seed), torch.Generator().manual_seed(seed + 1)
    hidden, weight, processing = random_case(seed, most_rows, most_vocab)
    rows, vocab = hidden.shape[0], weight.shape[0]
    top_k = min(choose.choice([0, 1, 20, 20, 128, 300]), vocab)
    targets = torch.randint(0, vocab, (rows,), generator=g)
    targets[:1] = vocab - 1
    token_ids = torch.randint(0, vocab, (rows, 5), generator=g)
    if choose.random() < 0.5:
        token_ids = torch.tensor([vocab - 1, 0, 0])
    source = LogitsInput(
        hidden=hidden.to(device), weight=weight.to(device), **moved(processing, device)
    )
    ask = cuda.Ask(
        targets=targets.to(device),
        token_ids=token_ids.to(device),
        top_k=top_k,
        rank=choose.random() < 0.5,
        entropy=choose.random() < 0.5,
    )
    got = cuda.score_rows(source, ask, workspaces(source, choose, ask=ask))
    logits = processed_logits(hidden, weight, **processing)
    expected = logits.log_softmax(1)
    own = expected.gather(1, targets[:, None])
    close(got.logsumexp, logits.logsumexp(1), "logsumexp")
    close(got.logprobs, own[:, 0], "logprobs")
    close(got.token_logprobs, expected.gather(1, token_ids.expand(rows, -1)), "token_logprobs")
    if ask.entropy:
        entropy = -(expected.exp() * expected).nan_to_num(0.0).sum(1)
        close(got.entropy, entropy, "entropy", 2e-4)
    if ask.rank:
        assert got.rank is not None
        rank = got.rank.cpu()
        assert ((expected > own + 1e-4).sum(1) + 1 <= rank).all(), "rank"
        assert (rank <= (expected > own - 1e-4).sum(1) + 1).all(), "rank"
    if top_k:
        values, ids = best_of(expected, top_k)
        close(got.top_logprobs, values, "top_logprobs")
        assert got.top_ids is not None
        top_ids = got.top_ids.cpu()
        close(expected.gather(1, top_ids), values, "top_ids")
        ordered = top_ids.sort(1).values
        assert (ordered[:, 1:] > ordered[:, :-1]).all(), "top_ids twice"
        forbidden = values == -torch.inf
        assert (top_ids[forbidden] == ids[forbidden]).all(), "forbidden ids"


def check_ties(seed: int, device: str) -> None:
    """Whole numbers, where most logits have equals: ids and ranks are exact."""
    choose, g = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, vocab = choose.choice([3, FEW_ROWS + 9]), choose.choice([5, 300, 2000, 3001])
    dtype = choose.choice(DTYPES)
    hidden = torch.randint(-3, 4, (rows, 8), generator=g).to(dtype)
    weight = torch.randint(-3, 4, (vocab, 8), generator=g).to(dtype)
    weight[:, 2:] = 0
    k = min(choose.choice([1, 2, 20, 100]), vocab)
    bitmask = random_masks(rows, vocab, g) if choose.random() < 0.5 else None
    if bitmask is not None:
        bitmask[::2, :-1] = 0
    targets = torch.randint(0, vocab, (rows,), generator=g)
    source = LogitsInput(
        hidden=hidden.to(device), weight=weight.to(device), bitmask=moved(bitmask, device)
    )
    ask = cuda.Ask(targets=targets.to(device), top_k=k, rank=True)
    got = cuda.score_rows(source, ask, workspaces(source, choose, ask=ask))
    logits = processed_logits(hidden, weight, bitmask=bitmask, dtype=torch.float32)
    assert got.top_ids is not None and got.rank is not None
    assert (got.top_ids.cpu() == best_of(logits, k)[1]).all(), "ties"
    rank = (logits > logits.gather(1, targets[:, None])).sum(1) + 1
    assert (got.rank.cpu() == rank).all(), "rank"


def check_draws(seed: int, device: str, most_rows: int = 100, most_vocab: int = 1500) -> None:
    """Drawn ids against the exact noise and filters, wherever the best leads by 1e-3."""
    choose, g = random.Random(seed), torch.Generator().manual_seed(seed)
    hidden, weight, processing = random_case(seed, most_rows, most_vocab)
    rows, vocab = hidden.shape[0], weight.shape[0]
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=g)
    positions = torch.randint(0, 1 << 20, (rows,), generator=g)
    filtered = choose.random() < 0.6
    top_k = torch.tensor([choose.choice([0, 1, 3, 50, vocab + 5]) for _ in range(rows)])
    top_p = torch.tensor([choose.choice([1.0, 0.95, 0.5, 1e-3]) for _ in range(rows)])
    min_p = torch.tensor([choose.choice([0.0, 0.0, 0.1, 1.0]) for _ in range(rows)])
    source = LogitsInput(
        hidden=hidden.to(device), weight=weight.to(device), **moved(processing, device)
    )
    draw = DrawInput(
        seeds=seeds.to(device),
        positions=positions.to(device),
        top_k=top_k.to(device) if filtered else None,
        top_p=top_p.to(device) if filtered else None,
        min_p=min_p.to(device) if filtered else None,
    )
    got = cuda.sample_rows(source, draw, workspaces(source, choose, draw=draw))
    logits = processed_logits(hidden, weight, **processing)
    expected = logits.log_softmax(1)
    ids = got.ids.cpu()
    close(got.logprobs, expected.gather(1, ids[:, None])[:, 0], "logprobs")
    close(got.logsumexp, logits.logsumexp(1), "logsumexp")
    noise = clocks(seeds.tolist(), positions.tolist(), vocab)
    temperature = torch.as_tensor(processing["temperature"], dtype=torch.float32).expand(rows)
    for row in range(rows):
        if temperature[row] < 1e-6:
            scores = logits[row].double()
        else:
            kept = kept_ids(
                logits[row], int(top_k[row]), float(top_p[row]), float(min_p[row])
            ) if filtered else kept_ids(logits[row])  # fmt: skip
            scores = draw_scores(logits[row], noise[row], set(kept))
        best = scores.topk(min(2, vocab)).values
        if len(best) < 2 or best[0] - best[1] > 1e-3:
            assert int(scores.argmax()) == int(ids[row]), ("draw", row)


def check_faults(seed: int, device: str) -> None:
    """NaN and infinity make their rows NaN and no others; a row without ids is NaN."""
    choose, g = random.Random(seed), torch.Generator().manual_seed(seed)
    rows = choose.choice([6, FEW_ROWS + 6])
    hidden, weight = torch.randn(rows, 16, generator=g), torch.randn(700, 16, generator=g)
    hidden[1, 3], hidden[2, 0], hidden[3, 5] = torch.nan, torch.inf, -torch.inf
    softcap = choose.choice([None, 5.0])
    bitmask = random_masks(rows, 700, g)
    bitmask[4] = 0
    plain = choose.random() < 0.5
    source = LogitsInput(
        hidden=hidden.bfloat16().to(device),
        weight=weight.bfloat16().to(device),
        softcap=softcap,
        bitmask=None if plain else bitmask.to(device),
    )
    targets = torch.zeros(rows, dtype=torch.int64, device=device)
    ask = cuda.Ask(targets=targets, top_k=3, rank=True, entropy=True)
    got = cuda.score_rows(source, ask, HUGE)
    assert got.rank is not None and got.top_logprobs is not None and got.entropy is not None
    assert got.top_ids is not None
    wrong = [1, 2, 3] if plain else [1, 2, 3, 4]
    is_wrong = torch.zeros(rows, dtype=torch.bool)
    is_wrong[wrong] = True
    assert (got.logsumexp.cpu().isnan() == is_wrong).all(), "logsumexp"
    assert (got.top_logprobs[:, 0].cpu().isnan() == is_wrong).all(), "top"
    assert (got.entropy.cpu().isnan() == is_wrong).all(), "entropy"
    assert ((got.rank.cpu() == 0) == is_wrong).all(), "rank"
    assert ((got.top_ids >= 0) & (got.top_ids < 700)).all(), "ids"
    for filtered in (None, 0.9):
        draw = DrawInput(seeds=targets, positions=targets, top_k=None, top_p=filtered, min_p=None)
        drawn = cuda.sample_rows(source, draw, HUGE)
        assert (drawn.logprobs.cpu().isnan() == is_wrong).all(), "draw"
        assert (drawn.ids.cpu()[is_wrong] == 0).all(), "drawn id"


def check_bits(seed: int, device: str) -> None:
    """The same bits for every workspace and order of rows."""
    choose, g = random.Random(seed), torch.Generator().manual_seed(seed)
    rows = choose.choice([9, FEW_ROWS + 70])
    dtype = choose.choice(DTYPES)
    hidden = torch.randn(rows, 72, generator=g).to(dtype).to(device)
    weight = torch.randn(1300, 72, generator=g).to(dtype).to(device)
    targets = torch.randint(0, 1300, (rows,), generator=g).to(device)
    k = choose.choice([0, 20])
    ask = cuda.Ask(targets=targets, top_k=k, rank=True, entropy=True)
    source = LogitsInput(hidden=hidden, weight=weight)
    whole = cuda.score_rows(source, ask, HUGE)
    order = torch.randperm(rows, generator=g).to(device)
    least = smallest_cuda_workspace(cuda.pass_shape(source, ask=ask))
    turned = LogitsInput(hidden=hidden[order], weight=weight)
    moved_ask = cuda.Ask(targets=targets[order], top_k=k, rank=True, entropy=True)
    parts = cuda.score_rows(turned, moved_ask, 3 * least)
    pairs = [(whole.logprobs, parts.logprobs), (whole.logsumexp, parts.logsumexp)]
    pairs += [(whole.rank, parts.rank), (whole.entropy, parts.entropy)]
    if k:
        pairs += [(whole.top_ids, parts.top_ids), (whole.top_logprobs, parts.top_logprobs)]
    for one, other in pairs:
        assert one is not None and other is not None
        assert torch.equal(one[order], other), "bits"


@triton.jit
def _noise_kernel(seeds, positions, bits, values, vocab, N: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.program_id(1) * N + tl.arange(0, N)
    low, high = row_key(tl.load(seeds + row), tl.load(positions + row))
    h = clock_bits(cols, low, high)
    tl.store(bits + row * vocab + cols, h, mask=cols < vocab)
    tl.store(values + row * vocab + cols, clock(h), mask=cols < vocab)


def check_noise(seed: int, device: str, vocab: int = 5000) -> None:
    """The sampler's bits are the CPU's, its variates within 3e-6."""
    g = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**62), 2**62, (16,), generator=g)
    positions = torch.randint(0, 1 << 40, (16,), generator=g)
    bits = torch.empty(16, vocab, dtype=torch.int32, device=device)
    values = torch.empty(16, vocab, device=device)
    grid = (16, -(-vocab // 1024))
    _noise_kernel[grid](seeds.to(device), positions.to(device), bits, values, vocab, N=1024)
    hashes, spare = torch.empty(2, 16, vocab, dtype=torch.int32)
    codes = id_codes(torch.arange(vocab))
    expected = -negative_clocks(codes, row_keys(seeds, positions), hashes, spare)
    assert torch.equal(bits.cpu(), hashes), "noise bits"
    error = ((values.cpu().double() - expected) / expected).abs().max()
    assert error < 3e-6, ("noise", float(error))


CHECKS = {
    "noise": check_noise,
    "scores": check_scores,
    "ties": check_ties,
    "draws": check_draws,
    "faults": check_faults,
    "bits": check_bits,
}
