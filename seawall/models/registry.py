"""Which loader builds which architecture, and the one call that loads a model.

Loaders are named by "module:object" and imported when asked for, so that a native model never
imports transformers.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, cast

from seawall.core.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

    from seawall.device.arena import Arena
    from seawall.memory.spec import ModelSpec
    from seawall.models.base import CausalLM

LoadFormat = Literal["auto", "safetensors", "dummy"]

NATIVE = "seawall.models.native:load"
TRANSFORMERS = "seawall.models.hf:load"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """What a loader is asked for. `folder` is None only for random weights."""

    folder: Path | None
    spec: ModelSpec
    dtype: str
    random_weights: bool
    seed: int


class Loader(Protocol):
    """Builds a model in the arena's "weights" account."""

    def __call__(self, request: LoadRequest, arena: Arena) -> CausalLM:
        """The model, filled."""
        ...


def load_model(
    folder: Path | None,
    spec: ModelSpec,
    dtype: str,
    arena: Arena,
    *,
    load_format: LoadFormat = "auto",
    seed: int = 0,
) -> CausalLM:
    """Builds the model that `spec` describes and fills its weights.

    Args:
        folder: the model folder; may be None when load_format is "dummy".
        spec: from ModelSpec.from_config.
        dtype: "float32", "bfloat16" or "float16"; weights are converted as they are read.
        arena: every long-lived tensor is charged to its "weights" account.
        load_format: "auto" and "safetensors" read the folder, "dummy" draws random weights.
        seed: of the random weights.

    Raises:
        ModelError: the weights cannot be used; the message names the tensor and the file.
    """
    random_weights = load_format == "dummy"
    if folder is None and not random_weights:
        raise ModelError(f"load_format {load_format} needs a model folder; give one or use 'dummy'")
    request = LoadRequest(
        folder=folder, spec=spec, dtype=dtype, random_weights=random_weights, seed=seed
    )
    return _loader(NATIVE if spec.native else TRANSFORMERS)(request, arena)


def _loader(target: str) -> Loader:
    module_name, object_name = target.split(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ModelError(
            "this architecture is not native and needs transformers, which is not installed; "
            "pip install 'seawall[hf]'"
        ) from error
    return cast("Loader", vars(module)[object_name])
