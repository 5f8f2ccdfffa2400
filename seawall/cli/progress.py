"""Progress of long work on stderr: a bar on a terminal, a plain line now and then otherwise."""

import sys
import time
from types import TracebackType

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 10.0
_MOST_PROBLEMS = 100


class Progress:
    """Counts what was done; a context manager. Written by the command's own thread.

    Args:
        name: how lines begin.
        total_bytes: of the input, None if unknown.
    """

    def __init__(self, name: str, total_bytes: int | None) -> None:
        self.done = 0
        self.failed = 0
        self.tokens = 0
        self._name = name
        self._bytes = 0
        self._total_bytes = total_bytes
        self._problems = 0
        self._start = self._last = time.perf_counter()
        self._bar = tqdm(
            total=total_bytes,
            unit="B",
            unit_scale=True,
            disable=not sys.stderr.isatty(),
            desc=name,
            dynamic_ncols=True,
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()

    def skip(self, *, done: int, failed: int, num_bytes: int) -> None:
        """Count what an earlier run did."""
        self.failed += failed
        self._bytes += num_bytes
        self._bar.update(num_bytes)
        self.note(f"{done:,} lines were done before, {failed:,} of them failed")

    def add(self, *, done: int, failed: int, tokens: int, num_bytes: int) -> None:
        """Count what has just been written."""
        self.done += done
        self.failed += failed
        self.tokens += tokens
        self._bytes += num_bytes
        self._bar.set_postfix_str(f"{self.done:,} lines, {self.failed:,} failed", refresh=False)
        self._bar.update(num_bytes)
        now = time.perf_counter()
        if self._bar.disable and now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            share = f", {self._bytes * 100 // self._total_bytes}%" if self._total_bytes else ""
            self.note(f"{self.done:,} lines, {self.done / (now - self._start):.1f} a second{share}")

    def problem(self, text: str) -> None:
        """Say what is wrong with an item; after a hundred, only the output says so."""
        self._problems += 1
        if self._problems <= _MOST_PROBLEMS:
            self.note(text)
        elif self._problems == _MOST_PROBLEMS + 1:
            self.note("more lines failed; only the output says which")

    def note(self, text: str) -> None:
        """A line of its own."""
        self._bar.clear()
        sys.stderr.write(f"seawall {self._name}: {text}\n")
        sys.stderr.flush()

    def summary(self) -> None:
        """What came of it all."""
        seconds = time.perf_counter() - self._start
        self._bar.close()
        self.note(
            f"{self.done:,} lines done in {seconds:.1f} s, {self.tokens:,} tokens, "
            f"{self.failed:,} lines failed"
        )
