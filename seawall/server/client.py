"""The engine process as the front end sees it: open requests, named calls, and nothing else.

    submit(request, sink) -> deltas go to the sink until each sample has ended
    call(name) -> what the engine's function returns

A request is open until the engine has given its last answer, even if its reader has left, so that
answers to an old request never reach a new one of the same name. When the engine process is lost,
every open request is answered with an abort of status 500 and every call fails: nobody waits for
ever. Belongs to the event loop.
"""

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from seawall.core.errors import (
    ConfigError,
    EngineError,
    ModelError,
    QueueFullError,
    RequestError,
    SeawallError,
)
from seawall.core.params import brief
from seawall.core.wire import (
    AbortRequest,
    FinishReason,
    FinishRequest,
    GenerateRequest,
    OutputDelta,
)
from seawall.process.link import Link
from seawall.process.messages import Call, CallDone, Ready
from seawall.server.errors import UnavailableError

logger = logging.getLogger("seawall.server")

# Front and engine process are not in step: so many more may be open than run and wait there.
_SLACK = 1024


class Sink(Protocol):
    """Takes what the engine says of some requests."""

    def take(self, delta: OutputDelta) -> None:
        """One delta."""

    def fail(self, message: str) -> None:
        """Nothing more will come, for this reason."""


@dataclass(slots=True)
class _Talk:
    """A request whose last answer has not come; `sink` is None once its reader has left."""

    request: GenerateRequest
    sink: Sink | None
    num_left: int


