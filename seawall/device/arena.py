"""The arena: the one door to tensors that outlive a step.

Every long-lived tensor is made by, or adopted into, a named account, and its storage is charged to
the ledger once, however many tensors view it. The arena owns those storages: it holds a reference
to each, and only it takes their memory away. It does not own the tensor objects, their contents,
or anything that lives for one step only.

    make / adopt  ->  charged  --release-->  0 bytes, same tensors  --restore-->  charged

`seal` closes sizes, not lives: nothing new is accepted afterwards, while release and restore go on
reproducing the same sizes. One writer: the core thread.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from seawall.core.errors import EngineError, SealedError
from seawall.device.meter import Meter, NullMeter
from seawall.memory.ledger import Ledger


@dataclass(frozen=True, slots=True)
class _Block:
    """A storage and the bytes it has whenever its account is not released."""

    storage: torch.UntypedStorage
    num_bytes: int


class Arena:
    """Long-lived tensors of one device, charged to a ledger.

    Args:
        ledger: where the bytes are charged; its caps are the plan.
        device: where tensors are made.
        meter: told to leave the arena's storages out, since the ledger has them.
    """

    def __init__(self, ledger: Ledger, device: torch.device, meter: Meter | None = None) -> None:
        self._ledger = ledger
        self._device = device
        self._meter: Meter = NullMeter() if meter is None else meter
        self._blocks: dict[str, list[_Block]] = {}
        # Keys are id(storage): stable, because the block above keeps the storage object alive.
        self._owner: dict[int, str] = {}
        self._released: dict[str, list[_Block]] = {}
        self._sealed = False

    @classmethod
    def unbounded(cls, device: torch.device) -> "Arena":
        """An arena without caps, for tests and tools."""
        return cls(Ledger.unbounded(), device)

    @property
    def device(self) -> torch.device:
        """Where this arena makes tensors."""
        return self._device

    @property
    def sealed(self) -> bool:
        """Whether new tensors are refused."""
        return self._sealed

    def empty(self, account: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of undefined content, charged to `account`.

        Raises:
            SealedError: the arena is sealed.
            BudgetError: the account would pass its cap; nothing was allocated.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        self._check_open(account, num_bytes)
        self._ledger.charge(account, num_bytes)
        try:
            # Not an inference tensor, whatever mode the caller is in: weight updates and tests
            # write to it in and out of inference mode.
            with torch.inference_mode(False), self._meter.scope(None):
                tensor = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        except BaseException:
            self._ledger.credit(account, num_bytes)
            raise
        self._own(account, tensor, num_bytes)
        return tensor

    def zeros(self, account: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Like `empty`, filled with zeros. A restore does not fill it again."""
        return self.empty(account, shape, dtype).zero_()

    def adopt(self, tensor: torch.Tensor, account: str) -> torch.Tensor:
        """Charges the whole storage behind a tensor that a library made; returns the tensor.

        A storage that the arena has already is charged no second time and stays in the account it
        came to first, so that tied weights and views cost what they take.

        Raises:
            SealedError: the arena is sealed.
            BudgetError: the account would pass its cap; the tensor was not adopted.
            EngineError: the tensor lies on another device than the arena's.
        """
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        self._check_open(account, num_bytes)
        if tensor.device.type != self._device.type:
            raise EngineError(
                f"account {account!r}: tensor on {tensor.device} given to the arena of "
                f"{self._device}; move it first"
            )
        if id(storage) not in self._owner:
            self._ledger.charge(account, num_bytes)
            self._own(account, tensor, num_bytes)
        return tensor

    def seal(self) -> None:
        """Refuses new tensors from here on; release and restore stay legal."""
        self._sealed = True

    def release(self, account: str, only: Iterable[torch.Tensor] | None = None) -> None:
        """Gives the memory of an account back; its tensors stay valid objects of no bytes.

        Whoever holds addresses into the account (captured graphs) must drop them first.

        Args:
            account: whose memory.
            only: tensors of the account to release; None for all there are.

        Raises:
            EngineError: released already, or the account has memory that PyTorch cannot resize
                (mapped files, numpy arrays): nothing was released.
        """
        blocks = self._blocks.get(account, [])
        if only is not None:
            chosen = {id(tensor.untyped_storage()) for tensor in only}
            blocks = [block for block in blocks if id(block.storage) in chosen]
        if account in self._released:
            raise EngineError(f"account {account!r} is released already; restore it first")
        fixed = sum(block.num_bytes for block in blocks if not block.storage.resizable())
        if fixed:
            raise EngineError(
                f"account {account!r}: {fixed} bytes are borrowed from a file or an array and "
                "cannot be released; copy them before adopting"
            )
        for block in blocks:
            block.storage.resize_(0)
        self._released[account] = list(blocks)
        self._ledger.credit(account, _total(blocks))

    def restore(self, account: str) -> None:
        """Takes the memory of a released account again, in the same sizes; content is undefined.

        Raises:
            EngineError: the account is not released.
            BudgetError: the account's cap has been lowered below its size.
        """
        if account not in self._released:
            raise EngineError(f"account {account!r} is not released; there is nothing to restore")
        blocks = self._released[account]
        total = _total(blocks)
        self._ledger.charge(account, total)
        try:
            for block in blocks:
                block.storage.resize_(block.num_bytes)
        except BaseException:
            for block in blocks:
                block.storage.resize_(0)
            self._ledger.credit(account, total)
            raise
        del self._released[account]

    def bytes(self, account: str) -> int:
        """Bytes that the account's storages take at this moment, without what is released."""
        return _total(self._blocks.get(account, [])) - _total(self._released.get(account, []))

    def owner(self, tensor: torch.Tensor) -> str | None:
        """The account that owns the storage behind `tensor`, or None."""
        return self._owner.get(id(tensor.untyped_storage()))

    def num_storages(self) -> int:
        """How many storages the arena owns, released ones included."""
        return len(self._owner)

    def close(self) -> None:
        """Gives every account back and forgets the storages: the end of the arena's life.

        Borrowed memory is only let go of: it is free when its lender drops it too.
        """
        for account, blocks in self._blocks.items():
            self._ledger.credit(account, self.bytes(account))
            for block in blocks:
                if block.storage.resizable():
                    block.storage.resize_(0)
        self._blocks.clear()
        self._owner.clear()
        self._released.clear()
        self._sealed = True

    def _own(self, account: str, tensor: torch.Tensor, num_bytes: int) -> None:
        storage = tensor.untyped_storage()
        assert storage.nbytes() == num_bytes, (storage.nbytes(), num_bytes)
        self._blocks.setdefault(account, []).append(_Block(storage, num_bytes))
        self._owner[id(storage)] = account
        self._meter.ignore(tensor)

    def _check_open(self, account: str, num_bytes: int) -> None:
        if self._sealed:
            raise SealedError(
                f"account {account!r}: {num_bytes} bytes of long-lived memory asked after the "
                "arena was sealed; make it before the warm-up ends"
            )
        if account in self._released:
            raise EngineError(f"account {account!r} is released; restore it before adding to it")


def _total(blocks: Iterable[_Block]) -> int:
    return sum(block.num_bytes for block in blocks)
