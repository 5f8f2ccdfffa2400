"""The weights of a running engine: where they came from, which version they are, how they change.

Owns the version and the knowledge of what has content; the tensors are the arena's. New weights are
copied into the tensors that are there, in pieces of at most 32 MiB, after every name, shape and
dtype was found right: an update is done as a whole or not begun.

    whole, from a folder or random   `reload` can fill them again after their memory was released
    some from tensors                `reload` can't: they have no content until new ones came

Used on the core thread, while no request runs.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch

from seawall.core.config import ModelConfig
from seawall.core.errors import ConfigError, ModelError, RequestError
from seawall.engine.planning import EnginePlan, read_json
from seawall.memory.kv_scales import LayerScales
from seawall.memory.spec import ModelSpec, apply_overrides
from seawall.models.base import CausalLM
from seawall.models.kv_scales import kv_scales
from seawall.models.weights import (
    Extras,
    check_folder,
    check_tensors,
    copy_folder,
    copy_pieces,
    fill_random,
    read_tensors,
)

NamedTensors = Sequence[tuple[str, torch.Tensor]]
Views = Mapping[str, torch.Tensor]
# What config.json may say differently without being another model.
_FREE_FIELDS = {"config_json", "dtype"}
_FREE_KEYS = {"_name_or_path", "torch_dtype", "dtype", "transformers_version", "use_cache"}


class Scaled(Protocol):
    """A KV pool's user that can be told new scales."""

    def set_scales(self, scales: Sequence[LayerScales]) -> None:
        """Use these from here on."""


class _Source(Protocol):
    """What can fill all weights again."""

    def check(self, views: Views, extras: Extras) -> None:
        """Raises a ModelError if they can't be filled."""

    def fill(self, views: Views) -> None:
        """Fills them; `check` has found nothing."""


@dataclass(frozen=True, slots=True)
class _Folder:
    path: Path

    def check(self, views: Views, extras: Extras) -> None:
        check_folder(self.path, views, extras)

    def fill(self, views: Views) -> None:
        copy_folder(self.path, views)


@dataclass(frozen=True, slots=True)
class _Random:
    seed: int

    def check(self, views: Views, extras: Extras) -> None:
        """Nothing can go wrong."""

    def fill(self, views: Views) -> None:
        fill_random(views, self.seed)


