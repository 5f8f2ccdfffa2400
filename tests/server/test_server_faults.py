"""Clients who leave, dawdle or send nonsense, and an engine process that dies.

A server of its own: the others' is left in peace. Full counts under SEAWALL_SOAK=1.
"""

import asyncio
import json
import os
import random
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.harness import ServerProcess, wait_idle, wait_until

LONG = {"max_new_tokens": 800, "ignore_eos": True}
SHORT = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def fragile(soak: bool) -> Iterator[ServerProcess]:
    # Five hundred clients in one thread are slow to send their heads.
    process = ServerProcess(
        f"--header-seconds={15 if soak else 1}",
        "--body-seconds=2",
        "--write-seconds=1",
        "--max-body-bytes=64KiB",
        "--max-queued-requests=8",
    )
    yield process
    assert process.stop() == 0, "".join(process.log)
    assert not any("Traceback" in line for line in process.log), "".join(process.log)


@pytest.fixture
def client(fragile: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fragile.url, timeout=120) as found:
        yield found


def counts(client: httpx.Client) -> dict[str, Any]:
    found = client.get("/server_info").json()
    return {**found["internal_states"][0], **found["front"]}


def test_client_that_leaves_ends_its_request(client: httpx.Client) -> None:
    body = {"text": "a", "sampling_params": LONG}
    with pytest.raises(httpx.ReadTimeout):
        client.post("/generate", json=body, timeout=0.3)
    with client.stream("POST", "/generate", json={**body, "stream": True}) as response:
        next(response.iter_lines())
    report = wait_idle(client)
    assert report["front"]["results_bytes"] == 0


def aborted(client: httpx.Client) -> float:
    for line in client.get("/metrics").text.splitlines():
        if line.startswith("sglang:num_aborted_requests_total"):
            return float(line.rpartition(" ")[2])
    return 0.0


def test_reader_that_does_not_read_is_left_and_slows_nobody(
    fragile: ServerProcess, client: httpx.Client
) -> None:
    before = aborted(client)
    body = {"text": "a", "sampling_params": LONG, "stream": True, "return_logprob": True}
    content = json.dumps({**body, "top_logprobs_num": 200, "return_text_in_logprobs": True})
    host, port = fragile.url.removeprefix("http://").split(":")
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect((host, int(port)))
        head = f"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: {len(content)}\r\n\r\n"
        lazy.sendall((head + content).encode())
        wait_until(lambda: counts(client)["open_samples"] == 1)
        answer = client.post("/generate", json={"text": "a", "sampling_params": SHORT})
        assert answer.status_code == 200
        report = wait_idle(client)
        assert report["front"]["results_bytes"] == 0
        assert aborted(client) == before + 1


def test_storm_of_clients_that_leave(fragile: ServerProcess, soak: bool) -> None:
    count = 500 if soak else 24
    dice = random.Random(5)

    async def one(client: httpx.AsyncClient, leaves_after: int | None) -> int:
        body = {"input_ids": [6, *(dice.randrange(10, 4000) for _ in range(8))], "stream": True}
        body["sampling_params"] = {"max_new_tokens": 24, "ignore_eos": True}
        while True:
            async with client.stream("POST", "/generate", json=body) as response:
                if response.status_code == 503:
                    assert response.headers["retry-after"] == "1"
                    await asyncio.sleep(0.05)
                    continue
                assert response.status_code == 200
                num_bytes = 0
                last = b""
                async for piece in response.aiter_bytes():
                    num_bytes += len(piece)
                    last = piece
                    if leaves_after is not None and num_bytes > leaves_after:
                        return 0
                assert last.endswith(b"data: [DONE]\n\n")
                return 1

    async def storm() -> int:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=fragile.url, timeout=300, limits=limits) as client:
            leaving = [dice.randrange(4000) if i % 3 == 0 else None for i in range(count)]
            return sum(await asyncio.gather(*(one(client, after) for after in leaving)))

    assert asyncio.run(storm()) >= count - (count + 2) // 3
    with httpx.Client(base_url=fragile.url, timeout=60) as client:
        report = wait_idle(client)
    assert report["violations"] == []
    assert report["front"]["results_bytes"] == report["front"]["bodies_bytes"] == 0


