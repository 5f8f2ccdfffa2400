"""Checks of the CUDA logits path against float64 and the CPU's route; without a GPU, interpreted.

Each takes a seed and a device and raises AssertionError. They need torch, triton and numpy only.
"""

import dataclasses
import random
from typing import Any

import torch
import torch.distributed as dist
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
from seawall.memory.footprint_logits_cuda import (
    PassShape,
    fixed_bytes,
    row_bytes,
    smallest_cuda_workspace,
)
from seawall.ops import linear_logprobs, linear_sample
from seawall.sampling import cpu, cuda, entry
from seawall.sampling.adjust import SparseAdjust
from seawall.sampling.logprobs import Ask, LogprobResult
from seawall.sampling.noise import id_codes, negative_clocks, row_keys
from seawall.sampling.sampler import DrawInput, SampleResult
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


def close(got: Tensor | None, want: Tensor, what: str, limit: Tensor | float = 1e-4) -> None:
    """Within a limit, one for all or one a row."""
    assert got is not None, what
    if isinstance(limit, Tensor) and want.dim() == 2:
        limit = limit[:, None]
    got, want = got.cpu().double(), want.double()
    same = (got == want) | (got.isnan() & want.isnan()) | ((got - want).abs() <= limit)
    assert bool(same.all()), (what, float((got - want).abs().nan_to_num(0.0).max()))


def limit_of(logits: Tensor, processing: dict[str, Any]) -> Tensor:
    """Largest error allowed in each row: 1e-4, or four units in the last place of its numbers.

    Divided by a temperature of 0.01, logits reach some hundreds, where neighbouring float32 lie
    up to 6e-5 apart; no float32 result can be closer than that. Under a softcap the numbers are
    parts of the cap, whatever is left of them.
    """
    rows = logits.shape[0]
    largest = logits.abs().masked_fill(~logits.isfinite(), 0.0).amax(1)
    cap = processing.get("softcap")
    if cap is not None:
        heat = torch.as_tensor(processing["temperature"], dtype=torch.float64).expand(rows)
        largest = largest.maximum(cap / torch.where(heat < 1e-6, 1.0, heat))
    return largest.mul(4 * 2.0**-23).clamp(min=1e-4)


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
    limit = limit_of(logits, processing)
    close(got.logsumexp, logits.logsumexp(1), "logsumexp", limit)
    close(got.logprobs, own[:, 0], "logprobs", limit)
    close(
        got.token_logprobs, expected.gather(1, token_ids.expand(rows, -1)), "token_logprobs", limit
    )
    if ask.entropy:
        entropy = -(expected.exp() * expected).nan_to_num(0.0).sum(1)
        close(got.entropy, entropy, "entropy", 2 * limit)
    if ask.rank:
        assert got.rank is not None
        rank = got.rank.cpu()
        assert ((expected > own + limit[:, None]).sum(1) + 1 <= rank).all(), "rank"
        assert (rank <= (expected > own - limit[:, None]).sum(1) + 1).all(), "rank"
    if top_k:
        values, ids = best_of(expected, top_k)
        close(got.top_logprobs, values, "top_logprobs", limit)
        assert got.top_ids is not None
        top_ids = got.top_ids.cpu()
        close(expected.gather(1, top_ids), values, "top_ids", limit)
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
    limit = limit_of(logits, processing)
    close(got.logprobs, expected.gather(1, ids[:, None])[:, 0], "logprobs", limit)
    close(got.logsumexp, logits.logsumexp(1), "logsumexp", limit)
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


# temperature, top_k, top_p, min_p
MIXES: list[tuple[float, int | None, float | None, float | None]] = [
    (1.0, None, None, None),
    (0.6, None, None, None),
    (1.0, 7, None, None),
    (1.3, None, 0.8, None),
    (1.0, None, None, 0.1),
    (0.8, 20, 0.9, None),
    (1.5, 30, None, 0.05),
    (1.2, 25, 0.95, 0.02),
    (2.0, None, 0.7, 0.2),
    (1.0, 40, 0.999, 1e-4),
]


def chi_square_limit(freedom: int) -> float:
    """What chi-square exceeds about once in 30,000 times (Wilson and Hilferty, 1931)."""
    part = 2.0 / (9.0 * freedom)
    return float(freedom * (1.0 - part + 4.0 * part**0.5) ** 3)


