"""/v1/completions and /v1/chat/completions with the real openai client, and what harnesses read."""

import asyncio
import json
import math
from typing import Any

import httpx
import openai
import pytest

from seawall import Engine
from tests.server.harness import ServerProcess, events

TEXT = "Once upon a time"
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def api(server: ServerProcess) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as found:
        yield found


def complete(client: httpx.Client, **body: Any) -> Any:
    response = client.post("/v1/completions", json={"temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()


def refused(client: httpx.Client, path: str, **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    answer = response.json()
    assert answer["error"]["message"] == answer["message"]
    return answer


# -- what scoring harnesses rely on ------------------------------------------------------------


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_echo_with_one_token_has_an_entry_more_than_the_prompt(
    client: httpx.Client, engine: Engine, num_top: int
) -> None:
    rows = [[55, 80, 75, 504], [6, 70, 80], [55, 80, 75, 504]]
    answer = complete(client, prompt=rows, max_tokens=1, logprobs=num_top, seed=1234, echo=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for row, choice in zip(rows, answer["choices"], strict=True):
        found = choice["logprobs"]
        lengths = {len(found[name]) for name in found}
        assert lengths == {len(row) + 1}
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        expected = engine.generate(
            input_ids=row,
            sampling_params={"max_new_tokens": 1, "temperature": 0},
            return_logprob=True,
            logprob_start_len=0,
            logprobs_mode="raw",
        )["meta_info"]
        entries = [*expected["input_token_logprobs"], *expected["output_token_logprobs"]]
        for entry, ours, top, name in zip(
            entries[1:],
            found["token_logprobs"][1:],
            found["top_logprobs"][1:],
            found["tokens"][1:],
            strict=True,
        ):
            assert ours == pytest.approx(entry[0], abs=TOLERANCE)
            assert top[name] == ours  # the same float, not a close one
            assert max(num_top, 1) <= len(top) <= num_top + 1


def test_an_end_of_text_token_is_an_entry_too(client: httpx.Client) -> None:
    bias = {"1": 100}
    answer = complete(client, prompt=[6, 70], max_tokens=1, logprobs=1, echo=True, logit_bias=bias)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["token_logprobs"]) == 3
    assert answer["usage"]["completion_tokens"] == 1


def test_echo_without_tokens_scores_the_prompt(client: httpx.Client) -> None:
    [choice] = complete(client, prompt=TEXT, max_tokens=0, logprobs=1, echo=True)["choices"]
    count = len(client.post("/tokenize", json={"prompt": TEXT}).json()["tokens"])
    assert choice["text"] == TEXT
    assert len(choice["logprobs"]["token_logprobs"]) == count


def test_offsets_point_into_the_text(client: httpx.Client) -> None:
    [choice] = complete(
        client, prompt="na\u00efve \u4f60 fox", max_tokens=8, logprobs=1, echo=True
    )["choices"]
    found = choice["logprobs"]
    offsets = found["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[-1] <= len(choice["text"])
    for offset, token in zip(offsets, found["tokens"], strict=True):
        if "\ufffd" not in token and not token.startswith("<|"):
            assert choice["text"][offset : offset + len(token)] == token


def test_no_logprobs_unless_asked(client: httpx.Client) -> None:
    [choice] = complete(client, prompt=TEXT, max_tokens=2)["choices"]
    assert choice["logprobs"] is None


def test_prompt_logprobs_in_vllm_s_form(client: httpx.Client) -> None:
    row = [6, 70, 80, 90]
    [choice] = complete(client, prompt=row, max_tokens=1, prompt_logprobs=2, return_token_ids=True)[
        "choices"
    ]
    assert choice["prompt_token_ids"] == row
    assert len(choice["token_ids"]) == 1
    found = choice["prompt_logprobs"]
    assert found[0] is None
    for token, entries in zip(row[1:], found[1:], strict=True):
        assert 2 <= len(entries) <= 3
        assert entries[str(token)]["logprob"] <= 0
        assert {entry["rank"] for entry in entries.values()} - {None} == {1, 2}


def test_names_of_tokens_by_id(client: httpx.Client) -> None:
    [choice] = complete(
        client, prompt=[6, 70], max_tokens=1, logprobs=1, return_tokens_as_token_ids=True
    )["choices"]
    assert choice["logprobs"]["tokens"][0].startswith("token_id:")


def test_every_number_is_json(client: httpx.Client) -> None:
    body = {"prompt": [6, 70], "max_tokens": 2, "logprobs": 20, "logit_bias": {"5": -100}}
    text = client.post("/v1/completions", json={**body, "temperature": 0}).text
    json.loads(text, parse_constant=lambda name: pytest.fail(name))


# -- completions with the real client ----------------------------------------------------------


def test_completion_is_the_offline_engine_s(api: openai.OpenAI, engine: Engine) -> None:
    found = api.completions.create(model="demo", prompt=TEXT, max_tokens=8, temperature=0)
    expected = engine.generate(TEXT, {"max_new_tokens": 8, "temperature": 0})
    assert found.choices[0].text == expected["text"]
    assert found.choices[0].finish_reason == "length"
    assert found.usage is not None
    assert found.usage.prompt_tokens == expected["meta_info"]["prompt_tokens"]


def test_samples_come_prompt_by_prompt(api: openai.OpenAI, engine: Engine) -> None:
    prompts = [TEXT, "The fox"]
    found = api.completions.create(
        model="demo", prompt=prompts, max_tokens=4, n=2, seed=3, temperature=0.8, top_p=1
    )
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    params = {"max_new_tokens": 4, "n": 2, "sampling_seed": 3, "temperature": 0.8}
    expected = engine.generate(prompts, params)
    assert [choice.text for choice in found.choices] == [one["text"] for one in expected]


def test_stream_joins_to_the_whole(api: openai.OpenAI) -> None:
    args: dict[str, Any] = {
        "model": "demo",
        "prompt": TEXT,
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": 2,
        "echo": True,
    }
    whole = api.completions.create(**args)
    parts = list(
        api.completions.create(**args, stream=True, stream_options={"include_usage": True})
    )
    assert parts[-1].choices == []
    assert parts[-1].usage == whole.usage
    choices = [part.choices[0] for part in parts[:-1]]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert [c.finish_reason for c in choices if c.finish_reason] == ["length"]
    assert choices[-1].finish_reason == "length"
    expected = whole.choices[0].logprobs
    for name in ("tokens", "text_offset"):
        joined = [item for c in choices for item in getattr(c.logprobs, name)]
        assert joined == getattr(expected, name)


def test_usage_with_each_event_only_if_usage_is_wanted(client: httpx.Client) -> None:
    for include in (True, False):
        body = {"prompt": TEXT, "max_tokens": 3, "stream": True}
        body["stream_options"] = {"include_usage": include, "continuous_usage_stats": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            found = [json.loads(event) for event in events(response)[:-1]]
        assert [bool(part.get("usage")) for part in found] == [include] * len(found)


# -- chats -------------------------------------------------------------------------------------

CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Hello"}],
    "temperature": 0,
    "max_completion_tokens": 10,
}


def test_chat_goes_through_the_template(api: openai.OpenAI, client: httpx.Client) -> None:
    found = api.chat.completions.create(**CHAT)
    ids = client.post("/tokenize", json={"messages": CHAT["messages"]}).json()["tokens"]
    raw = complete(client, prompt=[ids], max_tokens=10)
    assert found.choices[0].message.content == raw["choices"][0]["text"]
    assert found.choices[0].message.role == "assistant"
    parts = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
    again = api.chat.completions.create(**{**CHAT, "messages": [parts]})
    assert again.choices[0].message.content == found.choices[0].message.content


def test_chat_logprobs(api: openai.OpenAI) -> None:
    found = api.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3)
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert found.usage is not None
    assert len(logprobs.content) == found.usage.completion_tokens
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert math.isfinite(entry.logprob)
        assert bytes(entry.bytes or ()).decode() == entry.token


def test_chat_stream_joins_to_the_whole(api: openai.OpenAI) -> None:
    whole = api.chat.completions.create(**CHAT, n=2, seed=5)
    parts = list(api.chat.completions.create(**CHAT, n=2, seed=5, stream=True))
    texts = {0: "", 1: ""}
    roles: dict[int, list[str]] = {0: [], 1: []}
    for part in parts:
        [choice] = part.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.delta.role:
            roles[choice.index].append(choice.delta.role)
    assert texts == {c.index: c.message.content for c in whole.choices}
    assert roles == {0: ["assistant"], 1: ["assistant"]}


def test_async_client(server: ServerProcess) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as api:
            one = await api.chat.completions.create(**CHAT)
            stream = await api.chat.completions.create(**CHAT, stream=True)
            pieces = [part.choices[0].delta.content or "" async for part in stream]
            return [one.choices[0].message.content or "", "".join(pieces)]

    whole, joined = asyncio.run(ask())
    assert whole == joined != ""


# -- models and refusals -----------------------------------------------------------------------


def test_models(api: openai.OpenAI) -> None:
    [model] = api.models.list().data
    assert model.id == "demo"
    assert api.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError) as caught:
        api.chat.completions.create(**{**CHAT, "model": "gpt-9"})
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "end"),
        ("best_of", 2),
        ("guided_regex", "a+"),
        ("structured_outputs", {"regex": "a"}),
        ("response_format", {"type": "json_object"}),
        ("use_beam_search", True),
        ("logprobs", 21),
        ("logprobs", -1),
        ("n", 0),
        ("stop", ["a"] * 1000),
        ("logit_bias", {"5": "much"}),
        ("stream_options", {"include_usage": True}),
        ("max_tokens", -1),
        ("temperature", "hot"),
        ("prompt", [[1, 2], "a"]),
        ("prompt", []),
        ("prompt", {"a": 1}),
        ("echo", "yes"),
    ],
)
def test_completions_refuse_what_they_cannot_honour(
    client: httpx.Client, field: str, value: Any
) -> None:
    refused(client, "/v1/completions", **{"prompt": "a", "max_tokens": 1, field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}),
        ("top_logprobs", 2),
        ("messages", []),
        ("messages", "hello"),
        ("messages", [{"content": "hello"}]),
        ("messages", [{"role": "pirate", "content": "hello"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        ("chat_template_kwargs", {"messages": []}),
    ],
)
def test_chats_refuse_what_they_cannot_honour(client: httpx.Client, field: str, value: Any) -> None:
    refused(client, "/v1/chat/completions", **{**CHAT, field: value})


def test_neutral_values_pass(client: httpx.Client) -> None:
    body = {
        "best_of": 1,
        "suffix": None,
        "use_beam_search": False,
        "user": "me",
        "do_sample": False,
    }
    found = {"response_format": {"type": "text"}, "logit_bias": None, "top_k": 0, "until": ["x"]}
    response = client.post(
        "/v1/completions", json={"prompt": "a", "max_tokens": 1, **body, **found}
    )
    assert response.status_code == 200
    assert response.headers["x-seawall-ignored"] == "until"


def test_too_long_is_said_in_the_words_that_clients_look_for(client: httpx.Client) -> None:
    answer = refused(client, "/v1/completions", prompt=TEXT, max_tokens=5000)
    assert answer["error"]["code"] == "context_length_exceeded"
    for words in (
        "max_completion_tokens is too large",
        "this model's maximum context length is",
        "is longer than the model's context length",
    ):
        assert words in answer["message"]


def test_sampling_defaults_are_the_model_folder_s(client: httpx.Client, engine: Engine) -> None:
    answer = client.post(
        "/v1/completions", json={"prompt": TEXT, "max_tokens": 8, "seed": 4}
    ).json()
    recommended = {"temperature": 0.8, "top_p": 0.95}
    expected = engine.generate(TEXT, {"max_new_tokens": 8, "sampling_seed": 4, **recommended})
    assert answer["choices"][0]["text"] == expected["text"]
