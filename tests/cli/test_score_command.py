"""`seawall score` as users run it: order, errors, streaming, and being killed."""

import json
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from command_line import ENVIRONMENT, REPO, SMALL, command

from seawall.cli.main import main

WORDS = ["the", "old", "king", "and", "his", "sons", "went", "into", "a", "dark", "forest", "for"]
NUM_LINES = 420


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Items of all forms, some without an id, some bad."""
    random.seed(7)
    lines = []
    for i in range(NUM_LINES):
        text = " ".join(random.choices(WORDS, k=random.randint(3, 60)))
        forms = (
            {"id": f"item {i}", "text": text},
            {"id": i, "context": text, "continuation": " and lived there"},
            {"input_ids": random.choices(range(7, 4096), k=random.randint(1, 60))},
            {"id": f"bad {i}", "text": 5} if i % 20 == 3 else {"id": f"item {i}", "text": text},
        )
        lines.append(json.dumps(forms[i % 4]))
    lines[100] = "no JSON"
    path = tmp_path_factory.mktemp("score") / "in.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def score_command(source: Path, output: Path, *more: str) -> list[str]:
    return command("score", "demo", f"--input={source}", f"--output={output}", *SMALL, *more)


def same_records(found: list[dict], wanted: list[dict]) -> None:
    """Equal in everything but float noise of another batching."""
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.keys() == b.keys()
        for name in b.keys() - {"logprob", "perplexity", "token_logprobs", "is_greedy"}:
            assert a[name] == b[name]
        if "logprob" in b:
            assert a["token_logprobs"] == pytest.approx(b["token_logprobs"], abs=5e-5)
            assert a["logprob"] == pytest.approx(sum(a["token_logprobs"]), abs=1e-6)


@pytest.fixture(scope="module")
def uninterrupted(source, tmp_path_factory) -> list[dict]:
    output = tmp_path_factory.mktemp("whole") / "out.jsonl"
    done = subprocess.run(
        score_command(source, output),
        cwd=REPO,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = lines_of(output)
    assert done.returncode == 1, done.stderr  # some lines are bad
    assert len(found) == NUM_LINES
    inputs = source.read_text().splitlines()
    for number, (line, record) in enumerate(zip(inputs, found, strict=True), start=1):
        given = json.loads(line) if line.startswith("{") else {}
        key = {"id": given["id"]} if "id" in given else {"line": number}
        assert record.items() >= key.items()
        if given.get("text") == 5 or not given:
            assert "error" in record
            assert f"line {number}: " in done.stderr
        else:
            assert record["tokens"] == len(record["token_logprobs"]) == len(record["token_ids"])
            if "input_ids" in given:
                assert record["token_ids"] == given["input_ids"][1:]
    assert f"{NUM_LINES} lines done" in done.stderr
    return found


def test_killed_at_random_moments_it_goes_on_where_it_was(source, uninterrupted, tmp_path) -> None:
    output = tmp_path / "out.jsonl"
    random.seed(11)
    kills = 0
    for _ in range(3):
        size = output.stat().st_size if output.exists() else 0
        process = subprocess.Popen(
            score_command(source, output, "--resume"),
            cwd=REPO,
            env=ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        target = size + random.randint(1, 8_000)
        while process.poll() is None and (not output.exists() or output.stat().st_size < target):
            time.sleep(0.002)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
        # As a kill in the middle of a write would leave it.
        raw = output.read_bytes()
        output.write_bytes(raw[: len(raw) - random.randint(0, min(len(raw), 900))])
    assert kills >= 2
    assert 0 < len(output.read_bytes().splitlines()) < NUM_LINES
    done = subprocess.run(
        score_command(source, output, "--resume"),
        cwd=REPO,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "lines were done before" in done.stderr
    same_records(lines_of(output), uninterrupted)


def test_pipes_are_worked_off_as_they_come_with_best_tokens() -> None:
    """Records come out while the input is still open: nothing waits for its end."""
    words = ["score", "demo", "--input=-", "--output=-", "--top-logprobs=2", *SMALL]
    with subprocess.Popen(
        command(*words), cwd=REPO, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        for i in range(200):
            process.stdin.write(b'{"id": %d, "text": "The old king"}\n' % i)
        process.stdin.flush()
        first = json.loads(process.stdout.readline())
        process.stdin.close()
        rest = [json.loads(line) for line in process.stdout]
        assert process.wait(timeout=60) == 0
    assert [record["id"] for record in [first, *rest]] == list(range(200))
    assert [len(pairs) for pairs in first["top_logprobs"]] == [2] * first["tokens"]
    for pairs, chosen in zip(first["top_logprobs"], first["token_logprobs"], strict=True):
        assert pairs[0][1] >= pairs[1][1]
        assert chosen <= pairs[0][1] + 1e-6


def test_reduced_records_and_the_quick_form_agree(seawall, tmp_path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    options = [" king", " golden bird"]
    source.write_text(
        "".join(json.dumps({"context": "Once a", "continuation": o}) + "\n" for o in options)
    )
    done = seawall(
        "score", "demo", "--input", source, "--output", output, "--reduce", "mean", *SMALL
    )
    assert done.returncode == 0, done.stderr
    quick = seawall("score", "demo", "Once a", *options, "--json", *SMALL)
    assert quick.returncode == 0, quick.stderr
    rows = json.loads(quick.stdout)["options"]
    for row, record in zip(rows, lines_of(output), strict=True):
        assert record["reduce"] == "mean"
        assert "token_logprobs" not in record
        assert record["value"] == pytest.approx(row["mean"], abs=5e-5)
        assert record["logprob"] == pytest.approx(row["logprob"], abs=5e-5)
    assert sum(row["share"] for row in rows) == pytest.approx(1)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["demo", "only a context"], 2, "OPTION"),
        (["demo", "--input", "x"], 2, "--output"),
        (["demo", "--input", "-", "--output", "-", "--resume"], 2, "stdout"),
        (["demo", "--input=a", "--output=b", "--top-logprobs=2", "--reduce=sum"], 2, "one of"),
        (["demo", "--input", "no-such-file", "--output", "o"], 1, "no-such-file: No such file"),
    ],
)
def test_refusals(words, code, said, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["score", *words]) == code
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_existing_output_is_refused_and_kept(source, tmp_path, capsys) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("mine\n")
    words = ["score", "demo", "--input", str(source), "--output", str(output)]
    assert main(words) == 1
    assert "--resume" in capsys.readouterr().err
    assert main([*words, "--resume"]) == 1
    assert "does not match the input" in capsys.readouterr().err
    assert output.read_text() == "mine\n"


def test_an_engine_that_does_not_start_leaves_no_file(source, tmp_path, capsys) -> None:
    output = tmp_path / "out.jsonl"
    words = ["score", "demo", "--input", str(source), "--output", str(output)]
    assert main([*words, "--memory-budget=1MiB"]) == 1
    assert "memory_budget" in capsys.readouterr().err
    assert not output.exists()
