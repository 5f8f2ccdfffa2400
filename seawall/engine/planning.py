"""From arguments to a memory plan, reading nothing but the model's config.json.

Torch-free: `seawall plan` runs this on any laptop and prints what `Engine` would do.

    arguments + config.json -> spec, limits -> footprints -> pages -> MemoryPlan
"""

import importlib
import json
from dataclasses import dataclass
from pathlib import Path

from seawall.core.config import EngineConfig
from seawall.core.errors import ConfigError
from seawall.engine.grammars import why_no_grammars
from seawall.engine.planning_cuda import (
    cuda_accounts,
    cuda_budget,
    cuda_seats,
    least_cuda_workspace,
    staging_bytes,
)
from seawall.memory.footprint import (
    Limits,
    companion_bytes,
    detokenizer_bytes,
    page_ledger_bytes,
    radix_bytes,
    request_bytes,
    requests_bytes,
    results_bytes,
    window_pages_per_seq,
)
from seawall.memory.footprint_attention import (
    attention_activation_bytes,
    attention_workspace_bytes,
    kv_page_bytes,
)
from seawall.memory.footprint_logits import min_workspace_bytes
from seawall.memory.footprint_model import activation_bytes, weight_bytes
from seawall.memory.footprint_step import (
    logits_split,
    mask_bytes,
    max_top_k,
    sampler_bytes,
    step_buffer_bytes,
)
from seawall.memory.host import available_host_bytes, default_cpu_budget
from seawall.memory.page_split import WindowClass
from seawall.memory.plan import HostPlan, MemoryPlan, solve, solve_host
from seawall.memory.spec import ModelSpec, apply_overrides

DEMO_FOLDER = Path(__file__).parent.parent / "demo_model"
_QUARTER = 4
MOST_GRAMMAR_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """Everything that is settled before the first byte is allocated.

    Attributes:
        folder: of the model; tokenizer_folder may be another.
        memory: device accounts and the number of pages.
        host: host accounts.
        max_top_k: most best tokens one position may be asked for.
        eos_token_ids: from generation_config.json and config.json.
        no_grammars: why requests with a grammar are refused; None if they are served.
    """

    folder: Path
    tokenizer_folder: Path
    spec: ModelSpec
    dtype: str
    kv_dtype: str
    limits: Limits
    memory: MemoryPlan
    host: HostPlan
    max_top_k: int
    eos_token_ids: tuple[int, ...]
    no_grammars: str | None

    @property
    def max_total_tokens(self) -> int:
        """Tokens the KV pool holds."""
        return self.memory.num_pages * self.memory.page_size

    def table(self) -> str:
        """Both plans as text."""
        return f"{self.memory.table()}\n{self.host.table()}"


def make_plan(
    config: EngineConfig, *, device_memory: int | None = None, load_weights: bool = True
) -> EnginePlan:
    """Plan all memory.

    Args:
        config: the engine's arguments.
        load_weights: whether weights will be read; else a model id needs its config only.
        device_memory: bytes of the device planned for; None asks this host.

    Raises:
        ConfigError: no model there, or arguments that don't fit the model.
        BudgetError: the accounts don't fit the budget; carries the table.
    """
    with_weights = load_weights and config.model.load_format != "dummy"
    folder = model_folder(config.model.model_path, with_weights=with_weights)
    raw = apply_overrides(read_json(folder / "config.json"), config.model.json_model_override_args)
    spec = ModelSpec.from_config(raw, context_length=config.model.context_length)
    budget = _budget(config, device_memory)
    dtype = _dtype(config, spec, budget)
    kv_dtype = config.memory.kv_cache_dtype
    kv_dtype = {"auto": dtype, "bf16": "bfloat16"}.get(kv_dtype, kv_dtype)
    limits = _limits(config, spec)
    tokenizer_folder = (
        folder
        if config.model.tokenizer_path is None
        else model_folder(config.model.tokenizer_path, with_weights=False)
    )
    eos_ids = _eos_ids(folder, raw)
    no_grammars = why_no_grammars(config.grammar_backend, tokenizer_folder, eos_ids)
    memory = solve(
        budget,
        device_accounts(config, spec, dtype, limits, kv_dtype, grammars=no_grammars is None),
        page_bytes=_page_bytes(spec, limits, kv_dtype, num_layers=spec.num_full_layers),
        limits=limits,
        max_total_tokens=config.memory.max_total_tokens,
        window=_window_class(spec, limits, kv_dtype),
    )
    _check_logits(config, spec, dtype)
    return EnginePlan(
        folder=folder,
        tokenizer_folder=tokenizer_folder,
        spec=spec,
        dtype=dtype,
        kv_dtype=kv_dtype,
        limits=limits,
        memory=memory,
        host=solve_host(
            config.memory.host_memory_budget,
            host_accounts(
                limits,
                memory.num_pages,
                config.memory.host_memory_budget,
                num_window_pages=memory.num_window_pages,
                staging=staging_bytes(spec, limits) if config.device == "cuda" else 0,
                grammars=no_grammars is None,
            ),
            request_bytes=request_bytes(limits.context_length),
            max_queued=config.schedule.max_queued_requests,
        ),
        max_top_k=_max_top_k(config, spec, dtype),
        eos_token_ids=eos_ids,
        no_grammars=no_grammars,
    )


