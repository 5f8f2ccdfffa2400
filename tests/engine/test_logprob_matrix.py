"""The matrix of sgl-project/sglang#6318, tighter: the same logprobs whatever rows fit at a time.

Prompts of 1,000 tokens on the embedded model; the LM head's rows are taken 1, 2, 3, 16, 128, 256,
2,048 at a time and all at once, in batches where some requests want logprobs and others don't.
At most 1e-6 apart where the BLAS takes the same kernel, which it does for 128 rows and more: these
are bitwise the same unless its threads share the work out anew. For fewer rows it takes others, and
narrower tiles add up in another order; a float32 logprob near -20 has steps of 2e-6, so there the
bound is that of a kernel switch, 1e-5. How much is bitwise goes into the test's properties.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from seawall import Engine
from seawall.memory.footprint_step import row_bytes
from tests.engine.harness import LOGPROB_TOLERANCE, Result, open_engine
from tests.engine.test_api import LOGPROB_KEYS

ROWS = [1, 2, 3, 16, 128, 256, 2048, None]
QUICK_ROWS = [1, 3, 128]
TOP_K, GIVEN = 5, [7, 4095]
SAME_KERNEL, OTHER_KERNEL = 1e-6, 1e-5
ONE_KERNEL_ROWS = 128
LENGTH = 1000
COLUMNS = {
    "input_logprobs",
    "input_top_logprobs",
    "input_token_ids_logprobs",
    "output_logprobs",
    "output_top_logprobs",
    "output_token_ids_logprobs",
}


@pytest.fixture(scope="module")
def wide() -> Iterator[Engine]:
    """An engine whose workspace binds nowhere."""
    with open_engine(
        "demo",
        memory_budget="256MiB",
        logits_workspace="64MiB",
        page_size=16,
        chunked_prefill_size=512,
        max_running_requests=4,
    ) as engine:
        yield engine


def long_prompt(seed: int, length: int = LENGTH) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(10, 4096, length).tolist()
    return ids


def mixed_batch(engine: Engine) -> list[Result]:
    """A long and a short prompt with every kind of logprobs, between two that want none."""
    assert engine.flush_cache()
    wants = [False, True, False, True]
    results: list[Result] = engine.generate(
        input_ids=[long_prompt(1, 90), long_prompt(2), long_prompt(3, 40), long_prompt(4, 200)],
        sampling_params={"temperature": 0, "max_new_tokens": 3, "ignore_eos": True},
        return_logprob=wants,
        logprob_start_len=0,
        top_logprobs_num=TOP_K,
        token_ids_logprob=GIVEN,
        logprob_format="columns",
    )
    for result, wanted in zip(results, wants, strict=True):
        meta = set(result["meta_info"])
        assert (meta >= COLUMNS) is wanted
        assert wanted or not meta & (LOGPROB_KEYS | COLUMNS)
        assert len(result["output_ids"]) == 3
    return [result for result, wanted in zip(results, wants, strict=True) if wanted]


@contextlib.contextmanager
def rows_at_a_time(engine: Engine, rows: int | None) -> Iterator[None]:
    """Make the share for rows hold exactly so many; None leaves it as it is."""
    scorer: Any = engine._assembly.runner.scorer
    usual: int = scorer._rows_bytes
    if rows is not None:
        hidden = scorer._head.weight.shape[1]
        scorer._rows_bytes = rows * row_bytes(hidden, 4, TOP_K, len(GIVEN))
    try:
        yield
    finally:
        scorer._rows_bytes = usual


def compare(found: list[Result], expected: list[Result], tolerance: float) -> float:
    """No difference beyond the tolerance, ids equal; returns the share of what is bitwise equal."""
    same = total = 0
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["output_ids"] == theirs["output_ids"]
        for name in sorted(COLUMNS):
            a, b = ours["meta_info"][name], theirs["meta_info"][name]
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance, err_msg=name)
            same += int((a.view(np.int32) == b.view(np.int32)).sum())
            total += a.size
        for name in ("input_top_ids", "output_top_ids"):
            ties_only(ours["meta_info"], theirs["meta_info"], name, tolerance)
    return same / total


def ties_only(ours: dict[str, Any], theirs: dict[str, Any], name: str, tolerance: float) -> None:
    """Best ids differ only where their logprobs are within the tolerance of one another."""
    differ = ours[name] != theirs[name]
    logprobs = theirs[name.replace("_ids", "_logprobs")]
    for row in np.flatnonzero(differ.any(axis=-1)):
        gaps = -np.diff(logprobs[row])
        assert gaps.min() <= 2 * tolerance, (name, row)


@pytest.fixture(scope="module")
def expected(wide: Engine) -> list[Result]:
    return mixed_batch(wide)


def test_the_expected_results_are_whole(expected: list[Result]) -> None:
    for result, length in zip(expected, (LENGTH, 200), strict=True):
        meta = result["meta_info"]
        assert meta["input_logprobs"].shape == (length,)
        assert meta["input_top_logprobs"].shape == (length, TOP_K)
        assert meta["input_token_ids_logprobs"].shape == (length, 2)
        assert np.isnan(meta["input_logprobs"]).sum() == 1
        # They are logprobs of something: random ids are unlikely, and differently so.
        assert -40 < meta["input_logprobs"][1:].mean() < -3
        assert meta["input_logprobs"][1:].std() > 0.5


def test_rows_at_a_time_change_nothing(
    wide: Engine,
    expected: list[Result],
    soak: bool,
    record_property: Callable[[str, object], None],
) -> None:
    for rows in ROWS if soak else QUICK_ROWS:
        with rows_at_a_time(wide, rows):
            found = mixed_batch(wide)
        same_kernel = rows is None or rows >= ONE_KERNEL_ROWS
        share = compare(found, expected, SAME_KERNEL if same_kernel else OTHER_KERNEL)
        record_property(f"bitwise share, {rows} rows", share)


def test_the_smallest_workspace_changes_nothing(
    expected: list[Result], record_property: Callable[[str, object], None]
) -> None:
    """The least `logits_workspace` that the engine takes, narrow tiles included."""
    with open_engine(
        "demo",
        memory_budget="256MiB",
        logits_workspace="640KiB",
        page_size=16,
        chunked_prefill_size=512,
        max_running_requests=4,
    ) as engine:
        found = mixed_batch(engine)
        report = engine.memory_report()
        assert report["measured"]["logits"]["peak"] <= report["plan"]["logits"] == 640 << 10
    record_property("bitwise share", compare(found, expected, OTHER_KERNEL))


def test_neighbours_change_nothing_but_rounding(wide: Engine, expected: list[Result]) -> None:
    """A prompt scored by itself, other rows in each product, agrees with itself in the batch."""
    assert wide.flush_cache()
    alone = wide.generate(
        input_ids=long_prompt(2),
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=TOP_K,
        logprob_format="columns",
    )["meta_info"]
    for name in ("input_logprobs", "input_top_logprobs"):
        np.testing.assert_allclose(
            alone[name], expected[0]["meta_info"][name], rtol=0, atol=LOGPROB_TOLERANCE
        )
