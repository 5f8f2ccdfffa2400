"""Check and measure the engine on one GPU, stage by stage, each in its own process.

    PYTHONPATH=. python3 scripts/gpu_engine.py --out DIR [--from STAGE] [--only STAGE ...]

Stages: tests, speed, decode. Each has a time limit; its numbers go to DIR/STAGE.json and its lines
to standard output as soon as they exist.

    tests    tests/gpu/test_engine_gpu.py
    speed    8B shapes, random weights: prompts uniform in [1, 512], outputs in [1, 128]
    decode   8B shapes: time of a decode step at several batch sizes, context 1,000
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from seawall import Engine
from seawall.benchmarks.workload import Workload, random_workload
from seawall.engine import assemble

LIMITS = {"tests": 200, "speed": 260, "decode": 100}
# Requests, logprobs, best ids, form of results, interval of the interpreter's thread switches.
RUNS = (
    (1000, True, 0, "lists", 0.005),
    (3000, True, 0, "lists", 0.005),
    (3000, True, 0, "columns", 0.0005),
    (3000, False, 0, "lists", 0.005),
)
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def say(*words: object) -> None:
    print(*words, flush=True)


def write(out: Path, name: str, value: object) -> None:
    (out / f"{name}.json").write_text(json.dumps(value, indent=1))


def tests(out: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=short", "--maxfail=8"]
    command += ["-p", "no:cacheprovider", "--durations=6", "tests/gpu/test_engine_gpu.py"]
    command += os.environ.get("PYTEST_ARGS", "").split()
    environment = {**os.environ, "SEAWALL_GPU": "1"}
    code = subprocess.run(command, check=False, cwd=ROOT, env=environment).returncode
    write(out, "tests", {"exit": code})


def matmul_rate(seconds: float) -> float:
    """TFLOP/s of a large bf16 product, over so long that the card is at its power limit."""
    n = 8192
    a = torch.randn(n, n, device="cuda").bfloat16()
    b = torch.randn(n, n, device="cuda").bfloat16()
    c = torch.empty_like(a)
    rate, start = 0.0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(200):
            torch.mm(a, b, out=c)
        torch.cuda.synchronize()
        rate = 200 * 2 * n**3 / (time.perf_counter() - begin) / 1e12
    return rate


class Watch:
    """Adds up host time by part of the loop, and GPU time by part of the step."""

    def __init__(self, engine: Engine) -> None:
        self.host: Counter[str] = Counter()
        self.pairs: dict[str, list[tuple[Any, Any]]] = {}
        self.steps: list[tuple[int, int]] = []
        assembly = engine._assembly  # noqa: SLF001 -- measured from inside
        core, runner = assembly.core, assembly.runner
        self._wrap(core.scheduler, "plan", "plan")
        self._wrap(core.scheduler, "apply", "apply")
        self._wrap(core.scheduler, "adjust", "adjust")
        self._wrap(core, "turn", "turn")
        self._wrap(runner, "launch", "launch", device=True, before=self._note)
        self._wrap(runner, "draw", "draw")
        self._wrap(runner, "_forward", "forward", device=True)
        self._wrap(runner.scorer, "score", "score", device=True)
        self._wrap(runner.scorer, "draw", "sample", device=True)
        for transfer in runner._transfers:  # noqa: SLF001
            self._wrap(transfer, "wait", "wait")

    def _note(self, plan: Any) -> None:
        self.steps.append((plan.num_rows, plan.num_tokens))

    def _wrap(
        self,
        owner: Any,
        method: str,
        name: str,
        device: bool = False,
        before: Callable[[Any], None] | None = None,
    ) -> None:
        inner = getattr(owner, method)

        def timed(*args: Any, **more: Any) -> Any:
            if before is not None:
                before(args[0])
            if device:
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
            begin = time.perf_counter()
            result = inner(*args, **more)
            self.host[name] += time.perf_counter() - begin
            if device:
                last.record()
                self.pairs.setdefault(name, []).append((first, last))
            return result

        setattr(owner, method, timed)

    def reset(self) -> None:
        """Start over."""
        self.host.clear()
        self.pairs.clear()
        self.steps.clear()

    def report(self) -> dict[str, Any]:
        """Seconds and counts since the last reset."""
        torch.cuda.synchronize()
        tokens = [t for _, t in self.steps]
        mixed = [t for r, t in self.steps if t > r]
        return {
            "host_s": {name: round(value, 2) for name, value in self.host.items()},
            "gpu_s": {
                name: round(sum(a.elapsed_time(b) for a, b in pairs) / 1000, 2)
                for name, pairs in self.pairs.items()
            },
            "steps": len(self.steps),
            "prefill_steps": len(mixed),
            "mean_tokens": round(sum(tokens) / max(1, len(tokens))),
            "mean_prefill_tokens": round(sum(mixed) / max(1, len(mixed))),
            "most_rows": max((r for r, _ in self.steps), default=0),
        }


def model_folder() -> str:
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(folder)


def open_8b(**changes: Any) -> Engine:
    return Engine(
        model_folder(),
        load_format="dummy",
        dtype="bfloat16",
        context_length=2048,
        skip_tokenizer_init=True,
        random_seed=1,
        **changes,
    )


def watch_start() -> dict[str, float]:
    """Seconds of each part of a start, filled in as they pass."""
    seconds: dict[str, float] = {}
    owners = (
        (assemble, "load_model"),
        (assemble, "warm_kernels"),
        (assemble, "warm_up"),
        (assemble.Runner, "capture"),
    )
    for owner, name in owners:
        inner = vars(owner)[name]

        def timed(*args: Any, inner: Any = inner, name: str = name, **more: Any) -> Any:
            begin = time.perf_counter()
            result = inner(*args, **more)
            torch.cuda.synchronize()
            seconds[name] = round(time.perf_counter() - begin, 1)
            return result

        setattr(owner, name, timed)
    return seconds


def one_run(
    engine: Engine, work: Workload, logprobs: bool, top_k: int = 0, form: str = "lists"
) -> float:
    start = time.perf_counter()
    engine.generate(
        input_ids=work.prompts,
        sampling_params=[
            {"max_new_tokens": n, "ignore_eos": True, "temperature": 1.0} for n in work.output_lens
        ],
        return_logprob=logprobs,
        logprob_start_len=0 if logprobs else -1,
        top_logprobs_num=top_k,
        logprob_format=form,
    )
    seconds = time.perf_counter() - start
    assert engine.flush_cache()
    return seconds


def memory_lines(engine: Engine) -> dict[str, Any]:
    free, total = torch.cuda.mem_get_info()
    report = engine.memory_report()
    arena = engine._assembly.arena  # noqa: SLF001
    lines = report["plan"]
    fixed = sum(arena.bytes(account) for account in lines)
    return {
        "budget": report["budget_bytes"],
        "in_use": total - free,
        "reserved": torch.cuda.memory_reserved(),
        "outside": total - free - torch.cuda.memory_reserved(),
        "allocated": torch.cuda.memory_allocated(),
        "arena": fixed,
        "transient_peak": torch.cuda.max_memory_allocated() - fixed,
        "reserved_peak": torch.cuda.max_memory_reserved(),
        "planned_transient": lines["activations"] + lines["logits"],
        "plan": lines,
        "measured": report["measured"],
        "max_total_tokens": engine.get_server_info()["max_total_num_tokens"],
        "violations": report["violations"],
    }


def kernel_times(engine: Engine) -> list[dict[str, Any]]:
    """Where the GPU's time goes, by kernel, in a smaller run."""
    work = random_workload(
        num_requests=400, input_range=(1, 512), output_range=(1, 128), vocab_size=128_000, seed=3
    )
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        one_run(engine, work, True)
    rows = [
        {"kernel": e.key[:70], "ms": round(e.self_device_time_total / 1e3, 1), "calls": e.count}
        for e in profile.key_averages()
    ]
    rows.sort(key=lambda row: -row["ms"])
    return rows[:22]


