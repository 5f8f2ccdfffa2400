"""What planning does differently for CUDA: budget, seats, accounts, and the logits workspace.

Torch-free like the rest of planning: the card's memory is an argument.
"""

from seawall.core.config import EngineConfig
from seawall.core.errors import ConfigError
from seawall.core.units import round_down
from seawall.memory.footprint import Limits, detokenizer_bytes, dtype_bytes, requests_bytes
from seawall.memory.footprint_attention import attention_classes
from seawall.memory.footprint_cuda import (
    DEFAULT_GRAPH_ROWS,
    OUTSIDE_BYTES,
    attention_transfer_bytes,
    attention_workspace_bytes,
    cuda_activation_bytes,
    default_seats,
    graph_bytes,
    step_transfer_bytes,
)
from seawall.memory.footprint_logits_cuda import PassShape, smallest_cuda_workspace
from seawall.memory.footprint_model import weight_bytes
from seawall.memory.footprint_step import (
    NUM_STEP_SETS,
    mask_bytes,
    sampler_bytes,
    step_buffer_bytes,
)
from seawall.memory.spec import ModelSpec

_MIB = 1 << 20
_DEFAULT_FRACTION = 0.95
# Of the largest tile of the LM head's product, and the most numbers a block of a row leaves.
_BLOCK_IDS = 256
_BLOCK_ROWS = 128
_MOST_PARTIALS = 7


def cuda_budget(config: EngineConfig, device_memory: int | None) -> int:
    """The load line: what was given, else a share of the card.

    Raises:
        ConfigError: neither a budget nor the card's memory is known.
    """
    if config.memory.memory_budget is not None:
        return config.memory.memory_budget
    if device_memory is None:
        raise ConfigError(
            "memory_budget: the GPU's memory is not known here; give memory_budget, or the "
            "device's memory"
        )
    fraction = config.memory.mem_fraction_static or _DEFAULT_FRACTION
    return round_down(int(device_memory * fraction), 2 * _MIB)


def cuda_seats(config: EngineConfig, context_length: int) -> int:
    """Seats: what was given, else the default as far as the host's budget goes."""
    if config.schedule.seats_given:
        return config.schedule.max_running_requests
    worst = requests_bytes(1, context_length) + detokenizer_bytes(1, context_length)
    return default_seats(config.memory.host_memory_budget, worst)


def cuda_accounts(
    config: EngineConfig, spec: ModelSpec, dtype: str, limits: Limits, *, grammars: bool = False
) -> dict[str, int]:
    """Bytes of every device account except kv."""
    num_classes = len(attention_classes(spec))
    staging = step_transfer_bytes(limits)[0] + num_classes * attention_transfer_bytes(limits)
    return {
        "weights": weight_bytes(spec, dtype),
        # One stream orders the steps: one set is enough.
        "step_buffers": step_buffer_bytes(limits, spec.hidden_size, dtype) // NUM_STEP_SETS
        + staging,
        "activations": cuda_activation_bytes(spec, dtype, limits.step_tokens),
        "logits": config.memory.logits_workspace,
        "attention": attention_workspace_bytes(spec),
        "sampler": sampler_bytes(limits, windows=spec.window is not None),
        "masks": mask_bytes(limits, spec.vocab_size) if grammars else 0,
        "graphs": graph_bytes(spec, dtype, graph_rows(config, limits)),
        "communicators": 0,
        "outside": OUTSIDE_BYTES,
    }


def graph_rows(config: EngineConfig, limits: Limits) -> int:
    """Decode rows of the largest graph; 0 for no graphs."""
    if config.schedule.disable_cuda_graph:
        return 0
    asked = config.schedule.cuda_graph_max_bs or DEFAULT_GRAPH_ROWS
    return min(asked, limits.max_running)


def staging_bytes(spec: ModelSpec, limits: Limits) -> int:
    """Pinned host memory of all transfers."""
    attention = len(attention_classes(spec)) * attention_transfer_bytes(limits)
    return NUM_STEP_SETS * (sum(step_transfer_bytes(limits)) + attention)


def least_cuda_workspace(spec: ModelSpec, dtype: str, top_k: int = 0) -> int:
    """Fewest bytes in which one row can be scored and drawn, whatever is asked of it."""
    return smallest_cuda_workspace(
        PassShape(
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            itemsize=dtype_bytes(dtype),
            block_ids=_BLOCK_IDS,
            block_rows=_BLOCK_ROWS,
            stored=True,
            num_partials=_MOST_PARTIALS,
            top_k=top_k,
            rank=True,
        )
    )
