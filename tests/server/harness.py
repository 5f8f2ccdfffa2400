"""Real servers in processes of their own, on free ports, with the demo model in a small budget."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

REPO = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0
WAIT_SECONDS = 60.0
# The same engine as in process, so that results are the same.
ENGINE: dict[str, Any] = {
    "memory_budget": "128MiB",
    "logits_workspace": "8MiB",
    "max_running_requests": 16,
    "chunked_prefill_size": 128,
    "random_seed": 7,
}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]


class ServerProcess:
    """One server, from start to stop; its log is kept in memory, its sockets go to `folder`."""

    def __init__(self, *flags: str, folder: Path | None = None) -> None:
        self.log: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "seawall.cli.main", "serve", "demo", "--port=0", *FLAGS, *flags],
            cwd=REPO,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                **({} if folder is None else {"TMPDIR": str(folder)}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(START_SECONDS) or not self.url:
            self.kill()
            raise AssertionError("the server did not start:\n" + "".join(self.log))

    @property
    def pid(self) -> int:
        return self._process.pid

    def engine_pid(self) -> int:
        """Of the engine process that serves now."""
        found = httpx.get(f"{self.url}/server_info", timeout=60).json()
        return int(found["front"]["engine_pid"])

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)

    def wait_until_ready(self) -> None:
        wait_until(lambda: httpx.get(f"{self.url}/ready", timeout=60).status_code == 200)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        code = self._process.wait(60)
        self._reader.join(10)
        return code

    def stop(self) -> int:
        """End it as an operator would; returns its exit code."""
        if self._process.poll() is None:
            self.signal(signal.SIGTERM)
        code = self.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join(10)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.log.append(line)
            found = re.search(r"Ready in .* at (http://\S+)", line)
            if found:
                self.url = found[1]
                self._ready.set()
        self._ready.set()


def events(response: httpx.Response) -> list[str]:
    """What follows `data: ` in a stream; nothing else may stand in it."""
    found = []
    for line in response.iter_lines():
        if line:
            assert line.startswith("data: "), line
            found.append(line.removeprefix("data: "))
    return found


def wait_until(true: Callable[[], bool]) -> None:
    """Wait for what will be so unless something is broken."""
    for _ in range(int(WAIT_SECONDS / 0.02)):
        if true():
            return
        time.sleep(0.02)
    raise AssertionError("it never came")


def wait_idle(client: httpx.Client) -> dict[str, Any]:
    """The memory report once nothing is open; every page is back by then."""
    report: dict[str, Any] = {}

    def is_idle() -> bool:
        report.update(client.get("/memory").json())
        return report["front"]["open_samples"] == 0 and report["pages"]["in_use"] == 0

    wait_until(is_idle)
    return report
