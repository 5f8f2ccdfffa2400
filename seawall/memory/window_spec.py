"""Which layers of a model see a window of the newest positions only, read from config.json.

    window W: the query at position p sees [max(0, p - W + 1), p]        None: it sees [0, p]

Owns the rules of the native families. A window that the context never outgrows is no window here,
so that such a model keeps one class of pages. Is torch-free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from seawall.core.errors import ConfigError
from seawall.memory.config_values import optional_size

if TYPE_CHECKING:
    from collections.abc import Mapping

# none: the family knows no windows; all: every layer has one; late: layers from max_window_layers
# on, if use_sliding_window is set; local: all but every n-th layer.
WindowRule = Literal["none", "all", "late", "local"]

WINDOWED, FULL = "sliding_attention", "full_attention"
_LATE_DEFAULT = 28


def read_windows(
    config: Mapping[str, Any],
    rule: WindowRule,
    *,
    num_layers: int,
    context_length: int,
    default: int | None,
    period: int,
) -> tuple[int | None, ...]:
    """The window of each layer; empty if no layer has one that the context outgrows.

    Args:
        config: the parsed config.json.
        rule: which layers, where the configuration lists no layer_types.
        num_layers: layers of the model.
        context_length: the longest sequence served.
        default: the window where the configuration is silent; null there means none.
        period: of the rule "local": each period's last layer sees everything.

    Raises:
        ConfigError: the window is not one positive number for all layers that have one, or
            layer_types does not name every layer.
    """
    if config.get("sliding_window", default) is None or _switched_off(config, rule):
        return ()
    window = optional_size(config, "sliding_window") or default
    assert window is not None
    layers = local_layers(config, rule, num_layers=num_layers, period=period)
    if context_length <= window or not any(layers):
        return ()
    if rule == "none":
        raise ConfigError(
            f"sliding_window {window} is shorter than the context of {context_length} tokens, and "
            "this architecture has no windows; set sliding_window to null with "
            "json_model_override_args if the checkpoint was trained without one"
        )
    return tuple(window if windowed else None for windowed in layers)


def local_layers(
    config: Mapping[str, Any], rule: WindowRule, *, num_layers: int, period: int
) -> tuple[bool, ...]:
    """Which layers are of the kind that has a window, if the model has one.

    Raises:
        ConfigError: layer_types does not name every layer.
    """
    layer_types = config.get("layer_types")
    if layer_types is not None:
        if len(layer_types) != num_layers:
            raise ConfigError(
                f"layer_types names {len(layer_types)} layers, num_hidden_layers is {num_layers}; "
                "make them agree"
            )
        return tuple(layer_type == WINDOWED for layer_type in layer_types)
    if rule == "late":
        first = config.get("max_window_layers", _LATE_DEFAULT)
        return tuple(layer >= first for layer in range(num_layers))
    if rule == "local":
        # Older configurations say it by a number, under either name.
        period = (
            optional_size(config, "sliding_window_pattern")
            or optional_size(config, "_sliding_window_pattern")
            or period
        )
        return tuple((layer + 1) % period != 0 for layer in range(num_layers))
    return (True,) * num_layers


def refuse_short_window(config: Mapping[str, Any], architecture: str, context_length: int) -> None:
    """Refuses a model that transformers would build with a window shorter than the context.

    Raises:
        ConfigError: it has one.
    """
    window = config.get("sliding_window")
    switched_off = config.get("use_sliding_window", not architecture.startswith("Qwen")) is False
    layer_types = config.get("layer_types")
    if layer_types is not None and WINDOWED not in layer_types:
        switched_off = True
    if window is None or switched_off or context_length <= window:
        return
    raise ConfigError(
        f"sliding_window {window} is shorter than the context of {context_length} tokens "
        f"and windows are built for native architectures only, {architecture} is not one; "
        f"set context_length to at most {window}"
    )


def _switched_off(config: Mapping[str, Any], rule: WindowRule) -> bool:
    return config.get("use_sliding_window", rule != "late") is False
