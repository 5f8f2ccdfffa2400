"""`seawall serve` as a command: what it prints, and how it fails."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.harness import FLAGS, REPO, ServerProcess


def run(*words: str, module: str = "seawall.cli.main") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_plan_and_address_are_printed(server: ServerProcess) -> None:
    text = "".join(server.log)
    assert "budget" in text
    assert f"demo at {server.url}" in text


def test_taken_port_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", "demo", f"--port={port}", *FLAGS)
    assert done.returncode == 1
    assert "cannot be had" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no/such/folder"], "no/such/folder"),
        (["demo", "--memory-budget=1MiB"], "budget"),
    ],
)
def test_engine_that_cannot_start_ends_the_server(words: list[str], said: str) -> None:
    done = run("serve", *words, "--port=0")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("seawall: ")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_extra_the_fix_is_named(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['uvicorn'] = None\n", encoding="utf-8"
    )
    done = subprocess.run(
        [sys.executable, "-m", "seawall.cli.main", "serve", "demo"],
        cwd=REPO,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert "seawall[server]" in done.stderr
    assert done.stderr.count("\n") == 1


def test_launch_server_takes_the_names_of_sglang() -> None:
    done = run("--help", module="seawall.launch_server")
    assert done.returncode == 0
    for flag in ("--model-path", "--mem-fraction-static", "--served-model-name", "--api-key"):
        assert flag in done.stdout


def test_log_lines_can_be_json_and_hold_no_prompt() -> None:
    process = ServerProcess("--log-format=json", "--log-level=info", "--served-model-name=m")
    answer: Any = httpx.post(f"{process.url}/generate", json={"text": "secret words"}, timeout=60)
    assert answer.status_code == 200
    assert httpx.get(f"{process.url}/v1/models", timeout=60).json()["data"][0]["id"] == "m"
    assert process.stop() == 0
    lines = [json.loads(line) for line in process.log if line.startswith("{")]
    assert any("POST /generate 200" in line["message"] for line in lines)
    assert "secret" not in "".join(process.log)


def test_top_shows_each_account_in_its_plan(server: ServerProcess) -> None:
    done = run("top", "--once", f"--base-url={server.url}")
    assert done.returncode == 0, done.stderr
    report = httpx.get(f"{server.url}/memory", timeout=60).json()
    for name, planned in report["plan"].items():
        assert any(line.startswith(name) for line in done.stdout.splitlines()) == (planned > 0)
    assert "free" in done.stdout
    gone = run("top", "--once", "--base-url=http://127.0.0.1:9")
    assert gone.returncode == 1
    assert gone.stderr.count("\n") == 1
