"""The CPU runtime: launches are synchronous, and the process's resident size is the witness."""

import ctypes
import platform

import torch

from seawall.device.runtime import DeviceMemory, Event
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
