"""Real command lines in processes of their own, on a small engine that starts quickly."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
SMALL = [
    "--memory-budget=128MiB",
    "--max-running-requests=8",
    "--chunked-prefill-size=64",
    "--logits-workspace=8MiB",
    "--context-length=256",
]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def command(*words: object) -> list[str]:
    """The command line as a list; `seawall` itself need not be installed."""
    return [sys.executable, "-m", "seawall.cli.main", *(str(word) for word in words)]


@pytest.fixture(scope="session")
def seawall() -> Run:
    """Runs a command line to its end."""

    def run(*words: object, **options: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command(*words),
            cwd=REPO,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            **options,
        )

    return run
