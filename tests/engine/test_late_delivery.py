"""Results where a launch returns before its step is computed: held until the next launch."""

from pathlib import Path
from typing import Any

import pytest

from seawall.engine.assemble import Assembly
from tests.engine.harness import Probe, assert_same, open_engine, prompt, run

PROBES = [
    Probe(
        ids=prompt(length, seed=length),
        params={"max_new_tokens": 5 + length % 3, "temperature": 0, "ignore_eos": True},
        start_len=0,
    )
    for length in (3, 40, 17, 9, 28, 33)
]


def test_each_result_comes_once_and_in_order(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine(tiny) as engine:
        expected = run(engine, PROBES)
    monkeypatch.setattr(Assembly, "launches_return_early", True)
    with open_engine(tiny) as engine:
        assert_same(run(engine, PROBES), expected, PROBES)
        stream: Any = engine.generate(
            input_ids=list(PROBES[1].ids), sampling_params=PROBES[1].params, stream=True
        )
        lengths = [len(part["output_ids"]) for part in stream]
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == PROBES[1].params["max_new_tokens"]
