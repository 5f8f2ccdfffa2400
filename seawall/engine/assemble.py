"""The composition root: plan -> ledger -> arena -> parts -> warm-up -> seal.

The only place where parts meet. Nothing long-lived is made after `seal`; the worst-case warm-up
has run before it, and what it measured is held against the plan: an account that passed its plan
refuses the start instead of surprising a user later.
"""

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import torch

from seawall.cache.chunk import ChunkCache
from seawall.cache.companions import CompanionStore
from seawall.cache.eviction import EVICTION_ORDERS
from seawall.cache.lease import LeaseBook
from seawall.cache.pages import PageLedger
from seawall.cache.radix import RadixCache
from seawall.cache.swa import SwaCache
from seawall.cache.windows import WindowPages
from seawall.core.config import EngineConfig
from seawall.core.errors import BudgetError
from seawall.core.params import RequestLimits
from seawall.device.arena import Arena
from seawall.device.cpu import keep_freed_memory
from seawall.device.dtypes import torch_dtype
from seawall.device.meter import Meter, NullMeter, Reading
from seawall.device.tracker import Tracker
from seawall.engine.control import Control
from seawall.engine.core import EngineCore
from seawall.engine.devices import make_attention, make_runtime, max_gaps, step_transfers
from seawall.engine.grammars import make_grammars
from seawall.engine.planning import EnginePlan, extra_companion_bytes
from seawall.engine.planning_cuda import graph_rows
from seawall.engine.reporting import Reporter
from seawall.engine.results import ResultAccount
from seawall.engine.texts import TextAccount
from seawall.engine.weights import Weights
from seawall.grammar.base import Vocabulary
from seawall.grammar.store import GrammarStore
from seawall.memory.footprint_step import NUM_STEP_SETS, mask_words
from seawall.memory.ledger import Ledger
from seawall.models.base import CausalLM
from seawall.models.registry import load_model
from seawall.runner.buffers import SeatTables, StepBuffers
from seawall.runner.runner import Runner
from seawall.runner.scoring import Scorer
from seawall.runner.warmup import WarmupShape, warm_kernels, warm_up
from seawall.scheduler.scheduler import Scheduler, SchedulerLimits

if TYPE_CHECKING:
    from seawall.memory.footprint import Limits

# Ids asked for at every position cost workspace and result bytes; more have no known use.
MAX_TOKEN_IDS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """A core ready to be driven, and what its owner needs to know of it."""

    plan: EnginePlan
    core: EngineCore
    runner: Runner
    arena: Arena
    meter: Meter
    request_limits: RequestLimits
    random_seed: int
    reporter: Reporter
    results: ResultAccount
    texts: TextAccount
    control: Control
    grammars: GrammarStore | None
    config: EngineConfig = field(repr=False)

    @property
    def launches_return_early(self) -> bool:
        """Whether a step is still being computed when its launch returns."""
        return self.config.device != "cpu"

    def memory_report(self) -> dict[str, object]:
        """See the contract; called on the core thread."""
        return self.reporter.memory_report()

    def server_info(self) -> dict[str, object]:
        """Resolved arguments, limits and counters; called on the core thread."""
        counts = self.core.scheduler.counts
        return {
            **asdict(self.config.model),
            **asdict(self.config.memory),
            **asdict(self.config.schedule),
            "device": self.config.device,
            "dtype": self.plan.dtype,
            "context_length": self.plan.limits.context_length,
            "max_total_num_tokens": self.plan.max_total_tokens,
            "random_seed": self.random_seed,
            "logprobs_mode": self.config.logprobs_mode,
            "weight_version": self.control.weight_version,
            "released": self.control.released,
            "internal_states": [{**asdict(counts), "cache": self.reporter.cache_figures()}],
        }

    def close(self) -> None:
        """End helpers and give the device memory back; the core must have stopped."""
        if self.grammars is not None:
            self.grammars.shut_down()
        self.arena.close()


