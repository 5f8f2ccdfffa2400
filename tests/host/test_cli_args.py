"""The command line without torch: flags from the tables, help, wrong usage, files of JSON lines."""

import io
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.cli import arguments, doctor, jsonl
from seawall.cli.command import CommandError
from seawall.cli.engine_flags import engine_args, sampling_params
from seawall.cli.jsonl import read_lines
from seawall.cli.main import COMMANDS, _Parser, main
from seawall.cli.score_items import ScoreItem, Shape, batches, failure, read_items, record
from seawall.cli.score_output import check_apart, check_new, create, reopen, take_up
from seawall.core.config import ARGS
from seawall.offline.window import in_order

REPO = Path(__file__).resolve().parents[2]
SHAPE = Shape(reduce="none", top_logprobs=0)
VALUES = {"int": 3, "float": 0.5, "bytes": 1 << 20, "str": "auto"}
# The only values that are built for arguments with a choice.
GIVEN = {
    "radix_eviction_policy": "lfu",
    "model_path": "demo",
    "schedule_policy": "lpm",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "log_level": "error",
    "json_model_override_args": "{}",
    "logprobs_mode": "raw",
    "tp_size": 1,
    "dp_size": 1,
}
NOT_BUILT = {"cuda_graph_max_bs", "quantization"}
BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError("blocked here: " + name)

sys.meta_path.insert(0, Blocker())
from seawall.cli.main import main
for line in sys.argv[1:]:
    code, words = line.split(":", 1)
    found = main(words.split())
    assert found == int(code), (line, found)
