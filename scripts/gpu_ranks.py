"""Check vocabulary-sharded scoring and drawing over NCCL, one rank a GPU.

    PYTHONPATH=. python3 scripts/gpu_ranks.py --out DIR

Every group size up to the number of GPUs: logprobs, the best ids and draws of all ranks against one
GPU with the whole weight, at the size of a real head; and the time of both.
"""

import argparse
import json
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from seawall.ops import linear_logprobs, linear_sample

ROWS, HIDDEN, VOCAB, BEST = 2048, 4096, 128_256, 20
TOLERANCE = 1e-5
_REPEATS = 20


def inputs(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The same on every rank: hidden rows, the whole weight, seeds and targets."""
    g = torch.Generator(device).manual_seed(1)
    hidden = torch.randn(ROWS, HIDDEN, generator=g, device=device).bfloat16()
    weight = (torch.randn(VOCAB, HIDDEN, generator=g, device=device) * 2 / HIDDEN**0.5).bfloat16()
    more = {
        "targets": torch.randint(0, VOCAB, (ROWS,), generator=g, device=device),
        "seeds": torch.randint(0, 2**62, (ROWS,), generator=g, device=device),
        "positions": torch.arange(ROWS, device=device),
    }
    return hidden, weight, more


def results(
    hidden: torch.Tensor, weight: torch.Tensor, more: dict[str, Any], group: object
) -> dict[str, torch.Tensor]:
    """Everything that is compared."""
    keys = {"seeds": more["seeds"], "positions": more["positions"], "group": group}
    scored = linear_logprobs(hidden, weight, more["targets"], top_k=BEST, group=group)
    plain = linear_sample(hidden, weight, temperature=0.8, **keys)
    filtered = linear_sample(hidden, weight, temperature=0.8, top_k=50, top_p=0.9, **keys)
    assert scored.logprobs is not None and scored.top_ids is not None
    assert scored.top_logprobs is not None
    return {
        "logprobs": scored.logprobs,
        "top_ids": scored.top_ids,
        "top_logprobs": scored.top_logprobs,
        "drawn": plain.ids,
        "drawn filtered": filtered.ids,
    }


def time_of(
    hidden: torch.Tensor, weight: torch.Tensor, more: dict[str, Any], group: object
) -> float:
    """Milliseconds of scoring with the best ids."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(_REPEATS):
        linear_logprobs(hidden, weight, more["targets"], top_k=BEST, group=group)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / _REPEATS * 1e3


def rank_main(rank: int, size: int, port: int, out: str) -> None:
    """One rank: its shard against the whole weight on the same GPU."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=size)
    hidden, weight, more = inputs(device)
    # Uneven on purpose.
    bounds = [VOCAB * i // size + (7 * i if i < size else 0) for i in range(size + 1)]
    shard = weight[bounds[rank] : bounds[rank + 1]].clone()
    whole, ours = (
        results(hidden, weight, more, None),
        results(hidden, shard, more, dist.group.WORLD),
    )
    row: dict[str, Any] = {"ranks": size}
    for name, expected in whole.items():
        found = ours[name]
        if expected.dtype.is_floating_point:
            row[name] = float((found - expected).abs().max())
        else:
            row[f"{name} unlike"] = int((found != expected).sum())
    row["ms whole"] = time_of(hidden, weight, more, None)
    dist.barrier()
    row["ms sharded"] = time_of(hidden, shard, more, dist.group.WORLD)
    if rank == 0:
        Path(out).write_text(json.dumps(row))
    dist.destroy_process_group()


def main() -> None:
    """Run every size and print what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for size in range(2, torch.cuda.device_count() + 1):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        path = args.out / f"ranks-{size}.json"
        mp.spawn(rank_main, args=(size, port, str(path)), nprocs=size, join=True)
        row = json.loads(path.read_text())
        rows.append(row)
        worst = max(row["logprobs"], row["top_logprobs"])
        print(json.dumps(row), "ok" if worst <= TOLERANCE else "OVER THE TOLERANCE", flush=True)
    (args.out / "ranks.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
