"""Tiny random checkpoints made with transformers, and both sides of a comparison.

Norm weights and biases are random too: a forgotten one must show.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from seawall.device.arena import Arena
from seawall.memory.spec import ModelSpec
from seawall.models.base import CausalLM
from seawall.models.hf_check import DenseAttention
from seawall.models.registry import load_model

VOCAB = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def random_model(config: Any) -> Any:
    """A transformers model in float32 with every weight random; deterministic."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.normal_(0.0, 0.12)
    return model.eval()


def save(model: Any, folder: Path, *, shard_size: str = "1GB") -> Path:
    """Writes the model as a checkpoint folder."""
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def load(
    folder: Path, *, dtype: str = "float32", context_length: int | None = None
) -> tuple[CausalLM, ModelSpec, Arena]:
    """Our model of a checkpoint folder, what it was read as, and who holds its bytes."""
    spec = ModelSpec.from_config(read_config(folder), context_length=context_length)
    arena = Arena.unbounded(torch.device("cpu"))
    return load_model(folder, spec, dtype, arena), spec, arena


def tokens(count: int, *, seed: int = 0) -> Tensor:
    """Token ids; deterministic."""
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


class SpecAttention(DenseAttention):
    """Dense attention by a specification: windows and capped scores too."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec.softmax_scale)
        self._spec = spec

    def _row(self, name: tuple[int, int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if name in self._stored:
            k = torch.cat((self._stored[name][0], k))
            v = torch.cat((self._stored[name][1], v))
        self._stored[name] = (k, v)
        spec, group = self._spec, q.shape[1] // k.shape[1]
        keys, values = (part.repeat_interleave(group, dim=1).float() for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * spec.softmax_scale
        if spec.attention_softcap is not None:
            scores = torch.tanh(scores / spec.attention_softcap) * spec.attention_softcap
        own = torch.arange(len(k) - len(q), len(k))[:, None]
        hidden = torch.arange(len(k)) > own
        window = spec.windows[name[1]] if spec.windows else None
        if window is not None:
            hidden |= torch.arange(len(k)) <= own - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def forward(model: CausalLM, spec: ModelSpec, *sequences: Tensor, steps: tuple[int, ...]) -> Tensor:
    """Logits of the first sequence, all sequences packed into each step.

    `steps` are the lengths of the pieces in which every sequence is computed; a sequence that is
    shorter than the pieces so far has no tokens in the step.
    """
    attention = SpecAttention(spec)
    first: list[Tensor] = []
    start = 0
    with torch.inference_mode():
        for length in steps:
            parts = [sequence[start : start + length] for sequence in sequences]
            positions = [torch.arange(start, start + len(part)) for part in parts]
            attention.prepare([len(part) for part in parts])
            hidden = model.forward(torch.cat(parts), torch.cat(positions), attention)
            first.append(hidden[: len(parts[0])])
            start += length
        return model.head.logits(torch.cat(first))


def reference(model: Any, sequence: Tensor) -> Tensor:
    """Logits of transformers for one sequence at once."""
    with torch.no_grad():
        logits: Tensor = model(sequence.unsqueeze(0), use_cache=False).logits[0]
    return logits


def assert_same_logits(found: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    """Equal within the tolerance, and not because they are all alike."""
    assert found.shape == expected.shape
    assert expected.std() > 0.1
    difference = (found.float() - expected.float()).abs().max().item()
    assert difference <= tolerance, difference
