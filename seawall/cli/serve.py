"""`seawall serve`: says that there is no server yet."""

import argparse
import sys

from seawall.cli.command import FAILED
from seawall.cli.engine_flags import engine_args


def run(arguments: argparse.Namespace) -> int:
    """Refuse in one line; wrong arguments are still found first."""
    engine_args(arguments)
    sys.stderr.write(
        "seawall: the server is not built yet in this version; use `seawall generate`, "
        "`seawall score` or seawall.Engine\n"
    )
    return FAILED
