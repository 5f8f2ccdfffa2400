"""Two classes of pages: how many window pages a request holds, and how a budget is divided."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.core.errors import BudgetError, ConfigError
from seawall.core.units import ceil_div
from seawall.memory.footprint import Limits, window_pages_per_seq
from seawall.memory.page_split import WindowClass
from seawall.memory.plan import MemoryPlan, solve

GIB = 1 << 30


@st.composite
def problems(draw: st.DrawFn) -> tuple[Limits, int, WindowClass]:
    """Limits, bytes of a full page, and the window class."""
    max_running, chunk = draw(st.integers(1, 20)), draw(st.integers(1, 90))
    limits = Limits(
        max_running=max_running,
        step_tokens=chunk + max_running,
        context_length=draw(st.integers(1, 500)),
        page_size=draw(st.integers(1, 37)),
    )
    tokens = draw(st.integers(1, 200))
    window = WindowClass(
        page_bytes=draw(st.integers(1, 3000)),
        tokens=tokens,
        pages_per_seq=window_pages_per_seq(limits, tokens, chunk),
    )
    return limits, draw(st.one_of(st.just(0), st.integers(1, 3000))), window


def plan_of(
    budget: int, problem: tuple[Limits, int, WindowClass], max_total_tokens: int | None = None
) -> MemoryPlan:
    limits, page_bytes, window = problem
    return solve(
        budget,
        {"weights": 1000},
        page_bytes=page_bytes,
        limits=limits,
        max_total_tokens=max_total_tokens,
        window=window,
    )


def least_bytes(problem: tuple[Limits, int, WindowClass], tokens: int | None = None) -> int:
    """One longest request."""
    limits, page_bytes, window = problem
    longest = limits.context_length if tokens is None else min(tokens, limits.context_length)
    pages = ceil_div(longest, limits.page_size)
    return pages * page_bytes + min(pages, window.pages_per_seq) * window.page_bytes


@given(
    window=st.integers(1, 100),
    chunk=st.integers(1, 100),
    page_size=st.integers(1, 40),
    context_length=st.integers(1, 400),
    first=st.integers(0, 100),
)
def test_no_request_holds_more_window_pages(
    window: int, chunk: int, page_size: int, context_length: int, first: int
) -> None:
    """Every chunk of a prompt, from any first position on; and some chunk needs nearly as many."""
    limits = Limits(
        max_running=1, step_tokens=chunk + 1, context_length=context_length, page_size=page_size
    )
    bound = window_pages_per_seq(limits, window, chunk)
    most = 0
    for start in range(min(first, context_length - 1), context_length, chunk):
        end = min(start + chunk, context_length)
        seen = max(0, start - window + 1)
        most = max(most, (end - 1) // page_size - seen // page_size + 1)
    assert most <= bound <= limits.pages_per_seq
    if context_length > first + 2 * (window + chunk):
        assert bound <= most + 4


@given(problem=problems(), more=st.integers(0, 400_000), tokens=st.none() | st.integers(1, 900))
def test_a_longest_request_fits_and_the_budget_is_kept_and_used(
    problem: tuple[Limits, int, WindowClass], more: int, tokens: int | None
) -> None:
    limits, page_bytes, window = problem
    budget = 1000 + least_bytes(problem, tokens) + more
    plan = plan_of(budget, problem, tokens)
    longest = limits.context_length if tokens is None else min(tokens, limits.context_length)
    kv = plan.num_pages * page_bytes + plan.num_window_pages * window.page_bytes
    assert plan.lines["kv"] == kv
    assert plan.total_bytes == 1000 + kv <= budget
    pages = ceil_div(longest, limits.page_size)
    assert plan.num_pages >= pages
    assert plan.num_window_pages >= min(pages, window.pages_per_seq)
    # No more of either class than can be in use.
    assert plan.num_pages <= limits.max_running * limits.pages_per_seq
    assert plan.num_window_pages <= plan.num_pages
    assert plan.num_window_pages <= limits.max_running * window.pages_per_seq
    # What is left over holds no page that could be used with what else it takes.
    bounds = [limits.max_running * limits.pages_per_seq]
    bounds += [] if tokens is None else [ceil_div(tokens, limits.page_size)]
    if page_bytes and plan.num_pages < min(bounds):
        assert plan.unplanned_bytes < page_bytes + 2 * window.page_bytes


@given(problem=problems(), more=st.integers(0, 400_000), extra=st.integers(0, 9000))
def test_more_budget_never_means_fewer_pages(
    problem: tuple[Limits, int, WindowClass], more: int, extra: int
) -> None:
    budget = 1000 + least_bytes(problem) + more
    small, large = plan_of(budget, problem), plan_of(budget + extra, problem)
    assert large.num_pages >= small.num_pages
    assert large.num_window_pages >= small.num_window_pages


@given(problem=problems(), shortage=st.integers(1, 500))
def test_the_budget_that_the_error_asks_for_is_the_least_that_works(
    problem: tuple[Limits, int, WindowClass], shortage: int
) -> None:
    least = 1000 + least_bytes(problem)
    plan_of(least, problem)
    with pytest.raises(BudgetError, match=f"at least {least} ") as caught:
        plan_of(max(0, least - shortage), problem)
    assert "kv" in caught.value.table


@given(problem=problems(), shortage=st.integers(1, 9000))
def test_a_context_length_that_the_error_names_starts(
    problem: tuple[Limits, int, WindowClass], shortage: int
) -> None:
    limits, page_bytes, window = problem
    budget = max(1000, 1000 + least_bytes(problem) - shortage)
    with pytest.raises(BudgetError) as caught:
        plan_of(budget, problem)
    _, named, rest = str(caught.value).partition("lower context_length to ")
    if not named:
        assert budget - 1000 < page_bytes + window.page_bytes
        return
    lower = replace(limits, context_length=int(rest.split()[0]))
    held = min(window.pages_per_seq, lower.pages_per_seq)
    plan_of(budget, (lower, page_bytes, replace(window, pages_per_seq=held)))


LIMITS = Limits(max_running=16, step_tokens=80, context_length=6400, page_size=16)
WINDOW = WindowClass(page_bytes=500, tokens=256, pages_per_seq=25)


def test_the_split_is_that_of_a_request_between_the_longest_and_a_window() -> None:
    """m = 25 and S = 400: sqrt(m S) = 100 pages, of which 25 are in the window."""
    plan = plan_of(1000 + 1_000_000, (LIMITS, 1000, WINDOW))
    assert (plan.num_pages, plan.num_window_pages) == (888, 222)
    assert plan.notes["kv"].startswith("888 pages of 1000 bytes and 222 window pages of 500, all")
    assert "222 window pages = 3552 tokens, 500 bytes a page" in plan.table()


def test_every_seat_gets_its_window_and_chunk_where_there_is_room() -> None:
    plan = plan_of(GIB, (LIMITS, 1000, WINDOW))
    assert (plan.num_pages, plan.num_window_pages) == (16 * 400, 16 * 25)
    # Half of all that could be used still holds every seat's window.
    half = plan_of(1000 + 3_400_000, (LIMITS, 1000, WINDOW))
    assert half.num_window_pages == 16 * 25
    assert half.num_pages == 3200


def test_without_full_layers_positions_cost_nothing_and_are_bounded_all_the_same() -> None:
    plan = plan_of(GIB, (LIMITS, 0, WINDOW))
    assert (plan.num_pages, plan.num_window_pages) == (16 * 400, 16 * 25)
    assert plan.lines["kv"] == 16 * 25 * 500
    small = plan_of(1000 + 100 * 500, (LIMITS, 0, WINDOW))
    # 16 pages of window at least for 400 pages of a longest request.
    assert (small.num_pages, small.num_window_pages) == (100 * 400 // 16, 100)


def test_max_total_tokens_bounds_both_classes() -> None:
    plan = plan_of(GIB, (LIMITS, 1000, WINDOW), max_total_tokens=160)
    assert (plan.num_pages, plan.num_window_pages) == (10, 10)


def test_a_window_class_of_no_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="page_bytes 0"):
        plan_of(GIB, (LIMITS, 1000, replace(WINDOW, page_bytes=0)))
