"""uvicorn's HTTP protocol with two limits it lacks: how long and how large a request's head may be.

A socket that is opened and then silent, or that dribbles headers, would else be held for ever.
What comes after the head is timed where bodies are read.
"""

from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    import asyncio

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n\r\n"


class LimitedProtocol(HttpToolsProtocol):
    """See the module's docstring; uvicorn makes one for each connection.

    Args:
        header_seconds: from the first byte, or the connection's start, to the end of the head.
        args, more: the library's own.
    """

    def __init__(
        self, *args: Any, header_seconds: float, max_header_bytes: int, **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self._header_seconds = header_seconds
        self._max_header_bytes = max_header_bytes
        self._head_bytes = 0
        self._in_head = True
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Called by the event loop."""
        super().connection_made(transport)
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._stop_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        if self._in_head:
            if self._deadline is None:
                self._start_deadline()
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self._max_header_bytes:
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._in_head = False
        self._stop_deadline()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Called by the parser; the next head may follow at once, or after a pause."""
        self._in_head = True
        self._head_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Called by the library; an answer that came before the whole request ends the matter."""
        super().on_response_complete()
        if not self._in_head and not self.transport.is_closing():
            self.transport.close()

    def _start_deadline(self) -> None:
        self._stop_deadline()
        self._deadline = self.loop.call_later(self._header_seconds, self._expire)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
