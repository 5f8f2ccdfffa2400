"""`seawall top`: the load line of a running server in the terminal, drawn again every second."""

import argparse
import json
import shutil
import sys
import time
import urllib.error
import urllib.request
from typing import Any

from seawall.cli.command import DONE, CommandError
from seawall.core.units import human_bytes

_TIMEOUT = 10.0
_NAME_WIDTH = 14
_FIGURES_WIDTH = 34
_LEAST_BAR = 10
# Clears the screen and goes to its first line.
_HOME = "\x1b[2J\x1b[H"


def run(arguments: argparse.Namespace) -> int:
    """Draw until interrupted, or once."""
    while True:
        text = _screen(arguments.base_url.rstrip("/"), arguments.api_key)
        if arguments.once:
            sys.stdout.write(text)
            return DONE
        sys.stdout.write(_HOME + text)
        sys.stdout.flush()
        time.sleep(arguments.interval)


def _screen(url: str, key: str | None) -> str:
    report, info = _get(f"{url}/memory", key), _get(f"{url}/server_info", key)
    counts, front = info["internal_states"][0], info["front"]
    pages = report["pages"]
    lines = [
        f"{front['served_model_name']} at {url}",
        f"running {counts['running']}  waiting {counts['waiting']}  steps {counts['steps']}  "
        f"restarts {front['engine_restarts']:.0f}",
        "pages " + "  ".join(f"{name} {count:,}" for name, count in pages.items()),
        "",
        *_accounts(report),
        "",
        *_accounts(report["host"]),
    ]
    return "\n".join(lines) + "\n"


def _accounts(part: dict[str, Any]) -> list[str]:
    """A line an account: now as a bar, the peak as a mark, in the plan's width."""
    width = max(shutil.get_terminal_size().columns - _NAME_WIDTH - _FIGURES_WIDTH - 4, _LEAST_BAR)
    lines = []
    for name, planned in part["plan"].items():
        found = part["measured"].get(name)
        if not planned or found is None:
            continue
        bar = _bar(found["now"] / planned, found["peak"] / planned, width)
        figures = f"{human_bytes(found['now'])}, peak {human_bytes(found['peak'])}"
        text = f"{figures} of {human_bytes(planned)}"
        lines.append(f"{name[:_NAME_WIDTH].ljust(_NAME_WIDTH)} [{bar}] {text}")
    return lines


def _bar(now: float, peak: float, width: int) -> str:
    cells = ["#" if at < round(now * width) else "." for at in range(width)]
    cells[min(max(round(peak * width) - 1, 0), width - 1)] = "!" if peak > 1 else "|"
    return "".join(cells)


def _get(url: str, key: str | None) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise CommandError(f"--base-url: got {url!r}; give http://host:port")
    request = urllib.request.Request(url)
    if key is not None:
        request.add_header("authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except (urllib.error.URLError, OSError) as error:
        raise CommandError(f"{url}: {error}; is a server running there?") from None
