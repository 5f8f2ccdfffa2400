"""Health, information, metrics, text routes, and what changes the engine between requests."""

import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.harness import ServerProcess, wait_idle

SECONDS = 2
WAKE_UPS = 100  # a second; a loop that polls each millisecond has ten times as many


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/health_generate"])
def test_health(client: httpx.Client, path: str) -> None:
    assert client.get(path).json() == {"status": "ok"}


def test_information(client: httpx.Client) -> None:
    for path in ("/get_server_info", "/server_info"):
        info = client.get(path).json()
        assert info["model_path"] == "demo"
        assert info["front"]["engine_up"] == 1
        assert "running" in info["internal_states"][0]
    for path in ("/get_model_info", "/model_info"):
        assert client.get(path).json()["max_model_len"] == 1024


def test_memory_report_names_owner_of_every_page(client: httpx.Client) -> None:
    report = wait_idle(client)
    pages = report["pages"]
    assert pages["total"] == pages["free"] + pages["cached"] + pages["quarantined"]
    assert sum(report["plan"].values()) <= report["budget_bytes"]
    for line, found in report["measured"].items():
        assert found["peak"] <= report["plan"][line]


def test_metrics_grow_with_requests(client: httpx.Client) -> None:
    def read() -> dict[str, float]:
        text = client.get("/metrics").text
        return {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if not line.startswith("#")
        }

    before = read()
    body = {"input_ids": [6, 70, 80], "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
    assert client.post("/generate", json=body).status_code == 200
    after = read()
    label = '{model_name="demo"}'
    for name, grown in (
        ("sglang:prompt_tokens_total", 3),
        ("vllm:generation_tokens_total", 5),
        ("sglang:num_requests_total", 1),
        ("sglang:time_to_first_token_seconds_count", 1),
        ("vllm:e2e_request_latency_seconds_count", 1),
    ):
        assert after[name + label] - before.get(name + label, 0) == grown, name
    assert after["sglang:num_running_reqs" + label] == 0
    report = client.get("/memory").json()
    for line, planned in report["plan"].items():
        name = f'seawall:device_memory_plan_bytes{{account="{line}",model_name="demo"}}'
        if line in report["measured"]:
            assert after[name] == planned
    owned = [value for name, value in after.items() if name.startswith("seawall:pages{")]
    assert sum(owned) == report["pages"]["total"]


def test_metrics_text_is_well_formed(client: httpx.Client) -> None:
    for line in client.get("/metrics").text.splitlines():
        assert line.startswith("# ") or re.fullmatch(r"[a-z_:0-9A-Z]+\{[^}]*\} \S+", line), line


def test_text_and_ids(client: httpx.Client) -> None:
    found = client.post("/tokenize", json={"prompt": "A fox"}).json()
    plain = client.post("/tokenize", json={"prompt": "A fox", "add_special_tokens": False}).json()
    assert found["tokens"][1:] == plain["tokens"]
    assert found["count"] == len(found["tokens"])
    back = client.post("/detokenize", json={"tokens": plain["tokens"]}).json()
    assert back == {"prompt": "A fox", "text": "A fox"}
    many = client.post("/detokenize", json={"tokens": [plain["tokens"], []]}).json()
    assert many["text"] == ["A fox", ""]
    info = client.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|end_of_text|>"
    assert client.post("/tokenize", json={"prompt": 5}).status_code == 400
    assert client.post("/detokenize", json={"tokens": [-5]}).status_code == 400


def test_flush_cache(client: httpx.Client) -> None:
    body = {
        "text": "Once upon a time there was a fox who",
        "sampling_params": {"max_new_tokens": 16},
    }
    client.post("/generate", json=body)
    assert wait_idle(client)["pages"]["cached"] > 0
    for method in ("GET", "POST"):
        assert client.request(method, "/flush_cache").status_code == 200
    assert client.get("/memory").json()["pages"]["cached"] == 0


def test_memory_can_be_released_for_a_while(client: httpx.Client) -> None:
    prompt: dict[str, Any] = {"input_ids": [6, 70], "sampling_params": {"temperature": 0}}
    before = client.post("/generate", json=prompt).json()["output_ids"]
    released = client.post("/release_memory_occupation", json={"tags": ["kv_cache", "weights"]})
    assert released.status_code == 200, released.text
    assert client.get("/memory").json()["measured"]["kv"]["now"] == 0
    turned_away = client.post("/generate", json=prompt)
    assert turned_away.status_code == 503
    assert "released" in turned_away.json()["message"]
    assert client.post("/resume_memory_occupation").status_code == 200
    assert client.post("/generate", json=prompt).json()["output_ids"] == before
    assert client.post("/release_memory_occupation", json={"tags": ["x"]}).status_code == 400


def test_weights_from_disk(client: httpx.Client) -> None:
    body = {"model_path": "demo", "weight_version": "v2"}
    answer = client.post("/update_weights_from_disk", json=body)
    assert answer.status_code == 200, answer.text
    made = client.post("/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 1}})
    assert made.json()["meta_info"]["weight_version"] == "v2"
    assert client.post("/update_weights_from_disk", json={}).status_code == 400
    wrong = client.post("/update_weights_from_disk", json={"model_path": "no/such/folder"})
    assert wrong.status_code == 400


def test_request_id_comes_back(client: httpx.Client) -> None:
    given = client.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"]
    assert given == "abc-1"
    odd = client.get("/health", headers={"x-request-id": "a b\tc"}).headers["x-request-id"]
    assert re.fullmatch(r"[0-9a-f]{32}", odd)


def test_openapi_document_names_the_routes(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/generate", "/v1/completions", "/v1/chat/completions", "/memory"} <= paths.keys()
    names = [route["operationId"] for methods in paths.values() for route in methods.values()]
    assert len(set(names)) == len(names)


def test_documented_fields_are_those_that_are_read(client: httpx.Client) -> None:
    """A body with every documented field, of the wrong type, is refused for that alone."""
    for path, methods in client.get("/openapi.json").json()["paths"].items():
        for method, route in methods.items():
            if "requestBody" not in route or not path.startswith(("/generate", "/v1", "/tok")):
                continue
            schema = route["requestBody"]["content"]["application/json"]["schema"]
            fields = {**dict.fromkeys(schema["properties"], False), "model": "demo"}
            response = client.request(method, path, json=fields)
            assert response.status_code == 400, path
            assert "x-seawall-ignored" not in response.headers
            assert "not built" not in response.json()["message"]


def test_unknown_routes_and_methods_have_the_error_body(client: httpx.Client) -> None:
    for response, status in ((client.get("/nothing"), 404), (client.get("/v1/completions"), 405)):
        assert response.status_code == status
        assert response.json()["error"]["message"]


def test_an_idle_server_sleeps(server: ServerProcess, client: httpx.Client) -> None:
    """Nothing polls: both processes wake up a few times a second, whatever the machine does."""
    wait_idle(client)
    pids = (server.pid, server.engine_pid())
    before = [wake_ups(pid) for pid in pids]
    time.sleep(SECONDS)
    for pid, was in zip(pids, before, strict=True):
        assert wake_ups(pid) - was < SECONDS * WAKE_UPS


def test_front_process_has_no_torch(server: ServerProcess) -> None:
    front, engine = (
        Path(f"/proc/{pid}/maps").read_text() for pid in (server.pid, server.engine_pid())
    )
    assert "libtorch" in engine
    assert "libtorch" not in front


def wake_ups(pid: int) -> int:
    """How often the threads of a process went to sleep by themselves."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(
        int(line.split()[1])
        for text in texts
        for line in text.splitlines()
        if line.startswith("voluntary_ctxt_switches")
    )
