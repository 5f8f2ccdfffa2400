"""Numbers for Prometheus: what boards made for SGLang and vLLM ask for, and memory by account.

Counters and histograms are kept here as requests end. Gauges are asked of the engine when somebody
scrapes, so that an idle server does nothing. A name of another project is used only where the
meaning is the same. Belongs to the event loop.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
_LABELS = ("model_name",)


class _Gauges:
    """A scrape's gauges, as prometheus_client collects them."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = tuple(families)

    def collect(self) -> Iterable[Metric]:
        """Called by the library."""
        return self._families


class _Series:
    """The counters and histograms, each under the names that boards use for it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.requests = self._counters("Requests that ended.", "sglang:num_requests")
        self.aborted = self._counters("Requests ended by an abort.", "sglang:num_aborted_requests")
        self.cached = self._counters("Prompt tokens from the cache.", "sglang:cached_tokens")
        self.prompt = self._counters("Prompt tokens.", *_both("prompt_tokens"))
        self.generated = self._counters("Generated tokens.", *_both("generation_tokens"))
        self.ignored = self._counters("Fields that nobody documents.", "seawall:ignored_fields")
        self.first = self._times("Until the first token.", "time_to_first_token_seconds")
        self.between = self._times("Between tokens of a sample.", "inter_token_latency_seconds")
        self.whole = self._times("Until the last token.", "e2e_request_latency_seconds")
        self.prompt_sizes = self._sizes("Prompt tokens of a request.", "request_prompt_tokens")
        self.output_sizes = self._sizes("Tokens of a sample.", "request_generation_tokens")

    def _counters(self, text: str, *names: str) -> list[Counter]:
        return [Counter(name, text, _LABELS, registry=self._registry) for name in names]

    def _times(self, text: str, name: str) -> list[Histogram]:
        return [self._histogram(full, text, _LATENCY) for full in _both(name)]

    def _sizes(self, text: str, name: str) -> list[Histogram]:
        return [self._histogram(f"vllm:{name}", text, _TOKENS)]

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, _LABELS, registry=self._registry, buckets=buckets)


class Metrics:
    """Everything that is counted in the front process.

    Args:
        model_name: label of all of them, as the boards expect.
    """

    def __init__(self, model_name: str) -> None:
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self._model = model_name
        self._registry = CollectorRegistry()
        self._series = _Series(self._registry)
        self._success = Counter(
            "vllm:request_success",
            "Samples that ended, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._answers = Counter(
            "seawall:http_answers",
            "Answers by status.",
            (*_LABELS, "status"),
            registry=self._registry,
        )
        self._last_scrape = (time.monotonic(), 0)

    # -- told by requests --------------------------------------------------------------------

    def first_token(self, seconds: float) -> None:
        """A sample's first token came so long after its request."""
        self._observe(self._series.first, seconds)

    def tokens(self, count: int, seconds: float) -> None:
        """So many more tokens of a sample came so long after the ones before."""
        self.num_generated_tokens += count
        self._add(self._series.generated, count)
        if seconds > 0:
            self._observe(self._series.between, seconds / count)

    def sample_ended(self, reason: str, num_output: int, seconds: float) -> None:
        """A sample ended."""
        self._success.labels(self._model, reason).inc()
        self._observe(self._series.output_sizes, num_output)
        self._observe(self._series.whole, seconds)
        if reason == "abort":
            self._add(self._series.aborted, 1)

    def request_ended(self, num_prompt: int, num_cached: int) -> None:
        """The first sample of a request ended."""
        self.num_prompt_tokens += num_prompt
        self.num_cached_tokens += num_cached
        self._add(self._series.requests, 1)
        self._add(self._series.prompt, num_prompt)
        self._add(self._series.cached, num_cached)
        self._observe(self._series.prompt_sizes, num_prompt)

    def ignored(self, count: int) -> None:
        """So many fields of a request were ignored."""
        self._add(self._series.ignored, count)

    def answered(self, status: int) -> None:
        """An answer was sent."""
        self._answers.labels(self._model, str(status)).inc()

    def _add(self, counters: list[Counter], count: int) -> None:
        for counter in counters:
            counter.labels(self._model).inc(count)

    def _observe(self, histograms: list[Histogram], value: float) -> None:
        for histogram in histograms:
            histogram.labels(self._model).observe(value)

    # -- told to Prometheus ------------------------------------------------------------------

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that came from the cache, since the start."""
        return self.num_cached_tokens / max(self.num_prompt_tokens, 1)

    def render(self, front: Mapping[str, float], engine: Mapping[str, Any] | None) -> bytes:
        """The text that is scraped.

        Args:
            front: gauges of the front process by name.
            engine: "memory" and "info" of the engine process; None if it does not serve.
        """
        families = [*self._front_gauges(front)]
        if engine is not None:
            families += self._engine_gauges(engine["info"])
            families += self._memory_gauges(engine["memory"])
        gauges = CollectorRegistry()
        gauges.register(_Gauges(families))
        return generate_latest(self._registry) + generate_latest(gauges)

    def _front_gauges(self, front: Mapping[str, float]) -> list[Metric]:
        now, before = time.monotonic(), self._last_scrape
        seconds = now - before[0]
        rate = (self.num_generated_tokens - before[1]) / seconds if seconds > 0 else 0.0
        self._last_scrape = (now, self.num_generated_tokens)
        return [
            self._gauge("sglang:gen_throughput", "Tokens a second since the last scrape.", rate),
            self._gauge("sglang:cache_hit_rate", "Cached share of prompts.", self.hit_rate),
            *(self._gauge(f"seawall:{name}", name, value) for name, value in front.items()),
        ]

    def _engine_gauges(self, info: Mapping[str, Any]) -> list[Metric]:
        state = info["internal_states"][0]
        total = info["max_total_num_tokens"]
        return [
            self._gauge("sglang:num_running_reqs", "Samples that run.", state["running"]),
            self._gauge("vllm:num_requests_running", "Samples that run.", state["running"]),
            self._gauge("sglang:num_queue_reqs", "Samples that wait.", state["waiting"]),
            self._gauge("vllm:num_requests_waiting", "Samples that wait.", state["waiting"]),
            self._gauge("sglang:max_total_num_tokens", "Tokens the KV pool holds.", total),
            self._gauge("seawall:retractions", "Samples put back.", state["retractions"]),
            self._gauge("seawall:steps", "Steps computed.", state["steps"]),
        ]

    def _memory_gauges(self, memory: Mapping[str, Any]) -> list[Metric]:
        families = []
        for side in ("device", "host"):
            part = memory if side == "device" else memory["host"]
            measured = part["measured"]
            for word in ("plan", "now", "peak"):
                values = {
                    line: part["plan"].get(line, 0) if word == "plan" else found.get(word, 0)
                    for line, found in measured.items()
                }
                families.append(
                    self._by(
                        f"seawall:{side}_memory_{word}_bytes", "By account.", "account", values
                    )
                )
        pages = dict(memory["pages"])
        total = pages.pop("total")
        families.append(self._by("seawall:pages", "Pages by owner.", "owner", pages))
        used = pages["in_use"] / max(total, 1)
        families.append(self._gauge("sglang:token_usage", "Share of pages in use.", used))
        families.append(self._gauge("vllm:kv_cache_usage_perc", "Share of pages in use.", used))
        return families

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _by(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=("model_name", label))
        for key, value in values.items():
            family.add_metric((self._model, key), value)
        return family


def _both(name: str) -> list[str]:
    """A name that both projects' boards use for the same thing."""
    return [f"sglang:{name}", f"vllm:{name}"]
