"""Scores of texts, (context, continuation) pairs, and options after one context.

    score(["a text", ...])                         every token but the first
    score(pairs=[("context", "continuation")])     the continuation's tokens
    score(context="...", options=["a", "b"])       each option after the same context
    score(query=..., items=..., label_token_ids=)  SGLang's form: label logprobs after query + item

Pairs are split as lm-evaluation-harness does it: trailing spaces of the context move to the
continuation, and the continuation is what the encoding of both has beyond that of the context.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypedDict, TypeVar

import numpy as np

from seawall.core.errors import EngineError, RequestError
from seawall.core.params import (
    LogprobSpec,
    SamplingParams,
    TokenIds,
    brief,
    parse_logprobs,
)
from seawall.core.step import F32, I32
from seawall.core.wire import GenerateRequest
from seawall.offline.collect import SampleCollector
from seawall.offline.inputs import Call, InputReader, id_rows
from seawall.offline.scores import ScoreTotals

Reduce = Literal["none", "sum", "mean", "perplexity"]
Collectors = Mapping[tuple[str, int], SampleCollector]
_REDUCTIONS = ("none", "sum", "mean", "perplexity")
_SCORING = SamplingParams(max_new_tokens=0, temperature=0.0)
T = TypeVar("T")


class Run(Protocol):
    """Runs all requests of a call; what `make` makes of their scores is all that is left."""

    def __call__(self, call: Call, make: Callable[[Collectors], T]) -> T:
        """Returns what `make` returns."""


class ScoreArgs(TypedDict, total=False):
    """Keyword arguments of `Engine.score`; a pair, or context and options, may be token ids."""

    pairs: Sequence[tuple[str, str]] | Sequence[tuple[Sequence[int], Sequence[int]]] | None
    context: str | Sequence[int] | None
    options: Sequence[str] | Sequence[Sequence[int]] | None
    reduce: Reduce
    top_logprobs_num: int
    query: str | Sequence[int] | None
    items: str | Sequence[str] | Sequence[Sequence[int]] | None
    label_token_ids: Sequence[int] | None
    apply_softmax: bool
    item_first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    """Logprobs of the scored tokens of one text or continuation.

    With `reduce` other than "none" nothing of a token is kept: each step's scores are added up as
    they come, so that host memory does not grow with the length of the prompts.

    Attributes:
        logprob: sum over the scored tokens, in nats.
        num_tokens: scored tokens.
        is_greedy: each scored token is the likeliest one (ties: the lowest id).
        value: what `reduce` asked for: sum, mean or perplexity; the sum for "none".
        token_ids, token_logprobs: of the scored tokens; None unless `reduce` is "none".
        top_logprobs: (ids, logprobs) of the best, one pair a token, if asked.
    """

    logprob: float
    num_tokens: int
    is_greedy: bool
    value: float
    token_ids: tuple[int, ...] | None
    token_logprobs: tuple[float, ...] | None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None


def score(
    reader: InputReader, run: Run, prompts: Sequence[object] | None, args: ScoreArgs
) -> list[ScoreResult] | list[list[float]]:
    """See the module's docstring.

    Raises:
        RequestError: arguments that don't go together, or a prompt that can't be scored.
        EngineError: a request was aborted while it ran.
        TypeError: an argument of a name it does not have.
    """
    for name in args:
        if name not in ScoreArgs.__annotations__:
            raise TypeError(f"score() got an unknown argument {name!r}")
    if args.get("query") is not None or args.get("items") is not None:
        return _label_scores(reader, run, args)
    reduce = args.get("reduce", "none")
    if str(reduce) not in _REDUCTIONS:
        raise RequestError(f"reduce: got {brief(reduce)}; choose one of {', '.join(_REDUCTIONS)}")
    top_k = _top_k(args.get("top_logprobs_num", 0))
    if top_k and reduce != "none":
        raise RequestError(
            f"top_logprobs_num: got {top_k} with reduce {reduce!r}, which keeps no token; "
            "use reduce='none'"
        )
    rows = _rows(reader, prompts, args)
    if reduce == "none":
        return _score_tokens(reader, run, rows, top_k)
    return _score_totals(reader, run, rows, reduce)


def _rows(
    reader: InputReader, prompts: Sequence[object] | None, args: ScoreArgs
) -> list[tuple[TokenIds, int]]:
    """What is scored: the ids of each row, and the first of them that counts."""
    given = [prompts is not None, args.get("pairs") is not None, args.get("context") is not None]
    if sum(given) != 1:
        raise RequestError(f"score: got {sum(given)} of prompts, pairs and context; give one")
    if prompts is not None:
        return _prompt_rows(reader, prompts)
    if args.get("pairs") is not None:
        return encode_pairs(reader, args["pairs"] or ())
    context, options = args["context"], args.get("options")
    if options is None:
        raise RequestError("options: got None; give the texts to score after the context")
    if isinstance(options, str):
        raise RequestError("options: got one string; give a list of them")
    return encode_pairs(reader, [(context, option) for option in options])


def _top_k(value: object) -> int:
    spec = parse_logprobs(
        return_logprob=True,
        logprob_start_len=None,
        top_logprobs_num=value,  # type: ignore[arg-type]  # what is no integer is refused
        token_ids_logprob=None,
        mode=None,
        default_mode="raw",
        sampling=_SCORING,
    )
    return spec.top_k


def encode_pairs(reader: InputReader, pairs: Sequence[object]) -> list[tuple[TokenIds, int]]:
    """(ids of context and continuation, index of the first continuation token) for each pair.

    An empty context becomes the tokenizer's begin token, or its end token if it has none.

    Raises:
        RequestError: a continuation of no tokens, or something that is no pair.
    """
    found = [_pair(pair) for pair in pairs]
    texts = [(a, b) for a, b in found if isinstance(a, str) and isinstance(b, str)]
    if len(texts) == len(found):
        return _text_pairs(reader, texts)
    if any(isinstance(part, str) for pair in found for part in pair):
        raise RequestError("score: context and continuation must both be text or both be token ids")
    return [_joined_ids(reader, context, continuation) for context, continuation in found]


def _pair(pair: object) -> tuple[object, object]:
    if isinstance(pair, list | tuple) and len(pair) == 2:
        return pair[0], pair[1]
    raise RequestError(f"pairs: got {brief(pair)}; give (context, continuation)")


def _text_pairs(
    reader: InputReader, pairs: Sequence[tuple[str, str]]
) -> list[tuple[TokenIds, int]]:
    split = [_moved_spaces(context, continuation) for context, continuation in pairs]
    if not split:
        return []
    wholes = reader.tokenize([context + continuation for context, continuation in split])
    contexts = reader.tokenize([context for context, _ in split])
    rows: list[tuple[TokenIds, int]] = []
    for (context, continuation), whole, head in zip(split, wholes, contexts, strict=True):
        start = len(head)
        if not context:
            begin = reader.begin_id
            whole = whole if whole[:1] == [begin] else [begin, *whole]
            start = 1
        if len(whole) <= start:
            raise RequestError(
                f"continuation: {brief(continuation)} adds no token to its context; give more text"
            )
        rows.append((whole, start))
    return rows


def _joined_ids(reader: InputReader, context: object, continuation: object) -> tuple[TokenIds, int]:
    head, tail = _one_row("context", context), _one_row("continuation", continuation)
    if not tail:
        raise RequestError("continuation: got 0 token ids; give one or more")
    head = head or [reader.begin_id]
    return [*head, *tail], len(head)


def _one_row(name: str, value: object) -> list[int]:
    rows, is_batch = id_rows(value, name)
    if is_batch:
        raise RequestError(f"{name}: got a list of lists; give one list of token ids")
    return [int(token) for token in rows[0]]


def _moved_spaces(context: str, continuation: str) -> tuple[str, str]:
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def _prompt_rows(reader: InputReader, prompts: Sequence[object]) -> list[tuple[TokenIds, int]]:
    if isinstance(prompts, str):
        prompts = [prompts]
    rows: Sequence[TokenIds] = []
    if isinstance(prompts, list | tuple) and any(isinstance(p, str) for p in prompts):
        if not all(isinstance(p, str) for p in prompts):
            raise RequestError("prompts: got text and token ids together; give one kind")
        rows = reader.tokenize([str(p) for p in prompts])
    elif len(prompts):
        rows, is_batch = id_rows(prompts, "prompts")
        if not is_batch:
            raise RequestError("prompts: got one list of token ids; give a list of them")
    return [(row, 1) for row in rows]


def _score_tokens(
    reader: InputReader, run: Run, rows: Sequence[tuple[TokenIds, int]], top_k: int
) -> list[ScoreResult]:
    call = _scoring_call(reader, rows, max(top_k, 1), totals_only=False)
    return run(call, lambda samples: [_tokens_result(samples, r, top_k) for r in call.requests])


def _score_totals(
    reader: InputReader, run: Run, rows: Sequence[tuple[TokenIds, int]], reduce: Reduce
) -> list[ScoreResult]:
    call = _scoring_call(reader, rows, 1, totals_only=True)
    return run(call, lambda samples: [_totals_result(samples, r, reduce) for r in call.requests])


def _scoring_call(
    reader: InputReader,
    rows: Sequence[tuple[TokenIds, int]],
    top_k: int,
    *,
    totals_only: bool,
) -> Call:
    # The best token of each position tells whether greedy decoding would have written the text.
    requests = tuple(
        reader.request(
            ids, _SCORING, LogprobSpec(wanted=True, start_len=min(start, len(ids)), top_k=top_k)
        )
        for ids, start in rows
    )
    return Call(requests=requests, is_batch=True, with_text=False, totals_only=totals_only)


def _ended(samples: Collectors, rid: str) -> SampleCollector:
    sample = samples[rid, 0]
    if sample.finish is None or sample.finish["type"] == "abort":
        raise EngineError(f"request {rid}: {sample.finish}")
    return sample


def _tokens_result(samples: Collectors, request: GenerateRequest, top_k: int) -> ScoreResult:
    scores = _ended(samples, request.rid).prompt
    ids: I32 = request.input_ids[request.logprob.start_len :]
    total = _total(scores.logprobs)
    return ScoreResult(
        logprob=total,
        num_tokens=len(ids),
        is_greedy=bool((scores.top_ids[:, 0] == ids).all()),
        value=total,
        token_ids=tuple(ids.tolist()),
        token_logprobs=tuple(scores.logprobs.tolist()),
        top_logprobs=(
            tuple(
                tuple(zip(best, logprobs, strict=True))
                for best, logprobs in zip(
                    scores.top_ids.tolist(), scores.top_logprobs.tolist(), strict=True
                )
            )
            if top_k
            else None
        ),
    )


def _totals_result(samples: Collectors, request: GenerateRequest, reduce: Reduce) -> ScoreResult:
    totals = _ended(samples, request.rid).totals
    assert isinstance(totals, ScoreTotals)
    mean = totals.logprob / totals.count if totals.count else 0.0
    values = {"sum": totals.logprob, "mean": mean, "perplexity": _exp(-mean)}
    return ScoreResult(
        logprob=totals.logprob,
        num_tokens=totals.count,
        is_greedy=totals.is_greedy,
        value=values[reduce],
        token_ids=None,
        token_logprobs=None,
    )


def _total(logprobs: F32) -> float:
    return float(logprobs.sum(dtype=np.float64))


def _exp(value: float) -> float:
    return math.exp(value) if value < math.log(np.finfo(np.float64).max) else math.inf


def _label_scores(reader: InputReader, run: Run, args: ScoreArgs) -> list[list[float]]:
    """SGLang's form: for each item, the probability of each label right after query and item."""
    labels = args.get("label_token_ids")
    items, query = args.get("items"), args.get("query")
    if query is None or items is None or labels is None or len(labels) == 0:
        raise RequestError("score: query, items and label_token_ids go together; give all three")
    rows = _joined_items(reader, query, items, first=bool(args.get("item_first")))
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0)
    spec = parse_logprobs(
        return_logprob=True,
        logprob_start_len=None,
        top_logprobs_num=None,
        token_ids_logprob=labels,
        mode="raw",
        default_mode="raw",
        sampling=sampling,
    )
    requests = tuple(reader.request(ids, sampling, spec) for ids in rows)
    call = Call(requests=requests, is_batch=True, with_text=False)
    softmax = bool(args.get("apply_softmax"))
    return run(
        call,
        lambda samples: [
            _label_values(_ended(samples, r.rid).output.token_logprobs[0], softmax)
            for r in requests
        ],
    )


def _label_values(logprobs: F32, softmax: bool) -> list[float]:
    exact = logprobs.astype(np.float64)
    if not softmax:
        values: list[float] = np.exp(exact).tolist()
        return values
    # Against the largest: labels may all be too unlikely for any float.
    shares = np.exp(exact - exact.max())
    scaled: list[float] = (shares / shares.sum()).tolist()
    return scaled


def _joined_items(
    reader: InputReader, query: object, items: object, *, first: bool
) -> Sequence[TokenIds]:
    if isinstance(items, str):
        items = [items]
    if not isinstance(items, list | tuple):
        raise RequestError(f"items: got {type(items).__name__}; give a list of texts or of ids")
    if isinstance(query, str) and all(isinstance(item, str) for item in items):
        texts = [item + query if first else query + item for item in items]
        return reader.tokenize(texts) if texts else []
    if isinstance(query, str) or any(isinstance(item, str) for item in items):
        raise RequestError("score: query and items must both be text or both be token ids")
    head, tails = _one_row("query", query), [_one_row("items", item) for item in items]
    return [[*tail, *head] if first else [*head, *tail] for tail in tails]
