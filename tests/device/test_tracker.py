"""The tracker: what counts, once each, to which account, and when it stops counting."""

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from seawall.device.meter import Meter, Reading
from seawall.device.tracker import LiveStorage, Tracker


@pytest.fixture(params=[False, True], ids=["no_grad", "inference_mode"])
def tracker(request: pytest.FixtureRequest) -> Iterator[Tracker]:
    tracker = Tracker()
    with torch.no_grad(), torch.inference_mode(request.param), tracker:
        yield tracker


def test_views_share_one_count_and_the_last_of_them_ends_it(tracker: Tracker) -> None:
    base = torch.empty(10, 10)
    row, columns, flat = base[3], base.t(), base.view(-1)
    parts = torch.chunk(base, 3)
    alias = base.detach()
    assert tracker.live() == 400
    del base, columns, flat, parts, alias
    assert tracker.live() == 400
    del row
    assert tracker.live() == 0
    assert tracker.live_storages() == ()
    assert tracker.peak() == 400


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_frees_are_noticed_at_once_in_any_order(tracker: Tracker, order: tuple[int, ...]) -> None:
    held: list[torch.Tensor | None] = [torch.empty(n, dtype=torch.uint8) for n in (1, 10, 100)]
    left = 111
    for index in order:
        tensor = held[index]
        assert tensor is not None
        left -= tensor.nbytes
        del tensor
        held[index] = None
        assert tracker.live() == left


def test_peak_is_of_what_was_alive_together(tracker: Tracker) -> None:
    for _ in range(3):
        first = torch.empty(100, dtype=torch.uint8)
        second = torch.empty(50, dtype=torch.uint8)
        del first
        third = torch.empty(60, dtype=torch.uint8)
        del second, third
    assert tracker.peak() == 150
    assert tracker.live() == 0
    tracker.reset_peaks()
    assert tracker.peak() == 0
    small = torch.empty(7, dtype=torch.uint8)
    tracker.reset_peaks()
    assert tracker.peak() == small.nbytes


def test_in_place_and_out_operators_count_nothing(tracker: Tracker) -> None:
    values = torch.zeros(100)
    index = torch.arange(10)
    result = torch.empty(100)
    before, storages = tracker.live(), tracker.live_storages()
    values.add_(values)
    values.index_put_((index,), result[:10])
    values[index] = 3.0
    values[2:5] = values[5:8]
    torch.add(values, values, out=result)
    values.copy_(result)
    assert tracker.live() == before == 400 + 400 + 80
    assert tracker.live_storages() == storages


def test_index_reads_make_a_storage_of_their_own(tracker: Tracker) -> None:
    values = torch.zeros(100)
    index = torch.arange(10)
    before = tracker.live()
    picked = values[index]
    assert tracker.live() == before + picked.nbytes == before + 40


def test_resizing_follows_the_storage(tracker: Tracker) -> None:
    tensor = torch.empty(10, dtype=torch.uint8)
    tensor.resize_(100)
    assert tracker.live() == 100
    # Growing copies: old and new bytes are there together for a moment.
    assert tracker.peak() == 110
    tensor.resize_(20)
    assert tensor.untyped_storage().nbytes() == tracker.live() == 100
    target = torch.empty(0)
    torch.add(torch.zeros(5), 1, out=target)
    assert tracker.live() == 120


def test_resizing_around_the_dispatcher_is_seen_when_asked(tracker: Tracker) -> None:
    tensor = torch.empty(10, dtype=torch.uint8)
    tensor.untyped_storage().resize_(0)
    assert tracker.live() == 0
    assert tracker.live_storages() == (LiveStorage(0, "activations", 0),)
    tensor.untyped_storage().resize_(30)
    assert tracker.readings()["activations"].now == 30
    del tensor
    assert tracker.live() == 0


def test_set_moves_a_tensor_to_the_other_storage(tracker: Tracker) -> None:
    small, large = torch.empty(3, dtype=torch.uint8), torch.empty(90, dtype=torch.uint8)
    small.set_(large.untyped_storage())
    assert tracker.live() == 90
    other = torch.empty(0, dtype=torch.uint8).set_(large.untyped_storage(), 1, (2,), (1,))
    assert other.shape == (2,)
    del large, small
    assert tracker.live() == 90
    del other
    assert tracker.live() == 0


def test_storages_from_before_are_never_counted() -> None:
    outside = torch.ones(10)
    tracker = Tracker()
    with tracker:
        view, same = outside[2:], outside.detach()
        view.add_(same[2:])
        assert outside.t() is not view
        copy = torch.empty(0).set_(outside.untyped_storage())
        assert tracker.live() == 0
        made = outside + 1
        assert tracker.live() == 40
        del copy
    outside.mul_(2)
    late = torch.ones(5)
    assert tracker.live() == 40
    # The end of a counted storage is noticed outside the mode too.
    del made, late
    assert tracker.live() == 0


def test_memory_borrowed_from_numpy_is_not_ours(tracker: Tracker) -> None:
    array = np.ones(100)
    borrowed = torch.from_numpy(array)
    buffered = torch.frombuffer(bytearray(40), dtype=torch.int32)
    assert tracker.live() == 0
    assert borrowed[3:].view(-1).shape == (97,)
    assert buffered[1:].shape == (9,)
    assert tracker.live() == 0
    own = torch.tensor([1.0, 2.0])
    assert tracker.live() == own.nbytes == 8
    assert torch.as_tensor(array).data_ptr() == borrowed.data_ptr()
    assert tracker.live() == 8


