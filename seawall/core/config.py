"""Engine arguments: one table of names, kinds, defaults and limits; frozen sections made from it.

The table drives the Python arguments, the command-line flags and their checks, so that the three
can't drift apart. Arguments whose feature has not been built are refused, not ignored. This is
the only module that reads the environment.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, TypedDict

from seawall.core.errors import ConfigError
from seawall.core.units import parse_bytes

Kind = Literal["str", "int", "float", "bool", "bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arg:
    """One engine argument.

    Attributes:
        default: None where the engine decides.
        cuda_default: the default where the engine runs on CUDA, if it is another.
        choices: values that are accepted now; empty for any.
        planned: values of the contract that are refused as not built yet.
    """

    name: str
    kind: Kind
    default: object
    help: str
    cuda_default: object = None
    choices: tuple[object, ...] = ()
    planned: tuple[object, ...] = ()
    minimum: float | None = None
    maximum: float | None = None


ARGS: tuple[Arg, ...] = (
    Arg(name="model_path", kind="str", default="demo", help="'demo' or a Hugging Face folder"),
    Arg(name="tokenizer_path", kind="str", default=None, help="folder of the tokenizer"),
    Arg(
        name="load_format",
        kind="str",
        default="auto",
        help="where weights come from; dummy makes random ones of the real shapes",
        choices=("auto", "safetensors", "dummy"),
    ),
    Arg(
        name="dtype",
        kind="str",
        default="auto",
        help="of weights and activations",
        choices=("auto", "float32", "bfloat16", "float16"),
    ),
    Arg(
        name="device",
        kind="str",
        default="auto",
        help="where it runs",
        choices=("auto", "cpu", "cuda"),
    ),
    Arg(
        name="context_length", kind="int", default=None, minimum=1, help="longest sequence, tokens"
    ),
    Arg(
        name="mem_fraction_static",
        kind="float",
        default=None,
        minimum=0.01,
        maximum=1.0,
        help="budget as a fraction of the device's memory",
    ),
    Arg(name="max_total_tokens", kind="int", default=None, minimum=1, help="KV pool size, tokens"),
    Arg(
        name="max_running_requests",
        kind="int",
        default=128,
        cuda_default=4096,
        minimum=1,
        maximum=65536,
        help="sequences computed at a time; on CUDA 4096, or what host memory holds",
    ),
    Arg(
        name="max_queued_requests",
        kind="int",
        default=None,
        minimum=0,
        help="waiting requests; more are refused",
    ),
    Arg(
        name="chunked_prefill_size",
        kind="int",
        default=512,
        cuda_default=8192,
        minimum=-1,
        help="prompt tokens a step; -1 for whole prompts; on CUDA 8192",
    ),
    Arg(
        name="max_prefill_tokens",
        kind="int",
        default=16384,
        minimum=1,
        help="upper bound of prompt tokens a step",
    ),
    Arg(
        name="page_size",
        kind="int",
        default=16,
        minimum=1,
        maximum=1024,
        help="KV slots a page",
    ),
    Arg(
        name="schedule_policy",
        kind="str",
        default="fcfs",
        help="order of waiting requests",
        choices=("fcfs", "lpm", "priority"),
    ),
    Arg(
        name="schedule_conservativeness",
        kind="float",
        default=0.9,
        minimum=0.01,
        maximum=1.0,
        help="quantile of output lengths that admission expects; 1 never retracts",
    ),
    Arg(
        name="enable_mixed_chunk",
        kind="bool",
        default=True,
        help="prefill and decode share steps",
    ),
    Arg(name="disable_radix_cache", kind="bool", default=False, help="no reuse of prefixes"),
    Arg(
        name="radix_eviction_policy",
        kind="str",
        default="lru",
        help="which cached prefix goes first: least recently or least often used, or lowest "
        "priority",
        choices=("lru", "lfu", "priority"),
    ),
    Arg(
        name="attention_backend",
        kind="str",
        default=None,
        help="attention kernels",
        choices=("torch_native", "triton"),
        planned=("flashinfer", "fa3"),
    ),
    Arg(
        name="sampling_backend",
        kind="str",
        default=None,
        help="sampling kernels",
        choices=("pytorch", "triton"),
        planned=("flashinfer",),
    ),
    Arg(
        name="grammar_backend",
        kind="str",
        default=None,
        help="structured output; llguidance where it is installed",
        choices=("llguidance", "none"),
        planned=("xgrammar", "outlines"),
    ),
    Arg(
        name="kv_cache_dtype",
        kind="str",
        default="auto",
        help="of the KV pool, whatever the model's is; auto is the model's",
        choices=("auto", "float32", "bfloat16", "bf16", "float16", "fp8_e4m3", "fp8_e5m2"),
    ),
    Arg(
        name="disable_overlap_schedule",
        kind="bool",
        default=False,
        help="one step in flight instead of two",
    ),
    Arg(
        name="disable_cuda_graph",
        kind="bool",
        default=False,
        help="no CUDA graphs (there are none on the CPU)",
    ),
    Arg(
        name="cuda_graph_max_bs",
        kind="int",
        default=None,
        minimum=1,
        maximum=4096,
        help="decode rows of the largest graph, on CUDA only",
    ),
    Arg(name="tp_size", kind="int", default=1, help="tensor-parallel ranks", choices=(1,)),
    Arg(name="dp_size", kind="int", default=1, help="data-parallel replicas", choices=(1,)),
    Arg(
        name="enable_dp_attention",
        kind="bool",
        default=False,
        help="attention by data parallelism",
        choices=(False,),
    ),
    Arg(
        name="skip_tokenizer_init",
        kind="bool",
        default=False,
        help="no tokenizer: input_ids in, output_ids out",
    ),
    Arg(
        name="random_seed",
        kind="int",
        default=None,
        minimum=0,
        maximum=2**63 - 1,
        help="seeds requests that bring none; from the OS when not given",
    ),
    Arg(
        name="log_level",
        kind="str",
        default="warning",
        help="of the logger named seawall",
        choices=("debug", "info", "warning", "error", "critical"),
    ),
    Arg(
        name="enable_deterministic_inference",
        kind="bool",
        default=False,
        help="batch-invariant kernels",
        choices=(False,),
    ),
    Arg(name="quantization", kind="str", default=None, help="of weights", planned=("fp8",)),
    Arg(
        name="json_model_override_args",
        kind="str",
        default="{}",
        help="JSON object merged over the model's config.json",
    ),
    Arg(
        name="memory_budget",
        kind="bytes",
        default=None,
        minimum=1,
        help="the load line: bytes or '8GiB'",
    ),
    Arg(
        name="host_memory_budget",
        kind="bytes",
        default=4 << 30,
        minimum=1,
        help="for queues, results and cache nodes in host memory",
    ),
    Arg(
        name="logits_workspace",
        kind="bytes",
        default=64 << 20,
        minimum=1,
        help="all that LM head, logprobs and sampling may use at a time",
    ),
    Arg(
        name="logprobs_mode",
        kind="str",
        default="processed",
        help="scale of output logprobs",
        choices=("raw", "processed"),
    ),
    Arg(
        name="debug_memory",
        kind="bool",
        default=False,
        help="page histories, checks after every step, exact tensor accounting",
    ),
)

_ARGS_BY_NAME = {arg.name: arg for arg in ARGS}


class EngineArgs(TypedDict, total=False):
    """Keyword arguments of `Engine`; the table above has meanings and limits."""

    tokenizer_path: str | None
    load_format: str
    dtype: str
    device: str
    context_length: int | None
    mem_fraction_static: float | None
    max_total_tokens: int | None
    max_running_requests: int
    max_queued_requests: int | None
    chunked_prefill_size: int
    max_prefill_tokens: int
    page_size: int
    schedule_policy: str
    schedule_conservativeness: float
    enable_mixed_chunk: bool
    disable_radix_cache: bool
    radix_eviction_policy: str
    attention_backend: str | None
    sampling_backend: str | None
    grammar_backend: str | None
    kv_cache_dtype: str
    disable_overlap_schedule: bool
    disable_cuda_graph: bool
    cuda_graph_max_bs: int | None
    tp_size: int
    dp_size: int
    enable_dp_attention: bool
    skip_tokenizer_init: bool
    random_seed: int | None
    log_level: str
    enable_deterministic_inference: bool
    quantization: str | None
    json_model_override_args: str
    memory_budget: int | str | None
    host_memory_budget: int | str
    logits_workspace: int | str
    logprobs_mode: str
    debug_memory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is read."""

    model_path: str
    tokenizer_path: str | None
    load_format: str
    dtype: str
    context_length: int | None
    skip_tokenizer_init: bool
    json_model_override_args: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """What bounds memory. Sizes in bytes; None where the engine decides."""

    memory_budget: int | None
    host_memory_budget: int
    mem_fraction_static: float | None
    max_total_tokens: int | None
    logits_workspace: int
    page_size: int
    kv_cache_dtype: str
    debug_memory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """What the scheduler may do in a step."""

    max_running_requests: int
    max_queued_requests: int | None
    chunked_prefill_size: int
    max_prefill_tokens: int
    schedule_policy: str
    schedule_conservativeness: float
    enable_mixed_chunk: bool
    disable_radix_cache: bool
    radix_eviction_policy: str
    disable_overlap_schedule: bool
    disable_cuda_graph: bool
    cuda_graph_max_bs: int | None
    seats_given: bool

    def prefill_tokens(self, context_length: int) -> int:
        """Most prompt tokens in one step; whole prompts count as one context."""
        if self.chunked_prefill_size == -1:
            return max(self.max_prefill_tokens, context_length)
        return min(self.chunked_prefill_size, self.max_prefill_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All arguments, checked one by one; what depends on the model is settled in `assemble`."""

    model: ModelConfig
    memory: MemoryConfig
    schedule: ScheduleConfig
    device: str
    random_seed: int | None
    log_level: str
    logprobs_mode: Literal["raw", "processed"]
    grammar_backend: str | None

    @classmethod
    def from_args(cls, args: Mapping[str, object], device: str = "cpu") -> "EngineConfig":
        """Check arguments by the table and sort them into sections.

        Args:
            args: by name, as in the table.
            device: what "auto" means on this machine.

        Raises:
            ConfigError: unknown name, wrong kind, value out of range, or a feature not built.
        """
        for name in args:
            if name not in _ARGS_BY_NAME:
                raise ConfigError(f"engine argument: unknown name {name!r}; see `seawall --help`")
        asked = args.get("device", "auto")
        device = device if asked == "auto" else str(asked)
        values = {arg.name: _value(arg, args.get(arg.name, _default(arg, device))) for arg in ARGS}
        seats = "max_running_requests"
        values["seats_given"] = values[seats] != _default(_ARGS_BY_NAME[seats], device)
        _check_backends(values, device)
        if values["chunked_prefill_size"] == 0:
            raise ConfigError("chunked_prefill_size: got 0, give 1 or more, or -1 for no chunks")
        refused = ("cuda_graph_max_bs", "quantization") if device == "cpu" else ("quantization",)
        for name in refused:
            if values[name] is not None:
                raise ConfigError(f"{name}: got {values[name]!r}, not built yet; leave it out")
        if values["memory_budget"] is not None and values["mem_fraction_static"] is not None:
            raise ConfigError(
                "memory_budget and mem_fraction_static: both given, they name the same budget; "
                "give one"
            )
        return cls(
            model=ModelConfig(**_section(ModelConfig, values)),  # type: ignore[arg-type]
            memory=MemoryConfig(**_section(MemoryConfig, values)),  # type: ignore[arg-type]
            schedule=ScheduleConfig(**_section(ScheduleConfig, values)),  # type: ignore[arg-type]
            device=device,
            random_seed=values["random_seed"],  # type: ignore[arg-type]
            log_level=str(values["log_level"]),
            logprobs_mode="raw" if values["logprobs_mode"] == "raw" else "processed",
            grammar_backend=values["grammar_backend"],  # type: ignore[arg-type]
        )


def environment_flag(name: str) -> bool:
    """Whether environment variable `name` is set to something other than 0 or nothing."""
    return os.environ.get(name, "") not in ("", "0")


def _section(section: type, values: Mapping[str, object]) -> dict[str, object]:
    return {f.name: values[f.name] for f in fields(section)}


def _default(arg: Arg, device: str) -> object:
    """What an argument is that was not given."""
    return arg.default if device == "cpu" or arg.cuda_default is None else arg.cuda_default


def _check_backends(values: Mapping[str, object], device: str) -> None:
    """Each device has one backend of its own for attention and one for sampling."""
    own = {
        "attention_backend": "torch_native" if device == "cpu" else "triton",
        "sampling_backend": "pytorch" if device == "cpu" else "triton",
    }
    for name, backend in own.items():
        if values[name] not in (None, backend):
            raise ConfigError(
                f"{name}: got {values[name]!r}, on {device} there is {backend!r}; leave it out"
            )


def _value(arg: Arg, value: object) -> object:
    if value is None:
        if arg.default is None:
            return None
        raise ConfigError(f"{arg.name}: got None, a value is needed (default {arg.default!r})")
    if value in arg.planned:
        raise ConfigError(f"{arg.name}: {value!r} is not built yet; use one of {arg.choices}")
    value = _converted(arg, value)
    if arg.choices and value not in arg.choices:
        built = ", ".join(repr(choice) for choice in arg.choices)
        raise ConfigError(f"{arg.name}: got {value!r}, not built or unknown; use {built}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        if arg.minimum is not None and not value >= arg.minimum:
            raise ConfigError(f"{arg.name}: got {value}, the least is {arg.minimum}; raise it")
        if arg.maximum is not None and not value <= arg.maximum:
            raise ConfigError(f"{arg.name}: got {value}, the most is {arg.maximum}; lower it")
    return value


def _converted(arg: Arg, value: object) -> object:
    """The value as its kind, if it is one.

    bool is an int in Python, and True is no count of anything.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if arg.kind == "bytes" and (isinstance(value, str) or (is_number and isinstance(value, int))):
        return _bytes(arg.name, value)
    if arg.kind == "int" and is_number and isinstance(value, int):
        return value
    if arg.kind == "float" and is_number:
        return float(value)  # type: ignore[arg-type]  # a number, see above
    if arg.kind == "bool" and isinstance(value, bool):
        return value
    if arg.kind == "str" and isinstance(value, str | os.PathLike):
        return os.fspath(value)
    raise ConfigError(f"{arg.name}: got {value!r}, a value of kind {arg.kind} is needed")


def _bytes(name: str, value: int | str) -> int:
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
