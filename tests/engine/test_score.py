"""`Engine.score` in all its forms, against the logprobs of `generate`."""

import math
import re
from typing import Any

import numpy as np
import pytest

from seawall import Engine, RequestError
from tests.engine.harness import GREEDY, TEXT, every_logprob, score_from

LAST_ID = 4095


def scores(engine: Engine, *args: Any, **named: Any) -> Any:
    """`score`, whose result depends on its form."""
    return engine.score(*args, **named)


def test_score_texts(demo: Engine, ids: list[int], scored: list[float | None]) -> None:
    right = [value for value in scored if value is not None]
    for prompts in (TEXT, [TEXT], [ids]):
        (result,) = scores(demo, prompts)
        assert result.token_ids == tuple(ids[1:])
        assert result.token_logprobs == pytest.approx(right, abs=5e-5)
        assert result.logprob == pytest.approx(math.fsum(right), abs=1e-3)
        assert result.num_tokens == len(ids) - 1
        assert not result.is_greedy
    total = math.fsum(right)
    for reduce, value in (
        ("sum", total),
        ("mean", total / len(right)),
        ("perplexity", math.exp(-total / len(right))),
    ):
        (result,) = scores(demo, [TEXT], reduce=reduce)
        assert result.value == pytest.approx(value, rel=1e-4)
        assert result.token_logprobs is None
    assert scores(demo, []) == []


def test_score_pairs_and_options(demo: Engine) -> None:
    pairs = [("Once upon a", " time"), ("Once upon a ", "time"), ("", "The fox"), ("The fox", "!")]
    results = scores(demo, pairs=pairs)
    # Trailing spaces move to the continuation.
    assert results[0] == results[1]
    for (context, continuation), result in zip(pairs, results, strict=True):
        meta = score_from(demo, encode(demo, context + continuation), 0)
        entries = meta["input_token_logprobs"][-result.num_tokens :]
        assert tuple(entry[1] for entry in entries) == result.token_ids
        assert result.logprob == pytest.approx(math.fsum(e[0] for e in entries), abs=1e-4)
    # An empty context scores the whole text, the first word included.
    assert results[2].num_tokens == len(encode(demo, "The fox")) - 1
    options = scores(demo, context="Once upon a", options=[" time", " king", "!"])
    assert options[0].logprob == pytest.approx(results[0].logprob, abs=1e-4)
    assert options[0].logprob > options[1].logprob
    assert options[0].is_greedy
    assert not options[1].is_greedy


def encode(engine: Engine, text: str) -> list[int]:
    assert engine.tokenizer is not None
    return engine.tokenizer.encode_batch([text])[0]


def test_score_greedy_continuation(demo: Engine, ids: list[int]) -> None:
    output = demo.generate(input_ids=ids, sampling_params={**GREEDY, "ignore_eos": True})
    results = scores(demo, [[*ids, *output["output_ids"]]], top_logprobs_num=2)
    assert [len(best) for best in results[0].top_logprobs] == [2] * results[0].num_tokens
    tail = zip(results[0].token_ids[-6:], results[0].top_logprobs[-6:], strict=True)
    assert all(token == best[0][0] for token, best in tail)


