"""From the arguments of `generate` to checked requests: one a prompt.

Every argument but the prompt may be one value for all prompts or a list with one a prompt. All
requests of a call are checked before any is submitted, so a bad one leaves the engine as it was.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypedDict, runtime_checkable

import numpy as np
import numpy.typing as npt

from seawall.core.errors import RequestError
from seawall.core.params import (
    LogprobsMode,
    LogprobSpec,
    RequestLimits,
    SamplingParams,
    TokenIds,
    brief,
    check_against_model,
    check_prompt,
    parse_logprobs,
    resolve_max_new,
)
from seawall.core.wire import GenerateRequest
from seawall.text.tokenizer import Tokenizer

_MOST = 2**62  # numbers that no check beyond this one can stumble over
ParamsArg = Mapping[str, object] | SamplingParams | None
LogprobFormat = Literal["lists", "columns"]
_FORMATS: tuple[LogprobFormat, ...] = ("lists", "columns")


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate` beside the prompt: SGLang's names, and these of our own.

    logprobs_mode: "raw" or "processed".
    logprob_format: "lists" (SGLang's) or "columns" (numpy arrays, see docs/results.md).
    return_text: False leaves "text" empty and never calls the tokenizer, but for stop strings.
    """

    sampling_params: ParamsArg | Sequence[ParamsArg]
    return_logprob: bool | Sequence[bool]
    logprob_start_len: int | Sequence[int | None] | None
    top_logprobs_num: int | Sequence[int | None] | None
    token_ids_logprob: Sequence[int] | Sequence[Sequence[int] | None] | None
    logprobs_mode: str | None
    logprob_format: LogprobFormat
    return_text: bool
    return_text_in_logprobs: bool
    rid: str | Sequence[str] | None
    priority: int | Sequence[int | None] | None
    extra_key: str | Sequence[str | None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The requests of one call, and the shape its result takes.

    Attributes:
        with_text: whether results have text.
        totals_only: of the prompt's scores only the sum is wanted.
    """

    requests: tuple[GenerateRequest, ...]
    is_batch: bool
    with_text: bool = True
    logprob_format: LogprobFormat = "lists"
    text_in_logprobs: bool = False
    totals_only: bool = False

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
            raise RequestError(
                f"rid: got {brief(rids)}, they must differ; give each its own or none"
            )
        form, with_texts = columns.logprob_format(), columns.switch("return_text_in_logprobs")
        if with_texts and form == "columns":
            raise RequestError(
                "return_text_in_logprobs: columns have no text; use logprob_format 'lists'"
            )
        return Call(
            requests=tuple(requests),
            is_batch=is_batch,
            with_text=columns.switch("return_text", default=True),
            logprob_format=form,
            text_in_logprobs=with_texts,
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

    def _prompts(self, prompt: object, input_ids: object) -> tuple[Sequence[TokenIds], bool]:
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
        return id_rows(input_ids)

    def _request(self, ids: TokenIds, columns: "_Columns", i: int) -> GenerateRequest:
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
        ids: TokenIds,
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
            input_ids=np.array(ids, np.int32),  # never the caller's own array
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
        return _flag(name, self._value(name, i), default=False)

    def switch(self, name: str, *, default: bool = False) -> bool:
        """An option that goes for the whole call."""
        return _flag(name, self.options.get(name), default=default)

    def logprob_format(self) -> LogprobFormat:
        value: object = self.options.get("logprob_format")
        if value is None:
            return "lists"
        for known in _FORMATS:
            if isinstance(value, str) and value == known:
                return known
        raise RequestError(f"logprob_format: got {brief(value)}; choose 'lists' or 'columns'")

    def number(self, name: str, i: int) -> int | None:
        value = self._value(name, i)
        if value is None:
            return None
        if isinstance(value, int | np.integer) and not isinstance(value, bool):
            if abs(int(value)) < _MOST:
                return int(value)
            raise RequestError(f"{name}: got {brief(value)}, the limit is {_MOST}; change it")
        raise RequestError(f"{name}: got {brief(value)}, an integer is needed")

    def ids(self, name: str, i: int) -> TokenIds | None:
        value: object = self.options.get("token_ids_logprob")
        if isinstance(value, list | tuple) and any(
            item is None or _is_row(type(item)) for item in value
        ):
            value = self._item(name, value, i)
        if isinstance(value, _HasArray) and not isinstance(value, np.generic):
            return _array_ids(name, _array(name, value))
        return value  # type: ignore[return-value]  # parse_logprobs looks at each

    def text(self, name: str, i: int) -> str | None:
        value = self._value(name, i)
        if value is None or isinstance(value, str):
            return value
        raise RequestError(f"{name}: got {brief(value)}, a string is needed")

    def rid(self, i: int) -> str | None:
        value = self.options.get("rid")
        if isinstance(value, list | tuple):
            value = self._item("rid", value, i)  # type: ignore[assignment]
        elif value is not None and self._count > 1:
            raise RequestError(f"rid: got one for {self._count} prompts; give a list")
        if value is None or (isinstance(value, str) and value):
            return value
        raise RequestError(f"rid: got {brief(value)}, a string is needed")

    def _value(self, name: str, i: int) -> object:
        value = self.options.get(name)
        return self._item(name, value, i) if isinstance(value, list | tuple) else value

    def _item(self, name: str, values: Sequence[object], i: int) -> object:
        if not self._is_batch or len(values) != self._count:
            raise RequestError(
                f"{name}: got {len(values)} values for {self._count} prompts; give one for each"
            )
        return values[i]


def _flag(name: str, value: object, *, default: bool) -> bool:
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{name}: got {brief(value)}, true or false is needed")
    return value


# -- token ids, in whatever they come --------------------------------------------------------


@runtime_checkable
class _HasArray(Protocol):
    """Arrays of numpy, and what turns into one without a copy: tensors of PyTorch on the host."""

    def __array__(self) -> npt.NDArray[np.generic]: ...


def id_rows(value: object, name: str = "input_ids") -> tuple[Sequence[TokenIds], bool]:
    """Prompts as ids, and whether they are a batch: one list or array of ids, or several.

    Raises:
        RequestError: something else, or an item that is no integer.
    """
    if isinstance(value, _HasArray):
        array = _array(name, value)
        if array.ndim == 2:
            return [_array_ids(name, row) for row in array], True
        return [_array_ids(name, array)], False
    if not isinstance(value, list | tuple):
        raise RequestError(f"{name}: got {type(value).__name__}; give a list of token ids")
    kinds = set(map(type, value))
    if kinds and all(map(_is_row, kinds)):
        return [_row(name, row) for row in value], True
    return [_list_ids(name, value)], False


def _is_row(kind: type) -> bool:
    """Whether objects of this type hold ids, rather than being one."""
    return issubclass(kind, list | tuple) or (
        issubclass(kind, _HasArray) and not issubclass(kind, np.generic)
    )


def _row(name: str, row: object) -> TokenIds:
    if isinstance(row, _HasArray):
        return _array_ids(name, _array(name, row))
    assert isinstance(row, list | tuple)
    return _list_ids(name, row)


def _list_ids(name: str, row: Sequence[object]) -> TokenIds:
    # The types of all items at once: a prompt may have a hundred thousand.
    for kind in set(map(type, row)) - {int}:
        if kind is bool or not issubclass(kind, int | np.integer):
            wrong = next(item for item in row if type(item) is kind)
            raise RequestError(f"{name}: got {brief(wrong)} in the list, integers are needed")
    return row  # type: ignore[return-value]  # all integers


def _array(name: str, value: _HasArray) -> npt.NDArray[np.generic]:
    try:
        array = value.__array__()
    except (TypeError, RuntimeError) as error:
        said = brief(str(error))
        raise RequestError(f"{name}: got {type(value).__name__}, {said}; give a list") from None
    if array.ndim not in (1, 2):
        raise RequestError(f"{name}: got an array of {array.ndim} axes; give one, or two for many")
    return array


def _array_ids(name: str, array: npt.NDArray[np.generic]) -> TokenIds:
    if array.ndim != 1:
        raise RequestError(f"{name}: got an array of {array.ndim} axes in the list; give one axis")
    if array.size and array.dtype.kind not in "iu":
        raise RequestError(
            f"{name}: got {brief(array[:1].tolist()[0])} in the list, integers are needed"
        )
    return array  # type: ignore[return-value]  # integers of some width; the range is checked next
