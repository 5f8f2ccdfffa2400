"""Request: one sample on its way through the engine. The scheduler is its only writer.

    tokens   [0, num_prompt)            the prompt
             [num_prompt, num_tokens)   output known on the host
    KV       [0, applied)               valid: the steps that computed them have come back
             [applied, computed)        planned: their steps are on the device
             [computed, num_tokens + outstanding)   not planned yet

`outstanding` counts sampled tokens that are still on the device: at most two.
"""

from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from seawall.core.params import LogprobSpec, SamplingParams
from seawall.core.step import I32

if TYPE_CHECKING:
    from seawall.core.grammar import Constraint


class Status(Enum):
    """Where a request is; it only moves forward, except that retraction sends it back once."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """One sample of one prompt.

    Attributes:
        scored: next position whose following prompt token is still to be scored.
        cached_tokens: positions that were not computed when it was first admitted.
        constraint: its place in its grammar, once that is compiled; None without one.
        table_columns: page table entries of its seat that are up to date on the device.
    """

    __slots__ = (
        "applied",
        "arrival",
        "cached_tokens",
        "committed",
        "computed",
        "constraint",
        "epoch",
        "extra_key",
        "group",
        "index",
        "logprob",
        "max_new_tokens",
        "num_prompt",
        "num_retractions",
        "num_tokens",
        "outstanding",
        "priority",
        "rid",
        "sampling",
        "scored",
        "seat",
        "seed",
        "status",
        "table_columns",
        "tokens",
        "write_from",
    )

    def __init__(  # noqa: PLR0913  # one argument a field, by name
        self,
        *,
        rid: str,
        index: int,
        prompt: I32,
        sampling: SamplingParams,
        logprob: LogprobSpec,
        max_new_tokens: int,
        seed: int,
        priority: int,
        extra_key: str | None,
        arrival: int,
        group: str | None,
    ) -> None:
        self.rid = rid
        self.index = index
        self.num_prompt = len(prompt)
        self.tokens: I32 = np.empty(len(prompt) + max_new_tokens, np.int32)
        self.tokens[: len(prompt)] = prompt
        self.num_tokens = len(prompt)
        self.sampling = sampling
        self.logprob = logprob
        self.max_new_tokens = max_new_tokens
        self.seed = seed
        self.priority = priority
        self.extra_key = extra_key
        self.arrival = arrival
        self.group = group
        self.status = Status.WAITING
        self.seat = 0
        self.epoch = 0
        self.computed = 0
        self.applied = 0
        self.outstanding = 0
        self.write_from = 0
        self.committed = False
        self.table_columns = 0
        self.num_retractions = 0
        self.cached_tokens = 0
        self.scored = first_scored_position(logprob, len(prompt))
        self.constraint: Constraint | None = None

    @property
    def name(self) -> str:
        """Names the sample in logs, reports and page histories."""
        return f"{self.rid}#{self.index}"

    @property
    def num_output(self) -> int:
        """Output tokens known on the host."""
        return self.num_tokens - self.num_prompt

    @property
    def num_planned(self) -> int:
        """Length including sampled tokens that are still on the device."""
        return self.num_tokens + self.outstanding

    @property
    def num_left(self) -> int:
        """Positions not planned yet: 1 is a decode row, more is a prompt in chunks."""
        return self.num_planned - self.computed

    @property
    def is_prefilling(self) -> bool:
        """Whether more than the newest token waits to be computed."""
        return self.num_left > 1

    @property
    def is_decoding(self) -> bool:
        """Whether one position is left to plan and, unless it is known already, may be drawn."""
        outstanding = self.outstanding
        planned = self.num_tokens + outstanding
        return planned - self.computed == 1 and (
            outstanding == 0 or planned - self.num_prompt < self.max_new_tokens
        )

    @property
    def may_sample(self) -> bool:
        """Whether one more token may be drawn after what is planned already."""
        return self.num_planned - self.num_prompt < self.max_new_tokens

    @property
    def last_scored_position(self) -> int:
        """End (exclusive) of the positions whose next prompt token is scored."""
        return self.num_prompt - 1 if self.logprob.wants_prompt else 0


def first_scored_position(logprob: LogprobSpec, num_prompt: int) -> int:
    """Position whose next token is the first that is reported; token 0 has no logprob."""
    if logprob.start_len is None:
        return num_prompt
    return max(logprob.start_len, 1) - 1
