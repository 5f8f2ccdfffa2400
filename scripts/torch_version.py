"""Print the version of an importable torch that the project allows; exit 1 if there is none.

Run by the Makefile before anything of the project is installed: standard library only.
"""

import importlib.metadata
import re
import sys

LOWEST, TOO_HIGH = (2, 11), (2, 14)  # as in pyproject.toml


def main() -> int:
    """Exit code."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return 1
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not LOWEST <= (int(found[1]), int(found[2])) < TOO_HIGH:
        return 1
    sys.stdout.write(version + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
