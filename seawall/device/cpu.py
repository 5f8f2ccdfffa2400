"""The CPU runtime: launches are synchronous, and the process's resident size is the witness."""

import contextlib
import ctypes
import platform

import torch

from seawall.device.arena import Arena
from seawall.device.runtime import Array, DeviceMemory, Event, Transfer, TransferSizes
from seawall.memory.host import available_host_bytes, peak_resident_bytes, resident_bytes

# glibc's malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
_LARGEST_INT = 2**31 - 1


class DoneEvent:
    """An event on a device that has finished whatever it was given."""

    __slots__ = ()

    def record(self) -> None:
        """Marks nothing: there is nothing left to wait for."""

    def done(self) -> bool:
        """Always."""
        return True

    def wait(self) -> None:
        """Returns at once."""


class HostTransfer:
    """A transfer where host and device are one: arrays are borrowed, results copied at once."""

    __slots__ = ()

    def begin(self) -> None:
        """Nothing is kept from one step to the next."""

    def put(self, array: Array) -> torch.Tensor:
        """A tensor over the array's own memory."""
        return torch.from_numpy(array)

    def send(self) -> None:
        """It is there."""

    def take(self, tensor: torch.Tensor) -> Array:
        """A copy, so that the tensor's bytes come back to its account."""
        copied: Array = tensor.numpy().copy()
        return copied

    def finish(self) -> None:
        """All is done."""

    def wait(self) -> None:
        """Returns at once."""


class CpuRuntime:
    """This process on the host's processors."""

    __slots__ = ()

    @property
    def device(self) -> torch.device:
        """The one CPU device."""
        return torch.device("cpu")

    @property
    def name(self) -> str:
        """Architecture and the threads that PyTorch uses."""
        return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"

    def memory(self) -> DeviceMemory:
        """Resident size now and at its peak, and what the host could still give."""
        return DeviceMemory(
            in_use_bytes=resident_bytes(),
            peak_bytes=peak_resident_bytes(),
            available_bytes=available_host_bytes(),
        )

    def event(self) -> Event:
        """An event that has happened."""
        return DoneEvent()

    def attach(self) -> None:
        """There is one CPU."""

    def limit(self, num_bytes: int) -> None:
        """Not enforced by anybody here: the tracker counts."""

    def settle(self) -> None:
        """Nothing is queued."""

    def transfers(self, arena: Arena, sizes: TransferSizes, count: int) -> tuple[Transfer, ...]:
        """Transfers that take no memory."""
        return tuple(HostTransfer() for _ in range(count))


def keep_freed_memory(num_bytes: int) -> None:
    """Tell glibc's allocator to keep up to `num_bytes` that a step frees for the next step.

    By default it hands large blocks back to the system at once, and every step pays again for
    fresh zeroed pages: on two cores, 256 mixed requests on the demo model took 9 to 10 s so, and
    8.2 s with this, on a machine whose repeats vary by a tenth.

    What is kept is bounded by the accounts it is made for. Nothing happens where the
    C library has no mallopt.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, min(num_bytes, _LARGEST_MMAP_THRESHOLD))
    mallopt(_M_TRIM_THRESHOLD, min(num_bytes, _LARGEST_INT))


def give_back_freed_memory() -> None:
    """Tell glibc's allocator to hand what it keeps to the system, after a large release.

    Nothing happens where the C library has no malloc_trim.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
