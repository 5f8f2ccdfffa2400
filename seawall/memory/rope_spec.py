"""Rotary positions as plain numbers, read from either form that config.json may have.

    {"rope_theta": ..., "rope_scaling": {"type": ..., "factor": ...}}     before transformers 5
    {"rope_parameters": {"rope_type": ..., "rope_theta": ..., ...}}       since

Owns RopeSpec. The frequencies themselves are computed in layers/rope.py. Is torch-free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from seawall.core.errors import ConfigError
from seawall.memory.config_values import number, optional_size, size

if TYPE_CHECKING:
    from collections.abc import Mapping

# The base of layers that see everything, in models whose layers have two.
_GLOBAL_THETA = 1_000_000.0

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary positions: which frequencies, and the factor on cos and sin.

    `original_context` is the length the model was trained on before scaling. `attention_factor`
    multiplies cos and sin (yarn, longrope). `factors` is the per-frequency divisor of longrope,
    already chosen for the context.
    """

    kind: str
    theta: float
    rotary_dim: int
    original_context: int
    factor: float = 1.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    factors: tuple[float, ...] = ()


def read_rope(config: Mapping[str, Any], head_dim: int, context_length: int | None) -> RopeSpec:
    """The rotary positions of a model that serves `context_length` tokens; None is its limit.

    Raises:
        ConfigError: an unknown kind, or numbers that are missing or impossible for the kind.
    """
    values = _values(config)
    kind = values.get("rope_type") or values.get("type") or "default"
    kind = "longrope" if kind == "su" else kind
    if kind not in ROPE_KINDS:
        raise ConfigError(f"rope type {kind!r} is not one of {', '.join(ROPE_KINDS)}")
    longest = size(config, "max_position_embeddings")
    rope = RopeSpec(
        kind=kind,
        theta=number(values, "rope_theta", 10_000.0),
        rotary_dim=_rotary_dim(values, head_dim, kind),
        original_context=longest,
    )
    if kind == "default":
        return rope
    if kind in ("linear", "dynamic"):
        return replace(rope, factor=_scaling_factor(values, kind))
    original = optional_size(config, "original_max_position_embeddings")
    original = original or optional_size(values, "original_max_position_embeddings") or longest
    values.setdefault("factor", max(longest / original, 1.0))
    rope = replace(rope, original_context=original, factor=_scaling_factor(values, kind))
    if kind == "llama3":
        return replace(
            rope,
            low_freq_factor=number(values, "low_freq_factor", 1.0),
            high_freq_factor=number(values, "high_freq_factor", 4.0),
        )
    if kind == "yarn":
        return _yarn(values, rope)
    return _longrope(values, rope, (context_length or longest) > original)


def read_layer_ropes(
    config: Mapping[str, Any], head_dim: int, context_length: int | None, local_theta: float
) -> tuple[RopeSpec, RopeSpec]:
    """The ropes of layers that see everything, and of those with a window.

        {"rope_parameters": {"full_attention": {...}, "sliding_attention": {...}}}
        {"rope_theta": ..., "rope_scaling": ..., "rope_local_base_freq": ...}       older

    Scaling that is not given by layer is that of the layers that see everything.

    Raises:
        ConfigError: as read_rope, or parameters that are of neither form.
    """
    given = config.get("rope_parameters") or {}
    if not isinstance(given, dict) or set(given) - {"full_attention", "sliding_attention"}:
        raise ConfigError(
            f"rotary parameters {given!r} are not an object by layer type; give one with "
            "full_attention and sliding_attention"
        )
    full = {
        "rope_theta": number(config, "rope_theta", _GLOBAL_THETA),
        **(given.get("full_attention") or {}),
        **(config.get("rope_scaling") or {}),
    }
    local = {
        "rope_theta": number(config, "rope_local_base_freq", local_theta),
        **(given.get("sliding_attention") or {}),
    }
    flat = {**config, "rope_scaling": None, "rope_theta": None}
    return (
        read_rope({**flat, "rope_parameters": full}, head_dim, context_length),
        read_rope({**flat, "rope_parameters": local}, head_dim, context_length),
    )


def longest_context(config: Mapping[str, Any], rope: RopeSpec) -> int:
    """The model's own limit, stretched where rope scaling stretches it unsaid."""
    longest = size(config, "max_position_embeddings")
    if rope.kind in ("linear", "dynamic"):
        return int(longest * rope.factor)
    if rope.kind == "yarn":
        return max(longest, int(rope.original_context * rope.factor))
    return longest


def _values(config: Mapping[str, Any]) -> dict[str, Any]:
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ConfigError(
            f"rotary parameters {given!r} are not one flat object; rotary by layer is not built yet"
        )
    values = {name: config.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    values.update((name, value) for name, value in given.items() if value is not None)
    return values


def _yarn(values: Mapping[str, Any], rope: RopeSpec) -> RopeSpec:
    return replace(
        rope,
        attention_factor=_yarn_attention_factor(values, rope.factor),
        beta_fast=number(values, "beta_fast", 32.0) or 32.0,
        beta_slow=number(values, "beta_slow", 1.0) or 1.0,
        truncate=bool(values.get("truncate", True)),
    )


def _longrope(values: Mapping[str, Any], rope: RopeSpec, is_long: bool) -> RopeSpec:
    growth = math.log(rope.factor) / math.log(rope.original_context)
    return replace(
        rope,
        attention_factor=number(values, "attention_factor", math.sqrt(1 + growth)),
        factors=_longrope_factors(values, rope.rotary_dim, is_long),
    )


def _rotary_dim(values: Mapping[str, Any], head_dim: int, kind: str) -> int:
    rotary_dim = int(head_dim * number(values, "partial_rotary_factor", 1.0))
    least = 4 if kind == "dynamic" else 2
    if rotary_dim % 2 or not least <= rotary_dim <= head_dim:
        raise ConfigError(
            f"rotary width {rotary_dim} (head_dim {head_dim} x partial_rotary_factor) "
            f"is not an even number in {least}..{head_dim}"
        )
    return rotary_dim


def _yarn_attention_factor(values: Mapping[str, Any], factor: float) -> float:
    if values.get("attention_factor") is not None:
        return number(values, "attention_factor", 1.0)
    above = number(values, "mscale", 0.0)
    below = number(values, "mscale_all_dim", 0.0)
    if above and below:
        return _mscale(factor, above) / _mscale(factor, below)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope_factors(
    values: Mapping[str, Any], rotary_dim: int, is_long: bool
) -> tuple[float, ...]:
    """One set for every position, chosen by the context served.

    A choice by sequence length would change the rotation of keys that are already in pages shared
    by others.
    """
    name = "long_factor" if is_long else "short_factor"
    factors = values.get(name)
    if not isinstance(factors, list) or len(factors) != rotary_dim // 2:
        raise ConfigError(
            f"longrope needs {name} as a list of {rotary_dim // 2} numbers, got {factors!r}"
        )
    return tuple(number({name: factor}, name, 1.0) for factor in factors)


def _scaling_factor(values: Mapping[str, Any], kind: str) -> float:
    factor = number(values, "factor", 0.0)
    if factor < 1:
        raise ConfigError(
            f"rope type {kind} needs a factor of at least 1, got {values.get('factor')!r}"
        )
    return factor
