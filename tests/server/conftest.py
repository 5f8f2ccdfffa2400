"""One server for the whole suite, and an engine in process to compare it with."""

from collections.abc import Iterator

import httpx
import pytest

from seawall import Engine
from tests.server.harness import ENGINE, ServerProcess


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """A server that no test harms."""
    process = ServerProcess()
    yield process
    assert process.stop() == 0, "".join(process.log)


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as found:
        yield found


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    with Engine("demo", **ENGINE) as found:
        yield found