def speed(out: Path) -> None:
    found: dict[str, Any] = {"matmul_tflops": matmul_rate(3.0)}
    say(f"matmul loop {found['matmul_tflops']:.0f} TFLOP/s")
    parts = watch_start()
    start = time.perf_counter()
    with open_8b() as engine:
        found["start_s"] = time.perf_counter() - start
        found["start_parts"] = parts
        say(f"start {found['start_s']:.1f} s", parts)
        found["memory_start"] = memory_lines(engine)
        write(out, "speed", found)
        watch = Watch(engine)
        found["runs"] = []
        small = random_workload(
            num_requests=64,
            input_range=(1, 512),
            output_range=(1, 32),
            vocab_size=128_000,
            seed=2,
        )
        say(f"warm {one_run(engine, small, True):.1f} s")
        for count, logprobs, top_k, form, interval in RUNS:
            sys.setswitchinterval(interval)
            work = random_workload(
                num_requests=count,
                input_range=(1, 512),
                output_range=(1, 128),
                vocab_size=128_000,
                seed=1,
            )
            watch.reset()
            seconds = one_run(engine, work, logprobs, top_k, form)
            total = work.input_tokens + work.output_tokens
            flops = total * 15.0e9 + (total if logprobs else work.output_tokens) * 1.05e9
            figures = {
                "requests": count,
                "logprobs": logprobs,
                "top_k": top_k,
                "form": form,
                "switch_interval": interval,
                "input_tokens": work.input_tokens,
                "output_tokens": work.output_tokens,
                "seconds": round(seconds, 2),
                "total_tokens_per_s": round(total / seconds),
                "tflops": round(flops / seconds / 1e12),
                "of_matmul": round(flops / seconds / 1e12 / found["matmul_tflops"], 3),
                **watch.report(),
            }
            found["runs"].append(figures)
            say(json.dumps(figures))
            write(out, "speed", found)
        found["kernels"] = kernel_times(engine)
        for row in found["kernels"]:
            say(json.dumps(row))
        found["memory_end"] = memory_lines(engine)
        write(out, "speed", found)
        for when in ("memory_start", "memory_end"):
            short = {k: v for k, v in found[when].items() if k not in ("plan", "measured")}
            say(when, json.dumps(short))


