"""Any other causal language model, through transformers, with attention routed to the engine's.

transformers builds the modules and loads the weights; their tensors are adopted into the arena. A
step runs the base model, without its LM head, on one packed row batch [1, T] with explicit
positions and without a cache. Its attention modules call `_attend`, which finds the AttentionOp in
the keyword arguments of the forward call: nothing is kept between calls or shared by models.

No mask function is registered for our attention's name, so transformers makes no mask at all.

Owns the modules. Before a model is used it is checked against its own forward pass (hf_check.py);
what cannot be routed, or comes out different, is refused. transformers is imported only here.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging

from seawall.core.errors import ModelError
from seawall.device.dtypes import torch_dtype
from seawall.models.base import HeadWeights
from seawall.models.hf_check import check_routing
from seawall.models.kv_scales import is_kv_scale
from seawall.models.weights import Extras, check_files, fill_random

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from seawall.attention.base import AttentionOp
    from seawall.device.arena import Arena
    from seawall.memory.spec import ModelSpec
    from seawall.models.base import CausalLM
    from seawall.models.registry import LoadRequest

ACCOUNT = "weights"
ATTENTION_NAME = "seawall"
# Buffers of old checkpoints that follow from the configuration.
HARMLESS_SUFFIXES = (
    ".rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
)


@dataclass(frozen=True, slots=True)
class Routing:
    """What one forward call tells the attention modules: whom to ask, and for which model."""

    attention: AttentionOp
    spec: ModelSpec


def load(request: LoadRequest, arena: Arena) -> CausalLM:
    """The model that the request describes, adopted into the arena and checked.

    Raises:
        ModelError: transformers cannot load it, weights are missing or do not fit, or its
            attention cannot be routed.
    """
    config = _config(request.spec)
    if not request.random_weights:
        assert request.folder is not None
        check_files(request.folder)
    with _quiet(), _as_model_error(request.spec.architecture, "cannot be loaded by transformers"):
        if request.random_weights:
            module = _random_module(config, request, arena.device)
        else:
            module = _trained_module(config, request, arena.device)
    module.eval().requires_grad_(False)
    _fix_longrope(module, request.spec)
    _adopt(module, arena)
    model = TransformersModel(module, request.spec)
    with (
        _quiet(),
        torch.inference_mode(),
        _as_model_error(request.spec.architecture, "cannot be routed"),
    ):
        check_routing(model, request.spec, lambda tokens_T: _own_logits(module, tokens_T))
    # Some modules keep tensors that they made in their first forward pass.
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, torch.Tensor):
                arena.adopt(value, ACCOUNT)
    return model


class TransformersModel:
    """A causal language model of transformers behind the engine's protocol."""

    def __init__(self, module: Any, spec: ModelSpec) -> None:
        self._base = module.base_model
        self._spec = spec
        self._head = _head(module)
        self._weights = dict(module.named_parameters())
        self._extras = Extras(harmless_suffixes=HARMLESS_SUFFIXES, copies=_copies(module))

    def forward(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionOp
    ) -> torch.Tensor:
        """Hidden rows [T, hidden] after the final norm."""
        output = self._base(
            input_ids=tokens_T.unsqueeze(0),
            position_ids=positions_T.unsqueeze(0),
            use_cache=False,
            seawall_routing=Routing(attention, self._spec),
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    @property
    def head(self) -> HeadWeights:
        """The LM head's matrix and how its logits are scaled and capped."""
        return self._head

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """Parameters by transformers' names; tied ones once."""
        return self._weights

    @property
    def extras(self) -> Extras:
        """Buffers of old checkpoints, and the other names of tied parameters."""
        return self._extras


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    seawall_routing: Routing | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention interface of transformers: [1, heads, T, D] in, [1, T, heads, D] out."""
    layer = module.layer_idx
    if seawall_routing is None:
        raise ModelError("the model does not hand its keyword arguments on to attention")
    spec = seawall_routing.spec
    _check_shapes(spec, layer, query, key, value)
    _check_options(spec, layer, attention_mask, options)
    q_THD, k_TKD, v_TKD = (part[0].transpose(0, 1) for part in (query, key, value))
    if scaling is not None and scaling != spec.softmax_scale:
        q_THD = q_THD * (scaling / spec.softmax_scale)
    attended = seawall_routing.attention.run(
        q_THD.to(v_TKD.dtype), k_TKD.to(v_TKD.dtype), v_TKD, layer
    )
    return attended.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _attend)


def _check_shapes(
    spec: ModelSpec, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    kv_shape = (1, spec.num_kv_heads, query.shape[2], spec.head_dim)
    expected = ((1, spec.num_heads, query.shape[2], spec.head_dim), kv_shape, kv_shape)
    shapes = (tuple(query.shape), tuple(key.shape), tuple(value.shape))
    if shapes != expected:
        raise ModelError(
            f"layer {layer} attends with query, key and value of shapes {shapes}, "
            f"config.json promises {expected}"
        )


def _check_options(
    spec: ModelSpec, layer: int, attention_mask: torch.Tensor | None, options: Mapping[str, Any]
) -> None:
    window = options.get("sliding_window")
    reasons = {
        "its own mask": attention_mask is not None,
        f"a window of {window} tokens": window is not None and window < spec.context_length,
        "capped scores": options.get("softcap") is not None,
        "attention sinks": options.get("s_aux") is not None,
        "a bias by position": options.get("position_bias") is not None,
        "attention to later positions": options.get("is_causal") is False,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ModelError(f"layer {layer} asks attention for {reason}, which is not built yet")


def _config(spec: ModelSpec) -> Any:
    values = json.loads(spec.config_json)
    model_type = values.pop("model_type", None)
    with _quiet(), _as_model_error(spec.architecture, "is not known to transformers"):
        config = AutoConfig.for_model(model_type, **values)
        classes: Any = AutoModelForCausalLM._model_mapping  # noqa: SLF001 -- there is no public way
        if type(config) not in classes:
            raise ModelError(f"model type {model_type} has no language model there")
    if not classes[type(config)].is_backend_compatible():
        raise ModelError(
            f"{spec.architecture} computes attention in its own way and cannot be routed; "
            "only models that take an attention implementation can be served"
        )
    return config


def _trained_module(config: Any, request: LoadRequest, device: torch.device) -> Any:
    auto: Any = AutoModelForCausalLM
    module, info = auto.from_pretrained(
        request.folder,
        config=config,
        dtype=torch_dtype(request.dtype),
        attn_implementation=ATTENTION_NAME,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
        # Reported in the loading info instead, where the tensor has a name.
        ignore_mismatched_sizes=True,
        device_map=None if device.type == "cpu" else {"": device},
    )
    misshapen = [
        f"{name} of shape {list(found)} instead of {list(expected)}"
        for name, found, expected in info["mismatched_keys"]
    ]
    unexpected = [
        name
        for name in info["unexpected_keys"]
        if not (name.endswith(HARMLESS_SUFFIXES) or is_kv_scale(name))
    ]
    problems = {
        "misshapen tensor": sorted(misshapen),
        "missing tensor": sorted(info["missing_keys"]),
        "unexpected tensor": sorted(unexpected),
        "unreadable tensor": sorted(str(message) for message in info.get("error_msgs") or ()),
    }
    for problem, names in problems.items():
        if names:
            raise ModelError(
                f"{request.folder}: {problem} {names[0]} ({len(names)} in all); "
                "config.json and the checkpoint do not belong together"
            )
    return module


def _random_module(config: Any, request: LoadRequest, device: torch.device) -> Any:
    auto: Any = AutoModelForCausalLM
    with device:
        module = auto.from_config(
            config, dtype=torch_dtype(request.dtype), attn_implementation=ATTENTION_NAME
        )
    with torch.no_grad():
        fill_random(dict(module.named_parameters()), request.seed)
    return module


def _adopt(module: Any, arena: Arena) -> None:
    """Charges every parameter and buffer; memory that borrows a file is copied first."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()
        arena.adopt(tensor, ACCOUNT)


def _fix_longrope(module: Any, spec: ModelSpec) -> None:
    """Makes longrope choose its factors by the context served, as the native families do.

    transformers chooses by the longest position of a batch, which would turn one request's keys by
    what its neighbours are. With both choices set to the same frequencies there is none.
    (Dynamic NTK needs nothing: it changes only past max_position_embeddings, which the context
    never passes.)
    """
    for part in module.modules():
        if getattr(part, "rope_type", None) != "longrope":
            continue
        original = part.config.rope_parameters["original_max_position_embeddings"]
        if spec.context_length > original:
            frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](
                part.config, part.inv_freq.device, seq_len=original + 1
            )
            part.original_inv_freq.copy_(frequencies)
            part.inv_freq.copy_(frequencies)


