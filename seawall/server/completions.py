"""OpenAI's /v1/completions: texts or token ids in, text and logprobs out.

Scoring harnesses use it with `echo`: then logprobs begin at the prompt's first token, and with
max_tokens 1 there is one entry more than the prompt has tokens, whatever that token is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response

from seawall.core.errors import RequestError
from seawall.core.params import TokenIds
from seawall.core.wire import GenerateRequest
from seawall.offline.collect import SampleCollector
from seawall.offline.inputs import id_rows
from seawall.server.fields import Fields, flag, whole
from seawall.server.job import Job
from seawall.server.openai_logprobs import (
    Names,
    Offsets,
    Position,
    completion_logprobs,
    positions,
    prompt_logprobs,
)
from seawall.server.openai_params import (
    COMMON_FIELDS,
    HARMLESS_FIELDS,
    NEUTRAL_FIELDS,
    Wanted,
    make_request,
    read_wanted,
)
from seawall.server.openai_stream import (
    Head,
    call_names,
    finish_fields,
    make_call,
    stream_events,
    usage,
)
from seawall.server.schemas import COMPLETIONS
from seawall.server.service import Service
from seawall.server.transport import json_response, open_stream, read_object, unless_gone
from seawall.text.tokenizer import Tokenizer

_FIELDS = COMMON_FIELDS | {"prompt", "echo"}
_DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt:
    """A prompt's ids, and its text as it is echoed; None if it came as ids."""

    ids: TokenIds
    text: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What one answer is made from."""

    wanted: Wanted
    echo: bool
    prompts: Mapping[str, _Prompt]
    tokenizer: Tokenizer


def routes(service: Service) -> APIRouter:
    """The routes of this module."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/completions", openapi_extra=COMPLETIONS)
    async def completions(request: Request) -> Response:
        """Write on from prompts."""
        fields = Fields(await read_object(request, service.options, service.bodies))
        headers = service.headers(fields.check(_FIELDS, NEUTRAL_FIELDS, HARMLESS_FIELDS))
        tokenizer = service.need_tokenizer()
        wanted = read_wanted(
            service, fields, logprobs=whole(_number(fields.get("logprobs")), "logprobs")
        )
        echo = flag(fields.get("echo"), "echo")
        prompts = await _prompts(service, fields)
        name, rids = call_names(wanted, "cmpl", len(prompts))
        requests = [
            make_request(service, wanted, p.ids, rid, default=_DEFAULT_MAX_TOKENS, echo=echo)
            for p, rid in zip(prompts, rids, strict=True)
        ]
        plan = _Plan(
            wanted=wanted,
            echo=echo,
            prompts=dict(zip(rids, prompts, strict=True)),
            tokenizer=tokenizer,
        )
        head = Head(service, name, "text_completion")
        if wanted.stream:
            events = stream_events(
                service, make_call(requests), wanted, head, lambda _: _Chunks(plan)
            )
            return await open_stream(request, events, service.options.write_seconds, headers)
        answer = await unless_gone(request, _answer(service, plan, requests, head))
        return json_response(answer, headers)

    return router


def _number(value: object) -> int | None:
    """`logprobs: false` asks for none, as in chats; a number asks for so many, 0 included."""
    if value is True:
        return 1
    return None if value is False else value  # type: ignore[return-value]  # checked by `whole`


async def _prompts(service: Service, fields: Fields) -> list[_Prompt]:
    """A text, texts, ids or lists of ids."""
    prompt, reader = fields.get("prompt"), service.reader
    if prompt is None or prompt == []:
        raise RequestError("prompt: got none; give a text, texts, token ids or lists of them")
    texts = [prompt] if isinstance(prompt, str) else prompt
    if isinstance(texts, list) and any(isinstance(text, str) for text in texts):
        if not all(isinstance(text, str) for text in texts):
            raise RequestError("prompt: got texts and token ids together; give one kind")
        special = flag(fields.get("add_special_tokens"), "add_special_tokens", True)
        rows = await service.read(
            texts, len(texts), lambda: reader.tokenize(texts, add_special_tokens=special)
        )
        return [
            _Prompt(ids=ids or [reader.begin_id], text=text)
            for ids, text in zip(rows, texts, strict=True)
        ]
    found, _ = id_rows(prompt, "prompt")
    return await service.read(
        (), len(found), lambda: [_Prompt(ids=ids, text=None) for ids in found]
    )


