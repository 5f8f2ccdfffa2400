"""The tracker against what is really there: PyTorch's allocator, and the storages still alive."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from seawall.device.tracker import Tracker
from tests.device.witness import allocator_use

Work = Callable[[], object]


# --- against the allocator ----------------------------------------------------------------------


def decoder_layer() -> torch.Tensor:
    """A layer as the engine computes it, without fused attention: exact to the byte."""
    tokens, hidden, heads, width = 24, 64, 4, 16
    x = torch.randn(tokens, hidden)
    up, down = torch.randn(3 * hidden, hidden), torch.randn(hidden, hidden)
    q, k, v = F.linear(F.rms_norm(x, (hidden,)), up).view(tokens, 3, heads, width).unbind(1)
    scores = torch.matmul(q.transpose(0, 1), k.permute(1, 2, 0))
    weights = torch.softmax(scores, -1)
    mixed = torch.matmul(weights, v.transpose(0, 1)).transpose(0, 1).reshape(tokens, hidden)
    x = x + F.linear(mixed, down)
    del scores, weights, mixed, q, k, v
    return x + F.linear(F.silu(x) * x, down)


def sampling() -> torch.Tensor:
    hidden, weight = torch.randn(6, 32), torch.randn(500, 32)
    logits = torch.empty(6, 500)
    torch.mm(hidden, weight.t(), out=logits)
    total = torch.logsumexp(logits, -1)
    best = torch.topk(logits, 5)
    picked = logits.gather(1, best.indices)
    return picked - total[:, None]


def paged_store() -> torch.Tensor:
    pool = torch.zeros(2, 64, 8)
    slots = torch.arange(10)
    pool[0].index_copy_(0, slots, torch.randn(10, 8))
    pool[1][slots] = torch.randn(10, 8)
    return pool.index_select(1, slots).transpose(0, 1).contiguous()


def attention_by_parts() -> torch.Tensor:
    q = torch.randn(1, 4, 12, 16)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, q[:, :2], q[:, :2], enable_gqa=True)


def growing() -> torch.Tensor:
    tensor = torch.zeros(100)
    for size in (200, 50, 300):
        tensor.resize_(size)
    return torch.add(tensor, tensor, out=torch.zeros(3))


def conversions() -> torch.Tensor:
    x = torch.randn(33, 7)
    y = x.to(torch.bfloat16).t().contiguous().float()
    z = torch.cat([y, y.clone()]).unsqueeze(0).expand(3, -1, -1).reshape(-1)
    return torch.where(z > z.flip(0), z, torch.zeros_like(z)).cumsum(0)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize(
    "work", [decoder_layer, sampling, paged_store, attention_by_parts, growing, conversions]
)
def test_peak_equals_the_allocators_to_the_byte(work: Work, inference: bool) -> None:
    with torch.no_grad(), torch.inference_mode(inference):
        work()  # libraries keep what they set up on first use
        tracker = Tracker()
        with tracker:
            work()
        truth = allocator_use(work)
    assert tracker.peak() == truth.peak > 0
    assert tracker.live() == truth.end == 0


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("work", [decoder_layer, sampling, attention_by_parts, conversions])
def test_results_are_the_same_bits_with_and_without(
    work: Callable[[], torch.Tensor], inference: bool
) -> None:
    with torch.no_grad(), torch.inference_mode(inference):
        torch.manual_seed(3)
        plain = work()
        torch.manual_seed(3)
        with Tracker():
            tracked = work()
    assert torch.equal(plain, tracked)


def test_fused_attention_counts_all_but_its_buffers() -> None:
    q = torch.randn(1, 2, 40, 16)

    def attend() -> object:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    tracker = Tracker()
    with torch.inference_mode():
        attend()
        with tracker:
            out = attend()
        truth = allocator_use(attend)
    assert isinstance(out, torch.Tensor)
    # The result and one float a row and head; the kernel's buffers are the allocator's secret.
    assert tracker.peak() == out.nbytes + 2 * 40 * 4
    assert truth.peak >= tracker.peak()


# --- against the storages alive -----------------------------------------------------------------


class Desk:
    """Tensors held by name, and what they must cost, worked out without the tracker."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.account = "a"
        self.tensors: list[tuple[torch.Tensor, str | None]] = [
            (torch.zeros(6), None),
            (torch.from_numpy(torch.zeros(5).numpy().copy()), None),
        ]

    def put(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        for held, account in self.tensors:
            if held.untyped_storage() is storage:
                self.tensors.append((tensor, account))
                return
        self.tensors.append((tensor, self.account))

    def cost(self) -> dict[str, int]:
        storages = {
            id(tensor.untyped_storage()): (account, tensor.untyped_storage().nbytes())
            for tensor, account in self.tensors
            if account is not None
        }
        totals: dict[str, int] = {}
        for account, num_bytes in storages.values():
            totals[account] = totals.get(account, 0) + num_bytes
        return totals


def step(desk: Desk, kind: str, pick: int, other: int, size: int) -> None:
    tensor, account = desk.tensors[pick % len(desk.tensors)]
    second = desk.tensors[other % len(desk.tensors)][0]
    results: dict[str, Callable[[], torch.Tensor]] = {
        "make": lambda: torch.zeros(size),
        "make_bytes": lambda: torch.ones(size, dtype=torch.uint8),
        "view": lambda: tensor.view(-1, 1),
        "slice": lambda: tensor[: max(1, len(tensor) // 2)],
        "alias": lambda: tensor.detach(),
        "double": lambda: tensor + tensor,
        "in_place": lambda: tensor.add_(1),
        "into": lambda: torch.add(tensor, 1, out=torch.empty_like(tensor)),
        "index": lambda: tensor[torch.arange(min(size, len(tensor)))],
        "product": lambda: torch.matmul(
            tensor.reshape(-1, 1).float(), second.reshape(1, -1).float()
        ),
        "sum": lambda: tensor.float().logsumexp(0),
        "reshape": lambda: tensor.t().reshape(-1) if tensor.dim() == 2 else tensor.reshape(-1),
        "share": lambda: torch.empty(0, dtype=tensor.dtype).set_(second.untyped_storage()),
        "host": lambda: torch.tensor([1.0] * size),
    }
    if kind == "drop":
        if len(desk.tensors) > 2:
            del desk.tensors[2 + pick % (len(desk.tensors) - 2)]
    elif kind == "grow":
        if account is not None:
            tensor.resize_(size)
    elif kind == "fail":
        with pytest.raises(RuntimeError):
            torch.matmul(torch.zeros(2, 3), torch.zeros(size % 2 + 1, 3))
    elif kind == "ignore":
        desk.tracker.ignore(tensor)
        storage = tensor.untyped_storage()
        desk.tensors = [(t, None if t.untyped_storage() is storage else a) for t, a in desk.tensors]
    else:
        made = results[kind]()
        desk.put(made if made.dim() > 0 else made.view(1))


KINDS = [
    *("make", "make_bytes", "view", "slice", "alias", "double", "in_place", "into", "index"),
    *("product", "sum", "reshape", "share", "host", "drop", "drop", "drop", "grow", "fail"),
    "ignore",
]


@given(
    inference=st.booleans(),
    steps=st.lists(
        st.tuples(
            st.sampled_from(KINDS),
            st.integers(0, 30),
            st.integers(0, 30),
            st.integers(1, 40),
            st.sampled_from(["a", "b"]),
        ),
        max_size=40,
    ),
)
def test_live_is_the_sum_over_storages_alive(
    inference: bool, steps: list[tuple[str, int, int, int, str]]
) -> None:
    tracker = Tracker("a")
    most: dict[str, int] = {}
    with torch.no_grad(), torch.inference_mode(inference):
        desk = Desk(tracker)
        with tracker:
            for kind, pick, other, size, account in steps:
                desk.account = account
                with tracker.scope(account):
                    step(desk, kind, pick, other, size)
                cost = desk.cost()
                for name in ("a", "b"):
                    assert tracker.live(name) == cost.get(name, 0), kind
                    most[name] = max(most.get(name, 0), cost.get(name, 0))
                    assert tracker.peak(name) >= most[name]
                assert tracker.live() == sum(cost.values())
    desk.tensors.clear()
    assert tracker.live() == 0
    assert tracker.live_storages() == ()
