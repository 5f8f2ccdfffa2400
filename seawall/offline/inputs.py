"""From the arguments of `generate` to checked requests: one a prompt.

Every argument but the prompt may be one value for all prompts or a list with one a prompt. All
requests of a call are checked before any is submitted, so a bad one leaves the engine as it was.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from seawall.core.errors import RequestError
from seawall.core.params import (
    LogprobsMode,
    LogprobSpec,
    RequestLimits,
    SamplingParams,
    check_against_model,
    check_prompt,
    parse_logprobs,
    resolve_max_new,
)
from seawall.core.wire import GenerateRequest
from seawall.text.tokenizer import Tokenizer

ParamsArg = Mapping[str, object] | SamplingParams | None


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate` beside the prompt (contract: SGLang's names)."""

    sampling_params: ParamsArg | Sequence[ParamsArg]
    return_logprob: bool | Sequence[bool]
    logprob_start_len: int | Sequence[int | None] | None
    top_logprobs_num: int | Sequence[int | None] | None
    token_ids_logprob: Sequence[int] | Sequence[Sequence[int] | None] | None
    logprobs_mode: str | None
    return_text_in_logprobs: bool
    rid: str | Sequence[str] | None
    priority: int | Sequence[int | None] | None
    extra_key: str | Sequence[str | None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The requests of one call, and the shape its result takes."""

    requests: tuple[GenerateRequest, ...]
    is_batch: bool
    text_in_logprobs: bool

    @property
    def num_results(self) -> int:
        """Samples over all requests."""
        return sum(request.sampling.n for request in self.requests)


class InputReader:
    """Turns arguments into requests for one engine; draws seeds for those that bring none."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: RequestLimits,
        default_mode: LogprobsMode,
        random_seed: int,
    ) -> None:
        self._tokenizer = tokenizer
        self.limits = limits
        self._default_mode: LogprobsMode = default_mode
        self._seeds = np.random.default_rng(random_seed)

    def read(self, prompt: object, input_ids: object, options: GenerateOptions) -> Call:
        """Check a whole call.

        Raises:
            RequestError: with value, limit and fix; nothing was submitted.
        """
        prompts, is_batch = self._prompts(prompt, input_ids)
        columns = _Columns(options, len(prompts), is_batch)
        requests = [self._request(ids, columns, i) for i, ids in enumerate(prompts)]
        rids = [r.rid for r in requests]
        if len(set(rids)) < len(rids):
            raise RequestError(f"rid: got {rids}, they must differ; give each its own or none")
        return Call(
            requests=tuple(requests),
            is_batch=is_batch,
            text_in_logprobs=columns.flag("return_text_in_logprobs", 0) if prompts else False,
        )

    def tokenize(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Ids of texts, by the tokenizer's own template.

        Raises:
            RequestError: there is no tokenizer.
        """
        if self._tokenizer is None:
            raise RequestError(
                "prompt: text given, but skip_tokenizer_init is set; give input_ids instead"
            )
        return self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)

    @property
    def begin_id(self) -> int:
        """What stands before a text that has nothing before it: the begin token, else the end's.

        Raises:
            RequestError: the tokenizer has neither.
        """
        tokenizer = self._tokenizer
        found = None if tokenizer is None else (tokenizer.bos_id, tokenizer.eos_id)
        for token in found or ():
            if token is not None:
                return token
        raise RequestError("context: it is empty and there is no begin token; give some context")

    def _prompts(self, prompt: object, input_ids: object) -> tuple[list[list[int]], bool]:
        if (prompt is None) == (input_ids is None):
            given = "neither" if prompt is None else "both"
            raise RequestError(f"prompt and input_ids: got {given}; give exactly one of them")
        if prompt is not None:
            if prompt == "" or (isinstance(prompt, list | tuple) and "" in prompt):
                raise RequestError(
                    "prompt: got an empty text; give some, or the begin token's id as input_ids"
                )
            if isinstance(prompt, str):
                return self.tokenize([prompt]), False
            if isinstance(prompt, list | tuple) and all(isinstance(p, str) for p in prompt):
                return self.tokenize(list(prompt)) if prompt else [], True
            raise RequestError(
                f"prompt: got {type(prompt).__name__}; give a string or a list of strings"
            )
        rows, is_batch = _id_rows(input_ids)
        return rows, is_batch

    def _request(self, ids: list[int], columns: "_Columns", i: int) -> GenerateRequest:
        sampling = SamplingParams.parse(columns.sampling_params(i))
        logprob = parse_logprobs(
            return_logprob=columns.flag("return_logprob", i),
            logprob_start_len=columns.number("logprob_start_len", i),
            top_logprobs_num=columns.number("top_logprobs_num", i),
            token_ids_logprob=columns.ids("token_ids_logprob", i),
            mode=columns.options.get("logprobs_mode"),
            default_mode=self._default_mode,
            sampling=sampling,
        )
        return self.request(
            ids,
            sampling,
            logprob,
            rid=columns.rid(i),
            priority=columns.number("priority", i) or 0,
            extra_key=columns.text("extra_key", i),
        )

    def request(
        self,
        ids: Sequence[int],
        sampling: SamplingParams,
        logprob: LogprobSpec,
        *,
        rid: str | None = None,
        priority: int = 0,
        extra_key: str | None = None,
    ) -> GenerateRequest:
        """One checked request.

        Raises:
            RequestError: with value, limit and fix.
        """
        check_prompt(ids, self.limits)
        check_against_model(sampling, logprob, len(ids), self.limits)
        if sampling.stop and self._tokenizer is None:
            raise RequestError(
                "stop: strings need a tokenizer, but skip_tokenizer_init is set; use stop_token_ids"
            )
        seed = sampling.sampling_seed
        return GenerateRequest(
            rid=secrets.token_hex(16) if rid is None else rid,
            input_ids=np.asarray(ids, np.int32),
            sampling=sampling,
            logprob=logprob,
            max_new_tokens=resolve_max_new(sampling, len(ids), self.limits),
            seed=int(self._seeds.integers(2**63)) if seed is None else seed,
            priority=priority,
            extra_key=extra_key,
        )


class _Columns:
    """Options by prompt: a list gives one value a prompt, anything else goes for all."""

    def __init__(self, options: GenerateOptions, count: int, is_batch: bool) -> None:
        self.options = options
        self._count = count
        self._is_batch = is_batch

    def sampling_params(self, i: int) -> ParamsArg:
        value = self.options.get("sampling_params")
        if isinstance(value, list | tuple):
            return self._item("sampling_params", value, i)  # type: ignore[return-value]
        return value  # type: ignore[return-value]

    def flag(self, name: str, i: int) -> bool:
        value = self._value(name, i)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise RequestError(f"{name}: got {value!r}, true or false is needed")
        return value

    def number(self, name: str, i: int) -> int | None:
        value = self._value(name, i)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise RequestError(f"{name}: got {value!r}, an integer is needed")

    def ids(self, name: str, i: int) -> Sequence[int] | None:
        value = self.options.get("token_ids_logprob")
        if isinstance(value, list | tuple) and any(
            item is None or isinstance(item, list | tuple) for item in value
        ):
            return self._item(name, value, i)  # type: ignore[return-value]
        return value  # type: ignore[return-value]

    def text(self, name: str, i: int) -> str | None:
        value = self._value(name, i)
        if value is None or isinstance(value, str):
            return value
        raise RequestError(f"{name}: got {value!r}, a string is needed")

    def rid(self, i: int) -> str | None:
        value = self.options.get("rid")
        if isinstance(value, list | tuple):
            value = self._item("rid", value, i)  # type: ignore[assignment]
        elif value is not None and self._count > 1:
            raise RequestError(f"rid: got one for {self._count} prompts; give a list")
        if value is None or (isinstance(value, str) and value):
            return value
        raise RequestError(f"rid: got {value!r}, a string is needed")

    def _value(self, name: str, i: int) -> object:
        value = self.options.get(name)
        return self._item(name, value, i) if isinstance(value, list | tuple) else value

    def _item(self, name: str, values: Sequence[object], i: int) -> object:
        if not self._is_batch or len(values) != self._count:
            raise RequestError(
                f"{name}: got {len(values)} values for {self._count} prompts; give one for each"
            )
        return values[i]


def _id_rows(value: object) -> tuple[list[list[int]], bool]:
    """One list of ids, or a list of them, as integers."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise RequestError(f"input_ids: got {type(value).__name__}; give a list of token ids")
    nested = [isinstance(item, list | tuple | np.ndarray) for item in value]
    if value and all(nested):
        return [_ids(list(row)) for row in value], True
    return [_ids(list(value))], False


def _ids(row: list[object]) -> list[int]:
    ids = []
    for item in row:
        if isinstance(item, bool) or not isinstance(item, int | np.integer):
            raise RequestError(f"input_ids: got {item!r} in the list, integers are needed")
        ids.append(int(item))
    return ids
