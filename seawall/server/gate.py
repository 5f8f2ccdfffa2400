"""What every request passes first: its id, its key, and the count of its answer.

A plain ASGI layer: it neither holds bodies back nor starts tasks. Keys are compared in constant
time; a key is never logged or sent back.
"""

import hmac
import logging
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from seawall.server.errors import HttpError, error_response
from seawall.server.metrics import Metrics
from seawall.server.options import ServerOptions

logger = logging.getLogger("seawall.access")

# The dashboard's page holds no figures: it asks for them with the key.
_OPEN = frozenset({"/health", "/ready", "/ping", "/metrics", "/dashboard"})
_MAX_ID_CHARS = 128


class Gate:
    """See the module's docstring."""

    def __init__(self, app: ASGIApp, options: ServerOptions, metrics: Metrics) -> None:
        self._app = app
        self._options = options
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers.get("x-request-id"))
        started, status = time.perf_counter(), 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
                self._metrics.answered(status)
            await send(message)

        refusal = self._refusal(scope, headers)
        if refusal is None:
            await self._app(scope, receive, sending)
        else:
            await error_response(refusal)(scope, receive, sending)
        logger.info(
            "%s %s %d %.3fs %s",
            scope["method"],
            scope["path"].encode("unicode_escape").decode(),
            status,
            time.perf_counter() - started,
            request_id,
        )

    def _refusal(self, scope: Scope, headers: Headers) -> HttpError | None:
        options = self._options
        if options.api_key is None or scope["path"] in _OPEN or scope["method"] == "OPTIONS":
            return None
        if _has_key(headers, options.api_key) or _has_key(headers, options.admin_api_key):
            return None
        return HttpError(
            401, "Authorization: the key is missing or wrong; send 'Bearer KEY'", code="bad_key"
        )


def check_admin(request: Request, options: ServerOptions) -> None:
    """Refuse a request that changes the engine, unless it may.

    Raises:
        HttpError: without the admin key; or no such key is set and others can connect.
    """
    if options.admin_api_key is None:
        if not options.is_local:
            raise HttpError(
                403,
                "this route changes the engine, and other machines can connect; start the server "
                "with --admin-api-key and send that key",
                code="admin_key_needed",
            )
    elif not _has_key(request.headers, options.admin_api_key):
        raise HttpError(
            401, "Authorization: this route needs the admin key as 'Bearer KEY'", code="bad_key"
        )


def _has_key(headers: Headers, key: str | None) -> bool:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if key is None or scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(given.strip().encode(), key.encode())


def _request_id(given: str | None) -> str:
    """The client's own id if it is short and plain, else a new one."""
    if given and len(given) <= _MAX_ID_CHARS and given.replace("-", "").replace("_", "").isalnum():
        return given if given.isascii() else secrets.token_hex(16)
    return secrets.token_hex(16)
