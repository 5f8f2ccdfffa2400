"""Loading weights: what is accepted, and one clear refusal for every way a checkpoint breaks."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from seawall.core.errors import ModelError
from seawall.device.arena import Arena
from seawall.memory.spec import ModelSpec
from seawall.models import weights
from seawall.models.registry import load_model
from tests.models.checkpoints import (
    SIZES,
    assert_same_logits,
    forward,
    load,
    random_model,
    read_config,
    reference,
    save,
    tokens,
)

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(**SIZES)
    return save(random_model(config), tmp_path_factory.mktemp("llama"))


def edited(
    source: Path, folder: Path, edit: Callable[[dict[str, Tensor]], object], **config: object
) -> Path:
    """A copy of a checkpoint whose tensors went through `edit`."""
    tensors = load_file(source / SINGLE)
    edit(tensors)
    save_file(tensors, folder / SINGLE)
    (folder / "config.json").write_text(json.dumps(read_config(source) | config))
    return folder


def sharded(source: Path, folder: Path) -> Path:
    """The same checkpoint in two files: layer 0, and the rest."""
    tensors = load_file(source / SINGLE)
    names = {name: "a" if ".layers.0." in name else "b" for name in tensors}
    for part in ("a", "b"):
        content = {name: tensors[name] for name in tensors if names[name] == part}
        save_file(content, folder / f"{part}.safetensors")
    index = {"weight_map": {name: f"{part}.safetensors" for name, part in names.items()}}
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


def test_shards_equal_one_file(tmp_path: Path) -> None:
    theirs = random_model(transformers.Qwen2Config(**SIZES))
    folder = save(theirs, tmp_path, shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    ours, spec, _ = load(folder)
    sequence = tokens(20)
    logits = forward(ours, spec, sequence, steps=(20,))
    assert_same_logits(logits, reference(theirs, sequence))


def test_dtype_is_converted_on_the_way(checkpoint: Path, tmp_path: Path) -> None:
    def halve(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            tensors[name] = tensors[name].to(torch.bfloat16)

    ours, _, _ = load(edited(checkpoint, tmp_path, halve))
    original = load_file(checkpoint / SINGLE)[Q_PROJ]
    assert ours.weights[Q_PROJ].dtype == torch.float32
    assert torch.equal(ours.weights[Q_PROJ], original.to(torch.bfloat16).float())


def test_long_tensors_go_in_pieces(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "PIECE_BYTES", 500)
    ours, _, _ = load(checkpoint)
    for name, tensor in load_file(checkpoint / SINGLE).items():
        assert torch.equal(ours.weights[name], tensor), name


def test_every_weight_has_its_name(checkpoint: Path) -> None:
    ours, _, _ = load(checkpoint)
    assert set(ours.weights) == set(load_file(checkpoint / SINGLE))


def test_harmless_buffers_are_ignored(checkpoint: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = edited(checkpoint, tmp_path, lambda tensors: tensors.update({name: torch.ones(6)}))
    ours, _, _ = load(folder)
    assert name not in ours.weights


def tie(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def test_redundant_tied_head_is_accepted(checkpoint: Path, tmp_path: Path) -> None:
    ours, _, _ = load(edited(checkpoint, tmp_path, tie, tie_word_embeddings=True))
    embedding = ours.weights["model.embed_tokens.weight"]
    assert ours.head.weight.data_ptr() == embedding.data_ptr()


def test_tied_head_that_differs_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = edited(checkpoint, tmp_path, lambda tensors: None, tie_word_embeddings=True)
    with pytest.raises(ModelError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        load(folder)


def test_missing_tensor(checkpoint: Path, tmp_path: Path) -> None:
    folder = edited(checkpoint, tmp_path, lambda tensors: tensors.pop(Q_PROJ))
    with pytest.raises(ModelError, match=r"missing tensor .*q_proj\.weight of shape \[48, 48\]"):
        load(folder)


def test_untied_head_that_is_missing(checkpoint: Path, tmp_path: Path) -> None:
    folder = edited(checkpoint, tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"missing tensor lm_head\.weight"):
        load(folder)


def test_unexpected_tensor(checkpoint: Path, tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}
    folder = edited(checkpoint, tmp_path, lambda tensors: tensors.update(extra))
    with pytest.raises(ModelError, match=r"unexpected tensor .*q_proj\.bias of shape \[48\]"):
        load(folder)


def test_misshapen_tensor(checkpoint: Path, tmp_path: Path) -> None:
    folder = edited(
        checkpoint, tmp_path, lambda tensors: tensors.update({Q_PROJ: torch.ones(48, 40)})
    )
    with pytest.raises(ModelError, match=r"q_proj.* \[48, 40\].* \[48, 48\]") as caught:
        load(folder)
    assert SINGLE in str(caught.value)


def test_transposed_shape_that_would_broadcast(checkpoint: Path, tmp_path: Path) -> None:
    name = "model.norm.weight"
    folder = edited(checkpoint, tmp_path, lambda tensors: tensors.update({name: torch.ones(1)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[1\].* \[48\]"):
        load(folder)


def test_quantized_tensor(checkpoint: Path, tmp_path: Path) -> None:
    codes = torch.zeros(48, 48, dtype=torch.int8)
    folder = edited(checkpoint, tmp_path, lambda tensors: tensors.update({Q_PROJ: codes}))
    with pytest.raises(ModelError, match=r"q_proj\.weight is of type int8"):
        load(folder)


@pytest.mark.parametrize("kept", [0, 4, 300, -1000])
def test_truncated_file(checkpoint: Path, tmp_path: Path, kept: int) -> None:
    folder = edited(checkpoint, tmp_path, lambda tensors: None)
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[:kept])
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read"):
        load(folder)


def test_file_of_another_format(checkpoint: Path, tmp_path: Path) -> None:
    folder = edited(checkpoint, tmp_path, lambda tensors: None)
    (folder / SINGLE).write_bytes(b"<!DOCTYPE html><html>not found</html>" * 100)
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read"):
        load(folder)


def test_folder_without_safetensors(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="only safetensors checkpoints are read"):
        load(tmp_path)


def test_missing_shard(checkpoint: Path, tmp_path: Path) -> None:
    folder = sharded(checkpoint, tmp_path)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"names b\.safetensors, which is not in the folder"):
        load(folder)


def test_truncated_shard_is_named(checkpoint: Path, tmp_path: Path) -> None:
    folder = sharded(checkpoint, tmp_path)
    content = (folder / "b.safetensors").read_bytes()
    (folder / "b.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match=r"b\.safetensors: cannot be read"):
        load(folder)


def test_tensor_in_two_shards(checkpoint: Path, tmp_path: Path) -> None:
    folder = sharded(checkpoint, tmp_path)
    tensors = load_file(folder / "b.safetensors")
    tensors[Q_PROJ] = load_file(folder / "a.safetensors")[Q_PROJ]
    save_file(tensors, folder / "b.safetensors")
    with pytest.raises(ModelError, match=r"q_proj\.weight is in two files, a\.safe.* b\.safe"):
        load(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not an index"),
        ("[]", "not an index"),
        ("{}", "not an index"),
        ('{"weight_map": ["a.safetensors"]}', "not an index"),
        ('{"weight_map": {"x": "../a.safetensors"}}', "not a file name in the same folder"),
        ('{"weight_map": {"x": 3}}', "not a file name in the same folder"),
    ],
)
def test_malformed_index(checkpoint: Path, tmp_path: Path, index: str, message: str) -> None:
    folder = sharded(checkpoint, tmp_path)
    (folder / INDEX).write_text(index)
    with pytest.raises(ModelError, match=rf"index\.json: .*{message}"):
        load(folder)


def test_folder_is_needed_unless_dummy(checkpoint: Path) -> None:
    spec = ModelSpec.from_config(read_config(checkpoint))
    arena = Arena.unbounded(torch.device("cpu"))
    with pytest.raises(ModelError, match="needs a model folder"):
        load_model(None, spec, "float32", arena)


def test_dummy_weights_follow_the_seed(checkpoint: Path) -> None:
    spec = ModelSpec.from_config(read_config(checkpoint))
    arena = Arena.unbounded(torch.device("cpu"))
    first, again, other = (
        load_model(None, spec, "float32", arena, load_format="dummy", seed=seed).weights
        for seed in (5, 5, 6)
    )
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
        assert tensor.dim() == 1 or not torch.equal(tensor, other[name]), name
        if tensor.dim() > 1:
            deviation = tensor.std().item() * tensor.shape[-1] ** 0.5
            assert 0.9 < deviation < 1.1, name
