"""Bodies in and answers out: limits, deadlines, readers who are slow or leave.

The framework's own responses know no slow reader and learn late of one who left; these do. A
stream is `data:` lines only: clients that read line by line take anything else for data.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from seawall.core.errors import RequestError, SeawallError
from seawall.server.budget import ByteBudget
from seawall.server.errors import HttpError, error_body, to_http
from seawall.server.options import ServerOptions

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
_GONE = 499  # written to nobody


async def read_object(
    request: Request, options: ServerOptions, bodies: ByteBudget
) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
        HttpError: too large, too slow.
        QueueFullError: other bodies leave no room.
        RequestError: not a JSON object.
    """
    held = 0
    chunks: list[bytes] = []
    try:
        async with asyncio.timeout(options.body_seconds):
            async for chunk in request.stream():
                _check_size(held + len(chunk), options)
                bodies.take(len(chunk))
                held += len(chunk)
                chunks.append(chunk)
        return _decoded(b"".join(chunks))
    except TimeoutError:
        raise HttpError(
            408, f"body: not read within {options.body_seconds} s; send it faster"
        ) from None
    except ClientDisconnect:
        raise HttpError(_GONE, "the client has left") from None
    finally:
        bodies.give(held)


def _check_size(num_bytes: int, options: ServerOptions) -> None:
    if num_bytes > options.max_body_bytes:
        raise HttpError(
            413,
            f"body: more than {options.max_body_bytes} bytes; send fewer prompts at once or raise "
            "--max-body-bytes",
        )


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"body: not JSON ({reason}); send an object") from None
    if not isinstance(value, dict):
        raise RequestError(f"body: got a JSON {type(value).__name__}; send an object")
    return value


def json_response(
    value: object, headers: Mapping[str, str] | None = None, *, status: int = 200
) -> Response:
    """An answer; msgspec writes no NaN and no infinity."""
    return Response(
        msgspec.json.encode(value),
        status_code=status,
        headers=dict(headers or {}),
        media_type="application/json",
    )


def event(value: object) -> bytes:
    """One event of a stream."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves.

    Raises:
        HttpError: it left.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise HttpError(_GONE, "the client has left")
    finally:
        await _end(working, watching)


class EventStream(Response):
    """A stream of events, first of which is there already: what fails before it is no stream.

    Args:
        events: closed when the client has read all, or leaves.
        write_seconds: a reader who takes longer for what waits is left.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        write_seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers(
            {
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
                **(headers or {}),
            }
        )
        self._first = first
        self._events = events
        self._write_seconds = write_seconds

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        """Called by the framework; a stream has no length."""
        super().init_headers(headers)
        if "content-length" in self.headers:
            del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, or until the client leaves."""
        sending = asyncio.ensure_future(self._send_all(send))
        watching = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await _end(sending, watching)
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        with contextlib.suppress(TimeoutError):
            await self._send(send, self._first)
            try:
                async for piece in self._events:
                    await self._send(send, piece)
            except SeawallError as error:
                # Too late for a status: the client finds it as the stream's last event.
                await self._send(send, event(error_body(to_http(error))))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, piece: bytes) -> None:
        # Waits while the socket is full; what the engine writes meanwhile goes into one event.
        async with asyncio.timeout(self._write_seconds):
            await send({"type": "http.response.body", "body": piece, "more_body": True})


async def open_stream(
    request: Request,
    events: AsyncGenerator[bytes, None],
    write_seconds: float,
    headers: Mapping[str, str],
) -> EventStream:
    """Wait for the first event, which may fail or come after the client has left.

    Raises:
        SeawallError: what the first event raises; no stream was begun.
    """
    try:
        first = await unless_gone(request, _first(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, write_seconds, headers)


async def _first(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
