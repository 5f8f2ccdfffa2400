"""demo, generate, doctor, bench and --version as users run them."""

import json
import re
import subprocess
import sys
from dataclasses import asdict

import pytest
from command_line import ENVIRONMENT, REPO, SMALL

from seawall import __version__
from seawall.benchmarks.workload import random_workload, ratio_range
from seawall.cli import doctor
from seawall.cli.main import main
from seawall.engine.planning import DEMO_FOLDER

REFERENCE = {
    prompt["name"]: prompt
    for prompt in json.loads((DEMO_FOLDER / "reference.json").read_text())["prompts"]
}


def test_version(seawall) -> None:
    assert seawall("--version").stdout == f"seawall {__version__}\n"


def test_demo_fits_a_screen_and_its_books_balance(seawall) -> None:
    done = seawall("demo")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= 45
    assert max(len(line) for line in lines) <= 80
    means = [float(line.split()[0]) for line in lines if re.match(r" +-\d+\.\d{3}  ", line)]
    written, shuffled = means
    assert written > shuffled + 1
    free, cached, both, total = (
        int(n)
        for n in re.search(r"(\d+) free \+ (\d+) cached = (\d+) of (\d+)", done.stdout).groups()
    )
    assert free + cached == both == total
    assert "violation" not in done.stdout
    assert "Once upon a time there was a little fox" in done.stdout
    assert seawall("demo", "--memory-budget=1MiB").returncode == 1


def test_one_prompt_is_streamed_and_is_the_reference_text(seawall) -> None:
    wanted = REFERENCE["once"]
    done = seawall(
        "generate", "demo", "Once upon a time", "--temperature=0", "--max-new-tokens=32",
        "--ignore-eos", *SMALL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == wanted["greedy_text"] + "\n"


def test_several_prompts_give_json_in_order(seawall) -> None:
    words = ["--n=2", "--json", "--max-new-tokens=4", "--sampling-seed=5", *SMALL]
    done = seawall("generate", "demo", "Once upon", "The fox", *words)
    assert done.returncode == 0, done.stderr
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["prompt"] for each in made] == ["Once upon"] * 2 + ["The fox"] * 2
    assert all(each["meta_info"]["completion_tokens"] <= 4 for each in made)


def test_prompts_from_a_file_keep_order_and_tell_bad_ones(seawall) -> None:
    given = [
        {"id": "a", "prompt": "The fox", "sampling_params": {"n": 2}},
        {"id": "b", "prompt": "The fox", "sampling_params": {"nope": 2}},
        {"id": "c", "input_ids": REFERENCE["once"]["token_ids"]},
        {"id": "d"},
        {"id": "e", "prompt": 3},
    ]
    text = "".join(json.dumps(each) + "\n" for each in given) + "no JSON\n"
    words = ["--input=-", "--json", "--temperature=0", "--max-new-tokens=3", *SMALL]
    done = seawall("generate", "demo", *words, input=text)
    assert done.returncode == 1
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each.get("id") for each in made] == ["a", "a", "b", "c", "d", "e", None]
    assert made[3]["output_ids"] == REFERENCE["once"]["greedy_ids"][:3]
    assert made[6]["line"] == 6
    failed = [each for each in made if "error" in each]
    assert [each.get("id") for each in failed] == ["b", "d", "e", None]
    assert all(f"line {n}: " in done.stderr for n in (2, 4, 5, 6))


def test_doctor_finds_this_installation_well(seawall) -> None:
    done = seawall("doctor", "--json")
    assert done.returncode == 0, done.stdout
    found = json.loads(done.stdout)
    assert found["ok"] is True
    names = [finding["name"] for finding in found["findings"]]
    assert {"python", "torch", "threads", "memory", "demo model"} <= set(names)


def test_doctor_fails_with_the_fix(monkeypatch, capsys) -> None:
    monkeypatch.setattr(
        doctor, "REQUIRED", {"numpy": ("99.0", "100"), "no-such-package": ("1", "2")}
    )
    monkeypatch.setattr(doctor, "_TOLERANCE", 0.0)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "-> 99.0 or newer" in out
    assert "-> pip install 'no-such-package>=1,<2'" in out
    assert re.search(r"^!!  demo model", out, re.MULTILINE)
    assert out.endswith("3 problems\n")


def test_bench_offline_counts_what_it_did(seawall, tmp_path) -> None:
    path = tmp_path / "result.json"
    words = "--num-prompts 12 --random-input-len 40 --random-output-len 6 --random-range-ratio 0.5"
    words += " --return-logprob --logprob-start-len 0 --top-logprobs-num 3 --load-format dummy"
    done = seawall(
        "bench", "offline", "--model-path=demo", *words.split(), f"--json={path}", *SMALL
    )
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last == json.loads(path.read_text())
    work = random_workload(
        num_requests=12,
        input_range=ratio_range(40, 0.5, least=1),
        output_range=ratio_range(6, 0.5, least=1),
        vocab_size=4096,
        seed=1,
    )
    assert {len(prompt) for prompt in work.prompts} <= set(range(20, 41))
    assert set(work.output_lens) <= set(range(3, 7))
    assert last["successful_requests"] == 12
    assert last["input_tokens"] == work.input_tokens
    assert last["output_tokens"] == work.output_tokens
    assert last["logprobs"] == work.input_tokens - 12 + work.output_tokens
    rate = last["output_tokens"] / last["duration_s"]
    assert last["output_throughput"] == pytest.approx(rate)
    assert all(line["peak"] <= line["planned"] for line in last["peak_bytes"].values())


def test_the_peer_and_seawall_write_the_same(tmp_path) -> None:
    """The comparison compares like with like: same requests, same lengths, same tokens."""
    work = random_workload(
        num_requests=3, input_range=(16, 60), output_range=(2, 9), vocab_size=4096, seed=1
    )
    path = tmp_path / "work.json"
    path.write_text(json.dumps(asdict(work)))
    made = {}
    for system in ("seawall", "batch"):
        result = tmp_path / f"{system}.json"
        words = [system, "--model", DEMO_FOLDER, "--work", path, "--result", result]
        subprocess.run(
            [sys.executable, "-m", "seawall.benchmarks.peers", *map(str, words)],
            cwd=REPO,
            env=ENVIRONMENT,
            check=True,
        )
        made[system] = json.loads(result.read_text())
        assert made[system]["output_tokens"] == work.output_tokens
    assert made["seawall"]["output_ids"] == made["batch"]["output_ids"]
