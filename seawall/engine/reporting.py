"""Gathers what ledger, meter, pages and queues say into the memory report."""

from collections.abc import Mapping
from dataclasses import asdict

from seawall.device.meter import Meter, Reading
from seawall.device.runtime import Runtime
from seawall.engine.core import EngineCore
from seawall.engine.planning import EnginePlan
from seawall.grammar.store import GrammarStore
from seawall.memory.footprint import page_ledger_bytes, requests_bytes, tree_bytes
from seawall.memory.host import peak_resident_bytes, resident_bytes
from seawall.memory.ledger import AccountUse, Ledger
from seawall.memory.report import DeviceFigures, HostFigures, Transient, memory_report

# Accounts whose bytes live for one step: the meter sees them, the arena does not.
_TRANSIENT = ("activations", "logits")


class Reporter:
    """Writes reports; called on the core thread."""

    def __init__(  # noqa: PLR0913 -- one argument a part that is reported on
        self,
        *,
        plan: EnginePlan,
        device: Ledger,
        host: Ledger,
        meter: Meter,
        warm: Mapping[str, Reading],
        core: EngineCore,
        runtime: Runtime,
        grammars: GrammarStore | None,
    ) -> None:
        self._plan = plan
        self._device = device
        self._host = host
        self._meter = meter
        self._warm = warm
        self._core = core
        self._runtime = runtime
        self._grammars = grammars

    def memory_report(self) -> dict[str, object]:
        """The report of the contract's `memory_report`."""
        leases = self._core.leases
        ledger = leases.ledger
        return memory_report(
            DeviceFigures(
                plan=self._plan.memory,
                plan_at_start=self._plan.memory,
                uses={**self._device.snapshot(), "outside": self._outside()},
                transients=self._transients(),
                pages=ledger.counts(),
                violations=[str(violation) for violation in leases.violations],
                window_pages=leases.window_counts(),
                requests=leases.all_pages() if ledger.debug else {},
            ),
            HostFigures(
                plan=self._plan.host,
                uses={**self._host.snapshot(), **self._counted()},
                resident=(resident_bytes(), peak_resident_bytes()),
                cache=self.cache_figures(),
            ),
        )

    def cache_figures(self) -> dict[str, int]:
        """What the prefix cache holds now and did since the start, in pages and tokens."""
        return asdict(self._core.leases.cache.stats())

    def _outside(self) -> AccountUse:
        """What the device holds that no allocator of ours does; on the CPU that is the host's."""
        cap = self._plan.memory.lines["outside"]
        memory = self._runtime.memory()
        num_bytes = memory.outside_bytes if memory.reserved_bytes else 0
        return AccountUse(now=num_bytes, peak=num_bytes, cap=cap)

    def _transients(self) -> dict[str, Transient]:
        """What steps take: counted now if the meter counts, else the warm-up's worst case."""
        counted = self._meter.readings()
        found = {}
        for account in _TRANSIENT:
            warm = self._warm.get(account, Reading(now=0, peak=0))
            reading = counted.get(account)
            if reading is None:
                found[account] = Transient(now=0, peak=warm.peak, source="warmup")
            else:
                peak = max(reading.peak, warm.peak)
                found[account] = Transient(now=reading.now, peak=peak, source="tracker")
        return found

    def _counted(self) -> dict[str, AccountUse]:
        """Host accounts that are counted as items times declared bytes."""
        limits, caps = self._plan.limits, self._plan.host.lines
        counts, stats = self._core.scheduler.counts, self._core.leases.cache.stats()
        cached = stats.evictable_pages + stats.protected_pages
        ledger = page_ledger_bytes(self._plan.memory.num_pages, self._plan.memory.num_window_pages)
        found = {
            "running": (
                requests_bytes(counts.running, limits.context_length),
                requests_bytes(counts.most_running, limits.context_length),
            ),
            "pages": (ledger, ledger),
            "radix": (
                tree_bytes(stats.num_nodes, cached, limits.page_size),
                tree_bytes(stats.most_nodes, stats.most_pages, limits.page_size),
            ),
        }
        companions = self._core.leases.companions
        uses = {
            account: AccountUse(now=now, peak=peak, cap=caps[account])
            for account, (now, peak) in found.items()
        }
        uses["companions"] = AccountUse(
            now=companions.num_bytes, peak=companions.peak_bytes, cap=caps["companions"]
        )
        if self._grammars is not None:
            uses["grammars"] = AccountUse(
                now=self._grammars.num_bytes,
                peak=self._grammars.peak_bytes,
                cap=caps["grammars"],
            )
        return uses
