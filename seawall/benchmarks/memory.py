"""Memory: measured peaks against the plan, growth over a long run, the speed of the prefix tree.

What is measured:

    peaks   engines of several shapes serve the same random requests, with logprobs; for each plan
            line the largest share of it that was ever taken. More than 1 is a violation.
    growth  one engine serves the same requests round after round; resident bytes of the process
            and pages lost, from the end of the first third of the rounds to the end of the last.
    tree    operations on a prefix tree without any model: the time to insert prompts until it
            holds so many tokens, to match them, and to evict them again.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from seawall.benchmarks.workload import random_workload
from seawall.cache.pages import PageLedger
from seawall.cache.prefix import PrefixKey
from seawall.cache.radix import RadixCache
from seawall.offline.engine import Engine

_VOCAB = 32_000
_EVICT_PAGES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRate:
    """One operation on a tree of one page size.

    Attributes:
        tokens: that one operation is about.
        per_second: operations.
        micros: of one operation.
    """

    page_size: int
    operation: str
    tokens: int
    cached_tokens: int
    per_second: float
    micros: float


def tree_rates(
    page_sizes: Sequence[int], *, cached_tokens: int, prompt_tokens: int
) -> list[TreeRate]:
    """Insert prompts of which pairs share their first half, match them, and evict them."""
    rates = []
    for page_size in page_sizes:
        rates += _rates(page_size, cached_tokens, prompt_tokens - prompt_tokens % page_size)
    return rates


def _rates(page_size: int, cached_tokens: int, prompt_tokens: int) -> list[TreeRate]:
    # Every second prompt adds half of itself only.
    prompts = _prompts(max(4 * cached_tokens // (3 * prompt_tokens), 1), prompt_tokens)
    pages_each = prompt_tokens // page_size
    ledger = PageLedger(len(prompts) * pages_each, debug=False)
    tree, owner = RadixCache(ledger, page_size), ledger.new_owner("bench")

    def insert(key: PrefixKey) -> None:
        pages = ledger.alloc(pages_each, owner)
        result = tree.insert(key, pages, owner)
        ledger.free(pages[: result.num_existing], owner)

    def match(key: PrefixKey) -> None:
        node = tree.match(key).node
        tree.lock(node)
        tree.unlock(node)

    found = []
    cached = 0
    for name, operation in (("insert", insert), ("match", match)):
        seconds = _timed(operation, prompts)
        cached = ledger.counts().cached * page_size
        found.append(_rate(page_size, name, (prompt_tokens, cached), len(prompts), seconds))
    count, start = 0, time.perf_counter()
    while tree.evict(_EVICT_PAGES):
        count += 1
    seconds = time.perf_counter() - start
    tokens = _EVICT_PAGES * page_size
    found.append(_rate(page_size, "evict", (tokens, cached), count, seconds))
    return found


def _prompts(count: int, num_tokens: int) -> list[PrefixKey]:
    rng = np.random.default_rng(1)
    keys = []
    shared = np.empty(0, np.int32)
    for at in range(count):
        tokens = rng.integers(0, _VOCAB, num_tokens, dtype=np.int32)
        if at % 2:
            tokens[: num_tokens // 2] = shared[: num_tokens // 2]
        shared = tokens
        keys.append(PrefixKey(tokens=tokens))
    return keys


def _timed(operation: Callable[[PrefixKey], None], keys: Sequence[PrefixKey]) -> float:
    start = time.perf_counter()
    for key in keys:
        operation(key)
    return time.perf_counter() - start


def _rate(
    page_size: int, operation: str, tokens: tuple[int, int], count: int, seconds: float
) -> TreeRate:
    return TreeRate(
        page_size=page_size,
        operation=operation,
        tokens=tokens[0],
        cached_tokens=tokens[1],
        per_second=round(count / seconds, 1),
        micros=round(seconds / max(count, 1) * 1e6, 1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One engine of the sweep."""

    max_running: int
    chunk: int
    page_size: int


SHAPES = tuple(
    Shape(max_running=running, chunk=chunk, page_size=page_size)
    for running, chunk, page_size in ((1, 16, 1), (8, 128, 16), (32, 512, 16), (16, 64, 64))
)


def sweep(args: Mapping[str, Any], shapes: Sequence[Shape], num_requests: int) -> dict[str, Any]:
    """The largest share of each plan line that any of the engines took."""
    shares: dict[str, float] = {}
    violations: list[str] = []
    for shape in shapes:
        with Engine(
            **{
                **args,
                "max_running_requests": shape.max_running,
                "chunked_prefill_size": shape.chunk,
                "page_size": shape.page_size,
            }
        ) as engine:
            _serve(engine, num_requests, seed=1)
            report = engine.memory_report()
        violations += report["violations"]
        for account, planned in report["plan"].items():
            if planned:
                share = report["measured"][account]["peak"] / planned
                shares[account] = round(max(shares.get(account, 0.0), share), 4)
    return {
        "shapes": [asdict(shape) for shape in shapes],
        "largest_share": shares,
        "violations": violations,
    }


def growth(args: Mapping[str, Any], *, rounds: int, num_requests: int) -> dict[str, Any]:
    """What a long run adds to the process, and what it takes from the pool."""
    resident: list[int] = []
    with Engine(**args) as engine:
        for at in range(rounds):
            _serve(engine, num_requests, seed=at % 3)
            resident.append(engine.memory_report()["host"]["resident"]["now"])
        engine.flush_cache()
        report = engine.memory_report()
    pages = report["pages"]
    return {
        "rounds": rounds,
        "requests": rounds * num_requests,
        "resident_bytes": [resident[0], resident[len(resident) // 3], resident[-1]],
        "grown_bytes": resident[-1] - resident[len(resident) // 3],
        "pages_lost": pages["total"] - pages["free"],
        "violations": report["violations"],
    }


def _serve(engine: Engine, num_requests: int, *, seed: int) -> None:
    info = engine.get_server_info()
    longest = min(info["context_length"], info["max_total_num_tokens"])
    work = random_workload(
        num_requests=num_requests,
        input_range=(1, min(256, longest // 2)),
        output_range=(0, min(32, longest // 4)),
        vocab_size=256,
        seed=seed,
    )
    engine.generate(
        input_ids=work.prompts,
        sampling_params=[
            {"max_new_tokens": n, "ignore_eos": True, "sampling_seed": seed, "top_p": 0.9}
            for n in work.output_lens
        ],
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=4,
    )


def table(summary: Mapping[str, Any]) -> str:
    """All parts as text."""
    lines = [f"{'page':>5} {'operation':<9} {'tokens':>8} {'cached':>10} {'per s':>12} {'us':>12}"]
    lines += [
        f"{r['page_size']:>5} {r['operation']:<9} {r['tokens']:>8} {r['cached_tokens']:>10} "
        f"{r['per_second']:>12,.1f} {r['micros']:>12,.1f}"
        for r in summary["tree"]
    ]
    peaks, long_run = summary["peaks"], summary["growth"]
    lines.append(f"\n{'line':<14}{'largest share of its plan':>26}")
    lines += [f"{name:<14}{share:>26.1%}" for name, share in peaks["largest_share"].items()]
    lines.append(
        f"\n{long_run['requests']} requests in {long_run['rounds']} rounds: "
        f"{long_run['grown_bytes']:+,} resident bytes, {long_run['pages_lost']} pages lost"
    )
    return "\n".join(lines) + "\n"