def test_score_labels(demo: Engine) -> None:
    labels = [265, 316, LAST_ID]
    found = scores(demo, query="The fox", items=[" and", " said"], label_token_ids=labels)
    for item, values in zip([" and", " said"], found, strict=True):
        logprobs = every_logprob(demo, encode(demo, f"The fox{item}"), "raw")
        assert values == pytest.approx([math.exp(logprobs[t]) for t in labels], rel=1e-3, abs=1e-9)
    (soft,) = scores(
        demo, query="The fox", items=" and", label_token_ids=labels, apply_softmax=True
    )
    assert sum(soft) == pytest.approx(1)
    assert soft == pytest.approx([v / sum(found[0]) for v in found[0]], rel=1e-4)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({}, "got 0 of prompts, pairs and context; give one"),
        ({"pairs": [("a", "b")], "context": "x"}, "got 2 of prompts, pairs and context"),
        ({"context": "x"}, "options: got None; give the texts"),
        ({"pairs": [("a", "")]}, "'' adds no token to its context"),
        ({"pairs": [("a", "b")], "reduce": "median"}, "reduce: got 'median'; choose one of"),
        ({"query": "x"}, "go together; give all three"),
        ({"pairs": ["ab"]}, "pairs: got 'ab'; give (context, continuation)"),
        ({"pairs": [("a", [5])]}, "must both be text or both be token ids"),
        ({"pairs": [([5], [])]}, "continuation: got 0 token ids; give one or more"),
        ({"pairs": [([5], [[6]])]}, "got a list of lists; give one list of token ids"),
        ({"pairs": [([5], [4096])]}, "got id 4096, the vocabulary is"),
        ({"context": "x", "options": "y"}, "options: got one string; give a list"),
        ({"prompts": ["a", [5]]}, "got text and token ids together; give one kind"),
        ({"prompts": [5, 6]}, "got one list of token ids; give a list of them"),
        ({"prompts": [[5, "6"]]}, "got '6' in the list, integers are needed"),
        ({"prompts": ["a"], "top_logprobs_num": -1}, "got -1, the least is 0"),
        ({"prompts": ["a"], "top_logprobs_num": "3"}, "got '3', an integer is needed"),
        ({"prompts": ["a"], "top_logprobs_num": 2, "reduce": "sum"}, "keeps no token; use reduce"),
        ({"query": "x", "items": [[5]], "label_token_ids": [5]}, "must both be text or both"),
        ({"query": "x", "items": 5, "label_token_ids": [5]}, "items: got int; give a list"),
        ({"query": "x", "items": "y", "label_token_ids": ["5"]}, "got '5', an integer is needed"),
    ],
)
def test_score_arguments(demo: Engine, args: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(said)):
        scores(demo, **args)


def test_reductions_agree_and_keep_no_token(demo: Engine) -> None:
    pairs = [("Once upon a", " time"), ("The fox", " ran into the wood"), ("A", " king")]
    full = scores(demo, pairs=pairs)
    for reduce in ("sum", "mean", "perplexity"):
        for ours, theirs in zip(scores(demo, pairs=pairs, reduce=reduce), full, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert ours.num_tokens == theirs.num_tokens
            assert ours.is_greedy == theirs.is_greedy
            assert ours.token_ids is ours.token_logprobs is ours.top_logprobs is None
            mean = theirs.logprob / theirs.num_tokens
            right = {"sum": theirs.logprob, "mean": mean, "perplexity": math.exp(-mean)}[reduce]
            assert ours.value == pytest.approx(right, rel=1e-4)


def test_score_token_ids(demo: Engine) -> None:
    """Pairs and options of token ids, lists or arrays, score as the text that they are."""
    context, whole = encode(demo, "Once upon a"), encode(demo, "Once upon a time")
    tail = whole[len(context) :]
    (right,) = scores(demo, pairs=[("Once upon a", " time")])
    for found in (
        scores(demo, pairs=[(context, tail)]),
        scores(demo, context=context, options=[tail]),
        scores(demo, pairs=[(np.array(context), np.array(tail))]),
    ):
        assert found[0].token_ids == right.token_ids
        assert found[0].logprob == pytest.approx(right.logprob, abs=1e-4)
    # Nothing before it: the begin token stands there.
    (bare,) = scores(demo, pairs=[([], tail)])
    assert bare.token_ids == tuple(tail)
    labels = [265, 316]
    texts = scores(demo, query="The fox", items=[" and"], label_token_ids=labels)
    query, item = encode(demo, "The fox"), encode(demo, "The fox and")
    ids = scores(demo, query=query, items=[item[len(query) :]], label_token_ids=labels)
    assert ids[0] == pytest.approx(texts[0], rel=1e-3)
    assert scores(demo, query="x", items=[], label_token_ids=labels) == []


def test_softmax_over_labels_that_are_all_unlikely(demo: Engine) -> None:
    (shares,) = scores(
        demo, query="The fox", items=" and", label_token_ids=[5, 7], apply_softmax=True
    )
    assert sum(shares) == pytest.approx(1)


def test_an_unknown_argument_is_refused(demo: Engine) -> None:
    with pytest.raises(TypeError, match="unknown argument 'top_logprobs'"):
        scores(demo, context="x", options=["y"], top_logprobs=3)
