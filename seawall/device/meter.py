"""The seam between parts that allocate transients and whoever counts them.

A part wraps its work in `meter.scope(account)`; the tracker behind it counts, the null meter does
nothing. Which one there is was decided when the engine was assembled, so no loop asks.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Transient bytes of one account: alive at this moment, and the most there ever were."""

    now: int
    peak: int


class Meter(Protocol):
    """Counts the bytes of tensors that no arena owns. Entered by the core thread only."""

    def __enter__(self) -> object: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def scope(self, account: str | None) -> AbstractContextManager[None]:
        """Attributes what is created inside to `account`, None to nobody; the innermost wins."""

    def ignore(self, tensor: torch.Tensor) -> None:
        """Leaves the tensor's storage to another account: it is not a transient."""

    def readings(self) -> Mapping[str, Reading]:
        """Now and peak of every account that was seen; empty when nothing is counted."""

    def reset_peaks(self) -> None:
        """Lowers every peak to what is alive at this moment."""


class NullMeter:
    """Counts nothing and costs next to nothing: what production runs with."""

    def __enter__(self) -> "NullMeter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def scope(self, account: str | None) -> AbstractContextManager[None]:
        """Does nothing."""
        return nullcontext()

    def ignore(self, tensor: torch.Tensor) -> None:
        """Does nothing."""

    def readings(self) -> Mapping[str, Reading]:
        """No account was seen."""
        return {}

    def reset_peaks(self) -> None:
        """Does nothing."""
