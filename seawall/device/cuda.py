"""The CUDA runtime: one GPU, one stream, the allocator's figures and the cap on it.

Owns the stream on which the core thread queues all its work, and the settings of PyTorch's
allocator. Everything is ordered by that one stream, so that a copy to the device comes after the
last read of what it replaces, and a buffer that was freed is reused after its last reader.
"""

import torch

from seawall.core.errors import ConfigError
from seawall.device.arena import Arena
from seawall.device.runtime import DeviceMemory, Event, Transfer, TransferSizes
from seawall.device.staging import PinnedTransfer

# Kernels and library handles that will be loaded after the cap was set.
_MODULE_BYTES = 256 << 20


class CudaEvent:
    """A point on the stream; waiting sleeps instead of spinning, so that other threads run."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """Marks all work queued so far on the calling thread's stream."""
        self._event.record()

    def done(self) -> bool:
        """Whether the marked work has finished; never blocks."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Blocks the calling thread until the marked work has finished."""
        self._event.synchronize()


class CudaRuntime:
    """One GPU of this process.

    Raises:
        ConfigError: there is no such GPU.
    """

    def __init__(self, index: int = 0) -> None:
        if index >= num_gpus():
            raise ConfigError(
                f"device: cuda:{index} is not there ({num_gpus()} found); use device='cpu'"
            )
        self._device = torch.device("cuda", index)
        self._stream: torch.cuda.Stream | None = None

    @property
    def device(self) -> torch.device:
        """The GPU."""
        return self._device

    @property
    def name(self) -> str:
        """Index, model and compute capability."""
        major, minor = torch.cuda.get_device_capability(self._device)
        return f"{self._device} ({torch.cuda.get_device_name(self._device)}, {major}.{minor})"

    def memory(self) -> DeviceMemory:
        """The driver's use of the whole card, and the allocator's figures of this process.

        Other processes' use counts as in use: to the budget it is all the same who holds memory.
        """
        free, total = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        reserved_peak = torch.cuda.max_memory_reserved(self._device)
        return DeviceMemory(
            in_use_bytes=total - free,
            peak_bytes=total - free - reserved + reserved_peak,
            available_bytes=free,
            allocated_bytes=torch.cuda.memory_allocated(self._device),
            allocated_peak_bytes=torch.cuda.max_memory_allocated(self._device),
            reserved_bytes=reserved,
            reserved_peak_bytes=reserved_peak,
        )

    def event(self) -> Event:
        """A new event, nothing marked yet."""
        return CudaEvent()

    def attach(self) -> None:
        """Makes the GPU and this runtime's stream current for the calling thread."""
        torch.cuda.set_device(self._device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self._stream)
        # cuBLAS keeps a workspace for each stream that ever used it, those of the dead included.
        torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001 -- there is no public name

    def limit(self, num_bytes: int) -> None:
        """Caps the allocator at what a budget leaves it beside everything else on the card.

        Raises:
            ConfigError: the card has less free at this moment.
        """
        free, total = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        outside = total - free - reserved
        cap = num_bytes - outside - _MODULE_BYTES
        if total < num_bytes or cap <= 0:
            raise ConfigError(
                f"memory_budget: {num_bytes} bytes, {self._device} has {total} and {outside} are "
                "held outside this engine; end the processes that hold them, or change it"
            )
        torch.cuda.set_per_process_memory_fraction(cap / total, self._device)

    def settle(self) -> None:
        """Waits for all work, gives unused memory back, and starts peaks over."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def transfers(self, arena: Arena, sizes: TransferSizes, count: int) -> tuple[Transfer, ...]:
        """Transfers that are used in turn; they share one block of the arena's step buffers."""
        block = arena.empty("step_buffers", (sizes.up_bytes,), torch.uint8)
        return tuple(PinnedTransfer(block, sizes, self.event()) for _ in range(count))


def num_gpus() -> int:
    """GPUs that this process can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def total_bytes(index: int = 0) -> int:
    """Memory of a GPU, whoever holds it."""
    size: int = torch.cuda.get_device_properties(index).total_memory
    return size
