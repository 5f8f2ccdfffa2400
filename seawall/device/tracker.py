"""The tracker: exact live and peak bytes of transient tensors, by account, on any device.

A dispatch mode that sees every operator the core thread calls. The first time a storage comes out
of an operator it is counted, once, in the account of the innermost scope; views, in-place operators
and `out=` bring the same storage again and count nothing. A weak reference notices its end at once.

    not counted: storages from before or outside the mode, those made in `scope(None)` or given to
                 `ignore` (the arena's, which the ledger has), and memory borrowed from a numpy
                 array or a buffer, which is its owner's
    not visible: what a kernel allocates and frees inside itself: buffers of each thread in fused
                 attention, packed copies in bfloat16 products, copies in multinomial, sort,
                 unique and boolean indexing. Process RSS is the second witness

An operator that is only made of others would come here whole and hide what it makes on its way
(logsumexp a copy of its input, attention without a fused kernel its whole score matrix). It is run
through its parts, by the same kernel that would run without a tracker, so that each part is seen.

A storage that is resized counts as old and new bytes together for a moment: that is how a resize
copies. A resize that goes around the dispatcher (`untyped_storage().resize_`) is noticed when the
storage next comes out of an operator or when the tracker is asked something.

Costs microseconds per operator: on for tests and `debug_memory`, else `NullMeter` takes its place.
Entered by the core thread only; questions may come from any thread.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import torch
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode

from seawall.device.meter import Reading

DEFAULT_ACCOUNT = "activations"

# Marks a tensor that was just built from host data. Its argument is that very tensor, so it is the
# one operator whose output is new although it is an input too.
_LIFT_FRESH = torch.ops.aten.lift_fresh.default
# In the order in which the dispatcher prefers them.
_EXPLICIT_KEYS = (
    DispatchKey.CompositeExplicitAutogradNonFunctional,
    DispatchKey.CompositeExplicitAutograd,
)


@dataclass(frozen=True, slots=True)
class LiveStorage:
    """A counted storage that is alive; `serial` rises with each storage that is counted."""

    serial: int
    account: str
    num_bytes: int


class _Entry(weakref.ref[torch.UntypedStorage]):
    """A counted storage. Its callback hands the entry itself to the queue of the freed."""

    __slots__ = ("account", "key", "num_bytes", "serial")

    account: str
    key: int
    num_bytes: int
    serial: int


class _Scope:
    """Pushes an account on the tracker's stack for as long as it is entered."""

    __slots__ = ("_account", "_stack")

    def __init__(self, stack: list[str | None], account: str | None) -> None:
        self._stack = stack
        self._account = account

    def __enter__(self) -> None:
        self._stack.append(self._account)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.pop()