def test_full_queue_is_503_with_retry_after(client: httpx.Client) -> None:
    params = {"max_new_tokens": 200, "ignore_eos": True}
    found: list[httpx.Response] = []

    def hold() -> None:
        body = {"input_ids": [[6, 70]] * 8, "sampling_params": params}
        found.append(client.post("/generate", json=body))

    holders = [threading.Thread(target=hold) for _ in range(3)]
    for holder, (name, count) in zip(
        holders, (("running", 8), ("running", 16), ("waiting", 1)), strict=True
    ):
        holder.start()
        wait_until(lambda: counts(client)[name] >= count)  # noqa: B023 -- called at once
    # The third batch has filled the queue, and what did not fit was turned away one by one.
    for more in ({}, {"stream": True}):
        body = {"input_ids": [6, 70], "sampling_params": params, **more}
        answer = client.post("/generate", json=body)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "queue_full"
    client.post("/abort_request", json={"abort_all": True})
    for holder in holders:
        holder.join()
    assert [response.status_code for response in found] == [200] * 3
    reasons = [one["meta_info"]["finish_reason"] for response in found for one in response.json()]
    assert any(reason.get("status_code") == 503 for reason in reasons)
    wait_idle(client)
    body = {"input_ids": [6, 70], "sampling_params": SHORT}
    assert client.post("/generate", json=body).status_code == 200


# -- nonsense ----------------------------------------------------------------------------------

VALUES: list[Any] = [
    None, True, -1, 0, 1e308, -0.5, 2**63, 10**40, "", "x", "\u0000", [], [[]], [[[1]]], {},
    {"a": [None]}, [None], [1.5], [True], ["", ""], [[1], "a"], [-5], [2**40], {"5": "x"},
]  # fmt: skip
PATHS = {
    "/generate": (
        "text", "input_ids", "sampling_params", "stream", "return_logprob", "logprob_start_len",
        "top_logprobs_num", "token_ids_logprob", "rid", "priority", "extra_key", "logprob_format",
        "return_text", "logprobs_mode", "incremental",
    ),
    "/v1/completions": (
        "prompt", "max_tokens", "n", "echo", "logprobs", "stop", "stream", "stream_options",
        "temperature", "logit_bias", "seed", "model", "top_p", "prompt_logprobs", "rid", "suffix",
    ),
    "/v1/chat/completions": (
        "messages", "max_tokens", "n", "logprobs", "top_logprobs", "stop", "stream", "tools",
        "response_format", "chat_template_kwargs", "temperature", "tool_choice",
    ),
    "/v1/score": ("query", "items", "label_token_ids", "apply_softmax", "item_first"),
    "/tokenize": ("prompt", "messages", "add_special_tokens", "return_token_strs"),
    "/detokenize": ("tokens", "skip_special_tokens"),
    "/abort_request": ("rid", "abort_all"),
    "/release_memory_occupation": ("tags",),
    "/update_weights_from_disk": ("model_path", "load_format", "weight_version"),
}  # fmt: skip
GOOD: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": [6, 70], "sampling_params": {"max_new_tokens": 1}},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
}
RAW = [
    b"", b"{", b"[]", b"null", b'"a"', b"\xff\xfe", b'{"text": "\\ud800"}', b"[" * 30000,
    b'{"a":' * 5000, b'{"text": NaN}', b'{"text": 1e999}', b"{}" + b" " * 70000, b'{"text"}',
]  # fmt: skip


def test_nonsense_is_refused_and_harms_nobody(client: httpx.Client, soak: bool) -> None:
    dice = random.Random(11)
    count = 2000 if soak else 150
    for _ in range(count):
        path = dice.choice(list(PATHS))
        body = dict(GOOD.get(path, {}))
        for name in dice.sample(PATHS[path], min(len(PATHS[path]), dice.randrange(1, 3))):
            body[name] = dice.choice(VALUES)
        if path == "/release_memory_occupation":
            body["tags"] = "nonsense"  # null is a wish here
        response = client.post(path, content=json.dumps(body))
        assert response.status_code < 500, (path, body, response.text)
    for raw in RAW:
        for path in PATHS:
            if path.startswith(("/release", "/abort")):
                continue
            response = client.post(path, content=raw)
            assert 400 <= response.status_code < 500, (path, raw[:40], response.text)
    wait_idle(client)
    answer = client.post("/generate", json={"text": "a", "sampling_params": SHORT})
    assert answer.status_code == 200


