"""What completions and chats have in common while they run: usage, ends, and streams of events."""

import secrets
import time
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from seawall.core.wire import GenerateRequest
from seawall.offline.collect import SampleCollector
from seawall.offline.inputs import Call
from seawall.server.job import Job
from seawall.server.openai_params import Wanted
from seawall.server.service import Service
from seawall.server.transport import DONE, event

_FINISHES = {"stop": "stop", "length": "length", "abort": "abort"}


class ChunkWriter(Protocol):
    """Writes the choices of one call's stream."""

    def opening(self, index: int) -> list[dict[str, object]]:
        """Choices that are sent before any token of sample `index`."""

    def grown(self, job: Job, sample: SampleCollector, index: int) -> dict[str, object] | None:
        """What a sample has grown by since the last time; None while that can't be told yet."""


def finish_fields(sample: SampleCollector) -> dict[str, object]:
    """Why a sample ended, in OpenAI's word; what matched, in vLLM's and SGLang's field."""
    if sample.finish is None:
        return {"finish_reason": None}
    matched = sample.finish.get("matched")
    return {
        "finish_reason": _FINISHES[str(sample.finish["type"])],
        "matched_stop": matched,
        "stop_reason": matched,
    }


def usage(job: Job) -> dict[str, object]:
    """Tokens of a call as they stand; a prompt counts once, whatever n is."""
    num_prompt = sum(len(request.input_ids) for request in job.call.requests)
    num_output = sum(len(sample.ids) for sample in job.samples.values())
    firsts = [job.samples[request.rid, 0] for request in job.call.requests]
    cached = sum(sample.last.cached_tokens for sample in firsts if sample.last is not None)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def call_names(wanted: Wanted, prefix: str, count: int) -> tuple[str, list[str]]:
    """The answer's id, and a name for each prompt's request; a name the client gave is kept."""
    name = wanted.rid or f"{prefix}-{secrets.token_hex(12)}"
    return name, [name] if count == 1 else [f"{name}-{i}" for i in range(count)]


def make_call(requests: list[GenerateRequest]) -> Call:
    """A call of these requests, whose results have text."""
    return Call(requests=tuple(requests), is_batch=False)


class Head:
    """The fields that every object of one answer begins with."""

    def __init__(self, service: Service, name: str, kind: str) -> None:
        self._service = service
        self._name = name
        self._kind = kind
        self._created = int(time.time())

    def fields(self) -> dict[str, object]:
        """In OpenAI's order."""
        return {
            "id": self._name,
            "object": self._kind,
            "created": self._created,
            "model": self._service.model_name,
        }


async def stream_events(
    service: Service,
    call: Call,
    wanted: Wanted,
    head: Head,
    make_writer: Callable[[Job], ChunkWriter],
) -> AsyncGenerator[bytes, None]:
    """Events of a call; the first is there once the engine has taken all its requests."""
    async with service.job(call, streaming=True) as job:
        writer = make_writer(job)
        places = {key: at for at, key in enumerate(job.samples)}
        opened: set[int] = set()
        while grown := await job.grown():
            job.check_ends()
            for sample in grown:
                at = places[sample.request.rid, sample.index]
                choice = writer.grown(job, sample, at)
                if choice is None:
                    continue
                if at not in opened:
                    opened.add(at)
                    for opening in writer.opening(at):
                        yield _chunk(head, opening, job, wanted)
                yield _chunk(head, choice, job, wanted)
        if wanted.include_usage:
            yield event({**head.fields(), "choices": [], "usage": usage(job)})
    yield DONE


def _chunk(head: Head, choice: dict[str, object], job: Job, wanted: Wanted) -> bytes:
    chunk = {**head.fields(), "choices": [choice]}
    if wanted.include_usage:
        chunk["usage"] = usage(job) if wanted.usage_in_all else None
    return event(chunk)
