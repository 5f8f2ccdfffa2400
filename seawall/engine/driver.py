"""Drives an engine core in a thread of the caller's process.

    caller threads --submit--> inbox --intake--> core.turn() --deliver--> mailboxes by request id

The thread owns the core: nobody else calls it after `start`. Answers go to the mailbox that was
registered with the request; it is there until the core has given the last answer, even if its
reader has left, so that answers to an old request never reach a new one of the same name. When the
thread ends, for whatever reason, every open mailbox gets a last answer: nobody waits for ever.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from seawall.core.errors import EngineError, RequestError
from seawall.core.wire import (
    CacheFlushed,
    FinishReason,
    FlushCache,
    FromCore,
    GenerateRequest,
    OutputDelta,
    ToCore,
)
from seawall.engine.assemble import Assembly
from seawall.engine.core import EngineCore

logger = logging.getLogger("seawall.engine")

T = TypeVar("T")
Mailbox = Callable[[list[FromCore]], None]
_IDLE_SECONDS = 60.0


class _Stop:
    """Asks the thread to end."""


class _Call:
    """A function to run on the core thread between two turns.

    `when_idle` puts it off until the requests that came before it have ended.
    """

    def __init__(self, function: Callable[[], object], *, when_idle: bool = False) -> None:
        self.function = function
        self.when_idle = when_idle
        self.done = threading.Event()
        self.result: object = None
        self.error: Exception | None = None


@dataclass(slots=True)
class _Talk:
    """A message whose answers have not all come; `mailbox` is None once its reader has left."""

    message: ToCore
    mailbox: Mailbox | None
    num_left: int


class CoreThread:
    """The thread, its inbox, and the mailboxes its results go to."""

    def __init__(self, build: Callable[[], Assembly]) -> None:
        """Build a core on the thread that will drive it, and wait until it is ready.

        Everything that computes runs on that one thread, the warm-up included, since OpenMP keeps
        a team of workers for each thread that ever computed.

        Raises:
            Exception: whatever `build` raises.
        """
        self._inbox: queue.SimpleQueue[ToCore | _Stop | _Call] = queue.SimpleQueue()
        self._talks: dict[str, _Talk] = {}
        self._put_off: list[_Call] = []
        # Guards `_talks` and `_dead`; notified when a talk whose reader has left is over.
        self._lock = threading.Condition()
        self._held: list[FromCore] = []
        self._dead: str | None = None
        built = _Call(build)
        self._thread = threading.Thread(
            target=self._run, args=(built,), name="seawall-core", daemon=True
        )
        self._thread.start()
        built.done.wait()
        if built.error is not None:
            self._thread.join()
            raise built.error
        assert isinstance(built.result, Assembly)
        self.assembly = built.result

    def submit(self, key: str, message: ToCore, mailbox: Mailbox) -> None:
        """Send a message whose answers go to `mailbox`, called on the core thread.

        Raises:
            EngineError: the engine was shut down or its core died.
            RequestError: another request of that name has not ended.
        """
        num_answers = message.sampling.n if isinstance(message, GenerateRequest) else 1
        with self._lock:
            self._lock.wait_for(lambda: self._dead or not self._is_abandoned(key))
            self.check_alive()
            if key in self._talks:
                raise RequestError(
                    f"rid: {key!r} is the name of a request that has not ended; give another name"
                )
            self._talks[key] = _Talk(message, mailbox, num_answers)
            self._inbox.put(message)

    def send(self, message: ToCore) -> None:
        """Send a message that is not answered."""
        self._inbox.put(message)

    def forget(self, key: str) -> None:
        """Drop what else may come for `key`; whoever submitted it has stopped listening."""
        with self._lock:
            talk = self._talks.get(key)
            if talk is not None:
                talk.mailbox = None

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the core thread, between two turns, and return its result.

        Raises:
            EngineError: the engine was shut down; otherwise whatever the function raises.
        """
        return self._call(_Call(function))  # type: ignore[return-value]  # the function's own

    def call_when_idle(self, function: Callable[[], T]) -> T:
        """Like `call`, once every request that was submitted before has ended.

        Requests that come meanwhile wait in the queue until the function has returned.
        """
        call = _Call(function, when_idle=True)
        return self._call(call)  # type: ignore[return-value]  # the function's own

    def _call(self, call: _Call) -> object:
        with self._lock:
            self.check_alive()
            self._inbox.put(call)
        call.done.wait()
        if call.error is not None:
            raise call.error
        return call.result

    def stop(self) -> None:
        """End every request with an abort, then the thread."""
        if self._thread.is_alive():
            self._inbox.put(_Stop())
            self._thread.join()

    def join(self) -> None:
        """Wait until the thread has ended, for whatever reason."""
        self._thread.join()

    def check_alive(self) -> None:
        """Refuse what could never be answered.

        Raises:
            EngineError: the engine was shut down or its core died.
        """
        if self._dead is not None:
            raise EngineError(f"engine: {self._dead}; make a new Engine")

    def _run(self, built: _Call) -> None:
        _run_call(built)
        if not isinstance(built.result, Assembly):
            return
        core = built.result.core
        reason = "was shut down"
        try:
            # Where a launch returns at once, callers get their results while the device computes:
            # their threads then want the GIL when this one waits anyway.
            late = built.result.launches_return_early
            with built.result.meter:
                while self._take_messages(core):
                    answers = core.turn(self._deliver_held)
                    self._held += answers
                    if not late or not core.has_work:
                        self._deliver_held()
        except BaseException as error:
            logger.exception("the engine core died")
            reason = f"core died of {type(error).__name__}: {error}"
            if not isinstance(error, Exception):
                raise
        finally:
            self._close(reason)

    def _take_messages(self, core: EngineCore) -> bool:
        """Hand over what is in the inbox; wait for something when there is no work."""
        messages: list[ToCore] = []
        # What a call has turned away is delivered by the next turn.
        wait = not self._run_put_off(core) and not core.has_work
        while True:
            try:
                item = self._inbox.get(timeout=_IDLE_SECONDS) if wait else self._inbox.get_nowait()
            except queue.Empty:
                break
            wait = False
            if isinstance(item, _Stop):
                return False
            if isinstance(item, _Call):
                core.intake(messages)
                messages = []
                self._take_call(core, item)
            else:
                messages.append(item)
        core.intake(messages)
        return True

    def _take_call(self, core: EngineCore, call: _Call) -> None:
        if call.when_idle:
            self._put_off.append(call)
            core.scheduler.hold()
        else:
            _run_call(call)

    def _run_put_off(self, core: EngineCore) -> bool:
        """Run what waits for the earlier requests, if they have all ended; whether it did."""
        if not self._put_off or not core.settle():
            return False
        for call in self._put_off:
            _run_call(call)
        self._put_off.clear()
        core.scheduler.let_go()
        return True

    def _is_abandoned(self, key: str) -> bool:
        talk = self._talks.get(key)
        return talk is not None and talk.mailbox is None

    def _deliver_held(self) -> None:
        held, self._held = self._held, []
        if held:
            self._deliver(held)

    def _deliver(self, answers: list[FromCore]) -> None:
        """One call a mailbox and turn: each call may wake a thread that then wants the GIL."""
        parcels: dict[int, tuple[Mailbox, list[FromCore]]] = {}
        with self._lock:
            for answer in answers:
                mailbox = self._mailbox_for(answer)
                if mailbox is not None:
                    parcels.setdefault(id(mailbox), (mailbox, []))[1].append(answer)
        for mailbox, parcel in parcels.values():
            mailbox(parcel)

    def _mailbox_for(self, answer: FromCore) -> Mailbox | None:
        """Where an answer goes; the last one ends its talk."""
        key = answer.rid if isinstance(answer, OutputDelta) else _ticket_key(answer)
        talk = self._talks.get(key)
        if talk is None:
            return None
        if not isinstance(answer, OutputDelta) or answer.finish is not None:
            talk.num_left -= 1
            if talk.num_left == 0:
                del self._talks[key]
                if talk.mailbox is None:
                    self._lock.notify_all()
        return talk.mailbox

    def _close(self, reason: str) -> None:
        """Answer everybody who waits, without asking the core, which may be what broke."""
        with self._lock:
            self._dead = reason
            talks = list(self._talks.values())
            self._talks.clear()
            self._lock.notify_all()
        calls = list(self._put_off)
        with suppress(queue.Empty):
            while True:
                item = self._inbox.get_nowait()
                if isinstance(item, _Call):
                    calls.append(item)
        for call in calls:
            call.error = EngineError(f"engine: {reason}; make a new Engine")
            call.done.set()
        for talk in talks:
            if talk.mailbox is not None:
                talk.mailbox(list(_last_answers(talk.message, f"engine {reason}")))


def _run_call(call: _Call) -> None:
    try:
        call.result = call.function()
    except Exception as error:  # handed to the caller, who raises it
        call.error = error
    call.done.set()


def _ticket_key(answer: CacheFlushed) -> str:
    return f"ticket {answer.ticket}"


def _last_answers(message: ToCore, reason: str) -> Iterator[FromCore]:
    """What ends a message that the core will not answer any more; too much does no harm."""
    if isinstance(message, GenerateRequest):
        finish = FinishReason(type="abort", message=reason, status_code=500)
        for index in range(message.sampling.n):
            yield OutputDelta(rid=message.rid, index=index, finish=finish)
    elif isinstance(message, FlushCache):
        yield CacheFlushed(ticket=message.ticket, done=False)
