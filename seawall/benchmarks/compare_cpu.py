"""Output tokens a second on this CPU, side by side: Seawall and two ways of transformers.

What is measured, for each model and system, in a process of its own, one after another:

    seawall      Engine.generate over all requests
    batch        transformers' generate, 8 requests at a time in the order they came, padded on the
                 left, until the longest output of the 8 is done
    batch-sorted the same, sorted by output length: its best case, if lengths were known beforehand
    continuous   transformers' continuous batching, every request with its own length

All run the same model in float32 with the same threads and the same requests: prompts of 16 to 256
random ids, 16 to 128 output tokens, both uniform; greedy, the end token ignored, so that every
system writes exactly the tokens that were asked for. Time is from the first submission to the last
result, after a warm-up of a few requests; loading is not counted. Only requested tokens count.

Also: seconds of `import seawall`, and from the start of a process to its first token.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from seawall.benchmarks.workload import random_workload

SYSTEMS = ("seawall", "batch", "batch-sorted", "continuous")
INPUT_RANGE = (16, 256)
OUTPUT_RANGE = (16, 128)
_DEMO_FOLDER = Path(__file__).parent.parent / "demo_model"
_SECONDS = 3600
_FIRST_TOKEN = (
    "from seawall.offline.engine import Engine\n"
    "with Engine('demo', memory_budget='256MiB') as engine:\n"
    "    for _ in engine.generate('Once upon a time', {'max_new_tokens': 1}, stream=True):\n"
    "        print('token', flush=True)\n"
)
_STARTS = {"import_seawall_s": "import seawall; print('done')", "first_token_s": _FIRST_TOKEN}
_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run.

    Attributes:
        models: "demo", "dummy" (0.1B, random weights, made on the fly) or folders.
        num_requests: for the demo; `num_requests_dummy` for all others.
        threads: of every system; 0 for one a core.
    """

    models: tuple[str, ...] = ("demo", "dummy")
    systems: tuple[str, ...] = SYSTEMS
    num_requests: int = 256
    num_requests_dummy: int = 48
    threads: int = 0
    seed: int = 1


def compare(plan: Plan) -> dict[str, Any]:
    """Run it all; a system that breaks is reported with its error."""
    threads = plan.threads or os.cpu_count() or 1
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="seawall-compare-") as scratch:
        for model in plan.models:
            folder = _folder(model, Path(scratch))
            work_file = Path(scratch) / f"work-{len(runs)}.json"
            _write_work(plan, model, folder, work_file)
            outputs: dict[str, list[list[int]]] = {}
            for system in plan.systems:
                _say(f"{model}: {system} ...")
                run, ids = _run(system, folder, work_file, threads)
                outputs[system] = ids
                run |= {"model": model, "system": system, "same": _same(outputs, system)}
                runs.append(run)
                _say(f"{model}: {system} {run.get('output_throughput', run.get('error'))}")
    starts = {name: min(_start(code) for _ in range(_REPEATS)) for name, code in _STARTS.items()}
    return {
        "benchmark": "compare_cpu",
        "threads": threads,
        "plan": asdict(plan),
        "runs": runs,
        **starts,
    }


def table(summary: Mapping[str, Any]) -> str:
    """The result for people."""
    heads = f"{'model':<10}{'system':<13}{'requests':>9}{'seconds':>9}{'tokens/s':>10}"
    lines = [f"{heads}  ratio  tokens/cpu s  same"]
    for run in summary["runs"]:
        name = f"{Path(run['model']).name:<10}{run['system']:<13}"
        if "error" in run:
            lines.append(f"{name}  {run['error']}")
            continue
        ratio = _ratio(summary["runs"], run)
        lines.append(
            f"{name}{run['requests']:>9}{run['duration_s']:>9.1f}{run['output_throughput']:>10.0f}"
            f"{ratio:>7}{run['output_tokens'] / run['cpu_s']:>14.0f}{run['same']:>6.0%}"
        )
    lines.append("ratio: to `batch`, by the clock; tokens/cpu s: what a busy machine changes least")
    lines.append("same: requests with the output ids of the first system")
    lines += [f"{name:<20}{summary[name]:.2f}" for name in _STARTS]
    return "\n".join(lines) + "\n"


def _ratio(runs: list[dict[str, Any]], run: Mapping[str, Any]) -> str:
    for other in runs:
        if other["system"] == "batch" and other["model"] == run["model"] and "error" not in other:
            return f"{run['output_throughput'] / other['output_throughput']:.1f}x"
    return "-"


def _folder(model: str, scratch: Path) -> Path:
    if model == "demo":
        return _DEMO_FOLDER
    if model != "dummy":
        return Path(model)
    folder = scratch / "dummy"
    _child(["make-dummy", "--model", str(folder)], scratch / "made.json")
    return folder


def _write_work(plan: Plan, model: str, folder: Path, path: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    work = random_workload(
        num_requests=plan.num_requests if model == "demo" else plan.num_requests_dummy,
        input_range=INPUT_RANGE,
        output_range=OUTPUT_RANGE,
        vocab_size=config["vocab_size"],
        seed=plan.seed,
    )
    path.write_text(json.dumps(asdict(work)), encoding="utf-8")


def _run(
    system: str, folder: Path, work: Path, threads: int
) -> tuple[dict[str, Any], list[list[int]]]:
    result = work.with_suffix(f".{system}.json")
    arguments = ["--model", str(folder), "--work", str(work), "--threads", str(threads)]
    error = _child([system, *arguments], result)
    if error is not None:
        return {"error": error}, []
    made: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    ids: list[list[int]] = made.pop("output_ids")
    return made, ids


def _child(arguments: list[str], result: Path) -> str | None:
    """Run a peer in a process of its own; returns the last line of its error, if it failed."""
    done = subprocess.run(
        [sys.executable, "-m", "seawall.benchmarks.peers", *arguments, "--result", str(result)],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if done.returncode == 0:
        return None
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return f"exit code {done.returncode}: {last}"


def _same(outputs: Mapping[str, list[list[int]]], system: str) -> float:
    first = next(iter(outputs.values()))
    pairs = list(zip(first, outputs[system], strict=False))
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else 0.0


def _start(code: str) -> float:
    """Seconds from starting a process to the first line it prints."""
    start = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        return time.perf_counter() - start


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def main() -> None:
    """`python -m seawall.benchmarks.compare_cpu [RESULT.json]` with the defaults."""
    summary = compare(Plan())
    sys.stdout.write(table(summary))
    line = json.dumps(summary)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(line + "\n", encoding="utf-8")
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
