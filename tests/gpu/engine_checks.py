"""Checks of attention and of the whole engine on a GPU, shared by the tests and the script."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from seawall import Engine
from seawall.attention.base import AttentionRows, ScoreRules
from seawall.attention.torch_sdpa import TorchAttention
from seawall.attention.triton import Inputs, TritonAttention
from seawall.device.arena import Arena
from seawall.device.cuda import CudaRuntime
from seawall.device.runtime import TransferSizes
from seawall.kv.pool import KVPool
from seawall.memory.footprint import Limits
from tests.engine.harness import open_engine
from tests.models.checkpoints import SIZES, random_model, save

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
ROWS = {
    "decode": [(0, 1), (17, 1), (130, 1), (1000, 1), (64, 1)],
    "few decodes": [(2000, 1), (517, 1)],
    "chunks": [(0, 33), (5, 200), (300, 2), (0, 129)],
    "mixed": [(40, 1), (0, 70), (700, 1), (16, 48), (3, 2), (255, 1)],
    "many": [(7 * i % 90, 1) for i in range(150)],
}


def attention_pair(
    rows: list[tuple[int, int]],
    *,
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    rules: ScoreRules,
    cached: int = 0,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """The same step on the GPU and, in float32, on the CPU."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv = heads
    starts = np.array([s for s, _ in rows], np.int32)
    lengths = np.array([n for _, n in rows], np.int32)
    longest = int((starts + lengths).max())
    per_row = -(-longest // page_size)
    table = rng.permutation(len(rows) * per_row).reshape(len(rows), per_row).astype(np.int32)
    num_tokens = int(lengths.sum())
    limits = Limits(
        max_running=len(rows),
        step_tokens=num_tokens,
        context_length=longest,
        page_size=page_size,
    )
    shape = (num_tokens, num_heads + 2 * num_kv, head_dim)
    qkv = torch.randn(shape, generator=generator).to(dtype)
    history = torch.randn((2, num_kv, table.size * page_size, head_dim), generator=generator)
    history = history.to(dtype)
    step = AttentionRows(
        seats=rng.permutation(len(rows)).astype(np.int32),
        starts=starts,
        write_starts=(starts + np.minimum(cached, lengths - 1)).astype(np.int32),
        lengths=lengths,
        page_table=table,
    )
    found = []
    for device in ("cuda", "cpu"):
        wide = dtype if device == "cuda" else torch.float32
        arena = Arena.unbounded(torch.device(device))
        pool = KVPool(
            arena,
            num_layers=1,
            num_pages=table.size,
            page_size=page_size,
            num_kv_heads=num_kv,
            head_dim=head_dim,
            dtype=wide,
        )
        pool.keys(0).copy_(history[0])
        pool.values(0).copy_(history[1])
        common: dict[str, Any] = {"num_heads": num_heads, "scale": 1 / math.sqrt(head_dim)}
        if rules.sinks is not None:
            rules = ScoreRules(
                window=rules.window, softcap=rules.softcap, sinks=rules.sinks.to(device)
            )
        if device == "cuda":
            runtime = CudaRuntime()
            sizes = TransferSizes(up_bytes=1 << 20, down_bytes=0)
            inputs = Inputs(
                page_table=torch.from_numpy(table).cuda(),
                transfers=runtime.transfers(arena, sizes, 2),
            )
            backend: Any = TritonAttention(
                pool, arena, inputs=inputs, dtype=dtype, rules=rules, **common
            )
        else:
            backend = TorchAttention(pool, arena, limits=limits, rules=rules, **common)
        backend.prepare(step)
        mine = qkv.to(device=device, dtype=wide)
        q, k, v = mine.split([num_heads, num_kv, num_kv], dim=1)
        found.append(backend.run(q, k, v, 0).float().cpu())
    return found[0], found[1]


def check_attention(seed: int) -> float:
    """One random case; the largest difference, which must be within the dtype's tolerance."""
    rng = np.random.default_rng(seed)
    name = list(ROWS)[seed % len(ROWS)]
    dtype = [torch.float32, torch.bfloat16, torch.float16][int(rng.integers(3))]
    kv = int(rng.choice([1, 2, 8]))
    group = int(rng.choice([1, 3, 4, 8]))
    sinks = torch.randn(1, kv * group) * 2 if rng.random() < 0.3 else None
    rules = ScoreRules(
        window=int(rng.choice([5, 100])) if rng.random() < 0.3 else None,
        softcap=20.0 if rng.random() < 0.3 else None,
        sinks=sinks,
    )
    head_dim = int(rng.choice([64, 128, 80, 256]))
    page_size = int(rng.choice([1, 4, 16, 64]))
    ours, expected = attention_pair(
        ROWS[name],
        heads=(kv * group, kv),
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        rules=rules,
        cached=int(rng.choice([0, 7])),
        seed=seed,
    )
    difference = (ours - expected).abs().max().item()
    what = f"{name} {dtype} kv {kv} x {group} dim {head_dim} page {page_size} {rules}"
    # NaN compares as false.
    assert difference <= TOLERANCE[dtype], f"seed {seed}: {what}: {difference}"
    return difference


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"class": transformers.LlamaConfig},
    "qwen2": {"class": transformers.Qwen2Config},
    "qwen3": {"class": transformers.Qwen3Config, "head_dim": 16},
    "mistral": {"class": transformers.MistralConfig, "sliding_window": None},
}


