"""Loading a model of the native families: an empty decoder, filled by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from seawall.models.decoder import Decoder
from seawall.models.gemma import GemmaDecoder
from seawall.models.weights import fill_from_folder, fill_random

if TYPE_CHECKING:
    from seawall.device.arena import Arena
    from seawall.models.base import CausalLM
    from seawall.models.registry import LoadRequest

_DECODERS: dict[str, type[Decoder] | type[GemmaDecoder]] = {
    "llama": Decoder,
    "gemma": GemmaDecoder,
}


def load(request: LoadRequest, arena: Arena) -> CausalLM:
    """The decoder that the request describes, with its weights."""
    with torch.inference_mode():
        model = _DECODERS[request.spec.decoder](request.spec, request.dtype, arena)
        if request.random_weights:
            fill_random(model.weights, request.seed)
        else:
            assert request.folder is not None
            fill_from_folder(request.folder, model.weights, model.extras)
    return model
