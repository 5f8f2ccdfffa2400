"""Errors as HTTP answers: one body that clients of OpenAI and of SGLang both understand.

{"object": "error", "message", "type", "param", "code": 400,       SGLang reads the flat keys
 "error": {"message", "type", "param", "code": "..."}}             OpenAI's client the nested

400  the request cannot be honoured          413, 408, 431  its body or headers are too much
401, 403  keys                               404, 405  no such route, model or method
503  full, starting or draining; Retry-After     500  a fault of the engine; not to be retried
"""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from seawall.core.errors import ConfigError, ModelError, QueueFullError, RequestError, SeawallError

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
_RETRY_AFTER = "1"
Handler = Callable[[Request, Any], Coroutine[Any, Any, Response]]


class HttpError(SeawallError):
    """An answer other than success.

    Attributes:
        code: a word for programs, as OpenAI's errors have.
        param: the field that is to blame.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class UnavailableError(SeawallError):
    """There is no engine to serve this at present: it starts, or the server drains."""


def from_status(status: int | None, message: str) -> SeawallError:
    """The error that ended a request inside the engine."""
    if status == 503:
        return QueueFullError(message)
    if status == 400:
        return RequestError(message)
    return HttpError(500, message, code="engine_error")


def to_http(error: SeawallError) -> HttpError:
    """What a client is told of an error."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, RequestError | ConfigError | ModelError):
        return HttpError(400, str(error), code=None, param=_named_field(str(error)))
    if isinstance(error, QueueFullError):
        return HttpError(503, str(error), code="queue_full")
    if isinstance(error, UnavailableError):
        return HttpError(503, str(error), code="unavailable")
    return HttpError(500, str(error), code="engine_error")


def error_body(error: HttpError) -> dict[str, object]:
    """The body described in the module's docstring."""
    kind = _TYPES.get(error.status, "APIError")
    inner = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return {"object": "error", **inner, "code": error.status, "error": inner}


def error_headers(error: HttpError) -> dict[str, str]:
    """What tells clients whether to try again."""
    if error.status == 503:
        return {"retry-after": _RETRY_AFTER}
    if error.status == 500:
        # It would fail the same way: a request that breaks an engine must not run three times.
        return {"x-should-retry": "false"}
    if error.status in (408, 413):
        # What else the client may send is not read.
        return {"connection": "close"}
    if error.status == 401:
        return {"www-authenticate": "Bearer"}
    return {}


def error_response(error: HttpError, extra: Mapping[str, str] | None = None) -> Response:
    """The whole answer."""
    return Response(
        msgspec.json.encode(error_body(error)),
        status_code=error.status,
        headers={**error_headers(error), **(extra or {})},
        media_type="application/json",
    )


def handlers(note: Callable[[int, str], None]) -> dict[int | type[Exception], Handler]:
    """What answers each kind of error.

    Args:
        note: told the status and the message of each answer.
    """

    async def on_seawall_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, SeawallError)
        known = to_http(error)
        note(known.status, str(known))
        return error_response(known)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        # The framework's own: no such route, or not that method.
        assert isinstance(error, HTTPException)
        note(error.status_code, str(error.detail))
        return error_response(HttpError(error.status_code, str(error.detail)), error.headers)

    async def on_unknown_error(request: Request, error: Exception) -> Response:
        # The framework has logged it; clients are told nothing of the inside.
        note(500, type(error).__name__)
        return error_response(
            HttpError(500, "internal error; the server's log has it", code="internal_error")
        )

    return {
        SeawallError: on_seawall_error,
        HTTPException: on_http_exception,
        Exception: on_unknown_error,
    }


def _named_field(message: str) -> str | None:
    """Messages begin with the name of the field that is to blame."""
    name, colon, _ = message.partition(":")
    return name if colon and name.replace("_", "").isalnum() else None