def raw_exchange(server: ServerProcess, *pieces: bytes, seconds: float = 20.0) -> bytes:
    """Send pieces over a bare socket; what comes until the server closes it."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
            found = b""
            while piece := connection.recv(65536):
                found += piece
        except ConnectionError:
            return b"closed"
        return found


@pytest.mark.parametrize(
    "pieces",
    [
        (b"",),
        (b"POST /generate HT",),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 200_000 + b"\r\n",),
        (b"\x00\x01\x02 garbage\r\n\r\n",),
        (b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\n",),
        (b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{",),
    ],
    ids=["silent", "half-head", "huge-head", "garbage", "negative-length", "half-body"],
)
def test_sockets_that_say_too_little_or_too_much_are_closed(
    fragile: ServerProcess, client: httpx.Client, pieces: tuple[bytes, ...]
) -> None:
    answer = raw_exchange(fragile, *pieces)
    assert not answer or answer == b"closed" or b" 4" in answer.split(b"\r\n")[0]
    assert client.get("/health").status_code == 200


def test_body_over_the_limit(client: httpx.Client) -> None:
    answer = client.post("/generate", content=b'{"text":"' + b"a" * 70_000 + b'"}')
    assert answer.status_code == 413
    assert "max-body-bytes" in answer.json()["message"]


# -- an engine process that dies ---------------------------------------------------------------


def test_killed_engine_is_replaced_and_its_requests_are_answered(
    fragile: ServerProcess, soak: bool
) -> None:
    for _ in range(20 if soak else 2):
        with httpx.Client(base_url=fragile.url, timeout=120) as client:
            _kill_under_load(fragile, client)
    assert len(fragile.children()) == 1


def _kill_under_load(fragile: ServerProcess, client: httpx.Client) -> None:
    found: list[tuple[int, str]] = []
    begun = threading.Barrier(5)

    def hold(streams: bool) -> None:
        body = {"text": "a", "sampling_params": LONG, "stream": streams}
        if streams:
            with client.stream("POST", "/generate", json=body) as response:
                lines = response.iter_lines()
                first = next(lines)
                begun.wait()
                rest = [first, *(line for line in lines if line)]
                assert rest[-1] == "data: [DONE]"
                found.append((response.status_code, rest[-2]))
        else:
            begun.wait()
            response = client.post("/generate", json=body)
            found.append((response.status_code, response.text))

    threads = [threading.Thread(target=hold, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    begun.wait()
    wait_until(lambda: counts(client)["open_samples"] >= 4)
    before = fragile.engine_pid()
    os.kill(before, signal.SIGKILL)
    for thread in threads:
        thread.join()
    for status, text in found:
        # A stream had its 200 before; its last event says why it ended.
        assert status in (200, 500), text
        assert ('"engine_error"' if status == 500 else '"type":"abort"') in text
        assert "engine process" in text
    fragile.wait_until_ready()
    assert fragile.engine_pid() != before
    assert not psutil.pid_exists(before)
    answer = client.post("/generate", json={"text": "a", "sampling_params": SHORT})
    assert answer.status_code == 200
    wait_idle(client)


def test_without_an_engine_the_port_answers(fragile: ServerProcess) -> None:
    with httpx.Client(base_url=fragile.url, timeout=60) as client:
        os.kill(fragile.engine_pid(), signal.SIGKILL)
        wait_until(lambda: client.get("/ready").status_code == 503)
        answer = client.post("/generate", json={"text": "a"})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert client.get("/metrics").status_code == 200
    fragile.wait_until_ready()


def test_signal_lets_open_requests_end_and_leaves_nothing() -> None:
    process = ServerProcess()
    engine = process.engine_pid()
    found: list[httpx.Response] = []
    body = {"text": "a", "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
    with httpx.Client(base_url=process.url, timeout=120) as client:
        asking = threading.Thread(target=lambda: found.append(client.post("/generate", json=body)))
        asking.start()
        wait_until(lambda: counts(client)["open_samples"] > 0)
        process.signal(signal.SIGTERM)
        asking.join()
    [answer] = found
    assert answer.status_code == 200
    assert answer.json()["meta_info"]["completion_tokens"] == 200
    assert process.stop() == 0
    assert not psutil.pid_exists(engine)


def test_engine_ends_with_its_server_and_leaves_no_sockets() -> None:
    # Not pytest's own folder: paths of sockets must be short.
    with tempfile.TemporaryDirectory() as name:
        process = ServerProcess(folder=Path(name))
        [sockets] = Path(name).glob("seawall-*")
        assert sockets.stat().st_mode & 0o077 == 0
        children = process.children()
        assert children
        process.kill()
        psutil.wait_procs(children, timeout=60)
        assert not any(child.is_running() for child in children)
        assert not sockets.exists()
