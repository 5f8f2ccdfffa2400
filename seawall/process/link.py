"""One front end's sockets to one engine process.

    front  PUSH --ipc--> PULL  engine process
    front  PULL <--ipc-- PUSH  engine process

The front end binds, in a folder that only its user can enter. Each process gets sockets of its
own, so nothing that a dead one said can be taken for the answer of its successor. Sending never
waits: what may be on its way is bounded by the front end's count of open requests.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from seawall.process.codec import front_codec

# Unix sockets have room for about a hundred characters of path.
_MAX_PATH = 100
# Between looks while a process that is ready connects; it has done so long before, as a rule.
_CONNECT_SECONDS = 0.005


class Link:
    """The front end's end; belongs to its event loop.

    Args:
        context: shared by the links of one front end.
        folder: where the sockets are made.
        number: of the engine process, to tell its sockets from others'.

    Raises:
        OSError: the sockets could not be made.
    """

    def __init__(self, context: zmq.asyncio.Context, folder: Path, number: int) -> None:
        self.to_core = f"ipc://{folder / f'{number}.in'}"
        self.from_core = f"ipc://{folder / f'{number}.out'}"
        if len(self.from_core) > _MAX_PATH:
            raise OSError(f"socket folder {folder}: its path is too long; set TMPDIR to another")
        self._codec = front_codec()
        self._push = zmq.Context(context).socket(zmq.PUSH)
        self._pull = context.socket(zmq.PULL)
        for socket in (self._push, self._pull):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
        self._push.bind(self.to_core)
        self._pull.bind(self.from_core)

    async def connected(self) -> None:
        """Wait until the process takes messages; what is sent before is lost."""
        while not self._push.poll(0, zmq.POLLOUT):
            await asyncio.sleep(_CONNECT_SECONDS)

    def send(self, kind: bytes, message: object) -> None:
        """Send without waiting; to a process that has ended it is lost."""
        frames = self._codec.encode(kind, message)
        with contextlib.suppress(zmq.Again):
            self._push.send_multipart(frames, zmq.NOBLOCK)

    async def receive(self) -> tuple[bytes, Any]:
        """The next message of the process: kind and body.

        Raises:
            ValueError: something that is no message.
        """
        return self._codec.decode(await self._pull.recv_multipart())

    def close(self) -> None:
        """Drop the sockets and what is on its way; a second call does nothing."""
        self._push.close(0)
        self._pull.close(0)
        for address in (self.to_core, self.from_core):
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