async def _answer(
    service: Service, plan: _Plan, requests: list[GenerateRequest], head: Head
) -> dict[str, object]:
    async with service.job(make_call(requests), streaming=False) as job:
        await job.ended()
        writer = _Chunks(plan)

        def write() -> list[dict[str, object]]:
            return [
                writer.whole(job, sample, index)
                for index, sample in enumerate(job.samples.values())
            ]

        choices = await service.write(job.call, write)
        return {**head.fields(), "choices": choices, "usage": usage(job)}


@dataclass(slots=True)
class _Sent:
    """How far a sample was sent."""

    offsets: Offsets
    num_chars: int = 0
    num_ids: int = 0
    is_open: bool = False


class _Chunks:
    """Writes choices, each from where the last one of its sample ended."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self._names = Names(plan.tokenizer, as_ids=plan.wanted.token_names)
        self._sent: dict[int, _Sent] = {}

    def opening(self, index: int) -> list[dict[str, object]]:
        """See ChunkWriter."""
        return []

    def whole(self, job: Job, sample: SampleCollector, index: int) -> dict[str, object]:
        """The choice of a sample that has ended."""
        choice = self.grown(job, sample, index)
        assert choice is not None
        return choice

    def grown(self, job: Job, sample: SampleCollector, index: int) -> dict[str, object] | None:
        """See ChunkWriter."""
        plan, wanted = self._plan, self._plan.wanted
        if not sample.ids and sample.finish is None:
            return None
        skip = sample.request.sampling.skip_special_tokens
        sent = self._sent.setdefault(
            index, _Sent(Offsets(plan.tokenizer, skip_special_tokens=skip))
        )
        text = sample.text[sent.num_chars :]
        choice: dict[str, object] = {"index": index, "text": text, "logprobs": None}
        found: list[Position] = []
        if not sent.is_open:
            self._open(job, sample, choice, found)
        if wanted.logprobs is not None:
            found += positions(
                sample.output, sample.ids, sent.num_ids, len(sample.ids), wanted.logprobs
            )
            choice["logprobs"] = completion_logprobs(found, self._names, sent.offsets)
        if wanted.token_ids:
            choice["token_ids"] = sample.ids[sent.num_ids :]
        sent.num_chars, sent.num_ids, sent.is_open = len(sample.text), len(sample.ids), True
        return {**choice, **finish_fields(sample)}

    def _open(
        self, job: Job, sample: SampleCollector, choice: dict[str, object], found: list[Position]
    ) -> None:
        """What belongs to the prompt goes with a sample's first choice."""
        plan, wanted, request = self._plan, self._plan.wanted, sample.request
        scores, ids = job.prompt_scores(sample), request.input_ids.tolist()
        if plan.echo:
            choice["text"] = f"{self._echo(request, ids)}{choice['text']}"
            if wanted.logprobs is not None:
                found += positions(scores, ids, 0, len(ids), wanted.logprobs)
        if wanted.prompt_logprobs is not None:
            given = list(positions(scores, ids, 0, len(ids), wanted.prompt_logprobs))
            choice["prompt_logprobs"] = prompt_logprobs(given, plan.tokenizer)
        if wanted.token_ids:
            choice["prompt_token_ids"] = ids

    def _echo(self, request: GenerateRequest, ids: Sequence[int]) -> str:
        text = self._plan.prompts[request.rid].text
        if text is not None:
            return text
        return self._plan.tokenizer.decode(
            ids, skip_special_tokens=request.sampling.skip_special_tokens
        )
