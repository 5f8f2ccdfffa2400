"""Inputs for the tests of the logits path, and a counter of the bytes that a call makes."""

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from seawall.ops import SparseAdjust

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One product and all that processes its logits."""

    hidden: Tensor
    weight: Tensor
    temperature: Tensor | float
    softcap: float | None
    scale: float
    bias: Tensor | None
    bitmask: Tensor | None
    adjust: SparseAdjust | None

    @property
    def rows(self) -> int:
        return self.hidden.shape[0]

    @property
    def vocab(self) -> int:
        return self.weight.shape[0]

    def processing(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "softcap": self.softcap,
            "scale": self.scale,
            "bias": self.bias,
            "bitmask": self.bitmask,
            "adjust": self.adjust,
        }


@st.composite
def cases(draw: st.DrawFn, max_rows: int = 40, max_vocab: int = 5000) -> Case:
    """Random products of every dtype, with any mix of the processing steps."""
    rows = draw(st.sampled_from([0, 1, 2, 7, max_rows]) | st.integers(1, max_rows))
    vocab = draw(st.sampled_from([1, 31, 32, 33, 257, max_vocab]) | st.integers(1, max_vocab))
    hidden_size = draw(st.integers(1, 48))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype, weight_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    temperature: Tensor | float = draw(st.sampled_from([1.0, 0.0, 0.7]))
    if draw(st.booleans()):
        temperature = torch.rand(rows, generator=generator) * 2
        temperature[::3] = 0.0
    return Case(
        hidden=normal(rows, hidden_size).to(dtype),
        weight=normal(vocab, hidden_size).to(weight_dtype) / hidden_size**0.5,
        temperature=temperature,
        softcap=draw(st.sampled_from([None, None, 2.5, 30.0])),
        scale=draw(st.sampled_from([1.0, 0.5, 3.0])),
        bias=normal(vocab) if draw(st.booleans()) else None,
        bitmask=masks(rows, vocab, generator) if draw(st.booleans()) else None,
        adjust=adjustments(rows, vocab, generator) if draw(st.booleans()) else None,
    )


def masks(rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    """Random bitmasks that allow the last id of every row; bits beyond the vocabulary are set."""
    words = -(-vocab // 32)
    bits = torch.randint(-(2**31), 2**31, (rows, words), generator=generator).to(torch.int32)
    last = 1 << torch.tensor((vocab - 1) % 32, dtype=torch.int32)
    bits[:, -1] |= last
    return bits


def adjustments(rows: int, vocab: int, generator: torch.Generator) -> SparseAdjust | None:
    """Up to 20 changes for every other row, some that forbid; never all ids of a row."""
    count = min(20, vocab - 1)
    if rows == 0 or count == 0:
        return None
    chosen = list(range(0, rows, 2))
    ids = torch.cat([torch.randperm(vocab - 1, generator=generator)[:count] for _ in chosen])
    add = torch.randn(len(ids), generator=generator)
    add[::5] = -torch.inf
    return SparseAdjust(
        row=torch.tensor(chosen).repeat_interleave(count),
        ids=ids,
        repetition=torch.rand(len(ids), generator=generator) + 0.5,
        add=add,
    )


class ByteCounter(TorchDispatchMode):
    """Logs when storages are made and freed; results are left out afterwards, from the start."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, int] = {}
        self._log: list[tuple[int, int]] = []
        self._inputs: set[int] = set()

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        self._inputs.update(t.untyped_storage().data_ptr() for t in tensors)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self._meet(tensor.untyped_storage())
        return out

    def _meet(self, storage: torch.UntypedStorage) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if size == 0 or key in self._known or key in self._inputs:
            return
        self._known[key] = serial = len(self._log)
        self._log.append((serial, size))
        weakref.finalize(storage, self._free, key, serial, size)

    def _free(self, key: int, serial: int, size: int) -> None:
        del self._known[key]
        self._log.append((serial, -size))

    def peak_without(self, results: Iterable[Tensor | None]) -> int:
        """Most bytes alive at once, not counting these results."""
        kept = {self._known.get(t.untyped_storage().data_ptr()) for t in results if t is not None}
        now = peak = 0
        for serial, change in self._log:
            if serial not in kept:
                now += change
                peak = max(peak, now)
        return peak


@contextlib.contextmanager
def counting(*inputs: Tensor | None) -> Iterator[ByteCounter]:
    """Count the bytes of what is made inside."""
    counter = ByteCounter()
    counter.ignore(t for t in inputs if t is not None)
    with counter:
        yield counter


def chi_square_limit(freedom: int) -> float:
    """Value that chi-square exceeds about once in 30,000 times (Wilson and Hilferty, 1931)."""
    part = 2.0 / (9.0 * freedom)
    return float(freedom * (1.0 - part + 4.0 * part**0.5) ** 3)
