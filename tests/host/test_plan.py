"""The memory plan, its table and report, sizes in text, footprints, and what the host reports."""

import json
import subprocess
import sys
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.cache.lease import LeaseBook
from seawall.cache.node import TreeNode
from seawall.cache.pages import HOST_BYTES_PER_PAGE, PageLedger
from seawall.cache.radix import RadixCache
from seawall.cache.swa import SwaCache
from seawall.cache.windows import WindowPages
from seawall.core.errors import BudgetError, ConfigError
from seawall.core.units import ceil_div, human_bytes, parse_bytes, round_down, round_up
from seawall.memory import footprint
from seawall.memory.footprint import Limits, dtype_bytes
from seawall.memory.host import (
    available_host_bytes,
    default_cpu_budget,
    peak_resident_bytes,
    resident_bytes,
)
from seawall.memory.ledger import AccountUse
from seawall.memory.plan import HostPlan, MemoryPlan, solve, solve_host
from seawall.memory.report import DeviceFigures, HostFigures, Transient, memory_report

GIB = 1 << 30
MIB = 1 << 20


def make_limits(context_length: int = 100, page_size: int = 16, max_running: int = 4) -> Limits:
    return Limits(
        max_running=max_running,
        step_tokens=64,
        context_length=context_length,
        page_size=page_size,
    )


limits_strategy = st.builds(
    Limits,
    max_running=st.integers(1, 20),
    step_tokens=st.just(64),
    context_length=st.integers(1, 500),
    page_size=st.integers(1, 37),
)
problems = st.fixed_dictionaries(
    {
        "accounts": st.dictionaries(
            st.sampled_from(["weights", "logits", "kv", "step_buffers"]), st.integers(0, 10_000)
        ),
        "page_bytes": st.integers(1, 3_000),
        "limits": limits_strategy,
        "max_total_tokens": st.none() | st.integers(1, 3_000),
        "max_pages": st.none() | st.integers(1, 200),
    }
)


def solve_or_none(budget: int, problem: dict[str, object]) -> MemoryPlan | None:
    try:
        return solve(budget, **problem)  # type: ignore[arg-type]
    except ConfigError:
        return None


# --- solve --------------------------------------------------------------------------------------