def device_accounts(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: str,
    limits: Limits,
    kv_dtype: str,
    *,
    grammars: bool = False,
) -> dict[str, int]:
    """Bytes of every device account except kv. On the CPU nothing is captured or shared."""
    if config.device == "cuda":
        return cuda_accounts(config, spec, dtype, limits, grammars=grammars)
    return {
        "weights": weight_bytes(spec, dtype),
        "step_buffers": step_buffer_bytes(limits, spec.hidden_size, dtype),
        "activations": activation_bytes(spec, dtype, limits.step_tokens)
        + attention_activation_bytes(spec, dtype, limits, kv_dtype),
        "logits": config.memory.logits_workspace,
        "attention": attention_workspace_bytes(spec, dtype, limits, kv_dtype),
        "sampler": sampler_bytes(limits, windows=spec.window is not None),
        "masks": mask_bytes(limits, spec.vocab_size) if grammars else 0,
        "graphs": 0,
        "communicators": 0,
        "outside": 0,
    }


def host_accounts(
    limits: Limits,
    num_pages: int,
    budget: int,
    *,
    num_window_pages: int = 0,
    staging: int = 0,
    grammars: bool = False,
) -> dict[str, int]:
    """Bytes of every host account except the queue, all items at their largest size.

    Results, of which there may be any number, get half of what the other accounts and one waiting
    request leave.
    """
    accounts = {
        "running": requests_bytes(limits.max_running, limits.context_length),
        "results": results_bytes(limits, top_k=0, num_token_ids=0),
        "detokenizers": detokenizer_bytes(limits.max_running, limits.context_length),
        "pages": page_ledger_bytes(num_pages, num_window_pages),
        "radix": radix_bytes(num_pages, limits.page_size),
        "companions": companion_bytes(num_pages, limits.page_size) + extra_companion_bytes(budget),
    }
    if staging:
        accounts["staging"] = staging
    if grammars:
        accounts["grammars"] = min(budget // 16, MOST_GRAMMAR_BYTES)
    left = budget - sum(accounts.values()) - request_bytes(limits.context_length)
    accounts["results"] += max(left, 0) // 2
    return accounts


def extra_companion_bytes(host_budget: int) -> int:
    """Most bytes of cached logprobs beyond a record a slot: a 32nd of the host budget."""
    return host_budget // 32


def model_folder(path: str, *, with_weights: bool = True) -> Path:
    """The folder of a model: the embedded one, a path, or a Hugging Face id.

    Raises:
        ConfigError: there is none.
    """
    if path == "demo":
        return DEMO_FOLDER
    folder = Path(path).expanduser()
    if not folder.is_dir():
        download = vars(importlib.import_module("seawall.engine.hub"))["download"]
        folder = download(path, with_weights=with_weights)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model_path: {path!r} has no config.json; give a Hugging Face model folder or 'demo'"
        )
    return folder


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file of the model.

    Raises:
        ConfigError: unreadable, malformed, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path.name} in {path.parent}: {error}; check the file") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path.name} in {path.parent}: not a JSON object; check the file")
    return value


