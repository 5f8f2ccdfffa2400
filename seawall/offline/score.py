"""Scores of texts, (context, continuation) pairs, and options after one context.

    score(["a text", ...])                         every token but the first
    score(pairs=[("context", "continuation")])     the continuation's tokens
    score(context="...", options=["a", "b"])       each option after the same context
    score(query=..., items=..., label_token_ids=)  SGLang's form: label logprobs after query + item

Pairs are split as lm-evaluation-harness does it: trailing spaces of the context move to the
continuation, and the continuation is what the encoding of both has beyond that of the context.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict

import numpy as np

from seawall.core.errors import EngineError, RequestError
from seawall.core.params import LogprobSpec, SamplingParams
from seawall.offline.collect import SampleCollector
from seawall.offline.inputs import Call, InputReader

if TYPE_CHECKING:
    from seawall.core.step import F32

Reduce = Literal["none", "sum", "mean", "perplexity"]
Run = Callable[[Call], dict[tuple[str, int], SampleCollector]]
_REDUCTIONS = ("none", "sum", "mean", "perplexity")


class ScoreArgs(TypedDict, total=False):
    """Keyword arguments of `Engine.score`."""

    pairs: Sequence[tuple[str, str]] | None
    context: str | None
    options: Sequence[str] | None
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
    if reduce not in _REDUCTIONS:
        raise RequestError(f"reduce: got {reduce!r}; choose one of {', '.join(_REDUCTIONS)}")
    given = [prompts is not None, args.get("pairs") is not None, args.get("context") is not None]
    if sum(given) != 1:
        raise RequestError(f"score: got {sum(given)} of prompts, pairs and context; give one")
    if prompts is not None:
        rows = _prompt_rows(reader, prompts)
    elif args.get("pairs") is not None:
        rows = encode_pairs(reader, args["pairs"] or ())
    else:
        context, options = args["context"] or "", args.get("options")
        if options is None:
            raise RequestError("options: got None; give the texts to score after the context")
        rows = encode_pairs(reader, [(context, option) for option in options])
    return _score_rows(reader, run, rows, reduce, args.get("top_logprobs_num", 0))


def encode_pairs(
    reader: InputReader, pairs: Sequence[tuple[str, str]]
) -> list[tuple[list[int], int]]:
    """(ids of context and continuation, index of the first continuation token) for each pair.

    An empty context becomes the tokenizer's begin token, or its end token if it has none.

    Raises:
        RequestError: a continuation of no tokens.
    """
    split = [_moved_spaces(context, continuation) for context, continuation in pairs]
    if not split:
        return []
    wholes = reader.tokenize([context + continuation for context, continuation in split])
    contexts = reader.tokenize([context for context, _ in split])
    rows = []
    for (context, continuation), whole, head in zip(split, wholes, contexts, strict=True):
        start = len(head)
        if not context:
            begin = reader.begin_id
            whole = whole if whole[:1] == [begin] else [begin, *whole]
            start = 1
        if len(whole) <= start:
            raise RequestError(
                f"continuation: {continuation!r} adds no token to its context; give more text"
            )
        rows.append((whole, start))
    return rows


def _moved_spaces(context: str, continuation: str) -> tuple[str, str]:
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def _prompt_rows(reader: InputReader, prompts: Sequence[object]) -> list[tuple[list[int], int]]:
    if isinstance(prompts, str):
        prompts = [prompts]
    if all(isinstance(p, str) for p in prompts):
        rows = reader.tokenize([str(p) for p in prompts]) if prompts else []
    else:
        rows = [list(p) for p in prompts]  # type: ignore[call-overload]  # checked as ids below
    return [(row, 1) for row in rows]


def _score_rows(
    reader: InputReader,
    run: Run,
    rows: list[tuple[list[int], int]],
    reduce: Reduce,
    top_k: int,
) -> list[ScoreResult]:
    sampling = SamplingParams(max_new_tokens=0, temperature=0.0)
    # The best token of each position tells whether greedy decoding would have written the text.
    requests = tuple(
        reader.request(
            ids,
            sampling,
            LogprobSpec(wanted=True, start_len=min(start, len(ids)), top_k=max(top_k, 1)),
        )
        for ids, start in rows
    )
    collectors = run(Call(requests=requests, is_batch=True, text_in_logprobs=False))
    return [
        _reduced(collectors[request.rid, 0], start, reduce, top_k)
        for request, (_, start) in zip(requests, rows, strict=True)
    ]


def _reduced(sample: SampleCollector, start: int, reduce: Reduce, top_k: int) -> ScoreResult:
    if sample.finish is None or sample.finish["type"] == "abort":
        raise EngineError(f"request {sample.request.rid}: {sample.finish}")
    logprobs: F32 = sample.prompt.logprobs
    ids = sample.request.input_ids[start:]
    tops = sample.prompt.top
    total = math.fsum(logprobs.tolist())
    mean = total / len(ids) if len(ids) else 0.0
    values = {"none": total, "sum": total, "mean": mean, "perplexity": _exp(-mean)}
    full = reduce == "none"
    return ScoreResult(
        logprob=total,
        num_tokens=len(ids),
        is_greedy=all(int(best[0]) == int(i) for (best, _), i in zip(tops, ids, strict=True)),
        value=values[reduce],
        token_ids=tuple(ids.tolist()) if full else None,
        token_logprobs=tuple(logprobs.tolist()) if full else None,
        top_logprobs=(
            tuple(tuple(zip(best.tolist(), values.tolist(), strict=True)) for best, values in tops)
            if full and top_k
            else None
        ),
    )


def _exp(value: float) -> float:
    return math.exp(value) if value < math.log(np.finfo(np.float64).max) else math.inf


def _label_scores(reader: InputReader, run: Run, args: ScoreArgs) -> list[list[float]]:
    """SGLang's form: for each item, the probability of each label right after query and item."""
    labels = args.get("label_token_ids")
    items, query = args.get("items"), args.get("query")
    if query is None or items is None or not labels:
        raise RequestError("score: query, items and label_token_ids go together; give all three")
    rows = _joined_items(reader, query, items, first=bool(args.get("item_first")))
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0)
    spec = LogprobSpec(wanted=True, token_ids=tuple(labels), mode="raw")
    requests = tuple(reader.request(ids, sampling, spec) for ids in rows)
    collectors = run(Call(requests=requests, is_batch=True, text_in_logprobs=False))
    scores = []
    for request in requests:
        sample = collectors[request.rid, 0]
        if sample.finish is None or sample.finish["type"] == "abort":
            raise EngineError(f"request {request.rid}: {sample.finish}")
        values = np.exp(sample.output.given[0].astype(np.float64))
        if args.get("apply_softmax"):
            values = values / values.sum()
        scores.append([float(v) for v in values])
    return scores


def _joined_items(
    reader: InputReader, query: object, items: object, *, first: bool
) -> list[list[int]]:
    if isinstance(items, str):
        items = [items]
    if isinstance(query, str) and isinstance(items, list | tuple):
        texts = [str(i) + query if first else query + str(i) for i in items]
        return reader.tokenize(texts)
    if isinstance(query, list | tuple) and isinstance(items, list | tuple):
        heads = list(query)
        return [[*item, *heads] if first else [*heads, *item] for item in items]
    raise RequestError("score: query and items must both be text or both be token ids")
