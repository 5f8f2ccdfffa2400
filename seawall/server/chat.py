"""OpenAI's /v1/chat/completions: messages through the model's own template, and its answer.

Tools and constrained formats are not built: asked for, they are refused, never ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from seawall.core.errors import RequestError
from seawall.core.params import TokenIds, brief
from seawall.core.wire import GenerateRequest
from seawall.offline.collect import SampleCollector
from seawall.server.fields import Fields, flag, whole
from seawall.server.job import Job
from seawall.server.openai_logprobs import Names, chat_logprobs, positions, prompt_logprobs
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
from seawall.server.schemas import CHAT
from seawall.server.service import Service
from seawall.server.transport import json_response, open_stream, read_object, unless_gone
from seawall.text.tokenizer import Tokenizer

_FIELDS = COMMON_FIELDS | {
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "add_generation_prompt",
    "chat_template_kwargs",
}
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL_FIELDS,
    "tools": (),
    "tool_choice": ("none", "auto"),
    "functions": (),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "web_search_options": (),
    "continue_final_message": (False,),
    "echo": (False,),
    "chat_template": (),
    "documents": (),
    "mm_processor_kwargs": (),
    "separate_reasoning": (True, False),
}
_HARMLESS = HARMLESS_FIELDS | {"parallel_tool_calls", "stream_reasoning", "verbosity"}
_ROLE_LIMIT = 64
_MAX_MESSAGES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What one answer is made from."""

    wanted: Wanted
    tokenizer: Tokenizer


def routes(service: Service) -> APIRouter:
    """The routes of this module."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/chat/completions", openapi_extra=CHAT)
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        fields = Fields(await read_object(request, service.options, service.bodies))
        headers = service.headers(fields.check(_FIELDS, _NEUTRAL, _HARMLESS))
        tokenizer = service.need_tokenizer()
        wanted = read_wanted(service, fields, logprobs=_num_logprobs(fields))
        ids = await chat_ids(service, fields)
        name, [rid] = call_names(wanted, "chatcmpl", 1)
        made = make_request(service, wanted, ids, rid, default=None, echo=False)
        plan = _Plan(wanted=wanted, tokenizer=tokenizer)
        if wanted.stream:
            head = Head(service, name, "chat.completion.chunk")
            events = stream_events(
                service, make_call([made]), wanted, head, lambda _: _Deltas(plan)
            )
            return await open_stream(request, events, service.options.write_seconds, headers)
        head = Head(service, name, "chat.completion")
        answer = await unless_gone(request, _answer(service, plan, made, head))
        return json_response(answer, headers)

    return router


async def chat_ids(service: Service, fields: Fields) -> TokenIds:
    """The conversation as the model's template writes it.

    Raises:
        RequestError: the messages are no conversation, or the template refuses them.
    """
    tokenizer, messages = service.need_tokenizer(), _messages(fields.get("messages"))
    variables = fields.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise RequestError(f"chat_template_kwargs: got {brief(variables)}; give an object")
    for taken in ("messages", "tools", "add_generation_prompt"):
        if taken in variables:
            raise RequestError(f"chat_template_kwargs: {taken!r} has a field of its own; use that")
    prompt = flag(fields.get("add_generation_prompt"), "add_generation_prompt", True)
    special = flag(fields.get("add_special_tokens"), "add_special_tokens", False)

    def encode() -> TokenIds:
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=prompt, variables=variables
        )
        return tokenizer.encode(text, add_special_tokens=special)

    return await service.read(["".join(message["content"] for message in messages)], 1, encode)


def _messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise RequestError(f"messages: got {brief(value)}; give a list of messages")
    if len(value) > _MAX_MESSAGES:
        raise RequestError(f"messages: got {len(value)}, the most is {_MAX_MESSAGES}; send fewer")
    return [_message(item, at) for at, item in enumerate(value)]


def _message(item: object, at: int) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise RequestError(f"messages[{at}]: got {brief(item)}; give an object with a role")
    role = item.get("role")
    if not isinstance(role, str) or not role or len(role) > _ROLE_LIMIT:
        raise RequestError(f"messages[{at}].role: got {brief(role)}; give a role such as 'user'")
    if item.get("tool_calls"):
        raise RequestError(f"messages[{at}].tool_calls: tools are not built; leave them out")
    return {**item, "content": _content(item.get("content"), at)}


def _content(content: object, at: int) -> str:
    """Text, or the texts of a list of parts."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise RequestError(f"messages[{at}].content: got {brief(content)}; give text")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            raise RequestError(
                f"messages[{at}].content: got a part of type {brief(kind)}; only text is read"
            )
        texts.append(text)
    return "".join(texts)


