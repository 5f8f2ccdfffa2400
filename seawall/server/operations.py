"""Health, information, metrics, and what changes the engine between requests.

open to everybody        /health /ready /ping /metrics
with the API key         information, aborts by name
with the admin key       whatever changes the engine or other clients' requests (gate.py)
"""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from seawall.core.errors import EngineError, RequestError, SeawallError
from seawall.core.params import LogprobSpec, SamplingParams, brief
from seawall.offline.inputs import Call
from seawall.process.supervisor import Supervisor
from seawall.server.budget import resident_bytes
from seawall.server.errors import HttpError, UnavailableError
from seawall.server.fields import Fields, flag
from seawall.server.gate import check_admin
from seawall.server.schemas import ABORT, OCCUPATION, UPDATE_WEIGHTS
from seawall.server.service import Service
from seawall.server.transport import json_response, read_object

_GENERATE_SECONDS = 20.0
_SCRAPE_SECONDS = 5.0
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def routes(service: Service, supervisor: Supervisor) -> APIRouter:
    """All routes of this module."""
    router = APIRouter(tags=["operations"])
    _add_health(router, service)
    _add_information(router, service, supervisor)
    _add_control(router, service)
    return router


def _add_health(router: APIRouter, service: Service) -> None:
    @router.get("/health")
    @router.get("/ready")
    @router.get("/ping")
    async def health() -> Response:
        """200 while requests are taken; asks the engine nothing."""
        if service.draining:
            raise UnavailableError("the server drains and takes no more requests")
        service.client.check()
        return json_response({"status": "ok"})

    @router.get("/health_generate")
    async def health_generate() -> Response:
        """200 once the engine has computed a token."""
        begin, reader = [0], service.reader
        sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        made = reader.request(begin, sampling, LogprobSpec())
        try:
            async with asyncio.timeout(_GENERATE_SECONDS):
                call = Call(requests=(made,), is_batch=False, with_text=False)
                async with service.job(call, streaming=False) as job:
                    await job.ended()
        except TimeoutError:
            raise UnavailableError("the engine computed no token in time") from None
        return json_response({"status": "ok"})


def _add_information(router: APIRouter, service: Service, supervisor: Supervisor) -> None:
    @router.get("/get_server_info")
    @router.get("/server_info")
    async def server_info() -> Response:
        """Arguments as resolved, limits, counters."""
        info: dict[str, Any] = await service.client.call("server_info")
        front = {
            **_front(service, supervisor),
            "served_model_name": service.model_name,
            "engine_pid": supervisor.pid,
        }
        return json_response({**info, "front": front})

    @router.get("/get_model_info")
    @router.get("/model_info")
    async def model_info() -> Response:
        """Which model, and what it can take."""
        engine = service.engine
        return json_response(
            {
                "model_path": engine.model_path,
                "served_model_name": service.model_name,
                "is_generation": True,
                "dtype": engine.dtype,
                "max_model_len": engine.limits.max_tokens,
                "vocab_size": engine.limits.vocab_size,
                "preferred_sampling_params": engine.generation_defaults,
            }
        )

    @router.get("/memory")
    async def memory() -> Response:
        """The memory report, and what the front process holds."""
        report: dict[str, Any] = await service.client.call("memory_report")
        return json_response({**report, "front": _front(service, supervisor)})

    @router.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus; without an engine, what is counted here."""
        engine: dict[str, Any] | None = None
        try:
            async with asyncio.timeout(_SCRAPE_SECONDS):
                engine = {
                    "memory": await service.client.call("memory_report"),
                    "info": await service.client.call("server_info"),
                }
        except (SeawallError, TimeoutError):
            engine = None
        text = service.metrics.render(_front(service, supervisor), engine)
        return Response(text, media_type=_METRICS_TYPE)


def _front(service: Service, supervisor: Supervisor) -> dict[str, float]:
    """Gauges of the front process."""
    return {
        "resident_bytes": resident_bytes(),
        "engine_up": float(service.client.engine is not None),
        "engine_restarts": supervisor.num_restarts,
        "open_samples": service.client.num_open,
        "bodies_bytes": service.bodies.used,
        "bodies_peak_bytes": service.bodies.peak,
        "bodies_limit_bytes": service.bodies.limit,
        "results_bytes": service.results.used,
        "results_peak_bytes": service.results.peak,
        "results_limit_bytes": service.results.limit,
    }


def _add_control(router: APIRouter, service: Service) -> None:
    @router.post("/abort_request", openapi_extra=ABORT)
    async def abort_request(request: Request) -> Response:
        """End a request by its name, or all."""
        fields = await _optional(request, service)
        if flag(fields.get("abort_all"), "abort_all"):
            check_admin(request, service.options)
            return json_response({"aborted": service.client.abort(None)})
        rid = fields.get("rid")
        if not isinstance(rid, str) or not rid:
            raise RequestError(f"rid: got {brief(rid)}; give a request's name, or abort_all")
        return json_response({"aborted": service.client.abort(rid)})

    @router.get("/flush_cache")
    @router.post("/flush_cache")
    async def flush_cache(request: Request) -> Response:
        """Drop cached prefixes; refused while requests run."""
        check_admin(request, service.options)
        if not await service.client.call("flush_cache"):
            raise RequestError("flush_cache: requests run or wait; let them end, or abort them")
        return json_response({"success": True, "message": "the cache was flushed"})

    @router.post("/release_memory_occupation", openapi_extra=OCCUPATION)
    async def release(request: Request) -> Response:
        """Give device memory back for a while."""
        return await _occupation(request, service, "release_memory_occupation")

    @router.post("/resume_memory_occupation", openapi_extra=OCCUPATION)
    async def resume(request: Request) -> Response:
        """Take released memory again."""
        return await _occupation(request, service, "resume_memory_occupation")

    @router.post("/update_weights_from_disk", openapi_extra=UPDATE_WEIGHTS)
    async def update_weights(request: Request) -> Response:
        """Replace the weights by those of another checkpoint of the same model."""
        check_admin(request, service.options)
        fields = Fields(await read_object(request, service.options, service.bodies))
        args = {
            "model_path": _text(fields, "model_path"),
            "load_format": _text(fields, "load_format"),
            "weight_version": _text(fields, "weight_version"),
            "abort_all_requests": flag(fields.get("abort_all_requests"), "abort_all_requests"),
        }
        if args["model_path"] is None:
            raise RequestError("model_path: got none; give a folder or a Hugging Face id")
        message = await service.client.update_weights(**args)
        return json_response({"success": True, "message": message})


async def _occupation(request: Request, service: Service, name: str) -> Response:
    check_admin(request, service.options)
    tags = (await _optional(request, service)).get("tags")
    if tags is not None and not (isinstance(tags, list) and all(isinstance(t, str) for t in tags)):
        raise RequestError(f"tags: got {brief(tags)}; give a list of names")
    try:
        await service.client.call(name, tags=tags)
    except EngineError as error:
        # Not a fault: requests run.
        raise HttpError(400, str(error)) from None
    return json_response({"success": True})


async def _optional(request: Request, service: Service) -> Fields:
    """The body's fields; no body has none."""
    if request.headers.get("content-length") in (None, "0") and (
        "transfer-encoding" not in request.headers
    ):
        return Fields({})
    return Fields(await read_object(request, service.options, service.bodies))


def _text(fields: Fields, name: str) -> str | None:
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return value
    raise RequestError(f"{name}: got {brief(value)}, a string is needed")
