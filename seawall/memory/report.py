"""The memory report: plan against measurement, line by line, as plain data for JSON.

Owns the shape of what `memory_report()` and `/memory` return, and the comparison. Measures nothing:
the ledger's snapshot, the tracker's readings and the page counts are passed in.

    a line is measured as     what the ledger says of its long-lived tensors
                            + what the meter says of its transients (peaks add: an upper bound,
                              exact once the long-lived part no longer changes)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from seawall.memory.ledger import AccountUse
from seawall.memory.plan import HostPlan, MemoryPlan


class PageNumbers(Protocol):
    """Pages by owner; the counts of the page ledger fit."""

    @property
    def total(self) -> int:
        """All pages of the pool."""

    @property
    def free(self) -> int:
        """Nobody's."""

    @property
    def cached(self) -> int:
        """A prefix tree's."""

    @property
    def in_use(self) -> int:
        """A request's."""

    @property
    def quarantined(self) -> int:
        """Withheld after misuse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transient:
    """Transient bytes of an account and who measured them: "tracker", "warmup", "allocator"."""

    now: int
    peak: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures:
    """What is known of the device side at one moment.

    Attributes:
        plan: as it is now; `plan_at_start` is the one before anything was given back.
        uses: snapshot of the device ledger.
        transients: by account, from the meter or the warm-up.
        violations: misuse that other parts recorded, in words.
        window_pages: of the class of layers with sliding windows, where there are any.
        requests: pages of each running request by id, if they are to be listed.
    """

    plan: MemoryPlan
    plan_at_start: MemoryPlan
    uses: Mapping[str, AccountUse]
    transients: Mapping[str, Transient]
    pages: PageNumbers
    violations: Sequence[str] = ()
    window_pages: PageNumbers | None = None
    requests: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFigures:
    """What is known of the host side at one moment.

    Attributes:
        uses: snapshot of the host ledger.
        resident: resident size of the process, now and at its peak: reported, never compared.
        cache: what the prefix cache counts.
    """

    plan: HostPlan
    uses: Mapping[str, AccountUse]
    resident: tuple[int, int]
    cache: Mapping[str, int] = field(default_factory=dict)


def memory_report(device: DeviceFigures, host: HostFigures) -> dict[str, object]:
    """The report as nested dicts of numbers and text.

    `violations` holds what was passed in, every line whose peak passed its plan, plans that pass
    their budget, and pages whose counts do not add up.
    """
    measured = _measured(device.plan.lines, device.uses, device.transients)
    host_measured = _measured(host.plan.lines, host.uses, {})
    violations = [
        *device.violations,
        *_over("device", device.plan.budget_bytes, device.plan.lines, measured),
        *_over("host", host.plan.budget_bytes, host.plan.lines, host_measured),
        *_unbalanced(device.pages),
        *([] if device.window_pages is None else _unbalanced(device.window_pages)),
    ]
    return {
        "budget_bytes": device.plan.budget_bytes,
        "plan": dict(device.plan.lines),
        "plan_at_start": dict(device.plan_at_start.lines),
        "measured": measured,
        "pages": _pages(device.pages),
        "window_pages": None if device.window_pages is None else _pages(device.window_pages),
        "cache": dict(host.cache),
        "requests": dict(device.requests),
        "violations": violations,
        "host": {
            "budget_bytes": host.plan.budget_bytes,
            "plan": dict(host.plan.lines),
            "measured": host_measured,
            "resident": {"now": host.resident[0], "peak": host.resident[1]},
        },
    }


def _pages(pages: PageNumbers) -> dict[str, int]:
    return {
        "total": pages.total,
        "free": pages.free,
        "cached": pages.cached,
        "in_use": pages.in_use,
        "quarantined": pages.quarantined,
    }


def _measured(
    lines: Mapping[str, int],
    uses: Mapping[str, AccountUse],
    transients: Mapping[str, Transient],
) -> dict[str, dict[str, int | str]]:
    # Accounts outside the plan are shown too: they are violations, not secrets.
    accounts = dict.fromkeys((*lines, *uses, *transients))
    measured: dict[str, dict[str, int | str]] = {}
    for account in accounts:
        use = uses.get(account)
        now, peak = (0, 0) if use is None else (use.now, use.peak)
        transient = transients.get(account)
        if transient is None:
            measured[account] = {"now": now, "peak": peak}
        else:
            measured[account] = {
                "now": now + transient.now,
                "peak": peak + transient.peak,
                "source": transient.source,
            }
    return measured


def _over(
    side: str,
    budget_bytes: int,
    lines: Mapping[str, int],
    measured: Mapping[str, Mapping[str, int | str]],
) -> list[str]:
    found = []
    total = sum(lines.values())
    if total > budget_bytes:
        found.append(f"{side} plan: lines sum to {total} bytes, the budget is {budget_bytes}")
    for account, figures in measured.items():
        peak = int(figures["peak"])
        planned = lines.get(account, 0)
        if peak > planned:
            found.append(f"{side} account {account!r}: peak {peak} bytes, planned {planned}")
    return found


def _unbalanced(pages: PageNumbers) -> list[str]:
    counted = pages.free + pages.cached + pages.in_use + pages.quarantined
    if counted == pages.total:
        return []
    return [f"pages: {counted} counted, the pool has {pages.total}"]
