"""What one request asks for: sampling parameters and logprobs, validated once at the edge.

Names and defaults are SGLang's (`sampling_params`). Names that nobody knows are refused, and so
are known ones whose feature has not been built yet: nothing is silently ignored.
"""

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field, fields
from typing import Literal

import numpy as np

from seawall.core.errors import RequestError
from seawall.core.grammar import (
    GrammarSpec,
    choices,
    pattern_text,
    rules_text,
    schema_text,
    tags_text,
)
from seawall.core.step import I64

LogprobsMode = Literal["raw", "processed"]
TokenIds = Sequence[int] | I64

DEFAULT_MAX_NEW_TOKENS = 128
MAX_SAMPLES = 4096
# SGLang reads temperatures below this as greedy.
GREEDY_TEMPERATURE = 1e-6
_MAX_STOP_CHARS = 4096
_MAX_STOPS = 64
# Beyond these a logit divided by the penalty and the temperature leaves float32.
_LEAST_REPETITION_PENALTY = 1e-6
_MAX_BIAS = 1e30
_MAX_ID_DIGITS = 18
_INT64 = np.iinfo(np.int64)
_NOT_BUILT = ("stop_regex", "beam_width")
_GRAMMARS = ("json_schema", "regex", "ebnf", "choice", "structural_tag")
_NEUTRAL_ONLY = ("custom_params", "stream_interval")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request draws its tokens.

    Attributes:
        max_new_tokens: most tokens to write; 0 scores the prompt and draws nothing; None means
            128, or fewer when the context ends sooner.
        temperature: 0 is greedy.
        top_k: keep the k best (-1 keeps all), then `top_p` of the mass that is left, then
            `min_p` relative to the best: in this order.
        repetition_penalty: on prompt and output tokens; the other two penalties on output only.
        logit_bias: (token id, value) pairs added to the logits.
        sampling_seed: draws depend on (seed, sample index, position) alone; None takes one from
            the engine's generator at arrival.
        json_schema, regex, ebnf, choice, structural_tag: what the output must match, at most one
            of them; the schema as text, tags as a JSON list.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    sampling_seed: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    choice: tuple[str, ...] = ()
    structural_tag: str | None = None

    @property
    def grammar(self) -> GrammarSpec | None:
        """What the output must match; None for anything."""
        if self.json_schema is not None:
            return GrammarSpec(kind="json_schema", text=self.json_schema)
        if self.regex is not None:
            return GrammarSpec(kind="regex", text=self.regex)
        if self.ebnf is not None:
            return GrammarSpec(kind="ebnf", text=self.ebnf)
        if self.structural_tag is not None:
            return GrammarSpec(kind="structural_tag", text=self.structural_tag)
        if self.choice:
            return GrammarSpec(kind="choice", text=json.dumps(self.choice))
        return None

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken, whatever the noise."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalty(self) -> bool:
        """Whether logits depend on the tokens seen so far."""
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @classmethod
    def parse(cls, raw: "Mapping[str, object] | SamplingParams | None") -> "SamplingParams":
        """Validate a user's mapping.

        Raises:
            RequestError: an unknown name, a feature that is not built, or a value out of range.
        """
        if raw is None:
            return cls()
        if isinstance(raw, SamplingParams):
            # Made by hand, its values were never looked at.
            raw = asdict(raw)
        if not isinstance(raw, Mapping):
            raise RequestError(
                f"sampling_params: got {type(raw).__name__}; give a mapping of names to values"
            )
        return cls(**_checked(raw))  # type: ignore[arg-type]  # values were checked by name


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobSpec:
    """Which logprobs a request wants back.

    Attributes:
        start_len: first prompt position that is reported; None (-1 on the wire) reports outputs
            only.
        top_k: best tokens a position.
        token_ids: ids whose logprob is wanted at every position.
        mode: scale of output logprobs; `processed` is after penalties, bias and temperature and
            before top-k, top-p and min-p.
        prompt_temperature: scale of prompt logprobs; 1 is raw.
    """

    wanted: bool = False
    start_len: int | None = None
    top_k: int = 0
    token_ids: tuple[int, ...] = ()
    mode: LogprobsMode = "processed"
    prompt_temperature: float = 1.0

    @property
    def wants_prompt(self) -> bool:
        """Whether any prompt position is reported."""
        return self.wanted and self.start_len is not None


