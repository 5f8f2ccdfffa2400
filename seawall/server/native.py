"""SGLang's own API: /generate, alone or in batches, at once or as a stream; /v1/score.

Arguments and results are those of `Engine.generate`: the same reader and the same writer.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from seawall.core.errors import RequestError
from seawall.core.params import brief
from seawall.offline.inputs import Call, GenerateOptions
from seawall.offline.score import Collectors, score
from seawall.server.fields import Fields, flag
from seawall.server.native_stream import StreamWriter
from seawall.server.schemas import GENERATE, SCORE
from seawall.server.service import Service
from seawall.server.transport import (
    DONE,
    json_response,
    open_stream,
    read_object,
    unless_gone,
)

T = TypeVar("T")
# Calls of /v1/score that run at a time; each has a thread that waits.
_SCORERS = 32

_OPTIONS = frozenset(GenerateOptions.__annotations__) - {"sampling_params"}
_HONOURED = _OPTIONS | {
    "text",
    "prompt",
    "input_ids",
    "sampling_params",
    "stream",
    "incremental",
    "cache_salt",
    "model",
}
# SGLang's, whose feature is not built: neutral values pass.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "input_embeds": (),
    "image_data": (),
    "video_data": (),
    "audio_data": (),
    "lora_path": (),
    "session_params": (),
    "custom_logit_processor": (),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_prompt_token_ids": (False,),
    "return_sampling_mask": (False,),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
}
_HARMLESS = frozenset({"no_logs", "log_metrics", "routed_dp_rank", "data_parallel_rank"})
_SCORE_FIELDS = frozenset(
    {"query", "items", "label_token_ids", "apply_softmax", "item_first", "model"}
)


def routes(service: Service) -> APIRouter:
    """The routes of this module."""
    router = APIRouter(tags=["native"])
    pool = ThreadPoolExecutor(_SCORERS, thread_name_prefix="seawall-score")

    @router.post("/generate", openapi_extra=GENERATE)
    async def generate(request: Request) -> Response:
        """Write on from prompts, score them, or both."""
        fields = Fields(await read_object(request, service.options, service.bodies))
        ignored = fields.check(_HONOURED, _NEUTRAL, _HARMLESS)
        headers = service.headers(ignored)
        call = await _read_call(service, fields)
        if flag(fields.get("stream"), "stream"):
            return await _stream(service, request, call, fields, headers)
        result = await unless_gone(request, _run(service, call))
        return json_response(result, headers)

    @router.post("/v1/score", openapi_extra=SCORE)
    async def score_labels(request: Request) -> Response:
        """For each item, how likely each label is right after query and item."""
        fields = Fields(await read_object(request, service.options, service.bodies))
        headers = service.headers(fields.check(_SCORE_FIELDS, {}, frozenset()))
        service.check_model(fields.get("model"))
        answer = await unless_gone(request, _score(service, fields, pool))
        return json_response(answer, headers)

    return router


async def _read_call(service: Service, fields: Fields) -> Call:
    prompt, ids = fields.get("text", fields.get("prompt")), fields.get("input_ids")
    options: dict[str, Any] = {
        name: fields.get(name) for name in _OPTIONS if fields.get(name) is not None
    }
    options["sampling_params"] = fields.get("sampling_params")
    if options.get("extra_key") is None and fields.get("cache_salt") is not None:
        options["extra_key"] = fields.get("cache_salt")
    reader = service.reader
    rows = prompt if isinstance(prompt, list) else ids
    return await service.read(
        texts_of(prompt),
        len(rows) if isinstance(rows, list) else 1,
        lambda: reader.read(prompt, ids, options),  # type: ignore[arg-type]  # each is checked
    )


def texts_of(prompt: object) -> list[str]:
    """What is to be tokenised."""
    items = prompt if isinstance(prompt, list) else [prompt]
    return [item for item in items if isinstance(item, str)]


async def _run(service: Service, call: Call) -> object:
    async with service.job(call, streaming=False) as job:
        await job.ended()
        writer = service.writer(call)

        def write() -> list[dict[str, object]]:
            return [
                _jsonable(writer.result(sample, job.prompt_scores(sample)))
                for sample in job.samples.values()
            ]

        results = await service.write(call, write)
        return results if call.is_batch or len(results) > 1 else results[0]


def _jsonable(result: dict[str, object]) -> dict[str, object]:
    """Columns are arrays; as JSON they are lists, with null where an array has NaN."""
    meta = result["meta_info"]
    assert isinstance(meta, dict)
    for name, value in meta.items():
        if isinstance(value, np.ndarray):
            meta[name] = value.tolist()
    return result


async def _stream(
    service: Service, request: Request, call: Call, fields: Fields, headers: Mapping[str, str]
) -> Response:
    if call.logprob_format == "columns":
        raise RequestError("logprob_format: streams have lists; use 'lists'")
    incremental = flag(
        fields.get("incremental"), "incremental", service.options.incremental_streaming_output
    )
    events = _events(service, call, StreamWriter(call, service.tokenizer, incremental=incremental))
    return await open_stream(request, events, service.options.write_seconds, headers)


async def _events(
    service: Service, call: Call, writer: StreamWriter
) -> AsyncGenerator[bytes, None]:
    """An event whenever samples have grown; the first is there once the engine has taken them."""
    async with service.job(call, streaming=True) as job:
        index = {key: at for at, key in enumerate(job.samples)}
        is_first = True
        while grown := await job.grown():
            if is_first:
                job.check_admitted()
            ripe = [sample for sample in grown if sample.ids or sample.finish is not None]
            is_first = is_first and not ripe
            for sample in ripe:
                at = index[sample.request.rid, sample.index]
                yield writer.event(sample, job.prompt_scores(sample), at)
    yield DONE


async def _score(service: Service, fields: Fields, pool: Executor) -> dict[str, object]:
    """Scoring in its own words is synchronous: it runs in a thread, its requests here."""
    loop, reader = asyncio.get_running_loop(), service.reader
    running: list[Future[Any]] = []
    num_prompt = 0

    def run(call: Call, make: Callable[[Collectors], T]) -> T:
        nonlocal num_prompt
        num_prompt = sum(len(request.input_ids) for request in call.requests)
        future = asyncio.run_coroutine_threadsafe(_scored(service, call, make), loop)
        running.append(future)
        return future.result()

    args = {name: fields.get(name) for name in _SCORE_FIELDS if fields.get(name) is not None}
    args.pop("model", None)
    for name in ("apply_softmax", "item_first"):
        flag(args.get(name), name)
    if "query" not in args or "items" not in args:
        raise RequestError("score: query, items and label_token_ids go together; give all three")
    if not isinstance(args.get("label_token_ids"), list):
        raise RequestError(
            f"label_token_ids: got {brief(args.get('label_token_ids'))}; give a list of token ids"
        )
    try:
        scores = await loop.run_in_executor(
            pool,
            lambda: score(reader, run, None, args),  # type: ignore[arg-type]  # it looks at each
        )
    finally:
        # The client has left, or there is nothing to cancel.
        for future in running:
            future.cancel()
    return {
        "object": "scoring",
        "model": service.model_name,
        "scores": scores,
        "usage": {"prompt_tokens": num_prompt, "total_tokens": num_prompt, "completion_tokens": 0},
    }


async def _scored(service: Service, call: Call, make: Callable[[Collectors], T]) -> T:
    async with service.job(call, streaming=False) as job:
        await job.ended()
        return make(job.samples)