class Weights:
    """See the module's docstring.

    Args:
        model: as it was loaded, by the plan and the arguments.
        pool: told the scales of each checkpoint, if it stores eight bits.
        seed: of random weights.
    """

    def __init__(
        self, model: CausalLM, plan: EnginePlan, config: ModelConfig, pool: Scaled, seed: int
    ) -> None:
        self.version = "default"
        self._views = dict(model.weights)
        self._extras = model.extras
        self._plan = plan
        self._config = config
        self._pool = pool
        dummy = config.load_format == "dummy"
        self._source: _Source | None = _Random(seed) if dummy else _Folder(plan.folder)
        self._empty: set[str] = set()
        if not dummy and self._is_scaled:
            pool.set_scales(self._scales(plan.folder))

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        """Every weight; what else a model keeps follows from its configuration."""
        return self._views.values()

    @property
    def problem(self) -> str | None:
        """Why nothing can be computed with them; None if it can."""
        if not self._empty:
            return None
        name = min(self._empty)
        return (
            f"weights: {len(self._empty)} of {len(self._views)} have no content, since their "
            f"memory was released or an update broke off, {name} is one; call "
            "update_weights_from_tensor or update_weights_from_disk"
        )

    def update_from_folder(
        self, folder: Path, version: str | None, before: Callable[[], None]
    ) -> None:
        """Take all weights of a checkpoint of the same model.

        Args:
            folder: the checkpoint.
            version: what results are marked with from here on.
            before: called when nothing is left that could refuse, before the first write.

        Raises:
            ConfigError: config.json is another model's.
            ModelError: the checkpoint does not fit; nothing was changed.
            Exception: whatever `before` raises; nothing was changed.
        """
        self._check_model(folder)
        self._check_names(_Folder(folder))
        scales = self._scales(folder) if self._is_scaled else None
        before()
        self._fill_from(_Folder(folder))
        if scales is not None:
            self._pool.set_scales(scales)
        self._name(version)

    def update_from_tensors(
        self, tensors: NamedTensors, version: str | None, before: Callable[[], None]
    ) -> None:
        """Take some weights, by their names in the checkpoint; arguments as of a folder.

        Raises:
            ModelError: one does not fit; nothing was changed.
            Exception: whatever `before` raises; nothing was changed.
        """
        found = check_tensors(tensors, self._views, self._extras)
        before()
        with self._changing(found):
            for name, tensor in found.items():
                copy_pieces(tensor.detach(), self._views[name])
        if found:
            self._source = None
        self._name(version)

    def values(self, name: str, count: int) -> object:
        """The first `count` rows of a weight as nested lists of floats.

        Raises:
            RequestError: there is none of that name.
        """
        view = self._views.get(dict(self._extras.copies).get(name, name))
        if view is None:
            raise RequestError(f"name: the model has no weight {name!r}; see its checkpoint")
        part = view[:count] if view.dim() else view
        return part.to(torch.float32).tolist()

    def check_reload(self) -> None:
        """Find out whether `reload` would succeed.

        Raises:
            ModelError: the checkpoint is not there any more, or can't be read by these names.
        """
        if self._source is not None:
            self._check_names(self._source)

    def reload(self) -> None:
        """Fill the weights as they were, if that can be done, after their memory came back."""
        self._empty = set(self._views)
        if self._source is not None:
            self.check_reload()
            self._fill_from(self._source)

    def _check_names(self, source: _Source) -> None:
        try:
            source.check(self._views, self._extras)
        except ModelError as error:
            if self._plan.spec.native:
                raise
            raise ModelError(
                f"{error} (of a model that transformers loads, only checkpoints that have the "
                "names of its parameters can be read into a running engine)"
            ) from error

    def _fill_from(self, source: _Source) -> None:
        with self._changing(self._views):
            source.fill(self._views)
        self._source = source

    @contextlib.contextmanager
    def _changing(self, names: Iterable[str]) -> Iterator[None]:
        """Should copying break off half way, these have no content."""
        names = set(names)
        self._empty |= names
        with torch.inference_mode():
            yield
        self._empty -= names

    def _name(self, version: str | None) -> None:
        if version is not None:
            self.version = version

    @property
    def _is_scaled(self) -> bool:
        return self._plan.kv_dtype.startswith("fp8")

    def _scales(self, folder: Path) -> tuple[LayerScales, ...]:
        return kv_scales(read_tensors(folder), self._plan.spec.num_layers)

    def _check_model(self, folder: Path) -> None:
        raw = read_json(folder / "config.json")
        raw = apply_overrides(raw, self._config.json_model_override_args)
        found = ModelSpec.from_config(raw, context_length=self._config.context_length)
        serving = self._plan.spec
        old = asdict(serving)
        for name, value in asdict(found).items():
            if name not in _FREE_FIELDS and value != old[name]:
                raise ConfigError(
                    f"{folder}: {name} is {value!r}, the engine serves a model with {old[name]!r}; "
                    "make a new Engine for another model"
                )
        if not serving.native and _bound(found) != _bound(serving):
            raise ConfigError(
                f"{folder}: config.json differs from that of the model being served; make a new "
                "Engine for another model"
            )


def _bound(spec: ModelSpec) -> dict[str, object]:
    """What of config.json transformers may compute with."""
    values: dict[str, object] = json.loads(spec.config_json)
    return {key: value for key, value in values.items() if key not in _FREE_KEYS}


def checked_tensors(named_tensors: object) -> NamedTensors:
    """Names and tensors as a caller gives them: a mapping, or pairs.

    Raises:
        ModelError: something else.
    """
    items = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    if not isinstance(items, Iterable):
        raise ModelError(
            f"named_tensors: got {type(named_tensors).__name__}, give pairs of name and tensor"
        )
    found = []
    for item in items:
        if not (
            isinstance(item, tuple | list)
            and len(item) == 2
            and isinstance(item[0], str)
            and isinstance(item[1], torch.Tensor)
        ):
            raise ModelError(
                f"named_tensors: an item of type {type(item).__name__} is no pair of a name and a "
                "tensor; give such pairs"
            )
        found.append((item[0], item[1]))
    return found