def check_chances(seed: int, device: str, draws: int = 20_000, vocab: int = 300) -> None:
    """Frequencies of many draws of one row against its exact distribution, and the CPU's draws."""
    heat, top_k, top_p, min_p = MIXES[seed % len(MIXES)]
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(1, 16, generator=g)
    weight = 0.6 * torch.randn(vocab, 16, generator=g)
    few = seed // len(MIXES) % 2 == 1  # the other kernel, some rows at a time
    draws = min(draws, 100 * FEW_ROWS) if few else draws
    rows = FEW_ROWS if few else draws
    seeds = torch.arange(draws) // 50 + 1000 * seed
    positions = torch.arange(draws) % 50
    parts, own = [], []
    for first in range(0, draws, rows):
        span = slice(first, min(first + rows, draws))
        count = span.stop - first
        for found, where, route in ((parts, device, cuda), (own, "cpu", cpu)):
            draw = DrawInput(
                seeds=seeds[span].to(where),
                positions=positions[span].to(where),
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
            )
            source = LogitsInput(
                hidden=hidden.expand(count, -1).contiguous().to(where),
                weight=weight.to(where),
                temperature=heat,
            )
            found.append(route.sample_rows(source, draw, 64 << 20).ids.cpu())
    ids, cpu_ids = torch.cat(parts), torch.cat(own)
    logits = processed_logits(hidden, weight, temperature=heat)[0]
    kept = kept_ids(logits, top_k or 0, top_p or 1.0, min_p or 0.0)
    assert set(ids.tolist()) <= set(kept), "an id that is not kept"
    for row in (ids != cpu_ids).nonzero().view(-1).tolist():
        noise = clocks([int(seeds[row])], [int(positions[row])], vocab)[0]
        scores = draw_scores(logits, noise, set(kept))
        assert scores[ids[row]] > scores.max() - 1e-3, ("unlike the CPU", row)
    seen = torch.bincount(ids, minlength=vocab).double()
    chances = torch.zeros(vocab, dtype=torch.float64)
    chances[list(kept)] = torch.tensor(list(kept.values()), dtype=torch.float64)
    expected, order = (chances * draws).sort(descending=True)
    # The rare ones share a bin.
    common = max(1, int((expected >= 8).sum()))
    want = torch.cat((expected[:common], expected[common:].sum()[None]))
    have = torch.cat((seen[order[:common]], seen[order[common:]].sum()[None]))
    want, have = want[want > 0], have[want > 0]
    if len(want) > 1:
        chi = float(((have - want) ** 2 / want).sum())
        assert chi < chi_square_limit(len(want) - 1), ("chi-square", chi, len(want) - 1)


def workspace_of(shape: PassShape, rows: int) -> int:
    """A workspace that holds so many rows of a call and, up to rounding, no more."""
    need = fixed_bytes(shape) + rows * row_bytes(shape)
    if need <= 1 << 20:
        return need
    return need + ((1 << 20) if need < 15 << 20 else (2 << 20))


def check_workspaces(seed: int, device: str, rows: int = 1000, vocab: int = 5003) -> None:
    """1,000 rows in workspaces for 1 to 2,048 rows and without end: the same bits."""
    g = torch.Generator().manual_seed(seed)
    dtype = DTYPES[seed % len(DTYPES)]
    hidden = torch.randn(rows, 96, generator=g).to(dtype).to(device)
    weight = (0.2 * torch.randn(vocab, 96, generator=g)).to(dtype).to(device)
    targets = torch.randint(0, vocab, (rows,), generator=g).to(device)
    token_ids = torch.randint(0, vocab, (rows, 3), generator=g).to(device)
    source = LogitsInput(hidden=hidden, weight=weight, temperature=0.9)
    asks = [
        cuda.Ask(targets=targets),
        cuda.Ask(targets=targets, top_k=20, token_ids=token_ids, rank=True, entropy=True),
    ]
    filters = [None, 0.9] if seed % 2 else [None]
    draws = [
        DrawInput(seeds=targets, positions=targets, top_k=None, top_p=top_p, min_p=None)
        for top_p in filters
    ]
    held = (1, 2, 3, 16, 128, 256, 2048)
    for ask in asks:
        whole = cuda.score_rows(source, ask, HUGE)
        shape = cuda.pass_shape(source, ask=ask)
        for count in held[seed % 2 :: 2] if rows > 100 else held:
            part = cuda.score_rows(source, ask, workspace_of(shape, count))
            assert _same_bits(whole, part), ("score", count)
    for draw in draws:
        drawn = cuda.sample_rows(source, draw, HUGE)
        shape = cuda.pass_shape(source, draw=draw)
        for count in held[seed % 2 :: 2] if rows > 100 else held:
            part_drawn = cuda.sample_rows(source, draw, workspace_of(shape, count))
            assert _same_bits(drawn, part_drawn), ("draw", count)


def _same_bits(one: Any, other: Any) -> bool:
    names = [field.name for field in dataclasses.fields(one)]
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    return all(a is b or torch.equal(a, b) for a, b in pairs)


