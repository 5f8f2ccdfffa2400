"""Columns: the same numbers as SGLang's lists, in arrays; and results without text."""

import asyncio
import gc
import math
import sys
from typing import Any

import numpy as np
import pytest

from seawall import Engine, RequestError
from tests.engine.harness import GREEDY, TEXT, Result
from tests.engine.test_api import LOGPROB_KEYS

LEAST = float(np.finfo(np.float32).min)
INPUT = {"input_start", "input_ids", "input_logprobs"}
OUTPUT = {"output_ids", "output_logprobs"}
TOP = {"input_top_ids", "input_top_logprobs", "output_top_ids", "output_top_logprobs"}
GIVEN = {"logprob_token_ids", "input_token_ids_logprobs", "output_token_ids_logprobs"}


def both(engine: Engine, *args: Any, **options: Any) -> tuple[Any, Any]:
    """A call in both forms, each from an empty cache."""
    found = []
    for form in ("lists", "columns"):
        assert engine.flush_cache()
        found.append(engine.generate(*args, return_logprob=True, logprob_format=form, **options))
    return found[0], found[1]


def entries_of(logprobs: Any, ids: Any) -> list[Any]:
    """A column as the lists have it; NaN stands where they have null."""
    pairs = zip(logprobs.tolist(), ids.tolist(), strict=True)
    return [[None if math.isnan(value) else value, token, None] for value, token in pairs]


def rows_of(logprobs: Any, ids: Any) -> list[Any]:
    rows = [entries_of(row, ids if ids.ndim == 1 else ids[i]) for i, row in enumerate(logprobs)]
    return [None if row and row[0][0] is None else row for row in rows]


def check_same(lists: Result, columns: Result) -> None:
    """Every number of the lists is in the columns, and nothing else is."""
    assert columns["text"] == lists["text"]
    assert columns["output_ids"] == lists["output_ids"]
    meta, other = columns["meta_info"], lists["meta_info"]
    for side in ("input", "output"):
        chosen = entries_of(meta[f"{side}_logprobs"], meta[f"{side}_ids"])
        assert chosen == other[f"{side}_token_logprobs"]
        if f"{side}_top_logprobs" in other:
            top = rows_of(meta[f"{side}_top_logprobs"], meta[f"{side}_top_ids"])
            assert top == other[f"{side}_top_logprobs"]
        if f"{side}_token_ids_logprobs" in other:
            given = rows_of(meta[f"{side}_token_ids_logprobs"], meta["logprob_token_ids"])
            assert given == other[f"{side}_token_ids_logprobs"]
    assert set(meta) - INPUT - OUTPUT - TOP - GIVEN == set(other) - LOGPROB_KEYS
    assert set(meta) >= TOP if "input_top_logprobs" in other else not TOP & set(meta)
    assert set(meta) >= GIVEN if "input_token_ids_logprobs" in other else not GIVEN & set(meta)
    for name, array in meta.items():
        if isinstance(array, np.ndarray):
            assert array.dtype == (np.int32 if name.endswith("ids") else np.float32), name


@pytest.mark.parametrize("start", [-1, 0, 1, 5, "last", "all"])
@pytest.mark.parametrize("extra", [{}, {"top_logprobs_num": 3, "token_ids_logprob": [7, 4095]}])
def test_columns_are_the_lists(
    demo: Engine, ids: list[int], start: int | str, extra: dict[str, Any]
) -> None:
    first = {"last": len(ids) - 1, "all": len(ids)}.get(str(start), start)
    lists, columns = both(demo, None, GREEDY, ids, logprob_start_len=first, **extra)
    check_same(lists, columns)
    meta = columns["meta_info"]
    assert meta["input_start"] == (len(ids) if first == -1 else first)
    assert meta["input_ids"].tolist() == ids[meta["input_start"] :]
    # Token 0 has nothing before it; its row of best tokens is empty of ids too.
    nulls = np.isnan(meta["input_logprobs"])
    assert nulls.tolist() == [at == 0 for at in range(meta["input_start"], len(ids))]
    if extra and first == 0:
        assert (meta["input_top_ids"][0] == -1).all()
    assert meta["output_ids"].tolist() == columns["output_ids"]


def test_columns_of_samples_batches_and_prompts_alone(demo: Engine) -> None:
    texts = ["The fox", "A king", TEXT]
    params = [{**GREEDY, "n": 2}, {"max_new_tokens": 0}, {**GREEDY, "stop": [" a", " the"]}]
    options: dict[str, Any] = {"logprob_start_len": 0, "top_logprobs_num": 2}
    lists, columns = both(demo, texts, params, **options)
    assert len(lists) == len(columns) == 4
    for ours, theirs in zip(columns, lists, strict=True):
        check_same(theirs, ours)
    # Samples of one prompt have its arrays in common.
    first, second = columns[0]["meta_info"], columns[1]["meta_info"]
    assert np.shares_memory(first["input_logprobs"], second["input_logprobs"])
    assert columns[2]["meta_info"]["output_logprobs"].shape == (0,)
    assert columns[2]["meta_info"]["output_top_ids"].shape == (0, 2)


