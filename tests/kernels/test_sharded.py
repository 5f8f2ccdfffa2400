"""Sharded vocabulary: two, three and four ranks agree with one device, draws included."""

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from logits_cases import adjustments, masks
from torch import Tensor

from seawall.sampling import logprobs, sampler, sharded
from seawall.sampling.logprobs import LogprobResult
from seawall.sampling.sampler import DrawInput, SampleResult
from seawall.sampling.tiles import LogitsInput

ROWS, VOCAB, HIDDEN = 13, 1201, 24
# Unequal, not on words of the bitmask, and one smaller than k.
BOUNDS = {2: [0, 500, VOCAB], 3: [0, 7, 640, VOCAB], 4: [0, 333, 352, 901, VOCAB]}


class OnCpu:
    def score(
        self,
        source: LogitsInput,
        targets: Tensor | None,
        token_ids: Tensor | None,
        top_k: int,
        with_rank: bool,
        with_entropy: bool,
        workspace_bytes: int,
    ) -> LogprobResult:
        return logprobs.score_rows(
            source,
            targets,
            token_ids,
            top_k=top_k,
            with_rank=with_rank,
            with_entropy=with_entropy,
            workspace_bytes=workspace_bytes,
        )

    def draw(
        self, source: LogitsInput, draw: DrawInput, first_id: int, workspace_bytes: int
    ) -> SampleResult:
        return sharded.draw_tiles(source, draw, first_id, workspace_bytes)


def inputs(case: int) -> tuple[LogitsInput, Tensor, Tensor, DrawInput]:
    g = torch.Generator().manual_seed(case)
    hidden = torch.randn(ROWS, HIDDEN, generator=g) * (0.2 if case == 1 else 1.0)
    hidden[5, 3] = torch.nan
    bitmask = masks(ROWS, VOCAB, g)
    bitmask[1, :-1] = 0
    bitmask[2, :20] = 0
    bitmask[3] = 0
    temperature = torch.rand(ROWS, generator=g) + 0.3
    temperature[::4] = 0.0
    source = LogitsInput(
        hidden=hidden,
        weight=torch.randn(VOCAB, HIDDEN, generator=g),
        temperature=temperature if case else 1.0,
        softcap=20.0 if case == 2 else None,
        bias=torch.randn(VOCAB, generator=g) if case == 2 else None,
        bitmask=bitmask if case else None,
        adjust=adjustments(ROWS, VOCAB, g) if case == 2 else None,
    )
    draw = DrawInput(
        seeds=torch.randint(-(2**62), 2**62, (ROWS,), generator=g),
        positions=torch.arange(ROWS) * 7,
        top_k=torch.tensor([0, 3, 40, 700, 0, 0, 5, 1, 0, 600, 2, 300, 0]) if case else None,
        top_p=torch.tensor([1.0, 0.9, 0.5, 0.99] * 4)[:ROWS] if case else None,
        min_p=torch.tensor([0.0, 0.0, 0.1, 0.0] * 4)[:ROWS] if case else None,
    )
    targets = torch.randint(0, VOCAB, (ROWS,), generator=g)
    return source, targets, torch.randint(0, VOCAB, (ROWS, 4), generator=g), draw


def compute(case: int, rank: int, ranks: int) -> dict[str, Any]:
    source, targets, token_ids, draw = inputs(case)
    first, end = BOUNDS[ranks][rank : rank + 2]
    weight = source.weight[first:end].clone()
    shard = sharded.Shard.of(dist.group.WORLD, weight)
    part = LogitsInput(
        hidden=source.hidden,
        weight=weight,
        temperature=source.temperature,
        softcap=source.softcap,
        bias=source.bias,
        bitmask=source.bitmask,
        adjust=source.adjust,
    )
    result = sharded.sharded_logprobs(
        part, OnCpu(), shard, targets, token_ids,
        top_k=20, with_rank=True, with_entropy=True, workspace_bytes=4 << 20,
    )  # fmt: skip
    drawn = sharded.sharded_sample(part, draw, OnCpu(), shard, 4 << 20)
    return {
        "score": [
            result.logprobs, result.logsumexp, result.top_logprobs, result.token_logprobs,
            result.entropy, drawn.logprobs, drawn.logsumexp,
        ],
        "ids": [result.top_ids, result.rank, drawn.ids],
    }  # fmt: skip


def worker(rank: int, ranks: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    torch.save([compute(case, rank, ranks) for case in range(3)], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def alone(case: int) -> dict[str, Any]:
    source, targets, token_ids, draw = inputs(case)
    result = logprobs.score_rows(
        source, targets, token_ids,
        top_k=20, with_rank=True, with_entropy=True, workspace_bytes=64 << 20,
    )  # fmt: skip
    drawn = sampler.sample_rows(source, draw, 64 << 20)
    return {
        "score": [
            result.logprobs, result.logsumexp, result.top_logprobs, result.token_logprobs,
            result.entropy, drawn.logprobs, drawn.logsumexp,
        ],
        "ids": [result.top_ids, result.rank, drawn.ids],
    }  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_agree_with_one_device(ranks: int, tmp_path: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(worker, args=(ranks, port, str(tmp_path)), nprocs=ranks)
    everyone = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    for case in range(3):
        expected = alone(case)
        for found in everyone:
            for one, other in zip(found[case]["score"], expected["score"], strict=True):
                torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5, equal_nan=True)
            known = ~expected["score"][1].isnan()
            for one, other in zip(found[case]["ids"], expected["ids"], strict=True):
                assert (one[known] == other[known]).all()
