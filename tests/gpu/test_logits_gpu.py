"""The CUDA logits path: parity, ties, draws, chances, faults, bits, bytes and waits."""

import pytest
import torch
from logits_checks import CHECKS

from seawall.memory.footprint_logits_cuda import smallest_cuda_workspace
from seawall.sampling import cuda
from seawall.sampling.sampler import DrawInput
from seawall.sampling.tiles import LogitsInput

pytestmark = pytest.mark.gpu
SEEDS = {
    "noise": 2, "scores": 30, "ties": 12, "draws": 24, "faults": 6, "bits": 10,
    "chances": 20, "workspaces": 6, "public": 12, "waits": 12,
    "group": 6,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "seed"), [(name, seed) for name, count in SEEDS.items() for seed in range(count)]
)
def test_check(name: str, seed: int) -> None:
    CHECKS[name](seed, "cuda")


@pytest.mark.parametrize("rows", [1, 65, 3000])
@pytest.mark.parametrize("k", [0, 20, 300])
def test_bytes_stay_within_the_workspace(rows: int, k: int) -> None:
    hidden = torch.randn(rows, 256, device="cuda").bfloat16()
    weight = torch.randn(30011, 256, device="cuda").bfloat16()
    targets = torch.zeros(rows, dtype=torch.int64, device="cuda")
    source = LogitsInput(hidden=hidden, weight=weight)
    ask = cuda.Ask(targets=targets, top_k=k, rank=True, entropy=True)
    draw = DrawInput(seeds=targets, positions=targets, top_k=5, top_p=0.9, min_p=None)
    for workspace in (smallest_cuda_workspace(cuda.pass_shape(source, ask=ask)), 8 << 20):
        if workspace < smallest_cuda_workspace(cuda.pass_shape(source, ask=ask)):
            continue
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = cuda.score_rows(source, ask, workspace)
        extra = torch.cuda.max_memory_allocated() - before
        kept = torch.cuda.memory_allocated() - before
        assert extra - kept <= workspace
        del result
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    drawn = cuda.sample_rows(source, draw, 8 << 20)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra - (torch.cuda.memory_allocated() - before) <= 8 << 20
    del drawn
