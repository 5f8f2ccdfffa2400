"""From the fields of OpenAI's requests, and vLLM's and SGLang's additions, to engine requests.

The tables below name every field that one of the three documents: honoured, neutral (accepted
where it asks for nothing, else refused as not built) or harmless (changes no result).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from seawall.core.errors import RequestError
from seawall.core.params import (
    LogprobsMode,
    LogprobSpec,
    RequestLimits,
    SamplingParams,
    TokenIds,
    brief,
    parse_logprobs,
)
from seawall.core.wire import GenerateRequest
from seawall.server.errors import HttpError
from seawall.server.fields import Fields, flag, whole
from seawall.server.service import Service

# field -> sampling parameter
_SAMPLING: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "n": "n",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "logit_bias": "logit_bias",
    "seed": "sampling_seed",
    "min_tokens": "min_new_tokens",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
    "spaces_between_special_tokens": "spaces_between_special_tokens",
    "include_stop_str_in_output": "no_stop_trim",
    "no_stop_trim": "no_stop_trim",
}
COMMON_FIELDS = frozenset(_SAMPLING) | {
    "model",
    "max_tokens",
    "logprobs",
    "logprobs_mode",
    "prompt_logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "stream",
    "stream_options",
    "add_special_tokens",
    "priority",
    "extra_key",
    "cache_salt",
    "rid",
    "request_id",
}
NEUTRAL_FIELDS: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "suffix": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "allowed_token_ids": (),
    "bad_words": (),
    "logits_processors": (),
    "custom_logit_processor": (),
    "lora_path": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    "stop_regex": (),
    "return_hidden_states": (False,),
    "thinking_token_budget": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "session_params": (),
}
HARMLESS_FIELDS = frozenset(
    {
        "user",
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "do_sample",
        "detokenize",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "detailed_cached_tokens",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What one OpenAI request wants, apart from its prompt.

    Attributes:
        max_tokens: None for as many as fit, or the endpoint's default.
        logprobs: alternatives a position; None for no logprobs at all.
        prompt_logprobs: the same for vLLM's field of that name.
        token_names: write tokens as "token_id:42".
    """

    sampling: Mapping[str, object]
    max_tokens: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    mode: LogprobsMode
    token_ids: bool
    token_names: bool
    stream: bool
    include_usage: bool
    usage_in_all: bool
    priority: int
    extra_key: str | None
    rid: str | None


def read_wanted(service: Service, fields: Fields, *, logprobs: int | None) -> Wanted:
    """The fields that the endpoints share.

    Raises:
        RequestError: a value that cannot be honoured.
        HttpError: another model.
    """
    service.check_model(fields.get("model"))
    max_tokens = whole(fields.get("max_completion_tokens"), "max_completion_tokens")
    if max_tokens is None:
        max_tokens = whole(fields.get("max_tokens"), "max_tokens")
    stream = flag(fields.get("stream"), "stream")
    include_usage, usage_in_all = _stream_options(fields, stream=stream)
    most = service.options.max_logprobs
    return Wanted(
        sampling=_sampling(service, fields),
        max_tokens=max_tokens,
        logprobs=whole(logprobs, "logprobs", most=most),
        prompt_logprobs=whole(fields.get("prompt_logprobs"), "prompt_logprobs", most=most),
        mode=_mode(service, fields),
        token_ids=flag(fields.get("return_token_ids"), "return_token_ids"),
        token_names=flag(fields.get("return_tokens_as_token_ids"), "return_tokens_as_token_ids"),
        stream=stream,
        include_usage=include_usage,
        usage_in_all=usage_in_all,
        priority=whole(fields.get("priority"), "priority", least=-(2**31), most=2**31) or 0,
        extra_key=_text(fields, "extra_key") or _text(fields, "cache_salt"),
        rid=_text(fields, "rid") or _text(fields, "request_id"),
    )


def make_request(
    service: Service, wanted: Wanted, ids: TokenIds, rid: str, *, default: int | None, echo: bool
) -> GenerateRequest:
    """The request for one prompt.

    `default` tokens are written if the client does not say, None for as many as fit; with `echo`
    logprobs are wanted for the prompt too.

    Raises:
        RequestError: it cannot be honoured; HttpError: it does not fit the context.
    """
    reader = service.reader
    max_new = _max_new(len(ids), wanted.max_tokens, default, reader.limits)
    sampling = SamplingParams.parse({**wanted.sampling, "max_new_tokens": max_new})
    return reader.request(
        ids,
        sampling,
        _spec(wanted, sampling, echo=echo),
        rid=rid,
        priority=wanted.priority,
        extra_key=wanted.extra_key,
    )


def _spec(wanted: Wanted, sampling: SamplingParams, *, echo: bool) -> LogprobSpec:
    prompt = wanted.prompt_logprobs is not None or (echo and wanted.logprobs is not None)
    return parse_logprobs(
        return_logprob=wanted.logprobs is not None or wanted.prompt_logprobs is not None,
        logprob_start_len=0 if prompt else None,
        top_logprobs_num=max(wanted.logprobs or 0, wanted.prompt_logprobs or 0),
        token_ids_logprob=None,
        mode=wanted.mode,
        default_mode="raw",
        sampling=sampling,
    )


def _max_new(num_prompt: int, asked: int | None, default: int | None, limits: RequestLimits) -> int:
    room = limits.max_tokens - num_prompt
    if asked is None:
        asked = room if default is None else min(default, room)
        needed = 1
    else:
        needed = asked
    if room < needed or room < asked:
        raise HttpError(
            400,
            f"max_completion_tokens is too large: this model's maximum context length is "
            f"{limits.max_tokens} tokens, but {needed} tokens were asked for after a prompt of "
            f"{num_prompt}; the request is longer than the model's context length, shorten it",
            code="context_length_exceeded",
            param="max_tokens",
        )
    return asked


def _sampling(service: Service, fields: Fields) -> Mapping[str, object]:
    values: dict[str, object] = {}
    if service.options.use_generation_config:
        values.update(service.engine.generation_defaults)
    for name, parameter in _SAMPLING.items():
        value = fields.get(name)
        if value is not None:
            values[parameter] = value
    if values.get("top_k") == 0:
        values["top_k"] = -1
    return values


def _mode(service: Service, fields: Fields) -> LogprobsMode:
    mode = fields.get("logprobs_mode")
    if mode is None:
        return service.options.logprobs_mode
    found: dict[object, LogprobsMode] = {
        "raw": "raw",
        "raw_logprobs": "raw",
        "processed": "processed",
        "processed_logprobs": "processed",
    }
    if not isinstance(mode, str) or mode not in found:
        raise RequestError(f"logprobs_mode: got {brief(mode)}; choose 'raw' or 'processed'")
    return found[mode]


def _stream_options(fields: Fields, *, stream: bool) -> tuple[bool, bool]:
    """Whether usage comes last, and whether with each event."""
    options = fields.get("stream_options")
    if options is None:
        return False, False
    if not isinstance(options, dict):
        raise RequestError(f"stream_options: got {brief(options)}; give an object")
    if not stream:
        raise RequestError("stream_options: given without stream; set stream to true")
    include = flag(options.get("include_usage"), "stream_options.include_usage")
    in_all = flag(options.get("continuous_usage_stats"), "stream_options.continuous_usage_stats")
    return include, include and in_all


def _text(fields: Fields, name: str) -> str | None:
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return value or None
    raise RequestError(f"{name}: got {brief(value)}, a string is needed")