def assemble(config: EngineConfig, plan: EnginePlan) -> Assembly:
    """Build everything the plan says, run the worst case, and seal.

    Raises:
        ModelError: the weights cannot be used.
        BudgetError: the worst case took more than its account.
    """
    seed = secrets.randbits(31) if config.random_seed is None else config.random_seed
    counter = Tracker()
    meter: Meter = counter if config.memory.debug_memory else NullMeter()
    lines = plan.memory.lines
    keep_freed_memory(lines["activations"] + lines["logits"])
    runtime = make_runtime(config.device)
    runtime.limit(plan.memory.budget_bytes)
    ledger = Ledger(lines)
    with torch.inference_mode(), counter:
        arena = Arena(ledger, runtime.device, counter)
        model = _model(config, plan, arena, seed)
        seats = _seat_tables(plan, arena)
        attention = make_attention(plan, runtime, arena, seats)
        weights = Weights(model, plan, config.model, attention, seed)
        runner = Runner(
            model=model,
            attention=attention,
            scorer=Scorer(model.head, config.memory.logits_workspace, max_gaps=max_gaps(runtime)),
            sets=_step_buffers(config, plan, arena),
            transfers=step_transfers(plan, runtime, arena),
            seats=seats,
            meter=meter,
        )
        runtime.settle()
        # Whatever loading left behind is gone now; what the warm-up takes is what steps take.
        counter.reset_peaks()
        with _metered(runner, counter):
            if config.device != "cpu":
                warm_kernels(runner, _warmup_shape(plan))
                runtime.settle()
            warm_up(runner, _warmup_shape(plan))
        warm = dict(counter.readings())
        arena.seal()
        runtime.settle()
    if plan.memory.lines["graphs"]:
        runner.capture(graph_rows(config, plan.limits))
        runtime.settle()
    _check_peaks(plan, warm)
    counter.reset_peaks()
    leases = _leases(config, plan)
    host = Ledger(plan.host.lines)
    grammars = _grammars(config, plan)
    core = EngineCore(
        Scheduler(_scheduler_limits(config, plan), leases, host, grammars),
        runner,
        leases,
        overlap=not config.schedule.disable_overlap_schedule,
        check_pages=config.memory.debug_memory,
    )
    return Assembly(
        plan=plan,
        core=core,
        runner=runner,
        arena=arena,
        meter=meter,
        request_limits=_request_limits(plan),
        random_seed=seed,
        reporter=Reporter(
            plan=plan,
            device=ledger,
            host=host,
            meter=meter,
            warm=warm,
            core=core,
            runtime=runtime,
            grammars=grammars,
        ),
        results=ResultAccount(host),
        texts=TextAccount(host),
        control=Control(core, arena, weights, meter, runner),
        config=config,
        grammars=grammars,
    )


def _model(config: EngineConfig, plan: EnginePlan, arena: Arena, seed: int) -> CausalLM:
    return load_model(
        plan.folder,
        plan.spec,
        plan.dtype,
        arena,
        load_format=config.model.load_format,  # type: ignore[arg-type]  # checked by the table
        seed=seed,
    )


def _seat_tables(plan: EnginePlan, arena: Arena) -> SeatTables:
    return SeatTables(
        arena,
        plan.limits,
        windows=plan.spec.window is not None,
        mask_words=mask_words(plan.spec.vocab_size) if plan.memory.lines["masks"] else 0,
    )


def _grammars(config: EngineConfig, plan: EnginePlan) -> GrammarStore | None:
    if plan.no_grammars is not None:
        return None
    vocabulary = Vocabulary(
        tokenizer_file=plan.tokenizer_folder / "tokenizer.json",
        vocab_size=plan.spec.vocab_size,
        eos_token_ids=plan.eos_token_ids,
    )
    return make_grammars(vocabulary, config.grammar_backend, plan.host.lines["grammars"])


