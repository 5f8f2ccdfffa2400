"""Latency and throughput of a running server, with requests that arrive by themselves.

What is measured: an open loop. Requests are sent at times drawn beforehand (Poisson at a rate, or
all at once), whether or not earlier ones have been answered, so that a server that falls behind is
seen to. Each is a stream of /generate with greedy draws and a given number of tokens; times are
taken by this client as bytes arrive. A request that is turned away (503) counts as failed.

    scheduled --wait--> sent --TTFT--> first event --ITL--> ... --> last event
                        `----------------- E2E ----------------------'

The client is one thread on the standard library: it is no library's speed that is measured.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from seawall.benchmarks.workload import Workload
from seawall.core.errors import ConfigError

_PERCENTILES = (50, 90, 99)
_OK = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where the server is.

    Attributes:
        api_key: sent as a bearer token.
    """

    host: str
    port: int
    api_key: str | None = None

    @classmethod
    def from_url(cls, url: str, api_key: str | None) -> "Target":
        """Parse http://host:port.

        Raises:
            ConfigError: it is something else.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise ConfigError(f"base_url: got {url!r}; give http://host:port") from None
        if parts.scheme != "http" or parts.hostname is None:
            raise ConfigError(f"base_url: got {url!r}; give http://host:port")
        return cls(host=parts.hostname, port=80 if port is None else port, api_key=api_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """Seconds within which a request counts for goodput; None sets no goal."""

    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None


@dataclass(slots=True)
class Timing:
    """One request as its client saw it; seconds from when it was sent.

    Attributes:
        gaps: between events, a token each.
        error: why it failed.
    """

    ttft: float = 0.0
    e2e: float = 0.0
    num_tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    error: str | None = None

    def meets(self, goals: Goals) -> bool:
        """Whether it was as quick as asked."""
        if self.error is not None:
            return False
        mean_gap = sum(self.gaps) / max(self.num_tokens - 1, 1)
        pairs = ((self.ttft, goals.ttft), (mean_gap, goals.itl), (self.e2e, goals.e2e))
        return all(goal is None or value <= goal for value, goal in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingResult:
    """What came of a run."""

    timings: list[Timing]
    duration: float
    work: Workload
    rate: float
    goals: Goals

    def summary(self) -> dict[str, object]:
        """As plain data for JSON; times in milliseconds."""
        done = [timing for timing in self.timings if timing.error is None]
        tokens = sum(timing.num_tokens for timing in done)
        good = sum(timing.meets(self.goals) for timing in self.timings)
        # Events of several tokens count as so many equal gaps.
        gaps = [gap for timing in done for gap in timing.gaps]
        return {
            "successful_requests": len(done),
            "failed_requests": len(self.timings) - len(done),
            "request_rate": self.rate,
            "duration_s": self.duration,
            "input_tokens": self.work.input_tokens,
            "output_tokens": tokens,
            "request_throughput": len(done) / self.duration,
            "output_throughput": tokens / self.duration,
            "goodput": good / self.duration,
            "ttft_ms": percentiles([timing.ttft for timing in done]),
            "itl_ms": percentiles(gaps),
            "e2e_ms": percentiles([timing.e2e for timing in done]),
            "errors": sorted({timing.error for timing in self.timings if timing.error})[:5],
        }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles in milliseconds; empty for nothing."""
    if not seconds:
        return {}
    values = np.array(seconds) * 1000
    found = {"mean": float(values.mean())}
    return found | {f"p{p}": float(np.percentile(values, p)) for p in _PERCENTILES}


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """When each request is sent, in seconds from the start; an infinite rate sends all at once."""
    if rate == float("inf"):
        return [0.0] * count
    gaps = np.random.default_rng(seed).exponential(1 / rate, size=count)
    return [float(at) for at in np.cumsum(gaps) - gaps[0]]


def measure(
    target: Target, work: Workload, *, rate: float, seed: int, goals: Goals
) -> ServingResult:
    """Send the work and wait for all of it."""
    times = arrivals(len(work.prompts), rate, seed)
    timings, duration = asyncio.run(_run(target, work, times))
    return ServingResult(timings=timings, duration=duration, work=work, rate=rate, goals=goals)


async def _run(
    target: Target, work: Workload, times: Sequence[float]
) -> tuple[list[Timing], float]:
    started = time.perf_counter()

    async def one(at: float, prompt: list[int], num_output: int) -> Timing:
        await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
        timing = Timing()
        try:
            await _ask(target, prompt, num_output, timing)
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            timing.error = f"{type(error).__name__}: {error}"
        return timing

    triples = zip(times, work.prompts, work.output_lens, strict=True)
    timings = await asyncio.gather(*(one(*triple) for triple in triples))
    return timings, time.perf_counter() - started


async def _ask(target: Target, prompt: list[int], num_output: int, timing: Timing) -> None:
    params = {"max_new_tokens": num_output, "temperature": 0, "ignore_eos": True}
    body = {
        "input_ids": prompt,
        "sampling_params": params,
        "stream": True,
        "incremental": True,
        "return_text": False,
    }
    sent = last = time.perf_counter()
    async for event in events(target, "/generate", body):
        now = time.perf_counter()
        finish = event["meta_info"]["finish_reason"]
        if finish is not None and finish["type"] == "abort":
            timing.error = str(finish["message"])
            return
        count = len(event["output_ids"])
        if timing.num_tokens == 0:
            timing.ttft = now - sent
            count, last = count - 1, now
            timing.num_tokens = 1
        timing.gaps += [(now - last) / count] * count if count else []
        timing.num_tokens += count
        last = now
    timing.e2e = last - sent
    if timing.num_tokens < num_output:
        timing.error = f"got {timing.num_tokens} tokens of {num_output}"


async def events(
    target: Target, path: str, body: Mapping[str, object]
) -> AsyncIterator[dict[str, Any]]:
    """The events of one streamed answer.

    Raises:
        ValueError: the answer is an error; OSError: the connection broke.
    """
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(target.host, target.port)
    try:
        key = f"authorization: Bearer {target.api_key}\r\n" if target.api_key else ""
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {target.host}\r\nconnection: close\r\n{key}"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        writer.write(head.encode() + content)
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        while (await reader.readline()).strip():
            pass
        if status != _OK:
            answer = json.loads(await reader.read())
            raise ValueError(f"status {status}: {answer.get('message', '')}")
        rest = b""
        async for chunk in _chunks(reader):
            *lines, rest = (rest + chunk).split(b"\n\n")
            for line in lines:
                data = line.removeprefix(b"data: ")
                if data != b"[DONE]":
                    yield json.loads(data)
    finally:
        writer.close()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """A chunked body."""
    while size := int(await reader.readline(), 16):
        yield await reader.readexactly(size)
        await reader.readline()


def table(summary: Mapping[str, object]) -> str:
    """The result for people."""
    rows: list[tuple[str, str]] = []
    for name, value in summary.items():
        label = name.replace("_", " ")
        if isinstance(value, dict):
            text = "  ".join(f"{kind} {number:,.1f}" for kind, number in value.items())
            rows.append((label, text or "-"))
        elif isinstance(value, float):
            rows.append((label, f"{value:,.2f}"))
        elif not isinstance(value, list):
            rows.append((label, str(value)))
    width = max(len(label) for label, _ in rows)
    return "".join(f"{label.ljust(width)}  {text}\n" for label, text in rows)
