"""The page and what feeds it; how it looks is for a browser to say."""

import json
import re
import time
from html.parser import HTMLParser
from typing import Any

import httpx

from tests.server.harness import wait_idle


def states(client: httpx.Client, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with client.stream("GET", "/dashboard/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line:
                found.append(json.loads(line.removeprefix("data: ")))
            if len(found) == count:
                break
    return found


def test_page_stands_alone(client: httpx.Client) -> None:
    response = client.get("/dashboard")
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.search(r"https?://|src=|@import|url\(", response.text)
    assert len(response.content) < 60_000
    assert 'name="viewport"' in response.text
    assert "prefers-color-scheme: dark" in response.text


def test_script_only_uses_ids_that_are_there(client: httpx.Client) -> None:
    text = client.get("/dashboard").text
    ids: list[str] = []

    class Ids(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            ids.extend(str(value) for name, value in attrs if name == "id")

    Ids().feed(text)
    used = set(re.findall(r'(?:byId|lines)\("([a-z]+)"', text))
    assert used == set(ids)


def test_events_say_what_the_report_says(client: httpx.Client) -> None:
    report = wait_idle(client)
    client.post("/generate", json={"text": 5})
    [state] = states(client, 1)
    assert state["up"]
    assert state["engine"]["memory"]["plan"] == report["plan"]
    assert state["errors"][-1]["status"] == 400
    assert "prompt" in state["errors"][-1]["message"]
    shown, pages = state["engine"]["map"], state["engine"]["memory"]["pages"]
    by_owner = [0] * len(shown["owners"])
    for owner, cells in shown["runs"]:
        by_owner[owner] += cells
    assert shown["step"] == 1
    assert sum(by_owner) == pages["total"]
    assert by_owner[0] == pages["free"]
    assert sum(by_owner[2:]) == pages["cached"]


def test_map_names_the_requests_that_run(client: httpx.Client) -> None:
    body = {"rid": "seen", "text": "a", "stream": True}
    body["sampling_params"] = {"max_new_tokens": 900, "ignore_eos": True}
    with client.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()  # held: a reader that is dropped leaves
        next(lines)
        [state] = states(client, 1)
    assert any("seen" in owner for owner in state["engine"]["map"]["owners"])
    assert state["engine"]["counts"]["running"] == state["open"] == 1
    wait_idle(client)


def test_events_go_on_and_end_with_their_reader(client: httpx.Client) -> None:
    first, second = states(client, 2)
    assert second["time"] > first["time"]
    for _ in range(12):  # more than may look at a time
        states(client, 1)
        time.sleep(0.01)