def test_empty_and_meta_tensors_take_no_bytes(tracker: Tracker) -> None:
    nothing = torch.empty(0, 5)
    shape_only = torch.empty(1000, device="meta")
    shape_only = shape_only + shape_only
    assert tracker.live() == 0
    assert [s.num_bytes for s in tracker.live_storages()] == [nothing.nbytes]


def test_scopes_nest_and_the_innermost_at_creation_owns(tracker: Tracker) -> None:
    with tracker.scope("logits"):
        outer = torch.empty(10, dtype=torch.uint8)
        with tracker.scope("attention"):
            inner = torch.empty(100, dtype=torch.uint8)
        with tracker.scope(None):
            uncounted = torch.empty(5000, dtype=torch.uint8)
            of_nobody = uncounted.view(torch.int8)
        later = torch.empty(1, dtype=torch.uint8)
        moved = inner[3:]
    outside = torch.empty(1000, dtype=torch.uint8)
    of_nobody.add_(1)
    assert tracker.live("logits") == outer.nbytes + later.nbytes == 11
    assert tracker.live("attention") == 100
    assert tracker.live("activations") == outside.nbytes
    assert tracker.live() == 1111
    assert tracker.live("kv") == tracker.peak("kv") == 0
    del inner
    assert tracker.live("attention") == 100
    del moved
    assert tracker.readings() == {
        "logits": Reading(now=11, peak=11),
        "attention": Reading(now=0, peak=100),
        "activations": Reading(now=1000, peak=1000),
    }
    assert tracker.peak() == 1111


def test_scopes_end_with_exceptions(tracker: Tracker) -> None:
    with pytest.raises(RuntimeError), tracker.scope("logits"):
        torch.empty(3) + torch.empty(4)
    tensor = torch.empty(5, dtype=torch.uint8)
    assert tracker.live("activations") == tensor.nbytes
    assert tracker.live("logits") == 0


def test_operators_that_raise_leave_nothing(tracker: Tracker) -> None:
    left, right = torch.empty(3, 4), torch.empty(5, 6)
    before = tracker.live_storages()
    for work in (lambda: left @ right, lambda: F.linear(left, right), lambda: left.view(5)):
        with pytest.raises(RuntimeError):
            work()
    gc.collect()
    assert tracker.live_storages() == before


def test_ignored_storages_leave_the_count_for_good(tracker: Tracker) -> None:
    kept = torch.empty(100, dtype=torch.uint8)
    view = kept[10:]
    tracker.ignore(view)
    assert tracker.live() == 0
    kept.add_(1)
    again = kept.view(10, 10)
    assert tracker.live_storages() == ()
    tracker.ignore(again)
    del kept, view, again
    assert tracker.live() == 0


def test_a_census_tells_which_storage_is_new(tracker: Tracker) -> None:
    first, second = torch.empty(1), torch.empty(2)
    before = tracker.live_storages()
    assert [(s.serial, s.num_bytes) for s in before] == [(0, 4), (1, 8)]
    del first
    third = torch.empty(1)
    # The same bytes, and yet another storage.
    assert [(s.serial, s.num_bytes) for s in tracker.live_storages()] == [(1, 8), (2, 4)]
    assert (second.numel(), third.numel()) == (2, 1)


def test_frees_in_another_thread_are_counted() -> None:
    tracker = Tracker()
    with tracker:
        held = [torch.empty(10, dtype=torch.uint8) for _ in range(200)]

    def drop() -> None:
        while held:
            held.pop()

    thread = threading.Thread(target=drop)
    with tracker:
        thread.start()
        for _ in range(200):
            torch.empty(3, dtype=torch.uint8)
        thread.join()
        assert tracker.live() == 0
    assert tracker.peak() <= 2003


def test_questions_from_another_thread_see_whole_states() -> None:
    tracker = Tracker()
    stop = threading.Event()
    seen: list[int] = []

    def ask() -> None:
        while not stop.is_set():
            readings = tracker.readings()
            seen.append(sum(reading.now for reading in readings.values()))

    thread = threading.Thread(target=ask)
    thread.start()
    with tracker:
        for _ in range(2000):
            pair = torch.empty(10, dtype=torch.uint8)
            del pair
    stop.set()
    thread.join()
    assert seen
    assert set(seen) <= {0, 10}
    assert tracker.live() == 0


def test_cycles_are_counted_until_they_are_collected(tracker: Tracker) -> None:
    gc.disable()
    try:
        cycle: list[object] = [torch.empty(10, dtype=torch.uint8)]
        cycle.append(cycle)
        del cycle
        assert tracker.live() == 10
        gc.collect()
        assert tracker.live() == 0
    finally:
        gc.enable()


def test_autograd_keeps_what_it_saved() -> None:
    tracker = Tracker()
    leaf = torch.ones(100, requires_grad=True)
    with tracker:
        saved = leaf.exp()
        total = saved.sum()
        del saved
        # Held by the graph in C++, by no Python object.
        assert tracker.live() == 404
        del total
        assert tracker.live() == 0


def test_a_tracker_is_a_meter() -> None:
    meter: Meter = Tracker()
    with meter, meter.scope("logits"):
        tensor = torch.empty(3, dtype=torch.uint8)
    assert meter.readings() == {"logits": Reading(now=tensor.nbytes, peak=3)}
    meter.ignore(tensor)
    meter.reset_peaks()
    assert meter.readings()["logits"] == Reading(now=0, peak=0)
