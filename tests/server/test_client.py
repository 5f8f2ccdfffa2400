"""The front end's side of the engine process, with a link that only writes down what is sent."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from seawall.core.errors import EngineError, QueueFullError, RequestError
from seawall.core.params import LogprobSpec, SamplingParams
from seawall.core.wire import FinishReason, GenerateRequest, OutputDelta
from seawall.process.messages import CallDone
from seawall.server.budget import ByteBudget, result_bytes
from seawall.server.client import EngineClient
from seawall.server.errors import UnavailableError
from tests.server.test_process import READY

END = FinishReason(type="length", length=1)


class Wire:
    """Stands for a link."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Any]] = []

    def send(self, kind: bytes, message: object) -> None:
        self.sent.append((kind, message))

    def kinds(self) -> list[bytes]:
        return [kind for kind, _ in self.sent]


class Reader:
    """A sink that keeps what it is given; it may break on some tokens."""

    def __init__(self, breaks_on: int | None = None) -> None:
        self.deltas: list[OutputDelta] = []
        self.failures: list[str] = []
        self._breaks_on = breaks_on

    def take(self, delta: OutputDelta) -> None:
        if self._breaks_on in delta.output_ids:
            raise UnicodeError("no text")
        self.deltas.append(delta)

    def fail(self, message: str) -> None:
        self.failures.append(message)


def request(rid: str, n: int = 1, **logprob: Any) -> GenerateRequest:
    return GenerateRequest(
        rid=rid,
        input_ids=np.array([1, 2], np.int32),
        sampling=SamplingParams(n=n),
        logprob=LogprobSpec(**logprob),
        max_new_tokens=4,
        seed=1,
    )


def connected() -> tuple[EngineClient, Wire]:
    client, wire = EngineClient(), Wire()
    asyncio.get_running_loop()
    return client, wire


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(body)


def delta(rid: str, *ids: int, index: int = 0, end: bool = False) -> OutputDelta:
    return OutputDelta(rid=rid, index=index, output_ids=ids, finish=END if end else None)


def test_deltas_go_to_their_request_until_its_last_sample_ends() -> None:
    async def body() -> None:
        client, wire = connected()
        await client.ready(READY, wire)  # type: ignore[arg-type]
        one, two = Reader(), Reader()
        client.submit([request("a", n=2)], one)
        client.submit([request("b")], two)
        assert client.num_open == 3
        assert client.waiting
        client.message(b"deltas", [delta("a", 5), delta("b", 6), delta("a", 7, index=1, end=True)])
        with pytest.raises(RequestError, match="not ended"):
            client.submit([request("a")], one)
        client.message(b"deltas", [delta("a", end=True), delta("b", end=True), delta("c", 1)])
        await client.idle()
        assert client.num_open == 0
        assert not client.waiting
        assert [d.output_ids for d in one.deltas] == [(5,), (7,), ()]
        assert [d.output_ids for d in two.deltas] == [(6,), ()]
        client.submit([request("a")], one)
        assert wire.kinds() == [b"generate"] * 3

    run(body())


def test_a_lost_process_answers_everybody() -> None:
    async def body() -> None:
        client, wire = connected()
        with pytest.raises(UnavailableError):
            client.submit([request("a")], Reader())
        await client.ready(READY, wire)  # type: ignore[arg-type]
        reader = Reader()
        client.submit([request("a", n=2)], reader)
        calling = asyncio.create_task(client.call("memory_report"))
        await asyncio.sleep(0)
        client.lost("it died")
        assert [d.finish.status_code for d in reader.deltas if d.finish] == [500, 500]
        with pytest.raises(EngineError, match="it died"):
            await calling
        await client.idle()
        with pytest.raises(UnavailableError):
            client.check()
        again = Wire()
        await client.ready(READY, again)  # type: ignore[arg-type]
        client.submit([request("a")], reader)
        assert again.kinds() == [b"generate"]

    run(body())