def decode(out: Path) -> None:
    found = []
    with open_8b() as engine:
        for batch in (1, 32, 256, 1024):
            work = Workload(
                prompts=[[7 + i % 1000, *range(100, 1099)] for i in range(batch)],
                # Long enough that all still run when the last prompt has been computed.
                output_lens=[48 + batch // 6] * batch,
            )
            one_run(engine, work, False)
            watch = Watch(engine)
            one_run(engine, work, False)
            torch.cuda.synchronize()
            waits = watch.report()
            steps = [
                (first.elapsed_time(last), rows)
                for (first, last), (rows, tokens) in zip(
                    watch.pairs["launch"], watch.steps, strict=True
                )
                if rows == tokens == batch
            ]
            times = sorted(t for t, _ in steps)
            middle = times[len(times) // 2] if times else 0.0
            found.append({"batch": batch, "launch_gpu_ms": middle, "steps": len(times), **waits})
            say(json.dumps(found[-1]))
            write(out, "decode", found)


STAGES = {"tests": tests, "speed": speed, "decode": decode}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--from", dest="first", choices=STAGES, default="tests")
    parser.add_argument("--only", choices=STAGES, nargs="*")
    parser.add_argument("--run", choices=STAGES)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.run:
        try:
            STAGES[args.run](args.out)
        except BaseException:
            traceback.print_exc()
            for thread in threading.enumerate():
                say("thread", thread.name)
            os._exit(1)
        return 0
    names = args.only or list(STAGES)[list(STAGES).index(args.first) :]
    failed = []
    for name in names:
        start = time.time()
        command = [sys.executable, __file__, "--out", str(args.out), "--run", name]
        try:
            code = subprocess.run(command, timeout=LIMITS[name], check=False).returncode
        except subprocess.TimeoutExpired:
            code = -1
        say(
            f"-- {name}: {'done' if code == 0 else f'failed ({code})'}, {time.time() - start:.0f} s"
        )
        failed += [name] if code else []
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
