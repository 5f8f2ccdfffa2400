"""What the engine asks of a device, apart from tensors: its name, its memory, ordering, transfers.

On CUDA work is queued on the stream of the core thread, and an event tells when it is done; a
step's numbers go up and its results come down through a Transfer, which waits for nothing until
its results are read. On the CPU a launch has finished when it returns, an event has always
happened, and a transfer is the array itself.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt
import torch

from seawall.device.arena import Arena

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """What the operating system or the driver says of memory, beside our own accounts.

    Attributes:
        in_use_bytes: taken by this process.
        peak_bytes: the most that this process has taken.
        available_bytes: what this process could still get.
        allocated_bytes, allocated_peak_bytes: tensors, by the allocator; 0 where it keeps no count.
        reserved_bytes, reserved_peak_bytes: what the allocator holds for tensors, used or not.
    """

    in_use_bytes: int
    peak_bytes: int
    available_bytes: int
    allocated_bytes: int = 0
    allocated_peak_bytes: int = 0
    reserved_bytes: int = 0
    reserved_peak_bytes: int = 0

    @property
    def outside_bytes(self) -> int:
        """In use, but not held by the allocator: contexts, modules, library handles."""
        return self.in_use_bytes - self.reserved_bytes


class Event(Protocol):
    """A point in the order of the device's work."""

    def record(self) -> None:
        """Marks all work launched so far."""

    def done(self) -> bool:
        """Whether the marked work has finished; never blocks."""

    def wait(self) -> None:
        """Blocks the calling thread until the marked work has finished."""


class Transfer(Protocol):
    """A step's numbers on their way to the device, and its results on their way back."""

    def begin(self) -> None:
        """Starts over, once the device is done with what was carried before."""

    def put(self, array: Array) -> torch.Tensor:
        """The array's numbers on the device, to be read after `send` and until the next begin."""

    def send(self) -> None:
        """Queues the copy of all that was put."""

    def take(self, tensor: torch.Tensor) -> Array:
        """A host array that will hold the tensor's numbers, from `wait` until the next begin."""

    def finish(self) -> None:
        """Marks the end of the step: nothing is put, sent or taken any more."""

    def wait(self) -> None:
        """Blocks until the device has done all that was queued before `finish`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSizes:
    """Bytes that one transfer carries up and down; what is more takes memory of its own."""

    up_bytes: int
    down_bytes: int


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

    def attach(self) -> None:
        """Makes the device current for the calling thread, which is the core's."""

    def limit(self, num_bytes: int) -> None:
        """Caps what tensors may take, so that with all else on the device it is `num_bytes`."""

    def settle(self) -> None:
        """Waits for all work, gives unused memory back, and starts peaks over."""

    def transfers(self, arena: Arena, sizes: TransferSizes, count: int) -> tuple[Transfer, ...]:
        """Transfers that are used in turn; they share one block of the arena's step buffers."""
