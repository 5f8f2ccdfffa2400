"""Host bytes of logprob results, from the step that computed them to the caller's hands.

Owns the promise that they stay below the host plan's line "results". What a call can come to at
most is reserved before anything of it runs, and a call that does not fit is refused; so no charge
that follows can fail, and the core never waits for a slow reader.

    charged <= reserved <= the plan's line

A position is counted once: as a piece on its way, or as a row of the arrays that keep it.
"""

import threading
from collections.abc import Sequence
from types import TracebackType

from seawall.core.errors import QueueFullError, RequestError
from seawall.core.wire import GenerateRequest
from seawall.memory.footprint import scores_bytes
from seawall.memory.ledger import Ledger

RESULTS = "results"


def result_bytes(request: GenerateRequest) -> int:
    """The most bytes that the logprobs of a request, all its samples together, can take."""
    spec = request.logprob
    if not spec.wanted:
        return 0
    positions = request.sampling.n * request.max_new_tokens
    if spec.start_len is not None:
        positions += len(request.input_ids) - spec.start_len
    return scores_bytes(positions, spec.top_k, len(spec.token_ids))


class ResultAccount:
    """Reserves for calls; any thread may ask.

    Args:
        ledger: the host ledger, with the line "results".
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._reserved = 0
        self._lock = threading.Lock()

    def check(self, requests: Sequence[GenerateRequest]) -> int:
        """Bytes that the requests of one call can come to.

        Raises:
            RequestError: they would not fit even if nothing else ran.
        """
        needed = sum(result_bytes(request) for request in requests)
        cap = self._ledger.cap(RESULTS)
        if cap is not None and needed > cap:
            raise RequestError(
                f"return_logprob: the results of this call can take {needed} bytes, the host plan "
                f"has {cap} for results; ask for fewer top_logprobs_num, token_ids_logprob or "
                "prompts at once, a later logprob_start_len, or raise host_memory_budget"
            )
        return needed

    def open(self, requests: Sequence[GenerateRequest]) -> "ResultClaim":
        """Reserve for one call, until the claim is closed.

        Raises:
            RequestError: as `check`.
            QueueFullError: they don't fit beside what other calls hold now.
        """
        return self.reserve(self.check(requests))

    def reserve(self, needed: int) -> "ResultClaim":
        """Reserve so many bytes, until the claim is closed.

        Raises:
            QueueFullError: as `open`.
        """
        cap = self._ledger.cap(RESULTS)
        with self._lock:
            left = None if cap is None else cap - self._reserved
            if left is not None and needed > left:
                raise QueueFullError(
                    f"return_logprob: the results of this call can take {needed} bytes, {left} of "
                    f"the host plan's {cap} are not spoken for by other calls; retry later or "
                    "raise host_memory_budget"
                )
            self._reserved += needed
        return ResultClaim(self, needed)

    def charge(self, num_bytes: int) -> None:
        """A claim's scores take bytes now."""
        self._ledger.charge(RESULTS, num_bytes)

    def close(self, reserved: int, charged: int) -> None:
        """A claim has ended."""
        self._ledger.credit(RESULTS, charged)
        with self._lock:
            self._reserved -= reserved


class ResultClaim:
    """What one call holds of the account; the thread that runs the call is its only user."""

    def __init__(self, account: ResultAccount, reserved: int) -> None:
        self._account = account
        self._reserved = reserved
        self._charged = 0

    def charge(self, num_bytes: int) -> None:
        """Scores of the call are kept in so many bytes more."""
        assert self._charged + num_bytes <= self._reserved
        self._account.charge(num_bytes)
        self._charged += num_bytes

    def close(self) -> None:
        """The results were handed over, or nobody wants them; a second call does nothing."""
        reserved, charged = self._reserved, self._charged
        self._reserved = self._charged = 0
        self._account.close(reserved, charged)

    def __enter__(self) -> "ResultClaim":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
