"""`seawall bench logits`: reads arguments, measures, prints a table and one JSON line."""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from seawall.benchmarks.logits import WORKSPACE_BYTES, as_dicts, measure, shapes_of, table, ways_for
from seawall.cli.command import DONE, UsageError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Defaults:
    rows: tuple[int, ...]
    vocab: tuple[int, ...]
    top_k: tuple[int, ...]
    hidden_size: int
    dtype: str
    seconds: float


_CPU = _Defaults(
    rows=(1, 64, 1024),
    vocab=(32_000,),
    top_k=(0, 20),
    hidden_size=256,
    dtype="float32",
    seconds=0.5,
)
_CUDA = _Defaults(
    rows=(1, 64, 1024, 8192),
    vocab=(32_000, 128_256),
    top_k=(0, 1, 8, 20, 100),
    hidden_size=4096,
    dtype="bfloat16",
    seconds=1.0,
)


def run(arguments: argparse.Namespace) -> int:
    """Every way at every shape."""
    device = _device(arguments.device)
    usual = _CPU if device.type == "cpu" else _CUDA
    rows = arguments.rows or usual.rows
    vocab = arguments.vocab or usual.vocab
    for flag, numbers in (("--rows", rows), ("--vocab", vocab)):
        if min(numbers) < 1:
            raise UsageError(f"{flag}: got {min(numbers)}, the least is 1")
    top_k = arguments.top_k or usual.top_k
    if min(top_k) > max(vocab):
        raise UsageError(f"--top-k: got {min(top_k)}, the largest vocabulary has {max(vocab)} ids")
    dtype = usual.dtype if arguments.dtype == "auto" else arguments.dtype
    seconds = usual.seconds if arguments.seconds is None else arguments.seconds
    if not 0 <= seconds <= 3600:
        raise UsageError(f"--seconds: got {seconds}, the range is [0, 3600]")
    hidden_size = arguments.hidden_size or usual.hidden_size
    shapes = shapes_of(rows, vocab, hidden_size, top_k)
    found = measure(ways_for(device), shapes, device, _DTYPES[dtype], seconds)
    sys.stdout.write(table(found) + "\n")
    summary = {
        "benchmark": "logits",
        "device": device.type,
        "dtype": dtype,
        "hidden_size": hidden_size,
        "workspace_bytes": WORKSPACE_BYTES,
        "threads": torch.get_num_threads(),
        "measurements": as_dicts(found),
    }
    line = json.dumps(summary, allow_nan=False)
    if arguments.json is not None:
        Path(arguments.json).write_text(line + "\n", encoding="utf-8")
    sys.stdout.write(line + "\n")
    return DONE


def _device(name: str) -> torch.device:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    has_cuda = found is not None and found.type == "cuda"
    if name == "cuda" and not has_cuda:
        raise UsageError("--device: cuda is not there; use cpu")
    return torch.device("cuda" if name != "cpu" and has_cuda else "cpu")