def tiny_checkpoint(family: str, folder: Path) -> Path:
    """A random model of two layers."""
    given = dict(FAMILIES[family])
    made = given.pop("class")(**{**SIZES, **given})
    return save(random_model(made), folder)


def batch() -> dict[str, Any]:
    """A mixed batch over 97 ids: all kinds of draws, prompt logprobs, penalties."""
    rng = np.random.default_rng(5)
    lengths = [1, 5, 17, 40, 33, 2, 9, 28]
    params = [
        {"temperature": 0.0, "max_new_tokens": 12},
        {"temperature": 0.9, "sampling_seed": 4, "max_new_tokens": 12},
        {"temperature": 1.1, "top_p": 0.9, "sampling_seed": 5, "max_new_tokens": 12},
        {"temperature": 0.8, "top_k": 7, "min_p": 0.02, "sampling_seed": 6, "max_new_tokens": 12},
    ]
    sampling = [{**params[i % 4], "ignore_eos": True} for i in range(8)]
    sampling[4]["repetition_penalty"] = 1.2
    sampling[5]["logit_bias"] = {"5": 3.0}
    return {
        "input_ids": [rng.integers(3, 97, n).tolist() for n in lengths],
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": [0, 3, 0, 5, 0, 0, 97, 1],
        "token_ids_logprob": [3, 50],
    }


def results(folder: Path, device: str, **changes: Any) -> list[dict[str, Any]]:
    """The batch on a device."""
    given: dict[str, Any] = {"memory_budget": "4GiB"} if device == "cuda" else {}
    with open_engine(folder, device=device, **{**given, **changes}) as engine:
        found: list[dict[str, Any]] = engine.generate(**batch())
        return found


def largest_difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    """Of all logprobs up to the first token that differs; such tokens must be nearly tied."""
    worst = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        a, b = mine["meta_info"], other["meta_info"]
        pairs = list(zip(a["input_token_logprobs"], b["input_token_logprobs"], strict=True))
        for x, y in zip(a["output_token_logprobs"], b["output_token_logprobs"], strict=True):
            if x[1] != y[1]:
                break
            pairs.append((x, y))
        worst = max(worst, *(abs(x[0] - y[0]) for x, y in pairs if x[0] is not None))
    return worst


def same_tokens(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    """Share of requests whose tokens are all equal."""
    equal = [a["output_ids"] == b["output_ids"] for a, b in zip(ours, theirs, strict=True)]
    return sum(equal) / len(equal)


def memory_use(engine: Engine) -> dict[str, int]:
    """Allocated now and at the peak, reserved, and the card's use."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.memory_allocated(),
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "reserved_peak": torch.cuda.max_memory_reserved(),
        "in_use": total - free,
        "budget": engine.memory_report()["budget_bytes"],
    }
