"""Runs a server: the socket first, then the engine process, then requests until a signal.

    bind -> engine starts (503 meanwhile) -> ready -> serve -> SIGTERM or SIGINT
         -> new requests 503, open ones go on for drain_seconds -> the rest is aborted -> exit 0

A second signal ends it at once. The event loop's thread is the only one that serves.
"""

import asyncio
import contextlib
import functools
import logging
import signal
import socket
from collections.abc import Callable, Mapping

import uvicorn
import uvloop

from seawall.core.errors import ConfigError
from seawall.process.launcher import LocalLauncher
from seawall.process.supervisor import Supervisor
from seawall.server.app import create_app
from seawall.server.options import ServerOptions
from seawall.server.protocol import LimitedProtocol
from seawall.server.service import Service

logger = logging.getLogger("seawall.server")

_BACKLOG = 2048
_ABORT_SECONDS = 5.0
_KEEP_ALIVE_SECONDS = 75
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: a signal drains first."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]  # as the library declares it
        """Called by uvicorn."""
        yield


class HttpServer:
    """One server, from bind to exit.

    Args:
        engine_module: what runs an engine process as `python -m`.
        engine_args: names and values as in `seawall.core.config`.
        on_ready: told the address once requests are served.
    """

    def __init__(
        self,
        options: ServerOptions,
        engine_module: str,
        engine_args: Mapping[str, object],
        version: str,
        on_ready: Callable[[str, Service], None],
    ) -> None:
        self._options = options
        self._on_ready = on_ready
        self.service = Service(options, str(engine_args.get("model_path", "demo")))
        self.supervisor = Supervisor(
            LocalLauncher(engine_module, engine_args),
            self.service,
            beat=self.service.client.beat,
            hang_seconds=options.hang_seconds,
        )
        self._app = create_app(self.service, self.supervisor, version)
        self._signals = 0
        self._ending: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve until a signal has come and what was open has ended.

        Raises:
            ConfigError: the address cannot be had.
            SeawallError: the engine could not start.
        """
        listener = bind(self._options)
        web = _Uvicorn(self._uvicorn_config())
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, web)
        serving = asyncio.create_task(web.serve(sockets=[listener]))
        engine = asyncio.create_task(self.supervisor.run())
        announcing = asyncio.create_task(self._announce(listener))
        try:
            await asyncio.wait({serving, engine}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            announcing.cancel()
            web.should_exit = True
            await self.supervisor.stop()
            await asyncio.gather(serving, engine, announcing, return_exceptions=True)
            listener.close()
        if not engine.cancelled():
            engine.result()

    def _uvicorn_config(self) -> uvicorn.Config:
        options = self._options
        return uvicorn.Config(
            self._app,
            http=functools.partial(  # type: ignore[arg-type]  # made like the class it stands for
                LimitedProtocol,
                header_seconds=options.header_seconds,
                max_header_bytes=options.max_header_bytes,
            ),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(_ABORT_SECONDS),
        )

    async def _announce(self, listener: socket.socket) -> None:
        await self.service.client.up.wait()
        self._on_ready(address(listener), self.service)

    def _on_signal(self, web: uvicorn.Server) -> None:
        self._signals += 1
        if self._signals == 1:
            logger.warning("draining: open requests have %s s", self._options.drain_seconds)
            self._ending = asyncio.get_running_loop().create_task(self._drain(web))
        else:
            web.force_exit = web.should_exit = True

    async def _drain(self, web: uvicorn.Server) -> None:
        """Let open requests end, abort those that take too long, then let the server go."""
        self.service.draining = True
        client = self.service.client
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(client.idle(), self._options.drain_seconds)
        client.abort(None)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(client.idle(), _ABORT_SECONDS)
        web.should_exit = True


def run(server: HttpServer) -> None:
    """Run a server to its end, on an event loop of its own."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.run())


def bind(options: ServerOptions) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        ConfigError: the address is taken or not this machine's.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # The event loop turns off delays for sockets that say they are TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"host, port: {options.host}:{options.port} cannot be had ({error.strerror}); choose "
            "another --port"
        ) from None
    listener.setblocking(False)
    return listener


def address(listener: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
