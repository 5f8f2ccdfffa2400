"""Check and measure the logits path on one GPU, stage by stage, each in its own process.

    PYTHONPATH=. python3 scripts/gpu_logits.py --out DIR [--from STAGE] [--only STAGE]

Stages: parity, sweep, table, memory. Each has a time limit; its numbers go to DIR/STAGE.json and
its lines to standard output as soon as they exist. `table` uses the best shapes that `sweep`
found in DIR, else the fixed ones.
"""

import argparse
import json
import subprocess
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

from logits_checks import CHECKS

from seawall.benchmarks.logits import time_of
from seawall.kernels.logits_configs import FEW_HALF, MANY_HALF, Configs, TileConfig
from seawall.sampling import cuda
from seawall.sampling.sampler import DrawInput
from seawall.sampling.tiles import LogitsInput

LIMITS = {"parity": 150, "sweep": 100, "table": 100, "memory": 40}
WORKERS = 15
SEEDS = {
    "noise": 4, "scores": 48, "ties": 16, "draws": 32, "faults": 6, "bits": 12,
    "chances": 20, "workspaces": 6, "public": 12, "waits": 12,
    "group": 6,
}  # fmt: skip
HIDDEN, VOCAB = 4096, 128_256
DEVICE = torch.device("cuda", 0)


def shape(rows: int, ids: int, inner: int, warps: int, stages: int, **more: object) -> TileConfig:
    return TileConfig(rows=rows, ids=ids, inner=inner, warps=warps, stages=stages, **more)


MANY = {
    "128x256x64 w8 s4 bulk": MANY_HALF,
    "128x256x64 w8 s3 bulk": shape(128, 256, 64, 8, 3, bulk=True),
    "128x256x64 w8 s4 bulk loop": shape(128, 256, 64, 8, 4, bulk=True, persistent=True),
    "128x256x64 w8 s3 bulk loop": shape(128, 256, 64, 8, 3, bulk=True, persistent=True),
    "128x256x128 w8 s2 bulk": shape(128, 256, 128, 8, 2, bulk=True),
    "256x128x64 w8 s3 bulk": shape(256, 128, 64, 8, 3, bulk=True),
    "256x128x64 w8 s4 bulk loop": shape(256, 128, 64, 8, 4, bulk=True, persistent=True),
    "128x128x64 w4 s3 bulk": shape(128, 128, 64, 4, 3, bulk=True),
    "128x128x128 w8 s3 bulk": shape(128, 128, 128, 8, 3, bulk=True),
    "128x256x64 w8 s4 bulk g8": shape(128, 256, 64, 8, 4, bulk=True, group=8),
    "128x256x64 w8 s4 bulk g32": shape(128, 256, 64, 8, 4, bulk=True, group=32),
    "128x256x64 w8 s3": shape(128, 256, 64, 8, 3),
}
FEW = {
    "64x256x64 w8 s4 bulk": FEW_HALF,
    "64x64x128 w4 s3 bulk": shape(64, 64, 128, 4, 3, bulk=True),
    "64x64x128 w4 s4 bulk": shape(64, 64, 128, 4, 4, bulk=True),
    "64x128x64 w4 s4 bulk": shape(64, 128, 64, 4, 4, bulk=True),
    "64x128x128 w4 s4 bulk": shape(64, 128, 128, 4, 4, bulk=True),
    "64x128x128 w8 s4 bulk": shape(64, 128, 128, 8, 4, bulk=True),
    "64x32x256 w4 s4 bulk": shape(64, 32, 256, 4, 4, bulk=True),
    "64x64x128 w4 s4": shape(64, 64, 128, 4, 4),
}


def say(*words: object) -> None:
    print(*words, flush=True)


def write(out: Path, name: str, value: object) -> None:
    (out / f"{name}.json").write_text(json.dumps(value, indent=1))


def inputs(rows: int, vocab: int = VOCAB, hidden_size: int = HIDDEN) -> tuple[torch.Tensor, ...]:
    g = torch.Generator(DEVICE).manual_seed(rows)
    hidden = torch.randn(rows, hidden_size, generator=g, device=DEVICE).bfloat16()
    weight = torch.empty(vocab, hidden_size, device=DEVICE, dtype=torch.bfloat16)
    weight.normal_(generator=g).mul_(2 / hidden_size**0.5)
    return hidden, weight, torch.randint(vocab, (rows,), generator=g, device=DEVICE)


