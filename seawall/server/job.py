"""One call on its way: its samples, and whoever waits for them.

    engine --delta--> take() --> SampleCollector of the sample --> grown() / ended()

Deltas are taken over as they come, so a reader who is slow holds the arrays of its own results,
whose size was reserved before, and no queue of messages; stop strings are found whether or not
anybody reads. Leaving the job ends in the engine what has not ended.
"""

import asyncio
import time
from types import TracebackType

from seawall.core.errors import SeawallError
from seawall.core.wire import GenerateRequest, OutputDelta
from seawall.offline.collect import SampleCollector
from seawall.offline.inputs import Call
from seawall.offline.scores import ScoreColumns, ScoreTotals
from seawall.server.budget import ByteBudget, result_bytes
from seawall.server.client import EngineClient
from seawall.server.errors import HttpError, from_status
from seawall.server.metrics import Metrics
from seawall.text.tokenizer import Tokenizer

_ABORTED_BY_CALLER = 499


class Job:
    """See the module's docstring; use it as an async context manager.

    Args:
        results: where the bytes of its logprobs are reserved.
        streaming: results are wanted while they grow.

    Attributes:
        samples: by request name and sample index, in the order of the results.
    """

    def __init__(
        self,
        call: Call,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        results: ByteBudget,
        metrics: Metrics,
        *,
        streaming: bool,
    ) -> None:
        self.call = call
        self.samples = {
            (request.rid, index): SampleCollector(
                request,
                index,
                tokenizer if call.with_text or request.sampling.stop else None,
                streaming=streaming,
                keeps_text=call.with_text,
                totals=_totals(request) if call.totals_only else None,
                charge=_no_charge,
            )
            for request in call.requests
            for index in range(request.sampling.n)
        }
        self._client = client
        self._results = results
        self._metrics = metrics
        self._reserved = 0
        self._num_left = len(self.samples)
        self._grown: dict[tuple[str, int], SampleCollector] = {}
        self._news = asyncio.Event()
        self._failure: str | None = None
        self._times: dict[tuple[str, int], float] = {}
        self._started = time.perf_counter()

    async def __aenter__(self) -> "Job":
        """Reserve and submit.

        Raises:
            SeawallError: no room, or no engine; nothing was submitted.
        """
        needed = result_bytes(self.call.requests)
        self._results.take(needed)
        self._reserved = needed
        try:
            self._client.submit(self.call.requests, self)
        except SeawallError:
            self._give_back()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._num_left:
            self._client.leave(self.call.requests)
            for sample in self.samples.values():
                if not _has_ended(sample):
                    seconds = time.perf_counter() - self._started
                    self._metrics.sample_ended("abort", len(sample.ids), seconds)
        self._give_back()

    def prompt_scores(self, sample: SampleCollector) -> ScoreColumns:
        """Scores of a sample's prompt, which its request's first sample has."""
        return self.samples[sample.request.rid, 0].prompt

    async def ended(self) -> None:
        """Wait for all samples.

        Raises:
            SeawallError: what ended one of them, unless its caller did.
        """
        while self._is_pending():
            await self._wait()
        self._check()
        errors = [found for found in map(_error_of, self.samples.values()) if found is not None]
        if errors and (len(errors) == len(self.samples) or not self.call.is_batch):
            raise errors[0]

    async def grown(self) -> list[SampleCollector]:
        """Samples that have grown since the last call; empty once all have ended.

        Raises:
            SeawallError: output cannot be read.
        """
        while self._is_pending() and not self._grown:
            await self._wait()
        self._check()
        grown, self._grown = self._grown, {}
        return list(grown.values())

    def check_admitted(self) -> None:
        """Before anything was told to a stream's reader: was every sample taken?

        Raises:
            SeawallError: why one was turned away.
        """
        for sample in self.samples.values():
            error = _error_of(sample)
            if error is not None and not sample.ids:
                raise error

    def check_ends(self) -> None:
        """In the middle of a stream: has a fault ended a sample?

        Raises:
            SeawallError: the fault.
        """
        for sample in self.samples.values():
            error = _error_of(sample)
            if error is not None:
                raise error

    def take(self, delta: OutputDelta) -> None:
        """See client.Sink."""
        key = (delta.rid, delta.index)
        sample = self.samples[key]
        if _has_ended(sample):
            return
        cut = sample.take(delta)
        if cut is not None:
            self._client.finish(delta.rid, delta.index, cut)
        self._count(key, sample, len(delta.output_ids))
        self._grown[key] = sample
        if _has_ended(sample):
            self._num_left -= 1
        self._news.set()

    def fail(self, message: str) -> None:
        """See client.Sink."""
        self._failure = message
        self._news.set()

    async def _wait(self) -> None:
        await self._news.wait()
        self._news.clear()

    def _is_pending(self) -> bool:
        return self._num_left > 0 and self._failure is None

    def _check(self) -> None:
        if self._failure is not None:
            raise HttpError(500, self._failure, code="engine_error")

    def _give_back(self) -> None:
        self._results.give(self._reserved)
        self._reserved = 0

    def _count(self, key: tuple[str, int], sample: SampleCollector, num_tokens: int) -> None:
        now = time.perf_counter()
        if num_tokens:
            before = self._times.get(key)
            if before is None:
                self._metrics.first_token(now - self._started)
            self._metrics.tokens(num_tokens, 0.0 if before is None else now - before)
            self._times[key] = now
        if sample.finish is not None:
            reason = str(sample.finish["type"])
            self._metrics.sample_ended(reason, len(sample.ids), now - self._started)
            if sample.index == 0:
                cached = 0 if sample.last is None else sample.last.cached_tokens
                self._metrics.request_ended(len(sample.request.input_ids), cached)


def _has_ended(sample: SampleCollector) -> bool:
    return sample.finish is not None


def _error_of(sample: SampleCollector) -> SeawallError | None:
    """What ended a sample, if that was neither its own end nor its caller."""
    finish = sample.finish
    if finish is None or finish["type"] != "abort":
        return None
    status = finish["status_code"]
    if status == _ABORTED_BY_CALLER:
        return None
    return from_status(status if isinstance(status, int) else None, str(finish["message"]))


def _totals(request: GenerateRequest) -> ScoreTotals:
    start = request.logprob.start_len
    assert start is not None and start > 0
    return ScoreTotals(request.input_ids[start:])


def _no_charge(num_bytes: int) -> None:
    """The whole of a call is reserved before it starts."""
