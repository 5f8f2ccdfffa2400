"""Random operations over pages, trees, leases and scheduler until a count or a time is reached.

    python scripts/soak_pages.py --operations 10000000 --seconds 3600 --seed 1

Prints the operations done as it goes. A violation ends it with the seed of the run, which alone
repeats it: `--seed SEED --operations 1`. Needs the tests' machines, so run it from the checkout.
"""

import argparse
import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.host import cache_machine, scheduler_machine

_CACHE_RUN = 1000
_SCHEDULER_RUN = 200
_SCHEDULER_EVERY = 8  # runs: nine tenths of the operations are those of the cheaper machine
_PRINT_SECONDS = 30


def main() -> int:
    """Run; 0 if nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=10_000_000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    logging.getLogger("seawall").setLevel(logging.CRITICAL + 1)
    start = printed = time.monotonic()
    done, seed = 0, args.seed
    while done < args.operations and time.monotonic() - start < args.seconds:
        try:
            done += _run(seed)
        except BaseException:
            print(f"failed in the run of --seed {seed}, after {done} operations", flush=True)
            raise
        seed += 1
        if time.monotonic() - printed > _PRINT_SECONDS:
            printed = time.monotonic()
            print(
                f"{done} operations, {seed - args.seed} runs, {printed - start:.0f} s", flush=True
            )
    print(f"done: {done} operations, {seed - args.seed} runs, nothing found", flush=True)
    return 0


def _run(seed: int) -> int:
    if seed % _SCHEDULER_EVERY == 0:
        return scheduler_machine.run_random(seed, _SCHEDULER_RUN).num_operations
    return cache_machine.run_random(seed, _CACHE_RUN).num_operations


if __name__ == "__main__":
    sys.exit(main())
