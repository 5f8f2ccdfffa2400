"""`python -m seawall.launch_server --model-path ...`: `seawall serve` by the name SGLang uses."""

import sys

from seawall.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["launch_server", *sys.argv[1:]]))
