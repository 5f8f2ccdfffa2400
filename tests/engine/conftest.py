"""Checkpoints and engines that several files use, made once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from seawall import Engine
from tests.engine.harness import make_tiny_llama, open_engine


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
