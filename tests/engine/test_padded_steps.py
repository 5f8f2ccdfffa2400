"""Decode steps padded up to a bucket, as graphs run them, with launches in place of replays."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from seawall.engine import assemble
from seawall.memory.footprint_step import NUM_STEP_SETS
from seawall.runner import runner
from seawall.runner.buffers import StepBuffers
from seawall.runner.graphs import DecodeGraphs
from tests.engine.harness import Probe, assert_same, open_engine, prompt, run

PROBES = [
    Probe(
        ids=prompt(length, seed=length),
        params={"max_new_tokens": 6 + length % 4, "temperature": 0.8, "sampling_seed": length},
        start_len=0,
    )
    for length in (3, 40, 17, 9, 28)
]


class EagerGraphs(DecodeGraphs):
    """Launches what a graph would replay."""

    replayed: list[int]

    def __init__(
        self,
        buckets: Sequence[int],
        prepare: Callable[[int], None],
        forward: Callable[[int], None],
    ) -> None:
        self._buckets = np.array(buckets)
        self._forward = forward
        self.replayed = []
        for rows in buckets:
            prepare(rows)
            forward(rows)

    @torch.inference_mode()
    def replay(self, bucket: int) -> None:
        self.replayed.append(bucket)
        self._forward(bucket)


@pytest.mark.parametrize("most", [5, 8])
def test_padding_changes_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    with open_engine(tiny) as engine:
        expected = run(engine, PROBES)
    monkeypatch.setattr(runner, "DecodeGraphs", EagerGraphs)

    def one_set(config, plan, arena):
        made = StepBuffers(arena, plan.limits, plan.spec.hidden_size, torch.float32)
        return (made,) * NUM_STEP_SETS

    monkeypatch.setattr(assemble, "_step_buffers", one_set)
    with open_engine(tiny) as engine:
        inner = engine._assembly.runner
        engine._thread.call(lambda: inner.capture(most))
        assert_same(run(engine, PROBES), expected, PROBES)
        replayed = inner._graphs.replayed
        assert replayed
        assert max(replayed) <= most
        assert set(replayed) <= {1, 2, 4, most}
        inner.drop_graphs()
        assert engine.flush_cache()
        count = len(replayed)
        assert_same(run(engine, PROBES), expected, PROBES)
        assert len(replayed) == count