class _Tally:
    """Bytes alive and their peaks, by account and in all."""

    __slots__ = ("now", "peak", "total", "total_peak")

    def __init__(self) -> None:
        self.now: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self.total = 0
        self.total_peak = 0

    def add(self, account: str, num_bytes: int) -> None:
        now = self.now.get(account, 0) + num_bytes
        self.now[account] = now
        self.total += num_bytes
        if now > self.peak.get(account, -1):
            self.peak[account] = now
        self.total_peak = max(self.total_peak, self.total)

    def take(self, account: str, num_bytes: int) -> None:
        self.now[account] -= num_bytes
        self.total -= num_bytes

    def reset_peaks(self) -> None:
        self.peak = dict(self.now)
        self.total_peak = self.total


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of transient storages while it is entered (`with tracker:`).

    Args:
        account: where a storage goes that is made outside every scope.
    """

    def __init__(self, account: str = DEFAULT_ACCOUNT) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._scopes: list[str | None] = [account]
        self._tally = _Tally()
        self._serial = 0
        # By id(storage). An entry may outlive its storage until the queue below is drained, so
        # that a lookup also compares the storage itself.
        self._entries: dict[int, _Entry] = {}
        # Finalizers run in any thread and between any two lines, the ones below included. They
        # only append here; the bytes are taken off under the lock.
        self._freed: deque[weakref.ref[torch.UntypedStorage]] = deque()
        self._lock = threading.RLock()
        self._parts: dict[object, DispatchKey | None] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch's hook: True would import its compiler (3 s) just to be kept out of here."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Runs the operator and counts the storages that come out of it."""
        kwargs = {} if kwargs is None else kwargs
        key = self._parts_key(func)
        if key is not None:
            with self:
                return func._op_dk(key, *args, **kwargs)  # noqa: SLF001
        result = func(*args, **kwargs)
        with self._lock:
            self._drain()
            self._note(func, result, (args, tuple(kwargs.values())))
        return result

    def scope(self, account: str | None) -> AbstractContextManager[None]:
        """Attributes storages created inside to `account`; None leaves them uncounted."""
        return _Scope(self._scopes, account)

    def ignore(self, tensor: torch.Tensor) -> None:
        """Stops counting the tensor's storage, if it was counted."""
        storage = tensor.untyped_storage()
        with self._lock:
            self._drain()
            entry = self._entries.get(id(storage))
            if entry is not None and entry() is storage:
                self._remove(entry)

    def live(self, account: str | None = None) -> int:
        """Bytes alive in the account, or in all accounts."""
        with self._lock:
            self._refresh()
            return self._tally.total if account is None else self._tally.now.get(account, 0)

    def peak(self, account: str | None = None) -> int:
        """The most bytes alive at once in the account, or in all accounts together."""
        with self._lock:
            self._refresh()
            return self._tally.total_peak if account is None else self._tally.peak.get(account, 0)

    def readings(self) -> Mapping[str, Reading]:
        """Now and peak of every account in which something was ever counted."""
        with self._lock:
            self._refresh()
            tally = self._tally
            return {
                account: Reading(now=tally.now[account], peak=peak)
                for account, peak in tally.peak.items()
            }

    def reset_peaks(self) -> None:
        """Lowers every peak to what is alive at this moment."""
        with self._lock:
            self._refresh()
            self._tally.reset_peaks()

    def live_storages(self) -> tuple[LiveStorage, ...]:
        """The counted storages that are alive, oldest first: two equal censuses mean no leak."""
        with self._lock:
            self._refresh()
            found = [
                LiveStorage(entry.serial, entry.account, entry.num_bytes)
                for entry in self._entries.values()
            ]
        return tuple(sorted(found, key=lambda storage: storage.serial))

    def _parts_key(self, func: Any) -> DispatchKey | None:
        if func not in self._parts:
            self._parts[func] = _find_parts_key(func)
        return self._parts[func]

    def _note(self, func: object, result: object, inputs: tuple[object, ...]) -> None:
        if isinstance(result, torch.Tensor):
            self._see(func, result, inputs)
        elif isinstance(result, tuple | list):
            for item in result:
                self._note(func, item, inputs)

    def _see(self, func: object, tensor: torch.Tensor, inputs: tuple[object, ...]) -> None:
        if tensor.layout is not torch.strided:
            for part in _parts(tensor):
                self._see(func, part, inputs)
            return
        storage = tensor.untyped_storage()
        entry = self._entries.get(id(storage))
        if entry is not None and entry() is storage:
            self._resized(entry, storage.nbytes())
            return
        account = self._scopes[-1]
        if account is None or storage.device.type == "meta":
            return
        if func is _LIFT_FRESH:
            # Not resizable: the bytes belong to a numpy array or a buffer.
            if not storage.resizable():
                return
        elif _holds(inputs, storage):
            return
        self._add(storage, account)

    def _add(self, storage: torch.UntypedStorage, account: str) -> None:
        entry = _Entry(storage, cast("Callable[[Any], None]", self._freed.append))
        entry.account = account
        entry.key = id(storage)
        entry.num_bytes = storage.nbytes()
        entry.serial = self._serial
        self._serial += 1
        stale = self._entries.get(entry.key)
        if stale is not None:
            # Another thread freed it after the drain and its address has been used again.
            self._remove(stale)
        self._entries[entry.key] = entry
        self._tally.add(account, entry.num_bytes)

    def _resized(self, entry: _Entry, num_bytes: int) -> None:
        if num_bytes != entry.num_bytes:
            self._tally.add(entry.account, num_bytes)
            self._tally.take(entry.account, entry.num_bytes)
            entry.num_bytes = num_bytes

    def _remove(self, entry: _Entry) -> None:
        # The queue may name an entry that `ignore` or `_add` has taken out already.
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
            self._tally.take(entry.account, entry.num_bytes)

    def _drain(self) -> None:
        freed = self._freed
        while freed:
            self._remove(cast("_Entry", freed.popleft()))

    def _refresh(self) -> None:
        self._drain()
        for entry in list(self._entries.values()):
            storage = entry()
            if storage is not None:
                self._resized(entry, storage.nbytes())
            # The reference just taken may have become the last one.
            del storage
        self._drain()


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The strided tensors that a sparse one is made of; compressed rows are the kind in use."""
    if tensor.layout is torch.sparse_csr:
        return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    return ()


def _find_parts_key(func: Any) -> DispatchKey | None:
    """The kernel that makes this operator out of others, if that is the one that would run.

    None for operators with a kernel of their own, and for views, which allocate nothing.
    """
    # There are no public names for the schema of an operator and for what the dispatch table holds.
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001
    results = [result.alias_info for result in func._schema.returns]  # noqa: SLF001
    name = func.name()
    arguments = func._schema.arguments  # noqa: SLF001
    if any(argument.type.kind() == "NumberType" for argument in arguments):
        # Its part takes the number as a tensor, which comes here as a number again and is refused.
        return None
    if has_kernel(name, "CPU") or has_kernel(name, "CUDA"):
        return None
    if has_kernel(name, "CompositeImplicitAutograd"):
        return DispatchKey.CompositeImplicitAutograd
    if any(alias is not None and not alias.is_write for alias in results):
        return None
    for key in _EXPLICIT_KEYS:
        if has_kernel(name, key.name):
            return key
    return None


def _holds(inputs: object, storage: torch.UntypedStorage) -> bool:
    """Whether an operator's inputs, however nested, contain the storage."""
    if isinstance(inputs, torch.Tensor):
        if inputs.layout is not torch.strided:
            return any(part.untyped_storage() is storage for part in _parts(inputs))
        return inputs.untyped_storage() is storage
    if isinstance(inputs, tuple | list):
        return any(_holds(item, storage) for item in inputs)
    return inputs is storage
