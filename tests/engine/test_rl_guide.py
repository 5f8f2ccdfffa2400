"""The code in docs/rl.md, run as it stands there."""

import re
from pathlib import Path
from typing import Any

GUIDE = Path(__file__).parents[2] / "docs" / "rl.md"


def test_the_guide_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    try:
        for block in blocks:
            exec(compile(block, GUIDE.name, "exec"), names)
        engine = names["engine"]
        assert names["version"] == "default"
        assert len(names["rollout"]) == 8
        result = engine.generate("Once", {"max_new_tokens": 1})
        assert result["meta_info"]["weight_version"] == "step-2"
        assert engine.memory_report()["violations"] == []
    finally:
        names["engine"].shutdown()
