"""Checkpoints and engines that several files use, made once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from seawall import Engine
from tests.engine.harness import TEXT, make_tiny_llama, open_engine, score_from


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def demo() -> Iterator[Engine]:
    """The embedded model in float32, with its tokenizer."""
    with open_engine(
        "demo",
        memory_budget="256MiB",
        logits_workspace="8MiB",
        page_size=16,
        skip_tokenizer_init=False,
    ) as engine:
        yield engine


@pytest.fixture(scope="session")
def ids(demo: Engine) -> list[int]:
    found: list[int] = demo.generate(
        TEXT, {"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0
    )["meta_info"]["input_token_logprobs"]
    return [entry[1] for entry in found]  # type: ignore[index]


@pytest.fixture(scope="session")
def scored(demo: Engine, ids: list[int]) -> list[float | None]:
    """Raw logprobs of the prompt."""
    return [entry[0] for entry in score_from(demo, ids, 0)["input_token_logprobs"]]
