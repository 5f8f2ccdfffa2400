"""Starts engine processes on this machine, and ends them.

    front process --stdin pipe--> engine process

The child reads its arguments from the first line of its stdin, and takes the end of that pipe for
the end of its parent: however the front process dies, no engine is left behind.
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Mapping
from typing import Protocol

import msgspec


class Child(Protocol):
    """A started engine process."""

    @property
    def pid(self) -> int:
        """Its process id."""

    async def wait(self) -> int:
        """Its exit code, once it has ended; negative for a signal."""

    def kill(self) -> None:
        """End it at once; nothing happens if it has ended."""


class Launcher(Protocol):
    """Starts an engine process that connects to two addresses."""

    async def launch(self, to_core: str, from_core: str) -> Child:
        """Start one."""


class LocalChild:
    """A process of this machine."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """See Child."""
        return self._process.pid

    async def wait(self) -> int:
        """See Child."""
        code = await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        return code

    def kill(self) -> None:
        """See Child."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)


class LocalLauncher:
    """Starts `python -m MODULE` on this machine.

    Args:
        module: what serves an engine over two addresses, given as its arguments.
        args: engine arguments by name, as JSON can carry them.
    """

    def __init__(self, module: str, args: Mapping[str, object]) -> None:
        self._module = module
        self._args = dict(args)

    async def launch(self, to_core: str, from_core: str) -> LocalChild:
        """See Launcher."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._module,
            to_core,
            from_core,
            stdin=asyncio.subprocess.PIPE,
            # Ctrl-C on the terminal is for the front process, which then drains.
            start_new_session=True,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(msgspec.json.encode(self._args) + b"\n")
            await process.stdin.drain()
        return LocalChild(process)
