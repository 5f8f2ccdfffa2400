"""Filling a model's tensors by name: from safetensors files, or with random numbers.

Files are mapped, one tensor is looked at at a time, and its rows go in bounded pieces into tensors
that the arena has made already, converted on the way: host memory holds one piece, never the
checkpoint. Everything that does not match exactly is an error that names the tensor, both shapes
and the file, found before the first tensor is written.

Owns no tensor.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from seawall.core.errors import ModelError
from seawall.models.kv_scales import is_kv_scale

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PIECE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """Names that a checkpoint may carry beside the model's own.

    Tensors that end in one of `harmless_suffixes` are skipped. A name in `copies` must equal the
    weight it maps to.
    """

    harmless_suffixes: tuple[str, ...] = ()
    copies: tuple[tuple[str, str], ...] = ()


def fill_from_folder(folder: Path, views: Mapping[str, torch.Tensor], extras: Extras) -> None:
    """Copies every tensor of a checkpoint into the view of its name; all of them, or none.

    Raises:
        ModelError: a file is missing or unreadable, or a tensor is missing, unexpected, doubled, of
            another shape, or not of a floating type. No view was written.
    """
    check_folder(folder, views, extras)
    copy_folder(folder, views)


def copy_folder(folder: Path, views: Mapping[str, torch.Tensor]) -> None:
    """Copies the tensors of a checkpoint that was checked."""
    for name, tensor, _ in read_tensors(folder):
        if name in views:
            copy_pieces(tensor, views[name])


def check_folder(folder: Path, views: Mapping[str, torch.Tensor], extras: Extras) -> None:
    """Finds out whether `fill_from_folder` would succeed; reads headers, and copies of weights.

    Raises:
        ModelError: as there.
    """
    copies = dict(extras.copies)
    found: dict[str, Path] = {}
    for name, tensor, path in read_tensors(folder):
        if name in found:
            raise ModelError(
                f"{name} is in two files, {found[name].name} and {path.name}; keep one"
            )
        if name in views or name in copies:
            _check_shape(name, tensor, views[copies.get(name, name)], path)
            _check_type(name, tensor, path)
        elif not (name.endswith(extras.harmless_suffixes) or is_kv_scale(name)):
            raise ModelError(
                f"{path}: unexpected tensor {name} of shape {list(tensor.shape)}; "
                "the configuration does not describe this checkpoint"
            )
        found[name] = path
    missing = [name for name in views if name not in found]
    if missing:
        shape = list(views[missing[0]].shape)
        raise ModelError(
            f"{folder}: missing tensor {missing[0]} of shape {shape} "
            f"({len(missing)} missing in all); "
            "the checkpoint is incomplete or config.json is another model's"
        )
    for name, original in extras.copies:
        if name in found:
            _check_copy(name, found[name], original, found[original])


def check_tensors(
    tensors: Sequence[tuple[str, torch.Tensor]], views: Mapping[str, torch.Tensor], extras: Extras
) -> dict[str, torch.Tensor]:
    """What to copy where for an update of some weights, by the name of the view.

    Raises:
        ModelError: a name that is not known or comes twice, another shape or dtype, or a copy that
            differs from the weight it is tied to. Nothing was written.
    """
    copies = dict(extras.copies)
    given: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        view = views.get(copies.get(name, name))
        if view is None:
            raise ModelError(f"weight {name}: the model has none of that name; see its checkpoint")
        if name in given:
            raise ModelError(f"weight {name}: given twice; give it once")
        if tensor.shape != view.shape or tensor.dtype != view.dtype:
            raise ModelError(
                f"weight {name}: got {_described(tensor)}, the model has {_described(view)}; "
                "convert it first"
            )
        given[name] = tensor
    found = {name: tensor for name, tensor in given.items() if name not in copies}
    for name, tensor in given.items():
        original = copies.get(name)
        if original is not None and not _equal(tensor, found.setdefault(original, tensor)):
            raise ModelError(
                f"weight {name}: differs from {original}, to which the configuration ties it; "
                "give one of them"
            )
    return found


def copy_pieces(tensor: torch.Tensor, view: torch.Tensor) -> None:
    """Copies into a tensor of the same shape; what is converted on the way is one piece."""
    if tensor.dim() == 0:
        view.copy_(tensor)
        return
    for start, end in _pieces(tensor):
        view[start:end].copy_(tensor[start:end])


def read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor, Path]]:
    """Name, mapped tensor and file of every tensor of a checkpoint, file by file."""
    for path in checkpoint_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 -- not a mapping, only keys() lists it
                    yield name, file.get_tensor(name), path
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{path}: cannot be read as safetensors ({error}); download the file again"
            ) from error


def check_files(folder: Path) -> None:
    """Opens every file of a checkpoint without reading its tensors.

    Raises:
        ModelError: a file is missing, cut short, or no safetensors file.
    """
    for _ in read_tensors(folder):
        pass


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, in the order of their names.

    Raises:
        ModelError: there are none, the index is malformed, or it names a file that is not there.
    """
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index_path = folder / INDEX_FILE
    if not index_path.is_file():
        raise ModelError(
            f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there; "
            "only safetensors checkpoints are read, convert others first"
        )
    try:
        names = sorted(set(json.loads(index_path.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{index_path}: not an index with a weight_map of tensor and file names ({error!r})"
        ) from error
    for name in names:
        if not isinstance(name, str) or "/" in name or "\\" in name:
            raise ModelError(f"{index_path}: {name!r} is not a file name in the same folder")
        if not (folder / name).is_file():
            raise ModelError(f"{index_path}: names {name}, which is not in the folder")
    return [folder / name for name in names]


def fill_random(views: Mapping[str, torch.Tensor], seed: int) -> None:
    """Random weights of the real shapes, tensor by tensor; the same for the same seed and device.

    Matrices get a deviation of 1/sqrt(fan_in), so that rows keep their size from layer to layer;
    norms are 1.
    """
    generator: torch.Generator | None = None
    for name, view in views.items():
        if generator is None:
            generator = torch.Generator(view.device).manual_seed(seed)
        if view.dim() > 1:
            view.normal_(0.0, view.shape[-1] ** -0.5, generator=generator)
        elif name.endswith(".bias"):
            view.normal_(0.0, 0.02, generator=generator)
        else:
            view.fill_(1.0)


def _check_type(name: str, tensor: torch.Tensor, path: Path) -> None:
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise ModelError(
            f"{path}: tensor {name} is of type {str(tensor.dtype).removeprefix('torch.')}; "
            "quantized weights are not built yet"
        )


def _check_copy(name: str, path: Path, original: str, original_path: Path) -> None:
    with (
        safe_open(path, framework="pt") as file,
        safe_open(original_path, framework="pt") as original_file,
    ):
        if not _equal(file.get_tensor(name), original_file.get_tensor(original)):
            raise ModelError(
                f"{path}: tensor {name} differs from {original}, though the "
                "configuration ties them; override tie_word_embeddings to false"
            )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of the same shape hold the same numbers, piece by piece."""
    if a is b:
        return True
    return all(bool((a[start:end] == b[start:end]).all()) for start, end in _pieces(a))


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _check_shape(name: str, tensor: torch.Tensor, view: torch.Tensor, path: Path) -> None:
    if tensor.shape != view.shape:
        raise ModelError(
            f"{path}: tensor {name} has shape {list(tensor.shape)}, "
            f"the configuration asks for {list(view.shape)}"
        )


def _pieces(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    num_rows = tensor.shape[0]
    row_bytes = max(1, tensor.nbytes // max(1, num_rows))
    step = max(1, PIECE_BYTES // row_bytes)
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)
