"""Text and token ids without the engine: /tokenize, /detokenize, /tokenizer_info, /v1/models."""

import json
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from seawall.core.errors import RequestError
from seawall.core.params import brief
from seawall.offline.inputs import id_rows
from seawall.server.chat import chat_ids
from seawall.server.errors import HttpError
from seawall.server.fields import Fields, flag
from seawall.server.schemas import DETOKENIZE, TOKENIZE
from seawall.server.service import Service
from seawall.server.transport import json_response, read_object

_NO_FIELDS: frozenset[str] = frozenset()
_TOKENIZE = frozenset(
    {
        "model",
        "prompt",
        "text",
        "messages",
        "add_special_tokens",
        "add_generation_prompt",
        "chat_template_kwargs",
        "return_token_strs",
    }
)
_DETOKENIZE = frozenset({"model", "tokens", "skip_special_tokens"})
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def routes(service: Service) -> APIRouter:
    """The routes of this module."""
    router = APIRouter(tags=["text"])

    @router.post("/tokenize", openapi_extra=TOKENIZE)
    @router.post("/v1/tokenize", openapi_extra=TOKENIZE)
    async def tokenize(request: Request) -> Response:
        """Ids of a text, of texts, or of a conversation."""
        fields = Fields(await read_object(request, service.options, service.bodies))
        headers = service.headers(fields.check(_TOKENIZE, {}, _NO_FIELDS))
        return json_response(await _tokenize(service, fields), headers)

    @router.post("/detokenize", openapi_extra=DETOKENIZE)
    @router.post("/v1/detokenize", openapi_extra=DETOKENIZE)
    async def detokenize(request: Request) -> Response:
        """Text of ids; under the name that vLLM uses and the one that SGLang uses."""
        fields = Fields(await read_object(request, service.options, service.bodies))
        headers = service.headers(fields.check(_DETOKENIZE, {}, _NO_FIELDS))
        return json_response(_detokenize(service, fields), headers)

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """Special tokens and the chat template."""
        service.need_tokenizer()
        assert service.tokenizer_folder is not None
        return json_response(_tokenizer_info(service.tokenizer_folder))

    @router.get("/v1/models")
    async def models() -> Response:
        """The one model that is served."""
        return json_response({"object": "list", "data": [_model(service)]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """The model, if that is its name."""
        if name != service.model_name:
            service.check_model(name or "no name")
        return json_response(_model(service))

    return router


async def _tokenize(service: Service, fields: Fields) -> dict[str, object]:
    tokenizer, limit = service.need_tokenizer(), service.engine.limits.max_tokens
    if fields.get("messages") is not None:
        ids = list(await chat_ids(service, fields))
        return {"tokens": ids, "count": len(ids), "max_model_len": limit}
    prompt = fields.get("prompt", fields.get("text"))
    texts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"prompt: got {brief(prompt)}; give a text or a list of texts")
    special = flag(fields.get("add_special_tokens"), "add_special_tokens", True)
    rows = await service.read(
        texts, 1, lambda: tokenizer.encode_batch(texts, add_special_tokens=special)
    )
    if not isinstance(prompt, str):
        counts = [len(row) for row in rows]
        return {"tokens": rows, "count": counts, "max_model_len": limit}
    answer = {"tokens": rows[0], "count": len(rows[0]), "max_model_len": limit}
    if flag(fields.get("return_token_strs"), "return_token_strs"):
        answer["token_strs"] = [tokenizer.token_text(token) for token in rows[0]]
    return answer


def _detokenize(service: Service, fields: Fields) -> dict[str, object]:
    tokenizer = service.need_tokenizer()
    skip = flag(fields.get("skip_special_tokens"), "skip_special_tokens", False)
    rows, is_batch = id_rows(fields.get("tokens"), "tokens")
    texts = [tokenizer.decode(list(map(int, row)), skip_special_tokens=skip) for row in rows]
    text = texts if is_batch else texts[0]
    return {"prompt": text, "text": text}


def _tokenizer_info(folder: Path) -> dict[str, object]:
    """What the folder's files say; read anew, since hardly anybody asks."""
    settings = _read(folder / "tokenizer_config.json")
    info: dict[str, object] = {"tokenizer_class": settings.get("tokenizer_class")}
    for name in _SPECIAL:
        token = settings.get(name)
        info[name] = token.get("content") if isinstance(token, dict) else token
    template = folder / "chat_template.jinja"
    info["chat_template"] = (
        template.read_text(encoding="utf-8")
        if template.is_file()
        else settings.get("chat_template")
    )
    return info


def _read(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise HttpError(404, "tokenizer_info: the model folder says nothing of it") from None
    return value if isinstance(value, dict) else {}


def _model(service: Service) -> dict[str, object]:
    engine = service.engine
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "seawall",
        "root": service.model_name,
        "parent": None,
        "max_model_len": engine.limits.max_tokens,
    }