def check_public(seed: int, device: str) -> None:
    """The public functions on the device: float64's numbers, faults that stay alone, refusals."""
    hidden, weight, processing = random_case(seed, 120, 3000)
    rows, vocab = hidden.shape[0], weight.shape[0]
    g = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, vocab, (rows,), generator=g)
    hidden[rows // 2, 0] = torch.nan
    there = {name: value.to(device) for name, value in (("h", hidden), ("w", weight))}
    more = moved(processing, device)
    k = min(20, vocab)
    shared = torch.tensor([0, vocab - 1], device=device)

    def score(**room: int) -> LogprobResult:
        return linear_logprobs(
            there["h"], there["w"], targets.to(device), top_k=k, token_ids=shared, with_rank=True,
            **more, **room,
        )  # fmt: skip

    def draw(**room: int) -> SampleResult:
        key = targets.to(device)
        return linear_sample(there["h"], there["w"], seeds=key, positions=key, **more, **room)

    logits = processed_logits(hidden, weight, **processing)
    expected, limit = logits.log_softmax(1), limit_of(logits, processing)
    got = score()
    assert got.logprobs is not None and got.logprobs.device.type == device
    assert int(got.logprobs.isnan().sum()) == int(logits[:, 0].isnan().sum()) == 1
    close(got.logprobs, expected.gather(1, targets[:, None])[:, 0], "logprobs", limit)
    close(got.top_logprobs, best_of(expected, k)[0], "top", limit)
    close(got.token_logprobs, expected[:, [0, vocab - 1]], "token_logprobs", limit)
    drawn = draw()
    close(drawn.logsumexp, logits.logsumexp(1), "logsumexp", limit)
    close(drawn.logprobs, expected.gather(1, drawn.ids.cpu()[:, None])[:, 0], "drawn", limit)
    for call in (score, draw):
        least = _refused(call, 1000)
        call(workspace_bytes=least)
        assert _refused(call, least - 1) == least


def check_group(seed: int, device: str) -> None:
    """A group of one rank, told through the collective library, gives what no group gives."""
    if not dist.is_initialized():
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    hidden, weight, processing = random_case(seed, 100, 3000)
    rows, vocab = hidden.shape[0], weight.shape[0]
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (rows, 3), generator=g).to(device)
    flat, there = (0.05 * hidden).to(device), weight.to(device)
    more = {**moved(processing, device), "workspace_bytes": 256 << 20}
    asked = {"top_k": min(20, vocab), "token_ids": ids, "with_rank": True, "with_entropy": True}
    keys = {"seeds": ids[:, 0].contiguous(), "positions": ids[:, 1].contiguous()}
    for group in (None, dist.group.WORLD):
        scored = linear_logprobs(flat, there, ids[:, 0], **asked, **more, group=group)
        plain = linear_sample(flat, there, **keys, **more, group=group)
        drawn = linear_sample(flat, there, **keys, top_p=0.9, top_k=700, **more, group=group)
        if group is None:
            alone = (scored, plain, drawn)
            continue
        for one, other in zip(alone, (scored, plain, drawn), strict=True):
            for field in dataclasses.fields(one):
                a, b = getattr(one, field.name), getattr(other, field.name)
                if a.is_floating_point():
                    close(a, b.cpu(), field.name, 1e-5 + 1e-6 * float(one.logsumexp.abs().max()))
                else:
                    known = one.logsumexp.isfinite()
                    assert torch.equal(a[known], b[known]), field.name


def _refused(call: Any, room: int) -> int:
    """The workspace that the refusal names."""
    try:
        call(workspace_bytes=room)
    except ValueError as error:
        assert "give at least" in str(error), error
        return int(str(error).rpartition(" ")[2])
    raise AssertionError(f"{room} bytes were enough")


def check_waits(seed: int, device: str) -> None:
    """The engine's entry never waits for the device, whatever is asked."""
    hidden, weight, processing = random_case(seed, 100, 2000)
    rows, vocab = hidden.shape[0], weight.shape[0]
    source = LogitsInput(
        hidden=hidden.to(device), weight=weight.to(device), **moved(processing, device)
    )
    key = torch.zeros(rows, dtype=torch.int64, device=device)
    asks = [
        Ask(targets=key, top_k=min(k, vocab), token_ids=ids, rank=True, entropy=True)
        for k, ids in ((0, None), (20, key[:1]), (300, key[:, None]))
    ]
    draws = [
        DrawInput(seeds=key, positions=key, top_k=k, top_p=p, min_p=p)
        for k, p in ((None, None), (5, None), (50, 0.5))
    ]

    def everything() -> None:
        for ask in asks:
            entry.score_rows(source, ask, HUGE)
        for draw in draws:
            entry.sample_rows(source, draw, HUGE)

    everything()  # compiles
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


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
    "chances": check_chances,
    "workspaces": check_workspaces,
    "public": check_public,
    "group": check_group,
    "waits": check_waits,
}
