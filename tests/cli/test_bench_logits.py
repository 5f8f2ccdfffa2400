"""`seawall bench logits` as users run it: what it did, not how fast."""

import json
import math

from seawall.cli.main import main

WORDS = "--rows 3,130 --vocab 50,1000 --top-k 0,5 --hidden-size 16 --seconds 0 --device cpu"


def test_every_way_and_shape_is_measured(seawall, tmp_path) -> None:
    path = tmp_path / "result.json"
    done = seawall("bench", "logits", *WORDS.split(), f"--json={path}")
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last == json.loads(path.read_text())
    assert (last["benchmark"], last["device"], last["dtype"]) == ("logits", "cpu", "float32")
    found = last["measurements"]
    shapes = {(each["rows"], each["vocab_size"], each["top_k"]) for each in found}
    assert shapes == {(r, v, k) for r in (3, 130) for v in (50, 1000) for k in (0, 5)}
    assert [each["way"] for each in found] == ["whole", "chunks", "seawall"] * 8
    assert all(each["repeats"] >= 2 for each in found)
    assert all(each["error"] <= 1e-5 for each in found)
    largest = {each["way"]: each["peak_bytes"] for each in found if each["rows"] == 130}
    # The matrix of the largest shape and its log-softmax, without the results.
    assert largest["whole"] >= 2 * 4 * 130 * 990
    assert 0 < largest["seawall"] <= last["workspace_bytes"]
    assert all(math.isfinite(each["milliseconds"]) for each in found)
    lines = done.stdout.splitlines()[:-1]
    assert lines[0].split()[:4] == ["way", "rows", "vocab", "k"]
    assert len(lines) == 1 + len(found)


def test_another_dtype_rounds_the_matrix_and_not_ours(capsys) -> None:
    words = "--rows 40 --vocab 500 --top-k 0 --hidden-size 64 --seconds 0 --device cpu"
    assert main(["bench", "logits", *words.split(), "--dtype=bfloat16"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["measurements"]
    errors = {each["way"]: each["error"] for each in found}
    assert errors["seawall"] <= 1e-4 < errors["whole"]


def test_wrong_usage_is_one_line(capsys) -> None:
    for words in (["--rows=0"], ["--rows=two"], ["--vocab=10", "--top-k=11"], ["--seconds=-1"]):
        assert main(["bench", "logits", *words, "--device=cpu"]) == 2, words
        told = capsys.readouterr().err
        assert told.startswith("seawall: ") and told.count("\n") == 1, told