def use(many: TileConfig, few: TileConfig) -> None:
    """Serve bfloat16 calls by these shapes from now on, in this process."""
    fixed = cuda.configs_for

    def chosen(itemsize: int) -> Configs:
        return Configs(many=many, few=few) if itemsize == 2 else fixed(itemsize)

    cuda.configs_for = chosen


def parity_jobs(checks: str) -> list[tuple[str, int]]:
    names = checks.split(",") if checks else list(SEEDS)
    return [(name, seed) for name in names for seed in range(SEEDS[name])]


def parity_worker(part: int, out: Path, checks: str) -> None:
    torch.set_num_threads(1)  # the CPU's route runs beside those of the other workers
    failures, done = [], 0
    jobs = parity_jobs(checks)
    for name, seed in jobs[part::WORKERS]:
        try:
            CHECKS[name](seed, "cuda")
            done += 1
        except Exception as error:
            failures.append([name, seed, f"{type(error).__name__}: {error}"[:400]])
            say("FAIL", name, seed, traceback.format_exc()[-1500:])
        write(out, f"parity_{part}", {"done": done, "failures": failures})


def in_parallel(stage: str, count: int, out: Path, limit: float, checks: str = "") -> None:
    command = [sys.executable, __file__, "--out", str(out), "--worker", stage]
    command += ["--checks", checks, "--part"]
    children = [subprocess.Popen([*command, str(part)]) for part in range(count)]
    end = time.time() + limit
    for child in children:
        try:
            child.wait(max(0.1, end - time.time()))
        except subprocess.TimeoutExpired:
            child.kill()
            say("out of time:", stage, "worker")


def parity(out: Path, checks: str) -> None:
    in_parallel("parity", WORKERS, out, LIMITS["parity"] - 10, checks)
    total = {"done": 0, "failures": []}
    for path in out.glob("parity_*.json"):
        one = json.loads(path.read_text())
        total["done"] += one["done"]
        total["failures"] += one["failures"]
    write(out, "parity", total)
    wanted = len(parity_jobs(checks))
    say(f"parity: {total['done']} of {wanted} passed, failures {total['failures']}")


