"""Bytes of the front process that clients may hold: bodies being read, results being written.

A budget is a counter with a limit; who takes from it gives back. Belongs to the event loop.
"""

import os
import resource
import sys
from pathlib import Path

from seawall.core.errors import QueueFullError, RequestError
from seawall.core.wire import GenerateRequest

# Of one logprob as a list entry of Python objects, while it is turned into JSON and after.
_ENTRY_BYTES = 256


class ByteBudget:
    """See the module's docstring.

    Args:
        name: of what it holds, for messages.
    """

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit
        self.used = 0
        self.peak = 0

    def take(self, num_bytes: int) -> None:
        """Take some.

        Raises:
            RequestError: more than there is in all.
            QueueFullError: more than is left now.
        """
        if num_bytes > self.limit:
            raise RequestError(
                f"{self.name}: this request needs {num_bytes} bytes, the server has {self.limit} "
                "for all; ask for less at once"
            )
        if self.used + num_bytes > self.limit:
            raise QueueFullError(
                f"{self.name}: this request needs {num_bytes} bytes, {self.limit - self.used} of "
                f"{self.limit} are free; retry later"
            )
        self.used += num_bytes
        self.peak = max(self.peak, self.used)

    def give(self, num_bytes: int) -> None:
        """Give back."""
        assert num_bytes <= self.used
        self.used -= num_bytes


def resident_bytes() -> int:
    """Resident size of this process; where only its peak is known, that."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return pages * os.sysconf("SC_PAGE_SIZE")


def result_bytes(requests: tuple[GenerateRequest, ...]) -> int:
    """What the logprobs of these requests can come to, as objects and as text."""
    total = 0
    for request in requests:
        spec = request.logprob
        if spec.wanted:
            positions = request.sampling.n * request.max_new_tokens
            if spec.start_len is not None:
                positions += len(request.input_ids) - spec.start_len
            total += positions * (1 + spec.top_k + len(spec.token_ids))
    return total * _ENTRY_BYTES
