"""Logprobs of rows, four ways side by side: time, bytes at peak and error.

What it measures: the log-softmax of one target a row, and the k best, from hidden rows and the
weights of an LM head. Each way runs on the same inputs in the same process:

    whole      one [rows, vocabulary] matrix, float copy, log_softmax, gather, topk
    chunks     the same in chunks of 2,048 rows
    one pass   product with float32 output in chunks of 2,048 rows, one reading pass (CUDA only)
    seawall    the numbers of linear_logprobs inside 64 MiB

Bytes are those of temporary tensors at peak, results excepted: the allocator's count on a GPU, the
dispatch-level tracker's on a CPU (in a call of its own, not a timed one). The error is the largest
against float64 from the same inputs, on a sample of rows.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from seawall.device.tracker import Tracker
from seawall.sampling import entry
from seawall.sampling.logprobs import Ask
from seawall.sampling.tiles import LogitsInput

CHUNK_ROWS = 2048
WORKSPACE_BYTES = 64 << 20
ERROR_ROWS = 64

Scores = tuple[Tensor, Tensor | None]
Way = Callable[[Tensor, Tensor, Tensor, int], Scores]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One way at one shape; `milliseconds` is the median of the repeats."""

    way: str
    rows: int
    vocab_size: int
    top_k: int
    milliseconds: float
    repeats: int
    peak_bytes: int
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What one row of the table is measured at."""

    rows: int
    vocab_size: int
    hidden_size: int
    top_k: int


def whole(hidden: Tensor, weight: Tensor, targets: Tensor, top_k: int) -> Scores:
    """The matrix at once."""
    logprobs = (hidden @ weight.T).float().log_softmax(-1)
    best = logprobs.topk(top_k).values if top_k else None
    return logprobs.gather(1, targets[:, None])[:, 0], best


def chunks(hidden: Tensor, weight: Tensor, targets: Tensor, top_k: int) -> Scores:
    """The matrix in chunks of rows."""
    parts = [
        whole(hidden[i : i + CHUNK_ROWS], weight, targets[i : i + CHUNK_ROWS], top_k)
        for i in range(0, hidden.shape[0], CHUNK_ROWS)
    ]
    best = [part[1] for part in parts if part[1] is not None]
    return torch.cat([part[0] for part in parts]), torch.cat(best) if best else None


def one_pass(hidden: Tensor, weight: Tensor, targets: Tensor, top_k: int) -> Scores:
    """Float32 logits of a chunk in memory, read once for the log-sum-exp, once more for the k."""
    found, tops = [], []
    for i in range(0, hidden.shape[0], CHUNK_ROWS):
        logits = torch.mm(hidden[i : i + CHUNK_ROWS], weight.T, out_dtype=torch.float32)
        lse = logits.logsumexp(-1)
        own = targets[i : i + CHUNK_ROWS, None]
        found.append(logits.gather(1, own)[:, 0] - lse)
        if top_k:
            tops.append(logits.topk(top_k).values - lse[:, None])
    return torch.cat(found), torch.cat(tops) if tops else None


def ours(hidden: Tensor, weight: Tensor, targets: Tensor, top_k: int) -> Scores:
    """The step path's own entry, which checks nothing and waits for nothing."""
    source = LogitsInput(hidden=hidden, weight=weight)
    result = entry.score_rows(source, Ask(targets=targets, top_k=top_k), WORKSPACE_BYTES)
    assert result.logprobs is not None
    return result.logprobs, result.top_logprobs


def ways_for(device: torch.device) -> dict[str, Way]:
    """All ways that the device can go."""
    ways: dict[str, Way] = {"whole": whole, "chunks": chunks, "one pass": one_pass, "seawall": ours}
    if device.type == "cpu":
        del ways["one pass"]
    return ways


