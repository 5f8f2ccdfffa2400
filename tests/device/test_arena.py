"""The arena: one charge a storage, release and restore, sealing, refusals that change nothing."""

import numpy as np
import pytest
import torch

from seawall.core.errors import BudgetError, EngineError, SealedError
from seawall.device.arena import Arena
from seawall.device.tracker import Tracker
from seawall.memory.ledger import Ledger

CPU = torch.device("cpu")


def make_arena(**caps: int) -> tuple[Arena, Ledger]:
    ledger = Ledger(caps)
    return Arena(ledger, CPU), ledger


@pytest.mark.parametrize(
    ("shape", "dtype", "num_bytes"),
    [
        ((3, 5), torch.float32, 60),
        ((0,), torch.float32, 0),
        ((4, 0, 7), torch.int64, 0),
        ((), torch.int64, 8),
        ((1,), torch.bool, 1),
        ((7, 3), torch.bfloat16, 42),
        ((4097,), torch.int8, 4097),
    ],
)
def test_made_tensors_are_charged_exactly(
    shape: tuple[int, ...], dtype: torch.dtype, num_bytes: int
) -> None:
    arena, ledger = make_arena(kv=10_000)
    made = arena.empty("kv", shape, dtype)
    assert (made.shape, made.dtype, made.device) == (torch.Size(shape), dtype, CPU)
    assert made.untyped_storage().nbytes() == num_bytes
    assert arena.bytes("kv") == ledger.now("kv") == num_bytes
    zeros = arena.zeros("kv", shape, dtype)
    assert not zeros.any()
    assert arena.bytes("kv") == ledger.now("kv") == 2 * num_bytes
    assert arena.owner(made[..., None]) == "kv"


def test_over_the_cap_nothing_is_made() -> None:
    arena, ledger = make_arena(kv=100)
    arena.empty("kv", (99,), torch.int8)
    with pytest.raises(BudgetError, match="'kv'"):
        arena.empty("kv", (2,), torch.int8)
    foreign = torch.empty(2, dtype=torch.int8)
    with pytest.raises(BudgetError, match="'kv'"):
        arena.adopt(foreign, "kv")
    assert arena.owner(foreign) is None
    assert (ledger.now("kv"), ledger.peak("kv"), arena.num_storages()) == (99, 99, 1)


def test_a_failed_allocation_is_credited() -> None:
    arena = Arena.unbounded(CPU)
    with pytest.raises(RuntimeError):
        arena.empty("kv", (1 << 60,), torch.int8)
    assert arena.bytes("kv") == 0
    arena.zeros("kv", (3,), torch.int8)
    assert arena.bytes("kv") == 3


def test_adopted_views_are_charged_once_and_stay_with_the_first_account() -> None:
    arena, ledger = make_arena(weights=1000, kv=1000)
    base = torch.ones(10, 10)
    view = base[2:4]
    assert arena.adopt(view, "weights") is view
    assert ledger.now("weights") == 400
    arena.adopt(base, "weights")
    arena.adopt(base.t(), "kv")
    assert (ledger.now("weights"), ledger.now("kv")) == (400, 0)
    assert arena.owner(base) == "weights"
    assert arena.num_storages() == 1


def test_adopting_a_view_of_a_made_tensor_is_free() -> None:
    arena, ledger = make_arena(kv=60)
    made = arena.empty("kv", (3, 5), torch.float32)
    arena.adopt(made.view(5, 3), "kv")
    assert ledger.now("kv") == 60


def test_tensors_of_another_device_are_refused() -> None:
    arena, ledger = make_arena(weights=1000)
    with pytest.raises(EngineError, match="meta"):
        arena.adopt(torch.empty(3, device="meta"), "weights")
    assert ledger.now("weights") == 0


def test_sealed_arena_makes_nothing_but_releases_and_restores() -> None:
    arena, ledger = make_arena(weights=100)
    tensor = arena.zeros("weights", (5, 5), torch.float32)
    arena.seal()
    assert arena.sealed
    for make in (
        lambda: arena.empty("weights", (0,), torch.int8),
        lambda: arena.zeros("weights", (1,), torch.int8),
        lambda: arena.adopt(torch.ones(1), "weights"),
    ):
        with pytest.raises(SealedError, match="'weights'"):
            make()
    arena.release("weights")
    assert ledger.now("weights") == 0
    arena.restore("weights")
    assert ledger.now("weights") == 100
    tensor.fill_(2.0)
    assert tensor.sum() == 50


