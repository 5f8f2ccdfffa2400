"""Loading a model of the native families: an empty decoder, filled by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from seawall.models import families
from seawall.models.decoder import Decoder
from seawall.models.weights import Extras, fill_from_folder, fill_random

if TYPE_CHECKING:
    from seawall.device.arena import Arena
    from seawall.models.base import CausalLM
    from seawall.models.registry import LoadRequest


def load(request: LoadRequest, arena: Arena) -> CausalLM:
    """The decoder that the request describes, with its weights."""
    with torch.inference_mode():
        model = Decoder(request.spec, request.dtype, arena)
        if request.random_weights:
            fill_random(model.weights, request.seed)
        else:
            assert request.folder is not None
            fill_from_folder(request.folder, model.weights, _extras(request))
    return model


def _extras(request: LoadRequest) -> Extras:
    tied = request.spec.tie_embeddings
    return Extras(
        harmless_suffixes=families.HARMLESS_SUFFIXES,
        copies=((families.HEAD, families.EMBEDDING),) if tied else (),
    )
