"""`python -m seawall`: the command `seawall`, where it is not on the path."""

import sys

from seawall.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
