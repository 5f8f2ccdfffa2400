"""What the engine asks of a device, apart from tensors: its name, its memory, and ordering.

The seam for CUDA: there, work is queued on a stream and an event tells when it is done; streams,
pinned buffers and graph capture join this protocol together with the code that uses them. On the
CPU a launch has finished when it returns, and an event has always happened.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """What the operating system or the driver says of memory, beside our own accounts.

    Attributes:
        in_use_bytes: taken by this process.
        peak_bytes: the most that this process has taken.
        available_bytes: what this process could still get.
    """

    in_use_bytes: int
    peak_bytes: int
    available_bytes: int


class Event(Protocol):
    """A point in the order of the device's work."""

    def record(self) -> None:
        """Marks all work launched so far."""

    def done(self) -> bool:
        """Whether the marked work has finished; never blocks."""

    def wait(self) -> None:
        """Blocks the calling thread until the marked work has finished."""


class Runtime(Protocol):
    """One device of one process."""

    @property
    def device(self) -> torch.device:
        """Where tensors are made."""

    @property
    def name(self) -> str:
        """The device in words, for reports."""

    def memory(self) -> DeviceMemory:
        """The second witness: compared with the accounts by people, not by code."""

    def event(self) -> Event:
        """A new event, nothing marked yet."""
