"""Sharded vocabulary: two, three and four ranks agree with one device, draws included.

Every rank calls the public functions with its part of the weight. Counted are the bytes that a
rank hands to the collective, and those of its temporary tensors.
"""

import functools
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from logits_cases import adjustments, counting, masks
from torch import Tensor

from seawall.ops import linear_logprobs, linear_sample
from seawall.sampling.sharded_draw import CANDIDATES

ROWS, VOCAB, HIDDEN, BEST, IDS = 13, 1201, 24, 20, 4
# Unequal, not on words of the bitmask, one of a single id and one smaller than k.
BOUNDS = {2: [0, 500, VOCAB], 3: [0, 1, 640, VOCAB], 4: [0, 333, 352, 901, VOCAB]}
CASES = ("plain", "cool and filtered", "everything", "equal logits", "flat", "shared ids")
ROOM = 1 << 20


class Counted:
    """What this rank handed to the collective, for the rows of a call."""

    def __init__(self) -> None:
        self.bytes = 0
        self._all_gather = dist.all_gather

    def __call__(self, outputs: Any, mine: Tensor, group: Any) -> Any:
        self.bytes += mine.nbytes
        return self._all_gather(outputs, mine, group=group)


def inputs(case: str) -> tuple[Tensor, Tensor, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Hidden rows, weight, processing, what is scored and what is drawn."""
    g = torch.Generator().manual_seed(CASES.index(case))
    hidden, weight = torch.randn(ROWS, HIDDEN, generator=g), torch.randn(VOCAB, HIDDEN, generator=g)
    processing: dict[str, Any] = {}
    if case == "equal logits":
        # Whole numbers and few of them: ids of all shards have equals in the others.
        hidden, weight = hidden.sign(), weight.sign()
        weight[:, 4:] = 0
    if case == "flat":
        hidden = hidden * 0.02
    if case in ("cool and filtered", "everything"):
        hidden = hidden * 0.4
        bitmask = masks(ROWS, VOCAB, g)
        bitmask[1, :-1] = 0
        bitmask[2, :20] = 0
        bitmask[3] = 0
        heat = torch.rand(ROWS, generator=g) + 0.3
        heat[::4] = 0.0
        processing = {"temperature": heat, "bitmask": bitmask}
    if case == "everything":
        processing |= {
            "softcap": 20.0,
            "scale": 1.5,
            "bias": torch.randn(VOCAB, generator=g),
            "adjust": adjustments(ROWS, VOCAB, g),
        }
    hidden[5, 3] = torch.nan
    shape = (IDS,) if case == "shared ids" else (ROWS, IDS)
    score = {
        "targets": torch.randint(0, VOCAB, (ROWS,), generator=g),
        "token_ids": torch.randint(0, VOCAB, shape, generator=g),
        "top_k": BEST,
        "with_rank": True,
        "with_entropy": True,
    }
    draw: dict[str, Any] = {
        "seeds": torch.randint(-(2**62), 2**62, (ROWS,), generator=g),
        "positions": torch.arange(ROWS) * 7,
    }
    if case not in ("plain", "shared ids"):
        # With flat rows, most of these go on beyond any rank's candidates.
        draw["top_k"] = torch.tensor([0, 3, 40, 700, 0, 0, 5, 1, 0, 600, 2, 300, 0])
        draw["top_p"] = torch.tensor([1.0, 0.9, 0.5, 0.99] * 4)[:ROWS]
        draw["min_p"] = torch.tensor([0.0, 0.0, 0.1, 0.0] * 4)[:ROWS]
    if case == "flat":
        draw["min_p"] = torch.tensor([0.0, 0.9, 0.0] * 5)[:ROWS]
    return hidden, weight, processing, score, draw


def numbers(case: str, part: slice, workspace: int, group: Any = None) -> list[Tensor]:
    hidden, weight, processing, score, draw = inputs(case)
    more = {**processing, "workspace_bytes": workspace, "group": group}
    targets = score.pop("targets")
    scored = linear_logprobs(hidden, weight[part].clone(), targets, **score, **more)
    drawn = linear_sample(hidden, weight[part].clone(), **draw, **more)
    found = [
        scored.logprobs, scored.logsumexp, scored.top_logprobs, scored.token_logprobs,
        scored.entropy, drawn.logprobs, drawn.logsumexp, scored.top_ids, scored.rank, drawn.ids,
    ]  # fmt: skip
    return [each for each in found if each is not None]


def refused(call: Any, room: int) -> int:
    """The workspace that the refusal names."""
    with pytest.raises(ValueError, match=r"ranks; give at least \d+$") as caught:
        call(workspace_bytes=room)
    return int(str(caught.value).rpartition(" ")[2])


def moved(part: slice, group: Any) -> list[int]:
    """Bytes a row: all that scoring moves, a plain draw, draws from candidates, and flat ones."""
    hidden, weight, _, score, draw = inputs("flat")
    hidden, shard = hidden.nan_to_num(), weight[part].clone()
    counted = Counted()
    patch = pytest.MonkeyPatch()
    patch.setattr(dist, "all_gather", counted)
    found = []
    keys = {"seeds": draw["seeds"], "positions": draw["positions"]}
    sharp = 40 * hidden
    for call in (
        lambda: linear_logprobs(hidden, shard, score.pop("targets"), **score, group=group),
        lambda: linear_sample(hidden, shard, **keys, group=group),
        lambda: linear_sample(sharp, shard, **keys, top_p=0.9, top_k=50, group=group),
        lambda: linear_sample(hidden, shard, **keys, top_p=0.9, top_k=700, group=group),
    ):
        counted.bytes = 0
        call()
        # The sizes of the shards, once a call.
        found.append((counted.bytes - 6 * 8) / ROWS)
    patch.undo()
    return found


def within_bounds(part: slice, group: Any) -> list[tuple[int, int]]:
    """Bytes of temporary tensors, and the workspace, of calls with the least workspace."""
    found = []
    for case in ("everything", "flat"):
        hidden, weight, processing, score, draw = inputs(case)
        shard, targets = weight[part].clone(), score.pop("targets")
        held = [hidden, shard, targets, *score.values(), *draw.values(), *processing.values()]
        adjust = processing.get("adjust")
        held += [] if adjust is None else [adjust.row, adjust.ids, adjust.repetition, adjust.add]
        tensors = [each for each in held if isinstance(each, Tensor)]

        more = {**processing, "group": group}
        for call in (
            functools.partial(linear_logprobs, hidden, shard, targets, **score, **more),
            functools.partial(linear_sample, hidden, shard, **draw, **more),
        ):
            least = refused(call, 1000)
            assert refused(call, least - 1) == least
            for room in (least, 2 * least) if case == "everything" else (least,):
                with counting(*tensors) as counter:
                    result = call(workspace_bytes=room)
                kept = [getattr(result, name) for name in result.__slots__]
                found.append((counter.peak_without(kept), room))
    return found


def worker(rank: int, ranks: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    group = dist.group.WORLD
    part = slice(*BOUNDS[ranks][rank : rank + 2])
    found = {
        "numbers": {case: numbers(case, part, ROOM, group) for case in CASES},
        "narrow": {case: numbers(case, part, ROOM // 2, group) for case in CASES},
        "moved": moved(part, group),
        "bytes": within_bounds(part, group),
    }
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 3, 4])
def everyone(request: Any, tmp_path_factory: Any) -> list[dict[str, Any]]:
    """What each rank found."""
    ranks, folder = request.param, tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(worker, args=(ranks, port, str(folder)), nprocs=ranks)
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["numbers", "narrow"])
def test_ranks_agree_with_one_device(everyone: list[dict[str, Any]], case: str, kind: str) -> None:
    expected = numbers(case, slice(0, VOCAB), 64 << 20)
    known = expected[1].isfinite()
    assert not known[5], "a row with NaN"
    for found in everyone:
        for one, other in zip(found[kind][case], expected, strict=True):
            if one.is_floating_point():
                torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5, equal_nan=True)
            else:
                assert (one[known] == other[known]).all(), (one, other)


def test_ranks_get_the_same_bits(everyone: list[dict[str, Any]]) -> None:
    for found in everyone[1:]:
        for case in CASES:
            pairs = zip(found["numbers"][case], everyone[0]["numbers"][case], strict=True)
            assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def test_few_bytes_are_told(everyone: list[dict[str, Any]]) -> None:
    for found in everyone:
        scored, plain, sharp, flat = found["moved"]
        assert scored <= 8 * (BEST + IDS + 4)
        assert plain <= 8 * 4
        assert sharp <= 8 * (CANDIDATES + 4)
        assert flat <= 8 * (2 * CANDIDATES + 4)
        assert flat > 8 * (CANDIDATES + 4), "no row was flat"


def test_bytes_stay_within_the_workspace(everyone: list[dict[str, Any]]) -> None:
    for found in everyone:
        over = [(peak, room) for peak, room in found["bytes"] if peak > room]
        assert not over, over


def lonely(rank: int, port: int, folder: str) -> None:
    """One rank has other rows than the other."""
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    with pytest.raises(ValueError, match="ranks disagree on rows"):
        linear_logprobs(torch.ones(2 + rank, 3), torch.ones(5, 3), group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"targets: 10 is not in \[0, 10\)"):
        targets = torch.tensor([9, 10])
        linear_logprobs(torch.ones(2, 3), torch.ones(5, 3), targets, group=dist.group.WORLD)
    dist.destroy_process_group()


def test_what_differs_is_refused_by_every_rank(tmp_path: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(lonely, args=(port, str(tmp_path)), nprocs=2)
