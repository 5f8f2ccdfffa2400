"""The fixture that runs a command line in a process of its own."""

import subprocess
from collections.abc import Callable

import pytest
from command_line import ENVIRONMENT, REPO, command

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def seawall() -> Run:
    """Runs a command line to its end."""

    def run(*words: object, **options: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command(*words),
            cwd=REPO,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            **options,
        )

    return run
