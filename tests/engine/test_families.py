"""Model families end to end against transformers, over page sizes, chunk sizes and caches."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from seawall import Engine
from tests.engine.harness import LEAD, open_engine, prompt
from tests.models.checkpoints import SIZES, VOCAB, random_model, save

GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 8}
DEEP = SIZES | {"num_hidden_layers": 3}
GEMMA: dict[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 20, **WINDOW}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "phi3": lambda: transformers.Phi3Config(**SIZES),
    "mistral, windows": lambda: transformers.MistralConfig(**SIZES, **WINDOW),
    "qwen2, windows": lambda: transformers.Qwen2Config(
        **DEEP, **WINDOW, use_sliding_window=True, max_window_layers=1
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **DEEP, **GEMMA, attn_logit_softcapping=1.5, final_logit_softcapping=3.0
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**DEEP, **GEMMA, sliding_window_pattern=3),
}
PAGE_SIZES, CHUNKS, NO_RADIX = (1, 16, 64), (1, 7, -1), (False, True)
PRODUCT = list(itertools.product(PAGE_SIZES, CHUNKS, NO_RADIX))
# Every pair of two settings' values comes up in one of these.
COVERING = [
    (1, 1, False),
    (1, 7, True),
    (1, -1, False),
    (16, 1, True),
    (16, 7, False),
    (16, -1, True),
    (64, 1, False),
    (64, 7, True),
    (64, -1, False),
]
# Two settings for each family, so that the families cover all of them, those with windows nearly.
SHARE = 2
PROMPTS = [
    list(prompt(n, seed)) for n, seed in ((1, 1), (6, 2), (17, 3), (33, 4), (17, 3), (40, 3))
]
NEW = 8


class Reference:
    """A checkpoint and what transformers says of it."""

    def __init__(self, folder: Path, model: Any) -> None:
        self.folder = folder
        self._model = model

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self._model(torch.tensor([ids]), use_cache=False).logits[0]
        return logits.float().log_softmax(-1)


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    model = random_model(FAMILIES[request.param]())
    return Reference(save(model, tmp_path_factory.mktemp(request.param)), model)


def settings_of(name: str, soak: bool) -> list[tuple[int, int, bool]]:
    if soak:
        return PRODUCT
    first = list(FAMILIES).index(name) * SHARE
    return [COVERING[(first + i) % len(COVERING)] for i in range(SHARE)]


def test_like_transformers(family: Reference, request: pytest.FixtureRequest, soak: bool) -> None:
    name = str(request.node.callspec.params["family"])
    for page_size, chunk, no_radix in settings_of(name, soak):
        with open_engine(
            family.folder,
            page_size=page_size,
            chunked_prefill_size=chunk,
            disable_radix_cache=no_radix,
            memory_budget="256MiB",
        ) as engine:
            # The second time from the cache, where there is one.
            for _ in range(2):
                check(engine, family)


def check(engine: Engine, family: Reference) -> None:
    results = engine.generate(
        input_ids=PROMPTS,
        sampling_params={"max_new_tokens": NEW, "temperature": 0, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
    )
    for ids, result in zip(PROMPTS, results, strict=True):
        output = result["output_ids"]
        assert len(output) == NEW
        expected = family.logprobs([*ids, *output])
        entries = result["meta_info"]["input_token_logprobs"]
        assert entries[0][0] is None
        found = torch.tensor([entry[0] for entry in entries[1:]])
        right = expected[: len(ids) - 1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
        assert torch.allclose(found, right, rtol=0, atol=1e-4)
        for at, token in enumerate(output):
            row = expected[len(ids) - 1 + at]
            best = row.topk(2)
            if best.values[0] - best.values[1] > LEAD:
                assert token == best.indices[0]
            logprob = result["meta_info"]["output_token_logprobs"][at][0]
            assert logprob == pytest.approx(row[token].item(), abs=1e-4)
