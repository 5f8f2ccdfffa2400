"""Messages as bytes, and the supervisor over processes that only pretend to be engines."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import numpy as np
import pytest

from seawall.core.errors import BudgetError, ConfigError, EngineError
from seawall.core.params import LogprobSpec, RequestLimits, SamplingParams
from seawall.core.step import Scores
from seawall.core.wire import FinishReason, GenerateRequest, OutputDelta
from seawall.process.codec import core_codec, front_codec
from seawall.process.launcher import LocalChild
from seawall.process.link import Link
from seawall.process.messages import Call, CallDone, Ready, StartFailed
from seawall.process.supervisor import Supervisor

READY = Ready(
    pid=1,
    model_path="demo",
    tokenizer_folder=None,
    limits=RequestLimits(
        vocab_size=10, context_length=8, max_total_tokens=8, max_top_k=2, max_token_ids=2
    ),
    random_seed=1,
    logprobs_mode="raw",
    dtype="float32",
    generation_defaults={"temperature": 0.5},
    max_running=2,
    max_queued=3,
    plan_table="",
)


# -- codec -------------------------------------------------------------------------------------


def test_requests_arrive_as_they_were() -> None:
    request = GenerateRequest(
        rid="a",
        input_ids=np.array([1, 2, 3], np.int32),
        sampling=SamplingParams(stop=("x",), logit_bias=((5, 1.5),), top_k=3),
        logprob=LogprobSpec(wanted=True, start_len=0, top_k=2, token_ids=(4,)),
        max_new_tokens=5,
        seed=2**62,
    )
    kind, found = core_codec().decode(front_codec().encode(b"generate", request))
    assert kind == b"generate"
    assert found.input_ids.dtype == np.int32
    assert found.input_ids.tolist() == [1, 2, 3]
    names = [name for name in GenerateRequest.__struct_fields__ if name != "input_ids"]
    for name in names:
        assert getattr(found, name) == getattr(request, name)


@pytest.mark.parametrize("shape", [(0, 0), (3, 0), (1, 1), (4, 7)])
def test_scores_arrive_as_they_were(shape: tuple[int, int]) -> None:
    generator = np.random.default_rng(1)
    values = generator.normal(size=shape).astype(np.float32)
    values[:1] = -np.inf
    scores = Scores(
        logprobs=generator.normal(size=shape[0]).astype(np.float32),
        top_ids=generator.integers(0, 2**40, shape),
        top_logprobs=values,
        token_logprobs=values[:, ::2],
    )
    delta = OutputDelta(
        rid="a", index=1, output_ids=(7, 8), output_scores=scores, finish=FinishReason(type="stop")
    )
    _, [found] = front_codec().decode(core_codec().encode(b"deltas", [delta]))
    assert found.output_ids == (7, 8)
    assert found.finish == delta.finish
    for name in ("logprobs", "top_ids", "top_logprobs", "token_logprobs"):
        ours, theirs = getattr(found.output_scores, name), getattr(scores, name)
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    "frames",
    [
        [b"unknown", b"\xc0"],
        [b"deltas", b"\xc0"],
        [b"deltas", b"\xff\xff"],
        [b"done", msgspec.msgpack.encode({"ticket": "x"})],
        [b"generate", b"\xc0"],
        [b"deltas"],
    ],
)
def test_what_is_no_message_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(ValueError):
        front_codec().decode(frames)


def test_arrays_of_objects_are_not_sent_or_read() -> None:
    codec = core_codec()
    with pytest.raises(AssertionError):
        codec.encode(b"done", CallDone(ticket=1, value=np.array([{}], object)))
    head = msgspec.msgpack.encode(("|O", (1,)))
    raw = msgspec.msgpack.Ext(1, len(head).to_bytes(2, "little") + head + b"\0" * 8)
    body = msgspec.msgpack.encode({"ticket": 1, "value": raw})
    with pytest.raises(ValueError, match="not sent"):
        front_codec().decode([b"done", body])


# -- supervisor --------------------------------------------------------------------------------

# What every pretended engine begins with: sockets and the codec, but no torch.
PRELUDE = """
import sys, time, os, zmq, msgspec
from seawall.process.codec import core_codec
from seawall.process.messages import *
args = msgspec.json.decode(sys.stdin.buffer.readline())
context = zmq.Context()
pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
pull.connect(sys.argv[1]); push.connect(sys.argv[2])
codec = core_codec()
ready = msgspec.msgpack.decode(bytes.fromhex(args["ready"]), type=Ready)
def say(kind, message): push.send_multipart(codec.encode(kind, message))
"""
ANSWERS = """
say(b"ready", ready)
while True:
    _, message = codec.decode(pull.recv_multipart())
    if isinstance(message, Stop): sys.exit(0)
    if message.name == "die": os._exit(9)
    if message.name == "babble": push.send_multipart([b"deltas", b"no"])
    if message.name != "hang": say(b"done", CallDone(ticket=message.ticket, value=os.getpid()))
