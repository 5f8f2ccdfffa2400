"""Keys, origins, and a server without an engine: the application in process, no socket."""

import asyncio
from typing import Any

import httpx
import pytest

from seawall.process.supervisor import Supervisor
from seawall.server.app import create_app
from seawall.server.gate import _request_id
from seawall.server.options import ServerOptions
from seawall.server.service import Service
from tests.server.test_process import ANSWERS, READY, Pretender

OPEN = ["/health", "/ready", "/ping"]
CLOSED = ["/memory", "/server_info", "/v1/models", "/tokenizer_info", "/openapi.json"]
ADMIN = ["/flush_cache", "/release_memory_occupation", "/resume_memory_occupation"]


def ask(options: ServerOptions, *requests: tuple[str, str, dict[str, Any]]) -> list[httpx.Response]:
    """What an application with a pretended engine says to each request."""

    async def run() -> list[httpx.Response]:
        service = Service(options, "demo")
        supervisor = Supervisor(Pretender(ANSWERS), service, beat=lambda: None, hang_seconds=60)
        running = asyncio.create_task(supervisor.run())
        app = create_app(service, supervisor, "1")
        transport = httpx.ASGITransport(app)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                async with asyncio.timeout(60):
                    await service.client.up.wait()
                return [
                    await client.request(method, path, **more) for method, path, more in requests
                ]
        finally:
            await supervisor.stop()
            await running

    return asyncio.run(run())


def bearer(key: str) -> dict[str, Any]:
    return {"headers": {"authorization": f"Bearer {key}"}}


def test_key_is_needed_for_all_but_health() -> None:
    options = ServerOptions(api_key="secret")
    for response in ask(options, *(("GET", path, {}) for path in OPEN)):
        assert response.status_code == 200
    wrong = [{}, bearer("wrong"), bearer(""), {"headers": {"authorization": "secret"}}]
    for response in ask(options, *(("GET", path, more) for path in CLOSED for more in wrong)):
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "bad_key"
        assert "secret" not in response.text
    [right] = ask(options, ("GET", "/v1/models", bearer("secret")))
    assert right.status_code == 200


def test_empty_bearer_is_fine_without_a_key() -> None:
    [response] = ask(ServerOptions(), ("GET", "/v1/models", bearer("")))
    assert response.status_code == 200


def test_admin_key() -> None:
    options = ServerOptions(api_key="user", admin_api_key="admin")
    for response in ask(options, *(("POST", path, bearer("user")) for path in ADMIN)):
        assert response.status_code == 401
    for response in ask(options, *(("POST", path, bearer("admin")) for path in ADMIN)):
        assert response.status_code == 200
    [all_of_them, one] = ask(
        options,
        ("POST", "/abort_request", {**bearer("user"), "json": {"abort_all": True}}),
        ("POST", "/abort_request", {**bearer("user"), "json": {"rid": "a"}}),
    )
    assert (all_of_them.status_code, one.status_code) == (401, 200)


def test_without_an_admin_key_only_this_machine_changes_the_engine() -> None:
    for response in ask(ServerOptions(host="0.0.0.0"), *(("POST", path, {}) for path in ADMIN)):
        assert response.status_code == 403
        assert "--admin-api-key" in response.json()["message"]
    for response in ask(ServerOptions(), *(("POST", path, {}) for path in ADMIN)):
        assert response.status_code == 200


def test_origins() -> None:
    asked = {"headers": {"origin": "http://page"}}
    [without] = ask(ServerOptions(), ("GET", "/health", asked))
    assert "access-control-allow-origin" not in without.headers
    [allowed] = ask(ServerOptions(cors_origins=("http://page",)), ("GET", "/health", asked))
    assert allowed.headers["access-control-allow-origin"] == "http://page"


def test_without_tokenizer_texts_are_refused() -> None:
    assert READY.tokenizer_folder is None
    for response in ask(
        ServerOptions(),
        ("POST", "/tokenize", {"json": {"prompt": "a"}}),
        ("POST", "/generate", {"json": {"text": "a"}}),
        ("POST", "/v1/chat/completions", {"json": {"messages": [{"role": "user"}]}}),
    ):
        assert response.status_code == 400
        assert "skip_tokenizer_init" in response.json()["message"]


def test_before_there_is_an_engine_everything_is_503() -> None:
    async def run() -> None:
        service = Service(ServerOptions(api_key="secret"), "demo")
        supervisor = Supervisor(Pretender(ANSWERS), service, beat=lambda: None, hang_seconds=60)
        transport = httpx.ASGITransport(create_app(service, supervisor, "1"))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for method, path in (
                ("GET", "/health"),
                ("GET", "/memory"),
                ("GET", "/v1/models"),
                ("POST", "/generate"),
                ("POST", "/v1/completions"),
            ):
                more = {"json": {"prompt": "a"}} if method == "POST" else {}
                response = await client.request(method, path, **more, **bearer("secret"))
                assert response.status_code == 503, path
                assert response.headers["retry-after"] == "1"
                assert "starts" in response.json()["message"]
            metrics = await client.get("/metrics")
            assert 'seawall:engine_up{model_name="demo"} 0.0' in metrics.text

    asyncio.run(run())


def test_unexpected_errors_say_nothing_of_the_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("/private/path")

    monkeypatch.setattr("seawall.server.operations._front", broken)

    async def run() -> httpx.Response:
        service = Service(ServerOptions(), "demo")
        supervisor = Supervisor(Pretender(ANSWERS), service, beat=lambda: None, hang_seconds=60)
        app = create_app(service, supervisor, "1")
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get("/metrics")

    response = asyncio.run(run())
    assert response.status_code == 500
    assert response.headers["x-should-retry"] == "false"
    assert response.json()["error"]["code"] == "internal_error"
    assert "private" not in response.text


@pytest.mark.parametrize("given", ["", "a" * 129, "a b", "a\u00e9", "a;b", None])
def test_ids_that_could_break_a_log_line_are_replaced(given: str | None) -> None:
    assert _request_id(given) != given
    assert _request_id("abc_D-9") == "abc_D-9"
