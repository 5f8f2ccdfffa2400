"""/dashboard: one page that shows the load line and the page map, fed once a second.

The page is a file without build step or remote assets; what it shows comes as a stream of events
from /dashboard/events, which asks the engine only while somebody looks.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from seawall.core.errors import QueueFullError, SeawallError
from seawall.process.supervisor import Supervisor
from seawall.server.service import Service
from seawall.server.transport import event, open_stream

_PAGE = Path(__file__).parent / "dashboard.html"
_SECONDS = 1.0
_MAX_VIEWERS = 8
# Nothing but what is in the page itself, and this server.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
)


class _Viewers:
    """How many look."""

    def __init__(self) -> None:
        self.count = 0


def routes(service: Service, supervisor: Supervisor) -> APIRouter:
    """The routes of this module."""
    router = APIRouter(tags=["dashboard"])
    page = _PAGE.read_bytes()
    viewers = _Viewers()

    @router.get("/dashboard")
    async def dashboard() -> Response:
        """The page."""
        headers = {"content-security-policy": _POLICY, "cache-control": "no-cache"}
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    @router.get("/dashboard/events")
    async def events(request: Request) -> Response:
        """What the page shows, once a second."""
        if viewers.count >= _MAX_VIEWERS:
            raise QueueFullError(f"dashboard: {_MAX_VIEWERS} look already; close one")
        states = _states(service, supervisor, viewers)
        return await open_stream(request, states, service.options.write_seconds, {})

    return router


async def _states(
    service: Service, supervisor: Supervisor, viewers: _Viewers
) -> AsyncGenerator[bytes, None]:
    viewers.count += 1
    try:
        while not service.draining:
            yield event(await _state(service, supervisor))
            await asyncio.sleep(_SECONDS)
    finally:
        viewers.count -= 1


async def _state(service: Service, supervisor: Supervisor) -> dict[str, Any]:
    metrics, client = service.metrics, service.client
    state: dict[str, Any] = {
        "time": time.time(),
        "model": service.model_name,
        "up": client.engine is not None,
        "restarts": supervisor.num_restarts,
        "open": client.num_open,
        "generated": metrics.num_generated_tokens,
        "prompt": metrics.num_prompt_tokens,
        "hit_rate": metrics.hit_rate,
        "errors": list(service.recent_errors),
        "engine": None,
    }
    try:
        info = await client.call("server_info")
        state["engine"] = {
            "memory": await client.call("memory_report"),
            "map": await client.call("page_map"),
            "counts": info["internal_states"][0],
        }
    except SeawallError as error:
        state["why"] = str(error)
    return state
