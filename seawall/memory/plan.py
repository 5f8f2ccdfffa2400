"""The plan: a budget divided into lines before anything is allocated.

    budget >= line + line + ... + kv          device: the pool takes the pages that fit in the rest
    budget >= line + line + ... + queue       host: waiting requests take what fits in the rest

Owns the division, the refusal when it does not work out, and the printed table. What each line
takes is a footprint, computed elsewhere and passed in. Whole numbers only.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from seawall.core.errors import BudgetError, ConfigError
from seawall.core.units import ceil_div, human_bytes
from seawall.memory.footprint import Limits
from seawall.memory.page_split import OneClass, TwoClasses, WindowClass

KV = "kv"
QUEUE = "queue"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The device plan: lines that sum to at most the budget.

    Attributes:
        lines: bytes of each account, "kv" included.
        num_pages: pages of the KV pool.
        page_bytes: device bytes of one page in all layers that see everything.
        num_window_pages: pages of the window class; 0 if no layer has a window.
        window_page_bytes: device bytes of one of those.
        window_pages_per_seq: most of them that one request holds.
        notes: how a line came about, for the table.
    """

    budget_bytes: int
    lines: Mapping[str, int]
    num_pages: int
    page_size: int
    page_bytes: int
    notes: Mapping[str, str]
    num_window_pages: int = 0
    window_page_bytes: int = 0
    window_pages_per_seq: int = 0

    @property
    def total_bytes(self) -> int:
        """Sum of all lines."""
        return sum(self.lines.values())

    @property
    def unplanned_bytes(self) -> int:
        """What the budget leaves over: less than a page, unless a limit stopped the pool."""
        return self.budget_bytes - self.total_bytes

    @property
    def num_tokens(self) -> int:
        """KV slots of the pool."""
        return self.num_pages * self.page_size

    def num_at_once(self, num_tokens: int) -> int:
        """Requests of so many tokens that fit at the same time."""
        pages = ceil_div(num_tokens, self.page_size)
        fit = self.num_pages // pages
        if self.num_window_pages:
            fit = min(fit, self.num_window_pages // min(pages, self.window_pages_per_seq))
        return fit

    def table(self) -> str:
        """The plan as aligned text, one line an account."""
        pool = (
            f"{self.num_pages} pages of {self.page_size} tokens = {self.num_tokens} tokens, "
            f"{self.page_bytes} bytes a page"
        )
        if self.num_window_pages:
            pool += (
                f"\n{self.num_window_pages} window pages = "
                f"{self.num_window_pages * self.page_size} tokens, "
                f"{self.window_page_bytes} bytes a page"
            )
        return f"{_render(self.budget_bytes, self.lines, self.notes)}\n{pool}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """The host plan, of the same form.

    Attributes:
        lines: bytes of each account, "queue" included.
        num_queued: waiting requests of the largest size that the queue line holds; smaller ones
            are charged what they take, so that more of them fit.
        request_bytes: host bytes of one waiting request of the largest size.
    """

    budget_bytes: int
    lines: Mapping[str, int]
    num_queued: int
    request_bytes: int
    notes: Mapping[str, str]

    @property
    def total_bytes(self) -> int:
        """Sum of all lines."""
        return sum(self.lines.values())

    @property
    def unplanned_bytes(self) -> int:
        """What the budget leaves over."""
        return self.budget_bytes - self.total_bytes

    def table(self) -> str:
        """The plan as aligned text, one line an account."""
        queue = f"{self.num_queued} waiting requests of at most {self.request_bytes} bytes"
        return f"{_render(self.budget_bytes, self.lines, self.notes)}\n{queue}"


def solve(  # noqa: PLR0913 -- the second class of pages is one more thing to divide by
    budget_bytes: int,
    accounts: Mapping[str, int],
    *,
    page_bytes: int,
    limits: Limits,
    max_total_tokens: int | None = None,
    max_pages: int | None = None,
    notes: Mapping[str, str] | None = None,
    window: WindowClass | None = None,
) -> MemoryPlan:
    """Divides the device budget: the accounts as given, the rest in whole pages for KV.

        num_pages = min((budget - sum(accounts)) // page_bytes,
                        max_running * pages_per_seq,
                        ceil(max_total_tokens / page_size), max_pages)

    With layers that have a window, page_split.py divides what is left between two classes, and the
    bounds are those of the full class.

    Rounding `max_total_tokens` up lets one request of exactly that many tokens fit. One request of
    min(context_length, max_total_tokens) tokens must fit.

    Args:
        budget_bytes: the load line.
        accounts: fixed lines. A "kv" among them is what the pool takes besides its pages.
        page_bytes: bytes of one page; of the full class, where 0 means that it has no layers.
        limits: sizes that the accounts were computed with.
        max_total_tokens: bound on the pool that the user gave.
        max_pages: bound on the pool from elsewhere, such as the width of an index.
        notes: how each line came about, for the table.
        window: the class of the layers with a window; None if there are none.

    Raises:
        BudgetError: the accounts alone, or with one longest request, pass the budget.
        ConfigError: a size that is negative or, for pages and tokens, not positive; max_pages
            below one longest request.
    """
    _check_sizes(budget_bytes, accounts)
    _check_positive("page_bytes", page_bytes if window is None else window.page_bytes)
    name, longest = "context_length", limits.context_length
    if max_total_tokens is not None and max_total_tokens < longest:
        name, longest = "max_total_tokens", max_total_tokens
    least = ceil_div(longest, limits.page_size)
    bound, most = _most_pages(limits, max_total_tokens, max_pages)
    if most < least:
        raise ConfigError(
            f"{bound} {most} holds {most * limits.page_size} tokens, fewer than {name} {longest}; "
            f"lower {name}"
        )
    pages: OneClass | TwoClasses = OneClass(page_bytes=page_bytes, most=most)
    if window is not None:
        pages = TwoClasses(page_bytes=page_bytes, window=window, limits=limits, most=most)
    remarks = dict(notes or {})
    left = budget_bytes - sum(accounts.values())
    need = pages.least_bytes(least)
    if left < need:
        asked = {**accounts, KV: accounts.get(KV, 0) + need}
        remarks.setdefault(KV, f"one request of {longest} tokens")
        fits = pages.longest_fit(max(left, 0)) * limits.page_size
        text = _misfit(budget_bytes, accounts, need, f"{name} {longest}", fits)
        raise BudgetError(text, _render(budget_bytes, asked, remarks))
    num_pages, num_window = pages.solve(left, least)
    reason = f"limited by {bound}" if num_pages == most else "all that the budget leaves"
    window_bytes = 0 if window is None else window.page_bytes
    also = f" and {num_window} window pages of {window_bytes}" if num_window else ""
    remarks.setdefault(KV, f"{num_pages} pages of {page_bytes} bytes{also}, {reason}")
    kv_bytes = accounts.get(KV, 0) + num_pages * page_bytes + num_window * window_bytes
    return MemoryPlan(
        budget_bytes=budget_bytes,
        lines={**accounts, KV: kv_bytes},
        num_pages=num_pages,
        page_size=limits.page_size,
        page_bytes=page_bytes,
        notes=remarks,
        num_window_pages=num_window,
        window_page_bytes=window_bytes,
        window_pages_per_seq=0 if window is None else window.pages_per_seq,
    )


def solve_host(
    budget_bytes: int,
    accounts: Mapping[str, int],
    *,
    request_bytes: int,
    max_queued: int | None,
    notes: Mapping[str, str] | None = None,
) -> HostPlan:
    """Divides the host budget: the accounts as given, the rest for waiting requests.

        num_queued = min((budget - sum(accounts)) // request_bytes, max_queued)

    Args:
        budget_bytes: host_memory_budget.
        accounts: fixed lines.
        request_bytes: one waiting request of the largest size.
        max_queued: bound that the user gave; None for what fits.
        notes: how each line came about, for the table.

    Raises:
        BudgetError: the accounts alone, or with one waiting request, pass the budget.
        ConfigError: a size that is negative, or no bytes for a request.
    """
    _check_sizes(budget_bytes, accounts)
    _check_positive("request_bytes", request_bytes)
    remarks = dict(notes or {})
    left = budget_bytes - sum(accounts.values())
    least = 1 if max_queued is None else min(max_queued, 1)
    if left < least * request_bytes:
        asked = {**accounts, QUEUE: accounts.get(QUEUE, 0) + least * request_bytes}
        missing = least * request_bytes - left
        raise BudgetError(
            f"host plan: the accounts and one waiting request take {budget_bytes + missing} bytes, "
            f"{missing} more than host_memory_budget {budget_bytes}; raise it, or lower "
            "max_running_requests or context_length",
            _render(budget_bytes, asked, remarks),
        )
    num_queued = left // request_bytes
    if max_queued is not None:
        num_queued = min(num_queued, max_queued)
    lines = dict(accounts)
    lines[QUEUE] = accounts.get(QUEUE, 0) + num_queued * request_bytes
    remarks.setdefault(QUEUE, f"{num_queued} requests of {request_bytes} bytes")
    return HostPlan(
        budget_bytes=budget_bytes,
        lines=lines,
        num_queued=num_queued,
        request_bytes=request_bytes,
        notes=remarks,
    )


def _most_pages(
    limits: Limits, max_total_tokens: int | None, max_pages: int | None
) -> tuple[str, int]:
    """The tightest bound on the pool besides the budget, and its name.

    More pages than all seats can fill with sequences of full length would never be used.
    """
    seats, per_seq = limits.max_running, limits.pages_per_seq
    bounds = [(f"{seats} x {per_seq} pages", seats * per_seq)]
    if max_total_tokens is not None:
        _check_positive("max_total_tokens", max_total_tokens)
        bounds.append(("max_total_tokens", ceil_div(max_total_tokens, limits.page_size)))
    if max_pages is not None:
        _check_positive("max_pages", max_pages)
        bounds.append(("max_pages", max_pages))
    return min(bounds, key=lambda bound: bound[1])


def _misfit(
    budget_bytes: int, accounts: Mapping[str, int], kv_bytes: int, longest: str, fits: int
) -> str:
    """One line: what does not fit, how many bytes are missing, and what would fit."""
    fixed = sum(accounts.values())
    least_budget = fixed + kv_bytes
    if fixed > budget_bytes:
        largest = max(accounts, key=lambda account: accounts[account])
        return (
            f"the accounts before kv take {fixed} bytes, {fixed - budget_bytes} more than the "
            f"budget of {budget_bytes}; the largest is {largest} with {accounts[largest]}; set "
            f"memory_budget to at least {least_budget} ({human_bytes(least_budget)})"
        )
    name = longest.split()[0]
    lower = f"lower {name} to {fits}" if fits else f"no {name} fits"
    return (
        f"kv: one request of {longest} tokens needs {kv_bytes} bytes, "
        f"{budget_bytes - fixed} of the budget of {budget_bytes} are left, "
        f"{least_budget - budget_bytes} missing; set memory_budget to at least "
        f"{least_budget} ({human_bytes(least_budget)}) or {lower}"
    )


def _check_sizes(budget_bytes: int, accounts: Mapping[str, int]) -> None:
    for name, num_bytes in (("budget", budget_bytes), *accounts.items()):
        if num_bytes < 0:
            raise ConfigError(f"{name}: {num_bytes} bytes is negative; the least is 0")


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} {value} is too small; the least is 1")


def _render(budget_bytes: int, lines: Mapping[str, int], notes: Mapping[str, str]) -> str:
    total = sum(lines.values())
    rows = [("account", "bytes", "size", "share", "how")]
    rows += [
        (account, *_figures(num_bytes, budget_bytes), notes.get(account, ""))
        for account, num_bytes in lines.items()
    ]
    rest = "unplanned" if total <= budget_bytes else "over budget"
    rows.append(("sum", *_figures(total, budget_bytes), ""))
    rows.append((rest, *_figures(abs(budget_bytes - total), budget_bytes), ""))
    rows.append(("budget", *_figures(budget_bytes, budget_bytes), ""))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(
            (row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in (1, 2, 3)), row[4])
        ).rstrip()
        for row in rows
    )


def _figures(num_bytes: int, budget_bytes: int) -> tuple[str, str, str]:
    """Bytes, the same for people, and the share of the budget in tenths of a percent."""
    if budget_bytes == 0:
        share = "-"
    else:
        tenths = num_bytes * 1000 // budget_bytes
        share = f"{tenths // 10}.{tenths % 10}%"
    return f"{num_bytes:,}", human_bytes(num_bytes), share
