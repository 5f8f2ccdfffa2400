"""/generate: the offline engine's results over a socket, whole and as a stream."""

import itertools
import json
import threading
from typing import Any

import httpx
import pytest

from seawall import Engine
from tests.server.harness import events, wait_idle

TEXT = "Once upon a time there was a fox"
GREEDY = {"max_new_tokens": 6, "temperature": 0}
TOLERANCE = 5e-5


def generate(client: httpx.Client, **body: Any) -> Any:
    response = client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def assert_same(found: Any, expected: Any) -> None:
    """Equal, floats within the tolerance between schedules."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            if name not in ("id", "e2e_latency", "cached_tokens"):
                assert_same(found[name], expected[name])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert_same(ours, theirs)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=TOLERANCE)
    else:
        assert found == expected


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"return_logprob": True},
        {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3},
        {"return_logprob": True, "logprob_start_len": 2, "token_ids_logprob": [5, 70, 9]},
        {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True},
        {"return_logprob": True, "logprob_start_len": 0, "logprobs_mode": "raw"},
        {"return_text": False},
    ],
    ids=lambda more: ",".join(more) or "plain",
)
def test_one_prompt_is_the_offline_engine_s(
    client: httpx.Client, engine: Engine, more: dict[str, Any]
) -> None:
    expected = engine.generate(TEXT, GREEDY, **more)
    assert_same(generate(client, text=TEXT, sampling_params=GREEDY, **more), expected)


def test_draws_with_a_seed_are_the_offline_engine_s(client: httpx.Client, engine: Engine) -> None:
    params = {"max_new_tokens": 8, "temperature": 0.9, "top_p": 0.9, "sampling_seed": 11, "n": 3}
    expected = engine.generate(TEXT, params)
    found = generate(client, text=TEXT, sampling_params=params)
    assert_same(found, expected)
    assert len({one["text"] for one in found}) > 1


def test_batch_with_values_for_each_prompt(client: httpx.Client, engine: Engine) -> None:
    rows = [[6, 70, 80], [6, 71, 81, 91], [6, 70, 80]]
    params = [{"max_new_tokens": 2 + i, "temperature": 0} for i in range(3)]
    body = {"return_logprob": [True, False, True], "logprob_start_len": [0, -1, 1]}
    expected = engine.generate(input_ids=rows, sampling_params=params, **body)
    found = generate(client, input_ids=rows, sampling_params=params, **body)
    assert_same(found, expected)
    assert generate(client, text=[]) == []


def test_columns_are_the_arrays_as_lists(client: httpx.Client, engine: Engine) -> None:
    more = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    found = generate(client, text=TEXT, sampling_params=GREEDY, logprob_format="columns", **more)[
        "meta_info"
    ]
    lists = engine.generate(TEXT, GREEDY, **more)["meta_info"]
    assert found["input_logprobs"][0] is None  # JSON has no NaN
    assert_same(found["input_logprobs"], [entry[0] for entry in lists["input_token_logprobs"]])
    assert_same(found["output_logprobs"], [entry[0] for entry in lists["output_token_logprobs"]])
    assert found["input_ids"] == [entry[1] for entry in lists["input_token_logprobs"]]


STREAMED = {
    "text": TEXT,
    "sampling_params": {"max_new_tokens": 24, "temperature": 0},
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 2,
    "token_ids_logprob": [5],
    "return_text_in_logprobs": True,
}


def stream(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    with client.stream("POST", "/generate", json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        found = events(response)
    assert found[-1] == "[DONE]"
    return [json.loads(event) for event in found[:-1]]


def test_stream_is_cumulative_and_ends_with_the_whole(client: httpx.Client) -> None:
    parts = stream(client, **STREAMED)
    assert len(parts) > 1
    whole = generate(client, **STREAMED)
    assert_same(parts[-1], whole)
    for before, after in itertools.pairwise(parts):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
        ours, theirs = before["meta_info"], after["meta_info"]
        assert ours["input_top_logprobs"] == theirs["input_top_logprobs"]
        assert len(ours["output_token_logprobs"]) == len(before["output_ids"])


def test_incremental_stream_joins_to_the_whole(client: httpx.Client) -> None:
    parts = stream(client, **STREAMED, incremental=True)
    whole = generate(client, **STREAMED)
    assert "".join(part["text"] for part in parts) == whole["text"]
    joined: dict[str, list[Any]] = {}
    for part in parts:
        joined.setdefault("output_ids", []).extend(part["output_ids"])
        for name, value in part["meta_info"].items():
            if isinstance(value, list):
                joined.setdefault(name, []).extend(value)
    assert joined.pop("output_ids") == whole["output_ids"]
    assert_same(joined, {name: whole["meta_info"][name] for name in joined})
    assert len(joined) == 6


def test_stream_of_a_batch_names_its_samples(client: httpx.Client) -> None:
    params = {"max_new_tokens": 3, "temperature": 0}
    parts = stream(client, text=[TEXT, "Another"], sampling_params=params)
    last = {part["index"]: part for part in parts}
    whole = generate(client, text=[TEXT, "Another"], sampling_params=params)
    assert [last[i]["text"] for i in range(2)] == [one["text"] for one in whole]


def test_stop_string_cuts_text_ids_and_logprobs(client: httpx.Client) -> None:
    params = {"max_new_tokens": 24, "temperature": 0, "stop": ["was a"]}
    whole = generate(client, text="Once upon a time", sampling_params=params, return_logprob=True)
    assert whole["meta_info"]["finish_reason"] == {"type": "stop", "matched": "was a"}
    assert "was a" not in whole["text"]
    assert len(whole["meta_info"]["output_token_logprobs"]) == len(whole["output_ids"])
    parts = stream(client, text="Once upon a time", sampling_params=params)
    assert parts[-1]["text"] == whole["text"]
    assert all("was a" not in part["text"] for part in parts)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"text": "a", "sampling_params": {"temprature": 1}}, "temprature"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
        ({"text": "a", "sampling_params": {"stop_regex": "a+"}}, "stop_regex"),
        ({"text": "a", "image_data": ["x"]}, "image_data"),
        ({"text": "a", "stream": "yes"}, "stream"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 10**6}, "top_logprobs_num"),
        ({"text": "a", "sampling_params": {"n": 10**9}}, "n:"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 10**6}}, "max_new_tokens"),
        ({"input_ids": [1, 2, 99999]}, "vocabulary"),
        ({"input_ids": [1] * 2000}, "context_length"),
        ({"text": "a" * 10**6}, "context length"),
        ({"input_ids": ["a"]}, "integers"),
        ({"text": ["a"] * 20_000}, "split the batch"),
        ({"input_ids": [[1]] * 20_000}, "split the batch"),
        ({"text": "a", "input_ids": [1]}, "both"),
        ({}, "neither"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    client: httpx.Client, body: dict[str, Any], words: str
) -> None:
    response = client.post("/generate", json=body)
    assert response.status_code == 400
    answer = response.json()
    assert words in answer["message"]
    assert answer["code"] == 400
    assert answer["error"]["message"] == answer["message"]


def test_large_results_are_the_same(client: httpx.Client, engine: Engine) -> None:
    row = [6, *range(10, 410)]
    more = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 50}
    expected = engine.generate(input_ids=row, sampling_params=GREEDY, **more)
    assert_same(generate(client, input_ids=row, sampling_params=GREEDY, **more), expected)


def test_refusal_of_a_stream_is_no_stream(client: httpx.Client) -> None:
    response = client.post("/generate", json={"input_ids": [1] * 2000, "stream": True})
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"


def test_undocumented_fields_are_ignored_aloud(client: httpx.Client) -> None:
    body = {
        "text": "a",
        "sampling_params": {"max_new_tokens": 1},
        "colour": "red",
        "lora_path": None,
    }
    response = client.post("/generate", json=body)
    assert response.status_code == 200
    assert response.headers["x-seawall-ignored"] == "colour"


def test_abort_by_name_ends_the_request_and_says_so(client: httpx.Client) -> None:
    body = {"rid": "long", "text": TEXT, "stream": True}
    body["sampling_params"] = {"max_new_tokens": 900, "ignore_eos": True}
    with client.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        taken = client.post("/generate", json={"rid": "long", "text": TEXT})
        assert taken.status_code == 400
        assert "long" in taken.json()["message"]
        assert client.post("/abort_request", json={"rid": "long"}).json() == {"aborted": 1}
        last = [line for line in lines if line][-2]
    finish = json.loads(last.removeprefix("data: "))["meta_info"]["finish_reason"]
    assert finish["type"] == "abort"
    assert client.post("/abort_request", json={"rid": "long"}).json() == {"aborted": 0}
    wait_idle(client)


def test_requests_of_many_clients_do_not_mix(client: httpx.Client, engine: Engine) -> None:
    prompts = [[6, 70 + i, 80 + i, 90] for i in range(24)]
    expected = engine.generate(input_ids=prompts, sampling_params=GREEDY)
    found: dict[int, Any] = {}

    def ask(at: int) -> None:
        found[at] = generate(client, input_ids=prompts[at], sampling_params=GREEDY)

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same([found[at] for at in range(len(prompts))], expected)


def test_label_scores_are_the_offline_engine_s(client: httpx.Client, engine: Engine) -> None:
    args = {"query": "7 + 5 = ", "items": ["12", "2"], "label_token_ids": [5, 60]}
    expected = engine.score(**args, apply_softmax=True)
    answer = client.post("/v1/score", json={**args, "apply_softmax": True}).json()
    assert_same(answer["scores"], expected)
    assert answer["object"] == "scoring"
    refused = client.post("/v1/score", json={"query": "a", "items": ["b"]})
    assert refused.status_code == 400
    assert "label_token_ids" in refused.json()["message"]


def test_label_scores_end_with_their_client(client: httpx.Client) -> None:
    items = [[i, *range(10, 210)] for i in range(10, 266)]
    body = {"query": [6, 70], "items": items, "label_token_ids": [5]}
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/score", json=body, timeout=0.5)
    state = client.get("/server_info").json()["internal_states"][0]
    report = wait_idle(client)
    # Far from all of them were computed: 256 prompts of 203 tokens, 128 a step.
    assert state["steps"] > 0
    assert report["front"]["open_samples"] == 0
    after = client.get("/server_info").json()["internal_states"][0]
    assert after["steps"] - state["steps"] < 100
