"""Counts the bytes of the storages that operations create while it is active."""

import weakref
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageCounter(TorchDispatchMode):
    """Live and peak bytes of storages first seen as an operation's result."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.live = 0
        self.peak = 0

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        for leaf in tree_leaves((args, kwargs or {})):
            if isinstance(leaf, torch.Tensor):
                self._seen.add(leaf.untyped_storage())
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        num_bytes = storage.nbytes()
        self.live += num_bytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, num_bytes)

    def _forget(self, num_bytes: int) -> None:
        self.live -= num_bytes
