"""Keeps one engine process alive: starts it, listens to it, starts another when it ends.

    launch -> Ready -> messages ... -> ended -> lost() -> launch again
                                 `-> silent although asked -> killed

What the process says goes to a Listener, which is told as well when a process is lost and all its
requests with it. A process that ends before it was ready is started again after a pause that
doubles; the first start of all is not repeated: its failure is the user's to see.

Nothing here polls: the loop sleeps until a message, the end of the process or a heartbeat that is
only kept while requests are open.
"""

import asyncio
import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import zmq.asyncio

from seawall.core.errors import BudgetError, ConfigError, EngineError, ModelError
from seawall.process.launcher import Child, Launcher
from seawall.process.link import Link
from seawall.process.messages import Ready, StartFailed, Stop

logger = logging.getLogger("seawall.process")

_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
_STOP_SECONDS = 10.0


class Listener(Protocol):
    """Who is told of what an engine process says; called on the supervisor's event loop."""

    async def ready(self, ready: Ready, link: Link) -> None:
        """A process serves; requests may be sent through `link` from now on."""

    def message(self, kind: bytes, message: Any) -> None:
        """The process says something."""

    def lost(self, reason: str) -> None:
        """The process has ended; nothing that was sent to it will be answered."""

    @property
    def waiting(self) -> bool:
        """Whether an answer is due: a process that then says nothing for long is stuck."""


class Supervisor:
    """See the module's docstring; `run` is its one task.

    Args:
        beat: sends something that the core has to answer.
        hang_seconds: a process that owes an answer and is silent for so long is killed.
    """

    def __init__(
        self,
        launcher: Launcher,
        listener: Listener,
        *,
        beat: Callable[[], None],
        hang_seconds: float,
    ) -> None:
        self.num_restarts = 0
        self._launcher = launcher
        self._listener = listener
        self._beat = beat
        self._hang_seconds = hang_seconds
        self._child: Child | None = None
        self._link: Link | None = None
        self._stopping = False
        self._heard = 0.0
        self._failure: StartFailed | None = None
        self._was_ready = False
        self._wake = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return None if self._child is None else self._child.pid

    async def run(self) -> None:
        """Keep a process running until `stop`.

        Raises:
            ConfigError, BudgetError, ModelError, EngineError: the very first start failed.
            Exception: whatever the listener raises.
        """
        folder = Path(tempfile.mkdtemp(prefix="seawall-"))
        context = zmq.asyncio.Context()
        try:
            await self._run(context, folder)
        finally:
            context.destroy(linger=0)
            shutil.rmtree(folder, ignore_errors=True)

    async def stop(self) -> None:
        """Ask the process to end, kill it if it does not, and let `run` return."""
        self._stopping = True
        self._wake.set()
        if self._link is not None:
            self._link.send(b"stop", Stop())
        child = self._child
        if child is not None:
            # One that still loads has nothing to end in order, and would not listen.
            if self._was_ready:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(child.wait(), _STOP_SECONDS)
            child.kill()

    async def _run(self, context: zmq.asyncio.Context, folder: Path) -> None:
        number, failures = 0, 0
        while not self._is_stopping():
            self._was_ready, self._failure = False, None
            reason = await self._one_life(context, folder, number)
            if number == 0 and not self._was_ready and not self._is_stopping():
                raise _start_error(self._failure, reason)
            number += 1
            failures = 0 if self._was_ready else failures + 1
            if self._is_stopping():
                break
            self.num_restarts += 1
            logger.error("%s; starting another", reason)
            if failures:
                pause = min(_FIRST_PAUSE * 2 ** (failures - 1), _LONGEST_PAUSE)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), pause)

    def _is_stopping(self) -> bool:
        return self._stopping

    async def _one_life(self, context: zmq.asyncio.Context, folder: Path, number: int) -> str:
        """From launch to end; returns why it ended."""
        link = self._link = Link(context, folder, number)
        child = self._child = await self._launcher.launch(link.to_core, link.from_core)
        reading = asyncio.create_task(self._read(link))
        watching = asyncio.create_task(self._watch(child))
        ending = asyncio.create_task(child.wait())
        try:
            await asyncio.wait({ending, reading}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and not ending.done():
                # It said its last word, or the listener could not take a word of it.
                reading.result()
            code = await ending
            # What it said last is worth hearing: why it could not start.
            await asyncio.wait([reading], timeout=0.2 if not self._was_ready else 0)
        finally:
            child.kill()
            await _cancelled(reading, watching, ending)
            await child.wait()
            self._link = self._child = None
            link.close()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        reason = f"engine process {child.pid} ended ({how})"
        self._listener.lost(reason)
        return reason

    async def _read(self, link: Link) -> None:
        """Hand on what the process says; one that speaks nonsense is killed."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                kind, message = await link.receive()
            except ValueError:
                logger.exception("the engine process sent something that is no message")
                if self._child is not None:
                    self._child.kill()
                return
            self._heard = loop.time()
            if isinstance(message, Ready):
                await link.connected()
                self._was_ready = True
                await self._listener.ready(message, link)
            elif isinstance(message, StartFailed):
                self._failure = message
                return
            else:
                self._listener.message(kind, message)

    async def _watch(self, child: Child) -> None:
        """Kill a process that owes an answer and has been silent for too long."""
        loop = asyncio.get_running_loop()
        self._heard = loop.time()
        while True:
            await asyncio.sleep(self._hang_seconds / 2)
            if not self._was_ready or not self._listener.waiting:
                self._heard = loop.time()
            elif loop.time() - self._heard >= self._hang_seconds:
                logger.error("engine process %d is stuck: killing it", child.pid)
                child.kill()
            else:
                self._beat()


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _start_error(failure: StartFailed | None, reason: str) -> Exception:
    """The error that the engine's start ended with, as it would be in one process."""
    if failure is None:
        return EngineError(f"{reason} while it started; its messages are above")
    if failure.kind == "budget":
        return BudgetError(failure.message, failure.table)
    kinds = {"config": ConfigError, "model": ModelError}
    return kinds.get(failure.kind, EngineError)(failure.message)