@given(budget=st.integers(0, 400_000), problem=problems)
def test_lines_stay_within_the_budget_and_one_more_page_would_not_fit(
    budget: int, problem: dict[str, object]
) -> None:
    plan = solve_or_none(budget, problem)
    limits: Limits = problem["limits"]  # type: ignore[assignment]
    accounts: dict[str, int] = problem["accounts"]  # type: ignore[assignment]
    page_bytes: int = problem["page_bytes"]  # type: ignore[assignment]
    tokens: int | None = problem["max_total_tokens"]  # type: ignore[assignment]
    max_pages: int | None = problem["max_pages"]  # type: ignore[assignment]
    longest = limits.context_length if tokens is None else min(limits.context_length, tokens)
    least = ceil_div(longest, limits.page_size)
    if plan is None:
        no_room = budget < sum(accounts.values()) + least * page_bytes
        assert no_room or (max_pages is not None and max_pages < least)
        return
    assert sum(plan.lines.values()) == plan.total_bytes <= budget
    assert plan.unplanned_bytes == budget - plan.total_bytes
    fixed = {name: size for name, size in plan.lines.items() if name != "kv"}
    assert fixed == {name: size for name, size in accounts.items() if name != "kv"}
    assert plan.lines["kv"] == accounts.get("kv", 0) + plan.num_pages * page_bytes
    # A longest request fits, and the pool is as large as all bounds together let it be.
    assert plan.num_tokens >= longest
    bounds = [limits.max_running * limits.pages_per_seq]
    if tokens is not None:
        bounds.append(-(-tokens // limits.page_size))
    if max_pages is not None:
        bounds.append(max_pages)
    assert plan.num_pages <= min(bounds)
    if plan.num_pages < min(bounds):
        assert plan.total_bytes + page_bytes > budget


@given(budget=st.integers(0, 300_000), more=st.integers(0, 5_000), problem=problems)
def test_more_budget_never_means_fewer_pages(
    budget: int, more: int, problem: dict[str, object]
) -> None:
    small, large = solve_or_none(budget, problem), solve_or_none(budget + more, problem)
    if small is not None:
        assert large is not None
        assert large.num_pages >= small.num_pages


@given(problem=problems, shortage=st.integers(1, 500))
def test_the_budget_that_the_error_asks_for_is_the_least_that_works(
    problem: dict[str, object], shortage: int
) -> None:
    problem = {**problem, "max_pages": None}
    limits: Limits = problem["limits"]  # type: ignore[assignment]
    tokens: int | None = problem["max_total_tokens"]  # type: ignore[assignment]
    longest = limits.context_length if tokens is None else min(limits.context_length, tokens)
    kv = ceil_div(longest, limits.page_size) * problem["page_bytes"]  # type: ignore[operator]
    least = sum(problem["accounts"].values()) + kv  # type: ignore[attr-defined]
    assert solve_or_none(least, problem) is not None
    with pytest.raises(BudgetError, match=f"at least {least} "):
        solve(max(0, least - shortage), **problem)  # type: ignore[arg-type]


def test_a_longest_request_that_does_not_fit_is_refused_with_the_table() -> None:
    with pytest.raises(BudgetError) as caught:
        solve(1000, {"weights": 400}, page_bytes=100, limits=make_limits(context_length=100))
    message = str(caught.value)
    # 7 pages of 100 bytes are needed, 6 fit: 600 left, 100 missing, 96 tokens fit.
    assert "kv" in message
    assert "100 missing" in message
    assert "lower context_length to 96" in message
    assert "\n" not in message
    rows = [" ".join(line.split()) for line in caught.value.table.splitlines()]
    assert "weights 400 400 B 40.0%" in rows
    assert "kv 700 700 B 70.0% one request of 100 tokens" in rows
    assert "sum 1,100 1.07 KiB 110.0%" in rows
    assert "over budget 100 100 B 10.0%" in rows


def test_context_length_that_the_error_names_then_starts() -> None:
    plan = solve(1000, {"weights": 400}, page_bytes=100, limits=make_limits(context_length=96))
    assert plan.num_pages == 6


def test_max_pages_below_one_longest_request_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_pages 6 holds 96 tokens.*context_length 100"):
        solve(GIB, {}, page_bytes=100, limits=make_limits(context_length=100), max_pages=6)


def test_accounts_alone_over_the_budget_name_the_largest() -> None:
    with pytest.raises(BudgetError, match=r"take 1500 bytes, 500 more.*largest is logits with 900"):
        solve(1000, {"weights": 600, "logits": 900}, page_bytes=1, limits=make_limits())


def test_max_total_tokens_lets_a_small_pool_start() -> None:
    plan = solve(
        1000,
        {"weights": 400},
        page_bytes=100,
        limits=make_limits(context_length=10_000),
        max_total_tokens=33,
    )
    # 33 tokens take 3 pages of 16: rounded up, so that a request of 33 tokens fits.
    assert (plan.num_pages, plan.num_tokens) == (3, 48)
    with pytest.raises(BudgetError, match="lower max_total_tokens to 96"):
        solve(
            1000,
            {"weights": 400},
            page_bytes=100,
            limits=make_limits(context_length=10_000),
            max_total_tokens=97,
        )


def test_max_total_tokens_above_what_fits_takes_what_fits() -> None:
    plan = solve(
        2000, {}, page_bytes=100, limits=make_limits(context_length=100), max_total_tokens=9999
    )
    assert plan.num_pages == 20


def test_pool_never_exceeds_what_all_seats_can_use() -> None:
    plan = solve(GIB, {}, page_bytes=100, limits=make_limits(context_length=100, max_running=4))
    assert plan.num_pages == 4 * 7
    assert "4 x 7 pages" in plan.notes["kv"]
    assert plan.unplanned_bytes == GIB - 2800


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("page_bytes", {"page_bytes": 0}),
        ("max_total_tokens", {"max_total_tokens": 0}),
        ("max_pages", {"max_pages": 0}),
        ("weights", {"accounts": {"weights": -1}}),
        ("budget", {"budget_bytes": -1}),
    ],
)
def test_impossible_sizes_are_refused(name: str, changes: dict[str, object]) -> None:
    arguments: dict[str, object] = {
        "budget_bytes": 10_000,
        "accounts": {},
        "page_bytes": 10,
        "limits": make_limits(),
    }
    with pytest.raises(ConfigError, match=name):
        solve(**{**arguments, **changes})  # type: ignore[arg-type]