def test_columns_only_for_those_who_ask(demo: Engine) -> None:
    results = demo.generate(
        ["The fox", "A king"], GREEDY, return_logprob=[True, False], logprob_format="columns"
    )
    assert set(results[0]["meta_info"]) >= INPUT | OUTPUT
    assert not (INPUT | OUTPUT | TOP | GIVEN | LOGPROB_KEYS) & set(results[1]["meta_info"])


def test_forbidden_ids_have_the_least_number(demo: Engine) -> None:
    params = {**GREEDY, "min_new_tokens": 6, "stop_token_ids": [300]}
    lists, columns = both(demo, TEXT, params, token_ids_logprob=[300])
    check_same(lists, columns)
    assert columns["meta_info"]["output_token_ids_logprobs"][0, 0] == LEAST


def test_streams_of_columns_grow(demo: Engine) -> None:
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    options: dict[str, Any] = {
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "logprob_format": "columns",
    }
    assert demo.flush_cache()
    whole = demo.generate(TEXT, params, **options)["meta_info"]

    def check(pieces: list[Result]) -> None:
        assert len(pieces) > 3
        for piece in pieces:
            meta, count = piece["meta_info"], len(piece["output_ids"])
            # What a piece was given stays as it is while later ones come.
            for name in ("output_logprobs", "output_top_ids", "output_top_logprobs"):
                assert len(meta[name]) == count
                np.testing.assert_array_equal(meta[name], whole[name][:count])
            np.testing.assert_array_equal(meta["input_logprobs"], whole["input_logprobs"])

    assert demo.flush_cache()
    check(list(demo.generate(TEXT, params, stream=True, **options)))

    async def collect() -> list[Result]:
        stream = await demo.async_generate(TEXT, params, stream=True, **options)
        return [piece async for piece in stream]

    assert demo.flush_cache()
    check(asyncio.run(collect()))


def test_streams_of_lists_share_entries_but_not_lists(demo: Engine) -> None:
    params = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
    pieces = list(
        demo.generate(TEXT, params, stream=True, return_logprob=True, logprob_start_len=0)
    )
    first, last = (piece["meta_info"]["input_token_logprobs"] for piece in (pieces[0], pieces[-1]))
    assert first == last
    first.clear()
    assert len(last) == pieces[-1]["meta_info"]["prompt_tokens"]


def test_no_object_a_token_for_a_prompt(demo: Engine, ids: list[int]) -> None:
    """What a result of columns holds does not depend on the length of its prompt."""

    def num_objects(prompt: list[int]) -> int:
        result = demo.generate(
            input_ids=prompt,
            sampling_params={"max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=4,
            logprob_format="columns",
        )
        return reachable(result["meta_info"])

    assert num_objects((ids * 40)[:600]) == num_objects(ids[:3])


def reachable(value: object) -> int:
    """Objects that are reached from a value, other than types and modules."""
    seen, todo = set(), [value]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, type | type(sys)):
            continue
        seen.add(id(item))
        todo += gc.get_referents(item)
    return len(seen)


@pytest.mark.parametrize("form", ["rows", "", None, 3, ["lists"], np.array(["lists"])])
def test_other_formats_are_refused(demo: Engine, form: Any) -> None:
    if form is None:
        assert demo.generate("The fox", GREEDY, logprob_format=None)["text"]
        return
    with pytest.raises(RequestError, match=r"logprob_format: got .*; choose 'lists' or 'columns'"):
        demo.generate("The fox", GREEDY, logprob_format=form)


def test_columns_have_no_text_in_them(demo: Engine) -> None:
    with pytest.raises(RequestError, match="columns have no text; use logprob_format 'lists'"):
        demo.generate(
            TEXT,
            GREEDY,
            return_logprob=True,
            return_text_in_logprobs=True,
            logprob_format="columns",
        )


# -- results without text -----------------------------------------------------------------------


def test_without_text_nothing_is_decoded(
    demo: Engine, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = demo.generate(input_ids=ids, sampling_params=GREEDY)
    assert whole["text"]

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the tokenizer was called")

    for name in ("decode", "encode", "encode_batch", "token_bytes", "token_text"):
        monkeypatch.setattr(demo.tokenizer, name, never)
    bare = demo.generate(
        input_ids=ids, sampling_params=GREEDY, return_logprob=True, return_text=False
    )
    assert bare["output_ids"] == whole["output_ids"]
    assert bare["text"] == ""
    pieces = demo.generate(input_ids=ids, sampling_params=GREEDY, stream=True, return_text=False)
    assert [piece["text"] for piece in pieces] == [""] * 6
    with pytest.raises(AssertionError, match="the tokenizer was called"):
        demo.generate(input_ids=ids, sampling_params=GREEDY)


def test_stop_strings_work_without_text(demo: Engine) -> None:
    params: dict[str, Any] = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    words = demo.generate(TEXT, params)["text"].split()
    params["stop"] = " ".join(words[3:5])
    whole = demo.generate(TEXT, params)
    bare = demo.generate(TEXT, params, return_text=False)
    assert bare["text"] == ""
    assert bare["output_ids"] == whole["output_ids"]
    assert bare["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    assert bare["meta_info"]["finish_reason"]["type"] == "stop"


def test_return_text_is_a_switch(demo: Engine) -> None:
    with pytest.raises(RequestError, match="return_text: got 'no', true or false is needed"):
        demo.generate("The fox", GREEDY, return_text="no")