assert "torch" not in sys.modules
"""


def parse(*words: str) -> dict[str, object]:
    parser = _Parser(prog="x", allow_abbrev=False)
    arguments.plan(parser)
    return dict(engine_args(parser.parse_intermixed_args(["demo", *words])))


# -- flags -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arg",
    [
        arg
        for arg in ARGS
        if arg.name not in {*NOT_BUILT, "model_path"} and False not in arg.choices
    ],
    ids=lambda arg: arg.name,
)
def test_every_argument_has_the_flag_of_its_name(arg) -> None:
    flag = "--" + arg.name.replace("_", "-")
    if arg.kind == "bool":
        assert parse(flag)[arg.name] is True
        if arg.default is True:
            assert parse(flag.replace("--", "--no-", 1))[arg.name] is False
    else:
        value = GIVEN.get(arg.name, VALUES[arg.kind])
        assert parse(flag, str(value))[arg.name] == value


@pytest.mark.parametrize(
    "words",
    [("--cuda-graph-max-bs", "3"), ("--quantization", "fp8"), ("--enable-dp-attention",)],
)
def test_what_is_not_built_is_refused_with_code_2(words, capsys) -> None:
    assert main(["plan", "demo", *words]) == 2
    assert "not built" in capsys.readouterr().err


def test_flags_that_were_not_given_leave_no_trace() -> None:
    assert parse() == {"model_path": "demo"}
    assert parse("--memory-budget", "1.5GiB") == {"model_path": "demo", "memory_budget": 3 << 29}


def test_sampling_flags() -> None:
    parser = _Parser(prog="x", allow_abbrev=False)
    arguments.generate(parser)
    words = "demo Hi --max-new-tokens 7 --temperature 0.5 --stop a --stop b --ignore-eos"
    words += " --logit-bias 4=-1.5 --logit-bias 5=2 --stop-token-ids 9 --no-skip-special-tokens"
    assert sampling_params(parser.parse_intermixed_args(words.split())) == {
        "max_new_tokens": 7,
        "temperature": 0.5,
        "stop": ["a", "b"],
        "ignore_eos": True,
        "logit_bias": {"4": -1.5, "5": 2.0},
        "stop_token_ids": [9],
        "skip_special_tokens": False,
    }


def test_help_and_plan_run_with_torch_blocked() -> None:
    lines = ["0:--help", "0:--version", "0:plan demo", "0:plan demo --json", "0:bench --help"]
    lines += [f"0:{name} --help" for name in COMMANDS]
    lines += ["2:score demo --nope", "1:plan no-such-model --memory-budget 1GiB"]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *lines],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--max-running-requests" in done.stdout
    assert re.search(r"^kv +[\d,]+ ", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", ""),
        ("nope", "unknown command 'nope'"),
        ("bench nope", "bench offline"),
        ("plan", "MODEL"),
        ("plan demo --page-size x", "--page-size"),
        ("plan demo --page-size 0", "page_size: got 0, the least is 1"),
        ("plan demo --quantization fp8", "not built yet"),
        ("plan demo --memory-budget 3XB", "unknown unit"),
        ("plan demo --device-mem 3GB", "--device-mem"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(words, said, capsys) -> None:
    assert main(words.split()) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.count("\n") <= 1
    assert (shown.out == "") is bool(words)


def test_failures_are_one_line_and_code_1(capsys) -> None:
    assert main(["plan", "no-such-model"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("seawall: model_path")
    assert err.count("\n") == 1


def test_a_budget_that_is_too_small_prints_its_table_and_one_line(capsys) -> None:
    assert main(["plan", "demo", "--memory-budget", "10MiB"]) == 1
    *table, last = capsys.readouterr().err.splitlines()
    assert table[0].startswith("account")
    assert any(line.startswith("over budget") for line in table)
    assert last.startswith("seawall: ")
    assert "memory_budget" in last


def test_plan_json_adds_up_and_follows_device_memory(capsys) -> None:
    assert main(["plan", "demo", "--json", "--device-memory", "2GiB"]) == 0
    plan = json.loads(capsys.readouterr().out)
    device = plan["device"]
    assert device["budget_bytes"] == 1 << 30
    assert sum(device["plan"].values()) + device["unplanned_bytes"] == device["budget_bytes"]
    assert plan["num_pages"] * plan["page_bytes"] <= device["plan"]["kv"]
    assert plan["max_total_tokens"] == plan["num_pages"] * plan["page_size"]


def test_serve_checks_its_arguments_before_it_starts_anything(capsys) -> None:
    for flags in (
        ["--port=70000"],
        ["--max-queued-requests=-1"],
        ["--drain-seconds=0"],
        ["--prot=1"],
    ):
        assert main(["serve", "demo", *flags]) == 2
        err = capsys.readouterr().err
        assert flags[0].partition("=")[0].strip("-").split("-")[0] in err
        assert err.count("\n") == 1


def test_doctor_asks_for_what_the_project_file_asks_for() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {f"{name}>={low},<{below}" for name, (low, below) in doctor.REQUIRED.items()}
    assert wanted == set(project["dependencies"])
    low, below = (".".join(str(part) for part in bound) for bound in doctor.PYTHON)
    assert project["requires-python"] == f">={low},<{below}"
    assert set(doctor.OPTIONAL.values()) <= set(project["optional-dependencies"])


# -- JSON lines --------------------------------------------------------------------------------


def test_lines_are_numbered_and_bad_ones_are_told(monkeypatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 120)
    deep = b"[" * 100 + b"\n"
    raw = b'{"a": 1}\n\n  \n\xff\n[1]\nnope\n' + deep + b'{"x": "' + b"y" * 500 + b'"}\n{"b": 2}'
    lines = list(read_lines(io.BytesIO(raw)))
    assert [line.number for line in lines] == [1, 4, 5, 6, 7, 8, 9]
    assert [line.value for line in lines if line.error is None] == [{"a": 1}, {"b": 2}]
    said = [line.error for line in lines if line.error is not None]
    for error, word in zip(said, ["UTF-8", "list", "JSON", "JSON", "longer"], strict=True):
        assert word in error
    assert sum(line.num_bytes for line in lines) == len(raw)


def test_deep_nesting_is_an_error_of_its_line() -> None:
    (line,) = read_lines(io.BytesIO(b"[" * 200_000))
    assert line.error is not None


def items_of(*objects: object) -> list[ScoreItem]:
    raw = "".join(json.dumps(each) + "\n" for each in objects).encode()
    return list(read_items(read_lines(io.BytesIO(raw))))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({}, "got no text"),
        ({"id": 1, "text": "a", "context": "b"}, "context and text"),
        ({"id": 1, "context": "b"}, "got context"),
        ({"text": 3}, "got int"),
        ({"text": "\ud800"}, "surrogate"),
        ({"input_ids": [1, True]}, "integers"),
        ({"input_ids": "12"}, "integers"),
        ({"input_ids": [2**40]}, "2**31"),
        ({"id": True, "text": "a"}, "got bool"),
        ({"id": [1], "text": "a"}, "got list"),
    ],
)
def test_bad_items_say_why(value, said) -> None:
    (item,) = items_of(value)
    assert item.kind == "bad"
    assert said in item.error
    (name, key) = item.key
    assert failure(item, "why") == {name: key, "error": "why"}


def test_items_keep_their_id_or_their_line() -> None:
    items = items_of({"id": "a", "text": "x"}, {"input_ids": []}, {"id": 0, "text": ""})
    assert [item.key for item in items] == [("id", "a"), ("line", 2), ("id", 0)]
    assert [item.kind for item in items] == ["text", "input_ids", "text"]


def test_batches_are_bounded_in_lines_and_in_bytes() -> None:
    small = items_of(*({"text": "x"} for _ in range(200)))
    assert [len(batch) for batch in batches(small, SHAPE)] == [64, 64, 64, 8]
    large = items_of(*({"text": "x" * 50_000} for _ in range(5)))
    assert [len(batch) for batch in batches(large, SHAPE)] == [3, 2]
    with_tops = Shape(reduce="none", top_logprobs=20)
    assert [len(batch) for batch in batches(large, with_tops)] == [1, 1, 1, 1, 1]


class FakeScore:
    logprob, num_tokens, is_greedy, value = -1.5, 2, False, -1.5
    token_ids, token_logprobs, top_logprobs = (4, 5), (-1.0, -0.5), None


def test_records_have_no_infinity() -> None:
    class Impossible(FakeScore):
        logprob, token_logprobs = float("-inf"), (float("-inf"), 0.0)
        top_logprobs = (((1, float("-inf")),), ((2, 0.0),))

    (item,) = items_of({"text": "x"})
    made = record(item, Impossible(), Shape(reduce="none", top_logprobs=1))
    json.dumps(made, allow_nan=False)
    assert record(item, FakeScore(), SHAPE)["perplexity"] == pytest.approx(2.117, abs=1e-3)


# -- the output file ---------------------------------------------------------------------------

OBJECTS = [{"id": f"n{i}", "text": "x"} if i % 3 else {"text": "x"} for i in range(5)]


def written() -> bytes:
    items = items_of(*OBJECTS)
    records = [record(item, FakeScore(), SHAPE) for item in items[:-1]]
    records.append(failure(items[-1], "bad"))
    return "".join(json.dumps(each) + "\n" for each in records).encode()


def test_a_file_cut_at_any_byte_is_taken_up_at_its_last_whole_record(tmp_path) -> None:
    whole = written()
    path = tmp_path / "out.jsonl"
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        items = iter(items_of(*OBJECTS))
        with reopen(str(path)) as stream:
            taken = take_up(stream, str(path), items, SHAPE)
            assert stream.tell() == len(whole[:cut].rpartition(b"\n")[0]) + (taken.done > 0)
        done = whole[:cut].count(b"\n")
        assert taken.done == done
        assert taken.failed == (done == 5)
        assert len(list(items)) == 5 - done
        assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:done])


@given(st.integers(0, 4), st.sampled_from(["id", "line", "value", "list"]))
def test_records_of_another_input_are_refused_and_left_alone(at: int, change: str) -> None:
    lines = written().splitlines(keepends=True)
    if change == "list":
        lines[at] = b"[1]\n"
    else:
        found = json.loads(lines[at])
        other = {change: "other", **{k: v for k, v in found.items() if k not in ("id", "line")}}
        lines[at] = (json.dumps(other) + "\n").encode()
    stream = io.BytesIO(b"".join(lines))
    with pytest.raises(CommandError, match="does not match"):
        take_up(stream, "out.jsonl", iter(items_of(*OBJECTS)), SHAPE)
    assert stream.getvalue() == b"".join(lines)


@pytest.mark.parametrize(
    "shape", [Shape(reduce="mean", top_logprobs=0), Shape(reduce="none", top_logprobs=2)]
)
def test_records_of_another_form_are_refused(shape) -> None:
    with pytest.raises(CommandError, match="another --reduce or --top-logprobs"):
        take_up(io.BytesIO(written()), "out.jsonl", iter(items_of(*OBJECTS)), shape)


def test_more_records_than_lines_are_refused() -> None:
    with pytest.raises(CommandError, match="more records than the input has lines"):
        take_up(io.BytesIO(written()), "out.jsonl", iter(items_of(*OBJECTS[:3])), SHAPE)


def test_outputs_are_not_written_over_nor_by_two(tmp_path) -> None:
    path = tmp_path / "out.jsonl"
    with create(str(path)) as stream:
        stream.write(b"x")
        with pytest.raises(CommandError, match="another process"), reopen(str(path)):
            pass
    with pytest.raises(CommandError, match="exists"):
        check_new(str(path))
    with pytest.raises(CommandError, match="input file itself"):
        check_apart(str(path), str(tmp_path / "." / "out.jsonl"))


# -- the window --------------------------------------------------------------------------------


def test_the_window_keeps_order_and_reads_no_further_than_it_must() -> None:
    taken = 0

    def items():
        nonlocal taken
        for i in range(50):
            taken += 1
            yield i

    for count, result in enumerate(in_order(lambda i: i * i, items(), depth=3)):
        assert result == count * count
        assert taken <= count + 3
    assert taken == 50


def test_the_window_raises_in_turn() -> None:
    results = in_order(lambda i: 1 // (2 - i), range(5), depth=2)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)
