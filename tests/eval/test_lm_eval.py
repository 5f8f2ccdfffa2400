"""The model class for lm-evaluation-harness against the harness's own transformers model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from seawall import ConfigError, EngineError, RequestError
from seawall.eval.lm_eval_model import SeawallLM, _rounds
from tests.eval.conftest import CHOICES, CONTEXT, LINES, PROMPTS

TASKS = ["sea_choice", "sea_word", "sea_text", "sea_write"]
LOGPROB = 1e-4
# The other side adds in float32, whose steps exceed 1e-4 where long texts reach -1000.
FLOAT32_SUM = 2e-7
SCORE = 1e-3


def instances(kind: Any, arguments: list[Any]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=args, idx=i)
        for i, args in enumerate(arguments)
    ]


def pairs(arguments: list[tuple[str, str]]) -> list[Instance]:
    return instances("loglikelihood", arguments)


def evaluate(lm: Any, tasks: TaskManager, names: list[str], **options: Any) -> dict[str, Any]:
    found = lm_eval.simple_evaluate(
        model=lm, tasks=names, task_manager=tasks, bootstrap_iters=0, log_samples=True, **options
    )
    assert found is not None
    return found


def responses(results: dict[str, Any], task: str) -> list[Any]:
    """Every answer to a request of the task, in order."""
    return [answer for sample in results["samples"][task] for (answer,) in sample["resps"]]


def assert_same(ours: dict[str, Any], theirs: dict[str, Any], names: list[str]) -> None:
    for name in names:
        scores = {
            key: value
            for key, value in theirs["results"][name].items()
            if isinstance(value, float) and "stderr" not in key
        }
        assert scores
        for key, value in scores.items():
            assert ours["results"][name][key] == pytest.approx(value, abs=SCORE), (name, key)
        mine, other = responses(ours, name), responses(theirs, name)
        assert len(mine) == len(other) > 0
        for a, b in zip(mine, other, strict=True):
            if isinstance(b, str):
                assert a == b
            elif isinstance(b, float):
                assert a == pytest.approx(b, abs=LOGPROB, rel=FLOAT32_SUM)
            else:
                assert a[0] == pytest.approx(b[0], abs=LOGPROB)
                assert a[1] == b[1]


@pytest.fixture(scope="module")
def both(
    seawall_lm: SeawallLM, hf_lm: HFLM, tasks: TaskManager
) -> tuple[dict[str, Any], dict[str, Any]]:
    return evaluate(seawall_lm, tasks, TASKS), evaluate(hf_lm, tasks, TASKS)


def test_tasks_score_as_with_transformers(
    both: tuple[dict[str, Any], dict[str, Any]], hf_lm: HFLM
) -> None:
    assert_same(*both, TASKS)
    # The tasks can tell: both kinds of greedy, texts beyond the context, answers that were cut.
    _, theirs = both
    assert {greedy for _, greedy in responses(theirs, "sea_choice")} == {True, False}
    longest = theirs["samples"]["sea_text"][len(LINES)]["doc"]["text"]
    assert len(hf_lm.tok_encode(longest)) > 2 * CONTEXT
    assert len(set(responses(theirs, "sea_write"))) == len(PROMPTS)
    assert not any("." in text for text in responses(theirs, "sea_write"))


def test_chat_tasks_score_as_with_transformers(
    seawall_lm: SeawallLM, hf_lm: HFLM, tasks: TaskManager
) -> None:
    names = ["sea_choice", "sea_write"]
    options: dict[str, Any] = {
        "apply_chat_template": True,
        "fewshot_as_multiturn": True,
        "system_instruction": "You tell tales.",
        "num_fewshot": None,
    }
    ours, theirs = (evaluate(lm, tasks, names, **options) for lm in (seawall_lm, hf_lm))
    prompt = ours["samples"]["sea_choice"][0]["arguments"][0][0]
    assert prompt.startswith("<|begin_of_text|><|system|>You tell tales.<|end|><|user|>")
    assert_same(ours, theirs, names)


def test_single_requests_score_as_with_transformers(seawall_lm: SeawallLM, hf_lm: HFLM) -> None:
    asked = [
        ("", "The fox"),
        ("", "<|begin_of_text|>The fox"),
        ("The king ", "said"),
        ("The king", " said"),
        ("The king \n ", " said"),
        ("The k", "ing said"),
        ("m\u00e8", "re \u2014 \U0001f98a"),
        (" ".join(LINES * 4), " and they lived"),
        ("The", " king" * (CONTEXT - 1)),
    ]
    ours = seawall_lm.loglikelihood(pairs(asked), disable_tqdm=True)
    theirs = hf_lm.loglikelihood(pairs(asked), disable_tqdm=True)
    for args, mine, other in zip(asked, ours, theirs, strict=True):
        assert mine[0] == pytest.approx(other[0], abs=LOGPROB, rel=FLOAT32_SUM), args
        assert mine[1] == other[1], args


@pytest.mark.parametrize("add_bos_token", [None, True, False])
def test_text_becomes_the_same_tokens(
    seawall_lm: SeawallLM, hf_lm: HFLM, add_bos_token: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_lm, "add_bos_token", add_bos_token)
    settings = type(seawall_lm._settings)(add_bos_token=add_bos_token)
    monkeypatch.setattr(seawall_lm, "_settings", settings)
    for text in [*LINES, "", "<|begin_of_text|>a", "<|user|>a<|end|>"]:
        assert seawall_lm.tok_encode(text) == hf_lm.tok_encode(text)
        for special in (True, False):
            assert seawall_lm.tok_encode(text, special) == hf_lm.tok_encode(text, special)
    assert seawall_lm.prefix_token_id == hf_lm.prefix_token_id
    assert seawall_lm.eot_token_id == hf_lm.eot_token_id


def test_chat_is_rendered_as_by_transformers(seawall_lm: SeawallLM, hf_lm: HFLM) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Who came? \n"},
        {"role": "assistant", "content": "The fox, "},
    ]
    for chat in (turns, turns[1:], turns[:2]):
        for prompt in (True, False):
            mine = seawall_lm.apply_chat_template(chat, add_generation_prompt=prompt)
            assert mine == hf_lm.apply_chat_template(chat, add_generation_prompt=prompt)
    assert not mine.endswith("<|end|>")
    assert seawall_lm.tokenizer_name == "demo"
    with pytest.raises(RequestError, match="Unknown role"):
        seawall_lm.apply_chat_template([{"role": "narrator", "content": "a"}])
    with pytest.raises(RequestError, match="default template"):
        seawall_lm.chat_template("tool_use")


def test_rows_of_one_context_are_served_from_the_cache(
    seawall_lm: SeawallLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts = [f"{line} {LINES[0]} {LINES[1]}" for line in LINES]
    asked = [(context, option) for context in contexts for option in CHOICES[0][1]]
    calls: list[list[dict[str, Any]]] = []
    generate = seawall_lm.engine.generate

    def recorded(**args: Any) -> Any:
        calls.append(generate(**args))
        return calls[-1]

    seawall_lm.engine.flush_cache()
    monkeypatch.setattr(seawall_lm.engine, "generate", recorded)
    seawall_lm.loglikelihood(pairs(asked), disable_tqdm=True)
    (results,) = calls
    meta = [result["meta_info"] for result in results]
    assert len(meta) == len(asked)
    # Six contexts and eight seats: the first eight start together and find nothing.
    served = sum(m["cached_tokens"] > 0.6 * m["prompt_tokens"] for m in meta)
    assert served >= len(asked) // 2, [(m["cached_tokens"], m["prompt_tokens"]) for m in meta]


def test_order_of_rows() -> None:
    rows = [[7, 1], [8, 8, 2], [7, 2], [8, 8, 1], [7, 3], [9]]
    starts = [1, 2, 1, 2, 1, 1]
    assert _rounds(rows, starts, 100) == [0, 3, 5, 2, 1, 4]
    # Room for the first group and no other, then for the other two.
    assert _rounds(rows, starts, 5) == [0, 2, 4, 3, 5, 1]
    assert _rounds(rows, starts, 1) == [0, 2, 4, 3, 1, 5]
    assert _rounds([], [], 5) == []


def test_answers_are_handed_to_the_cache_of_responses(
    seawall_lm: SeawallLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hook:
        def __init__(self) -> None:
            self.found: list[tuple[str, Any, Any]] = []

        def add_partial(self, kind: str, key: Any, answer: Any) -> None:
            self.found.append((kind, tuple(key), answer))

    hook = Hook()
    monkeypatch.setattr(seawall_lm, "cache_hook", hook)
    (score,) = seawall_lm.loglikelihood(pairs([("The", " fox")]), disable_tqdm=True)
    (total,) = seawall_lm.loglikelihood_rolling(
        instances("loglikelihood_rolling", [(LINES[0],)]), disable_tqdm=True
    )
    asked = ("The", {"until": ["\n"], "max_gen_toks": 2})
    (text,) = seawall_lm.generate_until(instances("generate_until", [asked]), disable_tqdm=True)
    assert hook.found == [
        ("loglikelihood", ("The", " fox"), score),
        ("loglikelihood_rolling", (LINES[0],), total),
        ("generate_until", asked, text),
    ]


def test_generation_arguments(seawall_lm: SeawallLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(context: str = PROMPTS[0], **args: Any) -> str:
        asked = instances("generate_until", [(context, args)])
        (text,) = seawall_lm.generate_until(asked, disable_tqdm=True)
        return text

    plain = write(until=[], max_gen_toks=12)
    assert write(until="", max_new_tokens=12, temperature=0.0, num_beams=1) == plain
    word = plain.split()[2]
    assert write(until=[word], max_gen_toks=12) == plain[: plain.index(word)]
    # Sampled and long contexts: the seed decides, and the end of the context is what is kept.
    sampled = {
        write(do_sample=True, temperature=1.5, sampling_seed=i, max_gen_toks=9) for i in range(4)
    }
    assert len(sampled) > 1
    long = " ".join(LINES * 4)
    kept = seawall_lm.tok_encode(long)[-(CONTEXT - 9) :]
    params = {"max_new_tokens": 9, "temperature": 0}
    (right,) = seawall_lm.engine.generate(input_ids=[kept], sampling_params=params)
    assert write(long, max_gen_toks=9, until=[]) == right["text"]
    monkeypatch.setattr(seawall_lm, "_settings", type(seawall_lm._settings)(think_end_token=word))
    assert write(until=[], max_gen_toks=12) == plain.split(word)[-1].lstrip()
    with pytest.raises(RequestError, match="num_beams"):
        write(num_beams=4, max_gen_toks=9)
    with pytest.raises(RequestError, match=f"max_gen_toks: got {CONTEXT}"):
        write(max_gen_toks=CONTEXT)


def test_what_cannot_be_scored_is_refused(seawall_lm: SeawallLM) -> None:
    with pytest.raises(RequestError, match="adds no token"):
        seawall_lm.loglikelihood(pairs([("The fox", "")]), disable_tqdm=True)
    with pytest.raises(RequestError, match=f"got {CONTEXT} tokens"):
        seawall_lm.loglikelihood(pairs([("The", " king" * CONTEXT)]), disable_tqdm=True)
    assert seawall_lm.loglikelihood([], disable_tqdm=True) == []
    assert seawall_lm.generate_until([], disable_tqdm=True) == []


def test_a_request_that_the_engine_turns_away_is_an_error() -> None:
    lm = SeawallLM(
        "demo", memory_budget="256MiB", dtype="float32", context_length=64, max_queued_requests=1
    )
    try:
        with pytest.raises(EngineError, match="queue: "):
            lm.loglikelihood(pairs([("The", f" fox {i}") for i in range(300)]), disable_tqdm=True)
    finally:
        lm.close()
    with pytest.raises(EngineError, match="shut down"):
        lm.loglikelihood(pairs([("The", " fox")]), disable_tqdm=True)


def test_arguments() -> None:
    with pytest.raises(ConfigError, match="'peft'"):
        SeawallLM.create_from_arg_string("pretrained=demo,peft=x", {"batch_size": 1})
    with pytest.raises(ConfigError, match="max_length and context_length"):
        SeawallLM("demo", max_length=64, context_length=64)


def test_command_line(task_folder: Path, tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "seawall.eval", "run", "--model", "seawall", "--model_args"),
        "pretrained=demo,memory_budget=256MiB,dtype=float32,context_length=128",
        *("--include_path", str(task_folder), "--tasks", "sea_choice", "--limit", "2"),
        *("--output_path", str(tmp_path / "out.json")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "seawall (" in done.stdout
    (written,) = tmp_path.glob("out*.json")
    results = json.loads(written.read_text(encoding="utf-8"))
    assert 0 <= results["results"]["sea_choice"]["acc,none"] <= 1
    assert results["config"]["model_dtype"] == "float32"
    assert results["config"]["model_random_seed"] == 1234


def test_without_the_harness_the_command_says_what_to_install() -> None:
    code = (
        "import runpy, sys; sys.modules['lm_eval'] = None; "
        "runpy.run_module('seawall.eval', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "seawall.eval: lm-eval is not installed; run pip install 'seawall[eval]'\n"
    )