"""


class Pretender:
    """A launcher of small scripts; the first lives run `first`, one each, then `script`."""

    def __init__(self, script: str, *first: str) -> None:
        self._script = script
        self._first = list(first)
        self.num_launched = 0

    async def launch(self, to_core: str, from_core: str) -> LocalChild:
        script = self._first.pop(0) if self._first else self._script
        self.num_launched += 1
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            PRELUDE + script,
            to_core,
            from_core,
            stdin=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        args = {"ready": msgspec.msgpack.encode(READY).hex()}
        process.stdin.write(msgspec.json.encode(args) + b"\n")
        return LocalChild(process)


class Ear:
    """A listener that writes everything down."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[object] = asyncio.Queue()
        self.link: Link | None = None
        self.waiting = False

    async def ready(self, ready: Ready, link: Link) -> None:
        self.link = link
        self.said.put_nowait(ready)

    def message(self, kind: bytes, message: Any) -> None:
        self.said.put_nowait(message)

    def lost(self, reason: str) -> None:
        self.said.put_nowait(reason)

    def ask(self, name: str) -> None:
        assert self.link is not None
        self.link.send(b"call", Call(ticket=1, name=name))


Body = Callable[[Supervisor, Ear], Coroutine[Any, Any, None]]


def supervise(pretender: Pretender, body: Body, *, hang_seconds: float = 60.0) -> None:
    async def run() -> None:
        ear = Ear()
        supervisor = Supervisor(
            pretender, ear, beat=lambda: ear.ask("hang"), hang_seconds=hang_seconds
        )
        running = asyncio.create_task(supervisor.run())
        try:
            async with asyncio.timeout(60):
                await body(supervisor, ear)
        finally:
            await supervisor.stop()
            await running
        assert supervisor.pid is None

    asyncio.run(run())


@pytest.mark.parametrize("how", ["die", "babble"])
def test_a_lost_process_is_replaced(how: str) -> None:
    pretender = Pretender(ANSWERS)

    async def body(supervisor: Supervisor, ear: Ear) -> None:
        for life in range(3):
            assert await ear.said.get() == READY
            ear.ask("pid")
            answer = await ear.said.get()
            assert isinstance(answer, CallDone)
            assert answer.value == supervisor.pid
            assert supervisor.num_restarts == life
            ear.ask(how)
            while not isinstance(said := await ear.said.get(), str):
                assert isinstance(said, CallDone)
            assert str(answer.value) in said
        assert await ear.said.get() == READY

    supervise(pretender, body)
    assert pretender.num_launched == 4


def test_a_process_that_owes_an_answer_and_is_silent_is_killed() -> None:
    async def body(supervisor: Supervisor, ear: Ear) -> None:
        assert await ear.said.get() == READY
        ear.waiting = True
        said = await ear.said.get()
        assert isinstance(said, str)
        assert "signal 9" in said
        ear.waiting = False
        assert await ear.said.get() == READY

    supervise(Pretender(ANSWERS), body, hang_seconds=0.3)


def test_a_process_that_owes_nothing_may_be_silent() -> None:
    async def body(supervisor: Supervisor, ear: Ear) -> None:
        assert await ear.said.get() == READY
        pid = supervisor.pid
        await asyncio.sleep(0.5)
        assert supervisor.pid == pid

    supervise(Pretender(ANSWERS), body, hang_seconds=0.1)


def test_a_later_start_that_fails_is_tried_again() -> None:
    pretender = Pretender(ANSWERS, ANSWERS, "sys.exit(5)")

    async def body(supervisor: Supervisor, ear: Ear) -> None:
        assert await ear.said.get() == READY
        ear.ask("die")
        assert "exit code 9" in str(await ear.said.get())
        assert "exit code 5" in str(await ear.said.get())
        assert await ear.said.get() == READY

    supervise(pretender, body)
    assert pretender.num_launched == 3


@pytest.mark.parametrize(
    ("script", "error", "words"),
    [
        ('say(b"failed", StartFailed(kind="config", message="no such model"))', ConfigError, "no"),
        (
            'say(b"failed", StartFailed(kind="budget", message="kv", table="T"))',
            BudgetError,
            "kv",
        ),
        ("sys.exit(3)", EngineError, "exit code 3"),
    ],
)
def test_the_first_start_s_failure_is_raised(
    script: str, error: type[Exception], words: str
) -> None:
    async def run() -> None:
        await Supervisor(Pretender(script), Ear(), beat=lambda: None, hang_seconds=60).run()

    with pytest.raises(error, match=words) as caught:
        asyncio.run(run())
    if isinstance(caught.value, BudgetError):
        assert caught.value.table == "T"


def test_a_listener_that_fails_ends_it_all() -> None:
    class Deaf(Ear):
        async def ready(self, ready: Ready, link: Link) -> None:
            raise ConfigError("no tokenizer")

    async def run() -> None:
        async with asyncio.timeout(60):
            await Supervisor(Pretender(ANSWERS), Deaf(), beat=lambda: None, hang_seconds=60).run()

    with pytest.raises(ConfigError, match="no tokenizer"):
        asyncio.run(run())


def test_failures_are_messages() -> None:
    failed = StartFailed(kind="budget", message="m", table="t")
    assert front_codec().decode(core_codec().encode(b"failed", failed)) == (b"failed", failed)