def _budget(config: EngineConfig, device_memory: int | None) -> int:
    if config.device == "cuda":
        return cuda_budget(config, device_memory)
    if config.memory.memory_budget is not None:
        return config.memory.memory_budget
    if config.memory.mem_fraction_static is not None:
        total = available_host_bytes() if device_memory is None else device_memory
        return int(total * config.memory.mem_fraction_static)
    return default_cpu_budget(device_memory)


def _dtype(config: EngineConfig, spec: ModelSpec, budget: int) -> str:
    if config.model.dtype != "auto":
        return config.model.dtype
    if config.device == "cuda":
        return spec.dtype
    return "float32" if weight_bytes(spec, "float32") * _QUARTER <= budget else spec.dtype


def _limits(config: EngineConfig, spec: ModelSpec) -> Limits:
    context = spec.context_length
    prefill = config.schedule.prefill_tokens(context)
    seats = config.schedule.max_running_requests
    if config.device == "cuda":
        seats = cuda_seats(config, context)
    return Limits(
        max_running=seats,
        step_tokens=prefill + seats,
        context_length=context,
        page_size=config.memory.page_size,
    )


def _page_bytes(spec: ModelSpec, limits: Limits, kv_dtype: str, *, num_layers: int) -> int:
    return kv_page_bytes(
        num_layers=num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_size=limits.page_size,
        dtype=kv_dtype,
    )


def _window_class(spec: ModelSpec, limits: Limits, kv_dtype: str) -> WindowClass | None:
    """The pages of the layers with a window; None if there are none."""
    if spec.window is None:
        return None
    chunk = limits.step_tokens - limits.max_running
    return WindowClass(
        page_bytes=_page_bytes(spec, limits, kv_dtype, num_layers=spec.num_window_layers),
        tokens=spec.window,
        pages_per_seq=window_pages_per_seq(limits, spec.window, chunk),
    )


def _check_logits(config: EngineConfig, spec: ModelSpec, dtype: str) -> None:
    workspace, _ = logits_split(config.memory.logits_workspace)
    least = _least_workspace(config, spec, dtype, 0)
    if workspace < least:
        needed = least * config.memory.logits_workspace // workspace + 8 if workspace else least * 2
        raise ConfigError(
            f"logits_workspace: got {config.memory.logits_workspace} bytes, a vocabulary of "
            f"{spec.vocab_size} needs {needed}; raise it"
        )


def _least_workspace(config: EngineConfig, spec: ModelSpec, dtype: str, top_k: int) -> int:
    if config.device == "cuda":
        return least_cuda_workspace(spec, dtype, top_k)
    return min_workspace_bytes(spec.vocab_size, spec.hidden_size, dtype, top_k=top_k)


def _max_top_k(config: EngineConfig, spec: ModelSpec, dtype: str) -> int:
    """Largest k that both the workspace and the rows' share can hold for one row."""
    workspace, _ = logits_split(config.memory.logits_workspace)
    k = min(spec.vocab_size, max_top_k(config.memory.logits_workspace, spec.hidden_size, 4))
    low, high = 0, k
    while low < high:
        middle = (low + high + 1) // 2
        need = _least_workspace(config, spec, dtype, middle)
        low, high = (middle, high) if need <= workspace else (low, middle - 1)
    return low


def _eos_ids(folder: Path, config: dict[str, object]) -> tuple[int, ...]:
    """End-of-sequence ids: generation_config.json's list, else config.json's."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    found: set[int] = set()
    for source in (generation, config):
        value = source.get("eos_token_id")
        items = value if isinstance(value, list) else [value]
        found |= {item for item in items if isinstance(item, int)}
    return tuple(sorted(found))
