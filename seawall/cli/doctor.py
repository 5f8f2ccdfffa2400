"""`seawall doctor`: checks this installation and this machine, and says what would mend it.

Imports nothing heavy itself: a broken torch is one of the things it reports.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from seawall.cli.command import DONE, FAILED
from seawall.core.errors import SeawallError
from seawall.core.units import human_bytes
from seawall.engine.planning import DEMO_FOLDER, read_json
from seawall.memory.host import available_host_bytes, default_cpu_budget

PYTHON = ((3, 11), (3, 14))
# What the project file asks for (a test holds the two together): at least, and below.
REQUIRED: Mapping[str, tuple[str, str]] = {
    "huggingface_hub": ("1.0", "3"),
    "jinja2": ("3.1.6", "4"),
    "msgspec": ("0.19", "1"),
    "numpy": ("2.0", "3"),
    "safetensors": ("0.5", "1"),
    "tokenizers": ("0.22", "1"),
    "torch": ("2.11", "2.14"),
    "tqdm": ("4.66", "5"),
}
OPTIONAL: Mapping[str, str] = {"transformers": "hf", "llguidance": "grammar", "ray": "ray"}
_TOLERANCE = 1e-4
_DEMO_BYTES = 256 << 20
_REFERENCE = "len_129"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report.

    Attributes:
        fix: what would mend it; empty if it is fine.
    """

    name: str
    text: str
    fix: str = ""


def run(arguments: argparse.Namespace) -> int:
    """Check everything; what is broken does not keep the rest from being checked."""
    findings: list[Finding] = []
    checks: tuple[Callable[[], Iterable[Finding]], ...] = (
        _python,
        _packages,
        _torch,
        _memory,
        _demo,
    )
    for check in checks:
        for finding in check():
            findings.append(finding)
            if not arguments.json:
                _say(finding)
    wrong = [finding for finding in findings if finding.fix]
    if arguments.json:
        made = {"ok": not wrong, "findings": [asdict(finding) for finding in findings]}
        sys.stdout.write(json.dumps(made) + "\n")
    else:
        sys.stdout.write(f"{len(wrong)} problems\n" if wrong else "all is well\n")
    return FAILED if wrong else DONE


def _say(finding: Finding) -> None:
    mark = "!!" if finding.fix else "ok"
    sys.stdout.write(f"{mark}  {finding.name:<16}{finding.text}\n")
    if finding.fix:
        sys.stdout.write(f"    {'':<16}-> {finding.fix}\n")
    sys.stdout.flush()


def _python() -> Iterable[Finding]:
    low, below = PYTHON
    fine = low <= sys.version_info[:2] < below
    yield Finding(
        name="python",
        text=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        fix="" if fine else "use Python 3.11, 3.12 or 3.13",
    )


def _packages() -> Iterable[Finding]:
    for name, (low, below) in REQUIRED.items():
        version = _version(name)
        fix = ""
        if version is None:
            fix = f"pip install '{name}>={low},<{below}'"
        elif not _numbers(low) <= _numbers(version) < _numbers(below):
            fix = f"{low} or newer, below {below}: pip install '{name}>={low},<{below}'"
        yield Finding(name=name, text=version or "missing", fix=fix)
    for name, extra in OPTIONAL.items():
        version = _version(name)
        yield Finding(name=name, text=version or f"not installed (extra {extra}; optional)")


def _torch() -> Iterable[Finding]:
    try:
        torch: Any = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        text = f"cannot be imported: {error}"
        yield Finding(name="threads", text=text, fix="install torch again")
        return
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    threads = torch.get_num_threads()
    yield Finding(
        name="threads",
        text=f"torch uses {threads} on {cores} cores",
        fix="" if threads <= cores else f"set OMP_NUM_THREADS={cores}: more than cores is slower",
    )
    devices: Any = importlib.import_module("seawall.engine.devices")
    runtime = devices.make_runtime(devices.choose_device({}).name)
    yield Finding(name="device", text=runtime.name)


def _memory() -> Iterable[Finding]:
    try:
        available = available_host_bytes()
    except SeawallError as error:
        yield Finding(name="memory", text=str(error), fix="pass --memory-budget to every command")
        return
    small = available < 2 * _DEMO_BYTES
    yield Finding(
        name="memory",
        text=f"{human_bytes(available)} available, control groups counted; the default budget "
        f"is {human_bytes(default_cpu_budget(available))}",
        fix=f"free some: even the demo wants {human_bytes(2 * _DEMO_BYTES)}" if small else "",
    )


def _demo() -> Iterable[Finding]:
    """The embedded model's logprobs against the numbers that came with it."""
    try:
        worst, count = _worst_difference()
    except (SeawallError, ImportError, OSError, RuntimeError) as error:
        yield Finding(name="demo model", text=str(error), fix="install the package again")
        return
    wrong = worst > _TOLERANCE
    yield Finding(
        name="demo model",
        text=f"{count} logprobs, at most {worst:.1e} from the reference (allowed {_TOLERANCE:.0e})",
        fix="this build of torch computes something else; install another and report this"
        if wrong
        else "",
    )


def _worst_difference() -> tuple[float, int]:
    engine_class = vars(importlib.import_module("seawall.offline.engine"))["Engine"]
    prompts: Any = read_json(DEMO_FOLDER / "reference.json")["prompts"]
    prompt = next(each for each in prompts if each["name"] == _REFERENCE)
    with engine_class(memory_budget=_DEMO_BYTES, dtype="float32", max_running_requests=4) as engine:
        result = engine.score([prompt["token_ids"]])[0]
    expected = prompt["prompt_logprobs"][1:]
    pairs = list(zip(result.token_logprobs, expected, strict=True))
    return max(abs(found - wanted) for found, wanted in pairs), len(pairs)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" is (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