def _own_logits(module: Any, tokens_T: torch.Tensor) -> torch.Tensor:
    """What the model computes by itself, with its own attention and mask."""
    module.set_attn_implementation("eager")
    logits: torch.Tensor = module(input_ids=tokens_T.unsqueeze(0), use_cache=False).logits[0]
    module.set_attn_implementation(ATTENTION_NAME)
    return logits


def _copies(module: Any) -> tuple[tuple[str, str], ...]:
    """The names of tied parameters beside the first, and the first."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    everything = module.named_parameters(remove_duplicate=False)
    pairs = ((name, first[id(parameter)]) for name, parameter in everything)
    return tuple((name, original) for name, original in pairs if name != original)


def _head(module: Any) -> HeadWeights:
    linear = module.get_output_embeddings()
    if linear is None:
        raise ModelError(f"{type(module).__name__} has no output embedding to take the head from")
    config = module.config
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return HeadWeights(
        weight=linear.weight,
        bias=getattr(linear, "bias", None),
        scale=scale,
        softcap=None if softcap is None else float(softcap),
    )


@contextlib.contextmanager
def _as_model_error(architecture: str, what: str) -> Iterator[None]:
    """Turns what transformers raises into one line; our own errors pass."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{architecture} {what}: {error}") from error
    except (
        ArithmeticError,
        AttributeError,
        ImportError,
        LookupError,
        NotImplementedError,
        OSError,
        RuntimeError,
        SafetensorError,
        TypeError,
        ValueError,
    ) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ModelError(f"{architecture} {what}: {type(error).__name__}: {reason}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers' progress bars and warnings off the terminal, then restores them."""
    transformers_logging: Any = logging
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