def test_table_is_aligned_and_adds_up() -> None:
    plan = solve(
        10 * MIB,
        {"weights": 3 * MIB, "step_buffers": 1000},
        page_bytes=4096,
        limits=make_limits(context_length=1000, max_running=64),
        notes={"weights": "all layers"},
    )
    lines = plan.table().splitlines()
    head, rows, pool = lines[0], lines[1:-1], lines[-1]
    assert head.split() == ["account", "bytes", "size", "share", "how"]
    assert [row.split()[0] for row in rows] == [
        "weights",
        "step_buffers",
        "kv",
        "sum",
        "unplanned",
        "budget",
    ]
    figures = {row.split()[0]: int(row.split()[1].replace(",", "")) for row in rows}
    assert figures["weights"] + figures["step_buffers"] + figures["kv"] == figures["sum"]
    assert figures["sum"] + figures["unplanned"] == figures["budget"] == 10 * MIB
    # Every figure ends in the column where its heading ends.
    end = head.index("bytes") + len("bytes")
    assert all(row[end - 1].isdigit() and row[end] == " " for row in rows)
    assert rows[0].endswith("30.0%  all layers")
    assert pool.startswith(f"{plan.num_pages} pages of 16 tokens = {plan.num_pages * 16} tokens")


# --- host plan ----------------------------------------------------------------------------------


@given(
    budget=st.integers(0, 10_000),
    fixed=st.integers(0, 8_000),
    request=st.integers(1, 900),
    queued=st.none() | st.integers(0, 30),
)
def test_host_plan_gives_the_queue_what_is_left(
    budget: int, fixed: int, request: int, queued: int | None
) -> None:
    try:
        plan = solve_host(budget, {"results": fixed}, request_bytes=request, max_queued=queued)
    except BudgetError as error:
        assert budget < fixed + (0 if queued == 0 else request)
        assert "queue" in error.table
        return
    assert plan.total_bytes <= budget
    assert plan.lines["queue"] == plan.num_queued * request
    if queued is None or plan.num_queued < queued:
        assert plan.total_bytes + request > budget
    else:
        assert plan.num_queued == queued


def test_host_table_ends_with_the_queue() -> None:
    plan = solve_host(1000, {"results": 100}, request_bytes=100, max_queued=None)
    assert plan.num_queued == 9
    assert plan.table().splitlines()[-1] == "9 waiting requests of at most 100 bytes"


# --- report -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pages:
    total: int = 10
    free: int = 4
    cached: int = 3
    in_use: int = 2
    quarantined: int = 1


def report(
    *,
    kv: AccountUse | None = None,
    activations: Transient | None = None,
    pages: Pages | None = None,
    extra: dict[str, AccountUse] | None = None,
) -> dict[str, object]:
    plan = MemoryPlan(
        budget_bytes=1000,
        lines={"activations": 50, "kv": 900},
        num_pages=9,
        page_size=16,
        page_bytes=100,
        notes={},
    )
    host = HostPlan(
        budget_bytes=500, lines={"queue": 400}, num_queued=4, request_bytes=100, notes={}
    )
    uses = {"kv": kv or AccountUse(now=900, peak=900, cap=900), **(extra or {})}
    return memory_report(
        DeviceFigures(
            plan=plan,
            plan_at_start=plan,
            uses=uses,
            transients={"activations": activations or Transient(now=1, peak=50, source="tracker")},
            pages=pages or Pages(),
        ),
        HostFigures(
            plan=host,
            uses={"queue": AccountUse(now=7, peak=8, cap=400)},
            resident=(5000, 6000),
        ),
    )


def test_report_has_the_contract_shape_and_is_json() -> None:
    result = report()
    assert json.loads(json.dumps(result)) == {
        "budget_bytes": 1000,
        "plan": {"activations": 50, "kv": 900},
        "plan_at_start": {"activations": 50, "kv": 900},
        "measured": {
            "activations": {"now": 1, "peak": 50, "source": "tracker"},
            "kv": {"now": 900, "peak": 900},
        },
        "pages": {"total": 10, "free": 4, "cached": 3, "in_use": 2, "quarantined": 1},
        "window_pages": None,
        "cache": {},
        "requests": {},
        "violations": [],
        "host": {
            "budget_bytes": 500,
            "plan": {"queue": 400},
            "measured": {"queue": {"now": 7, "peak": 8}},
            "resident": {"now": 5000, "peak": 6000},
        },
    }


def test_report_names_every_violation() -> None:
    too_much = Transient(now=0, peak=51, source="warmup")
    assert report(activations=too_much)["violations"] == [
        "device account 'activations': peak 51 bytes, planned 50"
    ]
    assert report(pages=Pages(free=5))["violations"] == ["pages: 11 counted, the pool has 10"]
    stray = {"stray": AccountUse(now=0, peak=3, cap=None)}
    assert report(extra=stray)["violations"] == ["device account 'stray': peak 3 bytes, planned 0"]