def graphed(call):
    """The call as a captured graph, so that the host's time does not count."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def partials_call(config: TileConfig, rows: int, data: tuple[torch.Tensor, ...], sample: bool):
    hidden, weight, targets = data
    use(config, config)
    source = LogitsInput(hidden=hidden, weight=weight)
    if sample:
        draw = DrawInput(seeds=targets, positions=targets, top_k=None, top_p=None, min_p=None)
        return lambda: cuda.sample_rows(source, draw, 64 << 20)
    ask = cuda.Ask(targets=targets)
    return lambda: cuda.score_rows(source, ask, 64 << 20)


def sweep_list() -> list[tuple[str, str, TileConfig, int, bool]]:
    jobs = [("many", name, config, 8192, False) for name, config in MANY.items()]
    return jobs + [("few", name, config, 64, True) for name, config in FEW.items()]


def sweep_worker(part: int, out: Path, _: str) -> None:
    """Compile one shape into the cache."""
    kind, name, config, rows, sample = sweep_list()[part]
    try:
        partials_call(config, rows, inputs(rows, 4096), sample)()
        torch.cuda.synchronize()
    except Exception as error:
        say("cannot run", kind, name, f"{type(error).__name__}: {error}"[:300])


def sweep(out: Path, _: str) -> None:
    in_parallel("sweep", len(sweep_list()), out, 45)
    found: dict[str, list[object]] = {"many": [], "few": []}
    data = {rows: inputs(rows) for rows in (8192, 64)}
    one = tuple(t[:1] if i != 1 else t for i, t in enumerate(data[64]))
    logits = torch.empty(8192, VOCAB, dtype=torch.bfloat16, device=DEVICE)
    bare, _ = time_of(lambda: torch.mm(data[8192][0], data[8192][1].T, out=logits), DEVICE, 2.0)
    say(f"bare product of 8192 rows: {bare:.3f} ms")
    del logits
    for kind, name, config, rows, sample in sweep_list():
        try:
            call = partials_call(config, rows, data[rows], sample)
            call = graphed(call) if kind == "few" else call
            ms, _ = time_of(call, DEVICE, 2.0 if kind == "many" else 0.4)
            alone = None
            if kind == "few":
                alone, _ = time_of(graphed(partials_call(config, 1, one, True)), DEVICE, 0.4)
        except Exception as error:
            say("failed", kind, name, f"{type(error).__name__}: {error}"[:300])
            continue
        found[kind].append({"name": name, "ms": ms, "one_row_ms": alone, "config": asdict(config)})
        say(f"{kind:5} {name:30} {ms:8.3f} ms", "" if alone is None else f"1 row {alone:.3f} ms")
        write(out, "sweep", {"bare_ms": bare, **found})
    for kind in found:
        # Few rows are judged at one row too: decoding alone is the case that waits longest.
        found[kind].sort(key=lambda entry: entry["ms"] + (entry["one_row_ms"] or 0.0))
        say("best", kind, found[kind][0]["name"] if found[kind] else "none")
    write(out, "sweep", {"bare_ms": bare, **found})


def best_shapes(out: Path) -> tuple[TileConfig, TileConfig]:
    path = out / "sweep.json"
    if not path.exists():
        return MANY_HALF, FEW_HALF
    found = json.loads(path.read_text())
    shapes = []
    for kind, fixed in (("many", MANY_HALF), ("few", FEW_HALF)):
        entries = sorted(found[kind], key=lambda e: e["ms"] + (e["one_row_ms"] or 0.0))
        shapes.append(TileConfig(**entries[0]["config"]) if entries else fixed)
    return shapes[0], shapes[1]


def exponential_trick(hidden: torch.Tensor, weight: torch.Tensor, heat: torch.Tensor):
    logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    probs = torch.softmax(logits / heat[:, None], -1)
    return (probs / torch.empty_like(probs).exponential_()).argmax(-1)


def float_chunks(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor):
    parts = []
    for i in range(0, hidden.shape[0], 2048):
        logprobs = (hidden[i : i + 2048] @ weight.T).float().log_softmax(-1)
        parts.append(logprobs.gather(1, targets[i : i + 2048, None])[:, 0])
    return torch.cat(parts)


def table(out: Path, _: str) -> None:
    many, few = best_shapes(out)
    use(many, few)
    say("shapes:", many, few)
    result: dict[str, object] = {"many": asdict(many), "few": asdict(few), "score": {}, "draw": {}}
    hidden, weight, targets = inputs(8192)
    source = LogitsInput(hidden=hidden, weight=weight)
    logits = torch.empty(8192, VOCAB, dtype=torch.bfloat16, device=DEVICE)
    errors(source, targets, result)
    write(out, "table", result)
    plain, best = cuda.Ask(targets=targets), cuda.Ask(targets=targets, top_k=20)
    calls = {
        "bare": lambda: torch.mm(hidden, weight.T, out=logits),
        "logprob": lambda: cuda.score_rows(source, plain, 64 << 20),
        "bare again": lambda: torch.mm(hidden, weight.T, out=logits),
        "k=20": lambda: cuda.score_rows(source, best, 64 << 20),
        "k=20, 512 MiB": lambda: cuda.score_rows(source, best, 512 << 20),
        "chunks": lambda: float_chunks(hidden, weight, targets),
        "logprob again": lambda: cuda.score_rows(source, plain, 64 << 20),
    }
    times = {}
    for name, call in calls.items():
        times[name], _ = time_of(call, DEVICE, 4.0)
        ratio = times[name] / times["bare"]
        say(f"8192 rows {name:16} {times[name]:8.3f} ms  {ratio:.3f} of bare")
        result["score"] = times
        write(out, "table", result)
    say(f"chunks / logprob: {times['chunks'] / times['logprob']:.2f}")
    del logits
    draws(hidden, weight, targets, result, out)


def draws(hidden, weight, targets, result, out: Path) -> None:
    heat = torch.full((hidden.shape[0],), 0.8, device=DEVICE)
    for rows in (1, 16, 64, 65, 128, 256, 512, 1024, 2048, 3000):
        h, t, heat_R = hidden[:rows], targets[:rows], heat[:rows]
        source = LogitsInput(hidden=h, weight=weight, temperature=heat_R)
        draw = DrawInput(seeds=t, positions=t, top_k=None, top_p=None, min_p=None)
        wrap = graphed if rows <= 1024 else (lambda call: call)
        ours, _ = time_of(wrap(lambda: cuda.sample_rows(source, draw, 64 << 20)), DEVICE, 0.7)
        eager, _ = time_of(lambda: cuda.sample_rows(source, draw, 64 << 20), DEVICE, 0.3)
        peer, _ = time_of(wrap(lambda: exponential_trick(h, weight, heat_R)), DEVICE, 0.7)
        result["draw"][rows] = {"ours": ours, "ours_eager": eager, "peer": peer}
        say(
            f"draw {rows:5} rows {ours:8.3f} ms, not graphed {eager:8.3f}, "
            f"peer {peer:8.3f} ms, {peer / ours:.2f} times"
        )
        write(out, "table", result)
    extra = {}
    for rows in (1, 64, 1024):
        h, t = hidden[:rows], targets[:rows]
        source = LogitsInput(hidden=h, weight=weight, temperature=heat[:rows])
        best = cuda.Ask(targets=t, top_k=20)
        for name, filters in {"top_k 50": (50, None), "top_p 0.9": (None, 0.9)}.items():
            draw = DrawInput(seeds=t, positions=t, top_k=filters[0], top_p=filters[1], min_p=None)
            ms, _ = time_of(lambda draw=draw: cuda.sample_rows(source, draw, 64 << 20), DEVICE, 0.4)
            extra[f"{rows} rows {name}"] = ms
        ms, _ = time_of(lambda: cuda.score_rows(source, best, 64 << 20), DEVICE, 0.4)
        extra[f"{rows} rows k=20 logprobs"] = ms
    say("also:", {name: round(ms, 3) for name, ms in extra.items()})
    result["also"] = extra
    write(out, "table", result)


def errors(source: LogitsInput, targets: torch.Tensor, result: dict[str, object]) -> None:
    """Largest error against float64 and the ids of the best against float32, on some rows."""
    got = cuda.score_rows(source, cuda.Ask(targets=targets, top_k=20), 64 << 20)
    rows = slice(0, 8192, 64)
    wide = source.hidden[rows].double()
    exact = torch.cat([wide @ part.double().T for part in source.weight.split(8192)], 1)
    logprobs = exact.log_softmax(-1)
    error = (got.logprobs[rows].double() - logprobs.gather(1, targets[rows, None])[:, 0]).abs()
    values, ids = exact.topk(21)
    clear = values[:, :20] - values[:, 1:] > 1e-5
    clear[:, 1:] &= clear[:, :-1].clone()
    wrong = int(((got.top_ids[rows] != ids[:, :20]) & clear).sum())
    single = source.hidden[rows].float() @ source.weight.float().T
    differ = int((got.top_ids[rows] != single.topk(20).indices).sum())
    top = (got.top_logprobs[rows].double() - logprobs.topk(20).values).abs().max()
    result["error"] = {
        "logprobs": float(error.max()),
        "top": float(top),
        "wrong_ids": wrong,
        "ids_unlike_float32": differ,
    }
    say("error against float64:", result["error"])


def memory(out: Path, _: str) -> None:
    found = []
    cases = [(10_000, 150_000, 4096, 20, 64), (10_000, 150_000, 4096, 0, 64)]
    cases += [
        (64, 128_256, 1024, 300, 64),
        (64, 256_000, 1024, 100, 64),
        (3000, 128_256, 1024, 20, 16),
        (300, 50_001, 513, 8, 8),
    ]
    for rows, vocab, hidden_size, k, mib in cases:
        hidden, weight, targets = inputs(rows, vocab, hidden_size)
        source = LogitsInput(hidden=hidden, weight=weight)
        ask = cuda.Ask(targets=targets, top_k=k, rank=True)
        draw = DrawInput(seeds=targets, positions=targets, top_k=50, top_p=0.9, min_p=None)
        calls = {
            "score": lambda: cuda.score_rows(source, ask, mib << 20),
            "draw": lambda: cuda.sample_rows(source, draw, mib << 20),
        }
        for name, call in calls.items():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            kept = call()
            torch.cuda.synchronize()
            extra = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
            fits = extra <= mib << 20
            say(f"{name} [{rows} x {vocab}] k={k}: {extra / 2**20:.2f} of {mib} MiB, fits {fits}")
            found.append({"what": name, "shape": [rows, vocab, k], "bytes": extra, "fits": fits})
            write(out, "memory", found)
            del kept
            assert torch.cuda.memory_allocated() == before
        del hidden, weight, targets, source


STAGES = {"parity": parity, "sweep": sweep, "table": table, "memory": memory}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--from", dest="first", choices=STAGES, default="parity")
    parser.add_argument("--only", choices=STAGES)
    parser.add_argument("--run", choices=STAGES)
    parser.add_argument("--worker", choices=["parity", "sweep"])
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--checks", default="", help="of parity, comma-separated; default all")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.worker:
        {"parity": parity_worker, "sweep": sweep_worker}[args.worker](
            args.part, args.out, args.checks
        )
        return 0
    if args.run:
        STAGES[args.run](args.out, args.checks)
        return 0
    names = [args.only] if args.only else list(STAGES)[list(STAGES).index(args.first) :]
    failed = []
    for name in names:
        start = time.time()
        command = [sys.executable, __file__, "--out", str(args.out), "--run", name]
        command += ["--checks", args.checks]
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