def error_of(way: Way, hidden: Tensor, weight: Tensor, targets: Tensor) -> float:
    """Largest difference from float64, on some rows."""
    step = max(1, hidden.shape[0] // ERROR_ROWS)
    rows = slice(0, None, step)
    found = way(hidden, weight, targets, 0)[0][rows]
    exact = torch.cat(
        [
            (h[None].double() @ weight.double().T).log_softmax(-1)[0, t][None]
            for h, t in zip(hidden[rows], targets[rows], strict=True)
        ]
        if hidden.device.type == "cpu"
        else [_exact_rows(hidden[rows], weight, targets[rows])]
    )
    return float((found.double() - exact).abs().max())


def _exact_rows(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Float64 logprobs, with the weights converted a part at a time."""
    wide = hidden.double()
    parts = [wide @ part.double().T for part in torch.split(weight, 16384)]
    return torch.cat(parts, 1).log_softmax(-1).gather(1, targets[:, None])[:, 0]


def time_of(call: Callable[[], object], device: torch.device, seconds: float) -> tuple[float, int]:
    """Median milliseconds of a call, repeated for about as long; and how often."""
    call()
    if device.type == "cpu":
        walls: list[float] = []
        start = time.perf_counter()
        while len(walls) < 2 or time.perf_counter() - start < seconds:
            before = time.perf_counter()
            call()
            walls.append(1e3 * (time.perf_counter() - before))
        return statistics.median(walls), len(walls)
    torch.accelerator.synchronize()
    marks = [torch.Event(device, enable_timing=True)]
    marks[0].record()
    start = time.perf_counter()
    while len(marks) < 4 or time.perf_counter() - start < seconds:
        call()
        mark = torch.Event(device, enable_timing=True)
        mark.record()
        marks.append(mark)
        if len(marks) % 8 == 0:
            mark.synchronize()
    torch.accelerator.synchronize()
    times = [one.elapsed_time(other) for one, other in itertools.pairwise(marks)]
    return statistics.median(times), len(times)


def peak_of(call: Callable[[], Scores], device: torch.device) -> int:
    """Bytes of temporary tensors at peak, results excepted."""
    if device.type == "cpu":
        with Tracker() as tracker, tracker.scope("call"):
            result = call()
            kept = sum(t.untyped_storage().nbytes() for t in result if t is not None)
        return int(tracker.readings()["call"].peak - kept)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    result = call()
    torch.accelerator.synchronize()
    kept = sum(t.untyped_storage().nbytes() for t in result if t is not None)
    return int(torch.accelerator.max_memory_allocated() - before - kept)


def measure(
    ways: dict[str, Way],
    shapes: Sequence[Shape],
    device: torch.device,
    dtype: torch.dtype,
    seconds: float,
) -> list[Measurement]:
    """Every way at every shape; a way that runs out of memory is left out of that shape."""
    found = []
    for shape in shapes:
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(size, generator=generator, device=device).to(dtype)

        hidden = normal(shape.rows, shape.hidden_size)
        weight = normal(shape.vocab_size, shape.hidden_size).mul_(2 / shape.hidden_size**0.5)
        targets = torch.randint(shape.vocab_size, (shape.rows,), generator=generator, device=device)
        for name, way in ways.items():
            try:
                found.append(_measure_one(name, way, shape, (hidden, weight, targets), seconds))
            except torch.OutOfMemoryError:
                continue
    return found


def _measure_one(
    name: str, way: Way, shape: Shape, inputs: tuple[Tensor, Tensor, Tensor], seconds: float
) -> Measurement:
    def call() -> Scores:
        return way(*inputs, shape.top_k)

    device = inputs[0].device
    error = error_of(way, *inputs)
    milliseconds, repeats = time_of(call, device, seconds)
    return Measurement(
        way=name,
        rows=shape.rows,
        vocab_size=shape.vocab_size,
        top_k=shape.top_k,
        milliseconds=milliseconds,
        repeats=repeats,
        peak_bytes=peak_of(call, device),
        error=error,
    )


def table(measurements: Sequence[Measurement]) -> str:
    """One line a measurement."""
    lines = [
        f"{'way':10} {'rows':>6} {'vocab':>7} {'k':>4} {'ms':>10} {'peak MiB':>9} {'error':>8}"
    ]
    lines += [
        f"{one.way:10} {one.rows:6} {one.vocab_size:7} {one.top_k:4} "
        f"{one.milliseconds:10.3f} {one.peak_bytes / 2**20:9.1f} {one.error:8.1e}"
        for one in measurements
    ]
    return "\n".join(lines)


def as_dicts(measurements: Sequence[Measurement]) -> list[dict[str, object]]:
    """For other programs."""
    return [asdict(one) for one in measurements]


def shapes_of(
    rows: Sequence[int], vocab_sizes: Sequence[int], hidden_size: int, top_ks: Sequence[int]
) -> list[Shape]:
    """The product of the three lists."""
    return [
        Shape(rows=r, vocab_size=v, hidden_size=hidden_size, top_k=k)
        for v in vocab_sizes
        for r in rows
        for k in top_ks
        if k <= v
    ]