def test_report_adds_long_lived_and_transient_bytes_of_one_line() -> None:
    result = report(extra={"activations": AccountUse(now=10, peak=20, cap=None)})
    assert result["measured"]["activations"] == {  # type: ignore[index]
        "now": 11,
        "peak": 70,
        "source": "tracker",
    }


# --- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0, 0),
        (4096, 4096),
        (2e9, 2_000_000_000),
        ("4096", 4096),
        ("12 B", 12),
        ("8GiB", 8 * GIB),
        (" 64 mib ", 64 * MIB),
        ("1.5GB", 1_500_000_000),
        ("1.5KiB", 1536),
        ("0.1KiB", 102),
        ("1TiB", 1 << 40),
        ("3MB", 3_000_000),
        # A float would lose the last digits.
        ("9007199.254740993GB", 9007199254740993),
    ],
)
def test_parse_bytes(text: int | float | str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *(-1, -1.0, 1.5, float("nan"), float("inf"), True, None),
        *("", "-1", "-5GiB", "nan", "GiB", "8 XB", "8G", "1e9", "1.GB", ".5GB", "1 2", "0x10"),
        "\u0661GB",
    ],
)
def test_parse_bytes_refuses_in_one_line(text: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (MIB - 1, "1023.99 KiB"),
        (3 * GIB, "3.00 GiB"),
        (5000 << 40, "5000.00 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_human_bytes(size: int, text: str) -> None:
    assert human_bytes(size) == text


@given(value=st.integers(0, 10**20), step=st.integers(1, 10**6))
def test_rounding_is_exact(value: int, step: int) -> None:
    up, down = round_up(value, step), round_down(value, step)
    assert down <= value <= up
    assert down % step == up % step == 0
    assert up - down in (0, step)
    assert ceil_div(value, step) * step == up


# --- footprints ---------------------------------------------------------------------------------


def test_limits_are_checked_and_rounded_up() -> None:
    assert make_limits(context_length=33, page_size=16).pages_per_seq == 3
    assert make_limits(context_length=32, page_size=16).pages_per_seq == 2
    with pytest.raises(ConfigError, match="page_size 0"):
        make_limits(page_size=0)
    with pytest.raises(ConfigError, match="float8"):
        dtype_bytes("float8")


def test_page_ledger_bytes_are_what_the_page_ledger_declares() -> None:
    assert footprint.page_ledger_bytes(1) == HOST_BYTES_PER_PAGE


def test_window_pages_take_no_more_host_memory_than_declared() -> None:
    """In the worst case, where each page was last used at a time of its own."""
    num_pages = 2000
    full = PageLedger(num_pages, debug=False)
    windows = WindowPages(
        PageLedger(num_pages, debug=False), num_full_pages=num_pages, page_size=1, window=1
    )
    book = LeaseBook(full, SwaCache(RadixCache(full, 1), windows), 1, windows=windows)
    tokens = np.arange(num_pages, dtype=np.int32)
    lease = book.open("a", tokens, None, max_match_tokens=0)
    assert lease.reserve(num_pages)
    lease.release(tokens, num_pages, insert=True)
    queue, most = windows._queue, 0
    for page in list(range(num_pages)) * 3:
        windows.use(np.array([page], np.int32))
        most = max(most, len(queue))
    assert num_pages < most <= 2 * num_pages
    entry = key, _, _ = queue._heap[-1]
    a_run = sum(map(sys.getsizeof, (entry, *entry, *key))) + 8  # its place in the queue
    ledger = windows.ledger
    arrays = (windows._window_of, windows._full_of, windows._locks, queue._is_queued)
    standings = queue._all
    arrays += (standings.last_used, standings.num_hits, standings.priority)
    arrays += (ledger._owner, ledger._free, ledger._scratch)
    took = sum(array.nbytes for array in arrays) + most * a_run
    one_class = footprint.page_ledger_bytes(num_pages)
    assert took <= footprint.page_ledger_bytes(num_pages, num_pages) - one_class


def test_host_footprints_follow_their_formulas() -> None:
    limits = make_limits()
    assert footprint.request_bytes(100) == footprint.REQUEST_BYTES + 800
    assert footprint.requests_bytes(3, 100) == 3 * footprint.request_bytes(100)
    assert footprint.scores_bytes(10, top_k=5, num_token_ids=2) == 10 * (4 + 60 + 8)
    assert footprint.results_bytes(limits, 5, 2) == 2 * 68 * 72
    assert footprint.mailbox_bytes(2, 8, 100) == 1600
    assert footprint.detokenizer_bytes(2, 10) == 2 * (footprint.DETOKENIZER_BYTES + 40)
    assert footprint.tree_bytes(2, 5, 16) == 2 * (footprint.RADIX_NODE_BYTES + 64) + 5 * 68
    assert footprint.radix_bytes(5, 16) == 5 * (footprint.RADIX_NODE_BYTES + 128 + 4)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_radix_node_takes_no_more_than_declared(page_size: int) -> None:
    num_nodes = 500
    pages = np.arange(num_nodes * page_size, dtype=np.int32).reshape(num_nodes, page_size)
    tracemalloc.start()
    try:
        node = root = TreeNode(
            tokens=np.empty(0, np.int32),
            page_ids=np.empty(0, np.int32),
            edge=b"",
            parent=None,
            serial=0,
        )
        for serial, tokens in enumerate(pages):
            edge = tokens.tobytes()
            child = TreeNode(
                tokens=tokens.copy(),
                page_ids=np.array([serial], np.int32),
                edge=edge,
                parent=node,
                serial=serial,
            )
            node.children[edge] = child
            node = child
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert root.children
    assert taken <= footprint.radix_bytes(num_nodes, page_size)


# --- host ---------------------------------------------------------------------------------------


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def lay_out(tmp_path: Path, *, available_kib: int, groups: str) -> tuple[Path, Path]:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "meminfo", f"MemTotal: 999999 kB\nMemAvailable:  {available_kib} kB\n")
    write(proc / "self" / "cgroup", groups)
    cgroups.mkdir()
    return proc, cgroups


def test_available_without_groups_is_what_the_kernel_says(tmp_path: Path) -> None:
    proc, cgroups = lay_out(tmp_path, available_kib=5000, groups="")
    assert available_host_bytes(proc, cgroups) == 5000 * 1024


def test_available_is_bounded_by_every_group_above(tmp_path: Path) -> None:
    proc, cgroups = lay_out(tmp_path, available_kib=5000, groups="0::/outer/inner\n")
    write(cgroups / "outer" / "inner" / "memory.max", "max\n")
    write(cgroups / "outer" / "inner" / "memory.current", "1000\n")
    write(cgroups / "outer" / "memory.max", "100000\n")
    write(cgroups / "outer" / "memory.current", "70000\n")
    assert available_host_bytes(proc, cgroups) == 30_000
    # File pages that nobody touched lately can be had back.
    write(cgroups / "outer" / "memory.stat", "anon 3\ninactive_file 20000\n")
    assert available_host_bytes(proc, cgroups) == 50_000
    write(cgroups / "outer" / "memory.current", "170000\n")
    assert available_host_bytes(proc, cgroups) == 0


def test_available_reads_version_one_groups(tmp_path: Path) -> None:
    groups = "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n"
    proc, cgroups = lay_out(tmp_path, available_kib=5000, groups=groups)
    # In a container the group's own path is not mounted, only its root is.
    write(cgroups / "memory" / "memory.limit_in_bytes", "90000\n")
    write(cgroups / "memory" / "memory.usage_in_bytes", "50000\n")
    write(cgroups / "memory" / "memory.stat", "total_inactive_file 10000\n")
    assert available_host_bytes(proc, cgroups) == 50_000
    write(cgroups / "memory" / "memory.limit_in_bytes", "9223372036854771712\n")
    assert available_host_bytes(proc, cgroups) == 5000 * 1024


@pytest.mark.parametrize(
    ("available", "budget"),
    [
        (64 * GIB, 16 * GIB),
        (32 * GIB + MIB, 16 * GIB),
        (10 * GIB, 5 * GIB),
        (10 * GIB - 1, 5 * GIB - 256 * MIB),
        (100 * MIB, 256 * MIB),
    ],
)
def test_default_cpu_budget(available: int, budget: int) -> None:
    assert default_cpu_budget(available) == budget


def test_resident_size_is_of_this_process() -> None:
    block = np.ones(32 * MIB, np.uint8)
    assert resident_bytes() >= block.nbytes
    # The two come from different counters of the kernel, which lag each other by some pages.
    assert peak_resident_bytes() + MIB >= resident_bytes()
    assert 0 < available_host_bytes() < 1 << 50


def test_this_column_runs_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import seawall.memory.plan, seawall.memory.report, seawall.memory.host\n"
        "import seawall.memory.ledger, seawall.memory.footprint, seawall.core.units\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
