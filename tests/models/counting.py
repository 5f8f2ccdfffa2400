"""Counts the bytes of storages that operations create while it is active."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageCounter(TorchDispatchMode):
    """Live and peak bytes of storages first seen as an operation's result."""

    def __init__(self, known=()):
        super().__init__()
        self._seen = weakref.WeakSet()
        for tensor in known:
            self._seen.add(tensor.untyped_storage())
        self.live = 0
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for leaf in tree_leaves((args, kwargs or {})):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage(), is_new=False)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage(), is_new=True)
        return result

    def _see(self, storage, *, is_new):
        if storage in self._seen:
            return
        self._seen.add(storage)
        if is_new:
            size = storage.nbytes()
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, size)

    def _free(self, size):
        self.live -= size