class EngineClient:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.engine: Ready | None = None
        self.up = asyncio.Event()
        self.reason = "the engine starts"
        self.num_open = 0
        self._link: Link | None = None
        self._talks: dict[str, _Talk] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._tickets = itertools.count(1)
        self._update: dict[str, Any] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    # -- what routes do ----------------------------------------------------------------------

    def check(self) -> Ready:
        """What is known of the engine that serves now.

        Raises:
            UnavailableError: none does.
        """
        if self.engine is None:
            raise UnavailableError(f"{self.reason}; retry later")
        return self.engine

    def submit(self, requests: Sequence[GenerateRequest], sink: Sink) -> None:
        """Send all requests of a call, or none.

        Raises:
            UnavailableError: there is no engine.
            RequestError: a name is that of a request that has not ended.
            QueueFullError: too many samples are open.
        """
        engine = self.check()
        for request in requests:
            if request.rid in self._talks:
                raise RequestError(
                    f"rid: {brief(request.rid)} is the name of a request that has not ended; "
                    "give another name"
                )
        count = sum(request.sampling.n for request in requests)
        if engine.max_queued is not None:
            limit = engine.max_queued + engine.max_running
            if self.num_open + count > limit + _SLACK:
                raise QueueFullError(
                    f"queue: {self.num_open} samples are open, the limit is {limit}; retry later "
                    "or raise max_queued_requests"
                )
        for request in requests:
            self._talks[request.rid] = _Talk(request, sink, request.sampling.n)
            self._send(b"generate", request)
        self.num_open += count
        self._note_idle()

    def finish(self, rid: str, index: int, num_output: int) -> None:
        """A stop string was completed by that many tokens of a sample."""
        self._send(b"finish", FinishRequest(rid=rid, index=index, num_output=num_output))

    def leave(self, requests: Sequence[GenerateRequest]) -> None:
        """The reader of these requests has left: what has not ended is aborted."""
        for request in requests:
            talk = self._talks.get(request.rid)
            if talk is not None and talk.request is request:
                talk.sink = None
                self._send(b"abort", AbortRequest(rid=request.rid))

    def abort(self, name: str | None) -> int:
        """End a request by its name, or all; returns how many there were."""
        names = [rid for rid in self._talks if name is None or _is_named(rid, name)]
        for rid in names:
            self._send(b"abort", AbortRequest(rid=rid))
        return len(names)

    async def call(self, name: str, **args: Any) -> Any:
        """Run a function of the engine process.

        Raises:
            UnavailableError: there is no engine.
            SeawallError: whatever the function raises.
        """
        self.check()
        return await self._call(name, args)

    async def update_weights(self, **args: Any) -> str:
        """`update_weights_from_disk`; an engine that is started again takes them too."""
        message = await self.call("update_weights_from_disk", **args)
        self._update = {**args, "abort_all_requests": False}
        return str(message)

    async def idle(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()

    def beat(self) -> None:
        """Ask the core for a sign of life."""
        self._send(b"call", Call(ticket=0, name="ping"))

    # -- Listener ----------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """See Listener."""
        return bool(self._talks or self._calls)

    async def ready(self, ready: Ready, link: Link) -> None:
        """See Listener."""
        self._link = link
        if self._update is not None:
            # Serving the weights of the start again would be silently wrong.
            self._start_call("update_weights_from_disk", self._update).add_done_callback(
                lambda done: self._updated(ready, done)
            )
        else:
            self._serve(ready)

    def message(self, kind: bytes, message: Any) -> None:
        """See Listener."""
        if isinstance(message, CallDone):
            self._take_answer(message)
            return
        for delta in message:
            self._take_delta(delta)
        self._note_idle()

    def lost(self, reason: str) -> None:
        """See Listener."""
        self.engine, self._link = None, None
        self.up.clear()
        self.reason = "the engine process was lost and is started again"
        talks, self._talks = list(self._talks.values()), {}
        calls, self._calls = list(self._calls.values()), {}
        self.num_open = 0
        for future in calls:
            if not future.done():
                future.set_exception(EngineError(reason))
        finish = FinishReason(type="abort", message=reason, status_code=500)
        for talk in talks:
            for index in range(talk.request.sampling.n):
                self._hand_over(talk, OutputDelta(rid=talk.request.rid, index=index, finish=finish))
        self._note_idle()

    # -- inside ------------------------------------------------------------------------------

    def _send(self, kind: bytes, message: object) -> None:
        if self._link is not None:
            self._link.send(kind, message)

    def _start_call(self, name: str, args: dict[str, Any]) -> asyncio.Future[Any]:
        ticket = next(self._tickets)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[ticket] = future
        self._send(b"call", Call(ticket=ticket, name=name, args=args))
        return future

    async def _call(self, name: str, args: dict[str, Any]) -> Any:
        return await self._start_call(name, args)

    def _serve(self, ready: Ready) -> None:
        self.engine = ready
        self.up.set()

    def _updated(self, ready: Ready, done: asyncio.Future[Any]) -> None:
        error = None if done.cancelled() else done.exception()
        if error is None:
            self._serve(ready)
        else:
            self.reason = f"the weights of the last update could not be read again ({error})"
            logger.error("%s", self.reason)

    def _take_answer(self, answer: CallDone) -> None:
        future = self._calls.pop(answer.ticket, None)
        if future is None or future.done():
            return
        if answer.failure is None:
            future.set_result(answer.value)
        else:
            kinds: dict[str, type[SeawallError]] = {
                "request": RequestError,
                "config": ConfigError,
                "budget": ConfigError,
                "model": ModelError,
            }
            future.set_exception(kinds.get(answer.failure, EngineError)(answer.message))

    def _take_delta(self, delta: OutputDelta) -> None:
        talk = self._talks.get(delta.rid)
        if talk is None:
            return
        if delta.finish is not None:
            talk.num_left -= 1
            self.num_open -= 1
            if talk.num_left == 0:
                del self._talks[delta.rid]
        self._hand_over(talk, delta)

    def _hand_over(self, talk: _Talk, delta: OutputDelta) -> None:
        if talk.sink is None:
            return
        try:
            talk.sink.take(delta)
        except Exception as error:  # process boundary: ends this request and no other
            logger.exception("request %s: its output cannot be read", talk.request.rid)
            sink, talk.sink = talk.sink, None
            self._send(b"abort", AbortRequest(rid=talk.request.rid))
            sink.fail(f"output cannot be read: {type(error).__name__}: {error}")

    def _note_idle(self) -> None:
        if self._talks:
            self._idle.clear()
        else:
            self._idle.set()


def _is_named(rid: str, name: str) -> bool:
    """Requests of a batch, and samples, are told apart by a number after the call's name."""
    head, mark, tail = rid.rpartition("-")
    sample, cut, index = name.rpartition("_")
    return (
        rid == name
        or (bool(mark) and head == name and tail.isdecimal())
        or (bool(cut) and rid == sample and index.isdecimal())
    )
