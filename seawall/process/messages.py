"""Messages between a front end and an engine process beside those of `core.wire`.

front --Call--> engine process --CallDone--> front        between two steps of its core
engine process --Ready | StartFailed--> front             once, at its start
"""

from typing import Any, Literal

import msgspec

from seawall.core.params import LogprobsMode, RequestLimits

FailureKind = Literal["config", "budget", "model", "request", "engine"]


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The core serves; what a front end must know of it to read requests.

    Attributes:
        limits: every request is checked against them.
        tokenizer_folder: None if the engine was told to have no tokenizer.
        generation_defaults: sampling parameters that the model's folder recommends.
        max_running, max_queued: samples that may run and wait; None for no limit.
        plan_table: the memory plan as it is printed.
    """

    pid: int
    model_path: str
    tokenizer_folder: str | None
    limits: RequestLimits
    random_seed: int
    logprobs_mode: LogprobsMode
    dtype: str
    generation_defaults: dict[str, float]
    max_running: int
    max_queued: int | None
    plan_table: str


class StartFailed(msgspec.Struct, frozen=True, kw_only=True):
    """The engine could not be built; the process ends after this.

    Attributes:
        table: the memory plan, if that is what does not fit.
    """

    kind: FailureKind
    message: str
    table: str = ""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Run one of the engine's named functions."""

    ticket: int
    name: str
    args: dict[str, Any] = {}


class CallDone(msgspec.Struct, frozen=True, kw_only=True):
    """What a call returned, or why it failed."""

    ticket: int
    value: Any = None
    failure: FailureKind | None = None
    message: str = ""


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """End every request with an abort, then the process."""
