"""Transfers between host and device that nobody waits for: pinned blocks, cut front to back.

    host   | tokens | positions | ... |  --one copy a send-->  device  | tokens | positions | ... |
    host   | ids | logprobs | ...     |  <--one copy a take--  results, wherever they lie

Owns the blocks of one transfer. The device's block is shared by all transfers of a purpose: copies
and kernels are queued on one stream, so that a copy starts after the last read of what it replaces.
The host's blocks are not shared: the host writes while the device may still read. An array that
finds no room gets pinned memory of its own, which PyTorch keeps until the copy is done.
"""

import math

import torch

from seawall.device.runtime import Array, Event, TransferSizes

_ALIGN = 64
_TORCH_OF = {
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "bool": torch.bool,
}


class PinnedTransfer:
    """One of the transfers that share a device block; used by the core thread only.

    Args:
        device_block: uint8, at least sizes.up_bytes.
        event: tells when the device is done with this transfer's blocks.
    """

    def __init__(self, device_block: torch.Tensor, sizes: TransferSizes, event: Event) -> None:
        self._device = device_block
        self._up = torch.empty(sizes.up_bytes, dtype=torch.uint8, pin_memory=True)
        self._down = torch.empty(sizes.down_bytes, dtype=torch.uint8, pin_memory=True)
        self._up_host: Array = self._up.numpy()
        self._down_host: Array = self._down.numpy()
        self._event = event
        self._open = False
        self._put = 0
        self._sent = 0
        self._taken = 0
        # Copies beyond the block live until the step is over.
        self._loose: list[torch.Tensor] = []

    def begin(self) -> None:
        """Starts over, once the device is done with what was carried before."""
        if self._open:
            # The step before failed half-way; what it queued may still be read.
            self._event.record()
        self._event.wait()
        self._open = True
        self._put = self._sent = self._taken = 0
        self._loose.clear()

    def put(self, array: Array) -> torch.Tensor:
        """The array's numbers on the device, to be read after `send` and until the next begin."""
        dtype = _TORCH_OF[array.dtype.name]
        end = self._put + array.nbytes
        if end > self._up.shape[0]:
            pinned = torch.empty(array.shape, dtype=dtype, pin_memory=True)
            pinned.numpy()[...] = array
            return pinned.to(self._device.device, non_blocking=True)
        self._up_host[self._put : end].view(array.dtype)[:] = array.reshape(-1)
        part = self._device[self._put : end].view(dtype)
        self._put = -(-end // _ALIGN) * _ALIGN
        return part if array.ndim == 1 else part.view(array.shape)

    def send(self) -> None:
        """Queues the copy of all that was put since the last one."""
        end = min(self._put, self._up.shape[0])
        if end > self._sent:
            part = slice(self._sent, end)
            self._device[part].copy_(self._up[part], non_blocking=True)
            self._sent = end

    def take(self, tensor: torch.Tensor) -> Array:
        """A host array that will hold the tensor's numbers, from `wait` until the next begin."""
        num_bytes = math.prod(tensor.shape) * tensor.element_size()
        end = self._taken + num_bytes
        if end > self._down.shape[0]:
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._loose.append(pinned)
        else:
            pinned = self._down[self._taken : end].view(tensor.dtype).view(tensor.shape)
            self._taken = -(-end // _ALIGN) * _ALIGN
        pinned.copy_(tensor, non_blocking=True)
        return pinned.numpy()

    def finish(self) -> None:
        """Marks the end of the step."""
        self._event.record()
        self._open = False

    def wait(self) -> None:
        """Blocks until the device has done all that was queued before `finish`."""
        self._event.wait()
