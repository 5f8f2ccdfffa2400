"""Which pass serves a device, and what is said where none does."""

import sys

import pytest
import torch

from seawall.core.errors import ConfigError
from seawall.ops import linear_logprobs, linear_sample
from seawall.sampling import cpu, entry
from seawall.sampling.logprobs import Ask
from seawall.sampling.sampler import DrawInput
from seawall.sampling.tiles import LogitsInput


def source(rows: int = 9, vocab: int = 300) -> LogitsInput:
    g = torch.Generator().manual_seed(1)
    return LogitsInput(
        hidden=torch.randn(rows, 8, generator=g), weight=torch.randn(vocab, 8, generator=g)
    )


def test_the_cpu_has_the_cpu_pass() -> None:
    assert entry.device_pass(torch.device("cpu")) is cpu


def test_cuda_without_triton_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith(("triton", "seawall.kernels.", "seawall.sampling.cuda")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match="cuda needs triton"):
        entry.device_pass(torch.device("cuda"))


def test_other_devices_are_refused() -> None:
    hidden, weight = torch.ones(2, 3, device="meta"), torch.ones(4, 3, device="meta")
    with pytest.raises(ConfigError, match="meta is not one of cpu, cuda"):
        linear_logprobs(hidden, weight)


def test_tensors_of_two_devices_are_refused() -> None:
    here, there = torch.ones(2, 3), torch.ones(4, 3, device="meta")
    with pytest.raises(ValueError, match="weight: lies on meta, hidden on cpu"):
        linear_logprobs(here, there)
    key, far = torch.zeros(2).long(), torch.zeros(2, device="meta").long()
    with pytest.raises(ValueError, match="positions: lies on meta"):
        linear_sample(here, torch.ones(4, 3), seeds=key, positions=far)


@pytest.mark.parametrize("top_k", [0, 20])
def test_the_entry_gives_what_the_checked_functions_give(top_k: int) -> None:
    given = source()
    targets = torch.arange(9)
    found = entry.score_rows(given, Ask(targets=targets, top_k=top_k), 1 << 20)
    checked = linear_logprobs(
        given.hidden, given.weight, targets, top_k=top_k, workspace_bytes=1 << 20
    )
    assert torch.equal(found.logprobs, checked.logprobs)
    assert top_k == 0 or torch.equal(found.top_ids, checked.top_ids)
    draw = DrawInput(seeds=targets, positions=targets, top_k=top_k or None, top_p=None, min_p=None)
    drawn = entry.sample_rows(given, draw, 1 << 20)
    again = linear_sample(
        given.hidden, given.weight, seeds=targets, positions=targets, top_k=top_k or None
    )
    assert torch.equal(drawn.ids, again.ids)


def test_logits_in_place_of_logprobs_are_those_of_the_tiles() -> None:
    given, targets = source(), torch.arange(9)
    ask = Ask(targets=targets, top_k=5, token_ids=targets[:2], logits=True)
    found = cpu.score_rows(given, ask, 1 << 20)
    logits = given.hidden @ given.weight.T
    torch.testing.assert_close(found.logprobs, logits.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(found.top_logprobs, logits.topk(5).values)
    torch.testing.assert_close(found.token_logprobs, logits[:, :2])


def test_ranks_above_a_number() -> None:
    given = source()
    logits = given.hidden @ given.weight.T
    above = logits.median(1).values + 1e-3
    found = cpu.score_rows(given, Ask(rank=True, above=above), 1 << 20)
    assert torch.equal(found.rank, (logits > above[:, None]).sum(1) + 1)


def test_noise_is_that_of_the_vocabulary_ids() -> None:
    """A shard that starts at id 100 draws what the whole would, were all other ids forbidden."""
    given, keys = source(), torch.arange(9) * 13
    words = torch.zeros(9, 10, 32, dtype=torch.bool).view(9, 320)
    words[:, 100:200] = True
    bits = words.view(9, 10, 32).long() << torch.arange(32)
    mask = bits.sum(2).sub(1 << 32).where(bits.sum(2) >= 1 << 31, bits.sum(2)).to(torch.int32)
    whole = linear_sample(given.hidden, given.weight, seeds=keys, positions=keys, bitmask=mask)
    part = LogitsInput(hidden=given.hidden, weight=given.weight[100:200])
    draw = DrawInput(seeds=keys, positions=keys, top_k=None, top_p=None, min_p=None)
    assert torch.equal(cpu.sample_rows(part, draw, 1 << 20, id_base=100).ids + 100, whole.ids)
