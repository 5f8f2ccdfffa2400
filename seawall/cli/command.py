"""What a subcommand is: a line of help, its arguments, and where its code lives.

The code is named, not imported, so that help, wrong usage and `seawall plan` never load torch.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from seawall.core.errors import SeawallError

DONE = 0
FAILED = 1
USAGE = 2
INTERRUPTED = 130  # what shells report for a process that was ended by Ctrl-C


class UsageError(SeawallError):
    """Arguments that don't go together: one line on stderr and exit code 2."""


class CommandError(SeawallError):
    """A command cannot go on: one line on stderr and exit code 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One subcommand.

    Attributes:
        help: one line for the list of commands.
        description: the first paragraph of its own help.
        add_arguments: fills its parser; torch-free.
        run: "module:function" of `run(arguments) -> exit code`.
    """

    help: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: str