def test_a_reader_that_leaves_ends_what_is_open_and_keeps_the_name() -> None:
    async def body() -> None:
        client, wire = connected()
        await client.ready(READY, wire)  # type: ignore[arg-type]
        reader, made = Reader(), [request("a"), request("b")]
        client.submit(made, reader)
        client.message(b"deltas", [delta("a", end=True)])
        client.leave(made)
        assert [m.rid for kind, m in wire.sent if kind == b"abort"] == ["b"]
        client.message(b"deltas", [delta("b", 9)])
        assert len(reader.deltas) == 1
        with pytest.raises(RequestError):
            client.submit([request("b")], reader)
        client.message(b"deltas", [delta("b", end=True)])
        client.submit([request("b")], reader)
        # The first reader's departure is not the second one's.
        client.leave(made)
        assert client.num_open == 1
        assert wire.kinds().count(b"abort") == 1

    run(body())


def test_output_that_cannot_be_read_ends_its_request_alone() -> None:
    async def body() -> None:
        client, wire = connected()
        await client.ready(READY, wire)  # type: ignore[arg-type]
        broken, sound = Reader(breaks_on=13), Reader()
        client.submit([request("a")], broken)
        client.submit([request("b")], sound)
        client.message(b"deltas", [delta("a", 13), delta("b", 13)])
        assert broken.failures == ["output cannot be read: UnicodeError: no text"]
        assert len(sound.deltas) == 1
        assert (b"abort", "a") in [(k, m.rid) for k, m in wire.sent if k == b"abort"]

    run(body())


def test_open_samples_are_bounded() -> None:
    async def body() -> None:
        client, wire = connected()
        await client.ready(READY, wire)  # type: ignore[arg-type]
        with pytest.raises(QueueFullError):
            client.submit([request("a", n=4000)], Reader())
        assert wire.sent == []
        assert client.num_open == 0

    run(body())


def test_updated_weights_are_read_again_before_a_new_process_serves() -> None:
    async def body() -> None:
        client, wire = connected()
        await client.ready(READY, wire)  # type: ignore[arg-type]
        updating = asyncio.create_task(client.update_weights(model_path="w", weight_version="2"))
        await asyncio.sleep(0)
        [(_, call)] = wire.sent
        client.message(b"done", CallDone(ticket=call.ticket, value="read"))
        assert await updating == "read"
        client.lost("it died")
        again = Wire()
        await client.ready(READY, again)  # type: ignore[arg-type]
        with pytest.raises(UnavailableError):
            client.check()
        [(_, call)] = again.sent
        assert (call.name, call.args["model_path"]) == ("update_weights_from_disk", "w")
        client.message(b"done", CallDone(ticket=call.ticket, value="read"))
        await asyncio.sleep(0)
        assert client.check() == READY

    run(body())


@pytest.mark.parametrize(("failure", "error"), [("request", RequestError), ("engine", EngineError)])
def test_calls_raise_what_the_engine_raised(failure: Any, error: type[Exception]) -> None:
    async def body() -> None:
        client, wire = connected()
        await client.ready(READY, wire)  # type: ignore[arg-type]
        calling = asyncio.create_task(client.call("flush_cache"))
        await asyncio.sleep(0)
        [(_, call)] = wire.sent
        client.message(b"done", CallDone(ticket=call.ticket, failure=failure, message="why"))
        with pytest.raises(error, match="why"):
            await calling

    run(body())


def test_results_are_reserved_by_what_they_can_come_to() -> None:
    plain, scored = request("a"), request("b", n=3, wanted=True, start_len=0, top_k=4)
    assert result_bytes((plain,)) == 0
    each = result_bytes((scored,)) // (3 * 4 + 2)
    assert result_bytes((scored, plain, scored)) == 2 * (3 * 4 + 2) * each
    budget = ByteBudget("results", 100)
    budget.take(60)
    with pytest.raises(QueueFullError):
        budget.take(60)
    with pytest.raises(RequestError):
        budget.take(101)
    budget.give(60)
    budget.take(100)
    assert (budget.used, budget.peak) == (100, 100)