def _num_logprobs(fields: Fields) -> int | None:
    wanted = flag(fields.get("logprobs"), "logprobs")
    top = whole(fields.get("top_logprobs"), "top_logprobs")
    if top and not wanted:
        raise RequestError(f"top_logprobs: got {top} without logprobs; set logprobs to true")
    return (top or 0) if wanted else None


async def _answer(
    service: Service, plan: _Plan, made: GenerateRequest, head: Head
) -> dict[str, object]:
    async with service.job(make_call([made]), streaming=False) as job:
        await job.ended()
        names = Names(plan.tokenizer, as_ids=plan.wanted.token_names)
        choices = [
            _choice(plan, sample, index, names) for index, sample in enumerate(job.samples.values())
        ]
        answer = {**head.fields(), "choices": choices, "usage": usage(job)}
        first = next(iter(job.samples.values()))
        ids = made.input_ids.tolist()
        if plan.wanted.prompt_logprobs is not None:
            scores = job.prompt_scores(first)
            found = positions(scores, ids, 0, len(ids), plan.wanted.prompt_logprobs)
            answer["prompt_logprobs"] = prompt_logprobs(list(found), plan.tokenizer)
        if plan.wanted.token_ids:
            answer["prompt_token_ids"] = ids
        return answer


def _choice(plan: _Plan, sample: SampleCollector, index: int, names: Names) -> dict[str, object]:
    choice: dict[str, object] = {
        "index": index,
        "message": {"role": "assistant", "content": sample.text, "refusal": None},
        "logprobs": None,
    }
    if plan.wanted.logprobs is not None:
        found = positions(sample.output, sample.ids, 0, len(sample.ids), plan.wanted.logprobs)
        choice["logprobs"] = chat_logprobs(list(found), names)
    if plan.wanted.token_ids:
        choice["token_ids"] = list(sample.ids)
    return {**choice, **finish_fields(sample)}


class _Deltas:
    """Writes choices of a chat's stream."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self._names = Names(plan.tokenizer, as_ids=plan.wanted.token_names)
        self._sent: dict[int, tuple[int, int]] = {}

    def opening(self, index: int) -> list[dict[str, object]]:
        """See ChunkWriter."""
        return [
            {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ]

    def grown(self, job: Job, sample: SampleCollector, index: int) -> dict[str, object] | None:
        """See ChunkWriter."""
        if not sample.ids and sample.finish is None:
            return None
        num_chars, num_ids = self._sent.get(index, (0, 0))
        text = sample.text[num_chars:]
        choice: dict[str, object] = {
            "index": index,
            "delta": {"content": text} if text or sample.finish is None else {},
            "logprobs": None,
        }
        if self._plan.wanted.logprobs is not None:
            found = positions(
                sample.output, sample.ids, num_ids, len(sample.ids), self._plan.wanted.logprobs
            )
            choice["logprobs"] = chat_logprobs(list(found), self._names)
        if self._plan.wanted.token_ids:
            choice["token_ids"] = sample.ids[num_ids:]
        self._sent[index] = (len(sample.text), len(sample.ids))
        return {**choice, **finish_fields(sample)}
