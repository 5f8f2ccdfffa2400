"""Which device an engine runs on, and what is different there: its runtime and its attention.

Owns no state. CUDA's parts are imported when they are asked for: only they need triton.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from seawall.attention.base import AttentionBackend, ScoreRules
from seawall.attention.hybrid import HybridAttention
from seawall.attention.torch_sdpa import TorchAttention
from seawall.core.errors import ConfigError
from seawall.device.arena import Arena
from seawall.device.cpu import CpuRuntime
from seawall.device.cuda import CudaRuntime, num_gpus, total_bytes
from seawall.device.dtypes import torch_dtype
from seawall.device.runtime import Runtime, Transfer, TransferSizes
from seawall.engine.planning import EnginePlan
from seawall.kv.pool import KVPool
from seawall.memory.footprint_cuda import attention_transfer_bytes, step_transfer_bytes
from seawall.memory.footprint_step import NUM_STEP_SETS
from seawall.memory.kv_scales import LayerScales
from seawall.runner.buffers import PageTable, SeatTables

# Rows that nobody asked for, scored along with their neighbours: dearer to copy than to compute.
_MAX_GAPS = 0.5


class EngineAttention(AttentionBackend, Protocol):
    """A backend whose pool can be told new scales."""

    def set_scales(self, scales: Sequence[LayerScales]) -> None:
        """What keys and values are divided by, layer by layer, from here on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChoice:
    """A kind of device and its memory; None asks the host."""

    name: str
    memory_bytes: int | None


def choose_device(args: Mapping[str, object]) -> DeviceChoice:
    """The device that engine arguments ask for: a GPU if there is one, unless they say.

    Raises:
        ConfigError: a GPU is asked for and there is none.
    """
    asked = args.get("device", "auto")
    found = num_gpus()
    if asked == "cuda" and not found:
        raise ConfigError("device: 'cuda' asked, no GPU found; use device='cpu' or 'auto'")
    if found and asked in ("auto", "cuda"):
        return DeviceChoice(name="cuda", memory_bytes=total_bytes())
    return DeviceChoice(name="cpu", memory_bytes=None)


def make_runtime(name: str) -> Runtime:
    """The runtime of a device, current for the calling thread."""
    runtime: Runtime = CudaRuntime() if name == "cuda" else CpuRuntime()
    runtime.attach()
    return runtime


def step_transfers(plan: EnginePlan, runtime: Runtime, arena: Arena) -> tuple[Transfer, ...]:
    """The runner's transfers, one a set of step buffers."""
    up, down = step_transfer_bytes(plan.limits)
    sizes = TransferSizes(up_bytes=up, down_bytes=down)
    return runtime.transfers(arena, sizes, NUM_STEP_SETS)


def max_gaps(runtime: Runtime) -> float:
    """See Scorer."""
    return 0.0 if runtime.device.type == "cpu" else _MAX_GAPS


def make_attention(
    plan: EnginePlan, runtime: Runtime, arena: Arena, seats: SeatTables
) -> EngineAttention:
    """The KV pools, one a class of layers, and the backend that writes them."""
    spec, memory = plan.spec, plan.memory
    if seats.window_page_table is None:
        pool = _pool(plan, arena, num_layers=spec.num_layers, num_pages=memory.num_pages)
        rules = ScoreRules(softcap=spec.attention_softcap)
        return _backend(plan, runtime, arena, pool, seats.page_table, rules)
    full = None
    if spec.num_full_layers:
        pool = _pool(plan, arena, num_layers=spec.num_full_layers, num_pages=memory.num_pages)
        rules = ScoreRules(softcap=spec.attention_softcap)
        full = _backend(plan, runtime, arena, pool, seats.page_table, rules)
    pool = _pool(plan, arena, num_layers=spec.num_window_layers, num_pages=memory.num_window_pages)
    rules = ScoreRules(window=spec.window, softcap=spec.attention_softcap)
    window = _backend(plan, runtime, arena, pool, seats.window_page_table, rules)
    return HybridAttention(spec.windows, full=full, window=window)


def _pool(plan: EnginePlan, arena: Arena, *, num_layers: int, num_pages: int) -> KVPool:
    return KVPool(
        arena,
        num_layers=num_layers,
        num_pages=num_pages,
        page_size=plan.limits.page_size,
        num_kv_heads=plan.spec.num_kv_heads,
        head_dim=plan.spec.head_dim,
        dtype=torch_dtype(plan.kv_dtype),
    )


def _backend(
    plan: EnginePlan,
    runtime: Runtime,
    arena: Arena,
    pool: KVPool,
    table: PageTable,
    rules: ScoreRules,
) -> EngineAttention:
    spec, limits, dtype = plan.spec, plan.limits, torch_dtype(plan.dtype)
    if runtime.device.type == "cpu":
        return TorchAttention(
            pool,
            arena,
            num_heads=spec.num_heads,
            scale=spec.softmax_scale,
            limits=limits,
            dtype=dtype,
            rules=rules,
        )
    triton = vars(importlib.import_module("seawall.attention.triton"))
    sizes = TransferSizes(up_bytes=attention_transfer_bytes(limits), down_bytes=0)
    inputs = triton["Inputs"](
        page_table=table.table, transfers=runtime.transfers(arena, sizes, NUM_STEP_SETS)
    )
    backend: EngineAttention = triton["TritonAttention"](
        pool,
        arena,
        inputs=inputs,
        num_heads=spec.num_heads,
        scale=spec.softmax_scale,
        dtype=dtype,
        rules=rules,
    )
    return backend
