"""Real command lines in processes of their own, on a small engine that starts quickly."""

import os
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
# One thread: threads that spin at barriers crawl on a machine that runs other tests too.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SMALL = [
    "--memory-budget=128MiB",
    "--max-running-requests=8",
    "--chunked-prefill-size=64",
    "--logits-workspace=8MiB",
    "--context-length=256",
]


def command(*words: object) -> list[str]:
    """The command line as a list; `seawall` itself need not be installed."""
    return [sys.executable, "-m", "seawall", *(str(word) for word in words)]