def parse_logprobs(
    *,
    return_logprob: bool,
    logprob_start_len: int | None,
    top_logprobs_num: int | None,
    token_ids_logprob: TokenIds | None,
    mode: str | None,
    default_mode: LogprobsMode,
    sampling: SamplingParams,
) -> LogprobSpec:
    """Validate the logprob arguments of one request (contract: `generate`).

    Raises:
        RequestError: a value out of range, or an unknown mode.
    """
    # A value of any type may come in here: an array compares to an array.
    if mode is not None and str(mode) not in ("raw", "processed"):
        raise RequestError(f"logprobs_mode: got {brief(mode)}; choose 'raw' or 'processed'")
    if not return_logprob:
        return LogprobSpec()
    start = -1 if logprob_start_len is None else _integer("logprob_start_len", logprob_start_len)
    if start < -1:
        raise RequestError(f"logprob_start_len: got {start}, the least is -1 (outputs only)")
    top_k = 0 if top_logprobs_num is None else _integer("top_logprobs_num", top_logprobs_num)
    if top_k < 0:
        raise RequestError(f"top_logprobs_num: got {top_k}, the least is 0; give the count wanted")
    token_ids = _id_tuple("token_ids_logprob", token_ids_logprob)
    scaled = mode == "processed" and not sampling.is_greedy
    return LogprobSpec(
        wanted=True,
        start_len=None if start < 0 else start,
        top_k=top_k,
        token_ids=token_ids,
        mode=default_mode if mode is None else ("raw" if mode == "raw" else "processed"),
        prompt_temperature=sampling.temperature if scaled else 1.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What the running engine can hold; every request is checked against it at admission.

    Attributes:
        no_grammars: why requests with a grammar are refused; None if they are served.
    """

    vocab_size: int
    context_length: int
    max_total_tokens: int
    max_top_k: int
    max_token_ids: int
    eos_token_ids: tuple[int, ...] = field(default=())
    no_grammars: str | None = None

    @property
    def max_tokens(self) -> int:
        """Longest sequence, prompt and output together, that can ever be held."""
        return min(self.context_length, self.max_total_tokens)


def check_prompt(ids: TokenIds, limits: RequestLimits) -> None:
    """Refuse prompts that are empty, hold ids out of range, or are longer than the engine holds.

    Raises:
        RequestError: with value, limit and fix.
    """
    if len(ids) == 0:
        raise RequestError("prompt: got 0 tokens, the least is 1; give some text or input_ids")
    ends = (ids.min(), ids.max()) if isinstance(ids, np.ndarray) else (min(ids), max(ids))
    for token in ends:
        if not 0 <= token < limits.vocab_size:
            raise RequestError(
                f"input_ids: got id {brief(int(token))}, the vocabulary is "
                f"[0, {limits.vocab_size}); tokenise with this model's tokenizer"
            )
    if len(ids) > limits.max_tokens:
        name = _binding_limit(limits)
        raise RequestError(
            f"prompt: got {len(ids)} tokens, {name} is {limits.max_tokens}; shorten the prompt "
            f"or raise {name}"
        )


def resolve_max_new(params: SamplingParams, num_prompt: int, limits: RequestLimits) -> int:
    """Most tokens this request may write: as asked, or what the context leaves when not asked.

    Raises:
        RequestError: prompt and asked output together exceed what the engine can hold.
    """
    room = limits.max_tokens - num_prompt
    if params.max_new_tokens is None:
        default = min(DEFAULT_MAX_NEW_TOKENS, room)
        if params.min_new_tokens > default:
            raise RequestError(
                f"min_new_tokens: got {params.min_new_tokens}, max_new_tokens is {default} when "
                "not given; give max_new_tokens too"
            )
        return default
    if params.max_new_tokens > room:
        name = _binding_limit(limits)
        raise RequestError(
            f"max_new_tokens: got {params.max_new_tokens} after a prompt of {num_prompt} tokens, "
            f"{name} is {limits.max_tokens}; ask for at most {room}"
        )
    return params.max_new_tokens


def check_against_model(
    params: SamplingParams, logprob: LogprobSpec, num_prompt: int, limits: RequestLimits
) -> None:
    """Refuse what only the loaded model can tell: ids and counts beyond its vocabulary.

    Raises:
        RequestError: with value, limit and fix.
    """
    named = (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", tuple(token for token, _ in params.logit_bias)),
        ("token_ids_logprob", logprob.token_ids),
    )
    for name, ids in named:
        for token in ids:
            if not 0 <= token < limits.vocab_size:
                raise RequestError(
                    f"{name}: got id {token}, the vocabulary is [0, {limits.vocab_size}); "
                    "use ids of this model's tokenizer"
                )
    if logprob.top_k > limits.max_top_k:
        raise RequestError(
            f"top_logprobs_num: got {logprob.top_k}, the limit is {limits.max_top_k} (vocabulary "
            f"{limits.vocab_size}, logits_workspace); ask for fewer"
        )
    if len(logprob.token_ids) > limits.max_token_ids:
        raise RequestError(
            f"token_ids_logprob: got {len(logprob.token_ids)} ids, the limit is "
            f"{limits.max_token_ids}; ask for fewer or raise logits_workspace"
        )
    if logprob.start_len is not None and logprob.start_len > num_prompt:
        raise RequestError(
            f"logprob_start_len: got {logprob.start_len}, the prompt has {num_prompt} tokens; "
            "give a position inside the prompt"
        )
    grammar = params.grammar
    if grammar is not None and limits.no_grammars is not None:
        raise RequestError(f"{grammar.kind}: {limits.no_grammars}")
    if params.n > 1 and params.max_new_tokens == 0:
        raise RequestError(
            f"n: got {params.n} with max_new_tokens 0; scoring gives one result, use n=1"
        )


def _binding_limit(limits: RequestLimits) -> str:
    binding_pool = limits.max_total_tokens < limits.context_length
    return "max_total_tokens" if binding_pool else "context_length"


# -- parsing of one value at a time ----------------------------------------------------------


def _checked(raw: Mapping[str, object]) -> dict[str, object]:
    values: dict[str, object] = {}
    known = {f.name for f in fields(SamplingParams)}
    for name, value in raw.items():
        if name in known:
            if value is not None:
                values[name] = _PARSERS[name](name, value)
        elif name in _NOT_BUILT:
            if value is not None:
                raise RequestError(f"{name}: not built yet in this version; leave it out")
        elif name in _NEUTRAL_ONLY:
            if value is not None and not (isinstance(value, int) and value == 1):
                raise RequestError(f"{name}: got {brief(value)}, not supported; leave it out")
        else:
            raise RequestError(
                f"sampling_params: unknown name {brief(name)}; see docs for the list"
            )
    _check_ranges(values)
    given = [name for name in _GRAMMARS if values.get(name)]
    if len(given) > 1:
        raise RequestError(f"{given[0]} and {given[1]}: both given; the output can match one")
    return values


def _check_ranges(values: dict[str, object]) -> None:
    limits: dict[str, tuple[float, float]] = {
        "min_new_tokens": (0, math.inf),
        "max_new_tokens": (0, math.inf),
        "temperature": (0, 1e4),
        "top_p": (0, 1),
        "min_p": (0, 1),
        "frequency_penalty": (-2, 2),
        "presence_penalty": (-2, 2),
        "repetition_penalty": (_LEAST_REPETITION_PENALTY, 2),
        "n": (1, MAX_SAMPLES),
        "sampling_seed": (-(2**63), 2**63 - 1),
    }
    for name in ("top_p", "repetition_penalty"):
        if values.get(name) == 0:
            raise RequestError(f"{name}: got 0, it must be above 0; 1 turns it off")
    for name, (low, high) in limits.items():
        value = values.get(name)
        if isinstance(value, int | float) and not low <= value <= high:
            raise RequestError(f"{name}: got {value}, the range is [{low}, {high}]; change it")
    top_k = values.get("top_k", -1)
    if isinstance(top_k, int) and top_k < -1:
        raise RequestError(f"top_k: got {top_k}, the least is -1 (off); give a positive count")
    least, most = values.get("min_new_tokens", 0), values.get("max_new_tokens")
    if isinstance(least, int) and isinstance(most, int) and least > most:
        raise RequestError(
            f"min_new_tokens: got {least}, max_new_tokens is {most}; lower the first"
        )


def brief(value: object) -> str:
    """What was given, short enough for a message of one line, whatever it is."""
    try:
        return " ".join(_BRIEF.repr(value).split())
    except ValueError:  # Python writes out no integer of more than some thousand digits
        return f"{type(value).__name__} beyond any limit"


def _briefly() -> reprlib.Repr:
    shown = reprlib.Repr()
    shown.maxlevel, shown.maxlist, shown.maxtuple, shown.maxdict = 2, 4, 4, 4
    shown.maxstring = shown.maxother = 60
    return shown


_BRIEF = _briefly()


def _integer(name: str, value: object) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise RequestError(f"{name}: got {brief(value)}, an integer is needed")
    low, high = int(_INT64.min), int(_INT64.max)
    if not low <= value <= high:
        raise RequestError(f"{name}: got {brief(value)}, the range is [{low}, {high}]; change it")
    return int(value)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise RequestError(f"{name}: got {brief(value)}, a number is needed")
    try:
        number = float(value)
    except OverflowError:
        raise RequestError(f"{name}: got an integer beyond any float; lower it") from None
    if not math.isfinite(number):
        raise RequestError(f"{name}: got {number}, a finite number is needed")
    return number


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name}: got {brief(value)}, true or false is needed")
    return value


def _id_tuple(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, int) and not isinstance(value, bool):
        return (_integer(name, value),)
    # Not any iterable: an iterator would be used up by the first prompt of a batch.
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | AbstractSet | np.ndarray):
        raise RequestError(f"{name}: got {brief(value)}, a list of token ids is needed")
    return tuple(_integer(name, item) for item in value)


def _stops(name: str, value: object) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(i, str) for i in items):
        raise RequestError(f"{name}: got {brief(value)}, a string or a list of strings is needed")
    if any(not item for item in items):
        raise RequestError(f"{name}: got an empty string, which would stop at once; remove it")
    if len(items) > _MAX_STOPS or sum(len(i) for i in items) > _MAX_STOP_CHARS:
        raise RequestError(
            f"{name}: got {len(items)} strings of {sum(len(i) for i in items)} characters, the "
            f"limits are {_MAX_STOPS} and {_MAX_STOP_CHARS}; give fewer or shorter ones"
        )
    return tuple(items)


def _bias(name: str, value: object) -> tuple[tuple[int, float], ...]:
    if isinstance(value, tuple) and all(isinstance(v, tuple) and len(v) == 2 for v in value):
        items = list(value)
    elif isinstance(value, Mapping):
        items = list(value.items())
    else:
        raise RequestError(f"{name}: got {brief(value)}, a mapping of token id to number is needed")
    pairs: dict[int, float] = {}
    for key, amount in items:
        token = _bias_key(name, key)
        bias = _number(name, amount)
        if abs(bias) > _MAX_BIAS:
            raise RequestError(
                f"{name}: got {bias}, the range is [-{_MAX_BIAS}, {_MAX_BIAS}]; change it"
            )
        if token in pairs:
            raise RequestError(f"{name}: got id {token} twice; give each id one value")
        pairs[token] = bias
    return tuple(sorted(pairs.items()))


def _bias_key(name: str, key: object) -> int:
    if isinstance(key, str) and key.isdecimal() and len(key) <= _MAX_ID_DIGITS:
        return int(key)
    if isinstance(key, int | np.integer) and not isinstance(key, bool) and key >= 0:
        return _integer(name, key)
    raise RequestError(f"{name}: got key {brief(key)}, a token id is needed")


def _tags(name: str, value: object) -> str:
    # Made by this function before, when a SamplingParams is parsed again.
    if isinstance(value, str) and value.startswith("[["):
        return value
    return tags_text(name, value)


_PARSERS = {
    "max_new_tokens": _integer,
    "min_new_tokens": _integer,
    "temperature": _number,
    "top_p": _number,
    "top_k": _integer,
    "min_p": _number,
    "frequency_penalty": _number,
    "presence_penalty": _number,
    "repetition_penalty": _number,
    "stop": _stops,
    "stop_token_ids": _id_tuple,
    "n": _integer,
    "ignore_eos": _boolean,
    "skip_special_tokens": _boolean,
    "spaces_between_special_tokens": _boolean,
    "no_stop_trim": _boolean,
    "logit_bias": _bias,
    "sampling_seed": _integer,
    "json_schema": schema_text,
    "regex": pattern_text,
    "ebnf": rules_text,
    "choice": choices,
    "structural_tag": _tags,
}
