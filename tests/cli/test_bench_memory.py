"""`seawall bench memory` as users run it: what it did, not how fast."""

import json
from pathlib import Path

from seawall.cli.main import main


def test_all_three_parts_are_measured(seawall, tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    words = "--num-requests 4 --rounds 3 --page-sizes 1,8 --cached-tokens 4000 --prompt-tokens 1008"
    done = seawall("bench", "memory", *words.split(), f"--json={path}")
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last == json.loads(path.read_text())
    operations = [(rate["page_size"], rate["operation"]) for rate in last["tree"]]
    assert operations == [(p, name) for p in (1, 8) for name in ("insert", "match", "evict")]
    # Five prompts, of which two pairs share their first half: 63 pages of 8.
    assert {rate["cached_tokens"] for rate in last["tree"]} == {5 * 1008 - 2 * 504}
    assert 0 < max(last["peaks"]["largest_share"].values()) <= 1
    assert last["growth"]["requests"] == 12
    assert last["growth"]["pages_lost"] == 0


def test_impossible_sizes_are_refused(capsys) -> None:
    assert main(["bench", "memory", "--cached-tokens=10", "--prompt-tokens=11"]) == 2
    assert "--prompt-tokens: got 11" in capsys.readouterr().err
    assert main(["bench", "memory", "--page-sizes=0"]) == 2
