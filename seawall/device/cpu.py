"""The CPU runtime: launches are synchronous, and the process's resident size is the witness."""

import platform

import torch

from seawall.device.runtime import DeviceMemory, Event
from seawall.memory.host import available_host_bytes, peak_resident_bytes, resident_bytes


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