def _step_buffers(config: EngineConfig, plan: EnginePlan, arena: Arena) -> tuple[StepBuffers, ...]:
    dtype = torch_dtype(plan.dtype)
    if config.device != "cpu":
        # One stream orders the steps, and graphs read and write one place.
        return (StepBuffers(arena, plan.limits, plan.spec.hidden_size, dtype),) * NUM_STEP_SETS
    return tuple(
        StepBuffers(arena, plan.limits, plan.spec.hidden_size, dtype) for _ in range(NUM_STEP_SETS)
    )


@contextlib.contextmanager
def _metered(runner: Runner, counter: Meter) -> Iterator[None]:
    """The runner's scopes report to `counter`, whatever it runs with later."""
    usual, runner.meter = runner.meter, counter
    try:
        yield
    finally:
        runner.meter = usual


def _warmup_shape(plan: EnginePlan) -> WarmupShape:
    return WarmupShape(
        limits=plan.limits,
        num_pages=plan.memory.num_pages,
        num_window_pages=plan.memory.num_window_pages,
        vocab_size=plan.spec.vocab_size,
        max_top_k=plan.max_top_k,
        has_masks=plan.memory.lines["masks"] > 0,
    )


def _check_peaks(plan: EnginePlan, warm: dict[str, Reading]) -> None:
    for account, reading in warm.items():
        have = plan.memory.lines.get(account, 0)
        if reading.peak > have and account in plan.memory.lines:
            raise BudgetError(
                f"{account}: the worst-case step took {reading.peak} bytes, the plan has {have}; "
                "lower chunked_prefill_size or max_running_requests and report this",
                plan.table(),
            )


def _leases(config: EngineConfig, plan: EnginePlan) -> LeaseBook:
    ledger = PageLedger(plan.memory.num_pages, debug=config.memory.debug_memory)
    page_size = plan.limits.page_size
    companions = CompanionStore(
        plan.memory.num_pages,
        page_size,
        extra_bytes=extra_companion_bytes(config.memory.host_memory_budget),
    )
    order = EVICTION_ORDERS[config.schedule.radix_eviction_policy]
    radix = RadixCache(ledger, page_size, order)
    tree: RadixCache | SwaCache = radix
    windows: WindowPages | None = None
    if plan.memory.num_window_pages:
        assert plan.spec.window is not None
        windows = WindowPages(
            PageLedger(plan.memory.num_window_pages, debug=config.memory.debug_memory),
            num_full_pages=plan.memory.num_pages,
            page_size=page_size,
            window=plan.spec.window,
            order=order,
        )
        tree = SwaCache(radix, windows)
    cache = ChunkCache(tree) if config.schedule.disable_radix_cache else tree
    return LeaseBook(ledger, cache, page_size, companions, windows)


def _scheduler_limits(config: EngineConfig, plan: EnginePlan) -> SchedulerLimits:
    limits: Limits = plan.limits
    return SchedulerLimits(
        max_running=limits.max_running,
        prefill_tokens=limits.step_tokens - limits.max_running,
        page_size=limits.page_size,
        policy=config.schedule.schedule_policy,
        conservativeness=config.schedule.schedule_conservativeness,
        mixed=config.schedule.enable_mixed_chunk,
        keeps_prefixes=not config.schedule.disable_radix_cache,
        max_queued=config.schedule.max_queued_requests,
        eos_token_ids=frozenset(plan.eos_token_ids),
    )


def _request_limits(plan: EnginePlan) -> RequestLimits:
    return RequestLimits(
        vocab_size=plan.spec.vocab_size,
        context_length=plan.limits.context_length,
        max_total_tokens=plan.max_total_tokens,
        max_top_k=plan.max_top_k,
        max_token_ids=min(MAX_TOKEN_IDS, plan.max_top_k),
        eos_token_ids=plan.eos_token_ids,
        no_grammars=plan.no_grammars,
    )