def test_release_gives_the_memory_back_and_restore_reproduces_the_sizes() -> None:
    arena, ledger = make_arena(kv=10_000, weights=10_000)
    tensors = [arena.zeros("kv", (n,), torch.float32) for n in (0, 1, 7, 1000)]
    view = tensors[3][10:20]
    adopted = arena.adopt(torch.ones(3, 3), "kv")
    other = arena.zeros("weights", (4,), torch.float32)
    sizes = [t.untyped_storage().nbytes() for t in (*tensors, adopted)]
    for _ in range(3):
        arena.release("kv")
        assert arena.bytes("kv") == ledger.now("kv") == 0
        assert all(t.untyped_storage().nbytes() == 0 for t in (*tensors, adopted))
        assert other.sum() == 0
        arena.restore("kv")
        assert arena.bytes("kv") == ledger.now("kv") == sum(sizes)
        assert [t.untyped_storage().nbytes() for t in (*tensors, adopted)] == sizes
    # The tensors from before are the ones that work again, and views share with their base.
    tensors[3].fill_(3.0)
    adopted.fill_(1.0)
    assert view.tolist() == [3.0] * 10
    assert adopted.sum() == 9
    assert ledger.peak("kv") == sum(sizes)


def test_release_and_restore_only_in_turn() -> None:
    arena, _ = make_arena(kv=100)
    arena.zeros("kv", (4,), torch.int8)
    with pytest.raises(EngineError, match="not released"):
        arena.restore("kv")
    arena.release("kv")
    with pytest.raises(EngineError, match="released already"):
        arena.release("kv")
    with pytest.raises(EngineError, match="restore it"):
        arena.empty("kv", (1,), torch.int8)
    arena.restore("kv")
    assert arena.bytes("kv") == 4


def test_an_account_with_borrowed_memory_refuses_release_as_a_whole() -> None:
    arena, ledger = make_arena(weights=1000)
    own = arena.zeros("weights", (4,), torch.float32)
    arena.adopt(torch.from_numpy(np.ones(5)), "weights")
    with pytest.raises(EngineError, match="40 bytes are borrowed"):
        arena.release("weights")
    assert own.sum() == 0
    assert ledger.now("weights") == 56


def test_a_failed_restore_leaves_the_account_released(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, ledger = make_arena(kv=100)
    first, second = (arena.zeros("kv", (10,), torch.int8) for _ in range(2))
    arena.release("kv")
    resize = torch.UntypedStorage.resize_

    def failing(storage: torch.UntypedStorage, size: int) -> object:
        if size and storage is second.untyped_storage():
            raise RuntimeError("out of memory")
        return resize(storage, size)

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            arena.restore("kv")
        assert ledger.now("kv") == arena.bytes("kv") == 0
        assert first.untyped_storage().nbytes() == 0
    arena.restore("kv")
    assert ledger.now("kv") == 20


def test_restore_under_a_lowered_cap_is_refused() -> None:
    ledger = Ledger({"kv": 100, "weights": 100})
    arena = Arena(ledger, CPU)
    arena.zeros("kv", (60,), torch.int8)
    arena.release("kv")
    ledger.charge("kv", 50)
    with pytest.raises(BudgetError, match="60 bytes"):
        arena.restore("kv")
    ledger.credit("kv", 50)
    arena.restore("kv")


def test_close_returns_every_byte() -> None:
    arena, ledger = make_arena(kv=100, weights=100)
    made = arena.zeros("kv", (60,), torch.int8)
    arena.zeros("weights", (30,), torch.int8)
    arena.adopt(torch.from_numpy(np.ones(2)), "weights")
    arena.release("kv")
    arena.close()
    assert all(use.now == 0 for use in ledger.snapshot().values())
    assert made.untyped_storage().nbytes() == 0
    assert arena.num_storages() == 0
    with pytest.raises(SealedError):
        arena.empty("kv", (1,), torch.int8)


def test_tensors_made_in_inference_mode_can_be_written_outside_it() -> None:
    arena = Arena.unbounded(CPU)
    with torch.inference_mode():
        tensor = arena.zeros("kv", (3,), torch.float32)
        tensor.add_(1)
    tensor.add_(1)
    assert tensor.tolist() == [2.0, 2.0, 2.0]
    assert not tensor.requires_grad


def test_the_tracker_leaves_the_arena_to_the_ledger() -> None:
    tracker = Tracker()
    arena = Arena(Ledger.unbounded(), CPU, tracker)
    with tracker:
        kv = arena.zeros("kv", (1000,), torch.float32)
        assert tracker.peak() == 0
        library = torch.ones(100)
        assert tracker.live() == 400
        arena.adopt(library, "weights")
        assert tracker.live() == 0
        kv[:10].add_(library[:10])
        assert tracker.live_storages() == ()
        arena.release("kv")
        arena.restore("kv")
        kv.zero_()
        assert tracker.live() == 0
        twice = kv * 2
        assert tracker.live() == twice.nbytes == 4000
