"""Footprints of what is different on CUDA: activations, attention, transfers, what is outside.

Nothing here allocates or imports torch; the parts on the device make their buffers from these same
functions. Weights, seat tables, KV pages and the logits are the same on every device.

Legend: T = step_tokens, R = max_running, H hidden, Q all query heads, K all key heads (also all
value heads), I width of the MLP, b bytes of an element.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from seawall.memory.footprint import dtype_bytes
from seawall.memory.footprint_attention import attention_classes
from seawall.memory.footprint_model import activation_bytes

if TYPE_CHECKING:
    from seawall.memory.footprint import Limits
    from seawall.memory.spec import ModelSpec

_MIB = 1 << 20
_FLOAT32 = 4
# Programs that fill the largest device a few times over; fewer decode tiles are cut into shares.
SPLIT_TILES = 528
# Context, modules, library handles and workspaces, and what the allocator rounds up to: seen with
# driver 580 on one H200 and rounded up; the report says what it is.
OUTSIDE_BYTES = 1536 * _MIB
# A captured layer is about a dozen kernels and their arguments.
_NODE_BYTES_PER_LAYER = 128 << 10
# Rows of the largest graph when none is asked for.
DEFAULT_GRAPH_ROWS = 512
# Seats when none are asked for, and what their worst case may take of the host budget.
DEFAULT_SEATS = 4096
_HOST_SHARE = 2


def partial_elements(num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Float32 numbers of shares of attention: results, and log-sum-exps.

    Shares times decode rows times kv heads are at most SPLIT_TILES.
    """
    rows = max(1, SPLIT_TILES // num_kv_heads) * num_heads
    return rows * head_dim, rows


def attention_workspace_bytes(spec: ModelSpec) -> int:
    """Bytes of the arena account "attention": exactly what the Triton backends make."""
    partials = sum(partial_elements(spec.num_heads, spec.num_kv_heads, spec.head_dim))
    return _FLOAT32 * partials * len(attention_classes(spec))


def attention_transfer_bytes(limits: Limits) -> int:
    """Bytes that attention sends up for the largest step, once for each class of layers.

    Slots, two numbers a tile (at most one tile a token), four a row, two a decode row.
    """
    return 4 * limits.step_tokens + 8 * limits.step_tokens + 32 * limits.max_running + _MIB // 16


def step_transfer_bytes(limits: Limits) -> tuple[int, int]:
    """Bytes that the runner sends up and takes down for the largest step with 20 best ids.

    Up: ids, positions, scored rows, targets, temperatures; seats and their parameters; page table
    entries. Down: drawn ids and logprobs, scores.
    """
    up = 48 * limits.step_tokens + 160 * limits.max_running + _MIB
    down = (4 + 12 * 20) * limits.step_tokens + 64 * limits.max_running + _MIB // 4
    return up, down


def cuda_activation_bytes(spec: ModelSpec, dtype: str, step_tokens: int) -> int:
    """The most bytes that a forward pass over `step_tokens` rows holds at one moment.

    Residual, rotation, and the larger of: norm and projection, projection and attended rows, norm
    and both halves of the MLP. Kernels make nothing inside; the allocator rounds each to 2 MiB.
    """
    if not spec.native:
        return activation_bytes(spec, dtype, step_tokens)
    if spec.decoder == "gemma":
        # Its norms are plain operators there too, with what they make on the way.
        return activation_bytes(spec, dtype, step_tokens) + 8 * 2 * _MIB
    b = dtype_bytes(dtype)
    hidden, query, kv = spec.hidden_size, spec.query_size, spec.kv_size
    rotary = 0 if spec.rope is None else spec.rope.rotary_dim
    fused = query + 2 * kv
    stage = max(hidden + fused, fused + query, hidden + 2 * spec.intermediate_size)
    # Making the rotation: angles and their cosines in float32, beside the residual.
    making = 2 * rotary * b + 3 * rotary // 2 * _FLOAT32
    token = hidden * b + max(2 * rotary * b + stage * b, making)
    return token * step_tokens + 8 * 2 * _MIB


def graph_buckets(most_rows: int) -> list[int]:
    """Numbers of decode rows with a graph: further apart the larger they are; ends at the most."""
    sizes = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 32), *range(256, most_rows, 64))
    return [*(size for size in sizes if size < most_rows), most_rows]


def graph_bytes(spec: ModelSpec, dtype: str, most_rows: int) -> int:
    """Graphs of decode steps: temporaries of the largest, and the nodes of each."""
    if most_rows == 0:
        return 0
    nodes = spec.num_layers * _NODE_BYTES_PER_LAYER + _MIB
    temporaries = cuda_activation_bytes(spec, dtype, most_rows)
    return temporaries + len(graph_buckets(most_rows)) * nodes


def default_seats(host_budget: int, request_bytes: int) -> int:
    """Seats that CUDA serves when none are asked for: 4,096, or what half the host budget holds.

    `request_bytes` is what one running request of the longest length takes of it.
    """
    return max(1, min(DEFAULT_SEATS, host_budget // _HOST_SHARE // request_bytes))
