"""Request bodies for the served OpenAPI document: names and types; the checks are elsewhere.

Bodies are read by hand, not by the framework, whose errors would be of another shape; this only
tells tools and people what may be sent.
"""

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
IDS: Schema = {"type": "array", "items": WHOLE}


def some(*kinds: Schema) -> Schema:
    """Any of these, or null."""
    return {"anyOf": [*kinds, {"type": "null"}]}


def many(kind: Schema) -> Schema:
    """A list."""
    return {"type": "array", "items": kind}


TEXTS = some(TEXT, many(TEXT))
PROMPT = some(TEXT, many(TEXT), IDS, many(IDS))

SAMPLING: Mapping[str, Schema] = {
    "temperature": some(NUMBER),
    "top_p": some(NUMBER),
    "top_k": some(WHOLE),
    "min_p": some(NUMBER),
    "n": some(WHOLE),
    "stop": TEXTS,
    "stop_token_ids": some(IDS),
    "presence_penalty": some(NUMBER),
    "frequency_penalty": some(NUMBER),
    "repetition_penalty": some(NUMBER),
    "logit_bias": some(OBJECT),
    "ignore_eos": some(FLAG),
    "skip_special_tokens": some(FLAG),
}
OPENAI: Mapping[str, Schema] = {
    **SAMPLING,
    "model": some(TEXT),
    "max_tokens": some(WHOLE),
    "min_tokens": some(WHOLE),
    "seed": some(WHOLE),
    "stream": some(FLAG),
    "stream_options": some(OBJECT),
    "prompt_logprobs": some(WHOLE),
    "return_token_ids": some(FLAG),
    "return_tokens_as_token_ids": some(FLAG),
    "logprobs_mode": some(TEXT),
}
NATIVE_SAMPLING: Schema = {
    "type": "object",
    "properties": {
        **SAMPLING,
        "max_new_tokens": some(WHOLE),
        "min_new_tokens": some(WHOLE),
        "sampling_seed": some(WHOLE),
        "no_stop_trim": some(FLAG),
    },
}


def body(properties: Mapping[str, Schema], *required: str) -> Schema:
    """A route's `openapi_extra`: a JSON object with these fields."""
    schema: Schema = {"type": "object", "properties": dict(properties)}
    if required:
        schema["required"] = list(required)
    content = {"application/json": {"schema": schema}}
    refused = {"description": "It cannot be honoured; the engine is as it was."}
    return {
        "requestBody": {"required": bool(required), "content": content},
        "responses": {
            "200": {"description": "Done."},
            "400": refused,
            "503": {"description": "Full, starting or draining; see Retry-After."},
        },
    }


GENERATE = body(
    {
        "text": TEXTS,
        "input_ids": some(IDS, many(IDS)),
        "sampling_params": some(NATIVE_SAMPLING, many(NATIVE_SAMPLING)),
        "stream": some(FLAG),
        "incremental": some(FLAG),
        "return_logprob": some(FLAG, many(FLAG)),
        "logprob_start_len": some(WHOLE, many(WHOLE)),
        "top_logprobs_num": some(WHOLE, many(WHOLE)),
        "token_ids_logprob": some(IDS, many(IDS)),
        "logprobs_mode": some(TEXT),
        "logprob_format": some({"enum": ["lists", "columns"]}),
        "return_text": some(FLAG),
        "return_text_in_logprobs": some(FLAG),
        "rid": TEXTS,
        "priority": some(WHOLE, many(WHOLE)),
        "extra_key": TEXTS,
    }
)
SCORE = body(
    {
        "query": some(TEXT, IDS),
        "items": some(TEXT, many(TEXT), many(IDS)),
        "label_token_ids": IDS,
        "apply_softmax": some(FLAG),
        "item_first": some(FLAG),
        "model": some(TEXT),
    },
    "query",
    "items",
    "label_token_ids",
)
COMPLETIONS = body(
    {**OPENAI, "prompt": PROMPT, "echo": some(FLAG), "logprobs": some(WHOLE)}, "prompt"
)
MESSAGES = many(
    {
        "type": "object",
        "properties": {"role": TEXT, "content": some(TEXT, many(OBJECT))},
        "required": ["role"],
    }
)
CHAT = body(
    {
        **OPENAI,
        "messages": MESSAGES,
        "max_completion_tokens": some(WHOLE),
        "logprobs": some(FLAG),
        "top_logprobs": some(WHOLE),
        "add_generation_prompt": some(FLAG),
        "chat_template_kwargs": some(OBJECT),
    },
    "messages",
)
TOKENIZE = body(
    {
        "prompt": TEXTS,
        "messages": some(MESSAGES),
        "add_special_tokens": some(FLAG),
        "return_token_strs": some(FLAG),
    }
)
DETOKENIZE = body({"tokens": some(IDS, many(IDS)), "skip_special_tokens": some(FLAG)}, "tokens")
ABORT = body({"rid": some(TEXT), "abort_all": some(FLAG)})
OCCUPATION = body({"tags": some(many({"enum": ["weights", "kv_cache", "cuda_graph"]}))})
UPDATE_WEIGHTS = body(
    {
        "model_path": TEXT,
        "load_format": some(TEXT),
        "weight_version": some(TEXT),
        "abort_all_requests": some(FLAG),
    },
    "model_path",
)
